"""How long a save on the coordinator keeps other threads of its process from running, in one piece.

A second thread takes the interpreter lock every millisecond, and notes how many CPU seconds the process
has used since it had the lock before: that long another thread held it. CPU seconds, since on a busy
machine the process may also be waiting for a core. Python code gives the lock up after 5 ms when asked;
a call into C, or the garbage collector, may keep it until it is done. Each hold is counted for the part
of the save that was on for most of it.

    python benchmarks/gil.py            512 ranks x 2,812 entries, about 10 minutes of CPU for stock DCP
    python benchmarks/gil.py --short    32 ranks, the model alone
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from typing import Any

import torch
from bench import OURS, STOCK, Row, in_child, in_turn, options_of, report
from simulated import Replies, Sent, prepare, save_as
from worlds import WORLDS, World, fake_world

_PARTS = ("coordination", "local", "finish", "write_data")


class Ticker(threading.Thread):
    """Notes holds of the interpreter lock of ``least_s`` or more, and where the other thread then was."""

    def __init__(self, least_s: float) -> None:
        super().__init__(daemon=True)
        self.holds: list[tuple[float, float, str]] = []
        self._least_s = least_s
        self._watched = threading.get_ident()
        self._stopped = False

    def run(self) -> None:
        last = time.process_time()
        while not self._stopped:
            time.sleep(0.001)
            now = time.process_time()
            if now - last >= self._least_s:
                self.holds.append((last, now, self._where()))
                now = time.process_time()
            last = now

    def _where(self) -> str:
        frame, found = sys._current_frames().get(self._watched), []
        while frame is not None and len(found) < 3:
            found.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            frame = frame.f_back
        return " < ".join(found)

    def stop(self) -> None:
        self._stopped = True
        self.join()


def part_of(hold: tuple[float, float, str], switches: list[tuple[float, str | None]]) -> tuple[str, float]:
    """Return the part of the save that was on for most of a hold, and for how long of it."""
    start, end, _ = hold
    seconds: dict[str, float] = {}
    for (since, part), (until, _next) in zip(switches, [*switches[1:], (end, None)], strict=True):
        overlap = min(end, until) - max(start, since)
        if part is not None and overlap > 0:
            seconds[part] = seconds.get(part, 0.0) + overlap
    part = max(seconds, key=seconds.__getitem__, default="coordination")
    return part, seconds.get(part, 0.0)


def measure_side(side: str, world: World, sent: Sent, least_s: float) -> dict[str, Any]:
    gc.collect()  # as in a process that has run for a while, a full collection is not due
    with fake_world(len(sent.plans)):
        ticker = Ticker(least_s)
        ticker.start()
        saved = next(save_as(side, 0, world, sent, Replies()))
        ticker.stop()
    longest = dict.fromkeys(_PARTS, 0.0)
    where: list[tuple[float, str, str]] = []
    for hold in ticker.holds:
        part, seconds = part_of(hold, saved.switches)
        if part not in longest:  # what only the simulation does
            continue
        longest[part] = max(longest[part], seconds)
        where.append((seconds, part, hold[2]))
    return {"longest": longest, "where": sorted(where, reverse=True)[:12]}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--world", choices=list(WORLDS), default="moe-optimizer")
    parser.add_argument("--no-stock", action="store_true", help="measure ours alone")
    parser.add_argument("--where", action="store_true", help="say where ours was after its longest holds")


def main() -> None:
    options = options_of(__doc__, add_options)
    torch.set_num_threads(1)
    name, world_size = (
        ("moe-model", 32) if options.short and not options.no_stock else (options.world, options.ranks)
    )
    with fake_world(world_size):
        world = WORLDS[name]()
        sent = prepare(world, world_size, with_stock=not options.no_stock)

    def side(which: str):
        return in_child(lambda: measure_side(which, world, sent, least_s=0.004))

    repeats = options.repeats or 1
    if options.no_stock:
        stock, ours = [], [side(OURS) for _ in range(repeats)]
    else:
        stock, ours = in_turn(repeats, lambda: side(STOCK), lambda: side(OURS))
    facts = {"world": name, "world_size": world_size, "where": ours[-1]["where"]}
    labels = {
        "coordination": "longest hold in coordination",
        "local": "in making the local plan",
        "finish": "in the writer's finish",
    }
    rows = [
        Row(
            f"{name}, {world_size} ranks",
            label,
            "ms",
            [found["longest"][part] * 1e3 for found in stock],
            [found["longest"][part] * 1e3 for found in ours],
            facts,
        )
        for part, label in labels.items()
    ]
    report("gil", options, rows)
    if options.where:
        for seconds, part, place in ours[-1]["where"]:
            print(f"{seconds * 1e3:8.1f} ms {part:14} {place}")


if __name__ == "__main__":
    main()
