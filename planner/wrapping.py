"""What both planners check of the planner that they wrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.config import CoordinationConfig
from planner.coordinated import Coordinated
from planner.errors import ConfigError

__all__ = ["check_arguments", "is_inherited", "require"]


def check_arguments(
    inner: object,
    config: object,
    options: Mapping[str, Any],
    *,
    hooks: Sequence[str],
    kind: str,
    default: str,
) -> None:
    """Check what a planner is made from.

    Raises:
        ConfigError: names every problem.
    """
    problems = []
    if inner is not None and options:
        problems.append(f"options {sorted(options)} are for {default}; give them to inner itself")
    if isinstance(inner, Coordinated):
        problems.append("inner is coordinated already; pass the planner that it wraps")
    missing = [] if inner is None else [name for name in hooks if not callable(getattr(inner, name, None))]
    if missing:
        problems.append(f"inner of type {type(inner).__name__} is no {kind}: it lacks {missing}")
    if config is not None and not isinstance(config, CoordinationConfig):
        problems.append(f"config must be a CoordinationConfig, not {type(config).__name__}")
    elif config is not None and config.coordination != "gloo":
        problems.append(
            f"config has coordination={config.coordination!r}, with which no planner of ours is used"
        )
    if problems:
        raise ConfigError(problems)


def require(inner: object, holds: bool, hook: str, expected: str, found: object) -> None:  # noqa: FBT001
    """Raise a TypeError that names the inner planner's hook unless what it returned is as DCP expects."""
    if not holds:
        what = f"a list of {len(found)}" if isinstance(found, list) else f"a {type(found).__name__}"
        raise TypeError(f"{type(inner).__name__}.{hook} must return {expected}, but returned {what}")


def is_inherited(owner: object, name: str, base: type) -> bool:
    """Whether ``owner`` has ``name`` from ``base`` unchanged."""
    return name not in getattr(owner, "__dict__", {}) and getattr(type(owner), name, None) is getattr(
        base, name
    )
