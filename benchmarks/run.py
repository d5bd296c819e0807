"""Run all benchmarks, in their short form with ``--short``; see README.md in this folder."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = ("coordinator.py", "wire.py", "second_save.py", "load.py", "read_metadata.py")


def main() -> int:
    here = Path(__file__).parent
    for name in BENCHMARKS:
        print(f"\n== {name}", flush=True)
        done = subprocess.run([sys.executable, here / name, *sys.argv[1:]], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
