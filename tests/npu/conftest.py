"""Ranks on the real torch_npu and a fake CANN: see ``fakecann/fakecann.h`` for what the latter does."""

from __future__ import annotations

import warnings

import pytest

try:
    from tests.npu import fake  # noqa: F401 - torch itself cannot be imported without these libraries
except OSError as error:
    pytest.exit(f"{error}: these tests run by `make npu`", returncode=2)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch_npu's own, while torch imports it
    import torch  # noqa: F401

from tests.support.ranks import run_ranks

DEVICE_TIMEOUT_MS = 1000  # of a stream; the field report's was 340000


@pytest.fixture
def npu_ranks(tmp_path):
    """Return ``run_ranks`` for ranks that have an NPU each, unless ``devices`` says how many there are.

    ``hccl`` says what collectives on the device do after the first ``after``.
    """

    def run(
        worker,
        world_size,
        *args,
        backend="hccl",
        hccl="ok",
        after=0,
        devices=None,
        env=None,
        timeout=120.0,
        **options,
    ):
        environment = {
            "ACL_STREAM_TIMEOUT": str(DEVICE_TIMEOUT_MS),
            "FAKE_HCCL": hccl,
            "FAKE_HCCL_AFTER": str(after),
            "FAKE_HCCL_DIR": str(tmp_path),
            "HCCL_EXEC_TIMEOUT": "30",  # below the groups' own, or it warns
            "MASTER_ADDR": "127.0.0.1",
            "FAKE_NPU_DEVICES": str(world_size if devices is None else devices),
            **(env or {}),
        }
        return run_ranks(
            worker, world_size, *args, backend=backend, env=environment, timeout=timeout, **options
        )

    return run
