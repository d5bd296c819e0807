"""The names of DCP that we replace: what was there, what we put there, and who else did.

Others replace names of DCP too. What they put there before us is called by ours, or left out where
ours takes its place; what they put there after us may take ours away. Either is said here in words.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

__all__ = ["check", "check_all", "describe_stranger", "find", "replace", "restore", "where"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Replaced:
    owner: Any
    name: str
    original: Any
    ours: Any


_replaced: dict[tuple[int, str], _Replaced] = {}  # by the owner's id; owners are modules and classes of torch


def replace(owner: Any, name: str, ours: Any) -> None:
    """Put ``ours`` at ``owner.name``, and say so in a warning where what was there is not torch's own."""
    original = find(owner, name)
    if stranger := describe_stranger(owner, name):
        _logger.warning("%s before this library came to it; coordinated calls may go past that", stranger)
    setattr(owner, name, ours)
    _replaced[id(owner), name] = _Replaced(owner, name, original, ours)


def restore(owner: Any, name: str) -> str | None:
    """Put back what ``replace`` found at ``owner.name``.

    Returns:
        None; or, where somebody else has put something there since, what that is, which stays there.
    """
    replaced = _replaced.pop((id(owner), name))
    found = find(owner, name)
    if found is replaced.ours:
        setattr(owner, name, replaced.original)
    elif found is not replaced.original:
        return _describe(owner, name)
    return None


def check(owner: Any, name: str) -> str | None:
    """See whether ours is still at ``owner.name``, or below a wrapper that says so by ``__wrapped__``.

    Where what ``replace`` found is back, as when another library undoes a patch of its own, ours is put
    there again, with a warning.

    Returns:
        None; or what is there instead.
    """
    replaced = _replaced[id(owner), name]
    found = find(owner, name)
    if found is replaced.original:
        _logger.warning("%s was undone by another library; it is put there again", where(owner, name))
        setattr(owner, name, replaced.ours)
        return None
    while found is not replaced.ours and hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return None if found is replaced.ours else _describe(owner, name)


def check_all() -> list[tuple[str, str]]:
    """Return what ``check`` finds at the names that are replaced, each with its name, as ``_DistWrapper``."""
    found = [(replaced.name, check(replaced.owner, replaced.name)) for replaced in list(_replaced.values())]
    return [(name, stranger) for name, stranger in found if stranger is not None]


def _describe(owner: Any, name: str) -> str:
    return describe_stranger(owner, name) or f"{where(owner, name)} was replaced by {find(owner, name)!r}"


def find(owner: Any, name: str) -> Any:
    """Return what is at ``owner.name``, unbound."""
    return inspect.getattr_static(owner, name)


def where(owner: Any, name: str) -> str:
    """Return the full name of ``owner.name``."""
    module = owner.__module__ + "." if inspect.isclass(owner) else ""
    return f"{module}{owner.__name__}.{name}"


def describe_stranger(owner: Any, name: str) -> str | None:
    """Say what is at ``owner.name`` if it is neither torch's nor ours, else return None."""
    found = find(owner, name)
    # A wrapper made with functools.wraps carries the module of what it wraps; its globals do not.
    home = getattr(found, "__globals__", {}).get("__name__") or getattr(found, "__module__", None)
    home = home if isinstance(home, str) else type(found).__module__
    if home.split(".")[0] in {"torch", __name__.split(".")[0]}:
        return None
    label = getattr(found, "__qualname__", type(found).__qualname__)
    return f"{where(owner, name)} was replaced by {label} of {home}"
