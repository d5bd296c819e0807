"""``_StorageInfo``, where DCP's file writers say in which file an item stands, as columns.

A writer fills a file from start to end, so an offset nearly always is where the entry before it in the same
file ended; what travels is the difference, nearly always zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.filesystem import _StorageInfo

from planner.errors import PayloadError
from planner.wire.check import expect_list, expect_map, expect_str_list
from planner.wire.columns import Int64Column, pack_runs, unpack_runs

__all__ = [
    "StorageInfoTable",
    "StorageInfos",
    "decode_storage_infos",
    "encode_storage_infos",
    "is_regular_storage_info",
    "join_storage_infos",
]

_FIELDS = ("relative_path", "offset", "length", "transform_descriptors")
_FIELDS_ARE_KNOWN = tuple(field.name for field in dataclasses.fields(_StorageInfo)) == _FIELDS
_MAX = 2**62
# Every info has its own copy of its list; this bounds what a hostile table could make us copy.
_MAX_NUM_DESCRIPTORS = 64
_KEYS = frozenset(("paths", "path_steps", "gaps", "lengths", "descriptors", "descriptor_numbers"))


@dataclass(frozen=True)
class StorageInfos:
    """Any number of regular storage infos, in order.

    Attributes:
        paths: the distinct relative paths, in the order of their first info.
        path_numbers: the path of each info; shape (count,), as all below.
        offsets: bytes from the start of the file.
        lengths: bytes.
        descriptors: the distinct lists of transform descriptors.
        descriptor_numbers: 0 for an info that has none, else the number of its list plus 1.
    """

    paths: list[str]
    path_numbers: Int64Column
    offsets: Int64Column
    lengths: Int64Column
    descriptors: list[list[str]]
    descriptor_numbers: Int64Column

    def __len__(self) -> int:
        return len(self.offsets)

    def build(self, start: int, end: int) -> list[_StorageInfo]:
        """Make the infos from ``start`` to before ``end``, as after unpickling; new ones at every call."""
        own = slice(start, end)
        paths, new = self.paths, object.__new__
        infos: list[_StorageInfo] = []
        for path_number, offset, length in zip(
            self.path_numbers[own].tolist(),
            self.offsets[own].tolist(),
            self.lengths[own].tolist(),
            strict=True,
        ):
            info = new(_StorageInfo)
            info.relative_path = paths[path_number]
            info.offset = offset
            info.length = length
            infos.append(info)
        for position in np.flatnonzero(self.descriptor_numbers[own]).tolist():
            number = int(self.descriptor_numbers[start + position])
            infos[position].transform_descriptors = list(self.descriptors[number - 1])
        return infos


def is_regular_storage_info(info: Any) -> bool:
    """Tell whether ``info`` is a ``_StorageInfo`` as DCP's writers make them."""
    if not _FIELDS_ARE_KNOWN or type(info) is not _StorageInfo:
        return False
    attributes = info.__dict__
    offset, length = attributes.get("offset"), attributes.get("length")
    # After unpickling a None is not there any more, see _StorageInfo.__getstate__.
    num_attributes = 4 if "transform_descriptors" in attributes else 3
    return (
        len(attributes) == num_attributes
        and type(attributes.get("relative_path")) is str
        and type(offset) is int
        and type(length) is int
        and -_MAX <= offset <= _MAX
        and -_MAX <= length <= _MAX
        and _are_regular_descriptors(attributes.get("transform_descriptors"))
    )


def _are_regular_descriptors(descriptors: Any) -> bool:
    return descriptors is None or (
        type(descriptors) is list
        and len(descriptors) <= _MAX_NUM_DESCRIPTORS
        and all(type(descriptor) is str for descriptor in descriptors)
    )


class StorageInfoTable:
    """Collects regular storage infos, in order."""

    def __init__(self) -> None:
        self._paths: dict[str, int] = {}
        self._descriptors: dict[tuple[str, ...], int] = {}
        self._rows: list[tuple[int, int, int, int]] = []

    def append(self, info: _StorageInfo) -> None:
        """Add one regular storage info."""
        number = self._paths.setdefault(info.relative_path, len(self._paths))
        descriptors = info.transform_descriptors
        descriptor_number = 0
        if descriptors is not None:
            descriptor_number = self._descriptors.setdefault(tuple(descriptors), len(self._descriptors) + 1)
        self._rows.append((number, info.offset, info.length, descriptor_number))

    def infos(self) -> StorageInfos:
        """Return what was collected."""
        columns = np.asarray(self._rows, dtype=np.int64).reshape(len(self._rows), 4).T
        path_numbers, offsets, lengths, descriptor_numbers = columns
        return StorageInfos(
            list(self._paths),
            path_numbers,
            offsets,
            lengths,
            [list(descriptors) for descriptors in self._descriptors],
            descriptor_numbers,
        )


