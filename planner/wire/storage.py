"""``storage_data`` in columns: which chunk of which entry stands where, run by run.

A run is what one rank wrote, or one file holds. Keys are nothing but the name and offset of a chunk that
``state_dict_metadata`` has too, so a key is the number of an entry and the place of the chunk in it. Chunks
of an entry nearly always come in their order, and the index hint nearly always is that place: only what
departs from this travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from planner.errors import PayloadError
from planner.wire.check import expect_bytes, expect_int, expect_list, expect_map
from planner.wire.columns import Int64Column, pack_ints, pack_runs, unpack_ints, unpack_runs
from planner.wire.state import BYTES, StateColumns, StateObjects
from planner.wire.storage_infos import (
    StorageInfos,
    StorageInfoTable,
    decode_storage_infos,
    encode_storage_infos,
    is_regular_storage_info,
)
from planner.wire.tensors import is_regular_index, make_index

__all__ = ["StorageColumns", "decode_storage", "encode_storage", "storage_columns_of"]

_KEYS = frozenset(("num_runs", "counts", "entry_steps", "chunk_steps", "hints", "infos"))
_USUAL, _GIVEN, _NONE = range(3)


@dataclass(frozen=True)
class StorageColumns:
    """All of a ``storage_data``, in its order.

    Attributes:
        counts: how many there are in each run.
        entries: the number of the entry of each; shape (count,), int64.
        chunks: the place of the chunk in that entry, 0 for bytes; shape (count,), int64.
        hints: the index hint of each; None where all are usual: the place of the chunk, None for bytes.
        infos: where each stands.
    """

    counts: list[int]
    entries: Int64Column
    chunks: Int64Column
    hints: list[int | None] | None
    infos: StorageInfos

    def build_indices(self, objects: StateObjects, start: int, end: int) -> list[MetadataIndex]:
        """Make the keys from ``start`` to before ``end``; they share names and offsets with the state."""
        names, offsets = objects.names, objects.offsets
        new, set_attribute = object.__new__, object.__setattr__
        entries, chunks = self.entries[start:end].tolist(), self.chunks[start:end].tolist()
        made: list[MetadataIndex] = []
        if self.hints is not None:
            for entry, chunk, hint in zip(entries, chunks, self.hints[start:end], strict=True):
                of_entry = offsets[entry]
                made.append(make_index(names[entry], None if of_entry is None else of_entry[chunk], hint))
            return made
        # make_index, written out: this runs millions of times.
        for entry, chunk in zip(entries, chunks, strict=True):
            index = new(MetadataIndex)
            of_entry = offsets[entry]
            set_attribute(index, "fqn", names[entry])
            if of_entry is None:
                set_attribute(index, "index", None)
            else:
                set_attribute(index, "index", chunk)
                set_attribute(index, "offset", of_entry[chunk])
            made.append(index)
        return made

    def build(self, objects: StateObjects) -> dict[MetadataIndex, _StorageInfo]:
        """Make the ``storage_data``, a new one at every call.

        Raises:
            PayloadError: if two keys are equal.
        """
        num = len(self.entries)
        made = dict(zip(self.build_indices(objects, 0, num), self.infos.build(0, num), strict=True))
        if len(made) != num:
            raise PayloadError("storage_data", "keys that all differ", "one of them twice")
        return made


def storage_columns_of(storage_data: Any, objects: StateObjects) -> StorageColumns | None:
    """Make columns of a ``storage_data``, or None if they do not hold it."""
    if type(storage_data) is not dict:
        return None
    places: dict[tuple[str, torch.Size | None], tuple[int, int]] = {}
    for entry, (name, offsets) in enumerate(zip(objects.names, objects.offsets, strict=True)):
        if offsets is None:
            places.setdefault((name, None), (entry, 0))
            continue
        for chunk, offset in enumerate(offsets):
            places.setdefault((name, offset), (entry, chunk))
    rows: list[tuple[int, int]] = []
    hints: list[int | None] = []
    are_usual = True
    table = StorageInfoTable()
    for index, info in storage_data.items():
        if not is_regular_index(index) or not is_regular_storage_info(info):
            return None
        place = places.get((index.fqn, index.offset))
        if place is None:
            return None
        rows.append(place)
        hints.append(index.index)
        are_usual = are_usual and index.index == (None if index.offset is None else place[1])
        table.append(info)
    entries, chunks = np.asarray(rows, dtype=np.int64).reshape(len(rows), 2).T
    infos = table.infos()
    # A file is a run, unless files are many: then they are small, and have nothing in common.
    starts = np.flatnonzero(np.diff(infos.path_numbers, prepend=-1))
    counts = np.diff(starts, append=len(rows)).tolist() if len(starts) ** 2 <= len(rows) else [len(rows)]
    return StorageColumns(counts, entries, chunks, None if are_usual else hints, infos)


# --------------------------------------------------------------------------------------------------
# On the wire


def _numbers_so_far(entries: Int64Column) -> Int64Column:
    """Return, for each, how often its entry stands before it."""
    narrow = entries.astype(np.uint16) if len(entries) and int(entries.max()) < 2**16 else entries
    order = np.argsort(narrow, kind="stable")
    in_order = entries[order]
    starts = np.flatnonzero(np.diff(in_order, prepend=np.int64(-1)))
    numbers = np.empty(len(entries), dtype=np.int64)
    numbers[order] = np.arange(len(entries)) - np.repeat(starts, np.diff(starts, append=len(entries)))
    return numbers


def _first_of_runs(counts: Sequence[int]) -> npt.NDArray[np.intp]:
    """Return where each run starts that is not empty."""
    lengths = np.asarray(counts, dtype=np.intp)
    return (np.cumsum(lengths) - lengths)[lengths > 0]


def _steps_in_runs(column: Int64Column, counts: Sequence[int]) -> Int64Column:
    """Return the steps from one integer to the next, in each run from zero."""
    steps = np.diff(column, prepend=np.int64(0))
    firsts = _first_of_runs(counts)
    steps[firsts] = column[firsts]
    return steps


def _sum_in_runs(steps: Int64Column, counts: Sequence[int]) -> Int64Column:
    sums = np.cumsum(steps)
    firsts = _first_of_runs(counts)
    before = (sums - steps)[firsts]
    return sums - np.repeat(before, np.diff(firsts, append=len(steps)))


def encode_storage(columns: StorageColumns, state: StateColumns) -> dict[str, Any]:
    """Make a tree of storage_data in columns, for whoever has ``state``."""
    counts = columns.counts
    return {
        "num_runs": len(counts),
        "counts": pack_ints(counts),
        "entry_steps": pack_runs(_steps_in_runs(columns.entries, counts), counts),
        "chunk_steps": pack_runs(columns.chunks - _numbers_so_far(columns.entries), counts),
        "hints": None if columns.hints is None else _encode_hints(columns, columns.hints, state),
        "infos": encode_storage_infos(columns.infos, counts),
    }


def _usual_hints(entries: Int64Column, chunks: Int64Column, state: StateColumns) -> list[int | None]:
    is_bytes = (np.frombuffer(state.kinds, dtype=np.uint8) == BYTES)[entries]
    return [None if own else chunk for own, chunk in zip(is_bytes.tolist(), chunks.tolist(), strict=True)]


def _encode_hints(columns: StorageColumns, hints: list[int | None], state: StateColumns) -> list[Any]:
    kinds: list[int] = []
    given: list[int] = []
    usual = _usual_hints(columns.entries, columns.chunks, state)
    for hint, expected in zip(hints, usual, strict=True):
        if hint == expected:
            kinds.append(_USUAL)
        elif hint is None:
            kinds.append(_NONE)
        else:
            kinds.append(_GIVEN)
            given.append(hint)
    return [pack_runs(np.asarray(kinds, dtype=np.int64), columns.counts), pack_ints(given)]


def decode_storage(tree: Any, state: StateColumns, *, path: str) -> StorageColumns:
    """Read storage_data in columns.

    Raises:
        PayloadError: if it is no such tree, or does not fit ``state``.
    """
    columns = expect_map(tree, path, _KEYS)
    num_chunks = state.num_chunks()
    # Keys differ, so there cannot be more of them than chunks.
    most = int(num_chunks.sum())
    # Each takes at least a byte of its column, which bounds how many there are.
    counts_tree = expect_list(columns["counts"], f"{path}.counts", 2)
    max_num_runs = len(expect_bytes(counts_tree[1], f"{path}.counts"))
    num_runs = expect_int(columns["num_runs"], f"{path}.num_runs", 0, max_num_runs)
    counts = unpack_ints(counts_tree, count=num_runs, path=f"{path}.counts", low=0, high=most).tolist()
    if sum(counts) > most:
        raise PayloadError(f"{path}.counts", f"at most {most} keys", sum(counts))
    entries = _sum_in_runs(
        unpack_runs(columns["entry_steps"], counts=counts, path=f"{path}.entry_steps"), counts
    )
    if len(entries) and not (int(entries.min()) >= 0 and int(entries.max()) < len(num_chunks)):
        raise PayloadError(f"{path}.entry_steps", f"entries below {len(num_chunks)}", "others")
    chunks = unpack_runs(columns["chunk_steps"], counts=counts, path=f"{path}.chunk_steps")
    chunks = chunks + _numbers_so_far(entries)
    if ((chunks < 0) | (chunks >= num_chunks[entries])).any():
        raise PayloadError(f"{path}.chunk_steps", "chunks of the entries", "others")
    hints = None
    if columns["hints"] is not None:
        usual = _usual_hints(entries, chunks, state)
        hints = _decode_hints(columns["hints"], counts, usual, f"{path}.hints")
    infos = decode_storage_infos(columns["infos"], counts=counts, path=f"{path}.infos")
    return StorageColumns(counts, entries, chunks, hints, infos)


def _decode_hints(tree: Any, counts: list[int], usual: list[int | None], path: str) -> list[int | None]:
    kinds_tree, given_tree = expect_list(tree, path, 2)
    kinds = unpack_runs(kinds_tree, counts=counts, path=path, low=_USUAL, high=_NONE)
    given = iter(unpack_ints(given_tree, count=int((kinds == _GIVEN).sum()), path=path).tolist())
    return [
        expected if kind == _USUAL else next(given) if kind == _GIVEN else None
        for kind, expected in zip(kinds.tolist(), usual, strict=True)
    ]
