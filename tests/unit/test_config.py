"""A configuration as an engine embeds it: from mappings and the environment, and back."""

import dataclasses
import re
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from planner import ConfigError, CoordinationConfig, GlooCoordinatedLoadPlanner, GlooCoordinatedPlanner

DURATIONS = st.integers(1, 10**12).map(lambda micros: timedelta(microseconds=micros))
CONFIGS = st.builds(
    CoordinationConfig,
    coordination=st.sampled_from(["gloo", "default"]),
    plan_timeout=DURATIONS,
    io_timeout=st.none() | DURATIONS,
    progress_interval=DURATIONS,
    strict=st.booleans(),
)


@given(CONFIGS)
def test_every_config_comes_back_from_its_mapping(config):
    assert CoordinationConfig.from_mapping(config.to_mapping()) == config
    assert CoordinationConfig.from_mapping(dataclasses.asdict(config)) == config


@given(CONFIGS)
def test_every_config_comes_back_from_the_environment(config):
    variables = {f"X_{key.upper()}": str(value) for key, value in config.to_mapping().items()}
    variables["X"] = variables.pop("X_COORDINATION")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        assert CoordinationConfig.from_env("X_") == config


def test_every_field_has_a_key():
    mapping = CoordinationConfig().to_mapping()
    assert mapping == {
        "coordination": "gloo",
        "plan_timeout_s": 600,
        "io_timeout_s": None,
        "progress_interval_s": 30,
        "strict": False,
        "remembered_nbytes": 256 * 2**20,
    }
    assert len(mapping) == len(dataclasses.fields(CoordinationConfig))


def test_what_is_not_given_is_as_in_the_config_below():
    below = CoordinationConfig(strict=True, io_timeout=timedelta(hours=1))
    config = CoordinationConfig.from_mapping({"plan_timeout_s": 1.5, "io_timeout_s": None}, over=below)
    assert config == CoordinationConfig(strict=True, plan_timeout=timedelta(seconds=1.5))
    assert CoordinationConfig.from_mapping({}) == CoordinationConfig()


def test_what_nobody_turns_on_in_the_environment_is_off(monkeypatch):
    assert CoordinationConfig.from_env().coordination == "default"
    on = CoordinationConfig(coordination="gloo", plan_timeout=timedelta(seconds=5))
    assert CoordinationConfig.from_env(over=on) == on
    monkeypatch.setenv("DCP_COORDINATION", "default")
    monkeypatch.setenv("DCP_COORDINATION_STRICT", "1")
    monkeypatch.setenv("DCP_COORDINATION_REMEMBERED_NBYTES", "1000")
    assert CoordinationConfig.from_env(over=on) == dataclasses.replace(
        on, coordination="default", strict=True, remembered_nbytes=1000
    )


