"""``state_dict_metadata`` in columns: names, properties, sizes, and the chunks of every tensor.

Many tensors of a model are cut in the same way: size and chunks together are a *layout*, and each distinct
one is kept once. Entries are numbered in their order; a chunk is known by its entry and its place there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from planner.errors import PayloadError
from planner.wire.check import expect_bytes, expect_int, expect_list, expect_map, expect_str_list
from planner.wire.columns import Int64Column, pack_ints, unpack_ints
from planner.wire.objects import decode_object, encode_object
from planner.wire.tensors import (
    FIELDS_ARE_KNOWN,
    MAX_NUM_DIMS,
    PropertiesTable,
    PropertyValues,
    SizeTable,
    are_regular_properties,
    decode_properties_table,
    encode_properties_table,
    is_regular_chunk,
    property_values,
)

__all__ = [
    "BYTES",
    "TENSOR",
    "Layouts",
    "StateColumns",
    "StateObjects",
    "decode_state",
    "encode_state",
    "state_columns_of",
]

BYTES, TENSOR, _ODD = 0, 1, 2
_TENSOR_FIELDS = ("properties", "size", "chunks")
_KEYS = frozenset(("names", "kinds", "properties", "property_numbers", "layouts", "layout_numbers", "odd"))


@dataclass(frozen=True)
class Layouts:
    """Distinct layouts with the same number of dimensions.

    Attributes:
        num_dims: that number.
        tensor_sizes: the size of the tensor of each; shape (num_dims, num_layouts), int64.
        num_chunks: how many chunks each has; shape (num_layouts,).
        offsets: the chunks, one layout after another; shape (num_dims, sum of num_chunks), int64.
        sizes: likewise.
    """

    num_dims: int
    tensor_sizes: npt.NDArray[np.int64]
    num_chunks: Int64Column
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


@dataclass(frozen=True)
class StateColumns:
    """All entries of a ``state_dict_metadata``.

    Attributes:
        names: the FQN of each entry.
        kinds: of each entry ``BYTES``, ``TENSOR``, or another number for one that no column holds.
        properties: the distinct tensor properties, as the arguments of ``TensorProperties``.
        property_numbers: which of them each tensor has; shape (num_tensors,).
        layouts: the distinct layouts, by ascending number of dimensions; they are numbered through.
        layout_numbers: which of them each tensor has; shape (num_tensors,).
        odd: the other entries, as objects on the wire.
    """

    names: list[str]
    kinds: bytes
    properties: list[PropertyValues]
    property_numbers: Int64Column
    layouts: list[Layouts]
    layout_numbers: Int64Column
    odd: list[Any]

    def num_chunks(self) -> Int64Column:
        """Return how many chunks each entry has, counting one for bytes; shape (num_entries,)."""
        kinds = np.frombuffer(self.kinds, dtype=np.uint8)
        of_layout = np.concatenate(
            [np.zeros(0, dtype=np.int64), *(layouts.num_chunks for layouts in self.layouts)]
        )
        found = np.zeros(len(kinds), dtype=np.int64)
        found[kinds == BYTES] = 1
        found[kinds == TENSOR] = of_layout[self.layout_numbers]
        return found


class StateObjects:
    """Makes the objects of a state in columns; equal sizes are one object, all else is new."""

    def __init__(self, columns: StateColumns) -> None:
        self._columns = columns
        self.names = columns.names
        layouts = self._build_layouts()
        self._of_tensor = [layouts[number] for number in columns.layout_numbers.tolist()]
        of_tensor = iter(self._of_tensor)
        self.offsets: list[list[torch.Size] | None] = [
            next(of_tensor)[1] if kind == TENSOR else None for kind in columns.kinds
        ]
        """The offsets of the chunks of each entry; None for an entry that is no tensor."""

    def _build_layouts(self) -> list[tuple[torch.Size, list[torch.Size], list[torch.Size]]]:
        table = SizeTable()
        made = []
        for layouts in self._columns.layouts:
            num_total = layouts.offsets.shape[1]
            offsets, sizes = table.rows(layouts.offsets, num_total), table.rows(layouts.sizes, num_total)
            tensor_sizes = table.rows(layouts.tensor_sizes, len(layouts.num_chunks))
            start = 0
            for tensor_size, num_chunks in zip(tensor_sizes, layouts.num_chunks.tolist(), strict=True):
                end = start + num_chunks
                made.append((tensor_size, offsets[start:end], sizes[start:end]))
                start = end
        return made

    def build(self, *, path: str = "state_dict_metadata") -> dict[str, Any]:
        """Make the ``state_dict_metadata``, a new one at every call.

        Raises:
            PayloadError: if an entry that no column holds cannot be made.
        """
        columns = self._columns
        tensors = zip(self._of_tensor, columns.property_numbers.tolist(), strict=True)
        odd = iter(columns.odd)
        state: dict[str, Any] = {}
        for name, kind in zip(columns.names, columns.kinds, strict=True):
            if kind == TENSOR:
                (size, offsets, sizes), number = next(tensors)
                state[name] = TensorStorageMetadata(
                    TensorProperties(*columns.properties[number]),
                    size,
                    list(map(ChunkStorageMetadata, offsets, sizes)),
                )
            elif kind == BYTES:
                state[name] = BytesStorageMetadata()
            else:
                state[name] = decode_object(next(odd), path=f"{path}[{name!r}]")
        return state


# --------------------------------------------------------------------------------------------------
# From objects


def _kind_of(entry: Any) -> int:
    if type(entry) is BytesStorageMetadata and not entry.__dict__:
        return BYTES
    if (
        type(entry) is TensorStorageMetadata
        and tuple(entry.__dict__) == _TENSOR_FIELDS
        and type(entry.chunks) is list
        and type(entry.size) is torch.Size
        and len(entry.size) <= MAX_NUM_DIMS
        and are_regular_properties(entry.properties)
        and all(is_regular_chunk(chunk, entry.size) for chunk in entry.chunks)
    ):
        return TENSOR
    return _ODD


def state_columns_of(state: Any, *, path: str, strict: bool) -> StateColumns | None:
    """Make columns of a ``state_dict_metadata``, or None if it is no dict of names.

    Raises:
        UnencodableError: if an entry that no column holds cannot travel.
    """
    if not FIELDS_ARE_KNOWN or type(state) is not dict or not all(type(name) is str for name in state):
        return None
    properties = PropertiesTable()
    kinds = bytearray()
    property_numbers: list[int] = []
    of_tensor: list[tuple[int, int]] = []
    known: dict[int, dict[Any, int]] = {}
    odd: list[Any] = []
    for name, entry in state.items():
        kind = _kind_of(entry)
        kinds.append(kind)
        if kind == _ODD:
            odd.append(encode_object(entry, path=f"{path}[{name!r}]", strict=strict))
        elif kind == TENSOR:
            property_numbers.append(properties.number(property_values(entry.properties)))
            layout = (
                entry.size,
                tuple(chunk.offsets for chunk in entry.chunks),
                tuple(chunk.sizes for chunk in entry.chunks),
            )
            own = known.setdefault(len(entry.size), {})
            of_tensor.append((len(entry.size), own.setdefault(layout, len(own))))
    layouts = []
    bases: dict[int, int] = {}
    num_before = 0
    for num_dims in sorted(known):
        own = known[num_dims]
        bases[num_dims] = num_before
        num_before += len(own)
        layouts.append(
            Layouts(
                num_dims,
                _columns_of([size for size, _, _ in own], num_dims),
                np.asarray([len(offsets) for _, offsets, _ in own], dtype=np.int64),
                _columns_of([size for _, offsets, _ in own for size in offsets], num_dims),
                _columns_of([size for _, _, sizes in own for size in sizes], num_dims),
            )
        )
    layout_numbers = [bases[num_dims] + number for num_dims, number in of_tensor]
    return StateColumns(
        list(state),
        bytes(kinds),
        properties.values(),
        np.asarray(property_numbers, dtype=np.int64),
        layouts,
        np.asarray(layout_numbers, dtype=np.int64),
        odd,
    )


def _columns_of(sizes: list[torch.Size], num_dims: int) -> npt.NDArray[np.int64]:
    return np.asarray(sizes, dtype=np.int64).reshape(len(sizes), num_dims).T


# --------------------------------------------------------------------------------------------------
# On the wire. From chunk to chunk most numbers change by the same as before, or not at all: what travels
# is the steps, modulo 2**64.


def _pack_steps(columns: npt.NDArray[np.int64]) -> list[Any]:
    return [pack_ints(np.diff(column, prepend=np.int64(0))) for column in columns]


def _unpack_steps(tree: Any, num_dims: int, count: int, path: str) -> npt.NDArray[np.int64]:
    columns = [
        np.cumsum(unpack_ints(column, count=count, path=path)) for column in expect_list(tree, path, num_dims)
    ]
    return np.asarray(columns, dtype=np.int64).reshape(num_dims, count)


def encode_state(columns: StateColumns) -> dict[str, Any]:
    """Make a tree of a state in columns."""
    return {
        "names": columns.names,
        "kinds": columns.kinds,
        "properties": encode_properties_table(columns.properties),
        "property_numbers": pack_ints(columns.property_numbers),
        "layouts": [
            [
                layouts.num_dims,
                len(layouts.num_chunks),
                _pack_steps(layouts.tensor_sizes),
                pack_ints(layouts.num_chunks),
                _pack_steps(layouts.offsets),
                _pack_steps(layouts.sizes),
            ]
            for layouts in columns.layouts
        ],
        "layout_numbers": pack_ints(columns.layout_numbers),
        "odd": columns.odd,
    }


def decode_state(tree: Any, *, max_num_chunks: int, path: str) -> StateColumns:
    """Read a state in columns.

    Args:
        tree: what ``encode_state`` gave.
        max_num_chunks: how many chunks there may be at most; their number is on the word of a peer.
        path: where the tree stands, for errors.

    Raises:
        PayloadError: if it is no such tree.
    """
    columns = expect_map(tree, path, _KEYS)
    names = expect_str_list(columns["names"], f"{path}.names", unique=True)
    kinds = expect_bytes(columns["kinds"], f"{path}.kinds", len(names))
    if kinds and max(kinds) > _ODD:
        raise PayloadError(f"{path}.kinds", f"codes to {_ODD}", max(kinds))
    num_tensors = kinds.count(TENSOR)
    properties = decode_properties_table(columns["properties"], path=f"{path}.properties")
    property_numbers = unpack_ints(
        columns["property_numbers"],
        count=num_tensors,
        path=f"{path}.property_numbers",
        low=0,
        high=len(properties) - 1,
    )
    layouts = [
        _decode_layouts(layouts_tree, max_num_chunks, f"{path}.layouts")
        for layouts_tree in expect_list(columns["layouts"], f"{path}.layouts")
    ]
    num_chunks = np.concatenate([np.zeros(0, dtype=np.int64), *(own.num_chunks for own in layouts)])
    layout_numbers = unpack_ints(
        columns["layout_numbers"],
        count=num_tensors,
        path=f"{path}.layout_numbers",
        low=0,
        high=len(num_chunks) - 1,
    )
    for counts in (num_chunks, num_chunks[layout_numbers]):
        if float(counts.astype(np.float64).sum()) > max_num_chunks:
            raise PayloadError(f"{path}.layouts", f"at most {max_num_chunks} chunks", "more")
    odd = expect_list(columns["odd"], f"{path}.odd", kinds.count(_ODD))
    return StateColumns(names, kinds, properties, property_numbers, layouts, layout_numbers, odd)


def _decode_layouts(tree: Any, max_num_chunks: int, path: str) -> Layouts:
    num_dims_tree, count_tree, tensor_sizes, num_chunks_tree, offsets, sizes = expect_list(tree, path, 6)
    num_dims = expect_int(num_dims_tree, f"{path}.num_dims", 0, MAX_NUM_DIMS)
    # Each takes at least a byte of its column, which bounds the count.
    _, column = expect_list(num_chunks_tree, f"{path}.num_chunks", 2)
    count = expect_int(count_tree, f"{path}.count", 0, len(expect_bytes(column, f"{path}.num_chunks")))
    num_chunks = unpack_ints(
        num_chunks_tree, count=count, path=f"{path}.num_chunks", low=0, high=max_num_chunks
    )
    num_total = sum(num_chunks.tolist())
    if num_total > max_num_chunks:
        raise PayloadError(f"{path}.num_chunks", f"at most {max_num_chunks} chunks", num_total)
    return Layouts(
        num_dims,
        _unpack_steps(tensor_sizes, num_dims, count, f"{path}.tensor_sizes"),
        num_chunks,
        _unpack_steps(offsets, num_dims, num_total, f"{path}.offsets"),
        _unpack_steps(sizes, num_dims, num_total, f"{path}.sizes"),
    )
