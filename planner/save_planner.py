"""``GlooCoordinatedPlanner``: any save planner, with its save coordinated off the device."""

from __future__ import annotations

import inspect
import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from planner.column_plans import LocalPlans
from planner.config import CoordinationConfig
from planner.coordinated import Coordinated
from planner.flatten import set_up_planner
from planner.local_plan import create_local_plan
from planner.pending import look_at
from planner.wrapping import check_arguments, is_inherited, require

__all__ = ["GlooCoordinatedPlanner"]

_HOOKS = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data")


class GlooCoordinatedPlanner(SavePlanner, Coordinated):
    """Save with all coordination over the store and a dedicated CPU gloo group.

    Pass it to ``dcp.save`` on every rank of the save. Plans, write results and metadata then touch
    neither the default group nor any device; what is planned and written is up to ``inner``. Make it
    anew at each save or keep it. It pickles.

    Args:
        inner: the planner to wrap; None for ``DefaultSavePlanner(**options)``.
        config: how to coordinate; None for the defaults.
        options: for ``DefaultSavePlanner``, such as ``dedup_save_to_lowest_rank=True``.

    Raises:
        ConfigError: ``inner`` is no save planner, or options came along with it.
    """

    def __init__(
        self, inner: SavePlanner | None = None, *, config: CoordinationConfig | None = None, **options: Any
    ) -> None:
        check_arguments(
            inner, config, options, hooks=_HOOKS, kind="SavePlanner", default="DefaultSavePlanner"
        )
        Coordinated.__init__(
            self, DefaultSavePlanner(**options) if inner is None else inner, config or CoordinationConfig()
        )

    def is_pure(self, storage: Any) -> bool:
        """Whether the global step is DCP's own: then it is done on columns, without looking inside plans."""
        hooks = (
            "create_global_plan",
            "_create_global_plan",
            "_create_global_plan_with_caching",
            "_dedup_save_plans",
        )
        is_planner_pure = all(is_inherited(self.inner, hook, DefaultSavePlanner) for hook in hooks)
        if not is_planner_pure or self.inner._enable_plan_caching:  # noqa: SLF001 - DCP's own cache
            return False
        return _has_from_dcp(storage, "prepare_global_plan")

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - DCP's signature
    ) -> None:
        """Set up the inner planner; called on all ranks (``SavePlanner.set_up_planner``).

        What DCP's own planner does here and in ``create_local_plan`` is done in another way, to exactly its
        outcome; see ``planner.flatten`` and ``planner.local_plan``.
        """
        if set_up_planner(self.inner, state_dict, is_coordinator=is_coordinator):
            return
        if "storage_meta" in inspect.signature(self.inner.set_up_planner).parameters:
            self.inner.set_up_planner(
                state_dict=state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator
            )
        else:  # a planner from before torch 2.3, which DCP still takes
            self.inner.set_up_planner(state_dict, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Return the inner planner's local plan; called on all ranks.

        In a save with a writer of DCP, that of DCP's own planner makes its items when it is looked at.
        """
        plan = create_local_plan(self.inner)
        if not (
            is_inherited(self, "create_local_plan", GlooCoordinatedPlanner)
            and _has_from_dcp(self.storage_in_use, "prepare_local_plan")
        ):
            look_at(plan)  # somebody else may look at its very type
        require(self.inner, isinstance(plan, SavePlan), "create_local_plan", "a SavePlan", plan)
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the inner planner's final plans, one for each rank, and metadata; coordinator only."""
        if isinstance(all_plans, LocalPlans):
            on_columns = all_plans.plan_globally(
                to_lowest_rank=self.inner.dedup_save_to_lowest_rank,
                merges_mappings=self.inner.flatten_state_dict,
            )
            if on_columns is not None:
                self.inner.global_plan, self.inner.metadata = on_columns  # as DefaultSavePlanner does
                return on_columns
            all_plans = all_plans.build()
        outcome = self.inner.create_global_plan(all_plans)
        is_pair = isinstance(outcome, tuple) and len(outcome) == 2  # noqa: PLR2004 - plans and metadata
        require(self.inner, is_pair, "create_global_plan", "plans and metadata", outcome)
        plans, metadata = outcome
        require(
            self.inner,
            isinstance(plans, list)
            and len(plans) == len(all_plans)
            and all(isinstance(plan, SavePlan) for plan in plans),
            "create_global_plan",
            f"a list of {len(all_plans)} SavePlans",
            plans,
        )
        require(self.inner, isinstance(metadata, Metadata), "create_global_plan", "a Metadata", metadata)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the inner planner's finished plan; called on all ranks."""
        plan = self.inner.finish_plan(new_plan)
        require(self.inner, isinstance(plan, SavePlan), "finish_plan", "a SavePlan", plan)
        return plan  # type: ignore[no-any-return]  # checked above

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of one item, from the inner planner; called on each rank by its storage writer."""
        return self.inner.resolve_data(write_item)  # type: ignore[no-any-return]


def _has_from_dcp(storage: Any, hook: str) -> bool:
    """Whether ``storage`` has ``hook`` unchanged from one of DCP's writers."""
    return any(is_inherited(storage, hook, kind) for kind in (FileSystemWriter, HuggingFaceStorageWriter))
