"""The data plane: payloads of known size over the dedicated group, as a star around the coordinator.

Only what the coordinator asked for travels, at its exact size: gloo aborts the process that receives
a message longer than its buffer, so sizes are agreed on before anything is posted. What only its receiver
needs to know the size of, such as a reply, is preceded by a fixed header.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work

from planner.control import Deadline
from planner.errors import TransportError
from planner.group import GlooGroup

__all__ = ["gather", "receive_headed", "scatter", "send_headed", "send_parts"]

_HEADER = struct.Struct("<4sQI")  # magic, size in bytes, checksum of the two
_MAGIC = b"GCPH"
_WINDOW = 64  # ranks that receives are posted for at a time


def send_parts(
    group: GlooGroup, parts: Sequence[bytes], *, to_rank: int, tag: int, deadline: Deadline
) -> None:
    """Send ``parts`` in order to one rank; blocks until taken, at most until the deadline.

    Raises:
        TransportError: the peer or the group failed; the group is closed.
    """
    with _closing_on_error(group, f"sending to group rank {to_rank}", to_rank):
        works = [(group.post_send(_as_tensor(part), to_rank, tag)) for part in parts if part]
        for work in works:
            _wait(work, deadline)


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
        posted = []
        for rank in ranks[start : start + _WINDOW]:
            with _closing_on_error(group, f"receiving from group rank {rank}", rank):
                posted.append(
                    (
                        rank,
                        [
                            group.post_receive(nbytes, rank, tag) if nbytes else None
                            for nbytes in wanted[rank]
                        ],
                    )
                )
        for rank, receives in posted:
            parts = []
            for receive in receives:
                if receive is None:
                    parts.append(b"")
                    continue
                buffer, work = receive
                with _closing_on_error(
                    group, f"receiving {buffer.numel():,} bytes from group rank {rank}", rank
                ):
                    _wait(work, deadline)
                parts.append(buffer.numpy().tobytes())
            yield rank, parts


def scatter(group: GlooGroup, replies: Mapping[int, bytes], *, tag: int, deadline: Deadline) -> None:
    """Send each rank of ``replies`` its bytes; one object given to many ranks is not copied for each.

    Raises:
        TransportError: names the rank that failed; the group is closed.
    """
    tensors: dict[int, torch.Tensor] = {}
    posted = []
    for rank, reply in sorted(replies.items()):
        with _closing_on_error(group, f"sending to group rank {rank}", rank):
            header = _as_tensor(_pack_header(len(reply)))
            posted.append((rank, group.post_send(header, rank, tag), header))
            if reply:
                if id(reply) not in tensors:
                    tensors[id(reply)] = _as_tensor(reply)
                data = tensors[id(reply)]
                posted.append((rank, group.post_send(data, rank, tag), data))
    for rank, work, data in posted:
        with _closing_on_error(group, f"sending {data.numel():,} bytes to group rank {rank}", rank):
            _wait(work, deadline)


def receive_headed(group: GlooGroup, *, from_rank: int, tag: int, deadline: Deadline) -> bytes:
    """Receive what ``scatter`` or ``send_headed`` sends this rank; blocks at most until the deadline.

    Raises:
        TransportError: the peer or the group failed, or what came is no reply; the group is closed.
    """
    with _closing_on_error(group, f"receiving from group rank {from_rank}", from_rank):
        header, work = group.post_receive(_HEADER.size, from_rank, tag)
        _wait(work, deadline)
        found = header.numpy().tobytes()
        _, nbytes, _ = _HEADER.unpack(found)
        if found != _pack_header(nbytes):  # a wrong size would let gloo abort this process
            raise TransportError(
                f"group rank {from_rank} sent a damaged header, {found.hex()}; it was not used",
                ranks=[from_rank],
                advice="look for damaged memory or network hardware on the path to that rank",
            )
        if not nbytes:
            return b""
        data, work = group.post_receive(nbytes, from_rank, tag)
        _wait(work, deadline)
        return data.numpy().tobytes()


def _pack_header(nbytes: int) -> bytes:
    checksum = zlib.crc32(_HEADER.pack(_MAGIC, nbytes, 0))
    return _HEADER.pack(_MAGIC, nbytes, checksum)


def _as_tensor(data: bytes) -> torch.Tensor:
    # frombuffer wants memory that may be written to; one copy of a payload is cheaper than a warning.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _wait(work: Work, deadline: Deadline) -> None:
    remaining_s = deadline.remaining_s
    # At least a second: a message that is already here must not fail for arriving at the deadline.
    work.wait(timedelta(seconds=max(1.0, min(remaining_s, 10 * 365 * 86400.0))))


class _closing_on_error:  # noqa: N801 - used like the functions of contextlib
    """Close the group when the block fails, and say what it was doing."""

    def __init__(self, group: GlooGroup, doing: str, rank: int) -> None:
        self._group, self._doing, self._rank = group, doing, rank

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        self._group.close()
        if isinstance(error, RuntimeError):
            raise TransportError(
                f"{self._doing} over gloo failed: {str(error).splitlines()[0] if str(error) else error!r}",
                ranks=[self._rank],
                advice="look at that rank's own log: it was probably killed, frozen or cut off",
            ) from error
