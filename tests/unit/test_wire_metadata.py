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
from planner.wire.frame import Kind, decode_message, digest, encode_message
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
    parts = encode_metadata(metadata, strict=True)
    check_same(decode_metadata(parts), metadata)
    assert sum(map(len, parts)) < len(pickle.dumps(metadata)) / 20


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


KINDS_OF_PARTS = (Kind.METADATA_STATE, Kind.METADATA_STORAGE, Kind.METADATA)


def trees_of(metadata):
    parts = encode_metadata(metadata, strict=True)
    return [decode_message(part, kind) for part, kind in zip(parts, KINDS_OF_PARTS, strict=True)]


def parts_of(trees):
    """Put trees into frames; the head names the others by what they are now."""
    state, storage = (
        encode_message(kind, tree) for kind, tree in zip(KINDS_OF_PARTS, trees[:2], strict=False)
    )
    head = trees[2]
    if isinstance(head, list) and len(head) == 5:
        head = [*head[:3], digest(state), digest(storage)]
    return state, storage, encode_message(Kind.METADATA, head)


def test_counts_that_lie_are_refused_before_they_allocate():
    trees = trees_of(typical())
    columns = trees[0][1]
    (num_dims, _, sizes, _, *chunks) = columns["layouts"][0]
    many = [pack_ints([0] * 50_000)] * 2
    lies = [
        (0, columns | {"layouts": [[num_dims, 1, sizes, pack_ints([2**62]), *chunks]]}),
        (0, columns | {"layouts": [[0, 1, [], pack_ints([2**40]), [], []]]}),
        (0, columns | {"layouts": [[2, 2**40, sizes, pack_ints([4]), *chunks]]}),
        # One layout of many chunks, had by many tensors.
        (
            0,
            columns
            | {
                "names": [str(number) for number in range(50_000)],
                "kinds": b"\x01" * 50_000,
                "property_numbers": pack_ints([0] * 50_000),
                "layout_numbers": pack_ints([0] * 50_000),
                "layouts": [[2, 1, [pack_ints([1])] * 2, pack_ints([50_000]), many, many]],
            },
        ),
        (1, trees[1][1] | {"num_runs": 1, "counts": pack_ints([2**40])}),
        (1, trees[1][1] | {"num_runs": 2**40}),
    ]
    tracemalloc.start()
    try:
        for part, lie in lies:
            changed = list(trees)
            changed[part] = [0, lie, *trees[part][2:]]
            with pytest.raises(PayloadError):
                decode_metadata(parts_of(changed))
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_a_state_with_more_chunks_than_its_bytes_could_hold_comes_back_all_the_same(monkeypatch):
    monkeypatch.setattr("planner.wire.metadata.MAX_EXPANSION", 4)
    entry = TensorStorageMetadata(
        TensorProperties(),
        torch.Size([]),
        [ChunkStorageMetadata(torch.Size([]), torch.Size([]))] * 5000,
    )
    parts = encode_metadata(Metadata({"s": entry}), strict=True)
    assert len(decode_metadata(parts).state_dict_metadata["s"].chunks) == 5000


def test_whole_frames_with_any_wrong_payload_give_metadata_or_a_wire_error():
    rng = random.Random(6)
    metadata = typical()
    metadata.state_dict_metadata["odd"] = "odd"
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]
    metadata.storage_data = {
        MetadataIndex(index.fqn, index.offset, 7 if number == 3 else index.index): info
        for number, (index, info) in enumerate(metadata.storage_data.items())
    }
    trees = trees_of(metadata)
    num_refused = 0
    for _ in range(2000):
        changed = list(trees)
        part = rng.randrange(3)
        changed[part] = strategies.mutated(trees[part], rng)
        try:
            found = decode_metadata(parts_of(changed))
        except WireError:
            num_refused += 1
        else:
            assert isinstance(found, Metadata)
    assert num_refused > 900


def test_parts_of_different_metadata_are_refused():
    first = encode_metadata(typical(), strict=True)
    second = encode_metadata(typical(5), strict=True)
    for parts in ((second[0], *first[1:]), (first[0], second[1], first[2]), first[:2], first[2:], ()):
        with pytest.raises(WireError):
            decode_metadata(parts)


def test_parts_change_only_with_what_they_hold():
    first = encode_metadata(typical(), strict=True)
    other_save = typical()
    other_save.storage_meta.save_id = "another"
    assert encode_metadata(other_save, strict=True)[:2] == first[:2]
    longer = typical()
    longer.storage_data[MetadataIndex("step")].length = 11
    found = encode_metadata(longer, strict=True)
    assert found[0] == first[0]
    assert found[1] != first[1]


def test_equal_sizes_names_and_offsets_are_one_object_after_decoding():
    found = decode_metadata(encode_metadata(typical(), strict=True))
    chunks = found.state_dict_metadata["layers.0.weight"].chunks
    others = found.state_dict_metadata["layers.1.weight"].chunks
    assert chunks[1].offsets is others[1].offsets
    assert chunks[1] is not others[1]
    names = {name: name for name in found.state_dict_metadata}
    for index, info in found.storage_data.items():
        assert names[index.fqn] is index.fqn
        if index.offset is not None:
            assert any(chunk.offsets is index.offset for chunk in chunks)
        assert sum(info.relative_path is other.relative_path for other in found.storage_data.values()) >= (
            3 if index.offset else 1
        )
