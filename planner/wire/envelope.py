"""Envelopes and verdicts: the small records of the control plane.

A rank puts an envelope when it has made its part of an exchange, or has failed to. The coordinator
answers all of them with one verdict: send these parts, done, or abort with the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.errors import CoordinationError, PayloadError
from planner.wire.check import expect_bool, expect_bytes, expect_int, expect_list, expect_map, expect_str
from planner.wire.frame import Kind, decode_message, encode_message

__all__ = [
    "Abort",
    "Done",
    "Envelope",
    "Identity",
    "Moved",
    "Send",
    "Verdict",
    "decode_verdict",
    "encode_verdict",
]

_MAX_PART_NBYTES = 2**48
_MAX_RANK = 2**31
_MAX_MASK = 2**62
_MAX_NUM_PARTS = 62
_DIGEST_NBYTES = 16


@dataclass(frozen=True)
class Identity:
    """What all ranks of one exchange must agree on."""

    operation: str
    """``save``, ``load``, or ``collective`` for a wrapper used on its own."""

    checkpoint: str
    """The checkpoint's id as text."""

    phase: str
    """DCP's name of the step, such as ``plan`` or ``write``."""

    mode: str = ""
    """What else must be the same on all ranks, in words, such as ``from global metadata``."""

    def __str__(self) -> str:
        where = f" of {self.checkpoint!r}" if self.checkpoint else ""
        how = f", {self.mode}" if self.mode else ""
        return f"{self.operation}{where} in phase {self.phase!r}{how}"


@dataclass(frozen=True)
class Envelope:
    """One rank's part in one exchange."""

    identity: Identity
    parts: tuple[tuple[bytes, int], ...] = ()
    """Digest (16 bytes) and size in bytes of each part it can send."""

    has_later: bool = False
    """Whether it can make one more part when asked."""

    failure: bytes | None = None
    """A failure frame, when the rank failed instead."""

    known: tuple[bytes, ...] = ()
    """Digests of the parts, in their order, of the reply that it remembers to have got to the same."""

    def encode(self) -> bytes:
        """Return the envelope as a frame."""
        return encode_message(
            Kind.ENVELOPE,
            {
                "op": self.identity.operation,
                "ckpt": self.identity.checkpoint,
                "phase": self.identity.phase,
                "mode": self.identity.mode,
                "later": self.has_later,
                "parts": [[digest, nbytes] for digest, nbytes in self.parts],
                "failure": self.failure,
                "known": list(self.known),
            },
        )

    @staticmethod
    def decode(data: bytes) -> Envelope:
        """Read an envelope.

        Raises:
            FrameError, PayloadError: these bytes are no envelope of this wire version.
        """
        tree = expect_map(
            decode_message(data, Kind.ENVELOPE),
            "envelope",
            ("op", "ckpt", "phase", "mode", "later", "parts", "failure", "known"),
        )
        parts = []
        for number, item in enumerate(expect_list(tree["parts"], "envelope.parts")):
            path = f"envelope.parts[{number}]"
            digest, nbytes = expect_list(item, path, 2)
            parts.append(
                (expect_bytes(digest, path, _DIGEST_NBYTES), expect_int(nbytes, path, 0, _MAX_PART_NBYTES))
            )
        return Envelope(
            identity=Identity(
                expect_str(tree["op"], "envelope.op"),
                expect_str(tree["ckpt"], "envelope.ckpt"),
                expect_str(tree["phase"], "envelope.phase"),
                expect_str(tree["mode"], "envelope.mode"),
            ),
            parts=tuple(parts),
            has_later=expect_bool(tree["later"], "envelope.later"),
            failure=None if tree["failure"] is None else expect_bytes(tree["failure"], "envelope.failure"),
            known=tuple(
                expect_bytes(digest, "envelope.known", _DIGEST_NBYTES)
                for digest in expect_list(tree["known"], "envelope.known")
            ),
        )


@dataclass(frozen=True)
class Send:
    """Send the parts whose bits are set, the first part in the lowest bit."""

    default_mask: int
    """For every rank that ``masks`` does not name."""

    masks: Mapping[int, int] = field(default_factory=dict)
    """By group rank."""

    later: bool = False
    """Then also make and send the part that was left for later, where there is one."""

    def mask_of(self, rank: int) -> int:
        """Return the bits for one group rank."""
        return self.masks.get(rank, self.default_mask)


@dataclass(frozen=True)
class Done:
    """The coordinator has the outcome; parts of its reply whose bits are set follow over the gloo group."""

    num_parts: int = 0
    """How many parts the reply has; 0 for no reply."""

    default_mask: int = 0
    """For every rank that ``masks`` does not name; the first part in the lowest bit. A part whose bit is not
    set is the one that the rank's envelope said it knows."""

    masks: Mapping[int, int] = field(default_factory=dict)
    """By group rank."""

    def mask_of(self, rank: int) -> int:
        """Return the bits for one group rank."""
        return self.masks.get(rank, self.default_mask)


