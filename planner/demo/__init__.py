"""``python -m planner demo``: the main job of this library on one machine, in under a minute.

Read in this order: ``model.py`` (what is trained), ``save.py`` (how it is saved), ``load.py`` (how it is
loaded and checked), ``measure.py`` (what that cost, beside stock DCP), ``table.py``; ``launch.py`` starts
the processes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from planner.demo.launch import describe, launch
from planner.demo.load import Compared, load_and_compare
from planner.demo.measure import OURS
from planner.demo.save import TRAINED, TrainedAndSaved, train_and_save
from planner.demo.table import format_table

__all__ = ["add_arguments", "run"]

MAX_LINES = 20

DESCRIPTION = """\
Train a small FSDP2 model with expert parallelism, and save model and optimizer with GlooCoordinatedPlanner
while the default process group refuses every collective. Load them on another number of processes, whose
default group refuses as well, with GlooCoordinatedLoadPlanner and with stock DCP; also load with the first
what stock DCP saved. Compare every value, and show what the coordination cost beside stock DCP's.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "--ranks",
        type=int,
        choices=(2, 4, 8, 16),
        default=4,
        help="processes that train and save (default: 4)",
    )
    parser.add_argument(
        "--load-ranks",
        type=int,
        choices=(1, 2, 4, 8, 16),
        default=2,
        help="processes that load and compare (default: 2)",
    )
    parser.add_argument(
        "--layers",
        type=_positive,
        default=8,
        metavar="N",
        help="blocks of the model, each 7 entries of it and 21 of its optimizer (default: 8)",
    )
    parser.add_argument("--steps", type=_positive, default=5, metavar="N", help="training steps (default: 5)")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument(
        "--async",
        dest="async_mode",
        choices=("thread", "process"),
        help="save with dcp.async_save in that mode, and train as many steps more during each save",
    )
    parts.add_argument(
        "--load",
        action="store_true",
        help="only load and compare what an earlier run left in --folder, on --load-ranks processes",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="an empty or new folder for the checkpoints, which stay there (default: a temporary one)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder and say where it is")


def run(options: argparse.Namespace) -> int:
    """Run the demo and return the exit code: 0 only if every value came back bit for bit."""
    if options.load and (options.folder is None or not (options.folder / TRAINED).is_file()):
        print("demo: --load needs --folder with what an earlier run left there", file=sys.stderr)
        return 2
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        if not options.load and any(options.folder.iterdir()):
            print(f"demo: {options.folder} is not empty; give an empty or new folder", file=sys.stderr)
            return 2
        place: Any = nullcontext(options.folder)
    elif options.keep:
        place = nullcontext(tempfile.mkdtemp(prefix="planner-demo-"))
    else:
        place = tempfile.TemporaryDirectory(prefix="planner-demo-")
    with place as folder:
        try:
            return _run_in(Path(folder).resolve(), options)
        except ChildFailedError as error:
            print(describe(error), file=sys.stderr)
            return 1


def _run_in(folder: Path, options: argparse.Namespace) -> int:
    start = time.perf_counter()
    trained = {} if options.load else _train(folder, options)
    compared: dict[int, Compared] = launch(options.load_ranks, load_and_compare, folder)
    differences = sorted({line for result in compared.values() for line in result.differences})
    print(f"refused  stock dcp.load on the default group: {compared[0].refusal}")
    print(f"loaded   ours and stock's on {options.load_ranks} processes over their default group with")
    print("         GlooCoordinatedLoadPlanner, then ours with stock DCP and process_group=<a gloo group>")
    print(
        f"compared {compared[0].num_values} values after each load: "
        f"{len(differences)} differ from the trained ones"
    )
    print(format_table(trained, compared))
    print(f"\n{time.perf_counter() - start:.1f} s in all")
    if options.folder is not None or options.keep:
        print(f"checkpoints are in {folder}")
    for line in differences[:MAX_LINES]:
        print(f"DIFFERENT {line}", file=sys.stderr)
    if len(differences) > MAX_LINES:
        print(f"DIFFERENT ... and {len(differences) - MAX_LINES} more", file=sys.stderr)
    return 1 if differences else 0


def _train(folder: Path, options: argparse.Namespace) -> dict[int, TrainedAndSaved]:
    mode = options.async_mode
    trained: dict[int, TrainedAndSaved] = launch(
        options.ranks,
        train_and_save,
        folder,
        options.layers,
        options.steps,
        mode,
        # DCP's checkpoint process logs each step of its own there, and its unpickler each mesh.
        hidden=Std.ERR if mode == "process" else Std.NONE,
    )
    losses = trained[0].losses
    print(f"trained  on {options.ranks} processes, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"refused  stock dcp.save on the default group: {trained[0].refusal}")
    print("saved    model and optimizer over that default group with GlooCoordinatedPlanner,")
    if mode is not None:
        during = " and ".join(str(save.steps_meanwhile) for save in trained[0].saves if save.how == OURS)
        print(f"         by dcp.async_save in a {mode} and {options.steps} training steps meanwhile,")
        print(f"         of which {during} began before the save ended,")
    print("         and with stock DCP and process_group=<a gloo group>")
    return trained


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value
