from typing import ClassVar

import pytest

from tests.engines.checks import EngineTests

pytest.importorskip("torchtitan")


class TestTorchtitan(EngineTests):
    trainer = "trainer_torchtitan.py"
    saves = ("save", "save_async")
    calls: ClassVar = {"save": (9, 0), "save_async": (9, 0), "load": (7, 0)}
