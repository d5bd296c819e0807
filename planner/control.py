"""The control plane: small records through a store, on a connection of our own.

Waiting happens here and not in gloo, because a wait for a key can be given up and taken up again,
while a gloo receive that times out closes its connections. It polls: a store wait that times out
writes warnings to standard error from C++, which a save that waits for a slow disk must not do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from planner.errors import TransportError

__all__ = ["ControlPlane", "Deadline"]

_FIRST_PAUSE_S = 0.0005
_LAST_PAUSE_S = 0.5
_PAUSE_PER_WAITED = 0.15  # a wait ends at most this much of itself too late
_TICK_S = 0.5


class Deadline:
    """A moment, or never."""

    def __init__(self, after: timedelta | None) -> None:
        self._after_s = None if after is None else after.total_seconds()
        self._start = time.monotonic()

    def restart(self) -> None:
        """Count the whole duration again from now."""
        self._start = time.monotonic()

    @property
    def elapsed(self) -> timedelta:
        """Time since the start."""
        return timedelta(seconds=time.monotonic() - self._start)

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least 0; infinity when there is no end."""
        if self._after_s is None:
            return float("inf")
        return max(0.0, self._after_s - (time.monotonic() - self._start))

    @property
    def is_over(self) -> bool:
        """Whether the moment has passed."""
        return self.remaining_s == 0.0


class ControlPlane:
    """Records under one namespace of a store; safe to use from several threads.

    Every method may raise ``TransportError`` when the store is gone, which for a TCPStore means that
    the process hosting it has ended.
    """

    def __init__(self, store: Store, namespace: str) -> None:
        # A clone is a connection of its own: a wait holds the lock of the client it runs on, and the
        # trainer uses the other one.
        self._store = PrefixStore(namespace, store.clone())  # type: ignore[attr-defined]  # missing in the stub
        self._lock = threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        """Set ``key``, replacing what was there."""
        with self._lock, _named_store_errors():
            self._store.set(key, value)  # type: ignore[arg-type]  # the stub knows only str; bytes are taken as they are

    def put_many(self, values: dict[str, bytes]) -> None:
        """Set many keys in one request."""
        if values:
            with self._lock, _named_store_errors():
                self._store.multi_set(list(values), list(values.values()))  # type: ignore[attr-defined]  # missing in the stub

    def read_many(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, each of which must exist."""
        if not keys:
            return []
        with self._lock, _named_store_errors():
            return list(self._store.multi_get(list(keys)))

    def read(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None where there is none."""
        return self.read_many([key])[0] if self.exists([key]) else None

    def exists(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` exist."""
        with self._lock, _named_store_errors():
            return bool(self._store.check(list(keys)))

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Return for each of ``keys`` whether it exists; one request when all do."""
        if self.exists(keys):
            return [True] * len(keys)
        return [self.exists([key]) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to the counter ``key`` and return its new value."""
        with self._lock, _named_store_errors():
            return int(self._store.add(key, amount))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete ``keys``; one that does not exist is no error."""
        with self._lock, _named_store_errors():
            for key in keys:
                self._store.delete_key(key)

    def num_keys(self) -> int:
        """Return how many keys the whole store has, other users' included."""
        with self._lock, _named_store_errors():
            return int(self._store.num_keys())

    def wait(self, keys: Sequence[str], *, tick: Callable[[], bool]) -> bool:
        """Block until all of ``keys`` exist; see ``wait_until``."""
        return self.wait_until(lambda: self.exists(keys), tick=tick)

    def wait_until(self, condition: Callable[[], bool], *, tick: Callable[[], bool]) -> bool:
        """Block until ``condition`` holds, asking ``tick`` about twice a second whether to go on.

        Returns:
            Whether the condition held in the end.
        """
        start = last_tick = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now - last_tick >= _TICK_S:
                last_tick = now
                if not tick():
                    return condition()
            time.sleep(min(_LAST_PAUSE_S, max(_FIRST_PAUSE_S, _PAUSE_PER_WAITED * (now - start))))
        return True


class _named_store_errors:  # noqa: N801 - used like the functions of contextlib
    """Turn what c10d raises for a lost store into a TransportError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise TransportError(
                f"the job's store does not answer: {str(error).splitlines()[0] if str(error) else error!r}",
                advice="the process that hosts the store has probably ended: look there first",
            ) from error
