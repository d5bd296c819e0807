"""What this process remembers of saves that succeeded, so that an unchanged save need not send it again.

What is remembered is known by the digest of all that it depends on, so nothing here can be stale, and
models, planners and groups never mix. Rules of this file: bounded in bytes, nothing that can change is kept,
and nothing of a save that did not succeed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

__all__ = ["Memory", "memory"]


class Memory:
    """Values by digest, the least recently used dropped first; safe to use from several threads."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._values: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is remembered."""
        return not self._values

    def find(self, digest: bytes) -> Any:
        """Return the value with this digest, or None where it is not remembered."""
        with self._lock:
            found = self._values.get(digest)
            if found is None:
                return None
            self._values.move_to_end(digest)
            return found[0]

    def remember(self, values: Mapping[bytes, tuple[Any, int]], max_nbytes: int) -> None:
        """Keep what a save that has succeeded leaves.

        Args:
            values: by digest, each with its size in bytes; one that is larger than all is not kept.
            max_nbytes: how many bytes to keep at most, of this save and of those before.
        """
        with self._lock:
            for digest, (value, nbytes) in values.items():
                if nbytes > max_nbytes:
                    continue
                self._nbytes -= self._values.pop(digest, (None, 0))[1]
                self._values[digest] = (value, nbytes)
                self._nbytes += nbytes
            while self._nbytes > max_nbytes:
                _, (_, nbytes) = self._values.popitem(last=False)
                self._nbytes -= nbytes


memory = Memory()
"""Of this process, whatever the planner object and the ranks."""
