"""The coordinator's part of a save's planning, stock DCP against this library.

One process plays the coordinator for W ranks: it has what W ranks sent, makes the global plan, and ends
with what it would send back to each, and with metadata. Each side runs in a forked child of its own, so
that its peak memory is its own; the bytes that came in are there before the clock starts.

    python benchmarks/coordinator.py                    64, 256 and 512 ranks, 2,812 entries each
    python benchmarks/coordinator.py --short            64 ranks, 1,000 entries each
    python benchmarks/coordinator.py --worlds moe       see WORLDS
    python benchmarks/coordinator.py --json             the same figures as JSON
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pickle
import platform
import sys
import time
import traceback
from collections import ChainMap
from collections.abc import Callable

import torch
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from planner.global_plan import plan_globally
from planner.wire.plans import decode_plan_columns, decode_schema, encode_plan

NUM_ENTRIES, NUM_SHORT_ENTRIES = 2812, 1000
WORLD_SIZES = (64, 256, 512)
WIDTH = 4096
_PARAMETERS = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate.weight",
    "mlp.experts.gate_proj.weight",
    "mlp.experts.up_proj.weight",
    "mlp.experts.down_proj.weight",
    "mlp.shared_experts.up_proj.weight",
    "mlp.shared_experts.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
_STATES = ("model", "optim.state.exp_avg", "optim.state.exp_avg_sq", "optim.state.step")


# -- worlds ----------------------------------------------------------------------------------------------


def entry_names(num_entries: int) -> list[str]:
    names = (
        f"{state}.layers.{layer}.{parameter}"
        for layer in range(num_entries)
        for parameter in _PARAMETERS
        for state in _STATES
    )
    return [name for name, _ in zip(names, range(num_entries), strict=False)]


def shard_item(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], total: tuple[int, ...]):
    offset = torch.Size(offsets)
    tensor_data = TensorWriteData(
        chunk=ChunkStorageMetadata(offset, torch.Size(sizes)),
        properties=TensorProperties(dtype=torch.bfloat16),
        size=torch.Size(total),
    )
    return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=tensor_data)


def plan_of(names: list[str], make_item: Callable[[str], WriteItem]) -> SavePlan:
    return SavePlan([make_item(name) for name in names], planner_data={name: (name,) for name in names})


def sharded(rank: int, world_size: int, names: list[str]) -> SavePlan:
    return plan_of(names, lambda name: shard_item(name, (rank * 8, 0), (8, WIDTH), (world_size * 8, WIDTH)))


def moe(rank: int, world_size: int, names: list[str]) -> SavePlan:
    num_shards = world_size // 2
    shard = rank % num_shards

    def make_item(name: str) -> WriteItem:
        if ".step." in name:  # a scalar that every rank has
            return shard_item(name, (), (), ())
        if "experts" in name:  # stacked, cut along the short dimension of experts
            return shard_item(name, (rank, 0, 0), (1, WIDTH, 64), (world_size, WIDTH, 64))
        return shard_item(name, (shard * 8, 0), (8, WIDTH), (num_shards * 8, WIDTH))

    return plan_of(names, make_item)


def unalike(rank: int, world_size: int, names: list[str]) -> SavePlan:
    turn = rank * 7 % len(names)
    return sharded(rank, world_size, names[turn:] + names[:turn])


WORLDS = {
    "sharded": (sharded, "every entry cut into rows over all ranks"),
    "moe": (moe, "every rank holds scalars, two hold each row shard, experts cut along a short dimension"),
    "unalike": (unalike, "as sharded, with another key order on each rank: no schema is shared"),
}


# -- measuring -------------------------------------------------------------------------------------------


def status_nbytes(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123 - a proc file
        line = next(line for line in status if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


class Steps:
    """Times steps in CPU seconds, and knows how far memory grew."""

    def __init__(self) -> None:
        self.cpu_seconds: dict[str, float] = {}
        self._rss_nbytes = status_nbytes("VmRSS")

    def run(self, name: str, step: Callable):
        start = time.process_time()
        result = step()
        self.cpu_seconds[name] = time.process_time() - start
        return result

    def peak_growth_nbytes(self) -> int:
        return status_nbytes("VmHWM") - self._rss_nbytes


def in_child(work: Callable[[], dict]) -> dict:
    """Run ``work`` in a forked child and return what it returns."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read_end)
            with os.fdopen(write_end, "w") as pipe:
                json.dump(work(), pipe)
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not return into the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit("a side of the benchmark failed, see above")
    return json.loads(text)


def fingerprint(final_plans, metadata) -> str:
    """Tell two outcomes apart: kept items and hints of each rank, entries and chunks in their order."""
    state = hashlib.blake2b(digest_size=16)
    for items in final_plans:
        state.update(repr(items).encode())
    for name, entry in metadata.state_dict_metadata.items():
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        state.update(repr((name, tuple(entry.size), chunks)).encode())
    state.update(repr(list(metadata.planner_data.items())).encode())
    return state.hexdigest()


def stock_side(pickled_plans: list[bytes]) -> dict:
    steps = Steps()
    plans = steps.run("read plans", lambda: [pickle.loads(data) for data in pickled_plans])

    def merge(metadata, final_plans):
        merged = dict(ChainMap(*[plan.planner_data for plan in final_plans]))
        return dataclasses.replace(metadata, planner_data=merged)

    deduped = steps.run("dedup", lambda: dedup_save_plans(plans))
    final_plans, metadata = steps.run("global plan", lambda: create_default_global_save_plan(deduped))
    metadata = steps.run("merge mappings", lambda: merge(metadata, final_plans))
    errors = steps.run("validate", lambda: _validate_global_plan(final_plans, metadata))
    assert errors in ([], True)
    final_plans = [
        dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))
        for rank, plan in enumerate(final_plans)
    ]
    replies = steps.run("write final plans", lambda: [pickle.dumps(plan) for plan in final_plans])
    peak_nbytes = steps.peak_growth_nbytes()
    kept = ([(item.index.fqn, item.index.index) for item in plan.items] for plan in final_plans)
    return {
        "cpu_seconds": steps.cpu_seconds,
        "received_nbytes": sum(map(len, pickled_plans)),
        "sent_nbytes": sum(map(len, replies)),
        # scatter_object_list pads each rank's plan to the largest.
        "sent_padded_nbytes": max(map(len, replies)) * len(replies),
        "peak_growth_nbytes": peak_nbytes,
        "fingerprint": fingerprint(kept, metadata),
    }


