import pytest
import torch

from planner import demo
from planner.__main__ import main
from planner.demo.load import Compared, unequal
from planner.demo.save import TrainedAndSaved
from tests.support.python import run_python

# Each starts many processes that import torch, which takes minutes on a machine that is busy enough.
pytestmark = pytest.mark.timeout(300)


def _demo(*arguments):
    return run_python("-m", "planner", "demo", *arguments, timeout=270)


SMALL = ("--ranks", "2", "--load-ranks", "1", "--layers", "1", "--steps", "1")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Return what the demo did and left in a folder."""
    folder = tmp_path_factory.mktemp("demo") / "new"
    return _demo(*SMALL, "--folder", str(folder)), folder


def test_demo_saves_and_loads_over_default_groups_that_refuse(kept):
    done, _ = kept

    assert done.returncode == 0, done.stdout + done.stderr
    assert "stock dcp.save on the default group: " in done.stdout
    assert ": 0 differ from the trained ones" in done.stdout
    for what in ("model", "optimizer"):
        ours, stock = _section(done, f"save of the {what}")
        assert "GlooCoordinatedPlanner" in ours
        assert "all coordination" in ours
        assert "broadcast metadata" in stock
    assert done.stderr == ""


def test_demo_loads_a_kept_folder_again_on_other_ranks_and_no_plan_travels(kept):
    done = _demo("--load", "--folder", str(kept[1]), "--load-ranks", "2")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained  on" not in done.stdout
    assert "stock dcp.load on the default group: " in done.stdout
    assert ": 0 differ from the trained ones" in done.stdout
    for what in ("model", "optimizer"):
        ours, stock = _section(done, f"load of the {what}")
        assert "GlooCoordinatedLoadPlanner" in ours
        coordination = next(line.split() for line in ours.splitlines() if "all coordination" in line)
        assert coordination[-2:] == ["0", "0"]  # envelopes only
        assert "gather outcomes" in stock
    assert done.stderr == ""


def _section(done, title):
    """Return what the table says of our call and of stock's."""
    text = done.stdout.split(f"\n{title}, ")[1].split("\n\n")[0]
    ours, stock = text.split("stock DCP, process_group=gloo")
    return ours, stock


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_demo_saves_asynchronously_what_was_there_at_the_call(mode):
    done = _demo(*SMALL, "--async", mode)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"dcp.async_save in a {mode}" in done.stdout
    assert ": 0 differ from the trained ones" in done.stdout
    ours, _ = _section(done, "save of the optimizer")
    assert "until the call returned" in ours
    assert done.stderr == ""


def test_demo_help_names_every_knob(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["demo", "--help"])

    text = capsys.readouterr().out
    for knob in (
        "--ranks",
        "--load-ranks",
        "--layers",
        "--steps",
        "--async",
        "--load ",
        "--folder",
        "--keep",
    ):
        assert knob in text


def test_demo_refuses_a_folder_that_is_not_what_it_needs(capsys, tmp_path):
    (tmp_path / "precious").touch()

    assert main(["demo", "--folder", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    for arguments in ([], ["--folder", str(tmp_path)], ["--folder", str(tmp_path / "missing")]):
        assert main(["demo", "--load", *arguments]) == 2
        assert "--load needs --folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_demo_fails_when_a_value_came_back_different(monkeypatch, capsys, tmp_path):
    def launch(_ranks, worker, *_arguments, **_options):
        if worker is demo.train_and_save:
            trained = TrainedAndSaved([1.0], "no", {"model": 1, "optimizer": 1}, [])
            return {0: trained, 1: trained}
        different = [f"ours: model.{number} differs" for number in range(100, 130)]
        return {0: Compared("no", 2, [], []), 1: Compared("no", 2, different, [])}

    monkeypatch.setattr(demo, "launch", launch)

    assert main(["demo", "--folder", str(tmp_path / "new")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "DIFFERENT ours: model.100 differs"
    assert lines[-1] == "DIFFERENT ... and 10 more"


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
