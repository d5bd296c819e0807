"""Final plans as differences to the local plans that their ranks had sent.

A final plan refers to the items of the plan that its rank had sent, and has in full only those that are
not among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from planner.errors import PayloadError
from planner.wire.check import expect_int, expect_list, expect_map
from planner.wire.columns import (
    Int64Column,
    pack_flags,
    pack_ints,
    pack_optional_ints,
    unpack_flags,
    unpack_optional_ints,
)
from planner.wire.frame import Kind, decode_message, encode_message
from planner.wire.gc_pause import paused_gc
from planner.wire.mappings import encode_mapping
from planner.wire.objects import decode_object, encode_object, type_name_of
from planner.wire.outline import PlanOutline
from planner.wire.plans import (
    BYTE_IO_CODE,
    PlanColumns,
    PlanSchema,
    decode_planner_data,
    decode_positions,
    encode_planner_data,
    is_regular_plan,
    merge_items,
)
from planner.wire.tensors import is_regular_index, is_regular_item, make_index, property_values

__all__ = ["decode_final_plan", "encode_final_plan", "encode_final_plan_columns"]

_FINAL_KEYS = frozenset(
    (
        "base_count",
        "kept",
        "hinted",
        "hints",
        "new_positions",
        "new_items",
        "storage_data",
        "planner_data",
        "usable",
    )
)


def _base_items(base: Any) -> list[Any]:
    items = getattr(base, "items", None)
    return items if type(items) is list else []


def _is_same_but_hint(item: WriteItem, base_item: WriteItem) -> bool:
    """Tell whether two regular items are equal, index hints aside."""
    return (
        item.type is base_item.type
        and item.index.fqn == base_item.index.fqn
        and (item.tensor_data is base_item.tensor_data or item.tensor_data == base_item.tensor_data)
        and item.bytes_io_data == base_item.bytes_io_data
    )


def _has_parts_of(base_item: Any, item: WriteItem) -> bool:
    """Tell, faster, whether ``base_item`` is regular because it shares the data of a regular tensor item.

    This is what global planning gives: it replaces an item's index and keeps the rest.
    """
    return (
        type(base_item) is WriteItem
        and item.tensor_data is not None
        and base_item.tensor_data is item.tensor_data
        and base_item.bytes_io_data is None
        and len(base_item.__dict__) == len(item.__dict__)
        and is_regular_index(base_item.index)
        and base_item.index.offset == item.index.offset
    )


class _BaseFinder:
    """Finds items of a final plan in the base plan, in order."""

    def __init__(self, base_items: list[Any]) -> None:
        self._items = base_items
        self._next = 0
        self._positions: dict[str, list[int]] | None = None

    def find(self, item: WriteItem) -> int | None:
        """Return the position of the first equal item past those found before, or None."""
        if self._next < len(self._items) and self._matches(item, self._next):
            self._next += 1
            return self._next - 1
        if self._positions is None:
            self._positions = {}
            for position, base_item in enumerate(self._items):
                if is_regular_item(base_item):
                    self._positions.setdefault(base_item.index.fqn, []).append(position)
        for position in self._positions.get(item.index.fqn, ()):
            if position >= self._next and self._matches(item, position):
                self._next = position + 1
                return position
        return None

    def _matches(self, item: WriteItem, position: int) -> bool:
        base_item = self._items[position]
        return (_has_parts_of(base_item, item) or is_regular_item(base_item)) and _is_same_but_hint(
            item, base_item
        )


def encode_final_plan(plan: SavePlan, base: SavePlan, *, path: str = "plan", strict: bool) -> bytes:
    """Encode a rank's final plan as what differs from the local plan it had sent.

    Args:
        plan: the final plan.
        base: the local plan, as sent or as decoded; both give the same.
        path: what to call the final plan in errors.
        strict: refuse what only pickle can carry.

    Raises:
        UnencodableError: if a part of it cannot travel.
    """
    if not is_regular_plan(plan):
        tree = {"plan": encode_object(plan, path=path, strict=strict)}
        return encode_message(Kind.FINAL_PLAN, tree)
    base_items = _base_items(base)
    finder = _BaseFinder(base_items)
    kept = np.zeros(len(base_items), dtype=np.bool_)
    hinted: list[bool] = []
    hints: list[int | None] = []
    new_positions: list[int] = []
    new_items: list[Any] = []
    for position, item in enumerate(plan.items):
        found = finder.find(item) if is_regular_item(item) else None
        if found is None:
            new_positions.append(position)
            new_items.append(encode_object(item, path=f"{path}.items[{position}]", strict=strict))
            continue
        kept[found] = True
        has_new_hint = item.index.index != base_items[found].index.index
        hinted.append(has_new_hint)
        if has_new_hint:
            hints.append(item.index.index)
    return _encode_final_tree(
        kept=kept,
        hinted=hinted,
        hints=pack_optional_ints(hints),
        new_positions=new_positions,
        new_items=new_items,
        storage_data=None
        if plan.storage_data is getattr(base, "storage_data", None)
        else [encode_object(plan.storage_data, path=f"{path}.storage_data", strict=strict)],
        planner_data=None
        if _is_same_planner_data(plan.planner_data, getattr(base, "planner_data", None))
        else encode_planner_data(
            plan.planner_data, _regular_names(base_items), path=f"{path}.planner_data", strict=strict
        ),
        usable=encode_object(plan.usable, path=f"{path}.usable", strict=strict),
    )


def encode_final_plan_columns(
    schema: PlanSchema,
    columns: PlanColumns,
    kept: npt.NDArray[np.bool_],
    hints: Int64Column,
    *,
    storage_data: Any,
    path: str = "plan",
    strict: bool,
) -> bytes:
    """Encode a rank's final plan that is its local plan with fewer items and other hints.

    The bytes are those of ``encode_final_plan`` for that final plan; neither plan is made.

    Args:
        schema: the schema of the local plan.
        columns: the body of the local plan; all its items are regular.
        kept: which of its items the final plan has; shape (count,).
        hints: the new index hint of each tensor among its items; what stands at other items and at
            those not kept is not looked at; shape (count,), int64.
        storage_data: that of the final plan; ``columns.storage_data`` itself where it did not change.
        path: what to call the final plan in errors.
        strict: refuse what only pickle can carry.

    Raises:
        UnencodableError: if ``storage_data`` cannot travel.
    """
    positions = np.flatnonzero(kept)
    hinted: npt.NDArray[np.bool_] = schema.type_codes[positions] != BYTE_IO_CODE
    new_hints = hints[positions]
    if columns.hints.count(None) != len(columns.hints):
        old_hints = compress(columns.hints, kept.tolist())
        is_other = [old != new for old, new in zip(old_hints, new_hints.tolist(), strict=True)]
        hinted &= np.asarray(is_other, dtype=np.bool_)
    new_hints = new_hints[hinted]
    usable = decode_object(schema.usable_tree, path=f"{path}.usable")
    return _encode_final_tree(
        kept=kept,
        hinted=hinted,
        # None of them is None: the same as pack_optional_ints of a list, without the list.
        hints=[None, pack_ints(new_hints)] if len(new_hints) else None,
        new_positions=[],
        new_items=[],
        storage_data=None
        if storage_data is columns.storage_data
        else [encode_object(storage_data, path=f"{path}.storage_data", strict=strict)],
        planner_data=None,
        usable=encode_object(usable, path=f"{path}.usable", strict=strict),
    )


def _encode_final_tree(
    *,
    kept: npt.NDArray[np.bool_],
    hinted: Sequence[bool] | npt.NDArray[np.bool_],
    hints: Any,
    new_positions: list[int],
    new_items: list[Any],
    storage_data: Any,
    planner_data: Any,
    usable: Any,
) -> bytes:
    tree = {
        "base_count": len(kept),
        "kept": pack_flags(kept),
        "hinted": pack_flags(hinted),
        "hints": hints,
        "new_positions": pack_ints(new_positions),
        "new_items": new_items,
        "storage_data": storage_data,
        "planner_data": planner_data,
        "usable": usable,
    }
    return encode_message(Kind.FINAL_PLAN, tree)


def _regular_names(items: list[Any]) -> list[str]:
    return list(dict.fromkeys(item.index.fqn for item in items if is_regular_item(item)))


def _is_same_planner_data(planner_data: Any, base_data: Any) -> bool:
    if planner_data is base_data:
        return True
    # Equality says too little about anything else: it knows no order, and 1 == True.
    mapping = encode_mapping(planner_data, [])
    return mapping is not None and mapping == encode_mapping(base_data, [])


class _SentPlan:
    """The local plan that a rank had sent, as ``PlanOutline`` is of one that nobody has looked at."""

    storage_data: Any

    def __init__(self, plan: Any) -> None:
        self._items = _base_items(plan)
        self.planner_data = getattr(plan, "planner_data", None)
        self.storage_data = getattr(plan, "storage_data", None)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def fqns(self) -> list[str]:
        return _regular_names(self._items)

    def own_hints(self, positions: Sequence[int]) -> Iterator[int | None]:
        return (self._regular_item(position).index.index for position in positions)

    def make_items(self, positions: Sequence[int], hints: Sequence[int | None]) -> list[WriteItem]:
        items = map(self._items.__getitem__, positions)
        return list(map(_copy_item, items, hints))

    def _regular_item(self, position: int) -> WriteItem:
        item = self._items[position]
        if not is_regular_item(item):
            found = f"item {position} of type {type_name_of(item)}"
            raise PayloadError("plan.kept", "regular items", found)
        return item  # type: ignore[no-any-return]  # just checked


def _copy_item(item: WriteItem, hint: int | None) -> WriteItem:
    tensor_data = item.tensor_data
    if tensor_data is not None:
        chunk = tensor_data.chunk
        properties = TensorProperties(*property_values(tensor_data.properties))
        tensor_data = TensorWriteData(
            ChunkStorageMetadata(chunk.offsets, chunk.sizes), properties, tensor_data.size
        )
    offset = None if tensor_data is None else tensor_data.chunk.offsets
    return WriteItem(make_index(item.index.fqn, offset, hint), item.type, item.bytes_io_data, tensor_data)


def decode_final_plan(data: bytes, base: SavePlan | PlanOutline) -> SavePlan:
    """Make the final plan again on the rank that sent ``base``.

    Args:
        data: a FINAL_PLAN frame.
        base: the local plan, or the outline of it; it is not changed, and shares no items with the result.

    Raises:
        WireError: if the frame or its contents are not those of a final plan for ``base``.
    """
    tree = decode_message(data, Kind.FINAL_PLAN)
    if type(tree) is dict and tree.keys() == {"plan"}:
        plan = decode_object(tree["plan"], path="plan")
        if not isinstance(plan, SavePlan):
            raise PayloadError("plan", "a SavePlan", type_name_of(plan))
        return plan
    expect_map(tree, "plan", _FINAL_KEYS)
    sent = base if isinstance(base, PlanOutline) else _SentPlan(base)
    num_base = expect_int(tree["base_count"], "plan.base_count", len(sent), len(sent))
    kept = np.flatnonzero(unpack_flags(tree["kept"], count=num_base, path="plan.kept")).tolist()
    hinted = unpack_flags(tree["hinted"], count=len(kept), path="plan.hinted")
    new_hints = iter(unpack_optional_ints(tree["hints"], count=int(hinted.sum()), path="plan.hints"))
    with paused_gc():
        hints = [
            next(new_hints) if has_new_hint else own_hint
            for has_new_hint, own_hint in zip(hinted.tolist(), sent.own_hints(kept), strict=True)
        ]
        items = sent.make_items(kept, hints)
    new_trees = expect_list(tree["new_items"], "plan.new_items")
    new_positions = decode_positions(
        tree["new_positions"],
        count=len(new_trees),
        total=len(items) + len(new_trees),
        path="plan.new_positions",
    )
    new_items = [
        decode_object(new_tree, path=f"plan.items[{position}]")
        for position, new_tree in zip(new_positions, new_trees, strict=True)
    ]
    storage_data, planner_data = sent.storage_data, sent.planner_data
    if tree["storage_data"] is not None:
        (storage_tree,) = expect_list(tree["storage_data"], "plan.storage_data", 1)
        storage_data = decode_object(storage_tree, path="plan.storage_data")
    if tree["planner_data"] is not None:
        planner_data = decode_planner_data(tree["planner_data"], sent.fqns, path="plan.planner_data")
    elif type(planner_data) is dict:
        planner_data = dict(planner_data)
    return SavePlan(
        merge_items(items, new_positions, new_items),
        storage_data,
        planner_data,
        decode_object(tree["usable"], path="plan.usable"),
    )
