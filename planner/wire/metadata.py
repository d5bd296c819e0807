"""The metadata of a checkpoint in columns.

``state_dict_metadata`` becomes a table of names, properties, sizes and chunks. Each of its chunks, and
each entry of bytes, is a *slot*, numbered in order; ``storage_data`` refers to slots, since its keys
are nothing but the name and offset of one. What does not fit is sent as an object, piece by piece.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from planner.errors import PayloadError
from planner.wire.check import expect_bytes, expect_int, expect_list, expect_map, expect_str_list
from planner.wire.columns import Int64Column, pack_ints, pack_optional_ints, unpack_ints, unpack_optional_ints
from planner.wire.frame import Kind, decode_message, encode_message
from planner.wire.gc_pause import paused_gc
from planner.wire.objects import decode_object, encode_object, type_name_of
from planner.wire.plans import decode_planner_data, encode_planner_data
from planner.wire.storage_infos import StorageInfoColumns, decode_storage_infos, is_regular_storage_info
from planner.wire.tensors import (
    FIELDS_ARE_KNOWN,
    MAX_NUM_DIMS,
    PropertiesTable,
    SizeCache,
    are_regular_properties,
    decode_properties_table,
    is_regular_chunk,
    is_regular_index,
    make_index,
)

__all__ = ["decode_metadata", "encode_metadata"]

_FIELDS = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
_TENSOR_FIELDS = ("properties", "size", "chunks")
_BYTES, _TENSOR, _ODD = 0, 1, 2
_COLUMNS, _OBJECT = 0, 1
# Chunks without dimensions take no bytes; this bounds what a hostile count of them could make us build.
_MAX_SCALAR_CHUNKS = 8
_STATE_KEYS = frozenset(
    (
        "names",
        "kinds",
        "properties",
        "property_numbers",
        "num_dims",
        "sizes",
        "num_chunks",
        "chunk_offsets",
        "chunk_sizes",
        "odd",
    )
)
_STORAGE_KEYS = frozenset(("count", "slot_steps", "hints", "infos"))

# A slot is the name and offset by which storage_data refers to a chunk, or to an entry of bytes.
_Slot = tuple[str, torch.Size | None]


def encode_metadata(metadata: Metadata, *, path: str = "metadata", strict: bool) -> bytes:
    """Encode the metadata of a checkpoint.

    Args:
        metadata: any metadata; a subclass or an odd one just takes more bytes.
        path: what to call it in errors.
        strict: refuse what only pickle can carry.

    Raises:
        UnencodableError: if a part of it cannot travel.
    """
    attributes = getattr(metadata, "__dict__", {})
    if (
        not FIELDS_ARE_KNOWN
        or type(metadata) is not Metadata
        or not attributes.keys() <= set(_FIELDS)
        or "state_dict_metadata" not in attributes
    ):
        tree: Any = [_OBJECT, encode_object(metadata, path=path, strict=strict)]
        return encode_message(Kind.METADATA, tree)
    state, slots, names = _encode_state(
        metadata.state_dict_metadata, path=f"{path}.state_dict_metadata", strict=strict
    )
    trees: dict[str, Any] = {"state_dict_metadata": state}
    for name, value in attributes.items():
        here = f"{path}.{name}"
        if name == "planner_data":
            trees[name] = encode_planner_data(value, names, path=here, strict=strict)
        elif name == "storage_data":
            columns = _encode_storage_data(value, slots)
            trees[name] = (
                [_COLUMNS, columns]
                if columns is not None
                else [_OBJECT, encode_object(value, path=here, strict=strict)]
            )
        elif name != "state_dict_metadata":
            trees[name] = encode_object(value, path=here, strict=strict)
    # Older pickles lack attributes that have a class default now; the order is that of the pickle.
    return encode_message(Kind.METADATA, [_COLUMNS, list(attributes), trees])


@paused_gc()
def decode_metadata(data: bytes) -> Metadata:
    """Make the metadata of a METADATA frame.

    Raises:
        WireError: if the frame or its contents are not those of metadata.
    """
    tree = expect_list(decode_message(data, Kind.METADATA), "metadata")
    if len(tree) == 2 and tree[0] == _OBJECT:  # noqa: PLR2004 - [_OBJECT, tree]
        whole = decode_object(tree[1], path="metadata")
        if not isinstance(whole, Metadata):
            raise PayloadError("metadata", "a Metadata", type_name_of(whole))
        return whole
    form, order_tree, trees = expect_list(tree, "metadata", 3)
    if form != _COLUMNS or type(form) is not int:
        raise PayloadError("metadata", f"form {_COLUMNS} or {_OBJECT}", "another")
    order = expect_str_list(order_tree, "metadata.attributes", unique=True)
    expect_map(trees, "metadata", order)
    if "state_dict_metadata" not in order or not set(order) <= set(_FIELDS):
        raise PayloadError("metadata.attributes", f"among {', '.join(_FIELDS)}", "others")
    state, slots, names = _decode_state(trees["state_dict_metadata"], path="metadata.state_dict_metadata")
    metadata = object.__new__(Metadata)
    for name in order:
        here = f"metadata.{name}"
        if name == "state_dict_metadata":
            value: Any = state
        elif name == "planner_data":
            value = decode_planner_data(trees[name], names, path=here)
        elif name == "storage_data":
            value = _decode_storage_data(trees[name], slots, path=here)
        else:
            value = decode_object(trees[name], path=here)
        setattr(metadata, name, value)
    return metadata


# --------------------------------------------------------------------------------------------------
# state_dict_metadata


def _kind_of(entry: Any) -> int:
    if type(entry) is BytesStorageMetadata and not entry.__dict__:
        return _BYTES
    if (
        type(entry) is TensorStorageMetadata
        and tuple(entry.__dict__) == _TENSOR_FIELDS
        and type(entry.chunks) is list
        and type(entry.size) is torch.Size
        and len(entry.size) <= MAX_NUM_DIMS
        and are_regular_properties(entry.properties)
        and (len(entry.size) > 0 or len(entry.chunks) <= _MAX_SCALAR_CHUNKS)
        and all(is_regular_chunk(chunk, entry.size) for chunk in entry.chunks)
    ):
        return _TENSOR
    return _ODD


def _encode_state(state: Any, *, path: str, strict: bool) -> tuple[list[Any], list[_Slot], list[str]]:
    """Return the tree, and the slots and names that the rest of the metadata refers to."""
    if type(state) is not dict or not all(type(name) is str for name in state):
        return [_OBJECT, encode_object(state, path=path, strict=strict)], [], []
    table = PropertiesTable()
    kinds = bytearray()
    property_numbers: list[int] = []
    num_dims: list[int] = []
    sizes: list[int] = []
    num_chunks: list[int] = []
    chunk_offsets: list[int] = []
    chunk_sizes: list[int] = []
    odd: list[Any] = []
    slots: list[_Slot] = []
    for name, entry in state.items():
        kind = _kind_of(entry)
        kinds.append(kind)
        if kind == _ODD:
            odd.append(encode_object(entry, path=f"{path}[{name!r}]", strict=strict))
        elif kind == _BYTES:
            slots.append((name, None))
        elif kind == _TENSOR:
            property_numbers.append(table.number(entry.properties))
            num_dims.append(len(entry.size))
            sizes.extend(entry.size)
            num_chunks.append(len(entry.chunks))
            for chunk in entry.chunks:
                chunk_offsets.extend(chunk.offsets)
                chunk_sizes.extend(chunk.sizes)
                slots.append((name, chunk.offsets))
    columns = {
        "names": list(state),
        "kinds": bytes(kinds),
        "properties": table.tree(),
        "property_numbers": pack_ints(property_numbers),
        "num_dims": pack_ints(num_dims),
        "sizes": pack_ints(sizes),
        "num_chunks": pack_ints(num_chunks),
        "chunk_offsets": pack_ints(chunk_offsets),
        "chunk_sizes": pack_ints(chunk_sizes),
        "odd": odd,
    }
    return [_COLUMNS, columns], slots, list(state)


def _decode_state(tree: Any, *, path: str) -> tuple[Any, list[_Slot], list[str]]:
    form, data = expect_list(tree, path, 2)
    if form == _OBJECT:
        return decode_object(data, path=path), [], []
    columns = expect_map(data, path, _STATE_KEYS)
    names = expect_str_list(columns["names"], f"{path}.names", unique=True)
    kinds = expect_bytes(columns["kinds"], f"{path}.kinds", len(names))
    if kinds and max(kinds) > _ODD:
        raise PayloadError(f"{path}.kinds", f"codes to {_ODD}", max(kinds))
    num_tensors = kinds.count(_TENSOR)
    table = decode_properties_table(columns["properties"], path=f"{path}.properties")
    numbers = unpack_ints(
        columns["property_numbers"],
        count=num_tensors,
        path=f"{path}.property_numbers",
        low=0,
        high=len(table) - 1,
    )
    num_dims = unpack_ints(
        columns["num_dims"], count=num_tensors, path=f"{path}.num_dims", low=0, high=MAX_NUM_DIMS
    )
    flat_sizes = unpack_ints(columns["sizes"], count=int(num_dims.sum()), path=f"{path}.sizes")
    num_chunks, chunk_dims = _decode_num_chunks(columns, num_dims.tolist(), path)
    num_numbers = sum(chunk_dims)
    flat_offsets = unpack_ints(columns["chunk_offsets"], count=num_numbers, path=f"{path}.chunk_offsets")
    flat_chunk_sizes = unpack_ints(columns["chunk_sizes"], count=num_numbers, path=f"{path}.chunk_sizes")
    odd = iter(expect_list(columns["odd"], f"{path}.odd", kinds.count(_ODD)))

    cache = SizeCache()
    chunks = map(
        ChunkStorageMetadata, cache.cut(flat_offsets, chunk_dims), cache.cut(flat_chunk_sizes, chunk_dims)
    )
    tensors = zip(numbers.tolist(), cache.cut(flat_sizes, num_dims.tolist()), num_chunks, strict=True)
    state: dict[str, Any] = {}
    slots: list[_Slot] = []
    for name, kind in zip(names, kinds, strict=True):
        if kind == _BYTES:
            state[name] = BytesStorageMetadata()
            slots.append((name, None))
        elif kind == _TENSOR:
            number, size, num_own = next(tensors)
            own = [next(chunks) for _ in range(num_own)]
            state[name] = TensorStorageMetadata(TensorProperties(*table[number]), size, own)
            slots.extend((name, chunk.offsets) for chunk in own)
        else:
            state[name] = decode_object(next(odd), path=f"{path}[{name!r}]")
    return state, slots, names


def _decode_num_chunks(
    columns: dict[str, Any], num_dims: list[int], path: str
) -> tuple[list[int], list[int]]:
    """Return how many chunks each tensor has, and for each chunk its number of dimensions."""
    here = f"{path}.num_chunks"
    num_chunks: list[int] = unpack_ints(columns["num_chunks"], count=len(num_dims), path=here, low=0).tolist()
    # A number of a chunk takes at least a byte of its column, which bounds how many chunks there may be;
    # those without dimensions have no numbers, and get a bound of their own.
    _, offsets = expect_list(columns["chunk_offsets"], f"{path}.chunk_offsets", 2)
    left = len(expect_bytes(offsets, f"{path}.chunk_offsets"))
    chunk_dims: list[int] = []
    for num_own, num in zip(num_chunks, num_dims, strict=True):
        left -= num_own * num
        if left < 0 or (num == 0 and num_own > _MAX_SCALAR_CHUNKS):
            raise PayloadError(here, "as many chunks as there are offsets", num_own)
        chunk_dims.extend([num] * num_own)
    return num_chunks, chunk_dims


# --------------------------------------------------------------------------------------------------
# storage_data


def _encode_storage_data(storage_data: Any, slots: list[_Slot]) -> dict[str, Any] | None:
    """Make columns of storage_data, or None if they do not hold it."""
    if type(storage_data) is not dict:
        return None
    numbers: dict[_Slot, int] = {}
    for number, slot in enumerate(slots):
        numbers.setdefault(slot, number)
    taken: list[int] = []
    hints: list[int | None] = []
    infos = StorageInfoColumns()
    for index, info in storage_data.items():
        if not is_regular_index(index) or not is_regular_storage_info(info):
            return None
        slot_number = numbers.get((index.fqn, index.offset))
        if slot_number is None:
            return None
        taken.append(slot_number)
        hints.append(index.index)
        infos.append(info)
    numbered = np.asarray([0, *taken], dtype=np.int64)
    # Steps from one slot to the next are small and alike, where slot numbers are neither.
    steps: Int64Column = numbered[1:] - numbered[:-1]
    return {
        "count": len(taken),
        "slot_steps": pack_ints(steps),
        "hints": pack_optional_ints(hints),
        "infos": infos.tree(),
    }


def _decode_storage_data(tree: Any, slots: list[_Slot], *, path: str) -> Any:
    form, data = expect_list(tree, path, 2)
    if form == _OBJECT:
        return decode_object(data, path=path)
    columns = expect_map(data, path, _STORAGE_KEYS)
    # Keys differ, so there cannot be more of them than slots.
    count = expect_int(columns["count"], f"{path}.count", 0, len(slots))
    steps = unpack_ints(columns["slot_steps"], count=count, path=f"{path}.slot_steps")
    taken = np.cumsum(steps)
    if count and not (int(taken.min()) >= 0 and int(taken.max()) < len(slots)):
        raise PayloadError(f"{path}.slot_steps", f"slots below {len(slots)}", "others")
    hints = unpack_optional_ints(columns["hints"], count=count, path=f"{path}.hints")
    infos = decode_storage_infos(columns["infos"], count=count, path=f"{path}.infos")
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    for number, hint, info in zip(taken.tolist(), hints, infos, strict=True):
        name, offset = slots[number]
        storage_data[make_index(name, offset, hint)] = info
    if len(storage_data) != count:
        raise PayloadError(path, "keys that all differ", "one of them twice")
    return storage_data
