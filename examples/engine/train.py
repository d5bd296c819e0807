"""Train, save, and go on from what an earlier run saved.

In the folder that the engine's package is in: torchrun --nproc-per-node 4 -m engine.train engine/engine.yaml
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from engine.checkpoint.dcp import load_model, load_optimizer, save_model, save_optimizer
from engine.checkpoint.distributed import CheckpointConfig
from planner.demo.model import build, make_meshes, train


def default_backend() -> str:
    """Return the backend of the accelerator, where this machine has one, else gloo."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return "gloo" if device is None else dist.get_default_backend_for_device(device)


def main(path: str) -> None:
    """Run one training process."""
    logging.basicConfig(level=logging.INFO)
    options = yaml.safe_load(Path(path).read_text())
    config = CheckpointConfig.from_mapping(options["checkpoint"])  # wrong options end here, not at a save
    torch.set_num_threads(1)
    dist.init_process_group(default_backend())
    meshes = make_meshes()
    model, optimizer = build(options["model"]["layers"], meshes, seed=0)
    if (config.folder / "optimizer" / ".metadata").exists():
        load_model(model, config)
        load_optimizer(model, optimizer, config)
    dist.barrier(meshes.group)  # all have looked before anybody saves
    losses = train(model, optimizer, options["model"]["steps"], meshes.group)
    save_model(model, config)
    save_optimizer(model, optimizer, config)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}, saved in {config.folder}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
