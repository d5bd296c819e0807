"""The fault table: what goes wrong, where, on which rank; and what every surviving rank then sees.

A row is (phase, ranks, kind). One assertion holds for all: every surviving rank ends within its bound,
with the same cause and the same named ranks; no rank reports success unless the checkpoint is complete;
and where all processes still exist, the next save succeeds. What a rank can *raise* in each hook is in
test_failures.py; here processes are killed, frozen, or slow.
"""

import os
import pickle
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
from planner import (
    CoordinationConfig,
    CoordinationTimeout,
    GlooCoordinatedLoadPlanner,
    GlooCoordinatedPlanner,
    TransportError,
)
from tests.support.ranks import arrive, await_arrivals, run_ranks

WORLD = 4
TIMEOUT = timedelta(seconds=4)
# Plans are sent in every save here, so that they can be damaged, or a rank struck, on the way.
CONFIG = CoordinationConfig(plan_timeout=TIMEOUT, remembered_nbytes=0)
SECONDS = 8.0  # a bound that says "seconds" on a busy machine
GRACE = 5.0  # for the coordinator to say why, see planner.exchange

# Where a fault strikes: a method of the storage writer or the planner, or a function of the protocol, and
# at which of its calls in one save.
PHASES = {
    "before entering": ("caller", "save", 0),
    "planning": ("planner", "create_local_plan", 0),
    "sending the plan": ("protocol", "send_parts", 0),
    "gathering plans": ("protocol", "gather", 0),
    "global planning": ("planner", "create_global_plan", 0),
    "giving plans back": ("protocol", "scatter", 0),
    "receiving the plan": ("protocol", "receive_headed", 0),
    "writing": ("writer", "write_data", 0),
    "sending results": ("protocol", "send_parts", 1),
    "finishing": ("writer", "finish", 0),
    "receiving metadata": ("protocol", "receive_headed", 1),
}
COORDINATORS = {"gathering plans", "global planning", "giving plans back", "finishing"}
NOT_COORDINATORS = {"sending the plan", "receiving the plan", "sending results", "receiving metadata"}
# The metadata reply is sent when the checkpoint is complete: then others may report success.
AFTER_COMPLETION = {"receiving metadata"}


def rows():
    for phase in PHASES:
        for ranks in ((0,), (1,), (1, 2)):
            if (0 in ranks and phase in NOT_COORDINATORS) or (0 not in ranks and phase in COORDINATORS):
                continue
            for kind in ("killed", "frozen", "slow"):
                who = {(0,): "coordinator", (1,): "rank", (1, 2): "two ranks"}[ranks]
                yield pytest.param(phase, ranks, kind, id=f"{kind} {who} {phase}")


# The same for a load, and for a save in a thread: phase -> (operation, where, name, call)
OTHERS = {
    "planning a load": ("load", "planner", "create_local_plan", 0),
    "reading": ("load", "storage", "read_data", 0),
    "planning in the background": ("async", "planner", "create_local_plan", 0),
    "writing in the background": ("async", "storage", "write_data", 0),
}


def other_rows():
    for phase in OTHERS:
        for rank in (0, 1):
            for kind in ("killed", "frozen", "slow"):
                yield pytest.param(
                    phase, rank, kind, id=f"{kind} {'coordinator' if rank == 0 else 'rank'} {phase}"
                )


def strike(kind):
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "frozen":
        store = dist.distributed_c10d._get_default_store()
        store.set(f"frozen{dist.get_rank()}", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)  # until the test lets it go on
    else:
        threading.Event().wait(1.5)  # slow, and alive


class Armed:
    """Strikes once, at one call of one function, on one rank."""

    def __init__(self, phase, kind):
        self.where, self.name, self.at = PHASES[phase]
        self.kind = kind
        self.calls = 0

    def around(self, function):
        def call(*args, **kwargs):
            number, self.calls = self.calls, self.calls + 1
            if number == self.at:
                strike(self.kind)
            return function(*args, **kwargs)

        return call

    def make(self, folder, monkeypatch):
        writer, inner = dcp.FileSystemWriter(folder, sync_files=False), dcp.DefaultSavePlanner()
        if self.where == "caller":
            strike(self.kind)
        elif self.where == "protocol":
            monkeypatch.setattr(
                planner.exchange, self.name, self.around(getattr(planner.exchange, self.name))
            )
        else:
            owner = writer if self.where == "writer" else inner
            setattr(owner, self.name, self.around(getattr(owner, self.name)))
        return writer, inner


def state_of(rank):
    return {"weight": torch.arange(8.0) + 1, f"own{rank}": torch.full((2,), float(rank))}


def save(rank, folder):
    return dcp.save(state_of(rank), checkpoint_id=folder, planner=GlooCoordinatedPlanner(config=CONFIG))


def thaw(rank, struck):
    """Let the frozen ranks go on when the others have ended, and wait until all have."""
    store = dist.distributed_c10d._get_default_store()
    arrive("ended")
    if rank == min(set(range(WORLD)) - set(struck)):
        await_arrivals("ended", WORLD - len(struck))
        for frozen in struck:
            os.kill(int(store.get(f"frozen{frozen}")), signal.SIGCONT)
    await_arrivals("ended", WORLD)


