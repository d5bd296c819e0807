"""The replacement for DCP's ``_DistWrapper``: the same methods, over the store and gloo.

Rule of this file: what DCP means lives here (steps, plans, who computes what); how ranks agree lives
in planner.exchange, and what bytes look like in planner.wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.utils import _DistWrapper

from planner.channel import Channel, open_channel
from planner.column_plans import LocalPlans, PendingItems, PlanFrames, Planned, build_own_plan
from planner.config import CoordinationConfig
from planner.errors import UnencodableError, WireError
from planner.exchange import Exchange, Local, PeerFailures, Reply
from planner.lazy_metadata import read_metadata_later
from planner.pending import is_pending, look_at, remake
from planner.plain_finish import Finish
from planner.report import SaveReport
from planner.save_columns import DamagedResults, ResultLists, read_results
from planner.wire.frame import digest
from planner.wire.gc_pause import paused_gc
from planner.wire.messages import (
    decode_reply,
    decode_value,
    encode_reply,
    encode_value,
    is_metadata,
    is_plan,
    is_results,
)
from planner.wire.metadata import decode_metadata
from planner.wire.outline import PlanOutline, outline_of
from planner.wire.plans import PlanSchema, encode_plan

__all__ = ["GlooDistWrapper"]

T = TypeVar("T")
R = TypeVar("R")

_NO_RESULTS = encode_value([], path="results", strict=True)
_IO_STEPS = frozenset(
    {"write", "read", "barrier"}
)  # the barrier of use_collectives=False waits for writes too


class GlooDistWrapper(_DistWrapper):
    """Coordinate the members of a process group without using that group.

    Has the whole surface of ``torch.distributed.checkpoint.utils._DistWrapper`` (torch 2.9 to 2.15).
    ``group`` says who takes part and stays what the caller passed, since DCP's logger asks c10d about
    it; every exchange goes over the default group's store and a dedicated gloo group. With one member,
    or without ``use_dist``, everything is local and no group is made.

    Inside a save or load of DCP all calls of one wrapper form one exchange of identity; used on its
    own, each call is matched by itself. All methods but ``get_rank`` and ``get_world_size`` are
    collective over the members, and raise ``CoordinationError`` when the ranks do not come to an
    agreement within the configured times; the next call works again.

    Args:
        group: who takes part; None for all.
        use_dist: False for a save or load by this process alone.
        coordinator_rank: the coordinator's rank in ``group``.
        operation: ``save`` or ``load``, for identity, errors and the report.
        checkpoint: the checkpoint's id as text, the same.
        config: how to coordinate; None for the defaults.
        leaves_plans: whether the global step returns every plan as it was, so that none need travel;
            the coordinator's word counts.
        is_pure: whether the global step is known not to change plans in place; the coordinator's word
            counts.
        plain_finish: makes the finish of a storage that finishes as DCP's own does, or None for any other;
            the coordinator's counts.
        mode_of: given a step's local function after it has run, what must be the same on all ranks.

    Raises:
        ValueError: this rank is not a member of ``group``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        use_dist: bool,  # noqa: FBT001 - the signature of the stock class
        coordinator_rank: int,
        *,
        operation: str = "collective",
        checkpoint: str = "",
        config: CoordinationConfig | None = None,
        leaves_plans: Callable[[], bool] = lambda: False,
        is_pure: Callable[[], bool] = lambda: False,
        plain_finish: Callable[[ResultLists], Finish | None] = lambda _: None,
        mode_of: Callable[[Callable[[], Any]], str] = lambda _: "",
    ) -> None:
        if use_dist and dist.get_rank(group) < 0:
            raise ValueError(
                f"global rank {dist.get_rank()} is not a member of the process group with ranks "
                f"{dist.get_process_group_ranks(group)}; only members may save or load with it"
            )
        num_members = dist.get_world_size(group) if use_dist else 1
        if not 0 <= coordinator_rank < num_members:
            raise ValueError(f"coordinator_rank is {coordinator_rank}, but the group has {num_members} ranks")
        super().__init__(group, use_dist, coordinator_rank)
        self._operation = operation
        self._checkpoint = checkpoint
        self._config = config or CoordinationConfig()
        self._leaves_plans = leaves_plans
        self._is_pure = is_pure
        self._plain_finish = plain_finish
        self._mode_of = mode_of
        self._world_size = num_members
        # With one member the stock class's local branches are all there is to do.
        self.use_dist = use_dist and self._world_size > 1
        self._session: Exchange | None = None
        self._local_plan: SavePlan | PlanOutline | None = None
        self._final_plan: SavePlan | None = None
        # The coordinator's:
        self._final_plans: dict[int, SavePlan] = {}  # what each rank was sent
        self._local_plans: LocalPlans | None = None  # in columns, where planning may go on them
        self._plans_digest = b""  # of what all ranks sent for them
        # What planning came to, where all final plans are as it made them.
        self._planned: Planned | None = None

    # -- the whole of one save or load -------------------------------------------------------------

    def begin(self, reserved: tuple[Channel, object] | None = None) -> None:
        """Enter one save or load, of which all calls up to ``end`` are parts; see ``Exchange``.

        Args:
            reserved: a turn, and the channel that it was taken from; None to take one now.
        """
        # A turn is of a save by several ranks. Without process groups by now DCP takes this process for a job
        # of one, which would write its own part over those of the others: entering raises then.
        if self.use_dist or reserved is not None:
            self._session = self._new_exchange(reserved).__enter__()

    def end(self, error: BaseException | None) -> SaveReport:
        """End what ``begin`` began; an ``error`` that the other ranks do not know of reaches them."""
        session, self._session = self._session, None
        if session is None:
            return SaveReport(self._operation, self._checkpoint, self._world_size)
        session.__exit__(type(error) if error else None, error, None)
        return session.report

    @contextmanager
    def _exchange(self) -> Iterator[Exchange]:
        if self._session is not None:
            yield self._session
        else:
            with self._new_exchange() as exchange:
                yield exchange

    def _new_exchange(self, reserved: tuple[Channel, object] | None = None) -> Exchange:
        channel, turn = reserved or (open_channel(self.group, self.coordinator_rank), None)
        return Exchange(
            channel,
            operation=self._operation,
            checkpoint=self._checkpoint,
            config=self._config,
            turn=turn,
        )

    # -- DCP's steps ---------------------------------------------------------------------------------

    def get_world_size(self) -> int:
        """Return the number of members."""
        return self._world_size

    def reduce_scatter(
        self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], list[R]]
    ) -> R:
        """Compute a value on each rank, reduce all on the coordinator, give each rank its part of the result.

        Called on all members. Blocks up to ``plan_timeout`` in each wait; see the class.

        Raises:
            CheckpointException: ``map_fun`` or ``reduce_fun`` raised; the same on all ranks.
        """
        if not self.use_dist:
            return super().reduce_scatter(step, map_fun, reduce_fun)
        return self._run(step, map_fun, reduce_fun, to_each=True)  # type: ignore[no-any-return]  # what came over the wire

    def all_reduce(self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], R]) -> R:
        """Compute a value on each rank, reduce all on the coordinator, give the result to every rank.

        Called on all members. While ranks are in ``map_fun`` of step ``write``, ``io_timeout`` holds.

        Raises:
            CheckpointException: ``map_fun`` or ``reduce_fun`` raised; the same on all ranks.
        """
        if not self.use_dist:
            return super().all_reduce(step, map_fun, reduce_fun)
        return self._run(step, map_fun, reduce_fun)  # type: ignore[no-any-return]

    def all_gather(self, step: str, map_fun: Callable[[], T]) -> list[T]:
        """Compute a value on each rank and give all values, by group rank, to every rank.

        Called on all members. While ranks are in ``map_fun`` of step ``read``, ``io_timeout`` holds.

        Raises:
            CheckpointException: ``map_fun`` raised; the same on all ranks.
        """
        if not self.use_dist:
            return super().all_gather(step, map_fun)
        return self._run(step, map_fun, list)  # type: ignore[no-any-return]

    def broadcast(self, step: str, map_fun: Callable[[], T]) -> T:
        """Compute a value on the coordinator and give it to every rank; called on all members.

        Raises:
            CheckpointException: ``map_fun`` raised; the same on all ranks.
        """
        if not self.use_dist:
            return super().broadcast(step, map_fun)
        return self._run(  # type: ignore[no-any-return]
            step, lambda: map_fun() if self.is_coordinator else None, lambda values: values[self.rank]
        )

    def barrier(self) -> None:
        """Wait for all members; called on all of them."""
        if self.use_dist:
            self._run("barrier", lambda: None, None)

    # -- plain objects -------------------------------------------------------------------------------

    def broadcast_object(self, object: T | None) -> T:  # noqa: A002 - the name in the stock class
        """Give the coordinator's ``object`` to every rank; called on all members."""
        if not self.use_dist:
            return super().broadcast_object(object)
        return self.broadcast("broadcast_object", lambda: object)  # type: ignore[return-value]

    def gather_object(self, object: T) -> list[T] | None:  # noqa: A002 - the name in the stock class
        """Return all ranks' objects on the coordinator, by group rank, else None; called on all members."""
        if not self.use_dist:
            return super().gather_object(object)
        gathered: list[T] = []
        self._run("gather_object", lambda: object, gathered.extend, replies=False)
        return gathered if self.is_coordinator else None

    def all_gather_object(self, object: T) -> list[T]:  # noqa: A002 - the name in the stock class
        """Return all ranks' objects by group rank, on every rank; called on all members."""
        if not self.use_dist:
            return super().all_gather_object(object)
        return self.all_gather("all_gather_object", lambda: object)

    def scatter_object(self, object_list: list[T] | None) -> T:
        """Give each rank its element of the coordinator's list; called on all members."""
        if not self.use_dist:
            return super().scatter_object(object_list)
        return self.reduce_scatter("scatter_object", lambda: None, lambda _: object_list or [])

    # -- all of them ---------------------------------------------------------------------------------

    def _run(
        self,
        step: str,
        map_fun: Callable[[], Any],
        reduce_fun: Callable[[list[Any]], Any] | None,
        *,
        to_each: bool = False,
        replies: bool = True,
    ) -> Any:
        """Run one exchange; ``reduce_fun`` None: nothing travels at all."""
        mine: Any = None
        result: Any = None
        is_plan = False
        strict = self._config.strict

        def produce() -> Local:
            nonlocal mine, is_plan
            # A load's local step unpickles the checkpoint's metadata, which takes the collector three times
            # as long as it takes without, on every rank; none of it is garbage.
            reads_metadata = self._operation == "load" and step == "plan"
            with exchange.working(), paused_gc() if reads_metadata else nullcontext():
                mine = map_fun()
            mode = self._mode_of(map_fun)
            is_plan = self._note_local_plan(mine)
            if reduce_fun is None or self.is_coordinator or mine is None:
                return Local(mode=mode)
            path = f"{step} of group rank {self.rank}"
            if type(mine) is LoadPlan:  # the global step of most loads leaves plans as they are
                return Local(later=lambda: encode_reply(mine, path=path, strict=strict)[0], mode=mode)
            if is_plan:
                return Local(self._encode_local_plan(path, exchange, strict=strict), mode=mode)
            parts = encode_value(mine, base=self._final_plan, path=path, strict=strict)
            return Local(parts, mode=mode)

        def reduce(received: list[list[bytes] | None]) -> Reply | None:
            nonlocal result
            if reduce_fun is None:
                return None
            if leaves_plans:
                with exchange.working():
                    result = {self.rank: reduce_fun([mine])[0]}
                return None
            values: Sequence[Any] | None = None
            is_pure = to_each and self._is_pure()
            if is_pure and is_plan:
                values = self._local_plans = self._decode_columns(received, mine, exchange)
            elif type(mine) is list and not to_each:
                values = self._decode_results(received, mine, exchange)
            if isinstance(values, ResultLists):
                return Reply(to_all=finish(values, reduce_fun))
            if values is None:
                values = self._decode(received, mine)
            with exchange.working():
                result = reduce_fun(values)  # type: ignore[arg-type]  # DCP takes any sequence there
            is_nothing = reduce_fun is list and result == [None] * self._world_size
            if not replies or is_nothing:
                return None
            if not to_each:
                return Reply(to_all=encode_reply(result, path=step, strict=strict))
            if len(result) != self._world_size:
                raise ValueError(f"step {step!r} made {len(result)} results for {self._world_size} ranks")
            if not is_pure:  # differences are to what the ranks have, not to what became of it here
                values = self._decode(received, mine)
            return Reply(to_each=self._encode_each(step, received, values, result, exchange))

        def finish(results: ResultLists, reduce_fun: Callable[[list[Any]], Any]) -> Sequence[bytes]:
            """Have the storage finish, and encode what it returns, from columns if those are sure to hold."""
            nonlocal result
            planned = results.planned.metadata
            plain = self._plain_finish(results)
            with exchange.working(), plain.in_place() if plain else nullcontext():
                result = reduce_fun(list(results) if plain is None else results)  # type: ignore[arg-type]
            rest = None if plain is None else plain.written
            parts = None
            if rest is not None or is_pending(planned):
                parts = results.encode_metadata(rest, strict=strict)
            if parts is not None and rest is not None:
                remake(planned, lambda: decode_metadata(parts))
            if parts is None or result is not planned:
                exchange.miss("the storage or the planner may have changed the metadata")
                return encode_reply(result, path=step, strict=strict)
            if results.storage_part is not None and not results.is_remembered:
                exchange.miss("where all is stored was put together anew")
                exchange.remember(results.digest, results.storage_part, len(results.storage_part))
            return parts

        with self._exchange() as exchange:
            leaves_plans = to_each and step == "plan" and self._leaves_plans()
            reply = exchange.run(
                step, produce, reduce, is_io=step in _IO_STEPS, asks_for_later=not leaves_plans
            )
            if self.is_coordinator:
                return self._own_part(result) if to_each else result
            if to_each and not any(reply or ()):
                return mine  # the plan as it was
            if reply is None:
                return [None] * self._world_size if reduce_fun is list else None
            try:
                value = (
                    read_metadata_later(reply)
                    if is_metadata(reply)
                    else decode_reply(reply, base=self._local_plan)
                )
            except WireError as error:
                raise CheckpointException(step, {self.rank: _wrap_exception(error)}) from error
            if to_each and type(value) is SavePlan:
                self._final_plan = value
            return value

    def _note_local_plan(self, mine: Any) -> bool:
        """Keep what this rank has for a local plan, unless it is none."""
        outline = outline_of(mine)
        if outline is None and type(mine) is not SavePlan:
            return False
        self._local_plan = mine if outline is None else outline
        return True

    def _encode_local_plan(self, path: str, exchange: Exchange, *, strict: bool) -> tuple[bytes, bytes]:
        """Encode this rank's local plan, or have it from an earlier save in which it was the same."""
        plan = self._local_plan
        key = None
        if isinstance(plan, PlanOutline) and (told := plan.digest()) is not None:
            key = b"plan:" + told  # one with a digest has nothing that strict would refuse
            if (known := exchange.find(key)) is not None:
                return known  # type: ignore[no-any-return]  # what is remembered below
        assert plan is not None  # noqa: S101 - only called with one
        parts = encode_plan(plan, path=path, strict=strict)
        if key is not None:
            exchange.remember(key, parts, sum(map(len, parts)))
        return parts

    def _decode_columns(
        self, received: list[list[bytes] | None], mine: SavePlan, exchange: Exchange
    ) -> LocalPlans | None:
        """Return the ranks' local plans in columns, or None where some are no such plans."""
        try:
            own_parts = self._encode_local_plan("plan of the coordinator", exchange, strict=True)
        except UnencodableError:
            return None  # it need not travel, and as it is it is no plan in columns
        frames: list[tuple[bytes, bytes]] = []
        for parts in received:
            schema_frame, *bodies = own_parts if parts is None else parts or (b"",)
            if not is_plan(schema_frame) or len(bodies) != 1:
                return None
            frames.append((schema_frame, bodies[0]))
        columns = PlanFrames(frames)
        self._plans_digest = _digest_of(b"plans:", [part for parts in frames for part in parts])
        remembered = exchange.find(self._plans_digest)
        if remembered is None and (damaged := columns.read()):  # else all have been read before
            raise PeerFailures(damaged)
        return LocalPlans(columns, self.rank, mine, remembered)

    def _decode_results(
        self, received: list[list[bytes] | None], mine: list[Any], exchange: Exchange
    ) -> ResultLists | None:
        """Return the ranks' results in columns, or None where some are no plain ones."""
        planned = self._planned
        if planned is None:
            return None
        try:
            own_parts = encode_value(mine, base=self._final_plan, path="results", strict=True)
        except UnencodableError:
            return None
        frames: list[bytes | None] = []
        for given in received:
            parts = own_parts if given is None else given
            if len(parts) == 1 and is_results(parts[0]):
                frames.append(parts[0])
            elif tuple(parts) == _NO_RESULTS:
                frames.append(None)
            else:
                return None
        key = _digest_of(
            b"results:", [self._plans_digest, bytes(planned.settings), *(f or b"" for f in frames)]
        )
        try:
            return read_results(planned, frames, key, exchange.find(key))
        except DamagedResults as error:
            raise PeerFailures(error.damaged) from error

    def _own_part(self, result: Sequence[Any]) -> Any:
        """Return the coordinator's own part of what was reduced."""
        own = result[self.rank]
        if isinstance(own, SavePlan) and isinstance(own.items, PendingItems):
            final = own.items.encode(own, path="plan", strict=False)
            assert self._local_plan is not None  # noqa: S101 - what was planned on columns
            own = self._final_plan = build_own_plan(own, final, self._local_plan)
        return own

    def _decode(self, received: list[list[bytes] | None], mine: Any) -> list[Any]:
        values: list[Any] = []
        damaged: dict[int, BaseException] = {}
        schemas: dict[bytes, PlanSchema] = {}
        for rank, parts in enumerate(received):
            try:
                if parts is None:
                    values.append(mine)
                elif not parts:
                    values.append(None)
                else:
                    values.append(decode_value(parts, base=self._final_plans.get(rank), schemas=schemas))
            except WireError as error:
                damaged[rank] = error
        if damaged:
            raise PeerFailures(damaged)
        return values

    def _encode_each(
        self,
        step: str,
        received: Sequence[Sequence[bytes] | None],
        values: Sequence[Any],
        results: Sequence[Any],
        exchange: Exchange,
    ) -> dict[int, Sequence[bytes]]:
        replies: dict[int, Sequence[bytes]] = {}
        for rank, result in enumerate(results):
            if rank == self.rank:
                continue
            look_at(result)  # a planner may give the coordinator's own plan to others too
            path = f"{step} for group rank {rank}"
            if type(result) is SavePlan and isinstance(result.items, PendingItems):
                replies[rank] = [result.items.encode(result, path=path, strict=self._config.strict)]
                self._final_plans[rank] = result
                continue
            value = values[rank]
            is_plan = type(value) is SavePlan and type(result) is SavePlan
            replies[rank] = encode_reply(
                result,
                base=value if is_plan else None,
                path=path,
                strict=self._config.strict,
            )
            if is_plan:
                self._final_plans[rank] = result
            elif type(result) is LoadPlan and list(replies[rank]) == received[rank]:
                replies[rank] = [b""]  # as it was
        self._remember_plans(results, replies, exchange)
        return replies

    def _remember_plans(
        self, results: Sequence[Any], replies: Mapping[int, Sequence[bytes]], exchange: Exchange
    ) -> None:
        """Keep what global planning came to, where it was on columns and the storage left items alone."""
        planned = None if self._local_plans is None else self._local_plans.planned
        if planned is None or not all(
            type(result) is SavePlan and isinstance(result.items, PendingItems) for result in results
        ):
            return
        self._planned = planned
        if planned.remembered is None:
            exchange.miss("the global plan was made anew")
        own = results[self.rank]
        finals = [
            replies[rank][0] if rank in replies else own.items.encode(own, path="plan", strict=False)
            for rank in range(len(results))
        ]
        remembered = self._local_plans.to_remember(results, finals) if self._local_plans else None
        if remembered is not None:
            exchange.remember(self._plans_digest, remembered, remembered.nbytes)


def _digest_of(what: bytes, parts: Iterable[bytes]) -> bytes:
    """Return the digest of many parts; of one that many ranks have it is made once."""
    known: dict[bytes, bytes] = {}
    digests = []
    for part in parts:
        if part not in known:
            known[part] = digest(part)
        digests.append(known[part])
    return what + digest(b"".join(digests))
