"""Where the time goes when a rank reads a large ``.metadata``: the file, the objects, or the collector.

python benchmarks/read_metadata.py [--ranks 128] [--entries 2812]
"""

import argparse
import gc
import pickle
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from planner.wire.gc_pause import paused_gc


def make_metadata(ranks: int, entries: int) -> Metadata:
    state, storage = {}, {}
    for number in range(entries):
        fqn = f"model.layers.{number // 17}.mlp.experts.{number % 17}.down_proj.weight"
        offsets = [torch.Size((rank * 8, 0)) for rank in range(ranks)]
        chunks = [ChunkStorageMetadata(offset, torch.Size((8, 4096))) for offset in offsets]
        size = torch.Size((ranks * 8, 4096))
        state[fqn] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), size, chunks)
        for rank, offset in enumerate(offsets):
            storage[MetadataIndex(fqn, offset, rank)] = _StorageInfo(
                f"__{rank}_0.distcp", number * 65536, 65536
            )
    return Metadata(state, storage_data=storage)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--entries", type=int, default=2812)
    parser.add_argument("--short", action="store_true", help="16 ranks")
    options = parser.parse_args()
    ranks = 16 if options.short else options.ranks
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, ".metadata")
        with paused_gc():
            path.write_bytes(pickle.dumps(make_metadata(ranks, options.entries)))
        gc.collect()
        start = time.process_time()
        data = path.read_bytes()
        read_s = time.process_time() - start
        start = time.process_time()
        kept = pickle.loads(data)
        plain_s = time.process_time() - start
        del kept
        gc.collect()
        with paused_gc():
            start = time.process_time()
            kept = pickle.loads(data)
            paused_s = time.process_time() - start
        del kept
        print(
            f"{ranks} ranks x {options.entries} entries: .metadata of {len(data):,} bytes, CPU seconds a rank"
        )
        print(f"  reading the file from the page cache  {read_s:8.3f}")
        print(f"  making the objects                    {plain_s:8.3f}")
        print(f"  the same, garbage collector paused    {paused_s:8.3f}   {paused_s / plain_s:.2f} of it")


if __name__ == "__main__":
    main()
