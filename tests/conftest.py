"""Hypothesis profiles: ``HYPOTHESIS_PROFILE=long`` for thousands of examples, new ones at each run."""

from __future__ import annotations

import importlib.util
import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("normal", max_examples=150, derandomize=True, deadline=None)
settings.register_profile(
    "long",
    max_examples=3000,
    derandomize=False,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "normal")
settings.load_profile(PROFILE)

# Those have an environment of their own, see `make npu`.
collect_ignore = [] if importlib.util.find_spec("torch_npu") else ["npu"]


def pytest_collection_modifyitems(items):
    if PROFILE == "long":
        for item in items:
            item.add_marker(pytest.mark.timeout(0))
