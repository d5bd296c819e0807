"""A short run of tests/chaos.py; ``make chaos`` is the long one."""

from tests.chaos import run


def test_saves_under_random_faults_keep_all_invariants():
    faults, _ = run(rounds=10, seed=20)
    assert sum(faults.values()) == 10
