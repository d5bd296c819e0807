"""``plan_globally``: stock DCP's global planning over the columns of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from planner.global_plan.dedup import dedup
from planner.global_plan.layout import Layout, find_layouts, lay_out
from planner.global_plan.order import BoolColumn
from planner.global_plan.table import (
    Columnar,
    ItemTable,
    NotColumnarError,
    RankPlan,
    make_table,
)
from planner.global_plan.validate import find_suspects
from planner.wire.columns import Int64Column
from planner.wire.final_plans import encode_final_plan_columns
from planner.wire.gc_pause import paused_gc
from planner.wire.mappings import MappingPath
from planner.wire.plans import BYTE_IO_CODE, PlanSchema, make_items, make_plan
from planner.wire.state import BYTES, TENSOR, Layouts, StateColumns
from planner.wire.tensors import FIELDS_ARE_KNOWN, PropertyValues

__all__ = ["GlobalPlan", "RankPlan", "plan_globally"]


def plan_globally(
    plans: Sequence[RankPlan], *, to_lowest_rank: bool, merges_mappings: bool
) -> GlobalPlan | None:
    """Do what ``DefaultSavePlanner.create_global_plan`` does, without plan caching, on columns.

    Args:
        plans: what each rank sent, by rank: its schema and columns, or a plan. Ranks that sent the same
            schema should have the same ``PlanSchema`` object.
        to_lowest_rank: the planner's ``dedup_save_to_lowest_rank``.
        merges_mappings: the planner's ``flatten_state_dict``.

    Returns:
        The outcome, or None where columns cannot tell: then make all plans (``wire.plans.make_plan``)
        and have the planner itself plan. Nothing was logged then.

    Raises:
        Exception: whatever the planner raises for these plans, having logged what it logs.
    """
    try:
        return _plan(plans, to_lowest_rank=to_lowest_rank, merges_mappings=merges_mappings)
    except NotColumnarError:
        return None


def _plan(plans: Sequence[RankPlan], *, to_lowest_rank: bool, merges_mappings: bool) -> GlobalPlan:
    if not FIELDS_ARE_KNOWN:
        raise NotColumnarError
    table = make_table(plans)
    if merges_mappings and any(schema.mapping is None for schema, _ in table.plans):
        raise NotColumnarError
    deduped = dedup(table, to_lowest_rank=to_lowest_rank)
    layout = lay_out(table, deduped.kept)
    is_suspect = layout.is_odd.copy()
    for chunks in layout.chunks:
        suspects = find_suspects(
            chunks,
            must_fill=len(plans) > 1,
            has_twice=deduped.has_twice[layout.names[chunks.entries]],
        )
        is_suspect[chunks.entries[suspects]] = True
    if is_suspect.any():
        _let_torch_judge(table, deduped.kept, layout.names[is_suspect])
    if layout.is_odd.any():
        raise NotColumnarError
    return GlobalPlan(table.plans, table, deduped.kept, layout, merges_mappings=merges_mappings)


def _let_torch_judge(table: ItemTable, kept: BoolColumn, suspect_names: Int64Column) -> None:
    """Have stock DCP plan the kept items with these names, to raise and log what it does.

    It looks at one name at a time, and all items that it would have met for it are here, in their order.
    """
    is_suspect = np.zeros(table.num_names, dtype=np.bool_)
    is_suspect[suspect_names] = True
    wanted = kept & is_suspect[table.names]
    plans = []
    with paused_gc():
        for rank, (schema, columns) in enumerate(table.plans):
            own = wanted[table.starts[rank] : table.starts[rank + 1]]
            plans.append(SavePlan(make_items(schema, columns, kept=own) if own.any() else []))
    DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)


class GlobalPlan:
    """The outcome of global planning: final plans and metadata, made only when asked for.

    Attributes:
        local_plans: what each rank had sent, by rank.
        state: the ``state_dict_metadata``, in columns.
    """

    def __init__(
        self,
        local_plans: Sequence[Columnar],
        table: ItemTable,
        kept: BoolColumn,
        layout: Layout,
        *,
        merges_mappings: bool,
    ) -> None:
        self.local_plans = local_plans
        self._starts = table.starts.tolist()
        self._kept = kept
        self._hints = layout.hints
        self.state = _state_columns(table, layout)
        self._merges_mappings = merges_mappings
        self._names = table.names
        self._entry_of_name = np.full(table.num_names, -1, dtype=np.int64)
        self._entry_of_name[layout.names] = np.arange(len(layout.names))

    def kept(self, rank: int) -> BoolColumn:
        """Return which items of its local plan ``rank`` keeps; shape (num_items,), not to be changed."""
        return self._kept[self._starts[rank] : self._starts[rank + 1]]

    def hints(self, rank: int) -> Int64Column:
        """Return the index hint of each tensor item that ``rank`` keeps; shape (num_items,), int64.

        At other items stands anything: bytes keep the hint they had. Not to be changed.
        """
        return self._hints[self._starts[rank] : self._starts[rank + 1]]

    def encode_final_plan(self, rank: int, *, storage_data: Any, path: str = "plan", strict: bool) -> bytes:
        """Encode the final plan of ``rank`` for it, as ``wire.plans.encode_final_plan`` does.

        Args:
            rank: the rank.
            storage_data: what the storage writer put into the plan; ``local_plans[rank][1].storage_data``
                where it left it alone.
            path: what to call the plan in errors.
            strict: refuse what only pickle can carry.

        Raises:
            UnencodableError: if ``storage_data`` cannot travel.
        """
        schema, columns = self.local_plans[rank]
        return encode_final_plan_columns(
            schema,
            columns,
            self.kept(rank),
            self.hints(rank),
            storage_data=storage_data,
            path=path,
            strict=strict,
        )

    def build_plan(self, rank: int) -> SavePlan:
        """Make the final plan of ``rank``, a new one at every call; storage_data is the local plan's."""
        schema, columns = self.local_plans[rank]
        is_bytes = (schema.type_codes == BYTE_IO_CODE).tolist()
        hints = [
            old if keeps_hint else new
            for old, new, keeps_hint in zip(columns.hints, self.hints(rank).tolist(), is_bytes, strict=True)
        ]
        return make_plan(schema, columns, kept=self.kept(rank), hints=hints)

    def places(self, rank: int) -> tuple[Int64Column, Int64Column]:
        """Return where in the metadata the chunks of the items that ``rank`` keeps stand.

        Returns:
            The number of the entry of each, and its place among that entry's chunks, 0 for bytes; both of
            shape (num_kept,).
        """
        own = slice(self._starts[rank], self._starts[rank + 1])
        kept = self._kept[own]
        entries = self._entry_of_name[self._names[own][kept]]
        # What is there for bytes is 0 too: an entry of bytes has one item.
        return entries, self._hints[own][kept]

    @cached_property
    def bytes_have_hints(self) -> bool:
        """Whether some item of bytes has an index hint, which stock DCP's planner never gives it."""
        return any(
            hint is not None and code == BYTE_IO_CODE
            for schema, columns in self.local_plans
            if columns.hints.count(None) != len(columns.hints)
            for hint, code in zip(columns.hints, schema.type_codes.tolist(), strict=True)
        )

    def planner_data(self) -> dict[str, MappingPath] | None:
        """Make the planner_data of the metadata, a new one at every call."""
        return self._merge_mappings() if self._merges_mappings else None

    def _merge_mappings(self) -> dict[str, MappingPath]:
        """Return ``dict(ChainMap(*mappings))`` of all ranks, from one mapping of each schema."""
        by_first = list({id(schema): schema for schema, _ in self.local_plans}.values())
        by_last = list({id(schema): schema for schema, _ in reversed(self.local_plans)}.values())
        merged: dict[str, MappingPath] = {}
        # A ChainMap yields the keys of its last mapping first, and takes values from the first that has one.
        for schema in by_last:
            merged.update(_mapping_of(schema))
        for schema in reversed(by_first):
            merged.update(_mapping_of(schema))
        return merged


