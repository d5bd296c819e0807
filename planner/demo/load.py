"""What each loading process of the demo does: load with stock DCP and compare every value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from planner.demo.model import Meshes, build, full_state, make_meshes
from planner.demo.save import OURS, STOCK, TRAINED


@dataclass(frozen=True)
class Compared:
    """What one loading process reports.

    Attributes:
        num_values: tensors and other values compared for each checkpoint.
        differences: one line each.
    """

    num_values: int
    differences: list[str]


def load_and_compare(folder: Path, layers: int) -> Compared:
    """Run one loading process; called on all ranks by the elastic launcher."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    meshes = make_meshes()
    trained = torch.load(folder / TRAINED, weights_only=True)
    differences = []
    for how in (OURS, STOCK):
        loaded = _load(folder / how, layers, meshes)
        differences += [f"{how}: {name} differs from the trained value" for name in unequal(loaded, trained)]
    for what in ("model", "optimizer"):
        ours, stock = (
            FileSystemReader(folder / how / what).read_metadata().state_dict_metadata for how in (OURS, STOCK)
        )
        differences += [f"{what}: metadata of {name} differs" for name in unequal(ours, stock)]
    dist.destroy_process_group()
    return Compared(len(trained), differences)


def _load(folder: Path, layers: int, meshes: Meshes) -> dict[str, Any]:
    """Load a checkpoint into a fresh model and optimizer and return all of their values."""
    model, optimizer = build(layers, meshes, seed=1)
    model_state = get_model_state_dict(model)
    load({"model": model_state}, checkpoint_id=folder / "model")
    set_model_state_dict(model, model_state)
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    load({"optimizer": optimizer_state}, checkpoint_id=folder / "optimizer")
    set_optimizer_state_dict(model, optimizer, optimizer_state)
    return full_state(model, optimizer)


def unequal(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the names whose values are not the same, tensors bit for bit."""
    return [
        name
        for name in sorted(found.keys() | expected.keys())
        if name not in found or name not in expected or not _same(found[name], expected[name])
    ]


def _same(left: object, right: object) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        # As bytes, so that -0.0 is not 0.0 and a NaN is itself.
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)))
        )
    return type(left) is type(right) and left == right
