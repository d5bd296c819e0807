"""Run all benchmarks, or some; see README.md in this folder.

python benchmarks/run.py --short                                a few minutes
python benchmarks/run.py --results benchmarks/results           keep what was measured, under today's date
python benchmarks/run.py wire load
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from bench import Row, table_of

HERE = Path(__file__).parent
BENCHMARKS = ("local_plan", "wire", "coordinator", "save", "gil", "load", "read_metadata", "device")


def write_table(folder: Path) -> None:
    """Write ``table.md`` from the JSON files in ``folder``."""
    lines = ["# What the benchmarks measured", ""]
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        rows = [Row(**row) for row in found["rows"]]
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        machine = f"{found['cores']} cores, shared by {found['load']:.0f} running processes on average"
        lines += [
            f"## {found['benchmark']}",
            "",
            f"{found['date']}; {versions}; {machine}.",
            "",
            *table_of(rows, markdown=True),
            "",
        ]
    (folder / "table.md").write_text("\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(BENCHMARKS)}")
    parser.add_argument("--short", action="store_true", help="the short form of each")
    parser.add_argument("--results", type=Path, help="write JSON and a table to a folder of the date in here")
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no such benchmarks: {', '.join(sorted(unknown))}")
    folder = options.results / time.strftime("%Y-%m-%d") if options.results else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or BENCHMARKS:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, str(HERE / f"{name}.py"), *(["--short"] if options.short else [])]
        if folder:
            command += ["--json", str(folder / f"{name}.json")]
        done = subprocess.run(command, check=False)
        if done.returncode:
            return done.returncode
    if folder:
        write_table(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
