"""Pieces that plans and metadata share: sizes, tensor properties, and when an object is regular.

*Regular* objects are of exactly the class that DCP makes, with exactly its attributes and plain values:
what columns can hold. Everything else travels through ``planner.wire.objects``. What DCP's classes look
like is asked of the running torch; should one have a field that is not known here, nothing of it is
regular and the general way takes over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
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

from planner.errors import PayloadError
from planner.wire.check import expect_list
from planner.wire.columns import Int64Column
from planner.wire.objects import decode_object, encode_object

__all__ = [
    "FIELDS_ARE_KNOWN",
    "INT64_MAX",
    "INT64_MIN",
    "MAX_NUM_DIMS",
    "PropertiesTable",
    "PropertyValues",
    "SizeTable",
    "are_regular_properties",
    "decode_properties_table",
    "encode_properties_table",
    "is_regular_chunk",
    "is_regular_index",
    "is_regular_item",
    "make_index",
    "property_values",
]

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_NUM_DIMS = 255

_ITEM = ("index", "type", "bytes_io_data", "tensor_data")
_TENSOR_DATA = ("chunk", "properties", "size")
_CHUNK = ("offsets", "sizes")
_BYTES_IO = ("nbytes",)
_PROPERTIES = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
# 2.15 and later; older ones have no such field.
_STRIDES = "strides"

_PROPERTY_FIELDS = tuple(field.name for field in dataclasses.fields(TensorProperties))
_NUM_PROPERTIES = len(_PROPERTY_FIELDS)
property_values = attrgetter(*_PROPERTY_FIELDS)
_HAS_STRIDES = _STRIDES in _PROPERTY_FIELDS

_Size, _dtype, _layout, _memory_format = torch.Size, torch.dtype, torch.layout, torch.memory_format
_TENSOR_TYPE, _SHARD_TYPE, _BYTE_IO_TYPE = WriteItemType.TENSOR, WriteItemType.SHARD, WriteItemType.BYTE_IO

PropertyValues = tuple[Any, ...]


def _fields_are_known() -> bool:
    known: dict[type, tuple[str, ...]] = {
        WriteItem: _ITEM,
        TensorWriteData: _TENSOR_DATA,
        ChunkStorageMetadata: _CHUNK,
        BytesIOWriteData: _BYTES_IO,
        MetadataIndex: ("fqn", "offset", "index"),
        SavePlan: ("items", "storage_data", "planner_data", "usable"),
        WriteResult: ("index", "size_in_bytes", "storage_data"),
        TensorStorageMetadata: ("properties", "size", "chunks"),
        BytesStorageMetadata: (),
        Metadata: ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    }
    return (
        all(tuple(field.name for field in dataclasses.fields(cls)) == names for cls, names in known.items())
        and _PROPERTY_FIELDS in (_PROPERTIES, (*_PROPERTIES, _STRIDES))
        and all(field.init and not field.kw_only for field in dataclasses.fields(TensorProperties))
        and [member.name for member in WriteItemType] == ["TENSOR", "SHARD", "BYTE_IO"]
    )


FIELDS_ARE_KNOWN = _fields_are_known()


# The functions below run for every item of a plan, some for every item of every plan: they ask an
# object's __dict__ once, and names of torch and members of enums are bound here, where they cost nothing.
# An object with as many attributes as it should have, among them each it should have, has no others.


def is_regular_index(index: Any) -> bool:
    """Tell whether ``index`` is a plain ``MetadataIndex`` with a plain hint and offset."""
    if type(index) is not MetadataIndex:
        return False
    attributes = index.__dict__
    if type(attributes.get("fqn")) is not str or "index" not in attributes:
        return False
    hint = attributes["index"]
    if hint is not None and not (type(hint) is int and INT64_MIN <= hint <= INT64_MAX):
        return False
    # Without an offset there is no such attribute, see MetadataIndex.__init__.
    return len(attributes) == 2 or (len(attributes) == 3 and type(attributes.get("offset")) is _Size)  # noqa: PLR2004


def are_regular_properties(properties: Any) -> bool:
    """Tell whether ``properties`` are plain ``TensorProperties`` whose values all have the usual types."""
    if type(properties) is not TensorProperties:
        return False
    attributes = properties.__dict__
    if _HAS_STRIDES:
        strides = attributes.get(_STRIDES, 0)
        if strides is not None and not (type(strides) is tuple and all(type(s) is int for s in strides)):
            return False
    return (
        len(attributes) == _NUM_PROPERTIES
        and type(attributes.get("dtype")) is _dtype
        and type(attributes.get("layout")) is _layout
        and type(attributes.get("requires_grad")) is bool
        and type(attributes.get("memory_format")) is _memory_format
        and type(attributes.get("pin_memory")) is bool
    )


def is_regular_item(item: Any) -> bool:
    """Tell whether ``item`` is a ``WriteItem`` as DCP makes them, whose parts all fit into columns."""
    if type(item) is not WriteItem:
        return False
    attributes = item.__dict__
    try:
        index, item_type = attributes["index"], attributes["type"]
        bytes_io_data, tensor_data = attributes["bytes_io_data"], attributes["tensor_data"]
    except KeyError:
        return False
    if len(attributes) != len(_ITEM) or not is_regular_index(index):
        return False
    if item_type is _BYTE_IO_TYPE:
        return tensor_data is None and index.offset is None and _is_regular_bytes_io(bytes_io_data)
    if (
        bytes_io_data is not None
        or (item_type is not _SHARD_TYPE and item_type is not _TENSOR_TYPE)
        or type(tensor_data) is not TensorWriteData
    ):
        return False
    parts = tensor_data.__dict__
    try:
        chunk, properties, size = parts["chunk"], parts["properties"], parts["size"]
    except KeyError:
        return False
    return (
        len(parts) == len(_TENSOR_DATA)
        and is_regular_chunk(chunk, size)
        and index.offset is not None
        and (index.offset is chunk.offsets or index.offset == chunk.offsets)
        and are_regular_properties(properties)
    )


def _is_regular_bytes_io(bytes_io_data: Any) -> bool:
    if bytes_io_data is None:
        return True
    return (
        type(bytes_io_data) is BytesIOWriteData
        and tuple(bytes_io_data.__dict__) == _BYTES_IO
        and type(bytes_io_data.nbytes) is int
        and 0 <= bytes_io_data.nbytes <= INT64_MAX
    )


def is_regular_chunk(chunk: Any, size: Any) -> bool:
    """Tell whether ``chunk`` is a plain chunk with as many dimensions as ``size``, a plain size."""
    if type(chunk) is not ChunkStorageMetadata:
        return False
    attributes = chunk.__dict__
    offsets, sizes = attributes.get("offsets"), attributes.get("sizes")
    return (
        len(attributes) == len(_CHUNK)
        and type(offsets) is _Size
        and type(sizes) is _Size
        and type(size) is _Size
        and len(offsets) == len(sizes) == len(size) <= MAX_NUM_DIMS
    )


def make_index(fqn: str, offset: torch.Size | None, hint: int | None) -> MetadataIndex:
    """Make a ``MetadataIndex`` that holds ``offset`` itself; its own ``__init__`` would copy it."""
    index = object.__new__(MetadataIndex)
    object.__setattr__(index, "fqn", fqn)
    object.__setattr__(index, "index", hint)
    if offset is not None:
        object.__setattr__(index, "offset", offset)
    return index


class PropertiesTable:
    """The distinct tensor properties of a message, numbered in the order they were first seen."""

    def __init__(self) -> None:
        self._numbers: dict[PropertyValues, int] = {}

    def number(self, values: PropertyValues) -> int:
        """Return the number of regular properties, a new one where they are new."""
        return self._numbers.setdefault(values, len(self._numbers))

    def values(self) -> list[PropertyValues]:
        """Return the table, each as the arguments of ``TensorProperties``."""
        return list(self._numbers)

    def tree(self) -> list[Any]:
        """Return the table as msgpack."""
        return encode_properties_table(self.values())


def encode_properties_table(table: Sequence[PropertyValues]) -> list[Any]:
    """Write a table of tensor properties as msgpack."""
    return [[encode_object(value, path="properties", strict=True) for value in values] for values in table]


def decode_properties_table(tree: Any, *, path: str) -> list[PropertyValues]:
    """Read a table of tensor properties, each as the arguments of ``TensorProperties``.

    Raises:
        PayloadError: if it is no such table, or of a torch with other fields.
    """
    table: list[PropertyValues] = []
    for number, values_tree in enumerate(expect_list(tree, path)):
        here = f"{path}[{number}]"
        values = tuple(
            decode_object(value, path=here) for value in expect_list(values_tree, here, len(_PROPERTY_FIELDS))
        )
        if not are_regular_properties(TensorProperties(*values)):
            raise PayloadError(here, f"values of {', '.join(_PROPERTY_FIELDS)}", "others")
        table.append(values)
    return table


class SizeTable(dict[tuple[int, ...], torch.Size]):
    """``torch.Size`` objects by value, made when asked for: equal ones are one object, they never change."""

    def __missing__(self, key: tuple[int, ...]) -> torch.Size:
        size = self[key] = torch.Size(key)
        return size

    def rows(self, columns: npt.NDArray[np.int64], num_rows: int) -> list[torch.Size]:
        """Return the rows of ``columns``, shape (num_dims, num_rows), as sizes."""
        rows = zip(*(column.tolist() for column in columns), strict=True) if len(columns) else [()] * num_rows
        return list(map(self.__getitem__, rows))

    def cut(self, column: Int64Column, num_dims: list[int]) -> Iterator[torch.Size]:
        """Yield one size after another, as long as ``num_dims`` says; together they are the column."""
        flat, start = column.tolist(), 0
        for length in num_dims:
            end = start + length
            yield self[tuple(flat[start:end])]
            start = end
