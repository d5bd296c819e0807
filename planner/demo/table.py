"""Print what the demo measured as one table."""

from __future__ import annotations

from planner.demo.save import OURS, STOCK, Saved, TrainedAndSaved

_TITLES = {OURS: "GlooCoordinatedPlanner", STOCK: "stock DCP, process_group=gloo"}
_ROW = "  {:<30} {:>9} {:>12} {:>12}".format


def format_table(results: dict[int, TrainedAndSaved]) -> str:
    """Return the table for the results of all training ranks, of which the first is the coordinator."""
    coordinator, *others = (results[rank] for rank in sorted(results))
    lines = []
    for what in ("model", "optimizer"):  # ours and stock's of one state dict stand together
        lines += ["", f"{what}: {max(other.entries[what] for other in others)} entries a rank", _HEADER]
        for index, save in enumerate(coordinator.saves):
            if save.what == what:
                lines += _rows(save, [other.saves[index] for other in others])
    return "\n".join([*lines, "", _FOOTNOTE])


_HEADER = _ROW("", "seconds", "bytes sent", "received")
_FOOTNOTE = (
    "Seconds are the coordinator's, bytes those of the rank with most of them, the coordinator apart.\n"
    "Phases are without the planner's and the writer's own work, but with the waiting for other ranks.\n"
    "Bytes are payload over gloo; the small records ours keeps in the default group's store are apart.\n"
    "Ours makes its group in the first save; stock's is the one that the training used."
)


def _rows(coordinator: Saved, others: list[Saved]) -> list[str]:
    rows = [f"  {_TITLES[coordinator.how]}"]
    for index, phase in enumerate(coordinator.phases):
        theirs = [other.phases[index] for other in others if index < len(other.phases)]
        rows.append(
            _ROW(
                f"  {phase.name}",
                f"{phase.seconds:.4f}",
                f"{max((p.sent_nbytes for p in theirs), default=0):,}",
                f"{max((p.received_nbytes for p in theirs), default=0):,}",
            )
        )
    sent = max(sum(p.sent_nbytes for p in other.phases) for other in others)
    received = max(sum(p.received_nbytes for p in other.phases) for other in others)
    rows.append(
        _ROW("  all coordination", f"{coordinator.coordination_seconds:.4f}", f"{sent:,}", f"{received:,}")
    )
    rows.append(_ROW("  whole save", f"{coordinator.total_seconds:.4f}", "", "").rstrip())
    return rows
