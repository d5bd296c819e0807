"""What outlives one save for one set of member ranks: where they meet, and their gloo group.

Words: an *epoch* is one life of the gloo group and of the numbering of saves; the coordinator
begins a new one whenever some rank may have missed how the last save ended. A rank learns the epoch
by handing in a token of its own and waiting for the answer to that very token, so nothing that an
earlier life of the job left in the same store can be taken for an answer.

Keys, below one namespace for each (members, coordinator):

    epoch                 counter of epochs
    current               the epoch, and how those since the last success ended; written by the coordinator
    given up              the checkpoints of saves that ranks gave up while the coordinator was nowhere
    hello/RANK            token of the latest life of that rank
    welcome/TOKEN         [epoch, save number], written by the coordinator, deleted by the rank
    life/RANK             a sign of life: [epoch, save number, counter, what it is doing]
    s/EPOCH/SAVE/quit     there when ranks left that save without a verdict: why the first did, in words
    s/EPOCH/SAVE/...      the exchanges of one save, see planner.exchange
    gloo/EPOCH/...        gloo's own rendezvous
"""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store

from planner.control import Clerk, ControlPlane, Deadline, NoReply
from planner.errors import CoordinationError, CoordinationTimeout, TransportError, WireError
from planner.group import GRACE, GlooGroup, check_descriptors, make_devices
from planner.turns import Turns
from planner.wire.envelope import Abort, Envelope, Moved, encode_verdict
from planner.wire.frame import digest, pack, unpack

__all__ = ["Channel", "open_channel"]

_GIVEN_UP_KEY = "given up"
_MAX_ENDS = 8  # of saves that were given up, in a record

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _End:
    """How an epoch ended in which ranks were missing."""

    epoch: int
    absent: tuple[int, ...]
    error: CoordinationError


@dataclass(frozen=True)
class _Current:
    """The record under ``current``."""

    epoch: int
    ends: tuple[_End, ...]


