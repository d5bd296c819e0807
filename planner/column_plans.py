"""The plans of all ranks on the coordinator, in columns until somebody looks inside.

DCP hands local plans to the planner, and final plans to the storage writer, as lists of ``SavePlan``.
With DCP's own global step nobody looks inside one, so none is made: ``LocalPlans`` stands for the
first list, and final plans have ``PendingItems``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from planner.global_plan import GlobalPlan, plan_globally
from planner.wire.plans import BYTE_IO_CODE, PlanColumns, PlanSchema, make_plan
from planner.wire.tensors import SizeCache

__all__ = ["LocalPlans", "PendingItems", "build_pending"]


class LocalPlans(Sequence[SavePlan]):
    """The local plans of all ranks, by group rank; made when looked at.

    Args:
        columns: each rank's schema and columns; ranks with equal schemas have one schema object.
        own_rank: the coordinator.
        own_plan: its plan, which exists.
    """

    def __init__(
        self, columns: Sequence[tuple[PlanSchema, PlanColumns]], own_rank: int, own_plan: SavePlan
    ) -> None:
        self._columns = columns
        self._own_rank = own_rank
        self._own_plan = own_plan
        self._built: list[SavePlan] | None = None

    def plan_globally(
        self, *, to_lowest_rank: bool, merges_mappings: bool
    ) -> tuple[list[SavePlan], Metadata] | None:
        """Do what DCP's global step does, or return None where that takes real plans.

        Raises:
            Exception: whatever DCP's planner raises for these plans.
        """
        outcome = plan_globally(
            list(self._columns), to_lowest_rank=to_lowest_rank, merges_mappings=merges_mappings
        )
        if outcome is None:
            return None
        plans: list[SavePlan] = []
        for rank, (schema, columns) in enumerate(self._columns):
            items: Any = PendingItems(outcome, rank)
            planner_data = self._own_plan.planner_data if rank == self._own_rank else schema.mapping
            plans.append(SavePlan(items, columns.storage_data, planner_data))
        return plans, outcome.build_metadata()

    def build(self) -> list[SavePlan]:
        """Make all plans, once: whoever asks for each by its rank must not make all for each."""
        if self._built is None:
            self._built = [
                self._own_plan if rank == self._own_rank else make_plan(schema, columns)
                for rank, (schema, columns) in enumerate(self._columns)
            ]
        return self._built

    @overload
    def __getitem__(self, index: int) -> SavePlan: ...
    @overload
    def __getitem__(self, index: slice) -> list[SavePlan]: ...
    def __getitem__(self, index: int | slice) -> SavePlan | list[SavePlan]:
        return self.build()[index]

    def __len__(self) -> int:
        return len(self._columns)


class PendingItems(Sequence[WriteItem]):
    """The items of one rank's final plan; made when looked at."""

    def __init__(self, outcome: GlobalPlan, rank: int) -> None:
        self._outcome = outcome
        self._rank = rank
        self._items: list[WriteItem] | None = None

    def encode(self, plan: SavePlan, *, path: str, strict: bool) -> bytes:
        """Return the final plan that has these items, as a difference to what its rank sent.

        Raises:
            UnencodableError: its storage_data cannot travel.
        """
        return self._outcome.encode_final_plan(
            self._rank, storage_data=plan.storage_data, path=path, strict=strict
        )

    def index_keys(self) -> list[tuple[str, torch.Size | None, int | None]]:
        """Return the FQN, offset and hint of each item's index."""
        schema, columns = self._outcome.local_plans[self._rank]
        kept = self._outcome.kept(self._rank).tolist()
        hints = self._outcome.hints(self._rank).tolist()
        offsets = SizeCache().cut(columns.offsets, schema.num_dims.tolist())
        keys: list[tuple[str, torch.Size | None, int | None]] = []
        for fqn, code, offset, old, new, is_kept in zip(
            schema.fqns, schema.type_codes.tolist(), offsets, columns.hints, hints, kept, strict=True
        ):
            if is_kept:
                keys.append((fqn, None, old) if code == BYTE_IO_CODE else (fqn, offset, new))
        return keys

    def build(self) -> list[WriteItem]:
        """Make the items, once."""
        if self._items is None:
            self._items = self._outcome.build_plan(self._rank).items
        return self._items

    @overload
    def __getitem__(self, index: int) -> WriteItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[WriteItem]: ...
    def __getitem__(self, index: int | slice) -> WriteItem | list[WriteItem]:
        return self.build()[index]

    def __len__(self) -> int:
        return int(self._outcome.kept(self._rank).sum())

    def __iter__(self) -> Iterator[WriteItem]:
        return iter(self.build())


def build_pending(plan: Any) -> Any:
    """Return ``plan`` with its items as a list, where it is a plan with pending ones."""
    if isinstance(plan, SavePlan) and isinstance(plan.items, PendingItems):
        return dataclasses.replace(plan, items=plan.items.build())
    return plan
