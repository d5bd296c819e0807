"""Results and metadata in columns are what the general way gives, also when remembered."""

from __future__ import annotations

import dataclasses
import io
import pickle
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

import planner.metadata_file
import planner.plain_finish
from planner.column_plans import LocalPlans, PlanFrames
from planner.pending import is_pending
from planner.plain_finish import plain_finish_of
from planner.save_columns import DamagedResults, read_results
from planner.wire.final_plans import decode_final_plan
from planner.wire.metadata import decode_metadata, encode_metadata
from planner.wire.plans import encode_plan
from planner.wire.results import encode_results
from tests import strategies
from tests.support.states import build_metadata
from tests.unit.test_global_plan import check_like_torch, tensor_item, worlds
from tests.unit.test_wire_metadata import check_same

SETTINGS = {"to_lowest_rank": False, "merges_mappings": True}


def plan(plans, remembered=None):
    local = LocalPlans(PlanFrames([encode_plan(own, strict=True) for own in plans]), 0, plans[0], remembered)
    try:
        on_columns = local.plan_globally(**SETTINGS)
    except Exception:  # noqa: BLE001 - an invalid world, which test_global_plan is about
        on_columns = None
    return local, on_columns


def finals_of(plans, local, final_plans):
    """Return the final plans as ranks get them, and what travels for them."""
    given = [
        dataclasses.replace(own, storage_data=own.storage_data or _StoragePrefix(f"__{rank}_"))
        for rank, own in enumerate(final_plans)
    ]
    frames = [own.items.encode(own, path="plan", strict=True) for own in given]
    made = [decode_final_plan(frame, base) for frame, base in zip(frames, plans, strict=True)]
    return given, frames, made


def finish(metadata, results):
    """Do what FileSystemWriter.finish does to metadata."""
    metadata.version = "1.0.0"
    storage_md = {}
    for own in results:
        storage_md.update({result.index: result.storage_data for result in own})
    metadata.storage_data = storage_md
    metadata.storage_meta = StorageMeta("/ckpt", "save")


@st.composite
def results_of_rank(draw, rank, items):
    how = draw(st.sampled_from(["in order", "in order", "shuffled", "some", "odd files", "twice"]))
    items = list(items)
    if how == "shuffled":
        items = draw(st.permutations(items))
    if how == "some":
        items = [item for item in items if draw(st.booleans())]
    if how == "twice" and items:
        items.append(items[0])
    results, offset = [], 0
    for item in items:
        length = draw(st.sampled_from([64, 64, 65, 2**40]))
        info = _StorageInfo(f"__{rank}_0.distcp", offset, length)
        offset += length
        if how == "odd files":
            info = draw(strategies.storage_infos())
        results.append(WriteResult(item.index, length + 1, info))
    return results


