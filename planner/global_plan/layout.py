"""The items that are kept, name by name: the order of metadata, and the index hints."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.global_plan.order import BoolColumn, IntpColumn, group_numbers, group_starts, stable_order
from planner.global_plan.table import BYTES_DIMS, ItemTable, NotColumnarError
from planner.wire.columns import Int64Column
from planner.wire.plans import SHARD_CODE
from planner.wire.state import Layouts

__all__ = ["Chunks", "Layout", "find_layouts", "lay_out"]


@dataclass(frozen=True)
class Chunks:
    """The chunks of all tensors with the same number of dimensions, tensor after tensor.

    Attributes:
        num_dims: that number, or ``BYTES_DIMS``.
        entries: the number of each tensor's entry, ascending; shape (num_tensors,).
        starts: where the chunks of each tensor start; shape (num_tensors,).
        offsets: shape (max(num_dims, 0), num_chunks), int64.
        sizes: likewise.
        tensor_sizes: shape (max(num_dims, 0), num_tensors), int64.
    """

    num_dims: int
    entries: IntpColumn
    starts: IntpColumn
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    tensor_sizes: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """What is kept, as one entry for each name.

    Attributes:
        firsts: the first item of each entry; entries are in the order of these; shape (num_entries,).
        names: the name of each entry as a number; shape (num_entries,).
        is_odd: entries that stock DCP refuses, or that are not what columns hold; shape (num_entries,).
        hints: the index hint of each kept item of a tensor; shape (num_items,), int64.
        chunks: what the entries of tensors hold; for those that are odd, anything.
    """

    firsts: IntpColumn
    names: Int64Column
    is_odd: BoolColumn
    hints: Int64Column
    chunks: list[Chunks]


def lay_out(table: ItemTable, kept: BoolColumn) -> Layout:
    """Put the kept items in the order in which ``create_default_global_save_plan`` meets their names."""
    numbers = np.flatnonzero(kept)
    names = table.names[numbers]
    first_of_name = np.full(table.num_names, len(table.ranks), dtype=np.int64)
    # Of equal names the last assignment stays: backwards that is the first item.
    first_of_name[names[::-1]] = numbers[::-1]
    # Entries sort by their first item, which is a number as good as the name's.
    sort_key = first_of_name[names]
    order = stable_order([sort_key], len(numbers))
    grouped = numbers[order]
    starts = group_starts([sort_key], order)
    entry_of = group_numbers(starts, len(grouped))
    firsts = grouped[starts]

    hints = np.zeros(len(table.ranks), dtype=np.int64)
    hints[grouped] = np.arange(len(grouped)) - starts[entry_of]
    # Only shards may follow, and only with as many dimensions, which bytes never have.
    is_late = grouped != firsts[entry_of]
    is_refused = is_late & (table.codes[grouped] != SHARD_CODE)
    is_refused |= table.num_dims[grouped] != table.num_dims[firsts][entry_of]
    is_odd = np.zeros(len(firsts), dtype=np.bool_)
    is_odd[entry_of[is_refused]] = True
    is_odd_item = is_odd[entry_of]
    return Layout(
        firsts=firsts,
        names=table.names[firsts],
        is_odd=is_odd,
        hints=hints,
        chunks=[
            _take_chunks(table, number, grouped[taken], entry_of[taken])
            for number, size_class in enumerate(table.classes)
            if size_class.num_dims != BYTES_DIMS
            for taken in [np.flatnonzero((table.num_dims[grouped] == size_class.num_dims) & ~is_odd_item)]
        ],
    )


def _take_chunks(table: ItemTable, class_number: int, numbers: IntpColumn, entry_of: IntpColumn) -> Chunks:
    size_class = table.classes[class_number]
    rows = table.rows[numbers]
    starts = group_starts([entry_of.astype(np.int64)], np.arange(len(entry_of), dtype=np.intp))
    return Chunks(
        num_dims=size_class.num_dims,
        entries=entry_of[starts],
        starts=starts,
        offsets=size_class.offsets[:, rows],
        sizes=size_class.sizes[:, rows],
        tensor_sizes=table.tensor_sizes(numbers[starts], size_class.num_dims),
    )


def find_layouts(chunks: Chunks) -> tuple[Layouts, Int64Column]:
    """Find tensors that are cut in the same way.

    Returns:
        The distinct layouts, and which of them each tensor has; shape (num_tensors,).

    Raises:
        NotColumnarError: chance has it that two that differ cannot be told apart.
    """
    num_chunks = chunks.offsets.shape[1]
    lengths = np.diff(chunks.starts, append=num_chunks)
    place = np.arange(num_chunks) - np.repeat(chunks.starts, lengths)
    # Sums of random numbers tell layouts apart but for chance, and then that is checked.
    random = np.random.default_rng(0)

    def some(count: int) -> npt.NDArray[np.uint64]:
        return random.integers(0, 2**64 - 1, count, dtype=np.uint64) | np.uint64(1)

    marks = np.ones(num_chunks, dtype=np.uint64)
    for column in (*chunks.offsets, *chunks.sizes):
        marks += column.view(np.uint64) * some(1)
    marks *= some(int(lengths.max()) if len(lengths) else 0)[place]
    sums = np.add.reduceat(marks, chunks.starts) + lengths.astype(np.uint64) * some(1)
    for column in chunks.tensor_sizes:
        sums += column.view(np.uint64) * some(1)
    _, samples, numbers = np.unique(sums, return_index=True, return_inverse=True)
    order = np.argsort(samples)  # in the order of their first tensor
    rank_of = np.empty(len(order), dtype=np.int64)
    rank_of[order] = np.arange(len(order))
    numbers, samples = rank_of[numbers], samples[order]

    sample_of = samples[numbers]
    if (lengths != lengths[sample_of]).any():
        raise NotColumnarError
    at_sample = place + np.repeat(chunks.starts[sample_of], lengths)
    columns = (*chunks.offsets, *chunks.sizes)
    if any((column != column[at_sample]).any() for column in columns) or any(
        (column != column[sample_of]).any() for column in chunks.tensor_sizes
    ):
        raise NotColumnarError
    is_sample = np.zeros(len(lengths), dtype=np.bool_)
    is_sample[samples] = True
    taken = np.repeat(is_sample, lengths)
    return (
        Layouts(
            chunks.num_dims,
            chunks.tensor_sizes[:, samples],
            lengths[samples].astype(np.int64),
            chunks.offsets[:, taken],
            chunks.sizes[:, taken],
        ),
        numbers,
    )
