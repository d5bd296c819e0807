"""Coordination of a load, stock DCP against ours: bytes, and CPU seconds of the coordinator and of a rank.

One process plays all of it on plans of the real planner's shape: each rank reads one shard of every
entry, and the global step is DCP's own, the identity. What ours exchanges then is envelopes and verdicts.

    python benchmarks/load.py [--ranks 512] [--entries 2812] [--json FILE]
"""

import argparse
import io
import pickle
import time

import torch
from bench import Row, in_turn, options_of, report
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from planner.wire.envelope import Done, Envelope, Identity, decode_verdict, encode_verdict

NUM_EXCHANGES = 2


def make_plan(rank: int, entries: int) -> LoadPlan:
    items = []
    for number in range(entries):
        fqn = f"model.layers.{number // 17}.mlp.experts.{number % 17}.down_proj.weight"
        offset = torch.Size((rank * 8, 0))
        items.append(
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(fqn, offset),
                dest_offsets=torch.Size((0, 0)),
                storage_index=MetadataIndex(fqn, offset, rank),
                storage_offsets=torch.Size((0, 0)),
                lengths=torch.Size((8, 4096)),
            )
        )
    return LoadPlan(items)


class Cpu:
    def __enter__(self):
        self.start = time.process_time()
        return self

    def __exit__(self, *error):
        self.seconds = time.process_time() - self.start


def measure_stock(ranks: int, entries: int) -> dict:
    with Cpu() as rank_part:
        own = pickle.dumps(make_plan(1, entries))
    with Cpu() as make_only:
        make_plan(1, entries)
    sent = [own, *(pickle.dumps(make_plan(rank, entries)) for rank in range(1, ranks))]
    with Cpu() as coordinator:
        plans = [pickle.Unpickler(io.BytesIO(data)).load() for data in sent]
        replies = [pickle.dumps(plan) for plan in plans]
        outcomes = pickle.dumps(None)
        for _ in range(ranks):
            pickle.loads(outcomes)
    with Cpu() as rank_end:
        pickle.loads(replies[1])
        for _ in range(ranks):
            pickle.loads(outcomes)
    return {
        "sent_by_rank_nbytes": len(own) + len(outcomes),
        "received_by_rank_nbytes": len(replies[1]) + ranks * len(outcomes),
        "coordinator_cpu_s": coordinator.seconds,
        "rank_cpu_s": rank_part.seconds - make_only.seconds + rank_end.seconds,
    }


def measure_ours(ranks: int) -> dict:
    identities = [
        Identity("load", "/checkpoints/step-1000", phase, "from global metadata")
        for phase in ("plan", "read")
    ]
    with Cpu() as rank_part:
        envelopes = [Envelope(identity, has_later=True).encode() for identity in identities]
    with Cpu() as coordinator:
        for identity, envelope in zip(identities, envelopes, strict=True):
            for _ in range(ranks - 1):
                assert Envelope.decode(envelope).identity == identity
        verdict = encode_verdict(Done())
    with Cpu() as rank_end:
        for _ in range(NUM_EXCHANGES):
            decode_verdict(verdict)
    return {
        "sent_by_rank_nbytes": sum(map(len, envelopes)),
        "received_by_rank_nbytes": NUM_EXCHANGES * len(verdict),
        "coordinator_cpu_s": coordinator.seconds,
        "rank_cpu_s": rank_part.seconds + rank_end.seconds,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--entries", type=int, default=2812)


def main() -> None:
    options = options_of(__doc__, add_options)
    ranks = 16 if options.short else options.ranks
    stock, ours = in_turn(
        options.repeats or (1 if options.short else 3),
        lambda: measure_stock(ranks, options.entries),
        lambda: measure_ours(ranks),
    )
    rows = [
        Row(
            f"load, {ranks} ranks x {options.entries:,}",
            what,
            unit,
            [found[name] for found in stock],
            [found[name] for found in ours],
        )
        for name, what, unit in (
            ("sent_by_rank_nbytes", "sent by a rank", "bytes"),
            ("received_by_rank_nbytes", "received by a rank", "bytes"),
            ("coordinator_cpu_s", "CPU of the coordinator", "s"),
            ("rank_cpu_s", "CPU of another rank", "s"),
        )
    ]
    report("load", options, rows)


if __name__ == "__main__":
    main()
