"""The field report's experiment on this engine: one configuration, one variable, and what a save costs.

The same trained model and optimizer are saved in three ways, in turns, by the same processes: with
coordination, with ``process_group=`` a gloo group, and on the default group, the device's where there is one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from engine.checkpoint.dcp import save_model, save_optimizer
from engine.checkpoint.distributed import CheckpointConfig
from engine.train import default_backend
from planner import CoordinationConfig
from planner.demo.launch import describe, launch
from planner.demo.measure import count_entries, measure_exchange
from planner.demo.model import build, make_meshes, train

WAYS = {  # the one variable
    "coordination: gloo": {"coordination": CoordinationConfig(), "process_group": "default"},
    "process_group: gloo": {
        "coordination": CoordinationConfig(coordination="default"),
        "process_group": "gloo",
    },
    "default": {"coordination": CoordinationConfig(coordination="default"), "process_group": "default"},
}


@dataclass(frozen=True)
class Save:
    """One save of model and optimizer, as one rank saw it; no device memory where there is no device."""

    exchange_seconds: float
    total_seconds: float
    device_nbytes: int | None


@dataclass(frozen=True)
class Result:
    """What one process reports."""

    backend: str
    entries: int
    saves: dict[str, list[Save]]


def save_in_turns(folder: Path, layers: int, saves: int) -> Result:
    """Run one training process; called on all ranks by the elastic launcher."""
    torch.set_num_threads(1)
    backend = default_backend()
    if backend != "gloo":
        torch.accelerator.set_device_index(int(dist.get_node_local_rank()))
    dist.init_process_group(backend)
    meshes = make_meshes()
    model, optimizer = build(layers, meshes, seed=0)
    train(model, optimizer, 1, meshes.group)
    state_dict = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    result = Result(backend, count_entries(state_dict), {name: [] for name in WAYS})
    for number in range(saves):
        first = number % len(WAYS)  # another one each time
        for name in [*WAYS, *WAYS][first : first + len(WAYS)]:
            config = CheckpointConfig(folder / str(number) / name, **WAYS[name])
            dist.barrier(meshes.group)
            before = _reset_device_peak()
            start = time.perf_counter()
            with measure_exchange() as exchange:
                save_model(model, config)
                save_optimizer(model, optimizer, config)
            total = time.perf_counter() - start
            peak = None if before is None else torch.get_device_module().max_memory_allocated() - before
            result.saves[name].append(Save(exchange.seconds, total, peak))
    dist.destroy_process_group()
    return result


def _reset_device_peak() -> int | None:
    if not torch.accelerator.is_available():
        return None
    device = torch.get_device_module()
    device.reset_peak_memory_stats()
    return int(device.memory_allocated())


def table(results: dict[int, Result]) -> str:
    """Return the table: seconds of the coordinator, the first save and the median of later ones."""
    entries = max(result.entries for result in results.values())
    row = "{:<22} {:>14} {:>12} {:>9} {:>15}".format
    title = f"save of model and optimizer, {len(results)} processes, {entries} entries a rank"
    lines = [
        f"{title}; default group: {results[0].backend}",
        "",
        row("", "exchange, s", "later", "save, s", "device memory"),
    ]
    for name in WAYS:
        first, *later = results[0].saves[name]
        later = later or [first]
        peaks = [save.device_nbytes for result in results.values() for save in result.saves[name]]
        memory = "no device" if None in peaks else f"{max(peaks):,} B"
        lines.append(
            row(
                name,
                f"{first.exchange_seconds:.4f}",
                f"{statistics.median(save.exchange_seconds for save in later):.4f}",
                f"{statistics.median(save.total_seconds for save in later):.4f}",
                memory,
            )
        )
    return "\n".join(
        [
            *lines,
            "",
            "Exchange is the time in DCP's coordination without the planner's and the storage's own work,",
            "but with the waiting for other ranks: in the first save, which makes a group where one is",
            "needed, and in the median of later ones. Save is the whole of the latter. Both are the",
            "coordinator's; device memory is the most on any rank.",
        ]
    )


def main() -> int:
    """Run the experiment and print its table."""
    options = yaml.safe_load(Path(__file__).with_name("engine.yaml").read_text())
    parser = argparse.ArgumentParser(prog="python -m engine.ab", description=__doc__)
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8, 16), default=4, help="processes (default: 4)")
    parser.add_argument("--layers", type=int, default=options["model"]["layers"], help="blocks of the model")
    parser.add_argument("--saves", type=int, default=5, help="in each way (default: 5)")
    chosen = parser.parse_args()
    # A device each for the ranks, or none for any.
    uses_device = torch.accelerator.is_available() and torch.accelerator.device_count() >= chosen.ranks
    with tempfile.TemporaryDirectory(prefix="engine-ab-") as folder:
        try:
            results = launch(
                chosen.ranks,
                save_in_turns,
                Path(folder),
                chosen.layers,
                chosen.saves,
                uses_device=uses_device,
            )
        except ChildFailedError as error:
            print(describe(error), file=sys.stderr)
            return 1
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
