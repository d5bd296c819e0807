"""Write results: what a rank's writer has to say about each item of its final plan.

A regular result names an item of the final plan by its position there and has a ``_StorageInfo``;
everything else is sent as an object, with its place among the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from planner.errors import PayloadError, UnencodableError
from planner.wire.check import expect_int, expect_list, expect_map
from planner.wire.columns import Int64Column, pack_ints, unpack_ints
from planner.wire.frame import Kind, decode_message, encode_message
from planner.wire.gc_pause import paused_gc
from planner.wire.objects import decode_object, encode_object, type_name_of
from planner.wire.storage_infos import (
    StorageInfos,
    StorageInfoTable,
    decode_storage_infos,
    encode_storage_infos,
    is_regular_storage_info,
)
from planner.wire.tensors import (
    FIELDS_ARE_KNOWN,
    INT64_MAX,
    INT64_MIN,
    is_regular_index,
    make_index,
)

__all__ = ["ResultColumns", "decode_result_columns", "decode_results", "encode_results"]

_NUM_RESULT_FIELDS = 3
_KEYS = frozenset(("base_count", "count", "items", "sizes", "infos", "odd_positions", "odd_results"))
_IndexKey = tuple[str, torch.Size | None, int | None]


@dataclass(frozen=True)
class ResultColumns:
    """One rank's regular results.

    Attributes:
        items: the position in the final plan of the item of each; shape (count,).
        sizes: ``size_in_bytes`` of each; shape (count,).
        infos: ``storage_data`` of each.
    """

    items: Int64Column
    sizes: Int64Column
    infos: StorageInfos


def _index_key(index: Any) -> _IndexKey | None:
    """Return all that a regular index consists of, its hint too; None for other indices."""
    if not is_regular_index(index):
        return None
    return (index.fqn, index.offset, index.index)


def _index_keys(base: SavePlan | None) -> list[_IndexKey | None]:
    items: Any = getattr(base, "items", None)
    if type(items) is not list:
        # Items that are still in columns know their indices without being made.
        return items.index_keys() if hasattr(items, "index_keys") else []
    return [_index_key(getattr(item, "index", None)) for item in items]


@paused_gc()
def encode_results(
    results: list[WriteResult], base: SavePlan | None, *, path: str = "results", strict: bool
) -> bytes:
    """Encode the results of one rank.

    Args:
        results: what the storage writer returned.
        base: the final plan of this rank, which whoever decodes has too; None if there is none.
        path: what to call the results in errors.
        strict: refuse what only pickle can carry.

    Raises:
        UnencodableError: if ``results`` are no list of ``WriteResult``, or a part cannot travel.
    """
    given: Any = results
    if not isinstance(given, list):
        raise UnencodableError(path, type_name_of(results), "write_data has to give a list of WriteResult")
    positions = _Positions(base)
    items: list[int] = []
    sizes: list[int] = []
    infos = StorageInfoTable()
    odd_positions: list[int] = []
    odd_results: list[Any] = []
    for number, result in enumerate(given):
        if not isinstance(result, WriteResult):
            reason = "write_data has to give a list of WriteResult"
            raise UnencodableError(f"{path}[{number}]", type_name_of(result), reason)
        found = positions.find(result.index) if _is_regular(result) else None
        if found is None:
            odd_positions.append(number)
            odd_results.append(encode_object(result, path=f"{path}[{number}]", strict=strict))
            continue
        items.append(found)
        sizes.append(result.size_in_bytes)
        infos.append(result.storage_data)
    tree = {
        "base_count": len(positions),
        "count": len(results),
        "items": None if items == list(range(len(positions))) else pack_ints(items),
        "sizes": pack_ints(sizes),
        "infos": encode_storage_infos(infos.infos(), [len(items)]),
        "odd_positions": pack_ints(odd_positions),
        "odd_results": odd_results,
    }
    return encode_message(Kind.WRITE_RESULTS, tree)


def _is_regular(result: WriteResult) -> bool:
    if type(result) is not WriteResult or not FIELDS_ARE_KNOWN:
        return False
    attributes = result.__dict__
    size = attributes.get("size_in_bytes")
    return (
        len(attributes) == _NUM_RESULT_FIELDS
        and type(size) is int
        and INT64_MIN <= size <= INT64_MAX
        and is_regular_storage_info(attributes.get("storage_data"))
        and is_regular_index(attributes.get("index"))
    )


class _Positions:
    """Where in the final plan an index stands."""

    def __init__(self, base: SavePlan | None) -> None:
        self._base = base
        items = base.items if base is not None and type(base.items) is list else []
        # Writers return the very index of an item, and thousands of sizes take long to compare.
        self._by_id = {id(getattr(item, "index", None)): position for position, item in enumerate(items)}
        self._by_key: dict[_IndexKey, int] | None = None
        self._count = len(items) if items else len(_index_keys(base))

    def __len__(self) -> int:
        return self._count

    def find(self, index: MetadataIndex) -> int | None:
        """Return the position of a regular ``index``, or of one that is equal, hint and all."""
        found = self._by_id.get(id(index))
        if found is not None:
            return found
        if self._by_key is None:
            self._by_key = {}
            for position, key in enumerate(_index_keys(self._base)):
                if key is not None:
                    self._by_key.setdefault(key, position)
        return self._by_key.get((index.fqn, index.offset, index.index))


def decode_result_columns(data: bytes, num_items: int) -> ResultColumns | None:
    """Read results that are all regular, or return None where some are not.

    Args:
        data: a WRITE_RESULTS frame.
        num_items: how many items the final plan has, all of them regular.

    Raises:
        WireError: if the frame or its contents are not those of results for such a plan.
    """
    columns, odd_positions, _ = _decode(data, num_items)
    return None if odd_positions else columns


def _decode(data: bytes, num_items: int) -> tuple[ResultColumns, list[int], list[Any]]:
    """Return the regular results, and the positions and trees of the others."""
    tree = expect_map(decode_message(data, Kind.WRITE_RESULTS), "results", _KEYS)
    expect_int(tree["base_count"], "results.base_count", num_items, num_items)
    odd_trees = expect_list(tree["odd_results"], "results.odd_results")
    # Every regular result takes at least a byte of the column of sizes, which bounds the count.
    sizes_tree = expect_list(tree["sizes"], "results.sizes", 2)
    most = len(odd_trees) + (len(sizes_tree[1]) if type(sizes_tree[1]) is bytes else 0)
    total = expect_int(tree["count"], "results.count", len(odd_trees), most)
    count = total - len(odd_trees)
    sizes = unpack_ints(sizes_tree, count=count, path="results.sizes")
    if tree["items"] is None:
        expect_int(count, "results.count", num_items, num_items)
        items = np.arange(num_items, dtype=np.int64)
    else:
        items = unpack_ints(tree["items"], count=count, path="results.items", low=0, high=num_items - 1)
    infos = decode_storage_infos(tree["infos"], counts=[count], path="results.infos")
    odd = unpack_ints(
        tree["odd_positions"], count=len(odd_trees), path="results.odd_positions", low=0, high=total - 1
    ).tolist()
    if len(set(odd)) != len(odd):
        raise PayloadError("results.odd_positions", "positions that all differ", "one of them twice")
    return ResultColumns(items, sizes, infos), odd, odd_trees


@paused_gc()
def decode_results(data: bytes, base: SavePlan | None) -> list[WriteResult]:
    """Make the results again.

    Args:
        data: a WRITE_RESULTS frame.
        base: the final plan that was given for encoding, or an equal one.

    Raises:
        WireError: if the frame or its contents are not those of results for ``base``.
    """
    base_keys = _index_keys(base)
    columns, odd, odd_trees = _decode(data, len(base_keys))
    results: list[Any] = [None] * (len(columns.items) + len(odd))
    for number, odd_tree in zip(odd, odd_trees, strict=True):
        result = decode_object(odd_tree, path=f"results[{number}]")
        if not isinstance(result, WriteResult):
            raise PayloadError(f"results[{number}]", "a WriteResult", type_name_of(result))
        results[number] = result
    infos = columns.infos.build(0, len(columns.infos))
    regular = zip(columns.items.tolist(), columns.sizes.tolist(), infos, strict=True)
    for number, result in enumerate(results):
        if result is not None:
            continue
        position, size_in_bytes, info = next(regular)
        key = base_keys[position]
        if key is None:
            raise PayloadError(f"results[{number}]", "a regular item of the plan", f"item {position}")
        results[number] = WriteResult(make_index(*key), size_in_bytes, info)
    return results
