"""The switch on its own: what is on, what it replaces, and who else replaces the same. No ranks."""

import json
import logging
import threading

import pytest
from torch.distributed.checkpoint import _async_process_executor, state_dict_loader, state_dict_saver, utils
from torch.distributed.checkpoint.utils import _DistWrapper

import planner
from planner import CoordinationConfig, GlooCoordinatedLoadPlanner, GlooCoordinatedPlanner, GlooDistWrapper
from planner.__main__ import main
from planner.switch import active_config, coordinate
from tests.support.python import run_after_torch, run_python

OTHER = CoordinationConfig(strict=True)
OFF = CoordinationConfig(coordination="default")


@pytest.fixture(autouse=True)
def off():
    yield
    planner.disable()
    assert active_config() is None


def every_name():
    owners = (state_dict_saver, state_dict_loader, _async_process_executor, utils, _DistWrapper)
    return [dict(vars(owner)) for owner in owners]


def same(left, right):
    return all(
        a.keys() == b.keys() and all(a[name] is b[name] for name in a)
        for a, b in zip(left, right, strict=True)
    )


def is_on():
    return isinstance(_DistWrapper(None, False, 0), GlooDistWrapper)


def test_disable_puts_back_every_name():
    before = every_name()
    planner.enable()
    assert not same(before, every_name())
    assert is_on()
    planner.disable()
    assert same(before, every_name())
    with planner.coordinated(), planner.coordinated(OTHER):
        assert is_on()
    assert same(before, every_name())
    with pytest.raises(ValueError, match="of the block"), planner.coordinated():
        raise ValueError("of the block")
    assert same(before, every_name())


def test_enabling_twice_is_as_once_and_another_config_takes_its_place():
    planner.enable(OTHER)
    planner.enable(OTHER)
    assert active_config() is OTHER
    planner.enable()
    assert active_config() == CoordinationConfig()
    planner.disable()
    assert active_config() is None
    planner.disable()  # nothing to do


def test_the_innermost_block_holds_and_default_in_it_means_stock():
    before = every_name()
    planner.enable()
    with planner.coordinated(OTHER):
        assert active_config() is OTHER
        with planner.coordinated():
            assert active_config() is OTHER  # what holds outside
        with planner.coordinated(OFF):
            assert active_config() is None
            assert same(before, every_name())
            with planner.coordinated():
                assert active_config() == CoordinationConfig()
        assert active_config() is OTHER
        planner.disable()
        assert active_config() is OTHER
    assert active_config() is None
    planner.enable(OFF)
    assert active_config() is None
    assert same(before, every_name())


def test_blocks_of_threads_may_overlap_in_any_order():
    before = every_name()
    entered, left = threading.Event(), threading.Event()

    def hold():
        with planner.coordinated(OTHER):
            entered.set()
            left.wait()

    thread = threading.Thread(target=hold)
    with planner.coordinated():
        thread.start()
        entered.wait()
        assert active_config() is OTHER
    assert active_config() is OTHER  # the other thread's block, which counts for the process
    left.set()
    thread.join()
    assert same(before, every_name())


def test_a_planner_of_ours_stays_and_any_other_is_wrapped():
    from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

    ours, save, load = GlooCoordinatedPlanner(), DefaultSavePlanner(), DefaultLoadPlanner()
    assert coordinate(save, "save") is save
    with planner.coordinated(OTHER):
        assert coordinate(ours, "save") is ours
        assert ours.config == CoordinationConfig()
        assert coordinate(save, "save").inner is save
        assert coordinate(save, "save").turns is coordinate(save, "save").turns
        assert type(coordinate(load, "load")) is GlooCoordinatedLoadPlanner
        assert type(coordinate(None, "save").inner) is DefaultSavePlanner
        assert coordinate(None, "save").config is OTHER


def test_what_is_no_config_is_refused_and_nothing_is_on():
    with pytest.raises(planner.ConfigError, match="not dict"):
        planner.enable({"plan_timeout": 3})
    with pytest.raises(planner.ConfigError, match="not int"), planner.coordinated(5):
        pass
    assert active_config() is None


def test_a_patch_made_before_is_said_and_comes_back(caplog):
    stock = _DistWrapper.__init__

    def patched(self, *args):
        stock(self, *args)

    _DistWrapper.__init__ = patched
    try:
        planner.enable()
        assert is_on()
        planner.disable()
        assert _DistWrapper.__init__ is patched
    finally:
        _DistWrapper.__init__ = stock
    (text,) = [record.message for record in caplog.records]
    assert "_DistWrapper.__init__ was replaced by" in text
    assert f"patched of {__name__}" in text


