"""What each training process of the demo does: train, then save with our planner and, to compare, stock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from planner import GlooCoordinatedPlanner
from planner.demo.model import build, full_state, make_meshes, train
from planner.demo.stock import Phase, count_entries, observe_exchange

OURS, STOCK, TRAINED = "ours", "stock", "trained.pt"


@dataclass(frozen=True)
class Saved:
    """One ``dcp.save`` as one rank saw it.

    Attributes:
        what: ``model`` or ``optimizer``.
        how: ``OURS`` or ``STOCK``.
        phases: the exchanges between the ranks, in order.
        coordination_seconds: time in them, apart from the planner's and the writer's own work.
        total_seconds: the whole call.
    """

    what: str
    how: str
    phases: tuple[Phase, ...]
    coordination_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class TrainedAndSaved:
    """What one training process reports.

    Attributes:
        losses: mean loss of each step.
        refusal: what stock ``dcp.save`` got from the default group.
        entries: write items in this rank's local plan of the model and of the optimizer.
        saves: all measured saves, in order.
    """

    losses: list[float]
    refusal: str
    entries: dict[str, int]
    saves: list[Saved]


class _Save(Protocol):
    def __call__(self, folder: Path, **how: Any) -> None: ...


def save_model(model: nn.Module, folder: Path, **how: Any) -> None:
    """Save the model as an engine does; ``how`` is all that differs between the demo's saves."""
    state_dict = {"model": get_model_state_dict(model)}
    dcp.save(state_dict, checkpoint_id=folder / "model", **how)  # type: ignore[attr-defined]


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, **how: Any) -> None:
    """Save the optimizer as an engine does, by a second ``dcp.save``."""
    state_dict = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state_dict, checkpoint_id=folder / "optimizer", **how)  # type: ignore[attr-defined]


def train_and_save(folder: Path, layers: int, steps: int) -> TrainedAndSaved:
    """Run one training process; called on all ranks by the elastic launcher."""
    torch.set_num_threads(1)
    # A default group without a backend for the CPU: whatever asks it for a collective gets an error at
    # once, where the device backend of a real job might never answer.
    # It ends with the process: torch warns when it is asked to destroy such a group.
    dist.init_process_group("cuda:gloo")
    meshes = make_meshes()
    model, optimizer = build(layers, meshes, seed=0)
    losses = train(model, optimizer, steps, meshes.group)

    # Kept apart from every checkpoint, for the loaders to compare with.
    trained = full_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(trained, folder / TRAINED)

    engine: dict[str, _Save] = {
        "model": partial(save_model, model),
        "optimizer": partial(save_optimizer, model, optimizer),
    }
    return TrainedAndSaved(
        losses=losses,
        refusal=_ask_default_group(engine["model"], folder / "refused"),
        entries={
            "model": count_entries({"model": get_model_state_dict(model)}),
            "optimizer": count_entries({"optimizer": get_optimizer_state_dict(model, optimizer)}),
        },
        saves=[_save_ours(what, save, folder / OURS) for what, save in engine.items()]
        + [_save_stock(what, save, folder / STOCK, meshes.group) for what, save in engine.items()],
    )


def _save_ours(what: str, save: _Save, folder: Path) -> Saved:
    planner = GlooCoordinatedPlanner()
    start = time.perf_counter()
    save(folder, planner=planner)
    total_seconds = time.perf_counter() - start
    report = planner.report
    if report is None:
        raise RuntimeError(f"the save of the {what} left no report: our planner did not coordinate it")
    phases = tuple(
        Phase(p.name, p.seconds - p.work_seconds, p.sent_nbytes, p.received_nbytes) for p in report.phases
    )
    return Saved(what, OURS, phases, report.coordination_seconds, total_seconds)


def _save_stock(what: str, save: _Save, folder: Path, group: dist.ProcessGroup) -> Saved:
    with observe_exchange() as phases:
        start = time.perf_counter()
        save(folder, process_group=group)
        total_seconds = time.perf_counter() - start
    return Saved(what, STOCK, tuple(phases), sum(p.seconds for p in phases), total_seconds)


def _ask_default_group(save: _Save, folder: Path) -> str:
    """Return how the default group refuses a stock save, or fail: the demo would show nothing."""
    try:
        save(folder)
    except Exception as error:  # noqa: BLE001 - a RuntimeError or an AssertionError, as torch was built
        return f"{type(error).__name__}: {error}".splitlines()[0]
    raise RuntimeError("the default group carried a stock save; the demo needs one that refuses")