def suffer(rank, folder, phase, struck, kind):
    save(rank, f"{folder}/before")
    start = time.monotonic()
    error = metadata = None
    with pytest.MonkeyPatch.context() as monkeypatch:
        writer, inner = dcp.FileSystemWriter(f"{folder}/struck"), dcp.DefaultSavePlanner()
        if rank in struck:
            writer, inner = Armed(phase, kind).make(f"{folder}/struck", monkeypatch)
        try:
            metadata = dcp.save(
                state_of(rank), storage_writer=writer, planner=GlooCoordinatedPlanner(inner, config=CONFIG)
            )
        except CheckpointException as caught:
            error = caught
    seconds = time.monotonic() - start
    is_complete = Path(folder, "struck", ".metadata").exists()
    if metadata is not None:
        assert pickle.loads(Path(folder, "struck", ".metadata").read_bytes()) == metadata
    if kind == "frozen":
        thaw(rank, struck)
    if kind != "killed":
        save(rank, f"{folder}/after")
        assert Path(folder, "after", ".metadata").exists()
    return error, seconds, is_complete


def suffer_otherwise(rank, folder, phase, struck, kind):
    operation, where, name, at = OTHERS[phase]
    save(rank, f"{folder}/before")
    if operation == "load":
        storage, inner = dcp.FileSystemReader(f"{folder}/before"), dcp.DefaultLoadPlanner()
    else:
        storage, inner = dcp.FileSystemWriter(f"{folder}/struck", sync_files=False), dcp.DefaultSavePlanner()
    if rank == struck:
        armed = Armed.__new__(Armed)
        armed.name, armed.at, armed.kind, armed.calls = name, at, kind, 0
        owner = storage if where == "storage" else inner
        setattr(owner, name, armed.around(getattr(owner, name)))
    start = time.monotonic()
    error = None
    try:
        if operation == "load":
            planner_ = GlooCoordinatedLoadPlanner(inner, config=CONFIG)
            dcp.load(dict(state_of(rank)), storage_reader=storage, planner=planner_)
        else:
            planner_ = GlooCoordinatedPlanner(inner, config=CONFIG)
            dcp.async_save(state_of(rank), storage_writer=storage, planner=planner_).result()
    except CheckpointException as caught:
        error = caught
    seconds = time.monotonic() - start
    if kind == "frozen":
        thaw(rank, (struck,))
    if kind != "killed":
        save(rank, f"{folder}/after")
    return error, seconds, Path(folder, "struck", ".metadata").exists()


@pytest.mark.parametrize(("phase", "struck", "kind"), list(other_rows()))
def test_loads_and_background_saves_end_in_time_with_the_same_named_cause(phase, struck, kind, tmp_path):
    outcomes = run_ranks(
        suffer_otherwise, WORLD, str(tmp_path), phase, struck, kind, may_fail=True, timeout=50
    )
    survivors = {rank: outcome for rank, outcome in enumerate(outcomes) if rank != struck or kind == "slow"}
    texts = [outcome.error_text for outcome in survivors.values() if outcome.error is not None]
    assert not texts, "\n".join(texts)
    assert all(not outcome.died for outcome in survivors.values())
    ends = [outcome.value for outcome in survivors.values()]
    if kind == "slow":
        assert all(error is None for error, _, _ in ends)
        return
    bound = SECONDS if kind == "killed" else TIMEOUT.total_seconds() + GRACE + SECONDS
    assert all(seconds < bound for _, seconds, _ in ends), ends
    assert {(type(error), error.ranks) for error, _, _ in ends} in (
        {(CoordinationTimeout, (struck,))},
        {(TransportError, (struck,))},
    ), ends
    assert not (tmp_path / "struck" / ".metadata").exists()


@pytest.mark.parametrize(("phase", "struck", "kind"), list(rows()))
def test_every_surviving_rank_ends_in_time_with_the_same_named_cause(phase, struck, kind, tmp_path):
    outcomes = run_ranks(suffer, WORLD, str(tmp_path), phase, struck, kind, may_fail=True, timeout=50)
    survivors = {
        rank: outcome for rank, outcome in enumerate(outcomes) if rank not in struck or kind == "slow"
    }
    assert all(not outcome.died for outcome in survivors.values())
    texts = {rank: outcome.error_text for rank, outcome in survivors.items() if outcome.error is not None}
    assert not texts, "\n".join(texts.values())
    ends = {rank: outcome.value for rank, outcome in survivors.items()}
    if kind == "slow":
        assert all(error is None and is_complete for error, _, is_complete in ends.values()), ends
        return
    assert {outcomes[rank].died for rank in struck} == {kind == "killed"}
    bound = SECONDS if kind == "killed" else TIMEOUT.total_seconds() + GRACE + SECONDS
    is_in_transfer = PHASES[phase][0] == "protocol"
    for error, seconds, is_complete in ends.values():
        assert seconds < bound
        assert error is not None or is_complete
        if error is not None:
            named = set(error.ranks)
            # A transfer ends with its first lost connection, and the others may be lost a moment later.
            assert named == set(struck) or (named and named < set(struck) and is_in_transfer), str(ends)
            assert type(error) in {CoordinationTimeout, TransportError}
            assert str(tmp_path / "struck") in str(error)
    errors = {(type(error), error.ranks) for error, _, _ in ends.values() if error is not None}
    assert len(errors) == 1 or (phase in AFTER_COMPLETION and len(errors) <= 1), ends
    if phase not in AFTER_COMPLETION | {"finishing"}:
        assert not (tmp_path / "struck" / ".metadata").exists()
        assert all(error is not None for error, _, _ in ends.values())
