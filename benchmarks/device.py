"""What a save takes of the accelerator for coordination: stock DCP's on the default group against ours.

Each rank has small tensors on the CPU, so that whatever reaches the device is coordination. The default
group is the device's own (NCCL on CUDA, HCCL on Ascend), once of one rank and once of several. Without an
accelerator, or where its library refuses several ranks on one device, the default group is gloo, and only
collectives are counted.

    python benchmarks/device.py [--ranks 4] [--entries 2812] [--json FILE]
"""

import json
import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from bench import OURS, STOCK, Row, options_of, report
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from planner import GlooCoordinatedPlanner

FIGURES = {
    "collectives": ("collectives on the default group", "calls"),
    "tensors_nbytes": ("device bytes in tensors, peak", "bytes"),
    "reserved_nbytes": ("device bytes kept by torch after it", "bytes"),
    "used_nbytes": ("device bytes used on the whole device after it", "bytes"),
    "seconds": ("wall time", "s"),
}


def find_device():
    """Return the accelerator there is, or None; the same code for CUDA, Ascend and others."""
    return torch.accelerator.current_accelerator(check_available=True)


def make_state(entries):
    """Return a state dict in which every rank has a part of every tensor."""
    ranks = torch.arange(dist.get_world_size())
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=dist.get_rank())
    local = torch.zeros(1, 4)
    return {
        f"model.layers.{number // 17}.mlp.experts.{number % 17}.down_proj.weight": DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False
        )
        for number in range(entries)
    }


def device_memory(device):
    if device is None:
        return None
    module = torch.get_device_module(device)
    module.synchronize()
    free, total = module.mem_get_info()
    return {
        "tensors_nbytes": module.max_memory_allocated(),
        "reserved_nbytes": module.memory_reserved(),
        "used_nbytes": total - free,
    }


def measure(device, folder, state, planner):
    if device is not None:
        torch.get_device_module(device).empty_cache()
        torch.get_device_module(device).reset_peak_memory_stats()
    before = device_memory(device)
    count = dist.group.WORLD._get_sequence_number_for_group()
    start = time.perf_counter()
    # With copies ahead the writer waits for the device by itself, see the README on Ascend.
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    dcp.save(state, storage_writer=writer, planner=planner)
    seconds = time.perf_counter() - start
    after = device_memory(device)
    memory = dict.fromkeys(FIGURES) if device is None else {n: after[n] - before[n] for n in after}
    return {
        **memory,
        "collectives": dist.group.WORLD._get_sequence_number_for_group() - count,
        "seconds": seconds,
    }


def run_rank(rank, job):
    ranks, port, backend, entries, folder = job
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_CPP_LOG_LEVEL="ERROR")
    device = None if backend == "gloo" else find_device()
    if device is not None:
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
        torch.zeros(1, device=device)  # the device's own start is not coordination
    dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    state = make_state(entries)
    results = {
        OURS: measure(device, f"{folder}/ours", state, GlooCoordinatedPlanner()),
        STOCK: measure(device, f"{folder}/stock", state, None),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def launch(ranks, backend, entries):
    """Return the results of all ranks."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(run_rank, ((ranks, port, backend, entries, folder),), nprocs=ranks)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def rows_of(case, results, facts):
    """Return the figures, of all ranks the most."""
    rows = []
    for name, (what, unit) in FIGURES.items():
        found = {side: [result[side][name] for result in results] for side in (STOCK, OURS)}
        if None not in found[STOCK]:
            samples = {side: [float(max(values))] for side, values in found.items()}
            rows.append(Row(case, what, unit, samples[STOCK], samples[OURS], facts))
    return rows


def add_options(parser):
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--entries", type=int, default=2812)


def main():
    options = options_of(__doc__, add_options)
    ranks, entries = (2, 300) if options.short else (options.ranks, options.entries)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = find_device()
    runs = [(ranks, "gloo")]
    if device is not None:
        backend = dist.get_default_backend_for_device(device.type)
        runs = [(1, backend), (ranks, backend)]
    accelerator = "none" if device is None else f"{device} x {torch.accelerator.device_count()}"
    rows = []
    while runs:
        count, backend = runs.pop(0)
        try:
            results = launch(count, backend, entries)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            if backend == "gloo":
                raise
            print(f"{count} ranks on {backend}: refused, {str(error).strip().splitlines()[-1]}")
            runs.append((count, "gloo"))
            continue
        case = f"{count} ranks, {entries} entries, {backend}, accelerator: {accelerator}"
        rows += rows_of(case, results, {"ranks": count, "entries": entries, "accelerator": accelerator})
    report("device", options, rows)


if __name__ == "__main__":
    main()
