"""What all benchmarks share: options, repeats in turn, a child for each measurement, tables and JSON."""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import platform
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

STOCK, OURS = "stock", "ours"


@dataclass
class Row:
    """One figure: what stock DCP and this library need of something, a sample for each repeat.

    Attributes:
        case: what was measured on, such as a world and its size.
        what: what of it.
        unit: of the samples: ``s``, ``ms``, ``bytes`` or ``MB``.
        stock: samples of stock DCP; empty where it was not measured.
        ours: samples of this library, each beside the one of stock with the same place.
        facts: numbers of the case for whoever reads the JSON, such as its world size.
    """

    case: str
    what: str
    unit: str
    stock: list[float]
    ours: list[float]
    facts: dict[str, Any] = field(default_factory=dict)

    def ratios(self) -> list[float]:
        """Return ours / stock of each pair; of the medians where one side has fewer samples."""
        if not self.stock or not self.ours or not all(self.stock):
            return []
        if len(self.stock) == len(self.ours):
            return [ours / stock for stock, ours in zip(self.stock, self.ours, strict=True)]
        return [statistics.median(self.ours) / statistics.median(self.stock)]


def options_of(doc: str, add: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """Parse the command line of a benchmark: ``--short``, ``--repeats``, ``--json`` and its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="small sizes, a fraction of a minute")
    parser.add_argument("--repeats", type=int, help="measurements of each side")
    parser.add_argument("--json", type=Path, help="write the samples, with versions, to this file")
    if add is not None:
        add(parser)
    return parser.parse_args()


def in_turn(repeats: int, stock: Callable[[], Any], ours: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
    """Measure both sides ``repeats`` times, one after the other, each first in every second turn."""
    found: dict[Callable[[], Any], list[Any]] = {stock: [], ours: []}
    for turn in range(repeats):
        for side in (stock, ours) if turn % 2 == 0 else (ours, stock):
            found[side].append(side())
    return found[stock], found[ours]


def in_child(work: Callable[[], Any]) -> Any:
    """Run ``work`` in a forked child and return what it returns."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read_end)
            with os.fdopen(write_end, "wb") as pipe:
                pickle.dump(work(), pipe)
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not return into the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit("a side of the benchmark failed, see above")
    return pickle.loads(data)


class Memory:
    """Tells how far the memory of this process has grown at most since this was made."""

    def __init__(self) -> None:
        self._start_nbytes = _status_nbytes("VmRSS")

    def peak_growth_nbytes(self) -> int:
        return _status_nbytes("VmHWM") - self._start_nbytes


def _status_nbytes(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123 - a proc file
        line = next(line for line in status if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


class Stopwatch:
    """CPU seconds of this process in named spans; of spans within one another the innermost counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.switches: list[tuple[float, str | None]] = []  # when, and into which span
        self._open: list[str] = []
        self._since = 0.0

    def span(self, name: str) -> _Span:
        return _Span(self, name)

    def switch(self, name: str | None) -> None:
        now = time.process_time()
        if self._open:
            current = self._open[-1]
            self.seconds[current] = self.seconds.get(current, 0.0) + now - self._since
        if name is None:
            self._open.pop()
        else:
            self._open.append(name)
        self._since = time.process_time()
        self.switches.append((self._since, self._open[-1] if self._open else None))

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # DCP looks at the parameters of its hooks
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return function(*args, **kwargs)

        return run


class _Span:
    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __enter__(self) -> None:
        self._watch.switch(self._name)

    def __exit__(self, *error: object) -> None:
        self._watch.switch(None)


# -- results ---------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    names = ("gloo-coordinated-planner", "torch", "numpy", "msgpack")
    found = {name: metadata.version(name) for name in names}
    return {
        **found,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def report(name: str, options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Print the rows as a table, and write them as JSON where that was asked for."""
    print("\n".join(table_of(rows)), flush=True)
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        options.json.write_text(
            json.dumps(
                {
                    "benchmark": name,
                    "date": time.strftime("%Y-%m-%d"),
                    "versions": versions(),
                    "cores": os.cpu_count(),
                    "load": round(os.getloadavg()[1], 1),
                    "settings": settings,
                    "rows": [asdict(row) for row in rows],
                },
                indent=1,
            )
            + "\n"
        )


def table_of(rows: Sequence[Row], *, markdown: bool = False) -> list[str]:
    """Lay the rows out as a table, medians of the samples and the spread of their ratios."""
    cells = [("case", "what", "stock", "ours", "ours / stock", "spread of it", "samples")]
    for row in rows:
        ratios = row.ratios()
        cells.append(
            (
                row.case,
                row.what,
                show(row.stock, row.unit),
                show(row.ours, row.unit),
                show_ratio(statistics.median(ratios)) if ratios else "-",
                f"{show_ratio(min(ratios))} to {show_ratio(max(ratios))}" if len(ratios) > 1 else "-",
                f"{len(row.stock)}, {len(row.ours)}",
            )
        )
    if markdown:
        return [
            "| " + " | ".join(line) + " |" + ("\n" + "|---" * 2 + "|---:" * 5 + "|" if number == 0 else "")
            for number, line in enumerate(cells)
        ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]


def show(samples: Sequence[float], unit: str) -> str:
    if not samples:
        return "-"
    value = statistics.median(samples)
    if unit == "bytes":
        return f"{value:,.0f} B"
    digits = 0 if value >= 100 else 1 if value >= 10 else 3
    return f"{value:,.{digits}f} {unit}"


def show_ratio(ratio: float) -> str:
    if not ratio:
        return "0"
    return f"{ratio:.2f}" if ratio > 0.1 else f"1/{1 / ratio:,.0f}"


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