@settings(max_examples=max(60, settings.default.max_examples // 3))
@given(worlds(), st.data())
def test_results_and_metadata_are_those_of_the_general_way_also_when_remembered(plans, data):
    local, on_columns = plan(plans)
    if on_columns is None:
        return
    given_plans, frames, made = finals_of(plans, local, on_columns[0])
    results = [data.draw(results_of_rank(rank, own.items)) for rank, own in enumerate(made)]
    result_frames = [
        encode_results(own, base, strict=True) if own else None
        for own, base in zip(results, made, strict=True)
    ]
    outcome = local.planned.outcome
    lists = read_results(local.planned, result_frames, b"digest", None)
    if lists is None:
        is_odd = any(abs(info.offset) > 2**62 for own in results for info in map(storage_of, own))
        assert outcome.bytes_have_hints or is_odd
        return
    check_results(lists, results)
    assert is_pending(on_columns[1])
    expected = build_metadata(outcome)
    finish(expected, results)
    keys = [result.index for own in results for result in own]
    assert lists.can_write_metadata() == (len(set(keys)) == len(keys))
    if not lists.can_write_metadata():
        return
    check_written(lists, expected)

    parts = lists.encode_metadata(expected, strict=True)
    check_same(decode_metadata(parts), expected)
    check_same(decode_metadata(encode_metadata(expected, strict=True)), expected)
    remembered = local.to_remember(given_plans, frames)
    assert (remembered is None) == any(own.storage_data is not None for own in plans)
    if remembered is not None:
        check_second(plans, remembered, frames, result_frames, results, parts)


def check_written(lists, expected):
    """Check that what is pickled from columns reads as if its objects had been made and pickled."""
    stock = pickle.dumps(expected)
    expected = pickle.loads(stock)
    written = b"".join(lists.metadata_pieces(vars(expected)))
    with (
        mock.patch.object(planner.metadata_file, "_NUM_RECORDS", 3),
        mock.patch.object(planner.metadata_file, "_PIECE_NBYTES", 100),
    ):
        in_small_pieces = b"".join(lists.metadata_pieces(vars(expected)))
    assert looked_up(written) <= looked_up(stock) | CLASSES
    for data in (written, in_small_pieces):
        for load in (pickle.loads, pickle._loads):  # in C, and in Python
            found = load(data)
            check_same(found, expected)
            check_unshared(found)


# Looked up also where there are none of these objects.
CLASSES = {
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata),
    *(_StorageInfo, torch.Size),
}


def looked_up(data):
    """Return what a pickle looks up by name."""
    found = set()

    class Noting(pickle.Unpickler):
        def find_class(self, module, name):
            value = super().find_class(module, name)
            found.add(value)
            return value

    Noting(io.BytesIO(data)).load()
    return found


def check_unshared(metadata):
    """Check that no two places have one object that somebody might change."""
    entries = list(metadata.state_dict_metadata.values())
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    chunks = [chunk for entry in tensors for chunk in entry.chunks]
    infos = list(metadata.storage_data.values())
    lists = [info.transform_descriptors for info in infos if info.transform_descriptors is not None]
    for objects in (
        *(entries, [entry.properties for entry in tensors], [entry.chunks for entry in tensors]),
        *(chunks, infos, lists, list(metadata.storage_data)),
    ):
        assert len(set(map(id, objects))) == len(objects)


def storage_of(result):
    return result.storage_data


def check_results(lists, results):
    assert [list(own) for own in lists] == results
    assert len(lists) == len(results)
    for rank, own in enumerate(results):
        assert lists[rank] == own
        for one, other in zip(lists[rank], own, strict=True):
            assert one.index.index == other.index.index
            assert one.size_in_bytes == other.size_in_bytes
            assert type(one) is WriteResult


def check_second(plans, remembered, frames, result_frames, results, parts):
    local, on_columns = plan(plans, remembered)
    final_plans, metadata = on_columns
    assert local.planned.remembered is remembered
    given_plans, again, _ = finals_of(plans, local, final_plans)
    assert again == frames
    assert local.to_remember(given_plans, again) == remembered
    lists = read_results(local.planned, result_frames, b"digest", parts[1])
    check_results(lists, results)
    rest = Metadata({})
    finish(rest, [])
    found = lists.encode_metadata(rest, strict=True)
    assert found == parts
    assert found[0] is parts[0]
    finish(metadata, lists)
    check_written(lists, metadata)
    # Nothing so far had to plan again; what looks inside has, and finds the same.
    assert "outcome" not in vars(local.planned)
    assert [list(own.items) for own in final_plans] == [
        local.planned.outcome.build_plan(rank).items for rank in range(len(plans))
    ]
    other = plan(plans)[0]
    fresh = read_results(other.planned, result_frames, b"digest", None)
    check_results(fresh, results)


def small():
    plans = [
        SavePlan(
            [tensor_item(name, (rank * 2,), (2,), (4,)) for name in ("a", "b")],
            planner_data={"a": ("a",), "b": ("b",)},
        )
        for rank in range(2)
    ]
    local, (final_plans, metadata) = plan(plans)
    _, _, made = finals_of(plans, local, final_plans)
    results = [
        [
            WriteResult(item.index, 8, _StorageInfo(f"__{rank}_0.distcp", 8 * number, 8))
            for number, item in enumerate(own.items)
        ]
        for rank, own in enumerate(made)
    ]
    frames = [encode_results(own, base, strict=True) for own, base in zip(results, made, strict=True)]
    return local.planned, metadata, frames


def test_metadata_that_nobody_looked_at_travels_as_it_was_planned():
    planned, metadata, frames = small()
    parts = read_results(planned, frames, b"", None).encode_metadata(None, strict=True)
    assert is_pending(metadata)
    found = decode_metadata(parts)
    assert found.storage_data is None
    check_same(found, build_metadata(planned.outcome))


def test_what_is_made_shares_names_paths_and_offsets_and_so_pickles_smaller():
    planned, metadata, frames = small()
    finish(metadata, read_results(planned, frames, b"", None))
    names = {id(name) for name in metadata.state_dict_metadata}
    offsets = {id(chunk.offsets) for entry in metadata.state_dict_metadata.values() for chunk in entry.chunks}
    assert all(id(index.fqn) in names and id(index.offset) in offsets for index in metadata.storage_data)
    assert len({id(info.relative_path) for info in metadata.storage_data.values()}) == 2
    apart = Metadata(
        metadata.state_dict_metadata,
        metadata.planner_data,
        {
            pickle.loads(pickle.dumps(index)): pickle.loads(pickle.dumps(info))
            for index, info in metadata.storage_data.items()
        },
        metadata.storage_meta,
        metadata.version,
    )
    assert apart == metadata
    assert len(pickle.dumps(metadata)) < len(pickle.dumps(apart))


def test_damaged_results_name_their_rank():
    planned, _, frames = small()
    for damaged in (frames[0][:-1], b"", encode_results([], None, strict=True)):
        with pytest.raises(DamagedResults) as caught:
            read_results(planned, [frames[0], damaged], b"", None)
        assert list(caught.value.damaged) == [1]


def test_results_that_no_column_holds_are_left_to_the_general_way():
    planned, _, frames = small()
    base = SavePlan([], None, None)
    assert read_results(planned, [frames[0], None], b"", None) is not None
    odd = encode_results(
        [WriteResult(MetadataIndex("elsewhere"), 1, "odd")],
        decode_final_plan_items(planned, 1, base),
        strict=True,
    )
    assert read_results(planned, [frames[0], odd], b"", None) is None


def decode_final_plan_items(planned, rank, base):
    return dataclasses.replace(base, items=planned.outcome.build_plan(rank).items)


class OwnFinish(dcp.FileSystemWriter):
    def finish(self, metadata, results):
        metadata.state_dict_metadata["more"] = BytesStorageMetadata()
        super().finish(metadata, results)


class OwnMeta(dcp.FileSystemWriter):
    def storage_meta(self):
        return None


def test_only_dcps_own_finish_is_known(tmp_path, monkeypatch):
    assert plain_finish_of(dcp.FileSystemWriter(tmp_path), None)
    assert plain_finish_of(OwnMeta(tmp_path), None)
    assert plain_finish_of(OwnFinish(tmp_path), None) is None
    assert plain_finish_of(HuggingFaceStorageWriter(str(tmp_path)), None) is None
    patched = dcp.FileSystemWriter(tmp_path)
    patched.finish = lambda metadata, results: None
    assert plain_finish_of(patched, None) is None
    assert plain_finish_of(None, None) is None
    monkeypatch.setattr(dcp.FileSystemWriter, "finish", lambda self, metadata, results: None)
    assert plain_finish_of(dcp.FileSystemWriter(tmp_path), None) is None


def finish_in_place(writer, metadata, lists):
    plain = plain_finish_of(writer, lists)
    with plain.in_place():
        writer.finish(metadata=metadata, results=lists)
    assert "finish" not in vars(writer)
    return plain.written, pickle.loads((writer.path / ".metadata").read_bytes())


def test_a_plain_writer_writes_the_file_that_it_writes_by_itself(tmp_path):
    planned, metadata, frames = small()
    lists = read_results(planned, frames, b"", None)
    stock = dcp.FileSystemWriter(tmp_path / "stock")
    expected = build_metadata(planned.outcome)
    ours = dcp.FileSystemWriter(tmp_path / "ours")
    for writer in (stock, ours):
        writer.storage_meta = lambda: StorageMeta("/checkpoint", "save")
        writer.path.mkdir()
    stock.finish(metadata=expected, results=list(lists))
    (tmp_path / "ours" / ".metadata").write_bytes(b"of a save before")
    rest, found = finish_in_place(ours, metadata, lists)
    assert is_pending(metadata)
    check_same(found, pickle.loads((tmp_path / "stock" / ".metadata").read_bytes()))
    assert [path.name for path in ours.path.iterdir()] == [".metadata"]
    check_same(decode_metadata(lists.encode_metadata(rest, strict=True)), expected)


def test_metadata_that_somebody_looked_at_is_pickled_as_it_is(tmp_path):
    planned, metadata, frames = small()
    lists = read_results(planned, frames, b"", None)
    metadata.state_dict_metadata["more"] = BytesStorageMetadata()
    written, found = finish_in_place(dcp.FileSystemWriter(tmp_path), metadata, lists)
    assert written is None
    assert list(found.state_dict_metadata) == ["a", "b", "more"]
    assert found.storage_data == metadata.storage_data
    assert len(found.storage_data) == 4


def test_results_with_equal_keys_are_finished_as_objects(tmp_path):
    planned, metadata, frames = small()
    lists = read_results(planned, frames, b"", None)
    twice = [*lists[0], dataclasses.replace(lists[0][0], storage_data=_StorageInfo("later", 0, 8))]
    base = decode_final_plan_items(planned, 0, SavePlan([], None, None))
    lists = read_results(planned, [encode_results(twice, base, strict=True), frames[1]], b"", None)
    assert not lists.can_write_metadata()
    written, found = finish_in_place(dcp.FileSystemWriter(tmp_path), metadata, lists)
    assert written is None
    assert found.storage_data[twice[0].index].relative_path == "later"


class FullDisk(dcp.filesystem.FileSystem):
    def create_stream(self, path, mode):
        raise OSError(28, "No space left on device")


def test_a_plain_writer_that_fails_has_its_own_finish_again(tmp_path):
    planned, metadata, frames = small()
    writer = dcp.FileSystemWriter(tmp_path)
    writer.fs = FullDisk()
    with pytest.raises(OSError, match="No space left"):
        finish_in_place(writer, metadata, read_results(planned, frames, b"", None))
    assert "finish" not in vars(writer)
    assert list(tmp_path.iterdir()) == []


def test_a_finish_that_pickles_something_else_is_refused(tmp_path, monkeypatch):
    planned, metadata, frames = small()
    lists = read_results(planned, frames, b"", None)

    def finish(self, metadata, results):
        metadata.storage_data = {"more": 1}
        pickle.dump(metadata, None)

    monkeypatch.setattr(planner.plain_finish, "_FINISH", finish)
    with pytest.raises(RuntimeError, match="pickles something else"):
        planner.plain_finish.Finish(dcp.FileSystemWriter(tmp_path), lists)(metadata, lists)


class _NoChance:
    def integers(self, low, high, count, dtype):
        return np.zeros(count, dtype=dtype)


def test_layouts_that_random_numbers_cannot_tell_apart_are_left_to_torch(monkeypatch):
    plans = [
        SavePlan(
            [tensor_item("a", (0, 1), (1, 2), (3, 3)), tensor_item("b", (1, 0), (2, 1), (3, 3))],
            planner_data={"a": ("a",), "b": ("b",)},
        )
    ]
    assert check_like_torch(plans) is not None
    monkeypatch.setattr(np.random, "default_rng", lambda seed: _NoChance())
    assert check_like_torch(plans) is None


def test_the_state_shares_equal_layouts_and_nothing_that_can_change():
    planned, metadata, _ = small()
    assert len(planned.state.layouts) == 1
    assert planned.state.layouts[0].num_chunks.tolist() == [2]
    first, second = metadata.state_dict_metadata.values()
    assert first.chunks[1].offsets is second.chunks[1].offsets
    assert first.chunks is not second.chunks
    assert first.chunks[1] is not second.chunks[1]
    assert first.properties is not second.properties
    assert isinstance(first.size, torch.Size)
