"""A default group that stands in for wedged device collectives: it records every call, then blocks."""

from __future__ import annotations

import threading

import torch.distributed as dist

CALLS: list[str] = []

_NAMES = (
    "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "allgather_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "reduce",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter", "send", "recv",
    "recv_anysource", "monitored_barrier", "new_group", "split_group",
)  # fmt: skip


class Recording(dist.ProcessGroup):
    """Every collective is recorded and then never returns, as on HCCL in the field report."""

    def getBackendName(self):  # noqa: N802 - the name in ProcessGroup
        return "recording"

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name


def _wedged(name):
    def call(self, *args, **kwargs):
        CALLS.append(name)
        threading.Event().wait()

    return call


for _name in _NAMES:
    setattr(Recording, _name, _wedged(_name))

dist.Backend.register_backend(
    "recording", lambda store, rank, size, timeout: Recording(rank, size), devices=["cpu"]
)
