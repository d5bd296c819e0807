"""The metadata of a save, made when somebody looks at it.

On most ranks nobody does, and making its objects takes seconds for hundreds of ranks. On the coordinator
the storage writer does, at the end; that nobody did before says that nothing in it has been changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from planner.wire.frame import decode_frame, kind_of
from planner.wire.metadata import decode_metadata

__all__ = ["is_pending", "look_at", "make_metadata_later", "read_metadata_later", "remake_later"]


class _PendingMetadata(Metadata):
    """Becomes a plain ``Metadata`` at the first look, or the first change."""

    def __init__(self, make: Callable[[], Metadata]) -> None:
        object.__setattr__(self, "make", make)

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
        made = values["make"]()
        values.clear()
        values.update(vars(made))
        object.__setattr__(pending, "__class__", Metadata)


def make_metadata_later(make: Callable[[], Metadata]) -> Metadata:
    """Return metadata that ``make`` makes, a new one, once it is looked at."""
    return _PendingMetadata(make)


def remake_later(metadata: Metadata, make: Callable[[], Metadata]) -> None:
    """Have ``metadata``, which is pending, become what ``make`` makes instead."""
    with _making:
        if type(metadata) is _PendingMetadata:
            object.__setattr__(metadata, "make", make)
            return
    vars(metadata).update(vars(make()))  # another thread has looked at it just now


def is_pending(metadata: object) -> bool:
    """Whether nobody has looked at ``metadata``, nor changed it, since it was to be made later."""
    return type(metadata) is _PendingMetadata


def look_at(value: Any) -> Any:
    """Return ``value``; if it is metadata to be made later, then it is made now."""
    if is_pending(value):
        _make(value)
    return value


def read_metadata_later(parts: Sequence[bytes]) -> Metadata:
    """Return the metadata in ``parts``; its objects are made when it is looked at.

    Raises:
        FrameError: a part is damaged, which is found out at once.
    """
    for part in parts:
        decode_frame(part, kind_of(part))
    return make_metadata_later(lambda: decode_metadata(parts))
