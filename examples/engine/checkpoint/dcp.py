"""Save and load the model and the optimizer, in two checkpoints, as the field report's engine does.

The two arguments ``planner=`` in ``_save`` and ``_load`` are all that coordination needs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from engine.checkpoint.distributed import CheckpointConfig, checkpoint_group


def save_model(model: nn.Module, config: CheckpointConfig) -> None:
    """Save the model; called on all ranks."""
    _save("model", get_model_state_dict(model), config)


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, config: CheckpointConfig) -> None:
    """Save the optimizer; called on all ranks."""
    _save("optimizer", get_optimizer_state_dict(model, optimizer), config)


def load_model(model: nn.Module, config: CheckpointConfig) -> None:
    """Load the model; called on all ranks."""
    set_model_state_dict(model, _load("model", get_model_state_dict(model), config))


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, config: CheckpointConfig) -> None:
    """Load the optimizer; called on all ranks."""
    state_dict = _load("optimizer", get_optimizer_state_dict(model, optimizer), config)
    set_optimizer_state_dict(model, optimizer, state_dict)


def _save(what: str, state_dict: dict[str, Any], config: CheckpointConfig) -> None:
    dcp.save(
        {what: state_dict},
        checkpoint_id=config.folder / what,
        planner=config.coordination.save_planner(),
        process_group=checkpoint_group(config),
    )


def _load(what: str, state_dict: dict[str, Any], config: CheckpointConfig) -> dict[str, Any]:
    dcp.load(
        {what: state_dict},
        checkpoint_id=config.folder / what,
        planner=config.coordination.load_planner(),
        process_group=checkpoint_group(config),
    )
    return state_dict
