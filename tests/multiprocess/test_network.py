"""A rank whose address the others cannot reach is named, with that address, on every rank."""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from planner import CoordinationConfig, GlooCoordinatedPlanner, TransportError
from tests.support.faults import KINDS, make_storage_and_planner
from tests.support.ranks import meet, run_ranks

WORLD = 3
CONFIG = CoordinationConfig(plan_timeout=timedelta(seconds=4))
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914


def enter_network(number):
    """Move this thread into a new network, or into the one of an open file; open sockets stay as they are."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.unshare(CLONE_NEWNET) if number is None else libc.setns(number, CLONE_NEWNET)
    if done != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def network_of_its_own():
    """Cut this thread off: it has a loopback interface, but nobody else is there."""
    with Path("/proc/thread-self/ns/net").open() as before:
        enter_network(None)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", 0x1 | 0x40))  # up, running
        try:
            yield
        finally:
            enter_network(before.fileno())


def save(rank, folder):
    state = {"weight": torch.arange(8.0), f"own{rank}": torch.full((2,), float(rank))}
    return dcp.save(state, checkpoint_id=folder, planner=GlooCoordinatedPlanner(config=CONFIG))


def be_out_of_reach(rank, folder):
    save(rank, f"{folder}/before")
    writer, inner = make_storage_and_planner(f"{folder}/failed", "write_data", [2], KINDS["plain"])
    with pytest.raises(BaseException, match="no space left"):  # so that a new group is made
        dcp.save({}, storage_writer=writer, planner=GlooCoordinatedPlanner(inner, config=CONFIG))
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:  # noqa: PT012 - the rank out of reach is one of them
        if rank == 1:
            with network_of_its_own():
                save(rank, f"{folder}/cut-off")
        else:
            save(rank, f"{folder}/cut-off")
    seconds = time.monotonic() - start
    assert list(caught.value.ranks) == [1]
    assert "127.0.0.1" in str(caught.value), str(caught.value)
    assert "GLOO_SOCKET_IFNAME" in str(caught.value), str(caught.value)
    meet("ended", WORLD)
    save(rank, f"{folder}/after")
    return seconds


def test_a_rank_at_an_address_that_cannot_be_reached_is_named_on_all_ranks(tmp_path):
    probe = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({CLONE_NEWNET}))"
    if subprocess.run([sys.executable, "-c", probe], check=False).returncode:
        pytest.skip("cutting a rank off takes a network namespace, which only root may make: run it as root")
    outcomes = run_ranks(be_out_of_reach, WORLD, str(tmp_path))
    assert max(outcome.value for outcome in outcomes) < CONFIG.plan_timeout.total_seconds() + 8
    assert (tmp_path / "after" / ".metadata").exists()
