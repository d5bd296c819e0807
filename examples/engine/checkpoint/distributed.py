"""How the ranks of a save or load talk: the engine's checkpoint options, and the group they may need."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from planner import CoordinationConfig


@dataclass(frozen=True)
class CheckpointConfig:
    """The part ``checkpoint`` of the engine's configuration."""

    folder: Path
    process_group: str
    coordination: CoordinationConfig

    @staticmethod
    def from_mapping(options: dict[str, Any]) -> CheckpointConfig:
        """Read it; for a rollout the environment has the last word on coordination."""
        coordination = CoordinationConfig.from_mapping(
            options["coordination"], path="checkpoint.coordination"
        )
        return CheckpointConfig(
            Path(options["folder"]), options["process_group"], CoordinationConfig.from_env(over=coordination)
        )


def checkpoint_group(config: CheckpointConfig) -> dist.ProcessGroup | None:
    """Return what DCP's own coordination runs on: the default group, or a gloo group."""
    return _gloo_group() if config.process_group == "gloo" else None


@functools.cache
def _gloo_group() -> dist.ProcessGroup:
    """Make a gloo group of all ranks, at the first save; the way that the field report proposed."""
    return dist.new_group(backend="gloo")
