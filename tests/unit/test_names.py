"""Replacing names that others replace too."""

import functools
import logging
import types

import pytest

from planner import names


def ours():
    pass


@pytest.fixture
def module():
    """Return a module of torch with one function of its own."""
    module = types.ModuleType("torch.some")
    exec("def call(): pass", {"__name__": "torch.some"}, vars(module))
    return module


def test_a_name_is_replaced_and_put_back(module, caplog):
    original = module.call
    names.replace(module, "call", ours)
    assert module.call is ours
    assert names.check(module, "call") is None
    assert names.restore(module, "call") is None
    assert module.call is original
    assert caplog.text == ""


def test_what_another_library_put_there_before_is_said_and_comes_back(module, caplog):
    module.call = wrapper = functools.wraps(module.call)(lambda: None)  # carries the names of what it wraps
    names.replace(module, "call", ours)
    assert f"torch.some.call was replaced by call of {__name__} before" in caplog.text
    names.restore(module, "call")
    assert module.call is wrapper


def test_what_another_library_put_there_after_is_said_and_left_there(module):
    names.replace(module, "call", ours)
    module.call = other = lambda: None
    assert __name__ in names.check(module, "call")
    assert __name__ in names.restore(module, "call")
    assert module.call is other


def test_ours_below_a_wrapper_that_says_so_is_in_place(module):
    names.replace(module, "call", ours)
    module.call = functools.wraps(ours)(lambda: ours())  # noqa: PLW0108 - somebody's
    assert names.check(module, "call") is None


def test_ours_is_put_there_again_where_another_library_undid_it(module, caplog):
    original = module.call
    names.replace(module, "call", ours)
    module.call = original
    with caplog.at_level(logging.WARNING):
        assert names.check(module, "call") is None
    assert module.call is ours
    assert "torch.some.call was undone by another library" in caplog.text
