"""Integer columns: many integers as one little-endian array of the narrowest width that holds them.

A column is ``[width code, bytes]``. The number of elements is not in it: whoever reads a column knows
from elsewhere how many there must be, and a column of any other length is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.errors import PayloadError, UnencodableError
from planner.wire.check import expect_bytes, expect_int, expect_list

__all__ = [
    "Int64Column",
    "pack_flags",
    "pack_ints",
    "pack_optional_ints",
    "pack_runs",
    "unpack_flags",
    "unpack_ints",
    "unpack_optional_ints",
    "unpack_runs",
]

Int64Column = npt.NDArray[np.int64]

_WIDTHS = tuple(np.dtype(name) for name in ("<u1", "<u2", "<u4", "<i1", "<i2", "<i4", "<i8"))
_NUM_UNSIGNED = 3
_RANGES = tuple((int(np.iinfo(width).min), int(np.iinfo(width).max)) for width in _WIDTHS)


def pack_ints(values: Sequence[int] | Int64Column, *, path: str = "column") -> list[Any]:
    """Write integers as a column; equal values always give equal bytes.

    Raises:
        UnencodableError: if a value is beyond 64 bit.
    """
    try:
        column = np.asarray(values, dtype=np.int64)
    except OverflowError as error:
        raise UnencodableError(path, "int", "an integer of a column is beyond 64 bit") from error
    low, high = (int(column.min()), int(column.max())) if column.size else (0, 0)
    code = next(code for code, (least, most) in enumerate(_RANGES) if least <= low and high <= most)
    return [code, column.astype(_WIDTHS[code]).tobytes()]


def unpack_ints(
    tree: Any, *, count: int, path: str, low: int | None = None, high: int | None = None
) -> Int64Column:
    """Read a column of exactly ``count`` integers.

    Args:
        tree: the column as it came.
        count: how many integers there must be.
        path: where the column stands, for errors.
        low: the least integer allowed.
        high: the greatest integer allowed.

    Returns:
        A new int64 array of shape (count,).

    Raises:
        PayloadError: if it is no such column or an integer is out of bounds.
    """
    code_tree, data_tree = expect_list(tree, path, 2)
    width = _WIDTHS[expect_int(code_tree, f"{path}.width", 0, len(_WIDTHS) - 1)]
    data = expect_bytes(data_tree, path, count * width.itemsize)
    column = np.frombuffer(data, dtype=width).astype(np.int64)
    if count and low is not None and (found := int(column.min())) < low:
        raise PayloadError(path, f"integers from {low}", found)
    if count and high is not None and (found := int(column.max())) > high:
        raise PayloadError(path, f"integers to {high}", found)
    return column


def pack_flags(flags: Sequence[bool] | npt.NDArray[np.bool_]) -> bytes:
    """Write bools as a bit set, the first in the lowest bit of the first byte."""
    return np.packbits(np.asarray(flags, dtype=np.bool_), bitorder="little").tobytes()


def unpack_flags(tree: Any, *, count: int, path: str) -> npt.NDArray[np.bool_]:
    """Read a bit set of exactly ``count`` bools; bits past the last have to be zero.

    Raises:
        PayloadError: if it is no such bit set.
    """
    data = expect_bytes(tree, path, (count + 7) // 8)
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    if bits[count:].any():
        raise PayloadError(path, f"{count} bits", "a bit set past them")
    return bits[:count].astype(np.bool_)


def pack_optional_ints(values: Sequence[int | None], *, path: str = "column") -> Any:
    """Write integers some of which are None; a column that is None altogether is None."""
    present = [value is not None for value in values]
    if not any(present):
        return None
    return [
        None if all(present) else pack_flags(present),
        pack_ints([value for value in values if value is not None], path=path),
    ]


def unpack_optional_ints(
    tree: Any, *, count: int, path: str, low: int | None = None, high: int | None = None
) -> list[int | None]:
    """Read ``count`` integers some of which are None; bounds are those of the integers.

    Raises:
        PayloadError: if it is no such column.
    """
    if tree is None:
        return [None] * count
    flags_tree, ints_tree = expect_list(tree, path, 2)
    if flags_tree is None:
        present: list[int | None] = unpack_ints(
            ints_tree, count=count, path=path, low=low, high=high
        ).tolist()
        return present
    flags = unpack_flags(flags_tree, count=count, path=path)
    found = iter(unpack_ints(ints_tree, count=int(flags.sum()), path=path, low=low, high=high).tolist())
    return [next(found) if flag else None for flag in flags.tolist()]


def pack_runs(column: Int64Column, counts: Sequence[int]) -> Any:
    """Write a column that is made of runs, equal runs once; a column of zeros alone is None.

    What ranks have in common, such as the lengths of what each wrote, then costs next to nothing, however
    far apart it stands; deflate looks back no more than 32 kB.

    Args:
        column: the integers; shape (sum of counts,).
        counts: how many of them are in each run.
    """
    if not column.any():
        return None
    numbers: dict[tuple[int, bytes], int] = {}
    of_run: list[int] = []
    start = 0
    for count in counts:
        code, data = pack_ints(column[start : start + count])
        of_run.append(numbers.setdefault((code, data), len(numbers)))
        start += count
    return [[[code, data] for code, data in numbers], pack_ints(of_run)]


def unpack_runs(
    tree: Any, *, counts: Sequence[int], path: str, low: int | None = None, high: int | None = None
) -> Int64Column:
    """Read a column of runs of exactly ``counts`` integers; bounds are those of the integers.

    The counts, which come from a peer too, have to be bounded by whoever calls.

    Raises:
        PayloadError: if it is no such column.
    """
    if tree is None:
        column = np.zeros(sum(counts), dtype=np.int64)
        if len(column) and not ((low is None or low <= 0) and (high is None or high >= 0)):
            raise PayloadError(path, f"integers from {low} to {high}", 0)
        return column
    table_tree, numbers_tree = expect_list(tree, path, 2)
    table = expect_list(table_tree, path)
    of_run = unpack_ints(numbers_tree, count=len(counts), path=f"{path}.runs", low=0, high=len(table) - 1)
    known: dict[tuple[int, int], Int64Column] = {}
    runs = [np.zeros(0, dtype=np.int64)]
    for count, number in zip(counts, of_run.tolist(), strict=True):
        run = known.get((number, count))
        if run is None:
            run = unpack_ints(table[number], count=count, path=path, low=low, high=high)
            known[number, count] = run
        runs.append(run)
    return np.concatenate(runs)
