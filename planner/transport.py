"""The data plane: payloads of known size over the dedicated group, as a star around the coordinator.

Only what the coordinator asked for travels, at its exact size: gloo aborts the process that receives
a message longer than its buffer, so sizes are agreed on before anything is posted. What only its receiver
needs to know the size of, such as a reply, is preceded by a fixed header.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work

from planner.control import Deadline
from planner.errors import TransportError
from planner.group import GlooGroup

__all__ = [
    "ADVICE_OUT_OF_REACH",
    "gather",
    "is_out_of_reach",
    "receive_headed",
    "scatter",
    "send_headed",
    "send_parts",
]

_HEADER = struct.Struct("<4sQI")  # magic, size in bytes, checksum of the two
_MAGIC = b"GCPH"
_FOREVER_S = 10 * 365 * 86400.0
_ADVICE_LOST = "look at that rank's own log: it was probably killed, frozen or cut off"
ADVICE_OUT_OF_REACH = (
    "see whether that rank is there, and whether the coordinator's host reaches it at this address; "
    "GLOO_SOCKET_IFNAME chooses the interface, on every rank"
)
_WINDOW = 64  # ranks that receives are posted for at a time


def is_out_of_reach(reason: str) -> bool:
    """Whether gloo says, on this rank or another, that one rank could not connect to another."""
    return "timed out connecting" in reason


def send_parts(
    group: GlooGroup, parts: Sequence[bytes], *, to_rank: int, tag: int, deadline: Deadline
) -> None:
    """Send ``parts`` in order to one rank; blocks until taken, at most until the deadline.

    Raises:
        TransportError: the peer or the group failed; the group is closed.
    """
    with _Posts(group) as posts:
        for part in parts:
            posts.send(part, to_rank, tag)
        posts.wait(deadline)


def send_headed(group: GlooGroup, data: bytes, *, to_rank: int, tag: int, deadline: Deadline) -> None:
    """Send one piece of bytes whose size the receiver does not know; see ``receive_headed``."""
    scatter(group, {to_rank: data}, tag=tag, deadline=deadline)


def gather(
    group: GlooGroup, wanted: Mapping[int, Sequence[int]], *, tag: int, deadline: Deadline
) -> Iterator[tuple[int, list[bytes]]]:
    """Receive from each rank of ``wanted`` its parts, given their sizes in bytes; yields rank and parts.

    Raises:
        TransportError: names the rank that failed; the group is closed.
    """
    ranks = sorted(wanted)
    for start in range(0, len(ranks), _WINDOW):
        window = ranks[start : start + _WINDOW]
        with _Posts(group) as posts:
            for rank in window:
                for nbytes in wanted[rank]:
                    posts.receive(nbytes, rank, tag)
            received = iter(posts.wait(deadline))
            for rank in window:
                yield rank, [next(received).numpy().tobytes() for _ in wanted[rank]]


def scatter(group: GlooGroup, replies: Mapping[int, bytes], *, tag: int, deadline: Deadline) -> None:
    """Send each rank of ``replies`` its bytes; one object given to many ranks is not copied for each.

    Raises:
        TransportError: names the rank that failed; the group is closed.
    """
    tensors: dict[int, torch.Tensor] = {}
    with _Posts(group) as posts:
        for rank, reply in sorted(replies.items()):
            posts.send(_pack_header(len(reply)), rank, tag)
            if reply:
                if id(reply) not in tensors:
                    tensors[id(reply)] = _as_tensor(reply)
                posts.send(tensors[id(reply)], rank, tag)
        posts.wait(deadline)


def receive_headed(group: GlooGroup, *, from_rank: int, tag: int, deadline: Deadline) -> bytes:
    """Receive what ``scatter`` or ``send_headed`` sends this rank; blocks at most until the deadline.

    Raises:
        TransportError: the peer or the group failed, or what came is no reply; the group is closed.
    """
    with _Posts(group) as posts:
        posts.receive(_HEADER.size, from_rank, tag)
        found = posts.wait(deadline)[0].numpy().tobytes()
        _, nbytes, _ = _HEADER.unpack(found)
        if found != _pack_header(nbytes):  # a wrong size would let gloo abort this process
            raise TransportError(
                f"group rank {from_rank} sent a damaged header, {found.hex()}; it was not used",
                ranks=[from_rank],
                advice="look for damaged memory or network hardware on the path to that rank",
            )
        if not nbytes:
            return b""
        posts.receive(nbytes, from_rank, tag)
        return posts.wait(deadline)[0].numpy().tobytes()


def _pack_header(nbytes: int) -> bytes:
    checksum = zlib.crc32(_HEADER.pack(_MAGIC, nbytes, 0))
    return _HEADER.pack(_MAGIC, nbytes, checksum)


def _as_tensor(data: bytes) -> torch.Tensor:
    # frombuffer wants memory that may be written to; one copy of a payload is cheaper than a warning.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _Posts:
    """Sends and receives that were posted together; on any error the group is closed.

    None of them is kept beyond the block, also when it raises: gloo aborts a process in which a peer
    comes to connect to a group that has failed and is still there.
    """

    def __init__(self, group: GlooGroup) -> None:
        self._group = group
        self._posted: list[tuple[str, int, torch.Tensor, Work | None]] = []

    def send(self, data: bytes | torch.Tensor, to_rank: int, tag: int) -> None:
        """Post a send of these bytes."""
        with self._naming("sending to", to_rank, len(data)):
            tensor = data if isinstance(data, torch.Tensor) else _as_tensor(data)
            work = self._group.post_send(tensor, to_rank, tag) if len(data) else None
        self._posted.append(("sending to", to_rank, tensor, work))

    def receive(self, nbytes: int, from_rank: int, tag: int) -> None:
        """Post a receive of exactly ``nbytes`` bytes."""
        with self._naming("receiving from", from_rank, nbytes):
            if nbytes:
                tensor, work = self._group.post_receive(nbytes, from_rank, tag)
            else:
                tensor, work = torch.empty(0, dtype=torch.uint8), None
        self._posted.append(("receiving from", from_rank, tensor, work))

    def wait(self, deadline: Deadline) -> list[torch.Tensor]:
        """Wait for all that was posted since the last wait and return its buffers, in order."""
        buffers: list[torch.Tensor] = []
        for doing, rank, tensor, _ in self._posted:
            with self._naming(doing, rank, tensor.numel()):
                self._wait_for_next(len(buffers), deadline)
            buffers.append(tensor)
        self._posted.clear()
        return buffers

    def _wait_for_next(self, number: int, deadline: Deadline) -> None:
        _, rank, _, work = self._posted[number]
        if work is None:
            return
        try:
            # At least a second: what is already here must not fail for coming at the deadline.
            work.wait(timedelta(seconds=max(1.0, min(deadline.remaining_s, _FOREVER_S))))
        finally:
            del work  # the frame lives as long as an error from it
        self._group.note_connected(rank)

    def __enter__(self) -> _Posts:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._posted.clear()
        if error is not None:
            if isinstance(error, TransportError):  # what ended one process may have ended others
                error.ranks = tuple(sorted({*error.ranks, *self._group.find_lost_among_all()}))
            self._group.close()

    @contextmanager
    def _naming(self, doing: str, rank: int, nbytes: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else repr(error)
        else:
            return
        # Raised outside of the handler, as gloo's own error would keep its frames and their buffers.
        raise TransportError(
            f"{doing} group rank {rank} {nbytes:,} bytes over gloo failed: {reason}",
            ranks=[rank],
            advice=ADVICE_OUT_OF_REACH if is_out_of_reach(reason) else _ADVICE_LOST,
        )
