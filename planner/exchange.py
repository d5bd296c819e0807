"""The protocol of one save or load: who enters, what each rank has, what the coordinator decides.

One save is a row of *exchanges* ("plan", then "write"). In each, every rank makes its part and puts
an envelope; the coordinator waits for all of them, compares, and answers with verdicts:

    rank         envelope  ........................  parts over gloo  ..............  reply over gloo
    coordinator            verdict "send" (to whom)                   verdict "done"
                           or verdict "abort" at any point, with the reasons

Keys, below ``s/EPOCH/SAVE/``: ``u/EXCHANGE/RANK`` holds an envelope, ``v/NUMBER`` the verdicts in their
order, ``alarm`` counts failed envelopes. A rank that fails anywhere, also between exchanges, puts a
failed envelope for the next one, so every failure reaches everybody the same way. Parts with equal
digests are sent once, by the lowest rank that has them, and not at all where the coordinator remembers
them from a save that succeeded. The other way round a rank says which reply it got when it last sent the
same, and what is the same again does not follow.

Nothing here knows what the bytes mean; that is for planner.dist_wrapper.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed.checkpoint.api import CheckpointException

from planner.cache import memory
from planner.channel import Channel
from planner.config import CoordinationConfig
from planner.control import Deadline
from planner.errors import (
    CoordinationError,
    CoordinationMismatch,
    CoordinationTimeout,
    RemoteError,
    TransportError,
    WireError,
    format_ranks,
)
from planner.group import GlooGroup
from planner.life import Pulse, SilenceWatch
from planner.parts import choose_parts, choose_replies, lasting_mask
from planner.report import PhaseReport, SaveReport
from planner.transport import (
    ADVICE_OUT_OF_REACH,
    gather,
    is_out_of_reach,
    receive_headed,
    scatter,
    send_headed,
    send_parts,
)
from planner.wire.envelope import (
    Abort,
    Done,
    Envelope,
    Identity,
    Moved,
    Send,
    Verdict,
    decode_verdict,
    encode_verdict,
)
from planner.wire.failures import decode_failure, encode_failure
from planner.wire.frame import digest

__all__ = ["Exchange", "Local", "PeerFailures", "Reply"]

_logger = logging.getLogger(__name__)

_FAILURE_GRACE = timedelta(seconds=2)  # after a first failure, for other ranks to report theirs
_LOSS_GRACE = timedelta(seconds=1)  # after a first connection ended, for others to end
_VERDICT_GRACE = timedelta(seconds=5)  # after giving up, for the coordinator to say why
_PROBE = timedelta(seconds=1)  # between looks whether a connection has ended
_PROBE_OF_MANY = timedelta(seconds=5)  # the same by a coordinator of
_NUM_RANKS_OF_FEW = 64  # ranks or more
_MAX_FAILURE_FRAMES = 64  # different ones in one verdict, which every rank reads from the store
_NUM_LAST_RANKS = 4
_MAX_EXCHANGES = 64  # in one save, so that no two have the same tag; DCP has two


class PeerFailures(Exception):  # noqa: N818 - carries the failures of others, is none of its own
    """Raised by a reduction to say which ranks' parts are at fault."""

    def __init__(self, failures: Mapping[int, BaseException]) -> None:
        super().__init__(failures)
        self.failures = dict(failures)


@dataclass(frozen=True)
class Local:
    """One rank's part in one exchange."""

    parts: Sequence[bytes] = ()
    """What it can send; equal parts of several ranks are sent by one of them."""

    later: Callable[[], bytes] | None = None
    """Makes one more part, for which the coordinator seldom asks."""

    mode: str = ""
    """What must be the same on all ranks, in words."""


@dataclass(frozen=True)
class Reply:
    """What the coordinator answers: the same parts to all, or to each rank as many parts of its own.

    The last of several parts is what differs from save to save: it always follows.
    """

    to_all: Sequence[bytes] | None = None
    to_each: Mapping[int, Sequence[bytes]] | None = None


