"""Columns of ``_StorageInfo``: where in which file each item of a checkpoint stands.

Files are written from start to end, so an offset nearly always is where the entry before it in the same
file ended; what travels is the difference, nearly always zero.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo

from planner.errors import PayloadError
from planner.wire.check import expect_list, expect_map, expect_str_list
from planner.wire.columns import pack_ints, unpack_ints

__all__ = ["StorageInfoColumns", "decode_storage_infos", "is_regular_storage_info"]

_FIELDS = ("relative_path", "offset", "length", "transform_descriptors")
_FIELDS_ARE_KNOWN = tuple(field.name for field in dataclasses.fields(_StorageInfo)) == _FIELDS
_MAX = 2**62
# Every info has its own copy of its list; this bounds what a hostile table could make us copy.
_MAX_NUM_DESCRIPTORS = 64


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


class StorageInfoColumns:
    """Collects regular storage infos, in order."""

    def __init__(self) -> None:
        self._paths: dict[str, int] = {}
        self._path_numbers: list[int] = []
        self._ends: list[int] = []
        self._gaps: list[int] = []
        self._lengths: list[int] = []
        self._descriptors: dict[tuple[str, ...], int] = {}
        self._descriptor_numbers: list[int] = []

    def append(self, info: _StorageInfo) -> None:
        """Add one regular storage info."""
        number = self._paths.setdefault(info.relative_path, len(self._ends))
        if number == len(self._ends):
            self._ends.append(0)
        self._path_numbers.append(number)
        self._gaps.append(info.offset - self._ends[number])
        self._ends[number] = info.offset + info.length
        self._lengths.append(info.length)
        descriptors = info.transform_descriptors
        # 0 stands for none.
        self._descriptor_numbers.append(
            0
            if descriptors is None
            else self._descriptors.setdefault(tuple(descriptors), len(self._descriptors) + 1)
        )

    def tree(self) -> dict[str, Any]:
        """Return the columns as msgpack."""
        return {
            "paths": list(self._paths),
            "path_numbers": pack_ints(self._path_numbers),
            "gaps": pack_ints(self._gaps),
            "lengths": pack_ints(self._lengths),
            "descriptors": [list(descriptors) for descriptors in self._descriptors],
            "descriptor_numbers": pack_ints(self._descriptor_numbers) if self._descriptors else None,
        }


def _expect_descriptors(tree: Any, path: str) -> list[str]:
    descriptors = expect_str_list(tree, path)
    if len(descriptors) > _MAX_NUM_DESCRIPTORS:
        raise PayloadError(path, f"at most {_MAX_NUM_DESCRIPTORS} descriptors", len(descriptors))
    return descriptors


def decode_storage_infos(tree: Any, *, count: int, path: str) -> list[_StorageInfo]:
    """Make ``count`` storage infos again, as they are after unpickling.

    Raises:
        PayloadError: if ``tree`` are no such columns.
    """
    expect_map(tree, path, ("paths", "path_numbers", "gaps", "lengths", "descriptors", "descriptor_numbers"))
    paths = expect_str_list(tree["paths"], f"{path}.paths", unique=True)
    path_numbers = unpack_ints(
        tree["path_numbers"], count=count, path=f"{path}.path_numbers", low=0, high=len(paths) - 1
    )
    gaps = unpack_ints(tree["gaps"], count=count, path=f"{path}.gaps")
    lengths = unpack_ints(tree["lengths"], count=count, path=f"{path}.lengths", low=-_MAX, high=_MAX)
    descriptors = [
        _expect_descriptors(row, f"{path}.descriptors")
        for row in expect_list(tree["descriptors"], f"{path}.descriptors")
    ]
    descriptor_numbers = [0] * count
    if tree["descriptor_numbers"] is not None:
        descriptor_numbers = unpack_ints(
            tree["descriptor_numbers"],
            count=count,
            path=f"{path}.descriptor_numbers",
            low=0,
            high=len(descriptors),
        ).tolist()
    ends = [0] * len(paths)
    infos: list[_StorageInfo] = []
    for path_number, gap, length, descriptor_number in zip(
        path_numbers.tolist(), gaps.tolist(), lengths.tolist(), descriptor_numbers, strict=True
    ):
        offset = ends[path_number] + gap
        if not -_MAX <= offset <= _MAX:
            raise PayloadError(f"{path}.gaps", f"offsets within {_MAX}", offset)
        ends[path_number] = offset + length
        info = object.__new__(_StorageInfo)
        info.relative_path = paths[path_number]
        info.offset = offset
        info.length = length
        if descriptor_number:
            info.transform_descriptors = list(descriptors[descriptor_number - 1])
        infos.append(info)
    return infos
