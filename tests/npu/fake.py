"""What reached the fake device in this process; ``make npu`` puts its libraries on LD_LIBRARY_PATH."""

from __future__ import annotations

import ctypes
from collections import Counter

_library = ctypes.CDLL("libascendcl.so")
_library.fakecann_counters.restype = ctypes.c_char_p
_MAX_NUM_COUNTERS = 32


def read_counters() -> Counter:
    """Return how often each thing was done since the process started, see ``fakecann/fakecann.h``."""
    values = (ctypes.c_long * _MAX_NUM_COUNTERS)()
    names = _library.fakecann_counters(values).decode().split()
    return Counter(dict(zip(names, values, strict=False)))


def device_work(function, *args, **kwargs) -> tuple[object, dict[str, int]]:
    """Return what ``function`` returned, and every counter that it moved, by how much."""
    before = read_counters()
    returned = function(*args, **kwargs)
    after = read_counters()
    return returned, {name: after[name] - before[name] for name in after if after[name] != before[name]}