class Channel:
    """The meeting place of one set of member ranks, made at their first save and kept.

    One save or load uses it at a time, in the order in which they took their ``turns``.
    """

    def __init__(self, store: Store, members: Sequence[int], group_rank: int, coordinator: int) -> None:
        self.members = tuple(members)
        self.group_rank = group_rank
        self.coordinator = coordinator
        self.world_size = len(self.members)
        self.is_coordinator = group_rank == coordinator
        self.turns = Turns()
        self.epoch = 0  # 0: not joined yet
        self.save_number = 0
        identity = digest(pack([list(self.members), coordinator])).hex()
        namespace = f"gloo-coordinated-planner/{identity}/"
        self.control = ControlPlane(store, namespace)
        self._gloo_store: Store | None = None
        self._store_ref = weakref.ref(store)
        self._group: GlooGroup | None = None
        self._devices: Sequence[Any] | None = None
        self.litter: list[str] = []
        self.activity = "entering"  # for the other ranks' logs
        self._welcoming = threading.Lock()
        self._tokens: dict[int, bytes] = {}  # coordinator: the latest token of each rank it has answered
        self._left_key = ""  # where this rank has left word that it left the epoch without a verdict
        self._ends: list[_End] = []  # coordinator: since the last save that succeeded
        self._settled_epoch = 0  # of the last save that succeeded
        self._known_epochs: set[int] = set()  # since then, whose ends this rank has heard of or raised for
        self._given_up: list[str] = []  # the checkpoints that this rank gave up, the coordinator nowhere
        self._late_for: list[str] = []  # coordinator: those of them that it has still to raise for
        self._excused = False  # coordinator: it has raised for a save that was given up without it

    @property
    def is_current(self) -> bool:
        """Whether the job's process groups are still the ones this channel was made for."""
        return dist.is_initialized() and self._store_ref() is _get_default_store()

    @property
    def peers(self) -> list[int]:
        """Group ranks of all members but this one."""
        return [rank for rank in range(self.world_size) if rank != self.group_rank]

    # -- entering a save ---------------------------------------------------------------------------

    def enter(self, checkpoint: str, deadline: Deadline) -> None:
        """Number this save as all members number it; called on all ranks, when it is this save's turn.

        Blocks on a rank other than the coordinator until the coordinator is in its first save too,
        at most until the deadline.

        Raises:
            CoordinationTimeout: the coordinator never came, or this very save was given up because
                this rank was late. The channel stays usable.
        """
        if self.is_coordinator:
            self._enter_coordinator(checkpoint)
        elif self.epoch == 0:
            self._join(checkpoint, deadline)
        else:
            self._follow(checkpoint, deadline)
            self.control.delete(self.take_litter())
        self.beat(0)

    def _enter_coordinator(self, checkpoint: str) -> None:
        is_first = self.epoch == 0
        if is_first:
            self.begin_epoch(None)
            self._late_for = self._take_given_up()
        if checkpoint in self._late_for:
            self._late_for.remove(checkpoint)
            self._excused = True
            raise self._came_late(checkpoint)
        if not is_first:
            was_late = self.control.exists([self.save_key("quit", offset=1)])
            is_worn = self._group is not None and self._group.is_worn
            if was_late or is_worn or self.control.exists([self.save_key("quit")]):
                self._renew(checkpoint, was_late=was_late)
        self.save_number += 1

    def _take_given_up(self) -> list[str]:
        record = self.control.read(_GIVEN_UP_KEY)
        self.control.delete([_GIVEN_UP_KEY])
        return [] if record is None else [str(checkpoint) for checkpoint in unpack(record)]

    def _came_late(self, checkpoint: str) -> CoordinationTimeout:
        # Going on with a save that others have given up could mix two states in one checkpoint.
        # Raise once: if the others are by now in another save to the same place, the next one works.
        return CoordinationTimeout(
            "the other ranks gave up waiting for the coordinator",
            checkpoint=checkpoint,
            phase="enter",
            ranks=[self.coordinator],
            advice="find out why the coordinator came late to the save; saving again works",
        )

    def _renew(self, checkpoint: str, *, was_late: bool) -> None:
        """Begin a new epoch: ranks left the last save, or gave up on this one, or the group is worn."""
        envelopes = self._read_envelopes_of_next_save() if was_late else {}
        if any(envelope.failure is not None for envelope in envelopes.values()):
            return  # a rank failed before we came, and that is what all must hear of: enter, and find it
        abandoned = {envelope.identity.checkpoint for envelope in envelopes.values()}
        verdict_key = self.save_key("v/0", offset=1)
        self.litter += [self.save_key("quit"), self.save_key("quit", offset=1), verdict_key]
        if checkpoint not in abandoned or self._excused:
            self.begin_epoch(None)
            self.control.put(verdict_key, encode_verdict(Moved()))
            return
        self._excused = True
        self._late_for = self._take_given_up()
        error = self._came_late(checkpoint)
        self.begin_epoch(error, [rank for rank in self.peers if rank not in envelopes])
        self.control.put(verdict_key, encode_verdict(Abort(error=error.to_fields())))
        raise error

    def _read_envelopes_of_next_save(self) -> dict[int, Envelope]:
        keys = [self.save_key(f"u/0/{rank}", offset=1) for rank in self.peers]
        envelopes = {}
        for rank, data in zip(self.peers, self.control.read_present(keys), strict=True):
            with suppress(WireError):
                if data is not None:
                    envelopes[rank] = Envelope.decode(data)
        return envelopes

    def _join(self, checkpoint: str, deadline: Deadline) -> None:
        token = secrets.token_bytes(16)
        self.control.put(f"hello/{self.group_rank}", token)
        key = f"welcome/{token.hex()}"
        if not self.control.wait([key], tick=lambda: not deadline.is_over):
            raise self._coordinator_missing(checkpoint, deadline)
        self.epoch, number = (int(number) for number in unpack(self.control.read_many([key])[0]))
        self.control.delete([key])
        self.save_number = number - 1  # if this raises, the next save of this rank may be the one going on
        self._check_missed(checkpoint, self._read_current())
        self.save_number = number

    def _follow(self, checkpoint: str, deadline: Deadline) -> None:
        if self._left_key and self._read_current().epoch == self.epoch:
            # Again, as the store may have been out of reach then.
            self.control.put_first(self._left_key, f"group rank {self.group_rank} left this save".encode())
            self.litter.append(self._left_key)
            if not self.control.wait_until(
                lambda: self._read_current().epoch != self.epoch, tick=lambda: not deadline.is_over
            ):
                raise self._coordinator_missing(checkpoint, deadline)
        current = self._read_current()
        if current.epoch != self.epoch:
            self._change_epoch(current.epoch)
        self._check_missed(checkpoint, current)
        self.save_number += 1

    def _check_missed(self, checkpoint: str, current: _Current) -> None:
        for end in current.ends:
            is_news = end.epoch >= self._settled_epoch and end.epoch not in self._known_epochs
            if is_news and self.group_rank in end.absent and end.error.checkpoint == checkpoint:
                # The others gave up this save, or one to the same place, because this rank was not
                # there; joining whatever they do next could mix two states in one checkpoint. Raise
                # once for each: a rank that skipped those saves altogether is then in step again, so
                # what the others are in now, without this rank, does not count as one more.
                self._known_epochs |= {end.epoch, current.epoch}
                raise end.error

    def _coordinator_missing(self, checkpoint: str, deadline: Deadline) -> CoordinationTimeout:
        self._given_up = [*self._given_up[1 - _MAX_ENDS :], checkpoint]
        self.control.put(_GIVEN_UP_KEY, pack(self._given_up))
        return CoordinationTimeout(
            "the coordinator never entered",
            phase="enter",
            ranks=[self.coordinator],
            elapsed=deadline.elapsed,
            advice=(
                "find out whether that rank called the save at all, with GlooCoordinatedPlanner or "
                "coordination on, and with the same process group"
            ),
        )

    def welcome(self, ranks: Iterable[int]) -> None:
        """Answer those of ``ranks`` that have handed in a new token; coordinator only."""
        with self._welcoming:
            self._welcome(ranks)

    def _welcome(self, ranks: Iterable[int]) -> None:
        keys = {rank: f"hello/{rank}" for rank in ranks}
        answers = {}
        for rank, token in zip(keys, self.control.read_present(list(keys.values())), strict=True):
            if token is not None and self._tokens.get(rank) != token:
                self._tokens[rank] = token
                answers[f"welcome/{token.hex()}"] = pack([self.epoch, self.save_number])
        self.control.put_many(answers)

    @property
    def strangers(self) -> list[int]:
        """Coordinator only: the ranks that have never handed in a token."""
        return [rank for rank in self.peers if rank not in self._tokens]

    # -- leaving -----------------------------------------------------------------------------------

    def begin_epoch(self, error: CoordinationError | None, absent: Sequence[int] = ()) -> None:
        """Begin a new epoch; coordinator only.

        Args:
            error: how the last one ended, for ranks that come late to that very save.
            absent: the ranks that were not there.
        """
        ended = self.epoch
        # What gloo left in the store for ranks to find each other, by device and rank.
        self.litter += [
            f"gloo/{ended}/{device}/{rank}"
            for device in range(len(self._devices or ()))
            for rank in range(self.world_size)
        ]
        self._change_epoch(self.control.add("epoch", 1))
        if error is not None:
            self._ends = [*self._ends[1 - _MAX_ENDS :], _End(ended, tuple(absent), error)]
        ends = [[end.epoch, list(end.absent), end.error.to_fields()] for end in self._ends]
        self.control.put("current", pack([self.epoch, ends]))

    def note_abort(self) -> None:
        """Note that this rank has heard how its epoch ended, or has raised an error of its own in it."""
        self._known_epochs.add(self.epoch)

    def _change_epoch(self, epoch: int) -> None:
        self.close_group()
        self.epoch, self.save_number = epoch, 0
        self._left_key = ""

    def _read_current(self) -> _Current:
        epoch, ends = unpack(self.control.read_many(["current"])[0])
        return _Current(
            int(epoch),
            tuple(
                _End(int(ended), tuple(absent), CoordinationError.from_fields(fields))
                for ended, absent, fields in ends
            ),
        )

    def leave_without_verdict(self, quit_key: str, reason: str) -> None:
        """Tell the coordinator that this rank gives a save up, and why; the next begins an epoch."""
        self.close_group()
        self._left_key = quit_key
        self.note_abort()
        self.control.put_first(quit_key, f"group rank {self.group_rank}: {reason}".encode(errors="replace"))

    def succeeded(self) -> None:
        """Note that a save ended well."""
        self._settled_epoch = self.epoch
        self._known_epochs.clear()
        self._ends.clear()
        self._given_up.clear()
        self._late_for.clear()
        self._excused = False

    def take_litter(self) -> list[str]:
        """Return the keys of earlier saves that may be deleted once all members are in a later one."""
        litter, self.litter = self.litter, []
        return litter

    def save_key(self, name: str, *, offset: int = 0) -> str:
        """Return the key ``name`` of the current save, or of the one ``offset`` after it."""
        return f"s/{self.epoch}/{self.save_number + offset}/{name}"

    # -- signs of life -----------------------------------------------------------------------------

    def beat(self, count: int) -> None:
        """Show life."""
        record = [self.epoch, self.save_number, count, self.activity]
        self.control.put(f"life/{self.group_rank}", pack(record))

    def lives(self, ranks: Sequence[int]) -> list[bytes]:
        """Return the latest sign of life of each of ``ranks``, empty bytes where there was none."""
        return [life or b"" for life in self.control.read_present([f"life/{rank}" for rank in ranks])]

    def is_in_this_save(self, life: bytes) -> bool:
        """Whether a sign of life comes from the save this rank is in."""
        return bool(life) and unpack(life)[:2] == [self.epoch, self.save_number]

    def activity_in(self, life: bytes) -> str:
        """Return what a rank was doing when it gave this sign of life."""
        record = unpack(life) if life else []
        return str(record[-1]) if record else "not there yet"

    # -- the gloo group ----------------------------------------------------------------------------

    def prepare_devices(self) -> None:
        """Find the interfaces to use, before anybody relies on this rank.

        Raises:
            TransportError: this rank has no usable interface, or too few file descriptors; names the
                variable, the host or the limit.
        """
        if self._devices is None:
            if self.is_coordinator:
                check_descriptors(self.world_size - 1)
            self._devices = make_devices()

    def open_group(self, timeout: timedelta) -> GlooGroup:
        """Return this epoch's gloo group, making it at first use.

        Raises:
            TransportError: a rank did not come (only where ``TORCH_GLOO_LAZY_INIT=0`` connects all
                pairs at once).
        """
        self.prepare_devices()
        if self._group is None:
            store = self._gloo_store = self._gloo_store or self.control.clone()
            clerk = Clerk()  # the store may freeze just now, and with it what gloo asks of it
            try:
                self._group = clerk.ask(
                    lambda: GlooGroup(
                        store,
                        prefix=f"gloo/{self.epoch}",
                        group_rank=self.group_rank,
                        world_size=self.world_size,
                        devices=self._devices or (),
                        timeout=timeout,
                    ),
                    timeout + GRACE,
                )
            except NoReply:
                raise self.control.no_reply(timeout) from None
            except RuntimeError as error:
                raise TransportError(
                    f"the gloo group could not be made: {error}",
                    advice="see whether all ranks can reach each other on the interface that gloo uses",
                ) from error
            finally:
                clerk.close()
            _logger.debug("made a gloo group of %d ranks, epoch %d", self.world_size, self.epoch)
        return self._group

    def find_lost(self, ranks: Sequence[int]) -> list[int]:
        """Return those of ``ranks`` whose connection to this rank has ended; see ``GlooGroup.find_lost``."""
        return [] if self._group is None else self._group.find_lost(ranks)

    def close_group(self) -> None:
        """Drop the gloo group, if there is one; the next epoch makes its own."""
        if self._group is not None:
            self._group.close()
            self._group = self._devices = None


_channels: dict[tuple[tuple[int, ...], int], Channel] = {}
_channels_lock = threading.Lock()


def open_channel(group: dist.ProcessGroup | None, coordinator: int) -> Channel:
    """Return this process's channel for the members of ``group``, making it at first use; not collective.

    A channel of process groups that were destroyed since is replaced.

    Args:
        group: whose members; None for the default group's. This process must be one of them.
        coordinator: the coordinator's rank in ``group``.
    """
    members = tuple(dist.get_process_group_ranks(group))
    key = (members, coordinator)
    with _channels_lock:
        for stale in [key for key, channel in _channels.items() if not channel.is_current]:
            _channels.pop(stale).close_group()
        channel = _channels.get(key)
        if channel is None:
            channel = _channels[key] = Channel(
                _get_default_store(), members, dist.get_rank(group), coordinator
            )
        return channel
