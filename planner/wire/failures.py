"""Failures: an exception of one rank as every other rank may see it.

What always travels is text: class, message, traceback, frames. The exception itself travels too if a
rebuilt one is its like: it is taken apart the way pickle would, but only into its own class and
arguments, rebuilt at its origin, and compared there. So no exception can break the rank that receives
it, and one that nobody can rebuild arrives as ``RemoteError`` with the same text.

Encoding never raises: it runs while something else already went wrong.
"""

from __future__ import annotations

import builtins
import sys
import traceback
from typing import Any

from planner.errors import CoordinationError, PayloadError, RemoteError
from planner.wire.check import expect_int, expect_list, expect_map, expect_str
from planner.wire.frame import Kind, decode_message, encode_message, pack, unpack
from planner.wire.objects import decode_object, encode_object, type_name_of

__all__ = ["decode_failure", "encode_failure"]

_MAX_TEXT_NBYTES = 64 * 1024
_MAX_ORIGINAL_NBYTES = 256 * 1024
_MAX_NUM_FRAMES = 512
_MAX_LINE_CHARS = 1024
_MAX_ALIKE_DEPTH = 32
_KEYS = frozenset(("type", "message", "traceback", "frames", "original"))
_FRAME_FIELDS = 4
# How an original is put together again: its class called with arguments, or CoordinationError.from_fields.
_FROM_CLASS, _FROM_FIELDS = 0, 1


# --------------------------------------------------------------------------------------------------
# Encoding


def encode_failure(exc: BaseException, *, strict: bool) -> bytes:
    """Encode an exception as a FAILURE frame; this never raises.

    Args:
        exc: the exception, with its traceback.
        strict: do not let arguments that only pickle can carry travel; text goes in their place.
    """
    texts = {"type": _type_name(exc), "message": _message_of(exc), "traceback": _traceback_of(exc)}
    tree: dict[str, Any] = {name: _clip(text) for name, text in texts.items()}
    tree["frames"] = _frames_of(exc)
    tree["original"] = _original_of(exc, strict=strict)
    return encode_message(Kind.FAILURE, tree)


def _type_name(exc: BaseException) -> str:
    try:
        return "".join((type_name_of(exc),))
    except BaseException:  # noqa: BLE001 - a metaclass is foreign code too
        return "an exception whose class has no name"