@dataclass(frozen=True)
class Abort:
    """The operation is over on all ranks."""

    step: str = ""
    """DCP's step, for the failures below."""

    failures: Sequence[tuple[bytes, Sequence[int]]] = ()
    """Failure frames, each with the group ranks that sent it."""

    error: Mapping[str, Any] | None = None
    """Or the fields of a CoordinationError."""


@dataclass(frozen=True)
class Moved:
    """A new epoch has begun since: enter it and put the envelope there."""


Verdict = Send | Done | Abort | Moved


def encode_verdict(verdict: Verdict) -> bytes:
    """Return the verdict as a frame."""
    if isinstance(verdict, Send):
        tree: dict[str, Any] = {
            "do": "send",
            "default": verdict.default_mask,
            "masks": _encode_masks(verdict.masks),
            "later": verdict.later,
        }
    elif isinstance(verdict, Done):
        tree = {
            "do": "done",
            "parts": verdict.num_parts,
            "default": verdict.default_mask,
            "masks": _encode_masks(verdict.masks),
        }
    elif isinstance(verdict, Moved):
        tree = {"do": "moved"}
    else:
        tree = {
            "do": "abort",
            "step": verdict.step,
            "failures": [[frame, list(ranks)] for frame, ranks in verdict.failures],
            "error": None if verdict.error is None else dict(verdict.error),
        }
    return encode_message(Kind.VERDICT, tree)


def decode_verdict(data: bytes) -> Verdict:
    """Read a verdict.

    Raises:
        FrameError, PayloadError: these bytes are no verdict of this wire version.
    """
    tree = decode_message(data, Kind.VERDICT)
    do = tree.get("do") if isinstance(tree, dict) else tree
    if do == "send":
        tree = expect_map(tree, "verdict", ("do", "default", "masks", "later"))
        return Send(
            expect_int(tree["default"], "verdict.default", 0, _MAX_MASK),
            _decode_masks(tree["masks"]),
            expect_bool(tree["later"], "verdict.later"),
        )
    if do == "done":
        tree = expect_map(tree, "verdict", ("do", "parts", "default", "masks"))
        return Done(
            expect_int(tree["parts"], "verdict.parts", 0, _MAX_NUM_PARTS),
            expect_int(tree["default"], "verdict.default", 0, _MAX_MASK),
            _decode_masks(tree["masks"]),
        )
    if do == "moved":
        return Moved()
    if do == "abort":
        tree = expect_map(tree, "verdict", ("do", "step", "failures", "error"))
        failures = []
        for item in expect_list(tree["failures"], "verdict.failures"):
            frame, ranks = expect_list(item, "verdict.failures", 2)
            failures.append(
                (
                    expect_bytes(frame, "verdict.failures"),
                    [
                        expect_int(rank, "verdict.failures", 0, _MAX_RANK)
                        for rank in expect_list(ranks, "verdict.failures")
                    ],
                )
            )
        error = None if tree["error"] is None else _expect_error(tree["error"])
        return Abort(expect_str(tree["step"], "verdict.step"), failures, error)
    raise PayloadError("verdict.do", "send, done, moved or abort", repr(do))


def _encode_masks(masks: Mapping[int, int]) -> list[list[int]]:
    return [[rank, mask] for rank, mask in masks.items()]


def _decode_masks(tree: Any) -> dict[int, int]:
    masks = {}
    for item in expect_list(tree, "verdict.masks"):
        rank, mask = expect_list(item, "verdict.masks", 2)
        masks[expect_int(rank, "verdict.masks", 0, _MAX_RANK)] = expect_int(
            mask, "verdict.masks", 0, _MAX_MASK
        )
    return masks


def _expect_error(tree: Any) -> dict[str, Any]:
    """Check the fields of a CoordinationError, see ``CoordinationError.to_fields``."""
    path = "verdict.error"
    fields = expect_map(tree, path, CoordinationError("").to_fields().keys())
    for name in ("type", "summary", "operation", "checkpoint", "phase", "advice"):
        expect_str(fields[name], f"{path}.{name}")
    for rank in expect_list(fields["ranks"], f"{path}.ranks"):
        expect_int(rank, f"{path}.ranks", 0, _MAX_RANK)
    if fields["elapsed_s"] is not None and type(fields["elapsed_s"]) is not float:
        raise PayloadError(f"{path}.elapsed_s", "seconds or nothing", repr(fields["elapsed_s"]))
    if type(fields["details"]) is not dict:
        raise PayloadError(f"{path}.details", "a map", type(fields["details"]).__name__)
    for name, fact in fields["details"].items():
        expect_str(name, f"{path}.details")
        expect_str(fact, f"{path}.details")
    return fields
