"""The two worlds that each engine's tests look at."""

from __future__ import annotations

import pytest

from tests.engines.checks import run_trainer


@pytest.fixture(scope="class")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="class")
def world(request, folder):
    """Return what each rank found where some steps are under ``coordinated()`` and others are not."""
    steps = []
    for save in request.cls.saves:
        stock, ours = folder / f"{save}-stock", folder / f"{save}-ours"
        steps += [f"{save}:{stock}", f"load:{stock}", f"+{save}:{ours}"]
        steps += [f"+load:{ours}", f"+load:{stock}", f"load:{ours}"]
    ranks = run_trainer(request.cls, folder / "world", steps)
    assert not any(rank["steps"][0]["had_planner"] for rank in ranks)
    return ranks


@pytest.fixture(scope="class")
def unedited(request, folder, world):
    """Return the same of a world whose script was run by ``python -m planner run``."""
    steps = []
    for save in request.cls.saves:
        steps += [f"{save}:{folder / save}-run", f"load:{folder / save}-stock"]
    return run_trainer(request.cls, folder / "unedited", steps, through=("-m", "planner", "run"))
