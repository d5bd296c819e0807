"""Observe what stock DCP exchanges in a save: the baseline of the demo."""

from __future__ import annotations

import pickle  # noqa: TID251 - measures what stock DCP sends, which is pickled
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

_EXCHANGES = (
    "gather plans",
    "scatter plans",
    "gather results",
    "broadcast metadata",
)  # of one save, in order


@dataclass(frozen=True)
class Phase:
    """One exchange of a save on one rank: its time there and the bytes it sent and received."""

    name: str
    seconds: float
    sent_nbytes: int
    received_nbytes: int


def count_entries(state_dict: dict[str, Any]) -> int:
    """Return the number of write items a rank that is no coordinator has for ``state_dict``."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict, is_coordinator=False)
    return len(planner.create_local_plan().items)


@contextmanager
def observe_exchange() -> Iterator[list[Phase]]:
    """Record the exchanges of the one stock save of the body, as this rank sees them.

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
            phases.append(Phase(_EXCHANGES[len(phases)], seconds, sent, received))
            return result

        return call

    with mock.patch.multiple(
        _DistWrapper,
        gather_object=observed(_DistWrapper.gather_object),
        scatter_object=observed(_DistWrapper.scatter_object),
        broadcast_object=observed(_DistWrapper.broadcast_object),
    ):
        yield phases


def _nbytes(value: object) -> int:
    return 0 if value is None else len(pickle.dumps(value))
