"""While many objects are made the collector leaves old ones alone, and is then as it was before."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from planner.wire.gc_pause import paused_gc


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture
def generations():
    """The generation of each collection from here on."""
    found = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def test_old_objects_are_left_alone_and_young_garbage_is_not(generations):
    with paused_gc():
        garbage = weakref.ref(Cycle())
        kept = [[] for _ in range(300_000)]
        assert garbage() is None
    assert len(kept) == 300_000
    assert generations
    assert 2 not in generations


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_as_it_was_afterwards_also_where_one_pause_is_in_another_and_on_errors(fails):
    before = gc.get_threshold()
    try:
        with paused_gc(), paused_gc():
            assert gc.get_threshold() != before
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert gc.get_threshold() == before
    assert gc.isenabled()


def test_it_is_as_it_was_afterwards_where_two_threads_overlap():
    before = gc.get_threshold()
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def second():
        first_in.wait(10)
        with paused_gc():
            second_in.set()
            first_out.wait(10)

    thread = threading.Thread(target=second)
    thread.start()
    with paused_gc():
        first_in.set()
        assert second_in.wait(10)
    assert gc.get_threshold() != before
    first_out.set()
    thread.join(10)
    assert gc.get_threshold() == before


def test_a_collector_that_is_off_stays_off_and_a_new_setting_stays():
    before = gc.get_threshold()
    gc.disable()
    try:
        with paused_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    try:
        with paused_gc():
            gc.set_threshold(123, 4, 5)
        assert gc.get_threshold() == (123, 4, 5)
    finally:
        gc.set_threshold(*before)
