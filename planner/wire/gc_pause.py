"""A truce with the garbage collector while many objects are made that all stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_gc"]

# Young objects are looked at 10,000 at a time, and once more 50,000 at a time, which takes milliseconds;
# then they are old, and those are not looked at.
_THRESHOLDS = (10_000, 5, 2**31 - 1)

_lock = threading.Lock()
_num_inside = 0
_before: tuple[int, int, int] | None = None


@contextmanager
def paused_gc() -> Iterator[None]:
    """Keep the collector from walking over a growing heap again and again; then leave it as it was.

    Making the items of a plan takes twice as long with it, and none of them is garbage. Young objects are
    still collected, with less haste: the threads that train go on making garbage, which may hold memory of
    a device, and a collector that was off would then walk over everything that was made at once, with
    the interpreter lock held. Counted over all threads of the process; the last one out restores.
    """
    global _num_inside, _before  # noqa: PLW0603 - what it changes is of the process, so is this
    with _lock:
        if _num_inside == 0 and gc.isenabled():
            _before = gc.get_threshold()
            gc.set_threshold(*_THRESHOLDS)
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0 and _before is not None:
                if gc.get_threshold() == _THRESHOLDS:  # else somebody else has set it since
                    gc.set_threshold(*_before)
                _before = None
