"""Real ranks for tests: forked processes with a real store, and nothing left behind when one hangs.

A test calls ``run_ranks(worker, world_size, ...)``; ``worker(rank, *args)`` runs on every rank inside
an initialised process group, and what it returns or raises comes back. Ranks that are done stay alive
until all are, since their closing sockets would turn real hangs into quick errors.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TRIP_WIRE = "cuda:gloo"  # on a machine without CUDA: every object collective on the default group raises

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch.distributed.checkpoint", "torch.distributed.tensor", "planner", __name__]
)


class RankError(AssertionError):
    """A rank did not end as the test expected."""


@dataclass
class Outcome:
    """How one rank ended."""

    value: Any = None
    error: BaseException | None = None
    error_text: str = ""
    seconds: float = 0.0
    died: bool = False


def arrive(name: str) -> None:
    """Say to the other ranks of the job that this one has come to a point."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{store.add(name, 1)}", b"")


def await_arrivals(name: str, count: int) -> None:
    """Wait until there were ``count`` arrivals at a point."""
    dist.distributed_c10d._get_default_store().wait([f"{name}/{count}"], timedelta(seconds=60))


def meet(name: str, count: int) -> None:
    """Arrive at a point, and wait for the others: ``count`` in all."""
    arrive(name)
    await_arrivals(name, count)


def run_ranks(
    worker,
    world_size: int,
    *args,
    backend: str = TRIP_WIRE,
    timeout: float = 60.0,
    may_fail: bool = False,
    env: dict[str, str] | None = None,
    control=None,
    daemonic: bool = True,
    store_port: int | None = None,
) -> list[Outcome]:
    """Run ``worker(rank, *args)`` on ``world_size`` ranks and return how each ended, by rank.

    Without ``may_fail`` any error is a failure of the test, with all ranks' tracebacks. ``control`` is
    called with the list of processes once all have started, for tests that kill or freeze some. Ranks
    that start processes themselves must not be ``daemonic``. The store of the ranks is this process's,
    or the one at ``store_port``.
    """
    store = None
    if store_port is None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store_port = store.port
    folder = tempfile.mkdtemp(prefix="ranks-")
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(
            target=_rank_main,
            args=(
                worker.__module__,
                worker.__qualname__,
                rank,
                world_size,
                store_port,
                backend,
                folder,
                theirs,
                args,
                env,
            ),
            daemon=daemonic,
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    try:
        if control is not None:
            try:
                control(processes)
            except AssertionError as error:
                ready = [rank for rank, pipe in enumerate(pipes) if pipe.poll()]
                ends = "\n".join(f"--- rank {rank}: {_receive(pipes[rank]).error_text}" for rank in ready)
                hung = [rank for rank in range(world_size) if rank not in ready]
                raise RankError(f"{error}\n{ends}\n{_stacks(processes, hung, folder)}") from error
        while len(outcomes) < world_size:
            waiting = {pipes[rank]: rank for rank in range(world_size) if rank not in outcomes}
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                hung = sorted(waiting.values())
                stacks = _stacks(processes, hung, folder)
                done = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
                raise RankError(f"ranks {hung} hang after {timeout} s\n{stacks}\nothers: {done}")
            for pipe in ready:
                outcomes[waiting[pipe]] = _receive(pipe)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
    ended = [outcomes[rank] for rank in range(world_size)]
    if not may_fail and any(outcome.error is not None or outcome.died for outcome in ended):
        raise RankError(
            "\n".join(
                f"--- rank {rank}: {'died' if outcome.died else outcome.error_text}"
                for rank, outcome in enumerate(ended)
                if outcome.died or outcome.error is not None
            )
        )
    return ended


def _receive(pipe) -> Outcome:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return Outcome(died=True)


def _stacks(processes, hung: list[int], folder: str) -> str:
    for rank in hung:
        if processes[rank].is_alive():
            os.kill(processes[rank].pid, signal.SIGCONT)
            os.kill(processes[rank].pid, signal.SIGUSR1)
    texts = []
    for rank in hung:
        path = Path(folder, f"{rank}.stack")
        until = time.monotonic() + 5
        while time.monotonic() < until and not (path.exists() and path.stat().st_size):
            os.sched_yield()
        texts.append(f"--- rank {rank}:\n{path.read_text() if path.exists() else '(no stack)'}")
    return "\n".join(texts)


def _rank_main(module, qualname, rank, world_size, port, backend, folder, pipe, args, env) -> None:
    stack_file = Path(folder, f"{rank}.stack").open("w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    os.environ.update(env or {})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    outcome = Outcome()
    start = time.monotonic()
    try:
        worker = importlib.import_module(module)
        for name in qualname.split("."):
            worker = getattr(worker, name)
        if ":" in backend and "." in backend:  # "module:backend": the module registers it
            module, backend = backend.split(":")
            importlib.import_module(module)
        if backend:
            store = dist.TCPStore(
                "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
            )
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
            )
        start = time.monotonic()
        outcome.value = worker(rank, *args)
    except BaseException as error:  # noqa: BLE001 - reported to the test, whatever it is
        outcome.error = error
        outcome.error_text = "".join(traceback.format_exception(error))
    outcome.seconds = time.monotonic() - start
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - an error that does not travel is still an outcome
        outcome.value, outcome.error = None, RuntimeError(outcome.error_text or "the value does not pickle")
        data = pickle.dumps(outcome)
    pipe.send_bytes(data)
    with suppress(EOFError, OSError):
        pipe.recv_bytes()  # ends when the test has heard from everybody
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
