"""Whole processes: torch_npu imported before and after this library, and what it does at the end.

At exit it waits for the device and shuts every process group down, so also what lives beside our own.
"""

import os
import subprocess
import sys

import pytest

from tests.npu.conftest import DEVICE_TIMEOUT_MS
from tests.npu.job import SAVED_AND_LOADED

TRACEBACK = ("[rank0]: ", "[rank1]: ")  # of the job's own error


@pytest.mark.parametrize(
    ("imports", "ending", "code"),
    [
        ("torch_npu first", "left", 0),  # with the default group and ours alive
        ("planner first", "destroyed", 0),
        ("transfer last", "raised", 1),
    ],
)
def test_a_job_ends_at_once_and_without_noise_whatever_was_imported_first(tmp_path, imports, ending, code):
    environment = {
        **os.environ,
        "ACL_STREAM_TIMEOUT": str(DEVICE_TIMEOUT_MS),
        "FAKE_HCCL": "hang",
        "FAKE_HCCL_DIR": str(tmp_path),
        "FAKE_NPU_DEVICES": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # the job imports torch_npu when it says
        "TORCH_DIST_INIT_BARRIER": "1",  # no rank is reported late that is only still importing
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.npu.job", str(rank), "2", tmp_path, imports, ending],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, noise = rank.communicate(timeout=120)
            assert "same\n" in output, noise
            assert rank.returncode == code
            last = noise.split(SAVED_AND_LOADED)[1].splitlines()
            assert [line for line in last if line and not line.startswith(TRACEBACK)] == []
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
