"""Which of torch's functions are the ones that were read when code here was written after them.

Code that does in another way what a function of torch does is right only as long as that function looks at
what it looked at then. Its code says which names it looks up; one that is new may be one that matters.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

__all__ = ["Known", "are_known", "names"]

Known = Mapping[str, frozenset[str]]
"""By the name of a function, what it may look up by name: attributes, globals, builtins."""


def names(text: str) -> frozenset[str]:
    """Return the words of ``text``."""
    return frozenset(text.split())


def are_known(known: Known, *functions: tuple[Any, types.ModuleType | None]) -> bool:
    """Whether these functions look up no name but known ones.

    Args:
        known: the names.
        functions: each with the module of torch that it has to be from, where another might be in its place.
    """
    for function, module in functions:
        code = getattr(function, "__code__", None)
        if code is None or (module is not None and code.co_filename != module.__file__):
            return False
        if not _names_in(code) <= known.get(function.__name__, frozenset()):
            return False
    return True


def _names_in(code: types.CodeType) -> frozenset[str]:
    nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names_in, nested))
