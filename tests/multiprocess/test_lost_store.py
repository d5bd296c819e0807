"""A store whose host has ended, or is frozen, is an error that says so, within the planning deadline."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import planner.exchange
from planner import CoordinationConfig, GlooCoordinatedLoadPlanner, GlooCoordinatedPlanner, TransportError
from tests.support.ranks import CONTEXT, run_ranks

WORLD = 3
TIMEOUT = timedelta(seconds=3)
CONFIG = CoordinationConfig(plan_timeout=TIMEOUT)
WAIT_S = 30.0
SOON_S = 8.0
BOUND_S = 2 * TIMEOUT.total_seconds() + SOON_S  # one wait for gloo to connect, and one for the store


def state_of(rank):
    return {"weight": torch.arange(8.0) + 1, f"own{rank}": torch.full((2,), float(rank))}


def save(rank, folder):
    return dcp.save(state_of(rank), checkpoint_id=folder, planner=GlooCoordinatedPlanner(config=CONFIG))


def call(rank, operation, storage, inner):
    if operation == "load":
        load_planner = GlooCoordinatedLoadPlanner(inner, config=CONFIG)
        dcp.load(state_of(rank), storage_reader=storage, planner=load_planner)
    else:
        save_planner = GlooCoordinatedPlanner(inner, config=CONFIG)
        dcp.save(state_of(rank), storage_writer=storage, planner=save_planner)


def host_store(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


class StoreHost:
    """A process that does nothing but host a store, as the launcher's agent does."""

    def __init__(self):
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=host_store, args=(theirs,), daemon=True)

    def __enter__(self):
        self._process.start()
        self.port = self._pipe.recv()
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.join()

    def strike(self, number):
        os.kill(self._process.pid, number)
        if number == signal.SIGSTOP:  # each of its threads goes on until it next looks
            while Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
                os.sched_yield()


class Signals:
    """Where ranks and test wait for one another, since they cannot by the store."""

    def __init__(self):
        self.is_halted, self.is_struck, self.is_thawed = CONTEXT.Event(), CONTEXT.Event(), CONTEXT.Event()
        self.all_ended = CONTEXT.Barrier(WORLD + 1, timeout=WAIT_S)  # with the test
        self.all_saved = CONTEXT.Barrier(WORLD, timeout=WAIT_S)


def halting(signals, function):
    """Call ``function`` once the store has been struck."""

    def call(*args, **options):
        signals.is_halted.set()
        assert signals.is_struck.wait(WAIT_S)
        return function(*args, **options)

    return call


def lose_the_store(rank, folder, signals, operation, phase, earlier_saves):
    for number in range(earlier_saves):
        save(rank, f"{folder}/before{number}")
    if operation == "load":
        inner = dcp.DefaultLoadPlanner()
        storage = dcp.FileSystemReader(f"{folder}/before0")
    else:
        inner = dcp.DefaultSavePlanner()
        storage = dcp.FileSystemWriter(f"{folder}/struck-save", sync_files=False)
    owner = next(owner for owner in (inner, storage, planner.exchange) if hasattr(owner, phase))
    if rank == WORLD - 1:  # the others are waiting by then, in the store or in gloo
        setattr(owner, phase, halting(signals, getattr(owner, phase)))
    start = time.monotonic()
    with pytest.raises(TransportError, match="the job's store does not answer") as caught:
        call(rank, operation, storage, inner)
    seconds = time.monotonic() - start
    assert isinstance(caught.value, CheckpointException)
    assert caught.value.operation == operation
    assert "127.0.0.1" in str(caught.value)
    signals.all_ended.wait()
    return seconds


def lose_and_find_the_store(rank, folder, signals, *args):
    seconds = lose_the_store(rank, folder, signals, *args)
    assert signals.is_thawed.wait(WAIT_S)
    ends = []
    for number in range(3):
        try:
            save(rank, f"{folder}/after{number}")
        except CheckpointException as error:
            ends.append(str(error))
        else:
            ends.append("saved")
        signals.all_saved.wait()
    return seconds, ends


ROWS = [
    ("save", "send_parts", 0),
    ("save", "create_local_plan", 0),
    ("save", "create_local_plan", 1),
    ("save", "write_data", 0),
    ("load", "create_local_plan", 1),
    ("load", "read_data", 1),
]


def run_and_strike(worker, number, folder, row):
    """Run ``worker`` on ranks whose store's host gets a signal on the way; return what it returned."""
    signals = Signals()
    with StoreHost() as host:

        def control(_processes):
            assert signals.is_halted.wait(WAIT_S)
            host.strike(number)
            signals.is_struck.set()
            try:
                signals.all_ended.wait()
            except threading.BrokenBarrierError as error:
                raise AssertionError("some ranks have not ended") from error
            if number == signal.SIGSTOP:
                host.strike(signal.SIGCONT)
            signals.is_thawed.set()

        outcomes = run_ranks(worker, WORLD, str(folder), signals, *row, control=control, store_port=host.port)
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_a_store_whose_host_freezes_is_an_error_at_the_deadline_and_works_again_later(row, tmp_path):
    found = run_and_strike(lose_and_find_the_store, signal.SIGSTOP, tmp_path, row)
    for seconds, ends in found:
        assert seconds < BOUND_S
        assert ends[-1] == "saved", ends
    for ends in zip(*(ends for _, ends in found), strict=True):
        assert len({end == "saved" for end in ends}) == 1, ends  # all or nobody


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: "-".join(map(str, row)))
def test_a_store_whose_host_ends_is_an_error_at_once(row, tmp_path):
    found = run_and_strike(lose_the_store, signal.SIGKILL, tmp_path, row)
    assert all(seconds < SOON_S for seconds in found)
