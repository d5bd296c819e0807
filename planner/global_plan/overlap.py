"""Proofs that no two chunks of a tensor overlap, each for many tensors at once.

Stock DCP's check calls two chunks apart if along some dimension one ends before the other starts. It
compares each chunk with those that a sweep along the longest dimension finds beside it, which is every
pair where the tensor is cut along another. A proof says the same about all pairs in linear time, or
n log n; none says that chunks do overlap.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from planner.global_plan.layout import Chunks
from planner.global_plan.order import BoolColumn, IntpColumn, group_numbers, group_starts, stable_order

__all__ = ["are_disjoint"]

_MAX_NUM_DIMS = 8
_MAX_NUM_POINTS = 1 << 20


def are_disjoint(chunks: Chunks, *, has_twice: BoolColumn) -> BoolColumn:
    """Tell for each tensor whether its chunks are proven to be apart.

    Args:
        chunks: the chunks; all within their tensors.
        has_twice: which tensors have two chunks at one offset; shape (num_tensors,).
    """
    proven = _follow_each_other(chunks)
    if not proven.all():
        proven |= _lie_on_grid(chunks) & ~has_twice
    open_tensors = np.flatnonzero(~proven)
    if len(open_tensors) and chunks.num_dims <= _MAX_NUM_DIMS:
        for batch in _batches(chunks, open_tensors):
            proven[batch] = _fill_exactly(_select(chunks, batch))
    return proven


def _all_of_tensor(holds: BoolColumn, starts: IntpColumn) -> BoolColumn:
    return np.logical_and.reduceat(holds, starts)


def _follow_each_other(chunks: Chunks) -> BoolColumn:
    """Along one dimension each chunk, in their order, starts where the one before ends or later."""
    proven = np.zeros(len(chunks.starts), dtype=np.bool_)
    for offsets, sizes in zip(chunks.offsets, chunks.sizes, strict=True):
        follows = np.ones(len(offsets), dtype=np.bool_)
        follows[1:] = offsets[1:] >= offsets[:-1] + sizes[:-1]
        follows[chunks.starts] = True
        proven |= _all_of_tensor(follows, chunks.starts)
    return proven


def _lie_on_grid(chunks: Chunks) -> BoolColumn:
    """Along every dimension chunks start at multiples of the greatest size, or at the tensor's end.

    Two that start at different places of such a dimension are apart, and two with different offsets
    do so along some dimension.
    """
    tensor_of = group_numbers(chunks.starts, chunks.offsets.shape[1])
    proven = np.ones(len(chunks.starts), dtype=np.bool_)
    for offsets, sizes, ends in zip(chunks.offsets, chunks.sizes, chunks.tensor_sizes, strict=True):
        steps = np.maximum(np.maximum.reduceat(sizes, chunks.starts), 1)
        is_on_grid = (offsets % steps[tensor_of] == 0) | (offsets == ends[tensor_of])
        proven &= _all_of_tensor(is_on_grid, chunks.starts)
    return proven


def _batches(chunks: Chunks, tensors: IntpColumn) -> Iterator[IntpColumn]:
    """Cut ``tensors`` into runs whose chunks have a bounded number of corners together."""
    num_chunks = np.diff(chunks.starts, append=chunks.offsets.shape[1])[tensors]
    points_before = np.cumsum(num_chunks << chunks.num_dims)
    batch_of = points_before // _MAX_NUM_POINTS
    yield from np.split(tensors, np.flatnonzero(np.diff(batch_of)) + 1)


def _select(chunks: Chunks, tensors: IntpColumn) -> Chunks:
    num_all = chunks.offsets.shape[1]
    is_taken = np.zeros(len(chunks.starts), dtype=np.bool_)
    is_taken[tensors] = True
    columns = np.flatnonzero(is_taken[group_numbers(chunks.starts, num_all)])
    lengths = np.diff(chunks.starts, append=num_all)[tensors]
    return Chunks(
        num_dims=chunks.num_dims,
        entries=chunks.entries[tensors],
        starts=np.cumsum(lengths) - lengths,
        offsets=chunks.offsets[:, columns],
        sizes=chunks.sizes[:, columns],
        tensor_sizes=chunks.tensor_sizes[:, tensors],
    )


def _fill_exactly(chunks: Chunks) -> BoolColumn:
    """Every place of the tensor is in just one chunk, and empty chunks lie on the tensor's border.

    A sum of boxes is known by its corners, counted with alternating signs: it is the tensor's own box
    where the corners of the chunks cancel out but for the tensor's. For an empty chunk they always do.
    """
    num_chunks, num_tensors = chunks.offsets.shape[1], len(chunks.starts)
    tensor_of = group_numbers(chunks.starts, num_chunks)
    is_empty = (chunks.sizes == 0).any(axis=0)
    is_at_border = (
        (chunks.sizes == 0) & ((chunks.offsets == 0) | (chunks.offsets == chunks.tensor_sizes[:, tensor_of]))
    ).any(axis=0)
    proven = _all_of_tensor(~is_empty | is_at_border, chunks.starts)

    lows = np.concatenate([chunks.offsets, np.zeros_like(chunks.tensor_sizes)], axis=1)
    highs = np.concatenate([chunks.offsets + chunks.sizes, chunks.tensor_sizes], axis=1)
    boxes = np.concatenate([tensor_of, np.arange(num_tensors)])
    signs = np.concatenate([np.ones(num_chunks, dtype=np.int64), -np.ones(num_tensors, dtype=np.int64)])
    points, point_tensors, point_signs = _corners(lows, highs, boxes, signs)
    keys = [point_tensors, *points]
    order = stable_order(keys, len(point_tensors))
    starts = group_starts(keys, order)
    sums = np.add.reduceat(point_signs[order], starts)
    proven[point_tensors[order[starts[sums != 0]]]] = False
    return proven


def _corners(
    lows: npt.NDArray[np.int64],
    highs: npt.NDArray[np.int64],
    boxes: IntpColumn,
    signs: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the corners of boxes, shape (num_dims, num_points), and for each its tensor and sign."""
    num_dims = len(lows)
    masks = range(1 << num_dims)
    points = np.stack(
        [
            np.concatenate([(highs if mask >> dim & 1 else lows)[dim] for mask in masks])
            for dim in range(num_dims)
        ]
    )
    signed = np.concatenate([-signs if mask.bit_count() % 2 else signs for mask in masks])
    return points, np.tile(boxes.astype(np.int64), len(masks)), signed
