"""Who goes first, where several saves and loads are in flight in one process."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta

__all__ = ["Turns"]


class Turns:
    """Lets saves and loads that share something pass one at a time, in the order they were asked for.

    What they share is a set of ranks, or a planner object. The order must be the same on all ranks, so
    an asynchronous save takes its turns on the caller's thread, and waits for them in the background.
    """

    def __init__(self) -> None:
        self._waiting: list[object] = []
        self._thread: int | None = None
        self._changed = threading.Condition()

    def take(self) -> object:
        """Return a turn behind all those taken before."""
        turn = object()
        with self._changed:
            self._waiting.append(turn)
        return turn

    def wait(self, turn: object, timeout: timedelta) -> bool:
        """Block until it is ``turn``'s turn, at most ``timeout``; return whether it is."""
        with self._changed:
            is_next = self._changed.wait_for(lambda: self._waiting[:1] == [turn], timeout.total_seconds())
            if is_next:
                self._thread = threading.get_ident()
            return is_next

    def is_this_threads(self) -> bool:
        """Whether the turn that is on was waited for by this thread."""
        return self._thread == threading.get_ident()

    def end(self, turn: object) -> None:
        """Give ``turn`` back, used or not; one that was given back already is no error."""
        with self._changed, suppress(ValueError):
            if self._waiting[:1] and self._waiting[0] is turn:
                self._thread = None
            self._waiting.remove(turn)
            self._changed.notify_all()
