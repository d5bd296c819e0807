"""Objects of DCP's dataclasses that are made when somebody looks at them.

A pending object is of a class of its own, which says it is what it will be, and becomes a plain one at the
first look, or the first change. That it is pending still says that nobody has looked at it, let alone
changed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar, TypeVar

__all__ = ["Pending", "is_pending", "look_at", "remake", "source_of"]

T = TypeVar("T")


class Pending:
    """A mixin, to stand before the dataclass: ``class PendingMetadata(Pending, Metadata)``.

    Args:
        make: makes the object, a new one.
    """

    will_be: ClassVar[type]
    """The dataclass."""

    def __init__(self, make: Callable[[], Any]) -> None:
        object.__setattr__(self, "make", make)
        # Of its own: making one takes as long as it has objects, and may come to look at another.
        object.__setattr__(self, "lock", threading.RLock())

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return type(self).will_be
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

    def __hash__(self) -> int:
        _make(self)
        return hash(self)

    def __repr__(self) -> str:
        _make(self)
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _make(self)
        return self.__reduce_ex__(protocol)


_OWN = {"make", "lock"}


def _make(pending: object) -> None:
    kind = type(pending)
    if not issubclass(kind, Pending):
        return
    lock = object.__getattribute__(pending, "__dict__").get("lock")
    with lock or nullcontext():
        if type(pending) is not kind:
            return  # another thread has just made it
        values = object.__getattribute__(pending, "__dict__")
        if "make" in values:  # else an interrupt came after the next two lines
            # Whoever sets attributes of a frozen object goes round its __setattr__.
            changed = {name: value for name, value in values.items() if name not in _OWN}
            object.__setattr__(pending, "__dict__", {**vars(values["make"]()), **changed})
        object.__setattr__(pending, "__class__", kind.will_be)


def is_pending(value: object) -> bool:
    """Whether ``value`` was to be made later, and nobody has looked at it, nor changed it, since."""
    return source_of(value) is not None


def look_at(value: T) -> T:
    """Return ``value``; if it is to be made later, then it is made now."""
    _make(value)
    return value


def source_of(value: object) -> Callable[[], Any] | None:
    """Return what ``value`` is to be made by, or None where it is not pending."""
    if not issubclass(type(value), Pending):
        return None
    values = object.__getattribute__(value, "__dict__")
    return values.get("make") if values.keys() == _OWN else None


def remake(value: object, make: Callable[[], Any]) -> None:
    """Have ``value``, which is pending, become what ``make`` makes instead."""
    values = object.__getattribute__(value, "__dict__")
    with values.get("lock") or nullcontext():
        if is_pending(value):
            object.__setattr__(value, "make", make)
            return
    vars(value).update(vars(make()))  # another thread has looked at it just now
