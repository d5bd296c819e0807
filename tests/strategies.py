"""Worlds of plans, metadata and plain values for property tests.

Everything here is drawn small: the codecs do the same for two items as for two thousand.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import uuid
from datetime import timedelta

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

INT64 = st.integers(-(2**63), 2**63 - 1)
# Lone surrogates come from file names that are no UTF-8; they have to survive.
TEXTS = st.text(st.characters(categories=None, exclude_categories=()), max_size=8) | st.sampled_from(
    ["", "\ud800", "a.b", "a..b", ".", "0", "model.layers.0.weight"]
)
FQNS = TEXTS | st.lists(
    st.sampled_from(["model", "layers", "0", "17", "weight", "optim"]), min_size=1, max_size=4
).map(".".join)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
HINTS = st.none() | st.integers(0, 600) | INT64


@st.composite
def properties(draw):
    return TensorProperties(
        dtype=draw(DTYPES),
        layout=draw(st.sampled_from([torch.strided, torch.sparse_coo])),
        requires_grad=draw(st.booleans()),
        memory_format=draw(st.sampled_from([torch.contiguous_format, torch.channels_last])),
        pin_memory=draw(st.booleans()),
    )


def sizes(num_dims):
    return st.lists(
        st.integers(0, 2**20) | st.sampled_from([2**40, 2**63 - 1]), min_size=num_dims, max_size=num_dims
    ).map(torch.Size)


@st.composite
def tensor_items(draw):
    num_dims = draw(st.integers(0, 8))
    offsets = draw(sizes(num_dims))
    index = MetadataIndex(draw(FQNS), offsets, draw(HINTS))
    tensor_data = TensorWriteData(
        ChunkStorageMetadata(torch.Size(offsets), draw(sizes(num_dims))),
        draw(properties()),
        draw(sizes(num_dims)),
    )
    kind = draw(st.sampled_from([WriteItemType.TENSOR, WriteItemType.SHARD]))
    return WriteItem(index, kind, tensor_data=tensor_data)


@st.composite
def bytes_items(draw):
    nbytes = draw(st.none() | st.integers(0, 2**63 - 1).map(BytesIOWriteData))
    return WriteItem(MetadataIndex(draw(FQNS), None, draw(HINTS)), WriteItemType.BYTE_IO, nbytes)


@st.composite
def odd_items(draw):
    """Items that DCP lets pass though its own planner makes none of the kind."""
    item = draw(tensor_items())
    tensor_data = item.tensor_data
    as_lists = ChunkStorageMetadata(list(tensor_data.chunk.offsets), list(tensor_data.chunk.sizes))
    return draw(
        st.sampled_from(
            [
                dataclasses.replace(item, type=WriteItemType.BYTE_IO),
                dataclasses.replace(item, tensor_data=None),
                dataclasses.replace(item, tensor_data=dataclasses.replace(tensor_data, chunk=as_lists)),
                dataclasses.replace(item, tensor_data=dataclasses.replace(tensor_data, chunk=None)),
                dataclasses.replace(item, index=MetadataIndex(item.index.fqn)),
                dataclasses.replace(item, index=MetadataIndex(item.index.fqn, item.index.offset, 2**70)),
                dataclasses.replace(item, bytes_io_data=BytesIOWriteData(-1)),
            ]
        )
    )


ITEMS = tensor_items() | bytes_items()
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | TEXTS
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False)
    | st.binary(max_size=4).map(bytearray)
    | DTYPES
    | st.sampled_from(
        [
            torch.strided,
            torch.channels_last_3d,
            torch.device("cpu"),
            torch.device("cuda:3"),
            torch.Size([2, 3]),
            pathlib.PurePosixPath("/a/b"),
            pathlib.PureWindowsPath("c:/x"),
            pathlib.Path("x"),
            timedelta(days=-1, microseconds=3),
            uuid.UUID(int=7),
            range(1, 9, 2),
            slice(None, 2**80),
            frozenset({1, "x"}),
            WriteItemType.SHARD,
            _StoragePrefix("__0_"),
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(TEXTS, inner, max_size=3)
        | st.dictionaries(INT64 | TEXTS | st.binary(max_size=2), inner, max_size=3)
        | st.sets(TEXTS | INT64, max_size=3)
    ),
    max_leaves=8,
)
MAPPINGS = st.dictionaries(FQNS, st.lists(FQNS | INT64, max_size=4).map(tuple), max_size=5)


@st.composite
def flatten_mappings(draw, keys):
    """Mappings as flatten_state_dict makes them: the key is its path joined by dots."""
    mapping = {}
    for key in draw(st.permutations(keys)):
        words, parts = key.split("."), []
        while words:
            taken = draw(st.integers(1, len(words)))
            part = ".".join(words[:taken])
            is_int = part.isascii() and part.isdecimal() and str(int(part)) == part and draw(st.booleans())
            parts.append(int(part) if is_int else part)
            words = words[taken:]
        mapping[key] = tuple(parts)
    return mapping


@st.composite
def plans(draw, items=ITEMS):
    own = draw(st.lists(items, max_size=6))
    keys = list(dict.fromkeys(item.index.fqn for item in own))
    planner_data = draw(st.none() | flatten_mappings(keys) | MAPPINGS | PLAIN)
    storage_data = draw(st.none() | st.just(_StoragePrefix("__3_")) | PLAIN)
    return SavePlan(own, storage_data, planner_data, draw(st.booleans()))


@st.composite
def storage_infos(draw):
    descriptors = draw(st.none() | st.lists(TEXTS, max_size=2))
    return _StorageInfo(
        draw(st.sampled_from(["__0_0.distcp", "__0_1.distcp", "\udc80", ""])),
        draw(st.integers(0, 2**40) | INT64),
        draw(st.integers(0, 2**40)),
        descriptors,
    )


@st.composite
def results_of(draw, plan):
    """Results of a writer for ``plan``: some of its items in any order, and some that are not of it."""
    indices = [item.index for item in plan.items]
    chosen = draw(st.lists(st.sampled_from(indices), max_size=6)) if indices else []
    chosen += draw(st.lists(st.builds(MetadataIndex, FQNS, sizes(2), HINTS), max_size=2))
    return [
        WriteResult(index, draw(st.integers(0, 2**40) | st.just(2**70)), draw(storage_infos() | PLAIN))
        for index in draw(st.permutations(chosen))
    ]


@st.composite
def metadata(draw):
    state = {}
    indices = {}
    for name in draw(st.lists(FQNS, max_size=4, unique=True)):
        if draw(st.booleans()):
            state[name] = BytesStorageMetadata()
            indices[MetadataIndex(name, None, draw(HINTS))] = draw(storage_infos())
            continue
        num_dims = draw(st.integers(0, 8))
        chunks = [
            ChunkStorageMetadata(draw(sizes(num_dims)), draw(sizes(num_dims)))
            for _ in range(draw(st.integers(0, 3)))
        ]
        state[name] = TensorStorageMetadata(draw(properties()), draw(sizes(num_dims)), chunks)
        for number, chunk in enumerate(chunks):
            hint = draw(st.just(number) | HINTS)
            indices[MetadataIndex(name, chunk.offsets, hint)] = draw(storage_infos())
    storage = dict(draw(st.permutations(list(indices.items()))))
    return Metadata(
        state,
        draw(st.none() | flatten_mappings(list(state)) | MAPPINGS | PLAIN),
        draw(st.just(storage) | PLAIN),
        draw(st.none() | st.builds(StorageMeta, st.none() | TEXTS | st.just(pathlib.Path("/x")), TEXTS)),
        draw(st.none() | TEXTS),
    )


def mutated(tree, rng):
    """Return a copy of ``tree`` with one leaf or branch replaced by something it should not be."""
    if isinstance(tree, (list, dict)) and tree and rng.random() < 0.8:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = rng.choice(keys)
        out = copy.copy(tree)
        out[key] = mutated(tree[key], rng)
        return out
    if isinstance(tree, bytes) and tree and rng.random() < 0.7:
        changed = bytearray(tree)
        changed[rng.randrange(len(changed))] ^= rng.randrange(1, 256)
        return bytes(changed[: rng.choice([len(changed), rng.randrange(len(changed))])])
    if type(tree) is int:
        return rng.choice([-1, 0, 1, tree + 1, 2**31, 2**63 - 1, 2**64 - 1])
    return rng.choice([None, -1, 0, 1, 2**40, "", "x", b"", b"\xff" * 9, [], [1], {}, {"a": 1}, True, 1.5])