def _mapping_of(schema: PlanSchema) -> dict[str, MappingPath]:
    return schema.mapping or {}


def _state_columns(table: ItemTable, layout: Layout) -> StateColumns:
    entries = [table.schema_and_position(number) for number in layout.firsts.tolist()]
    kinds = bytearray()
    properties: dict[PropertyValues, int] = {}
    property_numbers: list[int] = []
    for schema, position in entries:
        values = schema.properties[position]
        kinds.append(BYTES if values is None else TENSOR)
        if values is not None:
            property_numbers.append(properties.setdefault(values, len(properties)))
    tensor_of_entry = np.cumsum(np.frombuffer(bytes(kinds), dtype=np.uint8) == TENSOR) - 1
    layout_numbers = np.zeros(len(property_numbers), dtype=np.int64)
    layouts: list[Layouts] = []
    num_before = 0
    for chunks in layout.chunks:
        if not len(chunks.entries):
            continue
        own, numbers = find_layouts(chunks)
        layouts.append(own)
        layout_numbers[tensor_of_entry[chunks.entries]] = numbers + num_before
        num_before += len(own.num_chunks)
    return StateColumns(
        [schema.fqns[position] for schema, position in entries],
        bytes(kinds),
        list(properties),
        np.asarray(property_numbers, dtype=np.int64),
        layouts,
        layout_numbers,
        [],
    )
