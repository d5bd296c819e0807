"""The local plan of one rank, stock DCP against ours: setting up the planner and making the plan.

The rank has 2,812 DTensors; the first save of the process and a second one, of the same state dict. Each
repeat is in a process of its own. A plan of ours makes its items when somebody looks at them, which in a save
with DCP's own planner and writer nobody does: what that takes too is in the last row.

    python benchmarks/local_plan.py [--ranks 512] [--short]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from bench import Row, in_child, in_turn, options_of, report
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from worlds import WORLDS, World, _dtensor, _mesh, fake_world

from planner import GlooCoordinatedPlanner

NUM_SAVES = 4


def sharded() -> World:
    """2,812 DTensors, each cut in rows over all ranks; what DESIGN's figure is about."""
    from torch.distributed.tensor import Shard  # noqa: PLC0415

    mesh = _mesh(torch.distributed.get_world_size())
    entries = {
        f"model.layers.{number // 17}.{number % 17}.weight": _dtensor(
            mesh, (Shard(0),), (4096, 64 * (1 + number % 17)), torch.bfloat16
        )
        for number in range(2812)
    }
    return World(entries, [mesh])


def measure_side(make_planner: Callable[[], object], make_world: Callable[[], World], ranks: int) -> list:
    """Return, by save, CPU seconds of setting up, of the plan, and of a look at its items."""
    with fake_world(ranks, rank=3):
        state_dict = make_world().become(3)
        found = []
        for _ in range(NUM_SAVES):
            planner = make_planner()
            planner.storage_in_use = FileSystemWriter("none")  # as in a save with it
            start = time.process_time()
            planner.set_up_planner(state_dict, None, is_coordinator=False)
            middle = time.process_time()
            plan = planner.create_local_plan()
            end = time.process_time()
            assert plan.items  # which ours makes now
            found.append((middle - start, end - middle, time.process_time() - end))
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=512)


def main() -> None:
    options = options_of(__doc__, add_options)
    torch.set_num_threads(1)
    worlds = {"2,812 DTensors": sharded}
    if not options.short:
        worlds |= {name: make for name, make in WORLDS.items() if name != "unalike"}
    rows = []
    for name, make_world in worlds.items():

        def side(make_planner, make_world=make_world):
            return in_child(lambda: measure_side(make_planner, make_world, options.ranks))

        stock, ours = in_turn(
            options.repeats or (3 if options.short else 7),
            lambda side=side: side(DefaultSavePlanner),
            lambda side=side: side(GlooCoordinatedPlanner),
        )
        for label, save in (("first save", 0), ("unchanged save", 1)):
            for what, take in (
                ("local plan", lambda seconds: seconds[0] + seconds[1]),
                ("of it, set up", lambda seconds: seconds[0]),
                ("of it, plan", lambda seconds: seconds[1]),
                ("local plan that is looked at", sum),
            ):
                rows.append(
                    Row(
                        f"{name}, rank of {options.ranks}",
                        f"{what}, {label}",
                        "ms",
                        [take(found[save]) * 1e3 for found in stock],
                        [take(found[save]) * 1e3 for found in ours],
                    )
                )
    report("local_plan", options, rows)


if __name__ == "__main__":
    main()
