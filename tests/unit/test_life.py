"""Ranks that have gone silent are told from those that never came."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from planner.life import SilenceWatch


def watch_over(lives):
    """A watch that takes any rank for silent that shows the same life twice, in the save ``this``."""
    channel = SimpleNamespace(
        lives=lambda ranks: [lives[rank] for rank in ranks],
        is_in_this_save=lambda life: life.startswith(b"this"),
    )
    return SilenceWatch(channel, timedelta(0))


@pytest.mark.parametrize("have_entered", [False, True])
def test_only_a_rank_that_showed_life_can_go_silent_and_in_an_earlier_save_only_if_it_has_entered_this(
    have_entered,
):
    lives = {1: b"", 2: b"this 1", 3: b"before 7", 4: b"this 1"}
    watch = watch_over(lives)
    assert watch.look(list(lives), have_entered=have_entered) == []
    lives[4] = b"this 2"
    assert watch.look(list(lives), have_entered=have_entered) == ([2, 3] if have_entered else [2])
