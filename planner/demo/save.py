"""What each training process of the demo does: train, then save with our planner and, to compare, stock."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from planner import GlooCoordinatedPlanner
from planner.demo.measure import (
    OURS,
    STOCK,
    Call,
    count_entries,
    measure_ours,
    measure_stock,
    phases_of,
    refusal_of,
)
from planner.demo.model import build, full_state, make_meshes, train

TRAINED = "trained.pt"


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
    saves: list[Call]


class Engine:
    """Saves as an engine does: the model, then the optimizer by a second call."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self, what: str) -> dict[str, Any]:
        """Return what is saved as ``model`` or as ``optimizer``."""
        if what == "model":
            return {"model": get_model_state_dict(self.model)}
        return {"optimizer": get_optimizer_state_dict(self.model, self.optimizer)}

    def save(self, what: str, folder: Path, **how: Any) -> None:
        """Save one of them; ``how`` is all that differs between the demo's saves."""
        dcp.save(self.state_dict(what), checkpoint_id=folder / what, **how)  # type: ignore[attr-defined]


def train_and_save(folder: Path, layers: int, steps: int, async_mode: str | None) -> TrainedAndSaved:
    """Run one training process; called on all ranks by the elastic launcher."""
    torch.set_num_threads(1)
    # A default group without a backend for the CPU: whatever asks it for a collective gets an error at
    # once, where the device backend of a real job might never answer.
    # It ends with the process: torch warns when it is asked to destroy such a group.
    dist.init_process_group("cuda:gloo")
    group = (meshes := make_meshes()).group
    model, optimizer = build(layers, meshes, seed=0)
    losses = train(model, optimizer, steps, group)

    engine = Engine(model, optimizer)
    refusal = refusal_of(lambda: engine.save("model", folder / "refused"))
    trained: dict[str, Any] = {}
    saves: list[Call] = []

    def train_on(saved: Future[Any]) -> int:
        begun_before = 0
        for _ in range(steps):
            begun_before += not saved.done()
            train(model, optimizer, 1, group)
        return begun_before

    def save_ours(what: str) -> Call:
        if async_mode is not None:
            return _save_async(engine, what, folder / OURS, async_mode, train_on)
        return measure_ours("save", what, lambda planner: engine.save(what, folder / OURS, planner=planner))

    def save_stock(what: str) -> Call:
        return measure_stock("save", what, lambda: engine.save(what, folder / STOCK, process_group=group))

    for what in ("model", "optimizer"):
        # Kept apart from every checkpoint, for the loaders to compare with.
        trained |= {n: value for n, value in full_state(model, optimizer).items() if n.startswith(what)}
        # The training goes on during an asynchronous save, so stock has to have saved the same before.
        saves += (
            [save_ours(what), save_stock(what)] if async_mode is None else [save_stock(what), save_ours(what)]
        )
    if dist.get_rank() == 0:
        torch.save({"layers": layers, "values": trained}, folder / TRAINED)
    return TrainedAndSaved(
        losses=losses,
        refusal=refusal,
        entries={what: count_entries(engine.state_dict(what)) for what in ("model", "optimizer")},
        saves=saves,
    )


def _save_async(
    engine: Engine, what: str, folder: Path, mode: str, train_on: Callable[[Future[Any]], int]
) -> Call:
    """Save what is now, and train on while that is written."""
    planner = GlooCoordinatedPlanner()
    start = time.perf_counter()
    future: Future[Any] = dcp.async_save(  # type: ignore[attr-defined, assignment]  # without a stager of ours
        engine.state_dict(what),
        checkpoint_id=folder / what,
        planner=planner,
        async_checkpointer_type=AsyncCheckpointerType(mode),
    )
    blocked_seconds = time.perf_counter() - start
    steps_meanwhile = train_on(future)
    # One save at a time: DCP does not say which of several its checkpoint process answers.
    future.result()
    total_seconds = time.perf_counter() - start
    phases = phases_of(planner) if mode == "thread" else ()  # the planner of the process has that report
    return Call("save", what, OURS, phases, total_seconds, blocked_seconds, steps_meanwhile)
