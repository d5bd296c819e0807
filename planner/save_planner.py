"""``GlooCoordinatedPlanner``: any save planner, with its save coordinated off the device."""

from __future__ import annotations

import inspect
import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from planner import seam
from planner.config import CoordinationConfig
from planner.errors import ConfigError

__all__ = ["GlooCoordinatedPlanner"]

_HOOKS = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data")


class GlooCoordinatedPlanner(SavePlanner, seam.Coordinated):
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
        UnsupportedTorchError: this torch lacks a private name the seam relies on.
    """

    def __init__(
        self, inner: SavePlanner | None = None, *, config: CoordinationConfig | None = None, **options: Any
    ) -> None:
        problems = []
        if inner is not None and options:
            problems.append(
                f"options {sorted(options)} are for DefaultSavePlanner; give them to inner itself"
            )
        if isinstance(inner, seam.Coordinated):
            problems.append("inner is coordinated already; pass the planner that it wraps")
        missing = (
            [] if inner is None else [name for name in _HOOKS if not callable(getattr(inner, name, None))]
        )
        if missing:
            problems.append(f"inner of type {type(inner).__name__} is no SavePlanner: it lacks {missing}")
        if config is not None and not isinstance(config, CoordinationConfig):
            problems.append(f"config must be a CoordinationConfig, not {type(config).__name__}")
        if problems:
            raise ConfigError(problems)
        self.inner: SavePlanner = DefaultSavePlanner(**options) if inner is None else inner
        self.config = config or CoordinationConfig()
        self.report = None
        seam.install()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - DCP's signature
    ) -> None:
        """Set up the inner planner; called on all ranks (``SavePlanner.set_up_planner``)."""
        if "storage_meta" in inspect.signature(self.inner.set_up_planner).parameters:
            self.inner.set_up_planner(
                state_dict=state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator
            )
        else:  # a planner from before torch 2.3, which DCP still takes
            self.inner.set_up_planner(state_dict, is_coordinator)  # type: ignore[arg-type]

    def create_local_plan(self) -> SavePlan:
        """Return the inner planner's local plan; called on all ranks."""
        plan = self.inner.create_local_plan()
        self._require(isinstance(plan, SavePlan), "create_local_plan", "a SavePlan", plan)
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the inner planner's final plans, one for each rank, and metadata; coordinator only."""
        outcome = self.inner.create_global_plan(all_plans)
        is_pair = isinstance(outcome, tuple) and len(outcome) == 2  # noqa: PLR2004 - plans and metadata
        self._require(is_pair, "create_global_plan", "plans and metadata", outcome)
        plans, metadata = outcome
        self._require(
            isinstance(plans, list)
            and len(plans) == len(all_plans)
            and all(isinstance(plan, SavePlan) for plan in plans),
            "create_global_plan",
            f"a list of {len(all_plans)} SavePlans",
            plans,
        )
        self._require(isinstance(metadata, Metadata), "create_global_plan", "a Metadata", metadata)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the inner planner's finished plan; called on all ranks."""
        plan = self.inner.finish_plan(new_plan)
        self._require(isinstance(plan, SavePlan), "finish_plan", "a SavePlan", plan)
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of one item, from the inner planner; called on each rank by its storage writer."""
        return self.inner.resolve_data(write_item)

    def _require(self, holds: bool, hook: str, expected: str, found: object) -> None:  # noqa: FBT001
        if not holds:
            what = f"a list of {len(found)}" if isinstance(found, list) else f"a {type(found).__name__}"
            raise TypeError(f"{type(self.inner).__name__}.{hook} must return {expected}, but returned {what}")

    def __getattr__(self, name: str) -> Any:
        # Engines and writers look at attributes of the planner they know, such as ``state_dict``.
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.report = None
        seam.install()  # in the daemon of an asynchronous save this is the first that DCP sees of us
