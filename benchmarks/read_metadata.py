"""What a rank that loads pays for ``.metadata``: the size of the file, and making its objects.

Both files are of the same save, by stock DCP and by ours (see ``simulated.py``), and hold the same. Stock DCP
reads either; a load of ours pauses the garbage collector meanwhile.

    python benchmarks/read_metadata.py [--ranks 64] [--world moe-optimizer]
"""

from __future__ import annotations

import argparse
import gc
import pickle
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from bench import OURS, STOCK, Row, in_child, in_turn, options_of, report
from simulated import Replies, prepare, save_as
from worlds import WORLDS, fake_world

from planner.wire.gc_pause import paused_gc


def write_files(name: str, world_size: int, folder: Path) -> None:
    with fake_world(world_size):
        world = WORLDS[name]()
        sent = prepare(world, world_size, with_stock=True)
    for side in (STOCK, OURS):
        with fake_world(world_size):
            next(save_as(side, 0, world, sent, Replies(), keep=folder / side))


def read(path: Path, *, pauses: bool) -> float:
    """Return the CPU seconds of making the objects of a file."""
    data = path.read_bytes()
    gc.collect()
    with paused_gc() if pauses else nullcontext():
        start = time.process_time()
        metadata = pickle.loads(data)
        seconds = time.process_time() - start
    assert metadata.storage_data
    return seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="default: 64, 16 in the short form")
    parser.add_argument("--world", choices=list(WORLDS), default="moe-optimizer")


def main() -> None:
    options = options_of(__doc__, add_options)
    torch.set_num_threads(1)
    world_size = options.ranks or (16 if options.short else 64)
    repeats = options.repeats or (1 if options.short else 5)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        in_child(lambda: write_files(options.world, world_size, folder))

        def reading(side: str, *, pauses: bool):
            return lambda: in_child(lambda: read(folder / side, pauses=pauses))

        case = f".metadata of {options.world}, {world_size} ranks"
        sizes = [[(folder / side).stat().st_size / 1e6] for side in (STOCK, OURS)]
        rows = [
            Row(case, "size of the file", "MB", *sizes),
            Row(
                case,
                "making its objects, by stock DCP",
                "s",
                *in_turn(repeats, reading(STOCK, pauses=False), reading(OURS, pauses=False)),
            ),
            Row(
                case,
                "making its objects, each by its own",
                "s",
                *in_turn(repeats, reading(STOCK, pauses=False), reading(OURS, pauses=True)),
            ),
        ]
    report("read_metadata", options, rows)


if __name__ == "__main__":
    main()
