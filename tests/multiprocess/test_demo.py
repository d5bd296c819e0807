import os
import subprocess
import sys
from argparse import Namespace

import torch

from planner import demo
from planner.demo.load import Compared, unequal
from planner.demo.save import TrainedAndSaved


def _demo(*arguments):
    # The child imports what this process would import: the checkout or the installed wheel.
    return subprocess.run(
        [sys.executable, "-m", "planner", "demo", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_demo_saves_over_a_refusing_default_group_and_loads_the_same():
    done = _demo("--ranks", "2", "--load-ranks", "1", "--layers", "1", "--steps", "1")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "stock DCP on the default group: " in done.stdout
    assert ": 0 differ from the trained ones" in done.stdout
    for what in ("model", "optimizer"):
        table = done.stdout.split(f"\n{what}: ")[1].split("\n\n")[0]
        ours, stock = table.split("stock DCP, process_group=gloo")
        assert "GlooCoordinatedPlanner" in ours
        assert "all coordination" in ours
        assert "broadcast metadata" in stock
    assert done.stderr == ""


def test_demo_help_names_every_knob():
    done = _demo("--help")

    assert done.returncode == 0, done.stderr
    for knob in ("--ranks", "--load-ranks", "--layers", "--steps", "--folder", "--keep"):
        assert knob in done.stdout


def test_demo_refuses_a_folder_that_is_not_empty(tmp_path):
    (tmp_path / "precious").touch()

    done = _demo("--folder", str(tmp_path))

    assert done.returncode == 2
    assert "is not empty" in done.stderr


def test_demo_fails_when_a_value_came_back_different(monkeypatch, capsys, tmp_path):
    def launch(_ranks, worker, *_arguments):
        if worker is demo.train_and_save:
            trained = TrainedAndSaved([1.0], "no", {"model": 1, "optimizer": 1}, [])
            return {0: trained, 1: trained}
        return {0: Compared(2, []), 1: Compared(2, ["ours: model.w differs"])}

    monkeypatch.setattr(demo, "_launch", launch)
    options = Namespace(ranks=2, load_ranks=2, layers=1, steps=1, folder=tmp_path / "new", keep=False)

    assert demo.run(options) == 1
    assert "DIFFERENT ours: model.w differs" in capsys.readouterr().err


def test_values_are_compared_bit_for_bit():
    zero, nan = torch.tensor([0.0]), torch.tensor(float("nan"))
    expected = {"zero": zero, "nan": nan, "same": (0.9, 0.999), "gone": 1, "wider": zero, "int": 1}
    found = {
        "zero": -zero,
        "nan": nan.clone(),
        "same": (0.9, 0.999),
        "new": 1,
        "wider": zero.double(),
        "int": 1.0,
    }

    assert unequal(found, expected) == ["gone", "int", "new", "wider", "zero"]
