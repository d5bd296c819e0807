"""The pickle of a checkpoint's metadata, written from columns: none of its millions of objects is made.

Reading it gives what reading ``pickle.dumps`` of the same metadata gives, of the same classes, in the same
order, with a plain ``pickle.load``. Most of it are records that differ in a few integers, so all records of
one kind are written at once, each a template with its integers in their places. Whatever is no record is
pickled by ``pickle`` itself, and put between them.

What several objects share (names, paths, sizes) is made first, kept in the memo of whoever reads, and taken
from there by its number. Opcodes are those of ``pickletools``, protocol 3: later protocols number the memo
by what came before, and so cannot be put together from parts.
"""

from __future__ import annotations

import copyreg
import io
import pickle  # noqa: TID251 - the format of the file, which is DCP's
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
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

from planner.global_plan.order import BoolColumn, group_numbers, group_starts, stable_order
from planner.wire.columns import Int64Column
from planner.wire.state import BYTES, TENSOR, Layouts, StateColumns
from planner.wire.storage import StorageColumns
from planner.wire.tensors import FIELDS_ARE_KNOWN

__all__ = ["can_write", "metadata_pieces"]

_PROTOCOL = 3
_NUM_RECORDS = 2**16  # at a time
_PIECE_NBYTES = 2**20
_MAX_BINGET, _MAX_TUPLE = 2**8 - 1, 3
_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
_LONG_OF_8 = pickle.LONG1 + b"\x08"

_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    Metadata: ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    TensorStorageMetadata: ("properties", "size", "chunks"),
    BytesStorageMetadata: (),
    ChunkStorageMetadata: ("offsets", "sizes"),
    MetadataIndex: ("fqn", "index", "offset"),
    _StorageInfo: ("relative_path", "offset", "length", "transform_descriptors"),
}
_NEW_OBJECT: Any = copyreg.__newobj__  # type: ignore[attr-defined]  # not in its stub


def _are_pickled_as_known() -> bool:
    """Whether ``pickle`` makes of these classes what is written here: these attributes, and nothing else."""
    size = torch.Size((1, 2))
    samples: list[Any] = [
        Metadata({}),
        TensorStorageMetadata(TensorProperties(), size, []),
        BytesStorageMetadata(),
        ChunkStorageMetadata(size, size),
        MetadataIndex("name", size, 3),
        _StorageInfo("path", 1, 2, ["zstd"]),
        _StorageInfo("path", 1, 2),
    ]
    for sample in samples:
        state = {name: getattr(sample, name) for name in _ATTRIBUTES[type(sample)]}
        if type(sample) is _StorageInfo and sample.transform_descriptors is None:
            del state["transform_descriptors"]
        reduced = sample.__reduce_ex__(_PROTOCOL)
        if (
            reduced != (_NEW_OBJECT, (type(sample),), state or None, None, None)
            or list(reduced[2] or ()) != list(state)
            or hasattr(sample, "__setstate__")
        ):
            return False
    reduced_size: Any = size.__reduce__()
    return bool(reduced_size == (torch.Size, ((1, 2),)))


_IS_KNOWN = FIELDS_ARE_KNOWN and _are_pickled_as_known()


def can_write(state: StateColumns, storage: StorageColumns) -> bool:
    """Whether ``metadata_pieces`` can write these; if not, their objects can be made and pickled."""
    if not _IS_KNOWN or state.odd or storage.hints is not None:
        return False
    # Two keys that are equal are one key of a dict.
    num_chunks = state.num_chunks()
    firsts = np.cumsum(num_chunks) - num_chunks
    seen = np.zeros(int(num_chunks.sum()), dtype=np.bool_)
    seen[firsts[storage.entries] + storage.chunks] = True
    if int(seen.sum()) != len(storage.entries):
        return False
    return all(_differ_in_offsets(layouts) for layouts in state.layouts)


def _differ_in_offsets(layouts: Layouts) -> bool:
    """Whether no layout has two chunks that start at one place."""
    num_rows = layouts.offsets.shape[1]
    of_layout = np.repeat(np.arange(len(layouts.num_chunks)), layouts.num_chunks)
    keys = [of_layout, *layouts.offsets]
    return bool(len(group_starts(keys, stable_order(keys, num_rows))) == num_rows)


