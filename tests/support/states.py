"""State dicts for tests, made on the rank that saves them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from planner.wire.state import StateObjects

DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)


def mesh_of(shape):
    """Return a mesh over all ranks that makes no process group and runs no collective."""
    return DeviceMesh(
        "cpu", torch.arange(dist.get_world_size()).reshape(shape), _init_backend=False, _rank=dist.get_rank()
    )


def sharded(full, mesh, placements):
    """Return ``full`` as a DTensor, each rank's part cut out locally."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    local = full
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        local = local.narrow(dim, min(start, full.shape[dim]), length)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def nested(rank):
    return {
        "model": {"layers": [torch.arange(4.0), {"bias": torch.ones(3, dtype=torch.float64)}], "name": "net"},
        "step": 17,
        "odd key/with.dots": torch.zeros(2, 2),
        "tuple": (1, torch.tensor([5])),
        "": b"empty key",
    }


def int_keys(rank):
    return {
        "optim": {
            "state": {0: {"exp_avg": torch.ones(3)}, 1: {"exp_avg": torch.zeros(3)}},
            "param_groups": [{"lr": 0.1}],
        }
    }


def mesh_1d_uneven(rank):
    mesh = mesh_of((dist.get_world_size(),))
    full = torch.arange(5 * 3, dtype=torch.float32).reshape(5, 3)  # uneven, and empty shards beyond 5 ranks
    return {
        "uneven": sharded(full, mesh, [Shard(0)]),
        "columns": sharded(full, mesh, [Shard(1)]),
        "tiny": sharded(torch.ones(1, 2), mesh, [Shard(0)]),
        "replicated": sharded(full, mesh, [Replicate()]),
        "plain": torch.ones(2),
    }


def mesh_2d(rank):
    world = dist.get_world_size()
    mesh = mesh_of((2, world // 2)) if world % 2 == 0 else mesh_of((1, world))
    full = torch.arange(8 * 6, dtype=torch.bfloat16).reshape(8, 6)
    return {
        "both": sharded(full, mesh, [Shard(0), Shard(1)]),
        "hsdp": sharded(full, mesh, [Replicate(), Shard(0)]),
        "twice": sharded(full, mesh, [Shard(0), Shard(0)]),
        "scalar": sharded(torch.tensor(3.0), mesh, [Replicate(), Replicate()]),
    }


def every_dtype(rank):
    values = {}
    for dtype in DTYPES:
        try:
            value = torch.tensor([0, 1] * 8, dtype=torch.uint8).view(dtype)
            torch.zeros_like(value).copy_(value)  # what a load has to be able to do
            torch._utils._element_size(dtype)  # what planning asks, and what the bits types do not have
        except (RuntimeError, TypeError, NotImplementedError, ValueError):
            continue  # placeholders such as int3 and the quantized types hold no plain tensor
        values[str(dtype)] = value
    return values


def different_keys(rank):
    return {
        "shared": torch.ones(2),
        f"only on {rank}": torch.full((rank + 1,), float(rank)),
        f"object {rank}": {"rank": rank},
    }


def nothing_on_some(rank):
    return {} if rank % 2 else {"weight": torch.arange(3), "note": "text"}


def nothing_at_all(rank):
    return {}


def scalars_and_bytes(rank):
    return {
        "zero_d": torch.tensor(7),
        "bytes": b"\x00\xff",
        "none": None,
        "empty": torch.empty(0, 3),
        "list": [1, "two", None],
    }


def other_key_order(rank):
    keys = ["a", "b", "c", "d"]
    keys = keys[rank % 4 :] + keys[: rank % 4]
    return {key: torch.full((3,), float(ord(key))) for key in keys}


ALL = {
    function.__name__: function
    for function in (
        nested, int_keys, mesh_1d_uneven, mesh_2d, every_dtype, different_keys, nothing_on_some,
        nothing_at_all, scalars_and_bytes, other_key_order,
    )
}  # fmt: skip


def build_metadata(outcome):
    """Return new metadata of a ``GlobalPlan``."""
    return Metadata(StateObjects(outcome.state).build(), planner_data=outcome.planner_data())
