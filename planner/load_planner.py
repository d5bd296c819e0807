"""``GlooCoordinatedLoadPlanner``: any load planner, with its load coordinated off the device."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from planner.config import CoordinationConfig
from planner.coordinated import Coordinated
from planner.wrapping import check_arguments, is_inherited, require

__all__ = ["GlooCoordinatedLoadPlanner"]

_HOOKS = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "load_bytes",
    "resolve_tensor",
    "commit_tensor",
)


class GlooCoordinatedLoadPlanner(LoadPlanner, Coordinated):
    """Load with all coordination over the store and a dedicated CPU gloo group.

    Pass it to ``dcp.load`` on every rank of the load. DCP's default global load planning and its
    built-in readers leave every plan as it is; then plans stay where they are, and the ranks exchange
    envelopes only. A planner or reader with a global step of its own gets all plans.

    Args:
        inner: the planner to wrap; None for ``DefaultLoadPlanner(**options)``.
        config: how to coordinate; None for the defaults.
        options: for ``DefaultLoadPlanner``, such as ``allow_partial_load=True``.

    Raises:
        ConfigError: ``inner`` is no load planner, or options came along with it.
    """

    def __init__(
        self, inner: LoadPlanner | None = None, *, config: CoordinationConfig | None = None, **options: Any
    ) -> None:
        check_arguments(
            inner, config, options, hooks=_HOOKS, kind="LoadPlanner", default="DefaultLoadPlanner"
        )
        Coordinated.__init__(
            self, DefaultLoadPlanner(**options) if inner is None else inner, config or CoordinationConfig()
        )

    def leaves_plans(self, storage: Any) -> bool:
        """Whether the global step is known to return every plan as it was: DCP's own, not overridden."""
        return (
            is_inherited(self.inner, "create_global_plan", DefaultLoadPlanner)
            and is_inherited(storage, "prepare_global_plan", FileSystemReader)
        )  # fmt: skip

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - DCP's signature
    ) -> None:
        """Set up the inner planner; called on all ranks (``LoadPlanner.set_up_planner``)."""
        self.inner.set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """Return the inner planner's local plan; called on all ranks."""
        plan = self.inner.create_local_plan()
        require(self.inner, isinstance(plan, LoadPlan), "create_local_plan", "a LoadPlan", plan)
        return plan  # type: ignore[no-any-return]  # checked above

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the inner planner's final plans, one for each rank; coordinator only."""
        plans = self.inner.create_global_plan(global_plan)
        holds = (
            isinstance(plans, list)
            and len(plans) == len(global_plan)
            and all(isinstance(plan, LoadPlan) for plan in plans)
        )
        require(self.inner, holds, "create_global_plan", f"a list of {len(global_plan)} LoadPlans", plans)
        return plans  # type: ignore[no-any-return]  # checked above

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the inner planner's finished plan; called on all ranks."""
        plan = self.inner.finish_plan(central_plan)
        require(self.inner, isinstance(plan, LoadPlan), "finish_plan", "a LoadPlan", plan)
        return plan  # type: ignore[no-any-return]  # checked above

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Let the inner planner take the bytes of one item."""
        self.inner.load_bytes(read_item, value)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Return the inner planner's buffer for one item."""
        return self.inner.resolve_bytes(read_item)  # type: ignore[no-any-return]

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the inner planner's tensor for one item."""
        return self.inner.resolve_tensor(read_item)  # type: ignore[no-any-return]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Tell the inner planner that one item is loaded."""
        self.inner.commit_tensor(read_item, tensor)
