"""A whole save as the coordinator and as another rank, for 64 to 4,096 ranks: what each computes.

One process is the coordinator and then another rank (see ``simulated.py``); ``worlds.py`` has what they save.
Each side runs in a forked child of its own, so that its peak memory is its own. CPU seconds are those
of ``dcp.save`` without writing data, without making the local plan and without the writer's finish, each of
which has a row of its own or another benchmark. Stock DCP is
measured up to 512 ranks, where it needs many minutes of CPU, and left out above. Up to 64 ranks the
``.metadata`` of both sides are compared.

    python benchmarks/coordinator.py
    python benchmarks/coordinator.py --short                          32 ranks, the model alone
    python benchmarks/coordinator.py --worlds dense-70b --world-sizes 64 256 --repeats 3
"""

from __future__ import annotations

import argparse
import gc
import sys
from typing import Any

import torch
from bench import OURS, STOCK, Memory, Row, in_child, in_turn, options_of, report
from simulated import Replies, Saved, Sent, prepare, save_as
from worlds import WORLDS, World, fake_world, local_plan_of

WORLD_SIZES = (64, 256, 512, 1024, 2048, 4096)


def measure_side(side: str, world: World, world_size: int, sent: Sent) -> dict[str, Any]:
    """Save twice as the coordinator and twice as rank 1; stock DCP once, its second save is as its first."""
    num_saves = 2 if side == OURS else 1
    replies = Replies()
    gc.collect()
    memory = Memory()
    found: dict[str, Any] = {}
    for rank in (0, 1):
        gc.collect()  # what the other left must not make a full collection due
        with fake_world(world_size, rank):
            saves = save_as(side, rank, world, sent, replies)
            found[f"rank {rank}"] = [next(saves) for _ in range(num_saves)]
        if not rank:
            found["growth"] = memory.peak_growth_nbytes()
    return found


def rows_of(case: str, facts: dict[str, Any], stock: list[dict], ours: list[dict]) -> list[Row]:
    rows = []

    def add(what: str, unit: str, take) -> None:
        samples = [take(found, False) for found in stock], [take(found, True) for found in ours]  # noqa: FBT003
        rows.append(Row(case, what, unit, *samples, facts))

    def of(rank: int, save: int, name: str):
        def take(found: dict, is_ours: bool) -> float:  # noqa: FBT001
            saves: list[Saved] = found[f"rank {rank}"]
            return float(getattr(saves[save if is_ours else 0], name))

        return take

    for save, label in enumerate(("first save", "unchanged save")):
        add(f"coordinator, {label}", "s", of(0, save, "cpu_seconds"))
        add(f"writer's finish, {label}", "s", of(0, save, "finish_seconds"))
        add(f"another rank, {label}", "s", of(1, save, "cpu_seconds"))
    for save, label in enumerate(("first save", "unchanged save")):
        add(f"another rank sends, {label}", "bytes", of(1, save, "sent_nbytes"))
        add(f"the same, schema of all like it, {label}", "bytes", of(1, save, "schema_nbytes"))
        add(f"another rank puts into the store, {label}", "bytes", of(1, save, "record_nbytes"))
        add(f"another rank receives, {label}", "bytes", of(1, save, "received_nbytes"))
    add("growth of the coordinator's memory", "MB", lambda found, _: found["growth"] / 1e6)
    return rows


def measure(name: str, world_size: int, repeats: int, *, with_stock: bool) -> list[Row]:
    with fake_world(world_size):
        world = WORLDS[name]()
        num_entries = len(local_plan_of(world.become(0)).items)
        sent = prepare(world, world_size, with_stock=with_stock)

    def side(which: str):
        return in_child(lambda: measure_side(which, world, world_size, sent))

    if with_stock:
        stock, ours = in_turn(repeats, lambda: side(STOCK), lambda: side(OURS))
    else:
        stock, ours = [], [side(OURS) for _ in range(repeats)]
    written = {saved.fingerprint for found in (*stock, *ours) for saved in found["rank 0"]}
    if len(written) != 1:
        sys.exit(f"{name}, {world_size} ranks: the two sides wrote different metadata")
    facts = {"world": name, "world_size": world_size, "entries": num_entries}
    return rows_of(f"{name}, {world_size} ranks x {num_entries:,}", facts, stock, ours)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-sizes", type=int, nargs="+", help=f"default: {WORLD_SIZES}")
    parser.add_argument("--stock-up-to", type=int, default=512, help="the most ranks with stock DCP")
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS))


def main() -> None:
    options = options_of(__doc__, add_options)
    torch.set_num_threads(1)
    world_sizes = options.world_sizes or ((32,) if options.short else WORLD_SIZES)
    names = options.worlds or (["moe-model"] if options.short else ["moe-optimizer"])
    rows: list[Row] = []
    for name in names:
        for world_size in world_sizes:
            with_stock = world_size <= options.stock_up_to
            rows += measure(name, world_size, options.repeats or 1, with_stock=with_stock)
    report("coordinator", options, rows)


if __name__ == "__main__":
    main()
