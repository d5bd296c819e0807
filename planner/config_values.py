"""How the values of a configuration are written outside Python: in mappings, and in the environment.

Pure functions on a dataclass whose fields are of these types: ``timedelta`` or ``timedelta | None``,
``bool``, ``int`` for numbers from 0 on, and a ``Literal`` of texts. A duration written as a plain number
has its unit in its key, so the field ``plan_timeout`` is ``plan_timeout_s`` there.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal, get_args, get_origin, get_type_hints

__all__ = ["problems_of", "read_environment", "read_mapping", "to_mapping"]

_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}


def problems_of(cls: type, values: Mapping[str, object]) -> list[str]:
    """Return what is wrong with the values of fields, one sentence each."""
    types = get_type_hints(cls)
    return [p for name, value in values.items() if (p := _problem(name, types[name], value)) is not None]


def _problem(label: str, kind: Any, value: object) -> str | None:
    if value is None and type(None) in get_args(kind):
        return None
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if isinstance(value, str) and value in choices:
            return None
        nearest = _nearest(str(value), choices)
        return f"{label} must be {' or '.join(map(repr, choices))}, not {value!r}{nearest}"
    if kind is bool:
        return None if isinstance(value, bool) else f"{label} must be True or False, not {value!r}"
    if kind is int:
        holds = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return None if holds else f"{label} must be a whole number, 0 or more, not {value!r}"
    if not isinstance(value, timedelta):
        write = f"write {label}=timedelta(seconds=...)"
        return f"{label} must be a datetime.timedelta, not {type(value).__name__} {value!r}; {write}"
    return f"{label} must be positive, not {value}" if value <= timedelta(0) else None


def _nearest(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower(), list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _is_duration(kind: Any) -> bool:
    return kind is timedelta or timedelta in get_args(kind)


def _keys(cls: type) -> dict[str, str]:
    """Return the fields by the key that each has where values are plain."""
    types = get_type_hints(cls)
    return {
        f"{field.name}_s" if _is_duration(types[field.name]) else field.name: field.name
        for field in dataclasses.fields(cls)
    }


def to_mapping(config: Any) -> dict[str, Any]:
    """Return the values as plain ones, by key."""
    return {key: _plain(getattr(config, name)) for key, name in _keys(type(config)).items()}


def _plain(value: Any) -> Any:
    if not isinstance(value, timedelta):
        return value
    seconds = value.total_seconds()
    return int(seconds) if seconds.is_integer() else seconds


def read_mapping(cls: type, mapping: object, path: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the fields that a mapping has, and what is wrong with it.

    Durations are numbers of seconds under ``NAME_s``, or ``timedelta`` under ``NAME``.
    """
    if not isinstance(mapping, Mapping):
        found = f"{type(mapping).__name__} {mapping!r}"
        return {}, [f"{path or 'the configuration'} must be a mapping, not {found}"]
    types, keys = get_type_hints(cls), _keys(cls)
    values: dict[str, Any] = {}
    problems = []
    for key, written in mapping.items():
        label = f"{path}.{key}" if path else str(key)
        name = keys.get(key, key) if isinstance(key, str) else key
        if name not in types:
            valid = f"; the keys are {', '.join(keys)}"
            problems.append(f"{label} is no key of this{_nearest(str(key), keys) or valid}")
            continue
        if name in values:
            problems.append(f"{label} is given twice: as {name} and as {name}_s")
            continue
        value, problem = written, None
        if key != name:
            value, problem = _read_seconds(label, written, types[name])
        elif _is_duration(types[name]) and isinstance(written, int | float | str):
            problem = f"{label} is {written!r}, without a unit; write {key}_s: a number of seconds"
        problem = problem or _problem(label, types[name], value)
        values[name] = value
        if problem is not None:
            problems.append(problem)
    return values, problems


def _read_seconds(label: str, written: object, kind: Any) -> tuple[timedelta | None, str | None]:
    if written is None and type(None) in get_args(kind):
        return None, None
    if isinstance(written, bool) or not isinstance(written, int | float):
        return None, f"{label} must be a number of seconds, not {type(written).__name__} {written!r}"
    if not (math.isfinite(written) and written > 0):
        return None, f"{label} must be a positive number of seconds, not {written!r}"
    try:
        value = timedelta(seconds=written)
    except OverflowError:
        return None, f"{label} must be below {timedelta.max.total_seconds():.0f} seconds, not {written!r}"
    return value, None if value else f"{label} must be at least a microsecond, not {written!r}"


def read_environment(
    cls: type, environment: Mapping[str, str], prefix: str, *, first: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the fields that are in the environment, and what is wrong with them.

    ``PREFIX`` and the key in capitals is the variable of a field; ``PREFIX`` without its last
    underscore that of the field ``first``.
    """
    types, keys = get_type_hints(cls), _keys(cls)
    variables = {f"{prefix}{key.upper()}": key for key in keys if key != first}
    variables[prefix.rstrip("_")] = first
    values: dict[str, Any] = {}
    problems = []
    for variable, text in environment.items():
        if variable not in variables:
            if variable.startswith(prefix):
                by_key = {key: name for name, key in variables.items()}
                rest = variable.removeprefix(prefix).lower()
                nearest = difflib.get_close_matches(rest, list(by_key), n=1, cutoff=0.5)
                hint = (
                    f"did you mean {by_key[nearest[0]]}?" if nearest else f"there are {', '.join(variables)}"
                )
                problems.append(f"the environment variable {variable} is not known; {hint}")
            continue
        key = variables[variable]
        name = keys[key]
        label = f"the environment variable {variable}"
        value, problem = _read_text(label, text, types[name])
        problem = problem or _problem(label, types[name], value)
        values[name] = value
        if problem is not None:
            problems.append(problem)
    return values, problems


def _read_text(label: str, text: str, kind: Any) -> tuple[Any, str | None]:
    if get_origin(kind) is Literal:
        return text, None
    if kind is bool:
        value = _BOOLEANS.get(text.lower())
        return value, None if value is not None else f"{label} must be 1 or 0, not {text!r}"
    if kind is int:
        return int(text) if text.isascii() and text.isdigit() else text, None
    if text.lower() == "none" and type(None) in get_args(kind):
        return None, None
    try:
        return _read_seconds(label, float(text), kind)
    except ValueError:
        return None, f"{label} must be a number of seconds, not {text!r}"
