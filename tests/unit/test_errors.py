"""Every error keeps its data, survives pickling, and says what to do."""

import inspect
import pickle
from datetime import timedelta

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from planner import errors
from planner.config import CoordinationConfig
from planner.errors import ConfigError, CoordinationError, CoordinationTimeout, PlannerError, format_ranks

FACTS = {
    "operation": "save",
    "checkpoint": "/checkpoints/7",
    "phase": "plan",
    "ranks": [5, 1, 2],
    "elapsed": timedelta(seconds=12.5),
    "advice": "look at their logs",
    "details": {"group ranks 1-2": "save of '/checkpoints/6'"},
}
EXAMPLES = {
    "PlannerError": PlannerError("x"),
    "WireError": errors.WireError("x"),
    "FrameError": errors.FrameError("version", 1, 2),
    "PayloadError": errors.PayloadError("plan.items[3]", "an integer", "'x'"),
    "UnencodableError": errors.UnencodableError("plan.storage_data", "x.Y", "it holds a lock"),
    "RemoteError": errors.RemoteError("x.Y", "no space", "Traceback ..."),
    "ConfigError": ConfigError(["one", "two"]),
    "SwitchError": errors.SwitchError("a save is running"),
    "UnsupportedTorchError": errors.UnsupportedTorchError(["_DistWrapper is missing"]),
} | {
    cls.__name__: cls("some ranks never entered", **FACTS)
    for cls in vars(errors).values()
    if inspect.isclass(cls) and issubclass(cls, CoordinationError)
}


def test_the_examples_are_the_whole_tree():
    tree = {
        name for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, PlannerError)
    }
    assert tree == EXAMPLES.keys()
    assert tree <= set(errors.__all__)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_error_survives_pickling_with_all_its_data(name):
    error = EXAMPLES[name]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again).keys() == vars(error).keys()
    for attribute, value in vars(error).items():
        if attribute != "_failures":
            assert getattr(again, attribute) == value


def test_a_coordination_error_says_everything_and_is_what_dcp_users_catch():
    error = EXAMPLES["CoordinationTimeout"]
    assert isinstance(error, CheckpointException)
    assert isinstance(error, Exception)
    assert isinstance(error, TimeoutError)
    assert sorted(error.failures) == [1, 2, 5]
    text = str(error)
    for part in (
        "save of '/checkpoints/7' in phase 'plan'",
        "1-2,5",
        "12.5 s",
        "/checkpoints/6",
        "what to do: look",
    ):
        assert part in text


def test_an_error_of_a_later_version_becomes_the_base_class():
    fields = CoordinationTimeout("x").to_fields() | {"type": "CoordinationFromTheFuture"}
    assert type(CoordinationError.from_fields(fields)) is CoordinationError


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "none"),
        ([3], "3"),
        ([3, 1, 2, 7], "1-3,7"),
        (range(0, 64, 2), ",".join(map(str, range(0, 32, 2))) + " and 16 more"),
    ],
)
def test_ranks_are_written_as_ranges_and_cut_at_a_count(ranks, text):
    assert format_ranks(ranks) == text


def test_wrong_options_are_refused_all_at_once_when_they_are_chosen():
    with pytest.raises(ConfigError) as caught:
        CoordinationConfig(plan_timeout=5, io_timeout=timedelta(0), strict="yes")
    assert len(caught.value.problems) == 3
    assert "timedelta(seconds=...)" in str(caught.value)
    assert isinstance(caught.value, ValueError)
