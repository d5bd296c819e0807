"""Every error this library raises, on one page.

::

    PlannerError(Exception)
    ├── WireError                      bytes from a peer that may not be used
    │   ├── FrameError                 no frame of ours: magic, wire version, kind, length, checksum
    │   └── PayloadError               a whole frame whose contents break the format; carries the path
    ├── UnencodableError               (TypeError) an object of this rank that cannot travel
    ├── CoordinationError              (CheckpointException) the ranks did not come to an agreement
    │   ├── CoordinationTimeout        (TimeoutError) a rank was not there by the deadline
    │   ├── CoordinationMismatch       ranks are in saves or loads that do not belong together
    │   └── TransportError             the dedicated group or the store failed underneath
    ├── RemoteError                    stands in for another rank's exception that could not travel
    ├── ConfigError                    (ValueError) a wrong option, found before anything is sent
    ├── SwitchError                    (RuntimeError) coordination could not be turned on or off now
    └── UnsupportedTorchError          (ImportError) this torch lacks a name the seam relies on

One rank's own failure (its planner or its storage raised) reaches every rank as DCP's
``CheckpointException`` with that rank's exception inside, as in stock DCP. A failure to agree is a
``CoordinationError``, which is a ``CheckpointException`` too, so that code written for DCP catches
both, and an ``Exception``, so that an ordinary handler does as well.

Rule of this page: every error keeps its data as attributes, survives pickling, and its message
says what failed, on which ranks, expected against found, and what to do.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

__all__ = [
    "ConfigError",
    "CoordinationError",
    "CoordinationMismatch",
    "CoordinationTimeout",
    "FrameError",
    "PayloadError",
    "PlannerError",
    "RemoteError",
    "SwitchError",
    "TransportError",
    "UnencodableError",
    "UnsupportedTorchError",
    "WireError",
    "format_ranks",
]


def format_ranks(ranks: Iterable[int], *, limit: int = 16) -> str:
    """Write ranks as compact ranges, such as ``0-3,7``, at most ``limit`` ranges of them."""
    ordered = sorted(set(ranks))
    ranges: list[tuple[int, int]] = []
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:limit])
    left_out = sum(last - first + 1 for first, last in ranges[limit:])
    return f"{text} and {left_out} more" if left_out else text or "none"


class PlannerError(Exception):
    """Base of every error of this library."""


class WireError(PlannerError):
    """Bytes from a peer that may not be used; nothing of them was."""


class FrameError(WireError):
    """Bytes that are no frame of this library and wire version.

    Attributes:
        reason: what is wrong: ``magic``, ``version``, ``kind``, ``flags``, ``length``, ``checksum`` or
            ``deflated body``.
        expected: what a good frame has there.
        found: what these bytes have there.
    """

    def __init__(self, reason: str, expected: Any, found: Any) -> None:
        super().__init__(reason, expected, found)
        self.reason, self.expected, self.found = reason, expected, found

    def __str__(self) -> str:
        return f"bad frame: {self.reason} is {self.found}, expected {self.expected}; the frame was not used"


class PayloadError(WireError):
    """A whole frame whose contents break the format.

    Attributes:
        path: where in the message, such as ``plan.items[3].offsets``.
        expected: what the format has there.
        found: what the message has there.
    """

    def __init__(self, path: str, expected: Any, found: Any) -> None:
        super().__init__(path, expected, found)
        self.path, self.expected, self.found = path, expected, found

    def __str__(self) -> str:
        return (
            f"bad payload at {self.path}: expected {self.expected}, found {self.found}; "
            "the message was not used"
        )


class UnencodableError(PlannerError, TypeError):
    """An object of this rank that cannot travel to the others.

    Attributes:
        path: where the object stands, such as ``plan.storage_data['index']``.
        type_name: its full type name.
        reason: why it cannot be encoded.
    """

    def __init__(self, path: str, type_name: str, reason: str) -> None:
        super().__init__(path, type_name, reason)
        self.path, self.type_name, self.reason = path, type_name, reason

    def __str__(self) -> str:
        return (
            f"cannot send {self.path} of type {self.type_name}: {self.reason}; "
            "register a codec for it with planner.register_codec"
        )


class CoordinationError(PlannerError, CheckpointException):
    """The ranks of a save or load did not come to an agreement.

    Attributes:
        summary: what happened, in one sentence.
        operation: ``save`` or ``load``.
        checkpoint: the checkpoint's id as text, empty when the storage has none.
        phase: where it happened, such as ``plan`` or ``write``.
        ranks: group ranks it happened to, ascending.
        elapsed: how long the rank that found out had waited.
        advice: what to do.
        details: further facts by name, such as each rank's identity.
    """

    def __init__(
        self,
        summary: str,
        *,
        operation: str = "",
        checkpoint: str = "",
        phase: str = "",
        ranks: Iterable[int] = (),
        elapsed: timedelta | None = None,
        advice: str = "",
        details: Mapping[str, str] | None = None,
    ) -> None:
        # CheckpointException takes (msg, failures); the failures are derived, see the property.
        CheckpointException.__init__(self, summary, {})
        self.summary = summary
        self.operation = operation
        self.checkpoint = checkpoint
        self.phase = phase
        self.ranks = tuple(sorted(set(ranks)))
        self.elapsed = elapsed
        self.advice = advice
        self.details = dict(details or {})

    @property
    def failures(self) -> dict[int, tuple[BaseException, traceback.StackSummary]]:
        """Map each rank named by this error to it, in the form of ``CheckpointException.failures``."""
        return {rank: (self, traceback.StackSummary()) for rank in self.ranks}

    def __str__(self) -> str:
        where = " ".join(
            part
            for part in (
                self.operation,
                f"of {self.checkpoint!r}" if self.checkpoint else "",
                f"in phase {self.phase!r}" if self.phase else "",
            )
            if part
        )
        text = f"{where}: {self.summary}" if where else self.summary
        if self.ranks:
            text += f" [group ranks {format_ranks(self.ranks)}]"
        if self.elapsed is not None:
            text += f" [after {self.elapsed.total_seconds():.1f} s]"
        for name, fact in self.details.items():
            text += f"\n  {name}: {fact}"
        if self.advice:
            text += f"\n  what to do: {self.advice}"
        return text

    def to_fields(self) -> dict[str, Any]:
        """Return what ``from_fields`` needs to build this error again, as plain values."""
        return {
            "type": type(self).__name__,
            "summary": self.summary,
            "operation": self.operation,
            "checkpoint": self.checkpoint,
            "phase": self.phase,
            "ranks": list(self.ranks),
            "elapsed_s": None if self.elapsed is None else self.elapsed.total_seconds(),
            "advice": self.advice,
            "details": self.details,
        }

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> CoordinationError:
        """Build the error that ``to_fields`` described; an unknown type becomes the base class."""
        cls = _COORDINATION_ERRORS.get(fields["type"], CoordinationError)
        elapsed_s = fields["elapsed_s"]
        return cls(
            fields["summary"],
            operation=fields["operation"],
            checkpoint=fields["checkpoint"],
            phase=fields["phase"],
            ranks=fields["ranks"],
            elapsed=None if elapsed_s is None else timedelta(seconds=elapsed_s),
            advice=fields["advice"],
            details=fields["details"],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (CoordinationError.from_fields, (self.to_fields(),))


class CoordinationTimeout(CoordinationError, TimeoutError):  # noqa: N818 - reads as what it is, like TimeoutError
    """A rank was not there by the deadline; ``ranks`` names the ones that were not."""


class CoordinationMismatch(CoordinationError):  # noqa: N818 - a state of the world, not of this process
    """Ranks are in saves or loads that do not belong together; ``details`` has each identity."""


class TransportError(CoordinationError):
    """The dedicated gloo group or the store failed; the group is replaced at the next save."""


_COORDINATION_ERRORS: dict[str, type[CoordinationError]] = {
    cls.__name__: cls
    for cls in (CoordinationError, CoordinationTimeout, CoordinationMismatch, TransportError)
}


class RemoteError(PlannerError):
    """Stands in for another rank's exception that could not travel.

    Attributes:
        type_name: the full name of the exception's class on its rank.
        message: its text there.
        traceback_text: the formatted traceback from there.
    """

    def __init__(self, type_name: str, message: str, traceback_text: str = "") -> None:
        super().__init__(type_name, message, traceback_text)
        self.type_name, self.message, self.traceback_text = type_name, message, traceback_text

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


class ConfigError(PlannerError, ValueError):
    """A wrong option; raised when the configuration is made, before anything is sent.

    Attributes:
        problems: every problem found, one sentence each.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


class SwitchError(PlannerError, RuntimeError):
    """Coordination of the process could not be turned on or off; the message says what holds now."""


class UnsupportedTorchError(PlannerError, ImportError):
    """This torch lacks a private name the seam relies on, or gloo; DCP was left untouched.

    Attributes:
        problems: every check that failed, one sentence each.
        advice: what to do.
    """

    def __init__(
        self,
        problems: Iterable[str],
        advice: str = "Until this is supported pass process_group=<a gloo group> to dcp.save instead",
    ) -> None:
        self.problems, self.advice = tuple(problems), advice
        super().__init__(self.problems, advice)

    def __str__(self) -> str:
        return (
            "this torch differs from what GlooCoordinatedPlanner relies on: "
            + "; ".join(self.problems)
            + f". {self.advice}"
        )