def our_side(frames: list[tuple[bytes, bytes]]) -> dict:
    steps = Steps()

    def read():
        schemas = {}
        plans = []
        for schema, body in frames:
            if schema not in schemas:
                schemas[schema] = decode_schema(schema)
            plans.append((schemas[schema], decode_plan_columns(schemas[schema], body)))
        return plans

    plans = steps.run("read plans", read)
    outcome = steps.run(
        "global plan", lambda: plan_globally(plans, to_lowest_rank=False, merges_mappings=True)
    )
    assert outcome is not None
    replies = steps.run(
        "write final plans",
        lambda: [
            outcome.encode_final_plan(rank, storage_data=_StoragePrefix(f"__{rank}_"), strict=True)
            for rank in range(len(outcome))
        ],
    )
    metadata = steps.run("build metadata", outcome.build_metadata)
    peak_nbytes = steps.peak_growth_nbytes()
    kept = (
        [
            (name, hint)
            for name, hint, is_kept in zip(
                plans[rank][0].fqns, outcome.hints(rank).tolist(), outcome.kept(rank).tolist(), strict=True
            )
            if is_kept
        ]
        for rank in range(len(outcome))
    )
    sent_nbytes = sum(map(len, replies))
    return {
        "cpu_seconds": steps.cpu_seconds,
        "received_nbytes": sum(len(body) for _, body in frames) + sum(map(len, {s for s, _ in frames})),
        "sent_nbytes": sent_nbytes,
        "sent_padded_nbytes": sent_nbytes,
        "peak_growth_nbytes": peak_nbytes,
        "fingerprint": fingerprint(kept, metadata),
    }


def measure(world: str, world_size: int, num_entries: int) -> dict:
    make_plan, _ = WORLDS[world]
    names = entry_names(num_entries)
    pickled_plans, frames = [], []
    for rank in range(world_size):
        plan = make_plan(rank, world_size, names)
        pickled_plans.append(pickle.dumps(plan))
        frames.append(encode_plan(plan, strict=True))
    del plan
    stock = in_child(lambda: stock_side(pickled_plans))
    ours = in_child(lambda: our_side(frames))
    if stock.pop("fingerprint") != ours.pop("fingerprint"):
        sys.exit(f"{world}, {world_size} ranks: the two sides planned differently")
    return {
        "world": world,
        "world_size": world_size,
        "num_entries": num_entries,
        "stock": stock,
        "ours": ours,
    }


# -- reporting -------------------------------------------------------------------------------------------


def rows_of(result: dict) -> list[tuple[str, str, str, str]]:
    stock, ours = result["stock"], result["ours"]
    rows = []

    def add(label, stock_value, our_value, unit):
        ratio = f"1/{stock_value / our_value:,.0f}" if stock_value and our_value else ""
        if ratio and stock_value < 10 * our_value:
            ratio = f"1/{stock_value / our_value:.1f}"
        rows.append(
            (label, *(f"{value:,.2f} {unit}" if value else "-" for value in (stock_value, our_value)), ratio)
        )

    labels = dict.fromkeys([*stock["cpu_seconds"], *ours["cpu_seconds"]])
    for label in labels:
        add(label, stock["cpu_seconds"].get(label, 0), ours["cpu_seconds"].get(label, 0), "s")
    add("all CPU", sum(stock["cpu_seconds"].values()), sum(ours["cpu_seconds"].values()), "s")
    for label in ("received", "sent", "sent_padded", "peak_growth"):
        add(
            label.replace("_", " "),
            stock[f"{label}_nbytes"] / 1e6,
            ours[f"{label}_nbytes"] / 1e6,
            "MB",
        )
    return rows


def print_table(result: dict) -> None:
    world, world_size = result["world"], result["world_size"]
    print(f"{world}: {WORLDS[world][1]}; {world_size} ranks x {result['num_entries']:,} entries")
    print(f"  {'':20}{'stock':>16}{'ours':>16}{'ours/stock':>14}")
    for label, stock, ours, ratio in rows_of(result):
        print(f"  {label:20}{stock:>16}{ours:>16}{ratio:>14}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help="64 ranks x 1,000 entries, in under half a minute"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.add_argument("--world-sizes", type=int, nargs="+", help=f"default: {WORLD_SIZES}")
    parser.add_argument("--entries", type=int, help=f"entries of each rank; default: {NUM_ENTRIES:,}")
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=["sharded"])
    arguments = parser.parse_args()
    world_sizes = arguments.world_sizes or (WORLD_SIZES[:1] if arguments.short else WORLD_SIZES)
    num_entries = arguments.entries or (NUM_SHORT_ENTRIES if arguments.short else NUM_ENTRIES)
    results = []
    for world in arguments.worlds:
        for world_size in world_sizes:
            results.append(measure(world, world_size, num_entries))
            if not arguments.json:
                print_table(results[-1])
    if arguments.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        print(json.dumps({"benchmark": "coordinator", "versions": versions, "results": results}, indent=2))


if __name__ == "__main__":
    main()
