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
from bench import Row, options_of, report
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


def measure(ranks: int, entries: int) -> tuple[float, float, float]:
    """Return CPU seconds of reading the file, of making the objects, and of that without the collector."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, ".metadata")
        path.write_bytes(pickle.dumps(make_metadata(ranks, entries)))
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
    return read_s, plain_s, paused_s


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--entries", type=int, default=2812)


def main() -> None:
    options = options_of(__doc__, add_options)
    ranks = 16 if options.short else options.ranks
    found = [measure(ranks, options.entries) for _ in range(options.repeats or (1 if options.short else 3))]
    case = f".metadata of {ranks} ranks x {options.entries:,}"
    reading = [read_s for read_s, _, _ in found]
    rows = [
        Row(case, "reading the file from the page cache", "s", reading, reading),
        Row(
            case,
            "making the objects; ours: collector paused",
            "s",
            [plain_s for _, plain_s, _ in found],
            [paused_s for _, _, paused_s in found],
        ),
    ]
    report("read_metadata", options, rows)


if __name__ == "__main__":
    main()