def _clip(text: str) -> str:
    """Cut ``text`` down to 64 KiB of UTF-8, keeping head and tail."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= _MAX_TEXT_NBYTES:
        return text
    mark = f"\n... {len(data) - _MAX_TEXT_NBYTES} bytes left out ...\n"
    half = (_MAX_TEXT_NBYTES - len(mark)) // 2
    return data[:half].decode("utf-8", "ignore") + mark + data[-half:].decode("utf-8", "ignore")


def _message_of(exc: BaseException) -> str:
    try:
        # str() may give an instance of a subclass, which is no msgpack string; join makes a plain one.
        return "".join((str(exc),))
    except BaseException as error:  # noqa: BLE001 - foreign code, while we report a failure
        return f"<str() of this {_type_name(exc)} raised {_type_name(error)}>"


def _traceback_of(exc: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
    except BaseException as error:  # noqa: BLE001 - the same
        return f"<formatting this traceback raised {_type_name(error)}>"


def _frames_of(exc: BaseException) -> list[list[Any]]:
    try:
        summary = list(traceback.extract_tb(exc.__traceback__))
        if len(summary) > _MAX_NUM_FRAMES:
            half = _MAX_NUM_FRAMES // 2
            summary = summary[:half] + summary[-half:]
        frames = [
            [_line(frame.filename), frame.lineno, _line(frame.name), _line(frame.line or "")]
            for frame in summary
        ]
        pack(frames)
    except BaseException:  # noqa: BLE001 - the same
        return []
    return frames


def _line(text: str) -> str:
    return text[:_MAX_LINE_CHARS]


def _original_of(exc: BaseException, *, strict: bool) -> bytes | None:
    """Return ``exc`` itself as bytes, or None if what others would rebuild is not its like."""
    try:
        parts = _take_apart(exc)
        if parts is None:
            return None
        data = pack(encode_object(parts, path="failure", strict=strict))
        if len(data) > _MAX_ORIGINAL_NBYTES:
            return None
        return data if _are_alike(exc, _put_together(data)) else None
    except BaseException:  # noqa: BLE001 - the exception may fail in any way; then text has to do
        return None


def _take_apart(exc: BaseException) -> list[Any] | None:
    reduced: Any = exc.__reduce_ex__(4)
    if not isinstance(reduced, tuple) or not 2 <= len(reduced) <= 3:  # noqa: PLR2004 - (callable, args[, state])
        return None
    make, args, *rest = reduced
    state = rest[0] if rest else None
    if make is type(exc):
        return [_FROM_CLASS, type(exc).__module__, type(exc).__qualname__, args, state]
    if make is CoordinationError.from_fields and state is None:
        return [_FROM_FIELDS, *args]
    return None


def _are_alike(one: Any, other: Any, depth: int = 0) -> bool:
    """Compare as ``==`` does, but exceptions by class, text, arguments and attributes."""
    if type(one) is not type(other) or depth > _MAX_ALIKE_DEPTH:
        return False
    if isinstance(one, BaseException):
        return (
            str(one) == str(other)
            and _are_alike(one.args, other.args, depth + 1)
            and _are_alike(one.__dict__, other.__dict__, depth + 1)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            _are_alike(a, b, depth + 1) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _are_alike(value, other[key], depth + 1) for key, value in one.items()
        )
    return bool(one == other)


# --------------------------------------------------------------------------------------------------
# Decoding


def _find_class(module_name: str, qualname: str) -> type[BaseException]:
    """Return an exception class of a module that is already imported; nothing is imported or called."""
    module = builtins if module_name == "builtins" else sys.modules.get(module_name)
    found: Any = module
    for part in qualname.split("."):
        # Not getattr: modules and classes may have code of their own that answers.
        found = vars(found)[part]
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise TypeError(f"{module_name}.{qualname} is no exception class")
    return found


def _put_together(data: bytes) -> BaseException:
    """Rebuild an exception; raises anything if that does not work."""
    parts = decode_object(unpack(data), path="failure.original")
    if parts[0] == _FROM_FIELDS:
        (fields,) = parts[1:]
        return CoordinationError.from_fields(fields)
    form, module_name, qualname, args, state = parts
    if form != _FROM_CLASS or type(args) is not tuple:
        raise TypeError("no exception of ours")
    cls = _find_class(module_name, qualname)
    exc = cls(*args)
    if type(exc) is not cls:
        raise TypeError("an exception class that makes something else")
    if state is not None:
        exc.__setstate__(state)
    # One that cannot say what it is would break whoever reports it.
    str(exc)
    return exc


def decode_failure(data: bytes) -> tuple[BaseException, traceback.StackSummary]:
    """Make the exception of a FAILURE frame, in the form of DCP's ``WRAPPED_EXCEPTION``.

    Returns:
        The exception itself where it could travel and can be rebuilt here, else a ``RemoteError`` with
        its class, message and traceback; and the frames it was raised in.

    Raises:
        WireError: if the frame or its contents are not those of a failure.
    """
    tree = expect_map(decode_message(data, Kind.FAILURE), "failure", _KEYS)
    type_name = expect_str(tree["type"], "failure.type")
    message = expect_str(tree["message"], "failure.message")
    text = expect_str(tree["traceback"], "failure.traceback")
    summary = _decode_frames(tree["frames"])
    original = tree["original"]
    if original is not None:
        if type(original) is not bytes:
            raise PayloadError("failure.original", "bytes or nothing", type_name_of(original))
        try:
            return _put_together(original), summary
        except BaseException:  # noqa: BLE001 - classes differ between ranks; the text says it all
            return RemoteError(type_name, message, text), summary
    return RemoteError(type_name, message, text), summary


def _decode_frames(tree: Any) -> traceback.StackSummary:
    frames: list[Any] = []
    for number, frame_tree in enumerate(expect_list(tree, "failure.frames")):
        here = f"failure.frames[{number}]"
        filename, lineno, name, line = expect_list(frame_tree, here, _FRAME_FIELDS)
        frames.append(
            (
                expect_str(filename, here),
                None if lineno is None else expect_int(lineno, here, 0, 2**31),
                expect_str(name, here),
                # Never None: the summary would look the line up in a file of this machine.
                expect_str(line, here),
            )
        )
    return traceback.StackSummary.from_list(frames)
