"""Failures: any exception arrives as itself or as a stand-in that says the same, and none breaks us."""

from __future__ import annotations

import pickle
import random
import sys
import threading
import traceback
from datetime import timedelta

import pytest
from torch.distributed.checkpoint.api import CheckpointException, _is_wrapped_exception

from planner import errors
from planner.errors import CoordinationError, CoordinationTimeout, PayloadError, RemoteError, WireError
from planner.wire.failures import decode_failure, encode_failure
from planner.wire.frame import Kind, decode_message, encode_message, pack
from planner.wire.objects import encode_object
from tests import strategies


class TwoArgumentsError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.one, self.two = one, two


class KeywordError(Exception):
    def __init__(self, *, code):
        super().__init__(code)
        self.code = code


class HoldsLockError(Exception):
    def __init__(self):
        super().__init__("held")
        self.lock = threading.Lock()


class AngryTextError(Exception):
    def __str__(self):
        raise KeyboardInterrupt


class AngryReduceError(Exception):
    def __reduce__(self):
        raise CheckpointException("no", {})


class ReducesElsewhereError(Exception):
    def __reduce__(self):
        return (sys.exit, (3,))


class OddTextError(Exception):
    def __str__(self):
        return Text("odd")


class Text(str):
    __slots__ = ()


class Outer:
    class InnerError(ValueError):
        pass


def raised(exc):
    """Return ``exc`` with the traceback of having been raised here."""
    try:
        raise exc
    except BaseException as caught:  # noqa: BLE001
        return caught


