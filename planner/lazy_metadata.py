"""The metadata of a save, made when somebody looks at it.

On most ranks nobody does, and making its objects takes seconds for hundreds of ranks. On the coordinator
the storage writer does, at the end; that nobody did before says that nothing in it has been changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed.checkpoint.metadata import Metadata

from planner.pending import Pending
from planner.wire.frame import decode_frame, kind_of
from planner.wire.metadata import decode_metadata

__all__ = ["make_metadata_later", "read_metadata_later"]


class _PendingMetadata(Pending, Metadata):
    will_be = Metadata
    __hash__ = None  # type: ignore[assignment]  # as that of any dataclass that compares by value


def make_metadata_later(make: Callable[[], Metadata]) -> Metadata:
    """Return metadata that ``make`` makes, a new one, once it is looked at."""
    return _PendingMetadata(make)


def read_metadata_later(parts: Sequence[bytes]) -> Metadata:
    """Return the metadata in ``parts``; its objects are made when it is looked at.

    Raises:
        FrameError: a part is damaged, which is found out at once.
    """
    for part in parts:
        decode_frame(part, kind_of(part))
    return make_metadata_later(lambda: decode_metadata(parts))
