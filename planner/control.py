"""The control plane: small records through a store, on a connection of our own.

Waiting happens here and not in gloo, because a wait for a key can be given up and taken up again,
while a gloo receive that times out closes its connections. It polls: a store wait that times out
writes warnings to standard error from C++, which a save that waits for a slow disk must not do.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from planner.errors import TransportError

__all__ = ["Clerk", "ControlPlane", "Deadline", "NoReply"]

T = TypeVar("T")

_FIRST_PAUSE_S = 0.0005
_LAST_PAUSE_S = 0.5
_PAUSE_PER_WAITED = 0.15  # a wait ends at most this much of itself too late
_TICK_S = 0.5
_NUM_PARTS = 8  # that keys are asked for in, where not all of them exist


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


class NoReply(Exception):  # noqa: N818 - it says what it is
    """A request has not ended in time."""


class Clerk:
    """Makes requests one after another on a thread of its own, so that nobody waits for one without end.

    c10d waits for the reply of a store for ever, and not even an interrupt ends that: where the host of
    the store is frozen, it is this thread that is stuck, until the host goes on.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._overdue: Future[Any] | None = None
        self._finalizer = weakref.finalize(self, self._requests.put, None)
        self._thread = threading.Thread(
            target=_serve, args=(self._requests,), name="gloo-coordinated-planner-store", daemon=True
        )
        self._thread.start()

    def ask(self, request: Callable[[], T], patience: timedelta) -> T:
        """Return what ``request`` returns, or raise what it raises.

        Raises:
            NoReply: no end within ``patience``, or an earlier request has none yet. What was asked may
                still happen.
        """
        overdue = self._overdue
        if overdue is not None and not overdue.done():
            raise NoReply
        future: Future[T] = Future()
        self._requests.put((future, request))
        try:
            return future.result(min(patience.total_seconds(), threading.TIMEOUT_MAX))
        except FutureTimeoutError:
            if future.done() and not future.cancelled():  # just now, or it is the request's own error
                return future.result()
            future.cancel()
            self._overdue = future
        finally:
            del future  # it has the error that this raises, whose frames would keep it, and what they hold
        raise NoReply

    def close(self) -> None:
        """Let the thread end, once it is through with what was asked."""
        self._finalizer()


def _serve(requests: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := requests.get()) is not None:
        future, request = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(request())
            except BaseException as error:  # noqa: BLE001 - it is raised where it was asked for
                future.set_exception(error)
        del item, future, request  # nothing is kept until the next


class ControlPlane:
    """Records under one namespace of a store; safe to use from several threads.

    Every method may raise ``TransportError``: at once when the store is gone, which for a TCPStore means
    that the process hosting it has ended; after ``patience`` when it does not answer.
    """

    def __init__(self, store: Store, namespace: str) -> None:
        self.patience = timedelta(minutes=10)
        self._address = _address_of(store)
        self._clerk = Clerk()
        self._namespace = namespace
        self._job_store: Store | None = store
        self._store: Store | None = None

    def _ask(self, request: Callable[[Store], T]) -> T:
        """Make one request, on the clerk's thread."""
        try:
            return self._clerk.ask(lambda: request(self._own_store()), self.patience)
        except NoReply:
            raise self.no_reply(self.patience) from None
        except RuntimeError as error:
            raise TransportError(
                f"the job's store does not answer ({self._address}): "
                + (str(error).splitlines()[0] if str(error) else repr(error)),
                advice="the process that hosts the store has probably ended: look there first",
            ) from error

    def no_reply(self, waited: timedelta) -> TransportError:
        """Return the error for a store that neither answers nor ends."""
        return TransportError(
            f"the job's store does not answer ({self._address}): no reply in {waited.total_seconds():.0f} s",
            advice=(
                "the process that hosts the store is probably frozen, or cut off: look there first, at the "
                "launcher on the first host, or else at global rank 0"
            ),
        )

    def _own_store(self) -> Store:
        if self._store is None:
            assert self._job_store is not None  # noqa: S101 - __init__ set it
            # A clone is a connection of its own: a request holds the lock of the client it runs on, and
            # the trainer uses the other one.
            self._store = PrefixStore(self._namespace, self._job_store.clone())  # type: ignore[attr-defined]  # missing in the stub
            self._job_store = None
        return self._store

    def clone(self) -> Store:
        """Return a store below the same namespace, on a connection of its own."""
        return self._ask(lambda store: store.clone())  # type: ignore[attr-defined, no-any-return]  # missing in the stub

    def put(self, key: str, value: bytes) -> None:
        """Set ``key``, replacing what was there."""
        # The stub knows only str; bytes are taken as they are.
        self._ask(lambda store: store.set(key, value))  # type: ignore[arg-type]

    def put_first(self, key: str, value: bytes) -> None:
        """Set ``key`` unless it exists: of several ranks the first is heard."""
        self._ask(lambda store: store.compare_set(key, "", value))  # type: ignore[arg-type]  # as for put

    def put_many(self, values: dict[str, bytes]) -> None:
        """Set many keys in one request."""
        if values:
            self._ask(lambda store: store.multi_set(list(values), list(values.values())))  # type: ignore[attr-defined]  # missing in the stub

    def read_many(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, each of which must exist."""
        return self._ask(lambda store: list(store.multi_get(list(keys)))) if keys else []

    def read(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None where there is none."""
        return self._ask(lambda store: store.get(key) if store.check([key]) else None)

    def exists(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` exist."""
        return self._ask(lambda store: bool(store.check(list(keys))))

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Return for each of ``keys`` whether it exists.

        Takes one request to the store when all do. Each that does not costs a few tens more at most, and
        little more than one where most do not.
        """
        return self._ask(lambda store: _find_present(store, list(keys)))

    def read_present(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of ``keys``, None for those that do not exist."""

        def read(store: Store) -> list[bytes | None]:
            there = _find_present(store, list(keys))
            here = [key for key, is_there in zip(keys, there, strict=True) if is_there]
            values = iter(store.multi_get(here) if here else ())
            return [next(values) if is_there else None for is_there in there]

        return self._ask(read)

    def add(self, key: str, amount: int) -> int:
        """Add to the counter ``key`` and return its new value."""
        return self._ask(lambda store: int(store.add(key, amount)))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete ``keys``; one that does not exist is no error."""
        if keys:
            self._ask(lambda store: [store.delete_key(key) for key in keys])

    def num_keys(self) -> int:
        """Return how many keys the whole store has, other users' included."""
        return self._ask(lambda store: int(store.num_keys()))

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


def _find_present(store: Store, keys: list[str]) -> list[bool]:
    """Return which of ``keys`` exist, asking again only for the parts of which not all do."""
    if not keys or store.check(keys):
        return [True] * len(keys)
    if len(keys) == 1:
        return [False]
    size = -(-len(keys) // _NUM_PARTS)
    return [
        is_there
        for start in range(0, len(keys), size)
        for is_there in _find_present(store, keys[start : start + size])
    ]


def _address_of(store: Store) -> str:
    """Say where the store is, for a person to look there."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return type(store).__name__ if host is None else f"{type(store).__name__} at {host}:{port}"
