"""What one rank sends and receives in a save, by kind of message: stock DCP's pickles against ours.

All ranks but one are simulated (see ``simulated.py``); the rank's own bytes are those of its ``dcp.save``.

    python benchmarks/wire.py [--ranks 64] [--world moe-optimizer] [--no-stock]
"""

from __future__ import annotations

import argparse

import torch
from bench import OURS, STOCK, Row, options_of, report
from simulated import Replies, Saved, Sent, prepare, save_as
from worlds import WORLDS, World, fake_world

LABELS = {
    "plan_body": "sent: local plan",
    "plan_schema": "sent: its schema, by one rank for all like it",
    "write_results": "sent: write results",
    "final_plan": "received: final plan",
    "metadata_state": "received: metadata, of plans",
    "metadata_storage": "received: metadata, of storage",
    "metadata": "received: metadata, all else",
    "envelope": "put into the store: envelopes",
    "verdict": "read from the store: verdicts",
}


def kinds_of(side: str, world: World, sent: Sent, num_saves: int) -> list[Saved]:
    replies = Replies()
    for rank in (0, 1):
        with fake_world(len(sent.plans), rank):
            saves = save_as(side, rank, world, sent, replies)
            found = [next(saves) for _ in range(num_saves)]
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--world", choices=list(WORLDS), default="moe-optimizer")
    parser.add_argument("--no-stock", action="store_true", help="measure ours alone")


def main() -> None:
    options = options_of(__doc__, add_options)
    torch.set_num_threads(1)
    name, ranks = ("moe-model", 16) if options.short else (options.world, options.ranks)
    with fake_world(ranks):
        world = WORLDS[name]()
        sent = prepare(world, ranks, with_stock=not options.no_stock)
    stock = {} if options.no_stock else kinds_of(STOCK, world, sent, 1)[0].nbytes_by_kind
    rows = []
    for number, saved in enumerate(kinds_of(OURS, world, sent, 2)):
        ours = saved.nbytes_by_kind
        label = ("first save", "unchanged save")[number]
        for kind, what in LABELS.items():
            if kind in stock or kind in ours:
                stock_samples = [float(stock[kind])] if kind in stock else []
                row = Row(
                    f"{name}, {ranks} ranks, {label}", what, "bytes", stock_samples, [ours.get(kind, 0)]
                )
                rows.append(row)
    report("wire", options, rows)


if __name__ == "__main__":
    main()
