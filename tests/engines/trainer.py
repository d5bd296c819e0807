"""What the trainers of this folder have in common: a tiny model, and what they do with their engine.

    torchrun ... [-m planner run] trainer_ENGINE.py RESULTS STEP ...

It trains twice and then does each STEP: ``save:FOLDER``, or ``load:FOLDER`` after spoiling everything;
with a ``+`` before it under ``planner.coordinated()``. Nothing else here knows of planner. Each rank leaves a
JSON file in the folder RESULTS.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import collectives
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

torch.set_num_threads(1)  # sums in the same order in every run


def make_model() -> nn.Module:
    random.seed(0)  # some engines save the states of all three generators
    np.random.seed(0)  # noqa: NPY002 - the global one, which they save
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))


def make_batch(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(4, 8, generator=generator)


class Trainer:
    """One engine with its own objects, driven through its own public calls."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def train(self, step: int) -> None:
        raise NotImplementedError

    def save(self, folder: str) -> None:
        raise NotImplementedError

    def load(self, folder: str) -> None:
        raise NotImplementedError

    def extra(self):
        """Return what else the checkpoint has to bring back."""

    def spoil(self) -> None:
        """Change everything that a checkpoint has to bring back."""
        self.train(step=99)


def digest(trainer: Trainer) -> str:
    """Return a digest of this rank's bytes of the model and the optimizer, and of what else it keeps."""
    found = hashlib.sha256(repr(trainer.extra()).encode())
    tensors = dict(trainer.model.state_dict())
    for number, state in enumerate(trainer.optimizer.state.values()):
        tensors.update({f"optimizer.{number}.{name}": value for name, value in state.items()})
    for name, tensor in sorted(tensors.items()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(f"{name} {local.dtype} {tuple(local.shape)} ".encode())
        found.update(
            local.detach().contiguous().view(torch.uint8).numpy().tobytes()
            if local.dim()
            else repr(local.item()).encode()
        )
    return found.hexdigest()


class _Reports(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record) -> None:
        self.lines.append(record.getMessage())


def main(make_trainer: Callable[[], Trainer], version: str) -> None:
    """Do what the arguments say."""
    results, *steps = sys.argv[1:]
    reports = _Reports()
    logging.getLogger("planner").addHandler(reports)
    logging.getLogger("planner").setLevel(logging.INFO)
    collectives.install()
    trainer = make_trainer()
    for step in range(2):
        trainer.train(step)
    trained = digest(trainer)
    done = []
    for step in steps:
        what, folder = step.lstrip("+").split(":", 1)
        if what == "load":
            trainer.spoil()
            if digest(trainer) == trained:
                raise AssertionError("a checkpoint that brings nothing back would not be noticed")
        has_planner = "planner" in sys.modules
        if step.startswith("+"):
            import planner

            block = planner.coordinated()
        else:
            block = nullcontext()
        dist.barrier()  # so that nothing of before is counted
        reports.lines.clear()
        with block, collectives.Count() as counted:
            getattr(trainer, what)(folder)
        done.append(
            {
                "step": step,
                "rank": dist.get_rank(),
                "calls": [asdict(call) for call in counted.calls],
                "grown": counted.grown,
                "new_groups": counted.new_groups,
                "is_as_trained": digest(trainer) == trained,
                "had_planner": has_planner,
                "reports": list(reports.lines),
            }
        )
    text = json.dumps({"version": version, "torch": torch.__version__, "trained": trained, "steps": done})
    Path(results).mkdir(parents=True, exist_ok=True)
    Path(results, f"{dist.get_rank()}.json").write_text(text)
    dist.barrier()
    dist.destroy_process_group()
