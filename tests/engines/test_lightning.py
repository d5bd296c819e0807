from typing import ClassVar

import pytest

from tests.engines.checks import EngineTests

pytest.importorskip("lightning")


class TestLightning(EngineTests):
    trainer = "trainer_lightning.py"
    world_size = 4  # two by two: FSDP2 and tensor parallel
    calls: ClassVar = {"save": (9, 3), "load": (14, 3)}
