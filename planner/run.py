"""``python -m planner run``: turn coordination on for a script or module that nobody may edit."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from planner import switch

__all__ = ["add_arguments", "run"]

DESCRIPTION = """\
Run a script, or with -m a module, as python itself would, with every dcp.save, dcp.load and dcp.async_save
of the process coordinated over gloo. DCP_COORDINATION=default in the environment leaves them to stock DCP.
Under torchrun: torchrun ... -m planner run script.py ...
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what comes after ``run``."""
    parser.description = DESCRIPTION
    parser.add_argument("-m", dest="is_module", action="store_true", help="TARGET is a module's name")
    parser.add_argument("target", metavar="TARGET", help="the script's path, or the module's name")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="all that follows is for it")


def run(options: argparse.Namespace) -> int:
    """Run the target as ``__main__``; what it raises, ``SystemExit`` too, is raised here."""
    switch.enable_from_environment(default="gloo", source="python -m planner run")
    sys.argv = [options.target, *options.arguments]
    if options.is_module:
        runpy.run_module(options.target, run_name="__main__", alter_sys=True)
    else:
        if not getattr(
            sys.flags, "safe_path", False
        ):  # new in Python 3.11. As for `python script.py`; so far it is the working directory
            sys.path[0] = os.path.dirname(os.path.realpath(options.target))  # noqa: PTH120 - as python does it
        runpy.run_path(options.target, run_name="__main__")
    return 0
