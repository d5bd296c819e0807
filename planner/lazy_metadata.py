"""The metadata that DCP returns on every rank, as bytes until somebody looks at it.

On most ranks nobody does, and making its objects takes seconds for hundreds of ranks.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from planner.wire.frame import Kind, decode_frame
from planner.wire.metadata import decode_metadata

__all__ = ["read_metadata_later"]


class _PendingMetadata(Metadata):
    """Becomes a plain ``Metadata`` at the first look, or the first change."""

    def __init__(self, frame: bytes) -> None:
        object.__setattr__(self, "frame", frame)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Metadata
        _make(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        _make(self)
        setattr(self, name, value)

    def __delattr__(self, name: str) -> None:
        _make(self)
        delattr(self, name)

    def __eq__(self, other: object) -> bool:
        _make(self)
        return bool(self == other)

    __hash__ = None  # type: ignore[assignment]  # as that of any dataclass that compares by value

    def __repr__(self) -> str:
        _make(self)
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _make(self)
        return self.__reduce_ex__(protocol)


_making = threading.Lock()


def _make(pending: Metadata) -> None:
    with _making:
        if type(pending) is not _PendingMetadata:
            return  # another thread has just made it
        values = object.__getattribute__(pending, "__dict__")
        made = decode_metadata(values["frame"])
        values.clear()
        values.update(vars(made))
        object.__setattr__(pending, "__class__", Metadata)


def read_metadata_later(frame: bytes) -> Metadata:
    """Return the metadata in ``frame``; its objects are made when it is looked at.

    Raises:
        FrameError: the frame is damaged, which is found out at once.
    """
    decode_frame(frame, Kind.METADATA)
    return _PendingMetadata(frame)
