"""Plans: whatever a planner made comes back equal, hints and order included, or is refused."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from planner.errors import FrameError, PayloadError, UnencodableError, WireError
from planner.wire.final_plans import decode_final_plan, encode_final_plan
from planner.wire.frame import Kind, decode_message, digest, encode_message
from planner.wire.plans import (
    decode_load_plan,
    decode_plan,
    decode_plan_body,
    decode_schema,
    encode_load_plan,
    encode_plan,
)
from tests import strategies

QUICK = settings(max_examples=40, deadline=None, derandomize=True)


class OwnItem(WriteItem):
    pass


class OwnPlan(SavePlan):
    pass


def shard(name="w", row=0, hint=None, rows=8):
    offsets, sizes = torch.Size([row, 0]), torch.Size([rows, 4])
    tensor_data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=torch.bfloat16), torch.Size([64, 4])
    )
    return WriteItem(MetadataIndex(name, offsets, hint), WriteItemType.SHARD, tensor_data=tensor_data)


def typical(num_items=50, row=0):
    names = [f"model.layers.{number}.weight" for number in range(num_items)]
    return SavePlan([shard(name, row) for name in names], None, {name: (name,) for name in names})


def fields_of(plan):
    """Return all of a plan, hints and the order of mappings too, which == does not look at."""
    planner_data = plan.planner_data
    return (
        plan,
        type(plan),
        [(type(item), getattr(getattr(item, "index", None), "index", None)) for item in plan.items],
        list(planner_data.items()) if isinstance(planner_data, dict) else planner_data,
    )


def check_same(found, plan):
    assert fields_of(found) == fields_of(plan)
    again = pickle.loads(pickle.dumps(found))
    assert fields_of(again) == fields_of(plan)


@QUICK
@given(strategies.plans())
def test_a_plan_comes_back_without_pickle(plan):
    check_same(decode_plan(*encode_plan(plan, strict=True)), plan)


@QUICK
@given(strategies.plans(strategies.ITEMS | strategies.odd_items()))
def test_a_plan_with_odd_items_comes_back(plan):
    found = decode_plan(*encode_plan(plan, strict=True))
    check_same(found, plan)
    for one, other in zip(found.items, plan.items, strict=True):
        if one.tensor_data is not None and one.tensor_data.chunk is not None:
            assert type(one.tensor_data.chunk.offsets) is type(other.tensor_data.chunk.offsets)


@QUICK
@given(strategies.plans(strategies.ITEMS | strategies.odd_items()))
def test_equal_plans_give_equal_bytes_and_a_decoded_one_gives_the_same(plan):
    frames = encode_plan(plan, strict=True)
    assert encode_plan(pickle.loads(pickle.dumps(plan)), strict=True) == frames
    assert encode_plan(decode_plan(*frames), strict=True) == frames


@QUICK
@given(strategies.plans(), strategies.HINTS)
def test_plans_that_differ_in_a_hint_alone_have_other_bytes(plan, hint):
    if not plan.items or plan.items[0].index.index == hint:
        return
    item = plan.items[0]
    index = MetadataIndex(item.index.fqn, item.index.offset, hint)
    other = dataclasses.replace(plan, items=[dataclasses.replace(item, index=index), *plan.items[1:]])
    assert encode_plan(other, strict=True)[1] != encode_plan(plan, strict=True)[1]


def test_subclasses_and_extra_attributes_travel_as_objects():
    item = shard()
    own_item = OwnItem(item.index, item.type, None, item.tensor_data)
    more = shard("more")
    object.__setattr__(more, "note", 1)
    plan = SavePlan([item, own_item, more], None, None)
    found = decode_plan(*encode_plan(plan, strict=False))
    check_same(found, plan)
    assert found.items[2].note == 1
    own_plan = OwnPlan([item], "s", "p", usable=False)
    check_same(decode_plan(*encode_plan(own_plan, strict=False)), own_plan)
    for refused, path in ((plan, "plan.items[1]"), (own_plan, "plan")):
        with pytest.raises(UnencodableError) as caught:
            encode_plan(refused, strict=True)
        assert caught.value.path == path


@pytest.mark.parametrize(
    "storage_data",
    [
        None,
        _StoragePrefix("__3_"),
        {},
        {"fqn_to_index_mapping": {f"w{number}": number for number in range(40)}, "shard_index": 3},
        {"shard_index": 3, "fqn_to_index_mapping": {"w": 1}},
        {"w": 1, "v": 2},
    ],
)
def test_storage_data_of_every_writer_of_dcp_comes_back_without_pickle(storage_data):
    plan = SavePlan([shard()], storage_data, {"w": ("w",)})
    found = decode_plan(*encode_plan(plan, strict=True))
    assert found == plan
    if isinstance(storage_data, dict):
        assert list(found.storage_data) == list(storage_data)


def test_the_mapping_that_huggingface_repeats_on_all_ranks_is_in_the_schema():
    mapping = {f"layer.{number}": number for number in range(100)}
    frames = [
        encode_plan(
            SavePlan([shard(row=rank)], {"fqn_to_index_mapping": mapping, "shard_index": rank}), strict=True
        )
        for rank in range(2)
    ]
    assert frames[0][0] == frames[1][0]
    assert frames[0][1] != frames[1][1]
    assert len(frames[0][1]) < 300


def test_ranks_that_hold_other_rows_share_a_schema():
    schemas = {encode_plan(typical(row=row * 8), strict=True)[0] for row in range(4)}
    assert len(schemas) == 1


def test_plans_of_one_schema_share_nothing_that_can_change():
    schema, body = encode_plan(typical(), strict=True)
    decoded = decode_schema(schema)
    one, other = (decode_plan_body(decoded, body) for _ in range(2))
    assert one.planner_data is not other.planner_data
    one.planner_data.clear()
    one.items[0].tensor_data.properties.dtype = torch.int8
    one.items[0].tensor_data.chunk.sizes = torch.Size([1])
    assert other == typical()
    assert decode_plan_body(decoded, body) == typical()
    assert one.items[1:] == other.items[1:]


def test_the_offset_of_an_index_is_the_offset_of_its_chunk_as_in_torch():
    (item,) = decode_plan(*encode_plan(SavePlan([shard()]), strict=True)).items
    assert item.index.offset is item.tensor_data.chunk.offsets


def test_a_body_with_the_schema_of_other_plans_is_refused():
    schema, body = encode_plan(typical(3), strict=True)
    other_schema, _ = encode_plan(typical(4), strict=True)
    with pytest.raises(PayloadError, match=digest(schema).hex()):
        decode_plan(other_schema, body)
    with pytest.raises(FrameError):
        decode_plan(body, schema)


@pytest.mark.parametrize("num_dims", range(9))
def test_every_number_of_dimensions_comes_back(num_dims):
    sizes = torch.Size(range(1, num_dims + 1))
    item = WriteItem(
        MetadataIndex("w", sizes),
        WriteItemType.TENSOR,
        tensor_data=TensorWriteData(ChunkStorageMetadata(sizes, sizes), TensorProperties(), sizes),
    )
    check_same(decode_plan(*encode_plan(SavePlan([item] * 2), strict=True)), SavePlan([item] * 2))


def test_a_typical_plan_is_small():
    schema, body = encode_plan(typical(2000, row=8), strict=True)
    assert len(body) < 1024
    assert len(schema) < 20 * 1024


@QUICK
@given(strategies.plans(strategies.ITEMS | strategies.odd_items()), st.data())
def test_a_final_plan_comes_back_from_what_differs(base, data):
    kept = data.draw(st.lists(st.sampled_from(base.items), unique_by=id)) if base.items else []
    items = []
    for item in kept:
        if data.draw(st.booleans()) and isinstance(item.index, MetadataIndex):
            index = MetadataIndex(item.index.fqn, item.index.offset, data.draw(strategies.HINTS))
            item = dataclasses.replace(item, index=index)  # noqa: PLW2901
        items.append(item)
    if data.draw(st.booleans()):
        items.insert(data.draw(st.integers(0, len(items))), data.draw(strategies.ITEMS))
    plan = dataclasses.replace(
        base,
        items=items,
        storage_data=data.draw(st.just(base.storage_data) | strategies.PLAIN),
        planner_data=data.draw(st.just(base.planner_data) | strategies.MAPPINGS),
    )
    received = decode_plan(*encode_plan(base, strict=True))
    for sent_base in (base, received):
        check_same(decode_final_plan(encode_final_plan(plan, sent_base, strict=True), base), plan)


def test_a_final_plan_of_all_items_with_new_hints_is_small_and_one_of_none_too():
    base = typical(2000)
    hinted = [
        dataclasses.replace(item, index=dataclasses.replace(item.index, index=77)) for item in base.items
    ]
    plan = dataclasses.replace(base, items=hinted, storage_data=_StoragePrefix("__77_"))
    frame = encode_final_plan(plan, base, strict=True)
    assert len(frame) < 512
    found = decode_final_plan(frame, base)
    check_same(found, plan)
    found.items[0].tensor_data.properties.dtype = torch.int8
    found.planner_data.clear()
    assert base == typical(2000)
    nothing = dataclasses.replace(base, items=[])
    check_same(decode_final_plan(encode_final_plan(nothing, base, strict=True), base), nothing)


def test_reordered_doubled_and_altered_items_come_back_in_order():
    base = typical(6)
    altered = copy.deepcopy(base.items[4])
    altered.tensor_data.properties.requires_grad = True
    items = [base.items[index] for index in (3, 1, 1, 5, 0)]
    plan = dataclasses.replace(base, items=[*items, altered], usable=False)
    check_same(decode_final_plan(encode_final_plan(plan, base, strict=True), base), plan)


def test_planner_data_in_another_order_is_not_taken_for_the_same():
    base = typical(6)
    plan = dataclasses.replace(base, planner_data=dict(reversed(base.planner_data.items())))
    check_same(decode_final_plan(encode_final_plan(plan, base, strict=True), base), plan)


def test_a_final_plan_for_another_base_is_refused():
    base = typical(6)
    frame = encode_final_plan(base, base, strict=True)
    for other in (typical(5), SavePlan([None] * 6)):
        with pytest.raises(PayloadError):
            decode_final_plan(frame, other)


def test_a_final_plan_of_another_class_comes_back_whole():
    base = typical(2)
    plan = OwnPlan(base.items, "s")
    check_same(decode_final_plan(encode_final_plan(plan, base, strict=False), base), plan)


def test_a_load_plan_comes_back_without_pickle():
    index = MetadataIndex("w", [0, 0], 1)
    size = torch.Size([0, 0])
    plan = LoadPlan(
        [ReadItem(LoadItemType.TENSOR, index, size, index, size, torch.Size([1, 2]))], None, {"a": 1}
    )
    found = decode_load_plan(encode_load_plan(plan, strict=True))
    assert found == plan
    assert found.items[0].dest_index.index == 1
    with pytest.raises(PayloadError):
        decode_load_plan(encode_message(Kind.LOAD_PLAN, [1]))


@pytest.mark.parametrize("part", range(3))
def test_whole_frames_with_any_wrong_payload_give_a_plan_or_a_wire_error(part):
    rng = random.Random(part)
    base = SavePlan(
        [shard("a.b", 8, 3), shard("c"), WriteItem(MetadataIndex("d"), WriteItemType.BYTE_IO), shard("e")],
        {"big": {str(number): number for number in range(20)}, "s": 1},
        {"a.b": ("a", "b"), "c": ("x",), "9": (9,)},
    )
    odd = dataclasses.replace(base.items[1], tensor_data=None)
    plan = dataclasses.replace(base, items=[*base.items, odd])
    schema, body = encode_plan(plan, strict=True)
    final = encode_final_plan(plan, base, strict=True)
    kinds = (Kind.PLAN_SCHEMA, Kind.PLAN_BODY, Kind.FINAL_PLAN)
    tree = decode_message((schema, body, final)[part], kinds[part])
    num_refused = 0
    for _ in range(700):
        changed = strategies.mutated(tree, rng)
        frame = encode_message(kinds[part], changed)
        try:
            if part == 0:
                # The body names the schema; a hostile peer would write the digest of its own.
                own = decode_message(body, Kind.PLAN_BODY) | {"schema": digest(frame)}
                found = decode_plan(frame, encode_message(Kind.PLAN_BODY, own))
            elif part == 1:
                found = decode_plan(schema, frame)
            else:
                found = decode_final_plan(frame, base)
        except WireError:
            num_refused += 1
        else:
            assert isinstance(found, SavePlan)
    assert num_refused > 300