@pytest.mark.parametrize("calls_ours", [True, False])
def test_a_patch_made_after_is_an_error_at_disable_and_coordination_is_off(calls_ours):
    stock = _DistWrapper.__init__
    planner.enable()
    below = _DistWrapper.__init__ if calls_ours else stock

    def patched(self, *args):
        below(self, *args)

    _DistWrapper.__init__ = patched
    try:
        with pytest.raises(planner.SwitchError, match=rf"coordination is off, .*patched of {__name__}"):
            planner.disable()
        assert not is_on()
        assert _DistWrapper.__init__ is patched
        # And on again, above it or below.
        with planner.coordinated():
            assert is_on()
        assert not is_on()
    finally:
        _DistWrapper.__init__ = stock


def test_a_patch_made_in_a_block_is_a_warning_at_its_end(caplog):
    stock = _DistWrapper.__init__
    try:
        with planner.coordinated():
            _DistWrapper.__init__ = lambda self, *args: stock(self, *args)  # noqa: PLW0108 - somebody's
    finally:
        _DistWrapper.__init__ = stock
    assert "meanwhile, and was left there" in caplog.text
    assert not is_on()


def test_turning_it_on_is_said_once_as_soon_as_somebody_listens(caplog):
    planner.enable()  # before logging is set up, as in `import planner`
    caplog.set_level(logging.INFO, logger="planner")
    coordinate(None, "save")
    coordinate(None, "save")
    (text,) = [record.message for record in caplog.records]
    assert "coordinated over gloo" in text
    assert f"by planner.enable() at {__file__}:" in text
    planner.enable(OTHER)
    assert len(caplog.records) == 2


def run(*arguments, **environment):
    return run_python("-W", "ignore", *arguments, **environment)


PROBE = "import planner, planner.switch as s; print(s.active_config() is not None)"
ENVIRONMENTS = {
    "nothing": {},
    "on": {"DCP_COORDINATION": "gloo"},
    "a wrong value": {"DCP_COORDINATION": "glo"},
    "a wrong name": {"DCP_COORDINATION": "gloo", "DCP_COORDINATION_PLAN_TIMOUT_S": "3"},
}


@pytest.fixture(scope="module")
def imported():
    return run_after_torch({name: (PROBE, environment) for name, environment in ENVIRONMENTS.items()})


def test_one_import_and_the_environment_are_enough(imported):
    assert imported["nothing"].stdout == "False\n"
    assert imported["on"].stdout == "True\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "a wrong value",
            "DCP_COORDINATION must be 'gloo' or 'default', not 'glo'; did you mean 'gloo'?",
        ),
        ("a wrong name", "did you mean DCP_COORDINATION_PLAN_TIMEOUT_S?"),
    ],
)
def test_a_wrong_environment_is_refused_at_the_import(name, expected, imported):
    done = imported[name]
    assert done.returncode == 1
    assert done.stdout == ""
    assert expected in done.stderr


SCRIPT = """
import json, os, pickle, sys
import helper_beside_the_script
class Mine: pass
if __name__ == "__main__":
    switch = sys.modules.get("planner.switch")
    facts = {
        "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": os.path.abspath(__file__),
        "pickles": type(pickle.loads(pickle.dumps(Mine()))) is Mine, "package": bool(__package__),
        "on": switch is not None and switch.active_config() is not None,
    }
    print(json.dumps(facts))
    if "--fail" in sys.argv:
        raise ValueError("as asked")
    sys.exit(7)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for path in (tmp_path / "train.py", tmp_path / "package" / "train.py"):
        path.write_text(SCRIPT)
    (tmp_path / "helper_beside_the_script.py").touch()
    return tmp_path / "train.py"


ARGUMENTS = ["--version", "-m", "--", "-h", "--lr=3", "--fail-not"]


def facts_of(done):
    assert done.returncode == 7, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("target", [["train.py"], ["-m", "package.train"]])
def test_run_is_as_python_itself_with_the_switch_on(target, script, monkeypatch):
    monkeypatch.chdir(script.parent)
    stock = facts_of(run(*target, *ARGUMENTS))
    ours = facts_of(run("-m", "planner", "run", *target, *ARGUMENTS))
    assert ours.pop("on")
    assert not stock.pop("on")
    assert ours == stock


def test_the_environment_turns_run_off(script):
    assert not facts_of(run("-m", "planner", "run", str(script), DCP_COORDINATION="default"))["on"]


def test_run_lets_the_scripts_error_through(script):
    done = run("-m", "planner", "run", str(script), "--fail")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: as asked")
    assert f'File "{script}", line ' in done.stderr


def test_run_without_a_script_says_what_it_takes(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run"])
    assert "TARGET" in capsys.readouterr().err