def there_and_back(exc, *, strict=True):
    pair = decode_failure(encode_failure(raised(exc), strict=strict))
    assert _is_wrapped_exception(pair)
    return pair


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("bad", 3),
        KeyError(("a", 1)),
        KeyboardInterrupt(),
        SystemExit(3),
        StopIteration(5),
        OSError(2, "No such file or directory", "/a/\udc80"),
        OSError(2, "cross", "/a", None, "/b"),
        FileNotFoundError(2, "gone"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ImportError("no", name="x", path="y"),
        TimeoutError("late"),
        AssertionError(),
        Outer.InnerError("inner"),
        OddTextError("x"),
        errors.PayloadError("a.b", "int", "str"),
        errors.UnencodableError("a", "T", "r"),
        errors.ConfigError(["one", "two"]),
        errors.RemoteError("x.Y", "m", "t"),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_an_exception_that_can_travel_arrives_as_itself(exc):
    found, summary = there_and_back(exc)
    assert type(found) is type(exc)
    assert found.args == exc.args
    assert str(found) == str(exc)
    assert summary[-1].name == "raised"
    for name in ("filename", "filename2", "errno", "name", "path", "code"):
        assert getattr(found, name, None) == getattr(exc, name, None)


@pytest.mark.parametrize(
    "exc",
    [
        TwoArgumentsError("one", "two"),
        KeywordError(code=7),
        HoldsLockError(),
        AngryTextError("x"),
        AngryReduceError("x"),
        ReducesElsewhereError("x"),
        ValueError(threading.Lock()),
        ValueError("x" * 300_000),
    ],
    ids=lambda exc: type(exc).__name__,
)
@pytest.mark.parametrize("strict", [False, True])
def test_an_exception_that_cannot_travel_arrives_as_its_text(exc, strict):
    found, summary = there_and_back(exc, strict=strict)
    assert type(found) is RemoteError
    assert found.type_name.endswith(type(exc).__name__)
    assert found.message
    assert "raised" in found.traceback_text + found.message or "left out" in found.traceback_text
    assert summary[-1].name == "raised"
    assert type(pickle.loads(pickle.dumps(found))) is RemoteError


def test_classes_that_are_defined_in_a_function_arrive_as_text():
    class LocalError(Exception):
        pass

    found, _ = there_and_back(LocalError("here"))
    assert (type(found), found.message) == (RemoteError, "here")
    assert found.type_name.endswith("<locals>.LocalError")


def test_a_class_that_the_receiver_has_not_imported_arrives_as_text(monkeypatch):
    frame = encode_failure(raised(Outer.InnerError("x")), strict=True)
    monkeypatch.delitem(sys.modules, __name__)
    found, _ = decode_failure(frame)
    assert (type(found), found.message) == (RemoteError, "x")
    assert "Outer.InnerError: x" in found.traceback_text


def test_errors_of_this_library_keep_what_they_carry():
    exc = CoordinationTimeout(
        "late", operation="save", ranks=[3, 1], elapsed=timedelta(seconds=2), details={"a": "b"}
    )
    found, _ = there_and_back(exc)
    assert type(found) is CoordinationTimeout
    assert found.to_fields() == exc.to_fields()
    assert isinstance(found, CoordinationError)


def test_a_checkpoint_exception_keeps_its_failures():
    inner = raised(ValueError("disk"))
    exc = CheckpointException("write", {3: (inner, traceback.extract_tb(inner.__traceback__))})
    found, _ = there_and_back(exc, strict=False)
    assert type(found) is CheckpointException
    assert str(found) == str(exc)
    assert type(found.failures[3][0]) is ValueError
    found, _ = there_and_back(exc, strict=True)
    assert (type(found), found.message) == (RemoteError, str(exc))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are of Python 3.11")
def test_exception_groups_and_notes_arrive():
    group = ExceptionGroup("many", [ValueError("a"), ExceptionGroup("inner", [KeyError("b")])])  # noqa: F821
    group.add_note("seen on node 3")
    found, _ = there_and_back(group, strict=False)
    assert str(found) == str(group)
    if not isinstance(found, RemoteError):
        assert found.__notes__ == ["seen on node 3"]
        assert type(found.exceptions[1].exceptions[0]) is KeyError


def test_causes_are_in_the_text_of_a_stand_in():
    exc = HoldsLockError()
    exc.__cause__ = raised(OSError(28, "disk full"))
    found, _ = there_and_back(exc)
    assert "disk full" in found.traceback_text
    assert "direct cause" in found.traceback_text


def test_text_is_cut_in_the_middle_and_frames_are_few():
    def deep(left):
        return deep(left - 1) if left else 1 / 0

    exc = HoldsLockError()
    exc.args = ("start" + "\u20ac" * 100_000 + "end",)
    found, _ = there_and_back(exc)
    assert len(found.message.encode()) <= 64 * 1024
    assert found.message.startswith("start")
    assert found.message.endswith("end")
    with pytest.raises(ZeroDivisionError) as caught:
        deep(700)
    _, summary = decode_failure(encode_failure(caught.value, strict=True))
    assert len(summary) <= 512
    assert summary[-1].line is not None


def test_the_frames_are_those_of_the_origin_and_never_looked_up_here():
    frame = encode_message(
        Kind.FAILURE,
        {
            "type": "x.Y",
            "message": "m",
            "traceback": "t",
            "frames": [[__file__, 1, "f", ""]],
            "original": None,
        },
    )
    _, summary = decode_failure(frame)
    assert (summary[0].filename, summary[0].lineno, summary[0].name, summary[0].line) == (
        __file__,
        1,
        "f",
        "",
    )


@pytest.mark.parametrize(
    ("module", "qualname"),
    [("builtins", "eval"), ("os", "system"), ("builtins", "object"), ("no.such", "Error"), ("builtins", "")],
)
def test_a_peer_cannot_have_anything_called_but_exception_classes(module, qualname):
    original = pack(encode_object([0, module, qualname, ("1/0",), None], path="x", strict=True))
    frame = encode_message(
        Kind.FAILURE,
        {"type": "x.Y", "message": "m", "traceback": "t", "frames": [], "original": original},
    )
    assert type(decode_failure(frame)[0]) is RemoteError


def test_whole_frames_with_any_wrong_payload_give_an_exception_or_a_wire_error():
    rng = random.Random(7)
    tree = decode_message(encode_failure(raised(ValueError("x", 3)), strict=True), Kind.FAILURE)
    num_refused = 0
    for _ in range(500):
        try:
            found, summary = decode_failure(encode_message(Kind.FAILURE, strategies.mutated(tree, rng)))
        except WireError:
            num_refused += 1
        else:
            assert isinstance(found, BaseException)
            assert isinstance(summary, traceback.StackSummary)
    assert num_refused > 200
    with pytest.raises(PayloadError):
        decode_failure(encode_message(Kind.FAILURE, None))