def metadata_pieces(
    state: StateColumns, storage: StorageColumns, attributes: Mapping[str, Any]
) -> Iterator[bytes]:
    """Yield the pickle of metadata in pieces of a few megabytes.

    Args:
        state: its ``state_dict_metadata``; together with ``storage`` one that ``can_write`` accepts.
        storage: its ``storage_data``.
        attributes: all its attributes in their order; the values of these two do not matter.
    """
    parts = _Parts()
    shared = parts.pickle(
        [torch.Size, _ATTRIBUTES, state.names, storage.infos.paths, storage.infos.descriptors]
    )
    # A tensor has properties of its own. Once pickled here they have all in common in the memo already.
    known_properties = [TensorProperties(*values) for values in state.properties]
    shared += pickle.POP + parts.pickle(known_properties) + pickle.POP
    properties = [parts.pickle_again(TensorProperties(*values)) for values in state.properties]
    get = _Get(parts.memo())  # of what is there before all else
    others = {
        name: parts.pickle(value)
        for name, value in attributes.items()
        if name not in ("state_dict_metadata", "storage_data")
    }
    sizes = _Sizes(state.layouts, first_number=len(parts.memo()))
    yield pickle.PROTO + bytes([_PROTOCOL]) + shared
    yield from sizes.definitions(get)
    yield get.new(Metadata) + pickle.EMPTY_DICT + pickle.MARK
    for name in attributes:
        yield get(name)
        if name == "state_dict_metadata":
            yield from _state_pieces(state, sizes, properties, get)
        elif name == "storage_data":
            yield from _storage_pieces(state, storage, sizes, get)
        else:
            yield others[name]
    yield pickle.SETITEMS + pickle.BUILD + pickle.STOP


def _state_pieces(
    state: StateColumns, sizes: _Sizes, properties: Sequence[bytes], get: _Get
) -> Iterator[bytes]:
    chunks_of_layout = [
        chunks for number in range(len(state.layouts)) for chunks in sizes.chunks_of_layouts(number, get)
    ]
    head = get.new(TensorStorageMetadata) + pickle.EMPTY_DICT + pickle.MARK + get("properties")
    new_bytes = get.new(BytesStorageMetadata) + pickle.SETITEM
    tensors = zip(state.property_numbers.tolist(), state.layout_numbers.tolist(), strict=True)
    yield pickle.EMPTY_DICT
    piece: list[bytes] = []
    nbytes = 0
    for name, kind in zip(state.names, state.kinds, strict=True):
        if kind == BYTES:
            entry = [get(name), new_bytes]
        else:
            property_number, layout_number = next(tensors)
            entry = [
                *(get(name), head, properties[property_number]),
                *(get("size"), get.number(int(sizes.of_tensors[layout_number]))),
                *(get("chunks"), pickle.EMPTY_LIST, pickle.MARK, chunks_of_layout[layout_number]),
                pickle.APPENDS + pickle.SETITEMS + pickle.BUILD + pickle.SETITEM,
            ]
        piece += entry
        nbytes += sum(map(len, entry))
        if nbytes >= _PIECE_NBYTES:
            yield b"".join(piece)
            piece.clear()
            nbytes = 0
    yield b"".join(piece)


def _storage_pieces(
    state: StateColumns, storage: StorageColumns, sizes: _Sizes, get: _Get
) -> Iterator[bytes]:
    is_tensor = np.frombuffer(state.kinds, dtype=np.uint8) == TENSOR
    first_chunks = np.zeros(len(state.kinds), dtype=np.int64)  # of the entry's layout, in all layouts
    first_chunks[is_tensor] = sizes.first_chunks[state.layout_numbers]
    of_offsets = np.append(sizes.of_offsets, 0)  # the last for what has none
    names = get.numbers_of(state.names)
    infos = storage.infos
    paths = get.numbers_of(infos.paths)
    descriptor_lists = [
        get("transform_descriptors")
        + pickle.EMPTY_LIST
        + pickle.MARK
        + b"".join(map(get, row))
        + pickle.APPENDS
        for row in infos.descriptors
    ]
    yield pickle.EMPTY_DICT
    for start in range(0, len(storage.entries), _NUM_RECORDS):
        own = slice(start, start + _NUM_RECORDS)
        entries, chunks = storage.entries[own], storage.chunks[own]
        has_chunk = is_tensor[entries]
        rows = _Records(len(entries))
        rows.text(get.new(MetadataIndex) + pickle.EMPTY_DICT + pickle.MARK + get("fqn"))
        rows.get(names[entries])
        rows.text(get("index"))
        with rows.where(~has_chunk):
            rows.text(pickle.NONE)
        with rows.where(has_chunk):
            rows.integer(chunks)
            rows.text(get("offset"))
            rows.get(of_offsets[np.where(has_chunk, first_chunks[entries] + chunks, -1)])
        rows.text(pickle.SETITEMS + pickle.BUILD)
        rows.text(get.new(_StorageInfo) + pickle.EMPTY_DICT + pickle.MARK + get("relative_path"))
        rows.get(paths[infos.path_numbers[own]])
        rows.text(get("offset"))
        rows.integer(infos.offsets[own])
        rows.text(get("length"))
        rows.integer(infos.lengths[own])
        for number, descriptors in enumerate(descriptor_lists, 1):
            with rows.where(infos.descriptor_numbers[own] == number):
                rows.text(descriptors)
        rows.text(pickle.SETITEMS + pickle.BUILD + pickle.SETITEM)
        yield rows.encode()


