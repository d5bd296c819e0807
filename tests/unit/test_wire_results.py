"""Write results: each comes back with its hint, in order, or is refused."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from planner.errors import PayloadError, UnencodableError, WireError
from planner.wire.frame import Kind, decode_message, encode_message
from planner.wire.results import decode_results, encode_results
from tests import strategies

QUICK = settings(max_examples=40, deadline=None, derandomize=True)


class OwnResult(WriteResult):
    pass


def plan_of(num_items, hint=3):
    return SavePlan(
        [
            WriteItem(MetadataIndex(f"w{number}", torch.Size([number, 0]), hint), WriteItemType.SHARD)
            for number in range(num_items)
        ]
    )


def results_of(plan, path="__3_0.distcp", length=100):
    return [
        WriteResult(item.index, length, _StorageInfo(path, number * length, length))
        for number, item in enumerate(plan.items)
    ]


def check_same(found, results):
    assert found == results
    assert [result.index.index for result in found] == [result.index.index for result in results]
    expected = pickle.loads(pickle.dumps(results))
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)
        assert getattr(one.storage_data, "__dict__", None) == getattr(other.storage_data, "__dict__", None)


@QUICK
@given(st.data())
def test_results_come_back_in_order_with_their_hints_without_pickle(data):
    plan = data.draw(strategies.plans())
    results = data.draw(strategies.results_of(plan))
    check_same(decode_results(encode_results(results, plan, strict=True), plan), results)
    check_same(decode_results(encode_results(results, None, strict=True), None), results)


def test_results_in_the_order_of_the_writer_and_in_many_files_are_small():
    plan = plan_of(2000)
    results = results_of(plan)
    assert len(encode_results(results, plan, strict=True)) < 512
    random.Random(1).shuffle(results)
    frame = encode_results(results, plan, strict=True)
    check_same(decode_results(frame, plan), results)


def test_transform_descriptors_come_back_each_list_its_own():
    plan = plan_of(3)
    results = [
        WriteResult(item.index, 1, _StorageInfo("p", 0, 1, descriptors))
        for item, descriptors in zip(plan.items, (["zstd", "aes"], None, ["zstd", "aes"]), strict=True)
    ]
    found = decode_results(encode_results(results, plan, strict=True), plan)
    check_same(found, results)
    found[0].storage_data.transform_descriptors.append("x")
    assert found[2] == results[2]


def test_a_result_whose_hint_differs_from_its_item_keeps_its_own():
    plan = plan_of(2)
    results = [WriteResult(MetadataIndex("w0", [0, 0], 9), 1, _StorageInfo("p", 0, 1)), results_of(plan)[1]]
    check_same(decode_results(encode_results(results, plan, strict=True), plan), results)


def test_what_is_no_list_of_write_results_is_unencodable_and_says_where():
    for results, path in ((None, "results"), ((), "results"), ([results_of(plan_of(1))[0], 7], "results[1]")):
        with pytest.raises(UnencodableError, match="WriteResult") as caught:
            encode_results(results, None, strict=False)
        assert caught.value.path == path


def test_subclasses_of_write_result_travel_as_objects():
    results = [OwnResult(MetadataIndex("w"), 1, None)]
    check_same(decode_results(encode_results(results, None, strict=False), None), results)
    with pytest.raises(UnencodableError):
        encode_results(results, None, strict=True)


def test_results_for_another_plan_are_refused():
    plan = plan_of(3)
    frame = encode_results(results_of(plan), plan, strict=True)
    for other in (plan_of(2), None, SavePlan([None] * 3)):
        with pytest.raises(PayloadError):
            decode_results(frame, other)


def test_whole_frames_with_any_wrong_payload_give_results_or_a_wire_error():
    rng = random.Random(5)
    plan = plan_of(4)
    results = [*results_of(plan)[1:], WriteResult(MetadataIndex("odd"), 2**70, None)]
    results[0].storage_data.transform_descriptors = ["zstd"]
    tree = decode_message(encode_results(results, plan, strict=True), Kind.WRITE_RESULTS)
    num_refused = 0
    for _ in range(700):
        try:
            found = decode_results(encode_message(Kind.WRITE_RESULTS, strategies.mutated(tree, rng)), plan)
        except WireError:
            num_refused += 1
        else:
            assert all(isinstance(result, WriteResult) for result in found)
    assert num_refused > 300
