"""What the coordination of one save or load cost this rank."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PhaseReport", "SaveReport"]


@dataclass
class PhaseReport:
    """One exchange, as this rank saw it."""

    name: str
    """DCP's name of the step: ``plan``, ``write``, ``read``, or ``barrier``."""

    seconds: float = 0.0
    """Wall time in the exchange, the planner's and the storage's own work included."""

    work_seconds: float = 0.0
    """The part of it spent in the planner's and the storage's own hooks on this rank."""

    sent_nbytes: int = 0
    """Bytes this rank sent over the gloo group."""

    received_nbytes: int = 0
    """Bytes this rank received over the gloo group."""

    remembered_nbytes: int = 0
    """Bytes that did not travel as both sides had them from an earlier save: on the coordinator the parts of
    other ranks, on those what it sends back."""

    reuse: str = ""
    """Whether this was as in an earlier save: ``hit``; ``miss: `` and why not; or ``off: `` and why."""

    last_ranks: tuple[int, ...] = ()
    """Coordinator only: the ranks it had to wait for longest, the last to arrive last; a few at most."""


@dataclass
class SaveReport:
    """One save or load, as this rank saw it; on the planner as ``report`` once it has ended."""

    operation: str
    """``save`` or ``load``."""

    checkpoint: str
    """The checkpoint's id as text, empty when the storage has none."""

    world_size: int
    """Ranks that took part."""

    phases: list[PhaseReport] = field(default_factory=list)
    """The exchanges in their order."""

    total_seconds: float = 0.0
    """Wall time of the whole call below ``dcp.save`` or ``dcp.load``."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank sent over the gloo group."""
        return sum(phase.sent_nbytes for phase in self.phases)

    @property
    def received_nbytes(self) -> int:
        """Bytes this rank received over the gloo group."""
        return sum(phase.received_nbytes for phase in self.phases)

    @property
    def coordination_seconds(self) -> float:
        """Wall time in the exchanges, apart from the planner's and the storage's own work here."""
        return sum(phase.seconds - phase.work_seconds for phase in self.phases)

    def __str__(self) -> str:
        return (
            f"{self.operation} of {self.checkpoint!r} on {self.world_size} ranks: coordination over gloo "
            f"took {self.coordination_seconds:.3f} s of {self.total_seconds:.3f} s; this rank sent "
            f"{self.sent_nbytes:,} bytes and received {self.received_nbytes:,}"
        )
