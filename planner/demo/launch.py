"""Start processes on this machine with torch's elastic launcher, and say once what they failed with."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

__all__ = ["describe", "launch"]


def launch(
    ranks: int,
    worker: Callable[..., Any],
    *args: object,
    hidden: Std = Std.NONE,
    uses_device: bool = False,
) -> dict[int, Any]:
    """Run ``worker`` on ``ranks`` processes of this machine and return their results by rank."""
    _prepare_workers(uses_device=uses_device)
    with tempfile.TemporaryDirectory(prefix="planner-demo-logs-") as log_dir:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="planner-demo",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir, redirects=hidden),
            start_method="forkserver",
        )
        results: dict[int, Any] = elastic_launch(config, _work)(worker, *args)
    return results


def _work(worker: Callable[..., Any], *args: object) -> object:
    try:
        return worker(*args)
    except CheckpointException as error:
        # A BaseException, of which the launcher would not record the traceback.
        raise RuntimeError("DCP reported a failure") from error


def _prepare_workers(*, uses_device: bool) -> None:
    # They are forked from one process that has imported torch, instead of importing it N times.
    multiprocessing.set_forkserver_preload(["planner.demo", "torch._dynamo"])
    # They inherit the environment: no accelerator, no network but this machine's own.
    if not uses_device:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    # The traceback of one that failed is printed once, by us.
    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def describe(error: ChildFailedError) -> str:
    """Return what the workers failed with, each traceback once."""
    ranks: dict[str, list[int]] = {}
    for rank, failure in sorted(error.failures.items()):
        recorded = failure.error_file_data["message"]  # a text where the worker could not say more
        text = recorded["extraInfo"]["py_callstack"] if isinstance(recorded, dict) else failure.message
        ranks.setdefault(text.rstrip(), []).append(rank)
    return "\n".join(f"demo: failed on ranks {where}\n{text}" for text, where in ranks.items())
