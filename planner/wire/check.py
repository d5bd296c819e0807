"""Checks of decoded msgpack values: each returns what it was given, or raises ``PayloadError``.

A path is anything whose ``str`` says where the value stands; it is asked for only when a check fails.
Types are compared exactly: a ``bool`` is no ``int`` here, and what msgpack gives has no subclasses.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from planner.errors import PayloadError

__all__ = [
    "describe",
    "expect_bool",
    "expect_bytes",
    "expect_int",
    "expect_list",
    "expect_map",
    "expect_str",
    "expect_str_list",
]

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_SHOWN_NUM_CHARS = 60


def describe(value: Any) -> str:
    """Say what ``value`` is, shortly, whatever its size."""
    if value is None or type(value) in (bool, float):
        return repr(value)
    if type(value) is int:
        return str(value) if -(2**64) < value < 2**64 else "an int beyond 64 bit"
    if type(value) is str and len(value) <= _SHOWN_NUM_CHARS:
        return repr(value)
    if isinstance(value, (str, bytes, list, dict)):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__


def expect_map(tree: Any, path: object, keys: Collection[str]) -> dict[str, Any]:
    """Return ``tree`` if it is a map with exactly ``keys``, in any order."""
    if type(tree) is not dict:
        raise PayloadError(str(path), "a map", describe(tree))
    if tree.keys() != set(keys):
        found = ", ".join(describe(key) for key in list(tree)[:20])
        raise PayloadError(str(path), f"a map of {', '.join(sorted(keys))}", f"a map of {found or 'nothing'}")
    return tree


def expect_list(tree: Any, path: object, length: int | None = None) -> list[Any]:
    """Return ``tree`` if it is a list, of exactly ``length`` elements where that is given."""
    if type(tree) is not list:
        raise PayloadError(str(path), "a list", describe(tree))
    if length is not None and len(tree) != length:
        raise PayloadError(str(path), f"a list of length {length}", describe(tree))
    return tree


def expect_str(tree: Any, path: object) -> str:
    """Return ``tree`` if it is a string."""
    if type(tree) is not str:
        raise PayloadError(str(path), "a string", describe(tree))
    return tree


def expect_str_list(tree: Any, path: object, *, unique: bool = False) -> list[str]:
    """Return ``tree`` if it is a list of strings, all different where ``unique``."""
    strings = expect_list(tree, path)
    for position, value in enumerate(strings):
        if type(value) is not str:
            raise PayloadError(f"{path}[{position}]", "a string", describe(value))
    if unique and len(set(strings)) != len(strings):
        raise PayloadError(str(path), "strings that all differ", "one of them twice")
    return strings


def expect_bytes(tree: Any, path: object, nbytes: int | None = None) -> bytes:
    """Return ``tree`` if it is binary, of exactly ``nbytes`` bytes where that is given."""
    if type(tree) is not bytes:
        raise PayloadError(str(path), "bytes", describe(tree))
    if nbytes is not None and len(tree) != nbytes:
        raise PayloadError(str(path), f"{nbytes} bytes", f"{len(tree)} bytes")
    return tree


def expect_int(tree: Any, path: object, low: int = _INT64_MIN, high: int = _INT64_MAX) -> int:
    """Return ``tree`` if it is an integer from ``low`` to ``high``, both included."""
    if type(tree) is not int or not low <= tree <= high:
        raise PayloadError(str(path), f"an integer from {low} to {high}", describe(tree))
    return tree


def expect_bool(tree: Any, path: object) -> bool:
    """Return ``tree`` if it is a bool."""
    if type(tree) is not bool:
        raise PayloadError(str(path), "a bool", describe(tree))
    return tree
