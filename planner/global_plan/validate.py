"""Which tensors stock DCP's ``_validate_global_plan`` might have something to say about."""

from __future__ import annotations

import numpy as np

from planner.global_plan.layout import Chunks
from planner.global_plan.order import BoolColumn, group_numbers
from planner.global_plan.overlap import are_disjoint

__all__ = ["find_suspects"]

# Sums of two of these stay within 64 bits, and so do products that are no more than the square.
_MAX_COORDINATE = 2**61
_MAX_VOLUME = 2.0**62


def find_suspects(chunks: Chunks, *, must_fill: bool, has_twice: BoolColumn) -> BoolColumn:
    """Tell for each tensor whether it is not proven to be in order.

    Args:
        chunks: the chunks of tensors.
        must_fill: chunks have to be as much together as their tensor.
        has_twice: which tensors have two chunks at one offset; shape (num_tensors,).
    """
    num_tensors, num_chunks = len(chunks.starts), chunks.offsets.shape[1]
    if chunks.num_dims <= 0 or not num_tensors:  # scalars are not looked at
        return np.zeros(num_tensors, dtype=np.bool_)
    tensor_of = group_numbers(chunks.starts, num_chunks)
    is_bad = np.zeros(num_chunks, dtype=np.bool_)
    for offsets, sizes, ends in zip(chunks.offsets, chunks.sizes, chunks.tensor_sizes, strict=True):
        is_bad |= (offsets < 0) | (offsets > _MAX_COORDINATE) | (sizes < 0) | (sizes > _MAX_COORDINATE)
        is_bad |= offsets + sizes > ends[tensor_of]
    suspects = np.logical_or.reduceat(is_bad, chunks.starts)
    suspects |= (np.abs(chunks.tensor_sizes) > _MAX_COORDINATE).any(axis=0)
    if must_fill:
        suspects |= ~_is_filled(chunks)
    return suspects | ~are_disjoint(chunks, has_twice=has_twice)


def _is_filled(chunks: Chunks) -> BoolColumn:
    """Tell for each tensor whether the volumes of its chunks add up to its own, known for certain."""
    around = np.add.reduceat(np.abs(chunks.sizes.astype(np.float64)).prod(axis=0), chunks.starts)
    is_certain: BoolColumn = around < _MAX_VOLUME
    is_certain &= np.abs(chunks.tensor_sizes.astype(np.float64)).prod(axis=0) < _MAX_VOLUME
    volumes = np.add.reduceat(chunks.sizes.prod(axis=0), chunks.starts)
    is_certain &= volumes == chunks.tensor_sizes.prod(axis=0)
    return is_certain
