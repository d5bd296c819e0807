"""The plans of all ranks on the coordinator, in columns until somebody looks inside.

DCP hands local plans to the planner, and final plans to the storage writer, as lists of ``SavePlan``.
With DCP's own global step nobody looks inside one, so none is made: ``LocalPlans`` stands for the
first list, and final plans have ``PendingItems``. What came of planning is ``Planned``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from planner.errors import WireError
from planner.global_plan import GlobalPlan, plan_globally
from planner.lazy_metadata import make_metadata_later
from planner.wire.columns import Int64Column
from planner.wire.final_plans import decode_final_plan
from planner.wire.frame import pack
from planner.wire.gc_pause import paused_gc
from planner.wire.metadata import StatePart, decode_state_part, encode_state_part
from planner.wire.objects import encode_object
from planner.wire.outline import PlanOutline, planner_data_of
from planner.wire.plans import (
    BYTE_IO_CODE,
    PlanColumns,
    PlanSchema,
    decode_plan_columns,
    decode_schema,
    make_plan,
)
from planner.wire.state import StateColumns, StateObjects
from planner.wire.tensors import SizeTable

__all__ = ["LocalPlans", "PendingItems", "PlanFrames", "Planned", "RememberedPlan", "build_own_plan"]


class PlanFrames(Sequence[tuple[PlanSchema, PlanColumns]]):
    """The schemas and columns of all ranks' local plans, by group rank; each read when looked at.

    Args:
        frames: each rank's schema frame and body frame.
    """

    def __init__(self, frames: Sequence[tuple[bytes, bytes]]) -> None:
        self._frames = frames
        self._schemas: dict[bytes, PlanSchema] = {}
        self._columns: dict[int, PlanColumns] = {}

    def schema(self, rank: int) -> PlanSchema:
        """Return the schema of one rank; ranks with equal schemas have one object."""
        frame = self._frames[rank][0]
        if frame not in self._schemas:
            self._schemas[frame] = decode_schema(frame)
        return self._schemas[frame]

    def read(self) -> dict[int, BaseException]:
        """Read all, and return what is wrong with whose."""
        damaged: dict[int, BaseException] = {}
        for rank in range(len(self)):
            try:
                self[rank]
            except WireError as error:
                damaged[rank] = error
        return damaged

    @overload
    def __getitem__(self, index: int) -> tuple[PlanSchema, PlanColumns]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[PlanSchema, PlanColumns]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[rank] for rank in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        schema = self.schema(index)
        if index not in self._columns:
            self._columns[index] = decode_plan_columns(schema, self._frames[index][1])
        return schema, self._columns[index]

    def __len__(self) -> int:
        return len(self._frames)


@dataclass(frozen=True)
class RememberedPlan:
    """What global planning came to in an earlier save, for the same local plans.

    Attributes:
        settings: what else it depended on.
        state_part: the state part of the metadata.
        num_kept: how many items each rank keeps.
        storage: of each rank's final plan, its storage_data as bytes.
        finals: each rank's final plan, as a difference to what it sent.
    """

    settings: tuple[bool, bool]
    state_part: bytes
    num_kept: tuple[int, ...]
    storage: tuple[bytes, ...]
    finals: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes this takes, about."""
        return len(self.state_part) + sum(map(len, self.storage + self.finals)) + 64 * len(self.finals)


class Planned:
    """What global planning on columns came to, found out when it is asked for.

    Args:
        settings: what it depends on beside the local plans.
        compute: plans; called once at most, and not at all where everything asked for is remembered.
        remembered: what it came to in an earlier save; None to compute it.
    """

    def __init__(
        self,
        settings: tuple[bool, bool],
        compute: Callable[[], GlobalPlan | None],
        remembered: RememberedPlan | None,
    ) -> None:
        self.settings = settings
        self._compute = compute
        self.remembered = remembered
        self.metadata = make_metadata_later(self._build_metadata)
        """That of this save, made when looked at."""

    @cached_property
    def outcome(self) -> GlobalPlan | None:
        """The outcome on columns; None where columns will not do."""
        return self._compute()

    def _expect_outcome(self) -> GlobalPlan:
        outcome = self.outcome
        assert outcome is not None  # noqa: S101 - whoever has this object has made sure
        return outcome

    @cached_property
    def state_part(self) -> bytes | None:
        """The state part of the metadata; None where it does not go on columns."""
        if self.remembered is not None:
            return self.remembered.state_part
        outcome = self._expect_outcome()
        return encode_state_part(outcome.state, outcome.planner_data(), strict=True)

    @cached_property
    def _read_state_part(self) -> StatePart | None:
        return None if self.remembered is None else decode_state_part(self.remembered.state_part)

    @cached_property
    def state(self) -> StateColumns:
        """The ``state_dict_metadata``, in columns."""
        part = self._read_state_part
        return self._expect_outcome().state if part is None or part.columns is None else part.columns

    @cached_property
    def objects(self) -> StateObjects:
        """What makes its objects."""
        return StateObjects(self.state)

    def planner_data(self) -> Any:
        """Make the planner_data of the metadata, a new one at every call."""
        part = self._read_state_part
        return self._expect_outcome().planner_data() if part is None else part.planner_data()

    def _build_metadata(self) -> Metadata:
        with paused_gc():
            return Metadata(self.objects.build(), planner_data=self.planner_data())

    def num_kept(self, rank: int) -> int:
        """Return how many items ``rank`` keeps."""
        if self.remembered is not None:
            return self.remembered.num_kept[rank]
        return int(self._expect_outcome().kept(rank).sum())

    def places(self, rank: int) -> tuple[Int64Column, Int64Column] | None:
        """Return ``GlobalPlan.places``; None where its hints are not those that places imply."""
        outcome = self._expect_outcome()
        return None if outcome.bytes_have_hints else outcome.places(rank)

    def encode_final_plan(self, rank: int, plan: SavePlan, *, path: str, strict: bool) -> bytes:
        """Return the final plan of ``rank``, ``plan`` but for its items, as a difference to what it sent.

        Raises:
            UnencodableError: its storage_data cannot travel.
        """
        known = self.remembered
        if known is not None and self.storage_key(plan) == known.storage[rank]:
            return known.finals[rank]
        return self._expect_outcome().encode_final_plan(
            rank, storage_data=plan.storage_data, path=path, strict=strict
        )

    @staticmethod
    def storage_key(plan: SavePlan) -> bytes:
        """Return the storage_data of a final plan as bytes; equal ones travel as the same bytes."""
        return pack(encode_object(plan.storage_data, path="storage_data", strict=False))