class _Parts:
    """Pickles objects for a stream that is put together of several parts."""

    def __init__(self) -> None:
        self._stream = io.BytesIO()
        self._pickler = pickle.Pickler(self._stream, _PROTOCOL)

    def pickle(self, value: Any) -> bytes:
        """Return what makes ``value``; what is in the memo by now is taken from there."""
        self._stream.seek(0)
        self._stream.truncate()
        self._pickler.dump(value)
        return self._stream.getvalue()[len(pickle.PROTO) + 1 : -len(pickle.STOP)]

    def pickle_again(self, value: Any) -> bytes:
        """Return the same, for any number of places: it adds nothing to the memo."""
        self._pickler.fast = True
        part = self.pickle(value)
        self._pickler.fast = False
        return part

    def memo(self) -> list[tuple[int, Any]]:
        """Return every object in the memo, after its number there."""
        memo: Any = self._pickler.memo
        return list(memo.copy().values())


class _Get:
    """Takes strings and classes from the memo.

    Args:
        memo: all that is in it, each after its number.
    """

    def __init__(self, memo: Sequence[tuple[int, Any]]) -> None:
        self._numbers = {value: number for number, value in memo if isinstance(value, str | type)}

    def __call__(self, value: str | type) -> bytes:
        return self.number(self._numbers[value])

    def number(self, number: int) -> bytes:
        """Return what takes the object of this number."""
        if number <= _MAX_BINGET:
            return pickle.BINGET + bytes([number])
        return pickle.LONG_BINGET + struct.pack("<I", number)

    def new(self, cls: type) -> bytes:
        """Return what makes an object of a class in the memo, without attributes."""
        return self(cls) + pickle.EMPTY_TUPLE + pickle.NEWOBJ

    def numbers_of(self, values: Sequence[str]) -> Int64Column:
        """Return the numbers of many strings."""
        return np.asarray([self._numbers[value] for value in values], dtype=np.int64)


