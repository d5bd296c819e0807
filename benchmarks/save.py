"""A whole ``dcp.save`` on real ranks, forked processes with real gloo; the writer writes metadata alone.

In each repeat new ranks save in turn with stock DCP over a gloo group, with this library for the first
time, which makes its group, and with this library again, unchanged. All ranks share the cores of this
machine, so the time of a save is the work of all of them.

Stock DCP makes all metadata on each rank, hundreds of MB: it is measured up to 32 ranks.

    python benchmarks/save.py                                     8 and 32 ranks, ours also 64, 128 and 512
    python benchmarks/save.py --short                             8 ranks
    python benchmarks/save.py --world-sizes 1024 --repeats 1      needs a high limit of processes
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import socket
import statistics
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

# Here and there every two ranks would connect at once, which takes long with hundreds of them.
os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# At each connection to a store c10d asks DNS for the name of its host. All ranks of this one machine ask at
# once, which is more than some servers answer, and then each waits for the resolver's timeout, 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench import Row, options_of, report
from simulated import NullWriter
from worlds import WORLDS, World, fake_world

from planner import CoordinationConfig, GlooCoordinatedPlanner

WORLD_SIZES, MAX_STOCK_WORLD_SIZE = (8, 32, 64, 128, 512), 32
_TIMEOUT = timedelta(minutes=30)


def run_rank(rank: int, world_size: int, port: int, world: World, folder: Path, *, with_stock: bool) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    state_dict = world.become(rank)
    found: dict[str, Any] = {}
    sides = [*(["stock"] if with_stock else []), "ours, first save", "ours, unchanged save"]
    for side in sides:
        planner: Any = dcp.DefaultSavePlanner()
        if side != "stock":
            planner = GlooCoordinatedPlanner(config=CoordinationConfig(plan_timeout=_TIMEOUT))
        writer = NullWriter(str(folder / side))
        gc.collect()
        _meet(store, side, world_size)
        wall, cpu = time.perf_counter(), time.process_time()
        dcp.save(state_dict, storage_writer=writer, planner=planner)
        entry = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        if side != "stock":
            saved = planner.report
            entry |= {"sent": saved.sent_nbytes, "received": saved.received_nbytes}
        found[side] = entry
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / f"{rank}.json").write_text(json.dumps(found))
    _meet(store, "end", world_size)
    if store.add("gone", 1) == world_size:
        store.set("all gone", b"1")
    if rank == 0:  # whose process has the store, which the others need until then
        store.wait(["all gone"], _TIMEOUT)


def _meet(store: dist.Store, name: str, world_size: int) -> None:
    """Wait for all ranks, without a group."""
    if store.add(f"{name}/count", 1) == world_size:
        store.set(f"{name}/all", b"1")
    store.wait([f"{name}/all"], _TIMEOUT)


def run_world(world: World, world_size: int, *, with_stock: bool) -> list[dict[str, Any]]:
    """Fork ``world_size`` ranks; return what each found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    gc.collect()
    gc.freeze()  # else the first collection in each child copies the memory that it shares
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    run_rank(rank, world_size, port, world, Path(folder), with_stock=with_stock)
                    code = 0
                except BaseException:  # noqa: BLE001 - the child must not return into the parent's code
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
        if any(os.waitpid(pid, 0)[1] for pid in pids):
            sys.exit("a rank failed, see above")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def rows_of(case: str, facts: dict[str, Any], runs: list[list[dict[str, Any]]]) -> list[Row]:
    rows = []
    for label in ("first save", "unchanged save"):

        def samples(take, side: str = f"ours, {label}") -> list[float]:
            return [take([rank[side] for rank in run]) for run in runs if side in run[0]]

        def add(what: str, unit: str, take, *, with_stock: bool = True, label: str = label) -> None:
            stock = samples(take, "stock") if with_stock else []
            rows.append(Row(case, f"{what}, {label}", unit, stock, samples(take, f"ours, {label}"), facts))

        add("dcp.save, wall", "s", lambda ranks: max(rank["wall"] for rank in ranks))
        add("CPU of all ranks", "s", lambda ranks: sum(rank["cpu"] for rank in ranks))
        add("CPU of the coordinator", "s", lambda ranks: ranks[0]["cpu"])
        add("CPU of another rank", "s", lambda ranks: statistics.median(rank["cpu"] for rank in ranks[1:]))
        for kind in ("sent", "received"):
            add(
                f"{kind} by another rank",
                "bytes",
                lambda ranks, kind=kind: statistics.median(rank[kind] for rank in ranks[1:]),
                with_stock=False,
            )
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-sizes", type=int, nargs="+", help=f"default: {WORLD_SIZES}")
    parser.add_argument("--world", choices=list(WORLDS))


def main() -> None:
    options = options_of(__doc__, add_options)
    world_sizes = options.world_sizes or ((8,) if options.short else WORLD_SIZES)
    name = options.world or ("moe-model" if options.short else "moe-optimizer")
    rows: list[Row] = []
    for world_size in world_sizes:
        with fake_world(world_size):
            world = WORLDS[name]()
        repeats = options.repeats or (3 if world_size <= MAX_STOCK_WORLD_SIZE else 1)
        with_stock = world_size <= MAX_STOCK_WORLD_SIZE
        runs = [run_world(world, world_size, with_stock=with_stock) for _ in range(repeats)]
        facts = {
            "world": name,
            "world_size": world_size,
            "peak_nbytes": [rank["peak"] for rank in runs[-1]][:2],
        }
        rows += rows_of(f"{name}, {world_size} ranks", facts, runs)
    report("save", options, rows)


if __name__ == "__main__":
    main()