class LocalPlans(Sequence[SavePlan]):
    """The local plans of all ranks, by group rank; made when looked at.

    Args:
        columns: each rank's schema and columns; ranks with equal schemas have one schema object.
        own_rank: the coordinator.
        own_plan: its plan, which exists.
        remembered: what planning these very plans came to before, for plans that all had no storage_data.
    """

    def __init__(
        self,
        columns: PlanFrames,
        own_rank: int,
        own_plan: SavePlan,
        remembered: RememberedPlan | None = None,
    ) -> None:
        self._columns = columns
        self._own_rank = own_rank
        self._own_plan = own_plan
        self._remembered = remembered
        self._built: list[SavePlan] | None = None
        self.planned: Planned | None = None
        """What the latest ``plan_globally`` came to; None before it has, and where columns would not do."""

    def plan_globally(
        self, *, to_lowest_rank: bool, merges_mappings: bool
    ) -> tuple[list[SavePlan], Metadata] | None:
        """Do what DCP's global step does, or return None where that takes real plans.

        Raises:
            Exception: whatever DCP's planner raises for these plans.
        """
        self.planned = None
        settings = (bool(to_lowest_rank), bool(merges_mappings))
        remembered = self._remembered
        if remembered is not None and remembered.settings != settings:
            remembered = None
        planned = Planned(
            settings,
            lambda: plan_globally(
                list(self._columns), to_lowest_rank=to_lowest_rank, merges_mappings=merges_mappings
            ),
            remembered,
        )
        if remembered is None and planned.outcome is None:
            return None
        plans: list[SavePlan] = []
        for rank in range(len(self._columns)):
            items: Any = PendingItems(planned, rank)
            storage_data = None if remembered is not None else self._columns[rank][1].storage_data
            is_own = rank == self._own_rank
            planner_data = planner_data_of(self._own_plan) if is_own else self._columns.schema(rank).mapping
            plans.append(SavePlan(items, storage_data, planner_data))
        self.planned = planned
        return plans, planned.metadata

    def to_remember(self, plans: Sequence[SavePlan], finals: Sequence[bytes]) -> RememberedPlan | None:
        """Return what to remember of the latest ``plan_globally``, or None.

        Args:
            plans: the final plans that the storage writer made of its outcome.
            finals: the same for the wire.
        """
        planned = self.planned
        if planned is None or planned.state_part is None:
            return None
        if planned.remembered is None and any(
            columns.storage_data is not None for _, columns in self._columns
        ):
            return None  # an object, to be had from what was sent only
        ranks = range(len(self))
        return RememberedPlan(
            planned.settings,
            planned.state_part,
            tuple(map(planned.num_kept, ranks)),
            tuple(map(planned.storage_key, plans)),
            tuple(finals),
        )

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

    def __init__(self, planned: Planned, rank: int) -> None:
        self._planned = planned
        self._rank = rank
        self._items: list[WriteItem] | None = None

    @property
    def _outcome(self) -> GlobalPlan:
        outcome = self._planned.outcome
        assert outcome is not None  # noqa: S101 - else there were no pending items
        return outcome

    def encode(self, plan: SavePlan, *, path: str, strict: bool) -> bytes:
        """Return the final plan that has these items, as a difference to what its rank sent.

        Raises:
            UnencodableError: its storage_data cannot travel.
        """
        return self._planned.encode_final_plan(self._rank, plan, path=path, strict=strict)

    def index_keys(self) -> list[tuple[str, torch.Size | None, int | None]]:
        """Return the FQN, offset and hint of each item's index."""
        schema, columns = self._outcome.local_plans[self._rank]
        kept = self._outcome.kept(self._rank).tolist()
        hints = self._outcome.hints(self._rank).tolist()
        offsets = SizeTable().cut(columns.offsets, schema.num_dims.tolist())
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
        return self._planned.num_kept(self._rank)

    def __iter__(self) -> Iterator[WriteItem]:
        return iter(self.build())


def build_own_plan(plan: Any, final: bytes, local_plan: SavePlan | PlanOutline) -> Any:
    """Return the coordinator's final ``plan`` with real items, made as every other rank makes its own."""
    items = decode_final_plan(final, local_plan).items
    return dataclasses.replace(plan, items=items)
