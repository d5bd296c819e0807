"""Sorting and grouping of integer rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner.wire.columns import Int64Column

__all__ = ["BoolColumn", "IntpColumn", "group_numbers", "group_starts", "stable_order"]

BoolColumn = npt.NDArray[np.bool_]
IntpColumn = npt.NDArray[np.intp]

_DIGIT_BITS = 16
_DIGIT_MASK = (1 << _DIGIT_BITS) - 1


def _digits(key: Int64Column) -> list[npt.NDArray[np.uint16]]:
    """Return the digits of ``key``, the least significant first; none for a key that is constant."""
    low, high = int(key.min()), int(key.max())
    # Unsigned arithmetic wraps: the difference is right for any two 64-bit integers.
    distance = key.view(np.uint64) - np.uint64(low & 0xFFFF_FFFF_FFFF_FFFF)
    num_bits = (high - low).bit_length()
    return [
        ((distance >> np.uint64(shift)) & np.uint64(_DIGIT_MASK)).astype(np.uint16)
        for shift in range(0, num_bits, _DIGIT_BITS)
    ]


def stable_order(keys: Sequence[Int64Column], num_rows: int) -> IntpColumn:
    """Return the order that sorts rows by ``keys``, the most significant first; equal rows stay in order.

    A radix sort in digits of 16 bits: numpy's own sort is one for these, and linear. Columns of plans
    have few digits that differ.

    Args:
        keys: the columns of the rows, each of shape (num_rows,).
        num_rows: how many rows there are.
    """
    order = np.arange(num_rows, dtype=np.intp)
    if num_rows > 1:
        for key in reversed(keys):
            for digit in _digits(key):
                order = order[np.argsort(digit[order], kind="stable")]
    return order


def group_starts(keys: Sequence[Int64Column], order: IntpColumn) -> IntpColumn:
    """Return where in ``order``, which sorts by ``keys``, rows begin that differ from the one before."""
    is_first = np.zeros(len(order), dtype=np.bool_)
    is_first[:1] = True
    for key in keys:
        ordered = key[order]
        is_first[1:] |= ordered[1:] != ordered[:-1]
    return np.flatnonzero(is_first)


def group_numbers(starts: IntpColumn, num_rows: int) -> IntpColumn:
    """Return the number of its group for each of ``num_rows`` rows, given where the groups start."""
    return np.repeat(np.arange(len(starts)), np.diff(starts, append=num_rows))
