"""Metadata that is made when looked at is what stock DCP returns, however one looks."""

import copy
import dataclasses
import pickle

import pytest
import torch
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

from planner import FrameError
from planner.lazy_metadata import _PendingMetadata, make_metadata_later, read_metadata_later
from planner.pending import is_pending, remake
from planner.wire.metadata import encode_metadata


def make():
    size = torch.Size((4, 2))
    chunk = ChunkStorageMetadata(torch.Size((0, 0)), size)
    return Metadata(
        {"w": TensorStorageMetadata(TensorProperties(), size, [chunk]), "b": BytesStorageMetadata()},
        planner_data={"w": ("w",)},
        storage_data={MetadataIndex("w", [0, 0], 0): _StorageInfo("__0_0.distcp", 0, 32)},
        storage_meta=StorageMeta("/x", "save"),
        version="1.0.0",
    )


def pending():
    return read_metadata_later(encode_metadata(make(), strict=True))


LOOKS = {
    "equal": lambda metadata: metadata == make(),
    "equal the other way round": lambda metadata: make() == metadata,
    "both pending": lambda metadata: metadata == pending(),
    "attribute": lambda metadata: metadata.planner_data == {"w": ("w",)},
    "attribute with a default": lambda metadata: metadata.version == "1.0.0",
    "pickle": lambda metadata: pickle.loads(pickle.dumps(metadata)) == make(),
    "pickled type": lambda metadata: type(pickle.loads(pickle.dumps(metadata))) is Metadata,
    "copy": lambda metadata: copy.copy(metadata) == make(),
    "deepcopy": lambda metadata: copy.deepcopy(metadata) == make(),
    "replace": lambda metadata: dataclasses.replace(metadata, version="2").version == "2",
    "vars": lambda metadata: vars(metadata) == vars(make()),
    "repr": lambda metadata: repr(metadata) == repr(make()),
    "isinstance": lambda metadata: isinstance(metadata, Metadata),
    "class": lambda metadata: metadata.__class__ is Metadata,
    "not equal": lambda metadata: metadata != 5,
}


@pytest.mark.parametrize("look", LOOKS)
def test_however_one_looks_it_is_the_metadata(look):
    metadata = pending()
    assert type(metadata) is _PendingMetadata
    assert LOOKS[look](metadata)


def test_after_a_look_or_a_change_it_is_plain_metadata():
    looked, changed = pending(), pending()
    assert looked.storage_data
    changed.version = "3"
    assert type(looked) is type(changed) is Metadata
    assert changed == dataclasses.replace(make(), version="3")


def test_a_damaged_frame_is_refused_at_once():
    parts = encode_metadata(make(), strict=True)
    for number, part in enumerate(parts):
        damaged = bytearray(part)
        damaged[-1] ^= 1
        with pytest.raises(FrameError):
            read_metadata_later([*parts[:number], bytes(damaged), *parts[number + 1 :]])


def test_making_one_may_come_to_look_at_another_and_at_itself():
    other = pending()

    def look_around():
        assert other.planner_data
        assert is_pending(metadata)
        return make()

    metadata = make_metadata_later(look_around)
    assert metadata == make()


def test_metadata_whose_making_fails_can_be_made_again():
    failures = [OSError("not now")]

    def fail_once():
        if failures:
            raise failures.pop()
        return make()

    metadata = make_metadata_later(fail_once)
    with pytest.raises(OSError, match="not now"):
        metadata.planner_data  # noqa: B018 - the look is what is tried
    assert metadata == make()


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_metadata_that_was_finished_without_being_looked_at_shows_what_was_written(is_looked_at):
    metadata = make_metadata_later(lambda: Metadata(make().state_dict_metadata))
    if is_looked_at:  # by another thread, in the meantime
        assert metadata.storage_data is None
    remake(metadata, make)
    assert is_pending(metadata) != is_looked_at
    assert metadata == make()
    assert type(metadata) is Metadata
