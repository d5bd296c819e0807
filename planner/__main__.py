"""``python -m planner``: commands for people; everything else imports the package."""

from __future__ import annotations

import argparse
import sys

import planner
from planner import demo, run


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m planner",
        description="Coordinate torch.distributed.checkpoint saves over a CPU gloo group.",
    )
    parser.add_argument("--version", action="version", version=planner.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("demo", help="train, save, load and compare on this machine")
    demo.add_arguments(command)
    command.set_defaults(run=demo.run)

    command = commands.add_parser("run", help="run a script or module with coordination turned on")
    run.add_arguments(command)
    command.set_defaults(run=run.run)

    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