class Exchange:
    """One save or load on this rank, from entering to its end. A context manager; enter it on all members.

    Entering numbers the save and may block up to ``plan_timeout``. Leaving with an exception that
    the others do not know of tells them.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        operation: str,
        checkpoint: str,
        config: CoordinationConfig,
        turn: object | None = None,
    ) -> None:
        self._channel = channel
        self._turn = channel.turns.take() if turn is None else turn
        self._control = channel.control
        self._config = config
        self._operation = operation
        self._checkpoint = checkpoint
        self.report = SaveReport(operation, checkpoint, channel.world_size)
        self._base = ""
        self._quit_before = ""
        self._absent: tuple[int, ...] = ()  # coordinator: who had not arrived when it stopped waiting
        self._remembers = operation == "save" and config.remembered_nbytes > 0
        self._is_first = memory.is_empty
        self._to_remember: dict[bytes, tuple[Any, int]] = {}  # if this save succeeds
        # Of what this rank had in this save so far: by this it finds what it probably gets again.
        self._history = hashlib.blake2b(repr((channel.members, channel.coordinator)).encode(), digest_size=16)
        self._misses: list[str] = []  # why this exchange is not as in an earlier save
        self._concluded = False  # an abort verdict was given or taken: all ranks know
        self._num_exchanges = 0
        self._num_verdicts = 0
        self._identity = Identity(operation, checkpoint, "enter")
        self._phase = PhaseReport("enter")
        self._local_failure: BaseException | None = None
        self._pulse: Pulse | None = None
        self._start = 0.0
        self._save_number = 0

    # -- life ----------------------------------------------------------------------------------------

    def __enter__(self) -> Exchange:
        """Number this save; see the class."""
        deadline = Deadline(self._config.plan_timeout)
        self._start = time.monotonic()
        try:
            self._await_turn(deadline)
            if not self._channel.is_current:
                raise CoordinationError(
                    "the job's process groups were destroyed, or made anew, while this waited for its turn",
                    ranks=[self._channel.group_rank],
                    advice="wait for the futures of asynchronous saves before destroying process groups",
                )
            self._control.patience = self._config.plan_timeout
            deadline.restart()
            self._enter_epoch(deadline)
            self._pulse = Pulse(self._channel, self._config.plan_timeout)
        except BaseException as error:
            self._name(error)
            try:
                if self._base:  # numbered already: the others wait for this rank
                    with suppress(TransportError):
                        self._leave(error)
            finally:
                self._channel.turns.end(self._turn)
            raise
        return self

    def _await_turn(self, waited: Deadline) -> None:
        turns = self._channel.turns
        if turns.is_this_threads():
            raise CoordinationError(
                "a save or load of the same ranks is running in this very thread",
                ranks=[self._channel.group_rank],
                advice=(
                    "let a storage or planner that saves on its own pass another planner, or no_dist=True; "
                    "where coordination is on for the process, leave it to stock DCP there: "
                    'planner.coordinated(CoordinationConfig(coordination="default"))'
                ),
            )
        # The save before has deadlines of its own, so this wait ends.
        while not turns.wait(self._turn, self._config.progress_interval):
            _logger.warning(
                "%s of %r: waiting for %.0f s for an earlier save or load of the same ranks to end",
                self._operation,
                self._checkpoint,
                waited.elapsed.total_seconds(),
            )

    def _enter_epoch(self, deadline: Deadline) -> None:
        self._channel.enter(self._checkpoint, deadline)
        self._base = self._channel.save_key("")
        self._quit_before = self._channel.save_key("quit", offset=-1)
        self._save_number = self._channel.save_number
        self._num_verdicts = 0

    def _name(self, error: BaseException) -> None:
        """Say in an error from a lower layer which operation it ended."""
        if isinstance(error, CoordinationError):
            error.operation = error.operation or self._operation
            error.checkpoint = error.checkpoint or self._checkpoint
            error.phase = error.phase or self._identity.phase

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the save on this rank."""
        assert self._pulse is not None  # noqa: S101 - __enter__ made it
        try:
            self._pulse.stop()
            if error is None:
                self._channel.succeeded()
                if self._remembers:
                    memory.remember(self._to_remember, self._config.remembered_nbytes)
                if self._channel.is_coordinator:
                    self._channel.litter += [self._verdict_key(self._num_verdicts - back) for back in (1, 2)]
            else:
                self._name(error)
                if not self._concluded:
                    with suppress(TransportError):
                        self._leave(error)
        finally:
            self.report.total_seconds = time.monotonic() - self._start
            self._channel.turns.end(self._turn)
        if error is None:
            # Of a wrapper used on its own, each call is such an exchange, and a line of each is noise.
            is_news = self._channel.is_coordinator and self._operation in {"save", "load"}
            level = logging.INFO if is_news else logging.DEBUG
            _logger.log(level, "%s", self.report)

    def _leave(self, error: BaseException) -> None:
        """Tell the others that this rank ends with ``error``, at the next point where they look."""
        if isinstance(error, CheckpointException) and self._channel.group_rank in error.failures:
            error = error.failures[self._channel.group_rank][0]
        if self._channel.is_coordinator:
            frame = self._encode(error)
            if self._num_exchanges <= 1:
                keys = {rank: self._up_key(0, rank) for rank in self._channel.peers}
                there = self._control.present(list(keys.values()))
                self._absent = tuple(rank for rank, is_there in zip(keys, there, strict=True) if not is_there)
            ended = self._describe(
                CoordinationError,
                f"the coordinator left it before this rank came: {_show(error)}",
                ranks=self._absent,
                advice="see the coordinator's log; saving again works",
            )
            self._end(Abort(step=self._identity.phase, failures=[(frame, [self._channel.group_rank])]), ended)
            return
        self._put_failed(self._num_exchanges, error)
        # This closes the group too: the coordinator may be about to receive from this rank.
        self._channel.leave_without_verdict(f"{self._base}quit", _show(error))

    # -- one exchange --------------------------------------------------------------------------------

    def run(
        self,
        step: str,
        produce: Callable[[], Local],
        reduce: Callable[[list[list[bytes] | None]], Reply | None],
        *,
        is_io: bool = False,
        asks_for_later: bool = False,
    ) -> list[bytes] | None:
        """Run one exchange; collective over the members, each calls it in the same order.

        Blocks until the coordinator has an outcome: while ranks are inside ``produce`` at most
        ``plan_timeout``, or ``io_timeout`` for the slowest where ``is_io``.

        Args:
            step: DCP's name of the step.
            produce: makes this rank's parts; may raise anything.
            reduce: makes the reply from all ranks' parts; runs on the coordinator, whose own entry in
                the list, indexed by group rank, is None. May raise anything, ``PeerFailures`` for
                parts that are at fault.
            is_io: whether ``produce`` writes or reads data.
            asks_for_later: whether the parts left for later are wanted; the coordinator's word counts.

        Returns:
            The reply's parts; None on the coordinator, and where there is no reply.

        Raises:
            CheckpointException: ranks failed, or the reduction did; the same on every rank.
            CoordinationError: the ranks did not come to an agreement.
        """
        self._identity = Identity(self._operation, self._checkpoint, step)
        self._phase = PhaseReport(step)
        self.report.phases.append(self._phase)
        self._local_failure = None
        self._misses = []
        number, self._num_exchanges = self._num_exchanges, self._num_exchanges + 1
        if number >= _MAX_EXCHANGES:
            raise ValueError(f"one save or load has at most {_MAX_EXCHANGES} exchanges")
        start = time.monotonic()
        try:
            deadline = Deadline(self._config.io_timeout if is_io else self._config.plan_timeout)
            self._channel.activity = f"in its own part of phase {step!r}"
            local = self._produce(produce, is_first=number == 0)
            self._channel.activity = f"waiting in phase {step!r}"
            self._identity = Identity(self._operation, self._checkpoint, step, local.mode)
            if self._channel.is_coordinator:
                self._coordinate(number, reduce, deadline, asks_for_later=asks_for_later)
                return None
            return self._take_part(number, local)
        finally:
            self._phase.seconds = time.monotonic() - start
            self._phase.reuse = self._describe_reuse()

    # -- what is remembered --------------------------------------------------------------------------

    def find(self, digest: bytes) -> Any:
        """Return what is remembered of a save that succeeded, by the digest of all that it depends on."""
        return memory.find(digest) if self._remembers else None

    def remember(self, digest: bytes, value: Any, nbytes: int) -> None:
        """Keep ``value``, which never changes, if this save succeeds."""
        if self._remembers:
            self._to_remember[digest] = (value, nbytes)

    def miss(self, reason: str) -> None:
        """Note for the report why this exchange is not as in an earlier save."""
        self._misses.append(reason)

    def _describe_reuse(self) -> str:
        if not self._remembers:
            return "off: " + (
                "remembered_nbytes is 0"
                if self._operation == "save"
                else "only what saves send is remembered"
            )
        if not self._misses:
            return "hit" if self._phase.remembered_nbytes else "off: nothing travels in this phase"
        return "miss: " + ("first save of this process" if self._is_first else "; ".join(self._misses))

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time of the block as the planner's and the storage's own, in the report."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._phase.work_seconds += time.monotonic() - start

    def _produce(self, produce: Callable[[], Local], *, is_first: bool) -> Local:
        try:
            if is_first:
                self._channel.prepare_devices()
            return produce()
        except BaseException as error:  # noqa: BLE001 - whatever it is, all ranks must hear of it, as in stock DCP
            self._local_failure = error
            return Local()

    # -- on the other ranks --------------------------------------------------------------------------

    def _take_part(self, number: int, local: Local) -> list[bytes] | None:
        verdict: Verdict = Moved()
        parts = tuple((digest(part), len(part)) for part in local.parts)
        history = self._remember_as(parts, number)
        known: Sequence[tuple[bytes, bytes]] = next(filter(None, map(self.find, history)), ())
        while isinstance(verdict, Moved):
            if self._local_failure is not None:
                self._put_failed(number, self._local_failure)
            else:
                envelope = Envelope(
                    self._identity,
                    parts,
                    has_later=local.later is not None,
                    known=tuple(part_digest for part_digest, _ in known),
                )
                self._control.put(self._up_key(number, self._channel.group_rank), envelope.encode())
            verdict = self._await_verdict()
            if isinstance(verdict, Moved):
                self._control.delete([self._up_key(number, self._channel.group_rank)])
                self._enter_epoch(Deadline(self._config.plan_timeout))
        if isinstance(verdict, Send) and self._local_failure is None:
            self._over_gloo(lambda _group, _deadline: None)  # all open it, where all have to connect at once
            self._send(number, local, verdict)
            verdict = self._await_verdict()
        if not isinstance(verdict, Done) or self._local_failure is not None:
            raise self._unexpected(verdict)
        self._control.delete([self._up_key(number, self._channel.group_rank)])
        return self._receive_reply(number, verdict, known, history)

    def _remember_as(self, parts: Sequence[tuple[bytes, int]], number: int) -> list[bytes]:
        """Note the digests of this rank's parts, and return by what to remember the reply, the best first."""
        before = self._history.digest()
        self._history.update(b"".join((b"\0", *(part_digest for part_digest, _ in parts))))
        # Where this rank's own results are new, most of the metadata may still be what it was.
        return [b"reply:" + self._history.digest(), *([b"reply:" + before] if number else ())]

    def _receive_reply(
        self, number: int, verdict: Done, known: Sequence[tuple[bytes, bytes]], history: Sequence[bytes]
    ) -> list[bytes] | None:
        if not verdict.num_parts:
            return None
        where = {"from_rank": self._channel.coordinator, "tag": self._tag(number)}
        mask = verdict.mask_of(self._channel.group_rank)
        reply: list[bytes] = []
        for position in range(verdict.num_parts):
            if mask >> position & 1:
                part = self._over_gloo(
                    lambda group, deadline: receive_headed(group, deadline=deadline, **where)
                )
                self._phase.received_nbytes += len(part)
            elif position < len(known):
                part = known[position][1]
                self._phase.remembered_nbytes += len(part)
            else:
                raise self._unexpected(verdict)
            reply.append(part)
        lasting = reply[: max(1, len(reply) - 1)]
        if num_new := sum(mask >> position & 1 for position in range(len(lasting))):
            self.miss(f"{num_new} of {len(lasting)} parts of the reply were new")
        if self._remembers:
            digested = tuple((digest(part), part) for part in lasting)
            self._history.update(b"".join(part_digest for part_digest, _ in digested))
            for key in history:
                self.remember(key, digested, sum(map(len, lasting)))
        return reply

    def _send(self, number: int, local: Local, verdict: Send) -> None:
        mask = verdict.mask_of(self._channel.group_rank)
        parts = [part for bit, part in enumerate(local.parts) if mask >> bit & 1]
        if parts:
            self.miss(f"the coordinator asked for {len(parts)} of {len(local.parts)} parts")
        where = {"to_rank": self._channel.coordinator, "tag": self._tag(number)}
        if parts:
            self._over_gloo(lambda group, deadline: send_parts(group, parts, deadline=deadline, **where))
        if verdict.later and local.later is not None:
            try:
                part = local.later()
            except BaseException as error:  # noqa: BLE001 - it goes to all ranks, like any failure to make a part
                self._local_failure = error
                self._put_failed(number + 1, error)
                part = b""  # says: see the envelope
            self._over_gloo(lambda group, deadline: send_headed(group, part, deadline=deadline, **where))
            parts.append(part)
        self._phase.sent_nbytes += sum(map(len, parts))

    def _over_gloo(self, move: Callable[[GlooGroup, Deadline], bytes | None]) -> bytes:
        try:
            group = self._channel.open_group(self._config.plan_timeout)
            return move(group, Deadline(self._config.plan_timeout)) or b""
        except TransportError as error:
            # The coordinator usually knows better what happened, such as which rank died.
            self._give_up(self._describe_like(error))

    def _await_verdict(self) -> Send | Done | Moved:
        """Return the next verdict that lets this rank go on, or raise what it says."""
        channel, key = self._channel, self._verdict_key(self._num_verdicts)
        deadline = Deadline(self._config.plan_timeout)
        last_life = b""
        was_here = False
        is_lost: list[int] = []
        probe = Deadline(_PROBE)
        progress = Deadline(self._config.progress_interval)
        waiting = Deadline(None)

        def tick() -> bool:
            nonlocal last_life, was_here
            life = channel.lives([channel.coordinator])[0]
            if life != last_life:
                # A coordinator that is alive in this very save ends a hopeless wait by itself.
                last_life = life
                if channel.is_in_this_save(life):
                    was_here = True
                    deadline.restart()
            if progress.is_over:
                progress.restart()
                _logger.info(
                    "%s: waiting for %.0f s for the coordinator, which is %s",
                    self._identity,
                    waiting.elapsed.total_seconds(),
                    channel.activity_in(life),
                )
            if probe.is_over:
                probe.restart()
                is_lost[:] = channel.find_lost([channel.coordinator])
            return not (deadline.is_over or is_lost)

        if not self._control.wait([key], tick=tick):
            if is_lost:
                self._give_up(self._describe_loss(is_lost, deadline))
            grace = _VERDICT_GRACE if was_here else timedelta(0)
            self._give_up(
                self._describe(
                    CoordinationTimeout,
                    "the coordinator " + ("shows no sign of life any more" if was_here else "never entered"),
                    ranks=[channel.coordinator],
                    elapsed=deadline.elapsed,
                    advice=(
                        "find out whether that rank called the save, with coordination on, and whether it is "
                        "frozen or gone"
                    ),
                ),
                grace,
            )
        return self._read_verdict(key)

    def _read_verdict(self, key: str) -> Send | Done | Moved:
        self._num_verdicts += 1
        try:
            verdict = decode_verdict(self._control.read_many([key])[0])
        except WireError as error:
            self._concluded = True
            self._put_failed(self._num_exchanges, error)
            self._channel.leave_without_verdict(f"{self._base}quit", _show(error))
            raise self._describe(
                CoordinationMismatch,
                f"the coordinator's verdict cannot be read: {error}",
                ranks=[self._channel.coordinator, self._channel.group_rank],
                advice="install the same version of gloo-coordinated-planner on all ranks",
            ) from error
        if isinstance(verdict, Abort):
            self._concluded = True
            self._channel.note_abort()
            self._control.delete([self._up_key(self._num_exchanges - 1, self._channel.group_rank)])
            self._raise_abort(verdict)
        return verdict

    def _give_up(self, error: CoordinationError, verdict_grace: timedelta = _VERDICT_GRACE) -> NoReturn:
        """Leave this save; raise the coordinator's reason if it gives one soon, else ``error``."""
        grace = Deadline(verdict_grace)
        try:
            self._channel.leave_without_verdict(f"{self._base}quit", error.summary[:300])
            while self._control.wait([self._verdict_key(self._num_verdicts)], tick=lambda: not grace.is_over):
                # Raises at an abort; a verdict of another kind came too late to be followed.
                self._read_verdict(self._verdict_key(self._num_verdicts))
        except TransportError as reason:
            if self._concluded:
                raise
            error.__cause__ = error.__cause__ or reason  # the store is out of reach too
            error.details |= {"meanwhile": reason.summary}
        self._concluded = True
        raise error

    def _put_failed(self, number: int, error: BaseException) -> None:
        frame = encode_failure(error, strict=self._config.strict)
        envelope = Envelope(self._identity, failure=frame)
        key = self._up_key(number, self._channel.group_rank)
        self._control.put(key, envelope.encode())
        self._control.put(f"{self._base}alarm", b"1")
        self._channel.litter.append(key)

    def _unexpected(self, verdict: Verdict) -> CoordinationError:
        return self._describe(
            CoordinationError,
            f"the coordinator answered {verdict} where it had to abort or go on",
            ranks=[self._channel.coordinator],
            advice="report this as a bug of gloo-coordinated-planner",
        )

    # -- on the coordinator --------------------------------------------------------------------------

    def _coordinate(
        self,
        number: int,
        reduce: Callable[[list[list[bytes] | None]], Reply | None],
        deadline: Deadline,
        *,
        asks_for_later: bool,
    ) -> None:
        channel = self._channel
        self._control.put(self._up_key(number, channel.group_rank), b"")
        envelopes = self._collect(number, deadline)
        if number == 0:
            self._control.delete(channel.take_litter())  # all are past the save before
        received = self._receive(number, envelopes, asks_for_later=asks_for_later)
        channel.activity = f"reducing what all ranks sent in phase {self._identity.phase!r}"
        try:
            reply = reduce(received)
        except PeerFailures as peers:
            self._abort_failures(self._identity.phase, peers.failures)
        except BaseException as error:  # noqa: BLE001 - whatever it is, all ranks must hear of it
            self._local_failure = error
            self._abort_failures(self._identity.phase, {channel.group_rank: error})
        replies: dict[int, Sequence[bytes]] = {}
        if reply is not None:
            replies = {
                rank: reply.to_each[rank] if reply.to_each is not None else reply.to_all or (b"",)
                for rank in channel.peers
            }
        done = choose_replies(replies, envelopes)
        if num_new := sum(1 for mask in map(done.mask_of, replies) if mask & lasting_mask(done.num_parts)):
            self.miss(f"{num_new} of {channel.world_size} ranks did not know the reply")
        self._publish(done)
        self._scatter(number, replies, done)
        self._control.delete([self._up_key(number, channel.group_rank)])

    def _collect(self, number: int, deadline: Deadline) -> dict[int, Envelope]:
        """Return the envelopes of all other ranks, or abort."""
        channel, control = self._channel, self._control
        keys = {rank: self._up_key(number, rank) for rank in channel.peers}
        failed_since = None if self._local_failure is None else Deadline(_FAILURE_GRACE)
        progress = Deadline(self._config.progress_interval)
        probe = Deadline(_PROBE if channel.world_size <= _NUM_RANKS_OF_FEW else _PROBE_OF_MANY)
        silence = SilenceWatch(channel, self._config.plan_timeout)
        entering = Deadline(self._config.plan_timeout)
        waiting = Deadline(None)
        arrived: dict[int, float] = {}
        silent: list[int] = []
        lost: list[int] = []

        def note_arrivals() -> list[int]:
            there = control.present(list(keys.values()))
            now = waiting.elapsed.total_seconds()
            for rank, is_there in zip(keys, there, strict=True):
                if is_there:
                    arrived.setdefault(rank, now)
            return [rank for rank in keys if rank not in arrived]

        def tick() -> bool:
            nonlocal failed_since
            absent = note_arrivals()
            if number == 0:
                channel.welcome(absent)
            if failed_since is None and self._is_troubled():
                failed_since = Deadline(_FAILURE_GRACE)
            if progress.is_over and absent:
                progress.restart()
                self._log_progress(absent, waiting)
            silent.extend(silence.look(absent, have_entered=number > 0))
            if probe.is_over:
                probe.restart()
                lost[:] = channel.find_lost(absent)
            is_over = deadline.is_over
            if number == 0 and deadline.remaining_s > 0 and entering.is_over:
                # Also where the deadline is that of reading or writing, a rank has to enter in time.
                is_over = not all(map(channel.is_in_this_save, channel.lives(absent)))
            is_hopeless = bool(silent or lost) or is_over
            return not (is_hopeless or (failed_since is not None and failed_since.is_over))

        if number == 0 and channel.strangers:
            self._control.wait([f"hello/{rank}" for rank in channel.strangers], tick=tick)
            channel.welcome(channel.strangers)
        complete = control.wait(list(keys.values()), tick=tick)
        if lost and not complete:  # what ended one process may end others just now, and all shall be named
            grace = Deadline(_LOSS_GRACE)
            self._control.wait_until(
                lambda: len(channel.find_lost(absent := note_arrivals())) == len(absent),
                tick=lambda: not grace.is_over,
            )
            lost = channel.find_lost(note_arrivals())
        absent = [] if complete else note_arrivals()
        self._absent = tuple(absent)
        if arrived or absent:  # else nobody had to be waited for
            latest = [rank for rank in keys if rank not in arrived]
            order = [*sorted(arrived, key=lambda rank: arrived[rank]), *latest]
            self._phase.last_ranks = tuple(order[-_NUM_LAST_RANKS:])
        lost = [rank for rank in lost if rank in absent]
        envelopes, failures = self._open(keys, absent)
        if absent:  # a rank that was interrupted in this exchange has left word in the next
            failures |= self._read_failures(number + 1)
        if self._local_failure is not None:
            failures[channel.group_rank] = self._encode(self._local_failure)
        if failures:
            self._abort_frames(self._identity.phase, failures)
        if lost:
            self._abort(self._describe_loss(lost, waiting))
        if absent:
            self._abort_absent(absent, silent, waiting, is_first=number == 0)
        return envelopes

    def _is_troubled(self) -> bool:
        """Whether a rank has failed in this save, or has left it, or never came to it from the one before."""
        if self._control.exists([self._quit_before]):
            return True
        return self._control.exists([f"{self._base}alarm"]) or self._control.exists([f"{self._base}quit"])

    def _open(
        self, keys: Mapping[int, str], absent: Sequence[int]
    ) -> tuple[dict[int, Envelope], dict[int, bytes]]:
        """Read the envelopes that are there; abort if they do not belong together."""
        here = [rank for rank in keys if rank not in absent]
        envelopes: dict[int, Envelope] = {}
        identities: dict[str, list[int]] = defaultdict(list)
        mine = str(self._identity)
        identities[mine].append(self._channel.group_rank)
        for rank, data in zip(here, self._control.read_many([keys[rank] for rank in here]), strict=True):
            try:
                envelopes[rank] = Envelope.decode(data)
            except WireError as error:
                identities[f"an envelope that cannot be read ({error})"].append(rank)
            else:
                envelope = envelopes[rank]
                # A storage whose checkpoint_id raised cannot name its checkpoint, only fail.
                theirs = envelope.identity
                if envelope.failure is not None:  # it may have failed before it knew more than that
                    named = theirs.checkpoint or self._checkpoint
                    theirs = replace(self._identity, operation=theirs.operation, checkpoint=named)
                elif self._local_failure is not None:  # so may this rank
                    theirs = replace(theirs, mode="")
                identities[str(theirs)].append(rank)
        if len(identities) > 1:
            self._abort(
                self._describe(
                    CoordinationMismatch,
                    "the ranks are not in the same operation",
                    ranks=[rank for text, ranks in identities.items() if text != mine for rank in ranks],
                    advice=(
                        "every rank must make the same calls in the same order, with the same checkpoint_id "
                        "and the same version of gloo-coordinated-planner"
                    ),
                    details={
                        f"group ranks {format_ranks(ranks)}": text for text, ranks in identities.items()
                    },
                )
            )
        failures = {
            rank: envelope.failure for rank, envelope in envelopes.items() if envelope.failure is not None
        }
        return envelopes, failures

    def _receive(
        self, number: int, envelopes: Mapping[int, Envelope], *, asks_for_later: bool
    ) -> list[list[bytes] | None]:
        """Return each other rank's parts, having asked for them."""
        digests = {part_digest for envelope in envelopes.values() for part_digest, _ in envelope.parts}
        known = {d: part for d in digests if (part := self.find(d)) is not None}
        self._phase.remembered_nbytes += sum(
            nbytes for envelope in envelopes.values() for d, nbytes in envelope.parts if d in known
        )
        wanted, verdict = choose_parts(envelopes, known)
        later = [rank for rank, envelope in envelopes.items() if asks_for_later and envelope.has_later]
        parts: dict[bytes, bytes] = {digest(b""): b"", **known}
        known_or_empty = parts.keys()
        if num_new := sum(
            any(d not in known_or_empty for d, _ in envelope.parts) for envelope in envelopes.values()
        ):
            self.miss(f"{num_new} of {self._channel.world_size} ranks had new parts")
        if wanted or later:
            self._publish(replace(verdict, later=bool(later)))
            received_parts = self._gather(number, envelopes, wanted)
            for part_digest, part in received_parts.items():
                self.remember(part_digest, part, len(part))
            parts |= received_parts
        received: list[list[bytes] | None] = [None] * self._channel.world_size
        for rank, envelope in envelopes.items():
            received[rank] = [parts[part_digest] for part_digest, _ in envelope.parts]
        for rank, part in self._gather_later(number, later).items():
            received[rank] = [*(received[rank] or []), part]
        return received

    def _gather_later(self, number: int, ranks: Sequence[int]) -> dict[int, bytes]:
        parts: dict[int, bytes] = {}
        if not ranks:  # so that an exchange of envelopes alone makes no group
            return parts
        try:
            group = self._channel.open_group(self._config.plan_timeout)
            deadline = Deadline(self._config.plan_timeout)
            for rank in ranks:
                parts[rank] = receive_headed(group, from_rank=rank, tag=self._tag(number), deadline=deadline)
                self._phase.received_nbytes += len(parts[rank])
        except TransportError as error:
            self._abort_transport(number, error)
        if failed := [rank for rank, part in parts.items() if not part]:
            self._abort_transport(
                number, TransportError("ranks could not make the part they were asked for", ranks=failed)
            )
        return parts

    def _gather(
        self, number: int, envelopes: Mapping[int, Envelope], wanted: Mapping[int, Sequence[int]]
    ) -> dict[bytes, bytes]:
        parts: dict[bytes, bytes] = {}
        damaged: dict[int, BaseException] = {}
        sizes = {rank: [envelopes[rank].parts[part][1] for part in chosen] for rank, chosen in wanted.items()}
        try:
            group = self._channel.open_group(self._config.plan_timeout)
            deadline = Deadline(self._config.plan_timeout)
            for rank, received in gather(group, sizes, tag=self._tag(number), deadline=deadline):
                for part, data in zip(wanted[rank], received, strict=True):
                    self._phase.received_nbytes += len(data)
                    promised = envelopes[rank].parts[part][0]
                    if digest(data) != promised:
                        damaged[rank] = WireError(
                            f"part {part} of group rank {rank} in phase {self._identity.phase!r}, "
                            f"{len(data):,} bytes, has digest {digest(data).hex()}, but its envelope "
                            f"promised {promised.hex()}; it was not used"
                        )
                    parts[promised] = data
        except TransportError as error:
            self._abort_transport(number, error)
        if damaged:
            self._abort_failures(self._identity.phase, damaged)
        return parts

    def _scatter(self, number: int, replies: Mapping[int, Sequence[bytes]], done: Done) -> None:
        for position in range(done.num_parts):
            parts = {
                rank: reply[position] for rank, reply in replies.items() if done.mask_of(rank) >> position & 1
            }
            if not parts:
                continue
            try:
                group = self._channel.open_group(self._config.plan_timeout)
                scatter(group, parts, tag=self._tag(number), deadline=Deadline(self._config.plan_timeout))
            except TransportError as error:
                self._abort_transport(number, error)
            self._phase.sent_nbytes += sum(map(len, parts.values()))

    def _publish(self, verdict: Verdict) -> None:
        self._control.put(self._verdict_key(self._num_verdicts), encode_verdict(verdict))
        # Whoever put the envelope this answers has read all verdicts before the last two.
        if self._num_verdicts >= 2:  # noqa: PLR2004
            self._control.delete([self._verdict_key(self._num_verdicts - 2)])
        self._num_verdicts += 1

    # -- ends ----------------------------------------------------------------------------------------

    def _abort_failures(self, step: str, failures: Mapping[int, BaseException]) -> NoReturn:
        self._abort_frames(step, {rank: self._encode(error) for rank, error in failures.items()})

    def _abort_frames(self, step: str, failures: Mapping[int, bytes]) -> NoReturn:
        by_frame: dict[bytes, list[int]] = defaultdict(list)
        for rank, frame in sorted(failures.items()):
            by_frame[frame].append(rank)
        frames = list(by_frame.items())
        if len(frames) > _MAX_FAILURE_FRAMES:
            more = [rank for _, ranks in frames[_MAX_FAILURE_FRAMES:] for rank in ranks]
            stand_in = self._encode(
                RemoteError("planner.errors.RemoteError", "left out; see this rank's own log")
            )
            frames = [*frames[:_MAX_FAILURE_FRAMES], (stand_in, more)]
        abort = Abort(step=step, failures=frames)
        first = decode_failure(frames[0][0])[0]
        self._end(
            abort,
            self._describe(
                CoordinationError,
                f"it failed on group ranks {format_ranks(failures)} before this rank came: {_show(first)}",
                ranks=self._absent,
                advice="see those ranks' logs; saving again works",
            ),
        )
        self._raise_abort(abort)

    def _abort_absent(
        self, absent: Sequence[int], silent: Sequence[int], waiting: Deadline, *, is_first: bool
    ) -> NoReturn:
        if silent:
            summary = f"{len(silent)} of {self._channel.world_size} ranks show no sign of life"
        elif is_first:
            summary = f"{len(absent)} of {self._channel.world_size} ranks never entered"
        else:
            summary = f"{len(absent)} of {self._channel.world_size} ranks did not finish in time"
        self._abort(
            self._describe(
                CoordinationTimeout,
                summary,
                ranks=silent or absent,
                elapsed=waiting.elapsed,
                advice=(
                    "look at those ranks' logs: did they raise, exit, or freeze, or call the save without "
                    "GlooCoordinatedPlanner, or with coordination off? If they are only slow, raise "
                    "plan_timeout (or io_timeout)"
                ),
            )
        )

    def _abort_transport(self, number: int, error: TransportError) -> NoReturn:
        """Abort after the group failed; a rank that left with a failure of its own is the better cause."""
        grace = Deadline(_FAILURE_GRACE)
        self._control.wait_until(self._is_troubled, tick=lambda: not grace.is_over)
        failures = self._read_failures(number + 1)
        if failures:
            self._abort_frames(self._identity.phase, failures)
        described = self._describe_like(error)
        if (data := self._control.read(f"{self._base}quit")) is not None:
            reason = data[:400].decode(errors="replace")
            described.details |= {"meanwhile": reason}
            if is_out_of_reach(reason):
                described.advice = ADVICE_OUT_OF_REACH
        self._abort(described)

    def _read_failures(self, number: int) -> dict[int, bytes]:
        """Return the failure frames that ranks have put for an exchange, by rank."""
        peers = self._channel.peers
        found = self._control.read_present([self._up_key(number, rank) for rank in peers])
        failures = {}
        for rank, data in zip(peers, found, strict=True):
            with suppress(WireError):
                envelope = None if data is None else Envelope.decode(data)
                if envelope is not None and envelope.failure is not None:
                    failures[rank] = envelope.failure
        return failures

    def _abort(self, error: CoordinationError) -> NoReturn:
        self._end(Abort(error=error.to_fields()), error)
        raise error

    def _end(self, abort: Abort, ended: CoordinationError | None) -> None:
        """Tell all ranks, and begin a new epoch: after an abort one cannot know where each rank is."""
        self._concluded = True
        names = ["alarm", "quit", *(f"v/{number}" for number in range(self._num_verdicts + 1))]
        names.append(f"u/{self._num_exchanges - 1}/{self._channel.group_rank}")
        self._channel.litter += [f"{self._base}{name}" for name in names]
        try:
            self._channel.begin_epoch(ended, self._absent if self._num_exchanges <= 1 else ())
            self._control.put(self._verdict_key(self._num_verdicts), encode_verdict(abort))
        except TransportError:
            # The cause of the abort is raised here all the same; the others meet the lost store themselves.
            _logger.warning("could not tell the other ranks that %s ends", self._identity, exc_info=True)

    def _raise_abort(self, abort: Abort) -> NoReturn:
        if abort.error is not None:
            raise CoordinationError.from_fields(abort.error)
        failures = {}
        for frame, ranks in abort.failures:
            for rank in ranks:
                failures[rank] = decode_failure(frame)
        # The same on all ranks, and able to travel on; this rank's own exception is its cause.
        raise CheckpointException(abort.step, failures) from self._local_failure

    # -- small things --------------------------------------------------------------------------------

    def _up_key(self, number: int, rank: int) -> str:
        return f"{self._base}u/{number}/{rank}"

    def _verdict_key(self, number: int) -> str:
        return f"{self._base}v/{number}"

    def _tag(self, number: int) -> int:
        return (self._save_number * _MAX_EXCHANGES + number) % 2**30

    def _encode(self, error: BaseException) -> bytes:
        return encode_failure(error, strict=self._config.strict)

    def _log_progress(self, absent: Sequence[int], waiting: Deadline) -> None:
        _logger.warning(
            "%s: waiting for %d of %d ranks for %.0f s; not there: group ranks %s",
            self._identity,
            len(absent),
            self._channel.world_size,
            waiting.elapsed.total_seconds(),
            format_ranks(absent),
        )

    def _describe_loss(self, ranks: Sequence[int], waiting: Deadline) -> CoordinationError:
        return self._describe(
            TransportError,
            f"the connection to {len(ranks)} of {self._channel.world_size} ranks has ended, as it does when "
            "their process does",
            ranks=ranks,
            elapsed=waiting.elapsed,
            advice="look at those ranks' logs, and at their hosts' for a kill for want of memory",
        )

    def _describe(self, kind: type[CoordinationError], summary: str, **facts: object) -> CoordinationError:
        return kind(
            summary,
            operation=self._operation,
            checkpoint=self._checkpoint,
            phase=self._identity.phase,
            **facts,  # type: ignore[arg-type]  # the keyword arguments of CoordinationError
        )

    def _describe_like(self, error: CoordinationError) -> CoordinationError:
        described = self._describe(type(error), error.summary, ranks=error.ranks, advice=error.advice)
        described.__cause__ = error
        return described


def _show(error: BaseException) -> str:
    """Write an exception shortly, whatever its ``repr`` does."""
    try:
        return repr(error)[:300]
    except Exception:  # noqa: BLE001 - this must not hide what it is about
        return type(error).__name__
