"""Coordination of a load, stock DCP against ours: bytes, and CPU seconds of the coordinator and of a rank.

One process plays all of it on plans of the real planner's shape: each rank reads one shard of every
entry, and the global step is DCP's own, the identity. What ours exchanges then is envelopes and verdicts.

    python benchmarks/load.py [--ranks 512] [--entries 2812] [--json FILE]
"""

import argparse
import io
import json
import pickle
import platform
import time
from pathlib import Path

import torch
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--entries", type=int, default=2812)
    parser.add_argument("--short", action="store_true", help="64 ranks")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks = 64 if options.short else options.ranks
    stock, ours = measure_stock(ranks, options.entries), measure_ours(ranks)
    print(f"load, {ranks} ranks x {options.entries} entries, torch {torch.__version__}, {platform.machine()}")
    print(f"{'':28}{'stock':>16}{'ours':>16}{'ours / stock':>16}")
    for name, value in stock.items():
        digits = "{:>16,.0f}" if name.endswith("nbytes") else "{:>16.6f}"
        ratio = ours[name] / max(value, 1e-9)
        print(f"{name:28}{digits.format(value)}{digits.format(ours[name])}{ratio:>16.6f}")
    if options.json:
        options.json.write_text(json.dumps({"ranks": ranks, "stock": stock, "ours": ours}, indent=2))


if __name__ == "__main__":
    main()
