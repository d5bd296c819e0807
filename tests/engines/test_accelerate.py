from typing import ClassVar

import pytest

from tests.engines.checks import EngineTests

pytest.importorskip("accelerate")


class TestAccelerate(EngineTests):
    trainer = "trainer_accelerate.py"
    calls: ClassVar = {"save": (18, 0), "load": (14, 4)}
