"""Print what the demo measured as one table."""

from __future__ import annotations

from planner.demo.load import Compared
from planner.demo.measure import OURS, STOCK, Call
from planner.demo.save import TrainedAndSaved

_TITLES = {
    ("save", OURS): "GlooCoordinatedPlanner",
    ("load", OURS): "GlooCoordinatedLoadPlanner",
    ("save", STOCK): "stock DCP, process_group=gloo",
    ("load", STOCK): "stock DCP, process_group=gloo",
}
_ROW = "  {:<30} {:>9} {:>12} {:>12}".format
_HEADER = _ROW("", "seconds", "bytes sent", "received")
_FOOTNOTE = (
    "Seconds are the coordinator's, bytes those of the rank with most of them, the coordinator apart.\n"
    "Phases are without the planner's and the storage's own work, but with the waiting for other ranks.\n"
    "Bytes are payload over gloo; the small records ours keeps in the default group's store are apart.\n"
    "Ours makes its group when it first needs it; stock's is the one that the training used."
)


def format_table(trained: dict[int, TrainedAndSaved], compared: dict[int, Compared]) -> str:
    """Return the table for all ranks' results; ``trained`` is empty where only the load ran."""
    saves = [result.saves for _, result in sorted(trained.items())]
    loads = [result.loads for _, result in sorted(compared.items())]
    lines = []
    for what in ("model", "optimizer"):
        if saves:
            entries = max(result.entries[what] for result in trained.values())
            lines += _section(f"save of the {what}, {entries} entries a rank", what, saves)
        lines += _section(f"load of the {what}, on {len(loads)} processes", what, loads)
    return "\n".join([*lines, "", _FOOTNOTE])


def _section(title: str, what: str, calls_of_ranks: list[list[Call]]) -> list[str]:
    """Return the rows of ours and of stock's calls for ``what``; the first rank is the coordinator."""
    lines = ["", title, _HEADER]
    for coordinator, *others in sorted(zip(*calls_of_ranks, strict=True), key=lambda calls: calls[0].how):
        if coordinator.what == what:
            lines += _rows(coordinator, others)
    return lines


def _rows(coordinator: Call, others: list[Call]) -> list[str]:
    rows = [f"  {_TITLES[coordinator.operation, coordinator.how]}"]
    for index, phase in enumerate(coordinator.phases):
        sent = max((other.phases[index].sent_nbytes for other in others), default=0)
        received = max((other.phases[index].received_nbytes for other in others), default=0)
        rows.append(_ROW(f"  {phase.name}", f"{phase.seconds:.4f}", f"{sent:,}", f"{received:,}"))
    if coordinator.phases:
        sent = max((sum(p.sent_nbytes for p in other.phases) for other in others), default=0)
        received = max((sum(p.received_nbytes for p in other.phases) for other in others), default=0)
        seconds = sum(phase.seconds for phase in coordinator.phases)
        rows.append(_ROW("  all coordination", f"{seconds:.4f}", f"{sent:,}", f"{received:,}"))
    elif coordinator.blocked_seconds is not None:  # the report is where the save was: in DCP's daemon
        rows.append(_ROW("  all coordination", "in daemon", "", "").rstrip())
    if coordinator.blocked_seconds is not None:
        rows.append(_ROW("  until the call returned", f"{coordinator.blocked_seconds:.4f}", "", "").rstrip())
    rows.append(_ROW(f"  whole {coordinator.operation}", f"{coordinator.total_seconds:.4f}", "", "").rstrip())
    return rows
