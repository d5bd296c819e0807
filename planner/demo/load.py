"""What each loading process of the demo does: load with our planner and stock DCP, compare all values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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

from planner.demo.measure import OURS, STOCK, Call, measure_ours, measure_stock, refusal_of
from planner.demo.model import Meshes, build, full_state, make_meshes
from planner.demo.save import TRAINED

WAYS = ((OURS, OURS), (OURS, STOCK), (STOCK, OURS))  # written by, read by


@dataclass(frozen=True)
class Compared:
    """What one loading process reports.

    Attributes:
        refusal: what stock ``dcp.load`` got from the default group.
        num_values: tensors and other values compared in each way.
        differences: one line each.
        loads: the measured loads of what our planner wrote, in order.
    """

    refusal: str
    num_values: int
    differences: list[str]
    loads: list[Call]


def load_and_compare(folder: Path) -> Compared:
    """Run one loading process; called on all ranks by the elastic launcher."""
    torch.set_num_threads(1)
    dist.init_process_group("cuda:gloo")  # refuses every collective, as in the training
    meshes = make_meshes()
    kept = torch.load(folder / TRAINED, weights_only=True)
    model, _ = build(kept["layers"], meshes, seed=1)
    refused = {"model": get_model_state_dict(model)}
    refusal = refusal_of(lambda: load(refused, checkpoint_id=folder / OURS / "model"))
    loads, differences = [], []
    for written, read in WAYS:
        values, calls = _load(folder / written, read, kept["layers"], meshes)
        loads += calls if written == OURS else []
        differences += [
            f"written by {written}, read by {read}: {name} differs from the trained value"
            for name in unequal(values, kept["values"])
        ]
    for what in ("model", "optimizer"):
        ours, stock = (
            FileSystemReader(folder / how / what).read_metadata().state_dict_metadata for how in (OURS, STOCK)
        )
        differences += [f"{what}: metadata of {name} differs" for name in unequal(ours, stock)]
    return Compared(refusal, len(kept["values"]), differences, loads)


def _load(folder: Path, read: str, layers: int, meshes: Meshes) -> tuple[dict[str, Any], list[Call]]:
    """Load a checkpoint into a fresh model and optimizer and return all of their values."""
    model, optimizer = build(layers, meshes, seed=1)
    model_state = get_model_state_dict(model)
    calls = [_load_one("model", model_state, folder, read, meshes)]
    set_model_state_dict(model, model_state)
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    calls.append(_load_one("optimizer", optimizer_state, folder, read, meshes))
    set_optimizer_state_dict(model, optimizer, optimizer_state)
    return full_state(model, optimizer), calls


def _load_one(what: str, state: dict[str, Any], folder: Path, read: str, meshes: Meshes) -> Call:
    call = partial(load, {what: state}, checkpoint_id=folder / what)
    if read == OURS:
        return measure_ours("load", what, call)
    return measure_stock("load", what, partial(call, process_group=meshes.group))


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
