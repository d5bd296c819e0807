"""What one rank sends and receives in a save, by kind of message: stock DCP's pickles against ours.

python benchmarks/wire.py [--ranks 512] [--entries 2812]
"""

import argparse
import pickle
import time
from dataclasses import replace

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from planner.global_plan import plan_globally
from planner.wire.gc_pause import paused_gc
from planner.wire.metadata import decode_metadata, encode_metadata
from planner.wire.plans import decode_plan_columns, decode_schema, encode_final_plan, encode_plan
from planner.wire.results import decode_results, encode_results


def make_plan(rank: int, ranks: int, entries: int) -> SavePlan:
    items, mapping = [], {}
    for number in range(entries):
        fqn = f"model.layers.{number // 17}.mlp.experts.{number % 17}.down_proj.weight"
        offset, size = torch.Size((rank * 8, 0)), torch.Size((8, 4096))
        data = TensorWriteData(
            ChunkStorageMetadata(offset, size),
            TensorProperties(torch.bfloat16),
            torch.Size((ranks * 8, 4096)),
        )
        items.append(WriteItem(MetadataIndex(fqn, offset), WriteItemType.SHARD, tensor_data=data))
        mapping[fqn] = tuple(fqn.split("."))
    return SavePlan(items, planner_data=mapping)


def make_results(plan: SavePlan, rank: int) -> list[WriteResult]:
    return [
        WriteResult(item.index, 65536, _StorageInfo(f"__{rank}_0.distcp", number * 65536, 65536))
        for number, item in enumerate(plan.items)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--entries", type=int, default=2812)
    parser.add_argument("--short", action="store_true", help="32 ranks")
    options = parser.parse_args()
    ranks, entries = 32 if options.short else options.ranks, options.entries
    with paused_gc():
        columns, schemas, sent = [], {}, {}
        for rank in range(ranks):
            frames = encode_plan(make_plan(rank, ranks, entries), strict=True)
            schema = schemas.setdefault(frames[0], None) or decode_schema(frames[0])
            schemas[frames[0]] = schema
            columns.append((schema, decode_plan_columns(schema, frames[1])))
            sent[rank] = frames
        outcome = plan_globally(columns, to_lowest_rank=False, merges_mappings=True)
        local = make_plan(1, ranks, entries)
        final = replace(outcome.build_plan(1), storage_data=_StoragePrefix("__1_"))
        results = make_results(final, 1)
        metadata = outcome.build_metadata()
        metadata.storage_data = {}
        for rank in range(ranks):
            for result in make_results(outcome.build_plan(rank), rank):
                metadata.storage_data[result.index] = result.storage_data
        seconds = {}
        start = time.process_time()
        frame = encode_metadata(metadata, strict=True)
        seconds["encode metadata"] = time.process_time() - start
        start = time.process_time()
        decode_metadata(frame)
        seconds["decode metadata, if looked at"] = time.process_time() - start
        result_frame = encode_results(results, final, strict=True)
        start = time.process_time()
        decode_results(result_frame, final)
        seconds["decode one rank's results"] = time.process_time() - start
        rows = [
            ("local plan, schema (sent once)", None, len(sent[1][0])),
            ("local plan, sent", len(pickle.dumps(local)), len(sent[1][1])),
            (
                "final plan, received",
                len(pickle.dumps(final)),
                len(encode_final_plan(final, local, strict=True)),
            ),
            ("write results, sent", len(pickle.dumps(results)), len(result_frame)),
            ("metadata, received", len(pickle.dumps(metadata)), sum(map(len, frame))),
        ]
    print(f"bytes of one rank, {ranks} ranks x {entries} entries, torch {torch.__version__}")
    print(f"{'':34}{'stock':>16}{'ours':>12}{'ours / stock':>16}")
    for name, stock, ours in rows:
        print(f"{name:34}{'' if stock is None else f'{stock:,}':>16}{ours:>12,}", end="")
        print("" if stock is None else f"{ours / stock:>16.6f}")
    print("CPU seconds: " + ", ".join(f"{name} {value:.3f}" for name, value in seconds.items()))


if __name__ == "__main__":
    main()