WRONG = {
    "coordination": (
        "gluu",
        "a.b.coordination must be 'gloo' or 'default', not 'gluu'; did you mean 'gloo'?",
    ),
    "plan_timout_s": (3, "a.b.plan_timout_s is no key of this; did you mean 'plan_timeout_s'?"),
    "plan_timeout_ms": (3, "a.b.plan_timeout_ms is no key of this; did you mean 'plan_timeout_s'?"),
    "plan_timeout": (600, "a.b.plan_timeout is 600, without a unit; write plan_timeout_s: a number"),
    "plan_timeout_s": ("10m", "a.b.plan_timeout_s must be a number of seconds, not str '10m'"),
    "progress_interval_s": (0, "a.b.progress_interval_s must be a positive number of seconds, not 0"),
    "strict": ("yes", "a.b.strict must be True or False, not 'yes'"),
    "remembered_nbytes": ("64M", "a.b.remembered_nbytes must be a whole number, 0 or more, not '64M'"),
    7: (7, "a.b.7 is no key of this; the keys are coordination, plan_timeout_s, io_timeout_s"),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_value_is_refused_with_its_path_and_the_nearest_name(key):
    value, expected = WRONG[key]
    with pytest.raises(ConfigError, match=re.escape(expected)):
        CoordinationConfig.from_mapping({key: value}, path="a.b")


@pytest.mark.parametrize(
    "seconds", [float("nan"), float("inf"), -1, 1e300, 1e-9, True, timedelta(seconds=1), [1]]
)
def test_an_impossible_number_of_seconds_is_refused(seconds):
    with pytest.raises(ConfigError, match=r"^io_timeout_s must be ") as caught:
        CoordinationConfig.from_mapping({"io_timeout_s": seconds})
    assert len(caught.value.problems) == 1


def test_all_problems_of_a_mapping_are_in_one_error():
    wrong = {key: value for key, (value, _) in WRONG.items() if key != "plan_timeout"}
    with pytest.raises(ConfigError) as caught:
        CoordinationConfig.from_mapping(wrong, path="a.b")
    assert len(caught.value.problems) == len(wrong)
    with pytest.raises(ConfigError, match="given twice"):
        CoordinationConfig.from_mapping({"plan_timeout_s": 1, "plan_timeout": timedelta(seconds=2)})
    with pytest.raises(ConfigError, match="plan_timeout must be positive, not 0:00:00"):
        CoordinationConfig.from_mapping({"plan_timeout": timedelta(0)})
    for mapping in ("gloo", None, [("strict", True)]):
        with pytest.raises(ConfigError, match=r"checkpoint must be a mapping, not "):
            CoordinationConfig.from_mapping(mapping, path="checkpoint")


def test_all_problems_of_the_environment_are_in_one_error(monkeypatch):
    for name, value in {
        "DCP_COORDINATION": "GLOO",
        "DCP_COORDINATION_COORDINATION": "gloo",
        "DCP_COORDINATION_PLAN_TIMEOUT": "600",
        "DCP_COORDINATION_IO_TIMEOUT_S": "10m",
        "DCP_COORDINATION_PROGRESS_INTERVAL_S": "none",
        "DCP_COORDINATION_STRICT": "yes",
        "DCP_COORDINATION_REMEMBERED_NBYTES": "-1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        CoordinationConfig.from_env()
    problems = sorted(caught.value.problems)
    assert len(problems) == 7
    for problem, expected in zip(
        problems,
        (
            "DCP_COORDINATION must be 'gloo' or 'default', not 'GLOO'; did you mean 'gloo'?",
            "DCP_COORDINATION_COORDINATION is not known; did you mean DCP_COORDINATION?",
            "DCP_COORDINATION_IO_TIMEOUT_S must be a number of seconds, not '10m'",
            "DCP_COORDINATION_PLAN_TIMEOUT is not known; did you mean DCP_COORDINATION_PLAN_TIMEOUT_S?",
            "DCP_COORDINATION_PROGRESS_INTERVAL_S must be a number of seconds, not 'none'",
            "DCP_COORDINATION_REMEMBERED_NBYTES must be a whole number, 0 or more, not '-1'",
            "DCP_COORDINATION_STRICT must be 1 or 0, not 'yes'",
        ),
        strict=True,
    ):
        assert problem == f"the environment variable {expected}"


def test_the_planners_are_ours_with_gloo_and_the_engines_own_with_default():
    save, load = DefaultSavePlanner(), DefaultLoadPlanner()
    on = CoordinationConfig(strict=True)
    for made, kind, inner in (
        (on.save_planner(save), GlooCoordinatedPlanner, save),
        (on.load_planner(load), GlooCoordinatedLoadPlanner, load),
    ):
        assert type(made) is kind
        assert made.inner is inner
        assert made.config is on
    assert type(on.save_planner().inner) is DefaultSavePlanner
    assert type(on.load_planner().inner) is DefaultLoadPlanner
    ours = GlooCoordinatedPlanner()
    assert on.save_planner(ours) is ours
    off = CoordinationConfig(coordination="default")
    assert off.save_planner(save) is save
    assert off.load_planner(load) is load
    assert off.save_planner() is off.load_planner() is None
    for planner in (GlooCoordinatedPlanner, GlooCoordinatedLoadPlanner):
        with pytest.raises(ConfigError, match="coordination='default'"):
            planner(config=off)


def recipes():
    """Return the README's blocks on how a config gets into an engine's own, by their first line."""
    text = Path(__file__).parents[2].joinpath("README.md").read_text()
    section = text.split("### In the engine's own configuration\n")[1].split("\n## ")[0].split("\n### ")[0]
    blocks = re.findall(r"```python\n(# .*?)```", section, re.DOTALL)
    return {block.splitlines()[0].removeprefix("# "): block for block in blocks}


YAML = "checkpoint:\n  folder: /checkpoints\n  coordination: {coordination: gloo, plan_timeout_s: 1800}\n"


@pytest.mark.parametrize("name", ["plain YAML", "OmegaConf", "pydantic", "argparse"])
def test_the_recipe_of_the_readme_gives_the_config_and_refuses_a_wrong_one(name, tmp_path, monkeypatch):
    (tmp_path / "engine.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "--coordination", "gloo", "--plan-timeout-s", "1800"])
    found: dict = {"__name__": "recipe"}
    exec(compile(recipes()[name], name, "exec"), found)
    assert found["config"] == CoordinationConfig(plan_timeout=timedelta(minutes=30))
    (tmp_path / "engine.yaml").write_text(YAML.replace("_timeout_s", "_timeout"))
    monkeypatch.setattr("sys.argv", ["train.py", "--plan-timeout-s", "-1"])
    with pytest.raises(ValueError, match=r"plan_timeout is 1800, without a unit|plan_timeout_s must be"):
        exec(compile(recipes()[name], name, "exec"), {"__name__": "recipe"})


def test_every_recipe_of_the_readme_is_tried():
    assert recipes().keys() == {"plain YAML", "OmegaConf", "pydantic", "argparse"}
