"""What the coordinator has received before, by content, so that an unchanged save need not send it again.

A part is known by the digest of its bytes, so nothing here can be stale, and models, planners and groups
never mix. Rules of this file: bounded in bytes, and nothing is kept from a save that did not succeed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

__all__ = ["PartCache", "remembered_parts"]

_MAX_NBYTES = 64 * 2**20


class PartCache:
    """Parts by digest, the least recently used dropped first; safe to use from several threads.

    Args:
        max_nbytes: the most bytes of parts to keep; a part that is larger alone is not kept.
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self._parts: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, digest: bytes) -> bytes | None:
        """Return the part with this digest, or None where it is not remembered."""
        with self._lock:
            part = self._parts.get(digest)
            if part is not None:
                self._parts.move_to_end(digest)
            return part

    def remember(self, parts: Mapping[bytes, bytes]) -> None:
        """Keep ``parts``, by digest, of a save that has succeeded."""
        with self._lock:
            for digest, part in parts.items():
                if digest in self._parts or len(part) > self._max_nbytes:
                    continue
                self._parts[digest] = part
                self._nbytes += len(part)
            while self._nbytes > self._max_nbytes:
                _, dropped = self._parts.popitem(last=False)
                self._nbytes -= len(dropped)


remembered_parts = PartCache(_MAX_NBYTES)
"""Of this process, whatever the planner object and the ranks."""