class _Sizes:
    """The distinct sizes of all layouts, each once in the memo.

    Args:
        layouts: all layouts.
        first_number: the number in the memo that the first of them gets.

    Attributes:
        of_tensors: the number in the memo of each layout's tensor size; shape (num_layouts,).
        of_offsets: of each chunk's offsets, one layout after another; shape (num_chunks,).
        first_chunks: where the chunks of each layout begin there; shape (num_layouts,).
    """

    def __init__(self, layouts: Sequence[Layouts], first_number: int) -> None:
        self._layouts = layouts
        self._definitions: list[tuple[npt.NDArray[np.int64], int]] = []
        self._of_chunks: list[tuple[Int64Column, Int64Column]] = []
        of_tensors, nothing = [], np.zeros(0, dtype=np.int64)
        for own in layouts:
            rows = np.concatenate([own.tensor_sizes, own.offsets, own.sizes], axis=1)
            order = stable_order(list(rows), rows.shape[1])
            starts = group_starts(list(rows), order)
            numbers = np.empty(rows.shape[1], dtype=np.int64)
            numbers[order] = group_numbers(starts, len(order)) + first_number
            self._definitions.append((rows[:, order[starts]], first_number))
            first_number += len(starts)
            num_tensors, num_chunks = len(own.num_chunks), own.offsets.shape[1]
            tensors, offsets, sizes = np.split(numbers, [num_tensors, num_tensors + num_chunks])
            of_tensors.append(tensors)
            self._of_chunks.append((offsets, sizes))
        counts = np.concatenate([nothing, *(own.num_chunks for own in layouts)])
        self.of_tensors = np.concatenate([nothing, *of_tensors])
        self.of_offsets = np.concatenate([nothing, *(own for own, _ in self._of_chunks)])
        self.first_chunks = np.cumsum(counts) - counts

    def definitions(self, get: _Get) -> Iterator[bytes]:
        """Yield what makes all sizes and puts them into the memo."""
        for rows, first_number in self._definitions:
            num_dims = len(rows)
            for start in range(0, rows.shape[1], _NUM_RECORDS):
                own = rows[:, start : start + _NUM_RECORDS]
                records = _Records(own.shape[1])
                records.text(get(torch.Size) + (pickle.MARK if num_dims > _MAX_TUPLE else b""))
                for column in own:
                    records.integer(column)
                records.text(_TUPLES[num_dims] if num_dims <= _MAX_TUPLE else pickle.TUPLE)
                records.text(pickle.TUPLE1 + pickle.REDUCE + pickle.LONG_BINPUT)
                records.uint32(first_number + start + np.arange(own.shape[1]))
                records.text(pickle.POP)
                yield records.encode()

    def chunks_of_layouts(self, number: int, get: _Get) -> list[bytes]:
        """Return what makes the chunks of each of one of the ``Layouts``, after a mark."""
        offsets, sizes = self._of_chunks[number]
        records = _Records(len(offsets))
        records.text(get.new(ChunkStorageMetadata) + pickle.EMPTY_DICT + pickle.MARK + get("offsets"))
        records.get(offsets)
        records.text(get("sizes"))
        records.get(sizes)
        records.text(pickle.SETITEMS + pickle.BUILD)
        encoded = records.encode()
        ends = np.cumsum(self._layouts[number].num_chunks) * records.nbytes_each
        return [encoded[start:end] for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)]


class _Records:
    """Records that differ in integers, all encoded at once; each has the fields in the order of calls.

    Args:
        num_records: how many there are.
    """

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records
        self._template = bytearray()
        self._columns: list[tuple[int, npt.NDArray[np.uint8]]] = []
        self._conditions: list[tuple[slice, BoolColumn]] = []

    @property
    def nbytes_each(self) -> int:
        """The size of a record that has all fields."""
        return len(self._template)

    def text(self, data: bytes) -> None:
        """Add bytes that are the same in all."""
        self._template += data

    def get(self, numbers: Int64Column) -> None:
        """Add what takes an object from the memo."""
        if numbers.size and int(numbers.max()) > _MAX_BINGET:
            self._column(pickle.LONG_BINGET, numbers, "<u4")
        else:
            self._column(pickle.BINGET, numbers, "<u1")

    def uint32(self, numbers: Int64Column) -> None:
        """Add the bytes of integers from 0 to below 2**32."""
        self._column(b"", numbers, "<u4")

    def integer(self, values: Int64Column) -> None:
        """Add what makes an integer, in as many bytes as the largest takes."""
        low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
        if low >= 0 and high < 2**8:
            self._column(pickle.BININT1, values, "<u1")
        elif low >= 0 and high < 2**16:
            self._column(pickle.BININT2, values, "<u2")
        elif low >= -(2**31) and high < 2**31:
            self._column(pickle.BININT, values, "<i4")
        else:
            self._column(_LONG_OF_8, values, "<i8")

    def _column(self, code: bytes, values: Int64Column, dtype: str) -> None:
        self._template += code
        nbytes = np.dtype(dtype).itemsize
        column = np.ascontiguousarray(values, dtype=dtype).view(np.uint8).reshape(self._num_records, nbytes)
        self._columns.append((len(self._template), column))
        self._template += bytes(nbytes)

    @contextmanager
    def where(self, condition: BoolColumn) -> Iterator[None]:
        """Have the fields added inside only where ``condition`` holds."""
        start = len(self._template)
        yield
        self._conditions.append((slice(start, len(self._template)), condition))

    def encode(self) -> bytes:
        """Return all records, one after another."""
        records = np.empty((self._num_records, len(self._template)), dtype=np.uint8)
        records[:] = np.frombuffer(self._template, dtype=np.uint8)
        for start, column in self._columns:
            records[:, start : start + column.shape[1]] = column
        missing = [(own, condition) for own, condition in self._conditions if not condition.all()]
        if not missing:
            return records.tobytes()
        is_there = np.ones(records.shape, dtype=np.bool_)
        for own, condition in missing:
            is_there[:, own] = condition[:, np.newaxis]
        return records[is_there].tobytes()
