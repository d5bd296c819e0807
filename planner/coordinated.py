"""The mark by which the seam knows our planners, and what one save by them carries along."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from planner.config import CoordinationConfig
from planner.report import SaveReport
from planner.turns import Turns

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Coordinated"]


class Coordinated:
    """A planner whose save or load is coordinated by us; the planners of this library derive from it.

    Args:
        inner: the planner that it wraps.
        config: how to coordinate.
    """

    def __init__(self, inner: Any, config: CoordinationConfig) -> None:
        self._set_up({"inner": inner, "config": config})

    def _set_up(self, state: dict[str, Any]) -> None:
        self.inner = state["inner"]
        self.config: CoordinationConfig = state["config"]
        self.expected_world = state.get("expected_world")
        self.turns = Turns()

    def __getattr__(self, name: str) -> Any:
        # Engines and storages look at attributes of the planner they know, such as ``state_dict``.
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "config": self.config, "expected_world": self.expected_world}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(state)

    def copy_for_one_save(
        self, *, reserved: tuple[Any, object] | None = None, expected_world: tuple[int, int] | None = None
    ) -> Self:
        """Return a planner that shares ``inner`` and its turns and stands for one save in the background."""
        other = copy.copy(self)
        other.turns = self.turns
        other.planner_turn = self.turns.take()
        other.reserved, other.expected_world = reserved, expected_world
        other.asked_as = self
        return other

    report: SaveReport | None = None
    """What the latest save or load with this planner cost this rank; None before the first has ended."""

    reserved: tuple[Any, object] | None = None
    """A channel, and the turn taken from it for this planner's one save in the background."""

    has_begun: bool = False
    """Whether that save has come to use its turn."""

    planner_turn: object | None = None
    """Taken from ``turns`` for the same."""

    asked_as: Coordinated | None = None
    """The caller's planner, where this is the copy made for one save in the background."""

    storage_in_use: Any = None
    """The storage of the save or load that runs with this planner."""

    expected_world: tuple[int, int] | None = None
    """Group rank and world size of the caller, where the save runs in a process of its own."""

    def leaves_plans(self, storage: Any) -> bool:  # noqa: ARG002 - for load planners to answer
        """Whether the global step with this planner and ``storage`` returns every plan as it was."""
        return False

    def is_pure(self, storage: Any) -> bool:  # noqa: ARG002 - for save planners to answer
        """Whether the global step with this planner and ``storage`` is known not to change plans in place."""
        return False