def join_storage_infos(parts: Sequence[StorageInfos]) -> StorageInfos:
    """Return all infos of ``parts``, one part after another."""
    paths: dict[str, int] = {}
    descriptors: dict[tuple[str, ...], int] = {}
    nothing = np.zeros(0, dtype=np.int64)
    path_numbers, descriptor_numbers = [nothing], [nothing]
    for part in parts:
        own_paths = [paths.setdefault(path, len(paths)) for path in part.paths]
        path_numbers.append(np.asarray(own_paths, dtype=np.int64)[part.path_numbers])
        # 0 stays 0.
        own = [0, *(descriptors.setdefault(tuple(row), len(descriptors) + 1) for row in part.descriptors)]
        descriptor_numbers.append(np.asarray(own, dtype=np.int64)[part.descriptor_numbers])
    return StorageInfos(
        list(paths),
        np.concatenate(path_numbers),
        np.concatenate([nothing, *(part.offsets for part in parts)]),
        np.concatenate([nothing, *(part.lengths for part in parts)]),
        [list(row) for row in descriptors],
        np.concatenate(descriptor_numbers),
    )


# --------------------------------------------------------------------------------------------------
# All arithmetic on offsets is modulo 2**64, here and there, and so exact for those that are allowed.


def _by_path(path_numbers: Int64Column) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Return an order that puts infos with the same path together, and where in it another path begins."""
    if (path_numbers[1:] >= path_numbers[:-1]).all():
        order = np.arange(len(path_numbers), dtype=np.intp)
    else:
        order = np.argsort(path_numbers, kind="stable")
    is_start = np.ones(len(order), dtype=np.bool_)
    in_order = path_numbers[order]
    is_start[1:] = in_order[1:] != in_order[:-1]
    return order, is_start


def _gaps_of(infos: StorageInfos) -> Int64Column:
    order, is_start = _by_path(infos.path_numbers)
    offsets = infos.offsets[order]
    ends = np.zeros(len(order), dtype=np.int64)
    ends[1:] = (offsets + infos.lengths[order])[:-1]
    ends[is_start] = 0
    gaps = np.empty(len(order), dtype=np.int64)
    gaps[order] = offsets - ends
    return gaps


def _offsets_of(path_numbers: Int64Column, gaps: Int64Column, lengths: Int64Column) -> Int64Column:
    order, is_start = _by_path(path_numbers)
    steps = gaps[order] + lengths[order]
    ends = np.cumsum(steps)
    starts = np.flatnonzero(is_start)
    before = (ends - steps)[starts]
    before = np.repeat(before, np.diff(starts, append=len(order)))
    offsets = np.empty(len(order), dtype=np.int64)
    offsets[order] = ends - before - lengths[order]
    return offsets


def encode_storage_infos(infos: StorageInfos, counts: Sequence[int]) -> dict[str, Any]:
    """Make a tree of storage infos, of which ``counts`` each have something in common, such as their rank."""
    path_steps = np.diff(infos.path_numbers, prepend=np.int64(0))
    return {
        "paths": infos.paths,
        "path_steps": pack_runs(path_steps, counts),
        "gaps": pack_runs(_gaps_of(infos), counts),
        "lengths": pack_runs(infos.lengths, counts),
        "descriptors": infos.descriptors,
        "descriptor_numbers": pack_runs(infos.descriptor_numbers, counts),
    }


def _expect_descriptors(tree: Any, path: str) -> list[str]:
    descriptors = expect_str_list(tree, path)
    if len(descriptors) > _MAX_NUM_DESCRIPTORS:
        raise PayloadError(path, f"at most {_MAX_NUM_DESCRIPTORS} descriptors", len(descriptors))
    return descriptors


def decode_storage_infos(tree: Any, *, counts: Sequence[int], path: str) -> StorageInfos:
    """Read storage infos again; ``counts`` as for encoding, bounded by whoever calls.

    Raises:
        PayloadError: if ``tree`` are no such columns.
    """
    expect_map(tree, path, _KEYS)
    paths = expect_str_list(tree["paths"], f"{path}.paths", unique=True)
    path_numbers = np.cumsum(unpack_runs(tree["path_steps"], counts=counts, path=f"{path}.path_steps"))
    _expect_within(path_numbers, f"{path}.path_steps", 0, len(paths) - 1)
    gaps = unpack_runs(tree["gaps"], counts=counts, path=f"{path}.gaps")
    lengths = unpack_runs(tree["lengths"], counts=counts, path=f"{path}.lengths", low=-_MAX, high=_MAX)
    descriptors = [
        _expect_descriptors(row, f"{path}.descriptors")
        for row in expect_list(tree["descriptors"], f"{path}.descriptors")
    ]
    descriptor_numbers = unpack_runs(
        tree["descriptor_numbers"],
        counts=counts,
        path=f"{path}.descriptor_numbers",
        low=0,
        high=len(descriptors),
    )
    offsets = _offsets_of(path_numbers, gaps, lengths)
    _expect_within(offsets, f"{path}.gaps", -_MAX, _MAX)
    return StorageInfos(paths, path_numbers, offsets, lengths, descriptors, descriptor_numbers)


def _expect_within(column: Int64Column, path: str, low: int, high: int) -> None:
    if len(column) and not (low <= int(column.min()) and int(column.max()) <= high):
        raise PayloadError(path, f"integers from {low} to {high}", "others")
