"""A store whose host has ended, or is frozen, is an error that says so, within the planning deadline."""

import multiprocessing
import os
import signal
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
from tests.support.faults import await_file
from tests.support.ranks import run_ranks

WORLD = 3
TIMEOUT = timedelta(seconds=3)
CONFIG = CoordinationConfig(plan_timeout=TIMEOUT)
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
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=host_store, args=(theirs,), daemon=True)

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
                pass


class Halting:
    """Calls a function, once all that a test waits for has happened meanwhile."""

    def __init__(self, folder, function):
        self.folder, self.function = folder, function

    def __call__(self, *args, **options):
        Path(self.folder, f"there-{dist.get_rank()}").touch()
        await_file(Path(self.folder, "struck"))
        return self.function(*args, **options)


def lose_the_store(rank, folder, operation, phase, earlier_saves):
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
        setattr(owner, phase, Halting(folder, getattr(owner, phase)))
    start = time.monotonic()
    with pytest.raises(TransportError, match="the job's store does not answer") as caught:
        call(rank, operation, storage, inner)
    seconds = time.monotonic() - start
    assert isinstance(caught.value, CheckpointException)
    assert caught.value.operation == operation
    assert "127.0.0.1" in str(caught.value)
    Path(folder, f"ended-{rank}").touch()
    await_file(Path(folder, "thawed"))
    return seconds


def lose_and_find_the_store(rank, folder, *args):
    seconds = lose_the_store(rank, folder, *args)
    ends = []
    for number in range(3):
        try:
            save(rank, f"{folder}/after{number}")
        except CheckpointException as error:
            ends.append(str(error))
        else:
            ends.append("saved")
        Path(folder, f"after{number}-{rank}").touch()
        for peer in range(WORLD):
            await_file(Path(folder, f"after{number}-{peer}"))
    return seconds, ends


ROWS = [
    ("save", "send_parts", 0),
    ("save", "create_local_plan", 0),
    ("save", "create_local_plan", 1),
    ("save", "write_data", 0),
    ("load", "create_local_plan", 1),
    ("load", "read_data", 1),
]


def strike(folder, host, number):
    def control(_processes):
        await_file(Path(folder, f"there-{WORLD - 1}"))
        host.strike(number)
        Path(folder, "struck").touch()
        for rank in range(WORLD):
            await_file(Path(folder, f"ended-{rank}"))
        if number == signal.SIGSTOP:
            host.strike(signal.SIGCONT)
        Path(folder, "thawed").touch()

    return control


@pytest.mark.parametrize(("operation", "phase", "earlier_saves"), ROWS)
def test_a_store_whose_host_freezes_is_an_error_at_the_deadline_and_works_again_later(
    operation, phase, earlier_saves, tmp_path
):
    with StoreHost() as host:
        outcomes = run_ranks(
            lose_and_find_the_store,
            WORLD,
            str(tmp_path),
            operation,
            phase,
            earlier_saves,
            control=strike(tmp_path, host, signal.SIGSTOP),
            store_port=host.port,
        )
    for outcome in outcomes:
        seconds, ends = outcome.value
        assert seconds < BOUND_S
        assert ends[-1] == "saved", ends
    for ends in zip(*(outcome.value[1] for outcome in outcomes), strict=True):
        assert len({end == "saved" for end in ends}) == 1, ends  # all or nobody


@pytest.mark.parametrize(("operation", "phase", "earlier_saves"), ROWS[1:])
def test_a_store_whose_host_ends_is_an_error_at_once(operation, phase, earlier_saves, tmp_path):
    with StoreHost() as host:
        outcomes = run_ranks(
            lose_the_store,
            WORLD,
            str(tmp_path),
            operation,
            phase,
            earlier_saves,
            control=strike(tmp_path, host, signal.SIGKILL),
            store_port=host.port,
        )
    assert all(outcome.value < SOON_S for outcome in outcomes)
