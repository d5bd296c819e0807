"""Measure one save or load: ours by its report, stock DCP's by observing what it exchanges."""

from __future__ import annotations

import functools
import pickle  # noqa: TID251 - measures what stock DCP sends, which is pickled
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from planner import GlooCoordinatedLoadPlanner, GlooCoordinatedPlanner, GlooDistWrapper

OURS, STOCK = "ours", "stock"

_EXCHANGES = {  # of one call, in order
    "save": ("gather plans", "scatter plans", "gather results", "broadcast metadata"),
    "load": ("gather plans", "scatter plans", "gather outcomes"),
}


@dataclass(frozen=True)
class Phase:
    """One exchange of a save or load on one rank: its time there and the bytes it sent and received."""

    name: str
    seconds: float
    sent_nbytes: int
    received_nbytes: int


@dataclass(frozen=True)
class Call:
    """One save or load as one rank saw it.

    Attributes:
        operation: ``save`` or ``load``.
        what: ``model`` or ``optimizer``.
        how: ``OURS`` or ``STOCK``.
        phases: the exchanges between the ranks, in order; none where another process made them.
        total_seconds: the whole call, up to its future's result.
        blocked_seconds: until an asynchronous call returned.
        steps_meanwhile: training steps that began before an asynchronous save ended.
    """

    operation: str
    what: str
    how: str
    phases: tuple[Phase, ...]
    total_seconds: float
    blocked_seconds: float | None = None
    steps_meanwhile: int = 0


def count_entries(state_dict: dict[str, Any]) -> int:
    """Return the number of write items a rank that is no coordinator has for ``state_dict``."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict, is_coordinator=False)
    return len(planner.create_local_plan().items)


def measure_ours(operation: str, what: str, call: Callable[..., None]) -> Call:
    """Run ``call(planner=...)`` with our planner for ``operation``."""
    planner = GlooCoordinatedPlanner() if operation == "save" else GlooCoordinatedLoadPlanner()
    start = time.perf_counter()
    call(planner=planner)
    return Call(operation, what, OURS, phases_of(planner), time.perf_counter() - start)


def measure_stock(operation: str, what: str, call: Callable[[], None]) -> Call:
    """Run ``call()``, which is one stock save or load."""
    with _observe_exchange(operation) as phases:
        start = time.perf_counter()
        call()
        total_seconds = time.perf_counter() - start
    return Call(operation, what, STOCK, tuple(phases), total_seconds)


@dataclass
class ExchangeTime:
    """What ``measure_exchange`` yields: seconds in coordination on this rank, once the body has ended."""

    seconds: float = 0.0


@contextmanager
def measure_exchange() -> Iterator[ExchangeTime]:
    """Measure DCP's steps in the body, without the planner's and the storage's own work.

    The same clock at the same place for ours and stock: around each step of the wrapper, less the
    functions that DCP gives to it. For calls by one thread.
    """
    time_spent = ExchangeTime()

    def timed(call: Callable[..., Any], sign: int) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                time_spent.seconds += sign * (time.perf_counter() - start)

        return run

    def step(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(wrapper: _DistWrapper, name: str, *functions: Callable[..., Any]) -> Any:
            return method(wrapper, name, *(timed(function, -1) for function in functions))

        return timed(run, 1)

    names = ("reduce_scatter", "all_reduce", "all_gather")
    with ExitStack() as stack:
        for cls in (_DistWrapper, GlooDistWrapper):
            for name in names:
                stack.enter_context(mock.patch.object(cls, name, step(vars(cls)[name])))
        yield time_spent


def phases_of(planner: GlooCoordinatedPlanner | GlooCoordinatedLoadPlanner) -> tuple[Phase, ...]:
    """Return what ``planner`` reports of its latest call, without the planner's and the storage's work."""
    if planner.report is None:
        raise RuntimeError("the call left no report: our planner did not coordinate it")
    return tuple(
        Phase(p.name, p.seconds - p.work_seconds, p.sent_nbytes, p.received_nbytes)
        for p in planner.report.phases
    )


def refusal_of(call: Callable[[], object]) -> str:
    """Return how the default group refuses a stock call, or fail: the demo would show nothing."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - a RuntimeError or an AssertionError, as torch was built
        return f"{type(error).__name__}: {error}".splitlines()[0]
    raise RuntimeError("the default group carried a stock call; the demo needs one that refuses")


@contextmanager
def _observe_exchange(operation: str) -> Iterator[list[Phase]]:
    """Record the exchanges of the one stock call of the body, as this rank sees them.

    Sizes are those of the pickled objects, without the padding to the largest rank's; measuring them
    is not part of the times. The coordinator's own sizes are not recorded.
    """
    phases: list[Phase] = []

    def observed(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def call(wrapper: _DistWrapper, value: object) -> object:
            start = time.perf_counter()
            result = exchange(wrapper, value)
            seconds = time.perf_counter() - start
            # Of the other ranks, a gather takes and a scatter or a broadcast gives.
            sent, received = (0, 0) if wrapper.is_coordinator else (_nbytes(value), _nbytes(result))
            phases.append(Phase(_EXCHANGES[operation][len(phases)], seconds, sent, received))
            return result

        return call

    with mock.patch.multiple(
        _DistWrapper,
        gather_object=observed(_DistWrapper.gather_object),
        scatter_object=observed(_DistWrapper.scatter_object),
        broadcast_object=observed(_DistWrapper.broadcast_object),
        all_gather_object=observed(_DistWrapper.all_gather_object),
    ):
        yield phases


def _nbytes(value: object) -> int:
    return 0 if value is None else len(pickle.dumps(value))
