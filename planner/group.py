"""The dedicated gloo group: how it is made, and how it is left.

Built straight from ``ProcessGroupGloo``, so that neither the default group's backend nor c10d's
count of groups is touched, and lazily connected, so that a star of W ranks makes W - 1 connections
instead of W * (W - 1) / 2. Rule of this file: a group that failed once is never used again.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from planner.control import Clerk, NoReply
from planner.errors import TransportError

__all__ = ["GRACE", "GlooGroup", "check_descriptors", "make_devices"]

GRACE = timedelta(seconds=1)
"""What gloo's own deadlines get beyond the timeout, to be over first: they say more."""

_SOCKET_VARIABLE = "GLOO_SOCKET_IFNAME"
_PROBE_TAG = 2**30 + 1  # beyond all tags of exchanges
_MAX_NUM_PROBES = 200_000  # tens of bytes each
_LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"


def make_devices() -> list[ProcessGroupGloo.Device]:
    """Make the gloo devices this rank connects through.

    ``GLOO_SOCKET_IFNAME`` names the interface, or several separated by commas; without it gloo takes
    the address of this host's name. ``TORCH_GLOO_LAZY_INIT=0`` connects every pair of ranks at once.

    Raises:
        TransportError: no address for the interface or for this host; nothing was made.
    """
    lazy_text = os.environ.get(_LAZY_VARIABLE, "")
    is_lazy = lazy_text.strip().lower() not in {"0", "false", "no", "n", "off"}
    interfaces = [name.strip() for name in os.environ.get(_SOCKET_VARIABLE, "").split(",") if name.strip()]
    try:
        if interfaces:
            return [ProcessGroupGloo.create_device(interface=name, lazy_init=is_lazy) for name in interfaces]
        return [ProcessGroupGloo.create_default_device(lazy_init=is_lazy)]
    except RuntimeError as error:
        what = (
            f"{_SOCKET_VARIABLE}={','.join(interfaces)}" if interfaces else "the address of this host's name"
        )
        raise TransportError(
            f"gloo cannot use {what}: {error}",
            advice=f"set {_SOCKET_VARIABLE} to an interface that every rank's host has (see `ip addr`)",
        ) from error


def check_descriptors(num_needed: int) -> None:
    """Check that this process may open ``num_needed`` more sockets, where the system tells.

    Raises:
        TransportError: names the limit, and how many are open and needed.
    """
    try:
        num_open = len(list(Path("/proc/self/fd").iterdir()))
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (OSError, ValueError):
        return  # not Linux; gloo will say what it lacks
    if limit != resource.RLIM_INFINITY and num_open + num_needed > limit:
        raise TransportError(
            f"this process may have {limit:,} file descriptors (RLIMIT_NOFILE) and has {num_open:,} open, "
            f"but the coordinator needs {num_needed:,} more, one for each other rank",
            advice="raise the limit before the job starts, with `ulimit -n` or its like of your scheduler",
        )


class GlooGroup:
    """Point-to-point bytes between members of one gloo group, by group rank, on the CPU.

    Not collective: making it touches the store only; a pair of ranks connects when it first talks.
    """

    def __init__(
        self,
        store: Store,
        *,
        prefix: str,
        group_rank: int,
        world_size: int,
        devices: Sequence[ProcessGroupGloo.Device],
        timeout: timedelta,
    ) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - its run-time name in every torch
        options._devices = list(devices)  # noqa: SLF001 - the only name these options have
        options._threads = 1  # noqa: SLF001 - they serve collectives; we only send and receive
        # gloo lets a side that waits for its peer to connect wait five times as long as this.
        options._timeout = max(timeout / 5, timedelta(seconds=1))  # noqa: SLF001
        self._group: ProcessGroupGloo | None = ProcessGroupGloo(
            PrefixStore(prefix, store), group_rank, world_size, options
        )

        self._timeout = timeout
        self._connected: set[int] = set()
        self._num_probes = 0
        self._clerk: Clerk | None = None

    @property
    def is_open(self) -> bool:
        """Whether the group may be used."""
        return self._group is not None

    def close(self) -> None:
        """Drop the group; peers that wait for this rank see their connection end."""
        self._group = None
        if self._clerk is not None:
            self._clerk.close()

    def post_send(self, data: torch.Tensor, to_rank: int, tag: int) -> Work:
        """Start sending a uint8 tensor; it must stay unchanged until the work is waited for."""
        return self._post(to_rank, lambda: self._require().send([data], to_rank, tag))  # type: ignore[attr-defined]  # missing in the stub

    def post_receive(self, nbytes: int, from_rank: int, tag: int) -> tuple[torch.Tensor, Work]:
        """Start receiving exactly ``nbytes`` bytes; a longer message would abort this process."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return buffer, self._post(from_rank, lambda: self._require().recv([buffer], from_rank, tag))  # type: ignore[attr-defined]  # as above

    def _post(self, rank: int, post: Callable[[], Work]) -> Work:
        """Post, within the timeout: where that connects, gloo asks the store, which may be frozen.

        No frame here may hold the gloo group itself, as the frames of an error live as long as it does.
        """
        if rank in self._connected:
            return post()
        self._clerk = self._clerk or Clerk()
        try:
            return self._clerk.ask(post, self._timeout + GRACE)
        except NoReply:
            pass
        raise TransportError(
            f"connecting to group rank {rank} takes longer than {self._timeout.total_seconds():.0f} s",
            ranks=[rank],
            advice="see whether that rank, and the process that hosts the job's store, are frozen or cut off",
        )

    @property
    def is_worn(self) -> bool:
        """Whether so many probes are outstanding that the group should be made anew when nobody needs it."""
        return self._num_probes > _MAX_NUM_PROBES

    def note_connected(self, rank: int) -> None:
        """Note that bytes have passed between this rank and ``rank``."""
        self._connected.add(rank)

    def find_lost(self, ranks: Iterable[int]) -> list[int]:
        """Return those of ``ranks`` whose connection has ended, as it does when their process does.

        A rank that was never connected counts as there. Costs a few bytes to each rank, and a few of
        memory until the group is closed; see ``is_worn``.
        """
        if self._group is None:
            return []
        lost = []
        for rank in self._connected.intersection(ranks):
            self._num_probes += 1
            try:
                # Nothing is ever sent with this tag: posting fails at once where the pair is closed,
                # and what is posted is dropped with the group.
                self._group.recv([torch.empty(1, dtype=torch.uint8)], rank, _PROBE_TAG)  # type: ignore[attr-defined]  # as above
            except RuntimeError:
                lost.append(rank)
        return sorted(lost)

    def find_lost_among_all(self) -> list[int]:
        """Return the ranks whose connection has ended while that of some other rank has not.

        Where all have ended that says nothing: gloo ends them all when one transfer takes too long.
        """
        lost = self.find_lost(self._connected)
        return lost if len(lost) < len(self._connected) else []

    def _require(self) -> ProcessGroupGloo:
        if self._group is None:
            raise TransportError("the gloo group is closed", advice="it is made anew at the next save")
        return self._group
