"""Signs of life through the store: each rank shows its own, the coordinator looks for those that stopped."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from planner.channel import Channel
from planner.control import Deadline
from planner.errors import TransportError

__all__ = ["Pulse", "SilenceWatch"]

_BEAT = timedelta(seconds=5)
_LOOK = timedelta(seconds=5)  # between looks at the signs of life of absent ranks
_WELCOME = timedelta(milliseconds=50)  # between looks of a coordinator for ranks in their first save
_WELCOME_EACH = timedelta(microseconds=500)


class Pulse:
    """A thread that shows this rank's life while a save runs, also while the storage works."""

    def __init__(self, channel: Channel, plan_timeout: timedelta) -> None:
        self._channel = channel
        self._interval = min(_BEAT, plan_timeout / 4)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gloo-coordinated-planner-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        count = 0
        next_beat = Deadline(self._interval)
        while not self._stopped.wait(self._pause_s()):
            with suppress(TransportError):  # the save's own thread meets the lost store too, and says so
                if self._channel.is_coordinator:
                    # Ranks that wait to be let in have not begun to plan, or to write.
                    self._channel.welcome(self._channel.strangers)
                if next_beat.is_over:
                    next_beat.restart()
                    count += 1
                    self._channel.beat(count)

    def _pause_s(self) -> float:
        pause = self._interval
        if self._channel.is_coordinator and self._channel.strangers:
            # One request for each rank that is not there yet: no more than a few thousand a second.
            pause = min(pause, max(_WELCOME, _WELCOME_EACH * self._channel.world_size))
        return pause.total_seconds()

    def stop(self) -> None:
        """Stop and wait for the thread; at most one request to the store is in its way."""
        self._stopped.set()
        self._thread.join()


class SilenceWatch:
    """Finds ranks whose signs of life have stopped."""

    def __init__(self, channel: Channel, limit: timedelta) -> None:
        self._channel = channel
        self._limit = limit
        self._next_look = Deadline(min(_LOOK, limit / 4))
        self._latest: dict[int, tuple[bytes, Deadline]] = {}

    def look(self, ranks: Sequence[int], *, have_entered: bool) -> list[int]:
        """Return those of ``ranks`` that have shown life once, but not within the limit.

        Where there is one, those that will be there soon are named with it: a rank that is alive shows it
        at least twice within the limit.

        Args:
            ranks: those to look for.
            have_entered: whether all of them are in this save; else one that has shown life only in an
                earlier one is not silent, but has not come.
        """
        if not self._next_look.is_over or not ranks:
            return []
        self._next_look.restart()
        silences: dict[int, timedelta] = {}
        for rank, life in zip(ranks, self._channel.lives(ranks), strict=True):
            known = self._latest.get(rank)
            if known is None or known[0] != life:
                self._latest[rank] = (life, Deadline(self._limit))
            elif life and (have_entered or self._channel.is_in_this_save(life)):
                silences[rank] = known[1].elapsed
        if not any(silence >= self._limit for silence in silences.values()):
            return []
        return [rank for rank, silence in silences.items() if silence >= self._limit * 3 / 4]
