"""Metadata: equal to the original in everything, also what == does not look at."""

from __future__ import annotations

import pickle
import random
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from planner.errors import PayloadError, UnencodableError, WireError
from planner.wire.columns import pack_ints
from planner.wire.frame import Kind, decode_message, encode_message
from planner.wire.metadata import decode_metadata, encode_metadata
from tests import strategies

QUICK = settings(max_examples=40, deadline=None, derandomize=True)


class OwnMetadata(Metadata):
    pass


def typical(num_names=3, num_ranks=4):
    names = [f"layers.{number}.weight" for number in range(num_names)]
    state = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=torch.bfloat16),
            torch.Size([num_ranks * 8, 4]),
            [
                ChunkStorageMetadata(torch.Size([rank * 8, 0]), torch.Size([8, 4]))
                for rank in range(num_ranks)
            ],
        )
        for name in names
    }
    state["step"] = BytesStorageMetadata()
    storage = {
        MetadataIndex(name, torch.Size([rank * 8, 0]), rank): _StorageInfo(
            f"__{rank}_0.distcp", number * 64, 64
        )
        for rank in range(num_ranks)
        for number, name in enumerate(names)
    }
    storage[MetadataIndex("step")] = _StorageInfo("__0_1.distcp", 0, 10)
    return Metadata(state, {name: (name,) for name in state}, storage, StorageMeta("/ckpt", "s", "l"), "1.0")


def hint_of(key):
    return key.index if isinstance(key, MetadataIndex) else None


def check_same(found, metadata):
    assert found == metadata
    assert type(found) is type(metadata)
    assert list(vars(found)) == list(vars(metadata))
    for name in ("state_dict_metadata", "storage_data", "planner_data"):
        one, other = getattr(found, name), getattr(metadata, name)
        if isinstance(other, dict):
            assert list(one.items()) == list(other.items())
            assert [hint_of(key) for key in one] == [hint_of(key) for key in other]
    if isinstance(metadata.storage_data, dict):
        expected = pickle.loads(pickle.dumps(list(metadata.storage_data.values())))
        for one, other in zip(found.storage_data.values(), expected, strict=True):
            assert getattr(one, "__dict__", None) == getattr(other, "__dict__", None)


@QUICK
@given(strategies.metadata())
def test_metadata_comes_back_without_pickle(metadata):
    check_same(decode_metadata(encode_metadata(metadata, strict=True)), metadata)


def test_metadata_of_many_ranks_is_small():
    metadata = typical(50, 16)
    frame = encode_metadata(metadata, strict=True)
    check_same(decode_metadata(frame), metadata)
    assert len(frame) < len(pickle.dumps(metadata)) / 20


def test_decoded_metadata_pickles_to_an_equal_one():
    found = decode_metadata(encode_metadata(typical(), strict=True))
    check_same(pickle.loads(pickle.dumps(found)), typical())


def test_attributes_that_older_pickles_lack_stay_missing():
    metadata = typical()
    del metadata.__dict__["version"]
    del metadata.storage_meta.__dict__["modules"]
    found = decode_metadata(encode_metadata(metadata, strict=True))
    assert "version" not in vars(found)
    assert "modules" not in vars(found.storage_meta)
    assert list(vars(found)) == list(vars(metadata))


@pytest.mark.parametrize(
    "change",
    [
        {"state_dict_metadata": {3: BytesStorageMetadata()}},
        {"state_dict_metadata": {"w": "whatever", "v": BytesStorageMetadata()}, "storage_data": {}},
        {"storage_data": {"w": _StorageInfo("p", 0, 1)}},
        {"storage_data": {MetadataIndex("elsewhere"): _StorageInfo("p", 0, 1)}},
        {"storage_data": {MetadataIndex("step"): "not a storage info"}},
        {"storage_data": None, "planner_data": [1, "x"], "storage_meta": None},
    ],
    ids=["names", "entries", "keys", "indices", "infos", "planner data"],
)
def test_what_does_not_fit_columns_travels_as_objects(change):
    metadata = Metadata(**(vars(typical()) | change))
    check_same(decode_metadata(encode_metadata(metadata, strict=True)), metadata)


def test_a_scalar_with_any_number_of_chunks_comes_back():
    chunks = [ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
    for num_chunks in (0, 1, 3, 2000):
        entry = TensorStorageMetadata(TensorProperties(), torch.Size([]), chunks * num_chunks)
        check_same(
            decode_metadata(encode_metadata(Metadata({"s": entry}), strict=True)), Metadata({"s": entry})
        )


def test_subclasses_travel_as_objects():
    metadata = OwnMetadata({"step": BytesStorageMetadata()})
    check_same(decode_metadata(encode_metadata(metadata, strict=False)), metadata)
    with pytest.raises(UnencodableError):
        encode_metadata(metadata, strict=True)
    with pytest.raises(PayloadError):
        decode_metadata(encode_message(Kind.METADATA, [1, "no metadata"]))


def test_counts_that_lie_are_refused_before_they_allocate():
    tree = decode_message(encode_metadata(typical(), strict=True), Kind.METADATA)
    columns = tree[2]["state_dict_metadata"][1]
    lies = [
        columns | {"num_chunks": pack_ints([2**62, 1, 1])},
        columns | {"num_chunks": pack_ints([2**40, 0, 0]), "num_dims": pack_ints([0, 2, 2])},
        columns | {"num_dims": pack_ints([255, 255, 255])},
    ]
    tracemalloc.start()
    try:
        for lie in lies:
            tree[2]["state_dict_metadata"] = [0, lie]
            with pytest.raises(PayloadError):
                decode_metadata(encode_message(Kind.METADATA, tree))
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_whole_frames_with_any_wrong_payload_give_metadata_or_a_wire_error():
    rng = random.Random(6)
    metadata = typical()
    metadata.state_dict_metadata["odd"] = "odd"
    tree = decode_message(encode_metadata(metadata, strict=True), Kind.METADATA)
    num_refused = 0
    for _ in range(700):
        try:
            found = decode_metadata(encode_message(Kind.METADATA, strategies.mutated(tree, rng)))
        except WireError:
            num_refused += 1
        else:
            assert isinstance(found, Metadata)
    assert num_refused > 300
