"""Count the collectives of a process: every call on any group of torch.distributed, and who made it.

Two counts that must agree. Each method of ``ProcessGroup`` notes its caller; and each group's backend
numbers its collectives in C++, which a call that takes another way than these methods cannot escape.
"""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass

import torch.distributed as dist

_METHODS = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier",
    "recv", "recv_anysource", "reduce", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip

# Between an engine's call and the group: torch's functions, and the decorators around them.
_BETWEEN = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")


@dataclass(frozen=True)
class Call:
    """One call on a process group."""

    group: str
    method: str
    function: str  # of torch.distributed, as its caller knows it: gather_object, barrier, ...
    caller: str  # the module that called that


_calls: list[Call] = []
_lock = threading.Lock()


def _note(group: dist.ProcessGroup, method: str) -> None:
    frame, function = sys._getframe(2), method
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        if frame.f_globals["__name__"] == _BETWEEN[0]:
            function = frame.f_code.co_name
        frame = frame.f_back
    caller = "?" if frame is None else frame.f_globals.get("__name__", "?")
    with _lock:
        _calls.append(Call(dist.distributed_c10d._world.pg_names[group], method, function, caller))


def _noting(method: str, original):
    @functools.wraps(original)
    def call(self, *args, **kwargs):
        _note(self, method)
        return original(self, *args, **kwargs)

    return call


def install() -> None:
    """Note every call from now on; once in a process."""
    for method in _METHODS:
        if hasattr(dist.ProcessGroup, method):
            setattr(dist.ProcessGroup, method, _noting(method, getattr(dist.ProcessGroup, method)))


def numbers() -> dict[str, int]:
    """Return how many collectives each group's backend has begun, by the group's name."""
    world = dist.distributed_c10d._world
    return {name: group._get_sequence_number_for_group() for group, name in world.pg_names.items()}


class Count:
    """The calls made inside a ``with`` block, in any thread, and by how much each group's number grew."""

    def __enter__(self):
        self._first = len(_calls)
        self._before = numbers()
        return self

    def __exit__(self, *_):
        self.calls = _calls[self._first :]
        after = numbers()
        self.new_groups = sorted(after.keys() - self._before.keys())
        self.grown = {name: after[name] - self._before.get(name, 0) for name in after}
