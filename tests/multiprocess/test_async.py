"""``dcp.async_save`` with our planner, in a thread and in a process of its own."""

import logging
import pickle
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from planner import (
    CoordinationConfig,
    CoordinationError,
    CoordinationMismatch,
    GlooCoordinatedLoadPlanner,
    GlooCoordinatedPlanner,
    RemoteError,
)
from tests.support.faults import KINDS, Gate, make_storage_and_planner
from tests.support.ranks import run_ranks

CONFIG = CoordinationConfig(plan_timeout=timedelta(seconds=20))


def state_of(rank, value=1.0):
    return {"weight": torch.full((8,), value), f"own{rank}": torch.full((2,), float(rank))}


def written(folder):
    return pickle.loads(Path(folder, ".metadata").read_bytes())


def check_loads(rank, folder, value=1.0):
    target = {"weight": torch.zeros(8), f"own{rank}": torch.zeros(2)}
    dcp.load(target, checkpoint_id=folder, planner=GlooCoordinatedLoadPlanner(config=CONFIG))
    assert torch.equal(target["weight"], torch.full((8,), value))


def save_in_threads(rank, folder):
    kept = GlooCoordinatedPlanner(config=CONFIG)
    futures = []
    for number in range(6):  # all in flight at once: some with one planner, some with their own
        planner = kept if number % 2 else GlooCoordinatedPlanner(config=CONFIG)
        state_dict = state_of(rank, float(number))
        futures.append(dcp.async_save(state_dict, checkpoint_id=f"{folder}/{number}", planner=planner))
    for number, future in enumerate(futures):
        assert future.result() == written(f"{folder}/{number}")
    for number in range(6):
        check_loads(rank, f"{folder}/{number}", float(number))
    assert kept.report.operation == "save"
    assert kept.report.checkpoint == f"{folder}/5"


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_saves_in_threads_complete_in_order_on_a_group_without_a_cpu_backend(world_size, tmp_path):
    run_ranks(save_in_threads, world_size, str(tmp_path))


def train_and_save(rank, folder):
    rounds = 0
    for number in range(3):
        future = dcp.async_save(
            state_of(rank), checkpoint_id=f"{folder}/{number}", planner=GlooCoordinatedPlanner(config=CONFIG)
        )
        for step in range(100):  # the trainer's own collectives, and new groups, meanwhile
            value = torch.tensor([float(rank + step)])
            dist.all_reduce(value)
            assert value.item() == sum(range(dist.get_world_size())) + step * dist.get_world_size()
            rounds += 1
        group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
        dist.barrier(group)
        assert future.result() == written(f"{folder}/{number}")
    return rounds


def test_a_save_in_a_thread_and_the_trainers_collectives_never_meet(tmp_path):
    run_ranks(train_and_save, 4, str(tmp_path), backend="gloo")


def save_beside_a_wedged_group(rank, folder):
    from tests.support.recording import CALLS

    future = dcp.async_save(
        state_of(rank), checkpoint_id=f"{folder}/thread", planner=GlooCoordinatedPlanner()
    )
    assert future.result() == written(f"{folder}/thread")
    future = dcp.async_save(
        state_of(rank),
        checkpoint_id=f"{folder}/process",
        planner=GlooCoordinatedPlanner(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    future.result()
    assert CALLS == []
    check_loads(rank, f"{folder}/process")


def test_no_asynchronous_save_touches_a_wedged_group(tmp_path):
    run_ranks(
        save_beside_a_wedged_group,
        2,
        str(tmp_path),
        backend="tests.support.recording:recording",
        env={"MASTER_ADDR": "127.0.0.1"},
        timeout=120,
        daemonic=False,
    )


def save_in_processes(rank, folder):
    def save(name, planner, group=None, **options):
        return dcp.async_save(
            state_of(rank),
            checkpoint_id=f"{folder}/{name}",
            planner=planner,
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            **options,
        )

    futures = [
        save(str(number), GlooCoordinatedPlanner(config=CONFIG)) for number in range(3)
    ]  # all in flight
    for number, future in enumerate(futures):
        assert future.result() == written(f"{folder}/{number}")
        check_loads(rank, f"{folder}/{number}")
    # A failure in the daemon is the same on each rank's future, and the daemon lives on.
    for kind in ("plain", "unpicklable"):
        error = save(kind, GlooCoordinatedPlanner(FailingInDaemon(kind), config=CONFIG)).exception()
        assert isinstance(error, CheckpointException)
        assert list(error.failures) == [1]
        assert type(error.failures[1][0]) is (ValueError if kind == "plain" else RemoteError)
        assert not Path(folder, kind, ".metadata").exists()
    metadata = save("after", GlooCoordinatedPlanner(config=CONFIG)).result()
    assert metadata == written(f"{folder}/after")
    # The daemon belongs to the ranks it was started for.
    group = dist.new_group([0, 1], backend="gloo")
    if rank < 2:
        with pytest.raises(CoordinationMismatch, match=r"started for global ranks \[0, 1, 2\]"):
            save("other", GlooCoordinatedPlanner(config=CONFIG), group)


class FailingInDaemon(dcp.DefaultSavePlanner):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            raise KINDS[self.kind]()  # noqa: RSE102 - it makes the exception
        return super().resolve_data(write_item)


def test_saves_in_a_process_share_failures_and_refuse_other_ranks(tmp_path):
    run_ranks(
        save_in_processes, 3, str(tmp_path), env={"MASTER_ADDR": "127.0.0.1"}, timeout=150, daemonic=False
    )


def fail_in_threads(rank, folder):
    for kind, make in KINDS.items():
        writer, inner = make_storage_and_planner(f"{folder}/{kind}", "write_data", [1], make)
        future = dcp.async_save(
            state_of(rank), storage_writer=writer, planner=GlooCoordinatedPlanner(inner, config=CONFIG)
        )
        error = future.exception()
        assert isinstance(error, CheckpointException), error
        assert list(error.failures) == [1]
        assert not Path(folder, kind, ".metadata").exists()
    # Where staging fails nothing was begun, and its turn is not waited for.
    with pytest.raises(ValueError, match="staging"):
        dcp.async_save(
            state_of(rank),
            checkpoint_id=f"{folder}/staging",
            planner=GlooCoordinatedPlanner(config=CONFIG),
            async_stager=BadStager(),
        )
    future = dcp.async_save(
        state_of(rank),
        checkpoint_id=f"{folder}/staging",
        planner=GlooCoordinatedPlanner(config=CONFIG),
        async_stager=BadStager(later=True),
    )
    assert isinstance(future.upload_completion.exception(), ValueError)
    future = dcp.async_save(
        state_of(rank), checkpoint_id=f"{folder}/after", planner=GlooCoordinatedPlanner(config=CONFIG)
    )
    assert future.result() == written(f"{folder}/after")


class BadStager:
    should_synchronize_after_execute = False

    def __init__(self, *, later=False):
        self.later = later

    def stage(self, state_dict):
        error = ValueError("staging failed")
        if not self.later:
            raise error
        future = Future()
        future.set_exception(error)
        return future

    def synchronize_staging(self):
        pass

    def close(self):
        pass


def fail_to_stage_on_one_rank(rank, folder):
    for number in range(4):
        stager = BadStager(later=True) if rank == 1 and number == 1 else None
        future = dcp.async_save(
            state_of(rank, float(number)),
            checkpoint_id=f"{folder}/same",
            planner=GlooCoordinatedPlanner(config=CONFIG),
            async_stager=stager,
        )
        future = getattr(future, "upload_completion", future)
        if number != 1:
            assert future.result() == written(f"{folder}/same")
            check_loads(rank, f"{folder}/same", float(number))
        elif rank == 1:
            assert isinstance(future.exception(), ValueError)
        else:
            error = future.exception()
            assert isinstance(error, CheckpointException)
            assert {at: str(cause) for at, (cause, _) in error.failures.items()} == {1: "staging failed"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_staging_that_fails_on_one_rank_is_every_ranks_cause_and_keeps_all_in_step(tmp_path):
    outcomes = run_ranks(fail_to_stage_on_one_rank, 3, str(tmp_path))
    assert max(outcome.seconds for outcome in outcomes) < 20


def test_a_failure_in_a_thread_is_the_same_on_each_ranks_future(tmp_path):
    run_ranks(fail_in_threads, 3, str(tmp_path), timeout=100)


def destroy_while_saving(rank, folder):
    future = dcp.async_save(
        state_of(rank), storage_writer=Gate(f"{folder}/x"), planner=GlooCoordinatedPlanner(config=CONFIG)
    )
    Gate.entered.wait()
    dist.destroy_process_group()
    Gate.opened.set()
    error = future.exception()  # our store connection and group are not the trainer's, so it may well end
    assert error is None or isinstance(error, CheckpointException)
    return repr(error)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_save_in_flight_while_process_groups_are_destroyed_ends_alike_on_all_ranks(tmp_path):
    outcomes = run_ranks(destroy_while_saving, 3, str(tmp_path), backend="gloo")
    assert max(outcome.seconds for outcome in outcomes) < 15
    assert len({outcome.value for outcome in outcomes}) == 1
    assert (tmp_path / "x" / ".metadata").exists() == (outcomes[0].value == "None")


class SlowStager(BadStager):
    """Has staged when the test says so, which is when the save begins."""

    def __init__(self):
        self.staged = Future()

    def stage(self, state_dict):
        return self.staged


def remake_groups_under_a_waiting_save(rank, folder, port, begins):
    stager = SlowStager()
    future = dcp.async_save(
        state_of(rank),
        checkpoint_id=f"{folder}/waiting",
        planner=GlooCoordinatedPlanner(config=CONFIG),
        async_stager=stager,
    ).upload_completion
    dist.destroy_process_group()
    if begins == "meanwhile":
        stager.staged.set_result(state_of(rank))
        future.exception()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=3)
    if begins == "later":
        stager.staged.set_result(state_of(rank))
    with pytest.raises(CoordinationError, match="destroyed, or made anew"):
        future.result()
    dcp.save(state_of(rank), checkpoint_id=f"{folder}/after", planner=GlooCoordinatedPlanner(config=CONFIG))


@pytest.mark.parametrize("begins", ["meanwhile", "later"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_save_that_waits_does_not_run_alone_or_in_other_process_groups_than_it_was_asked_in(
    begins, tmp_path
):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(remake_groups_under_a_waiting_save, 3, str(tmp_path), store.port, begins, backend="gloo")
    assert not (tmp_path / "waiting").exists()
    assert (tmp_path / "after" / ".metadata").exists()


def fail_to_stage_without_groups(rank, folder):
    dist.barrier()  # else one may end while the other still connects to it
    complaints = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: complaints.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    stager = SlowStager()
    future = dcp.async_save(
        state_of(rank),
        checkpoint_id=f"{folder}/x",
        planner=GlooCoordinatedPlanner(config=CONFIG),
        async_stager=stager,
    ).upload_completion
    dist.destroy_process_group()
    stager.staged.set_exception(ValueError("staging failed"))
    assert isinstance(future.exception(), ValueError)
    return complaints


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_staging_that_fails_when_process_groups_are_gone_is_that_error_alone(tmp_path):
    outcomes = run_ranks(fail_to_stage_without_groups, 2, str(tmp_path), backend="gloo")
    assert all(outcome.value == [] for outcome in outcomes)


def share_one_planner(rank, folder):
    groups = [dist.new_group([0, 1], backend="gloo"), dist.new_group([1, 2], backend="gloo")]
    planner = GlooCoordinatedPlanner(config=CONFIG)
    futures = [
        dcp.async_save(
            state_of(rank, float(number)),
            checkpoint_id=f"{folder}/{number}",
            planner=planner,
            process_group=groups[number % 2],
        )
        for number in range(6)
        if rank in ([0, 1], [1, 2])[number % 2]
    ]
    for future in futures:
        future.result()
    for number in range(6):
        if rank in ([0, 1], [1, 2])[number % 2]:
            target = {"weight": torch.zeros(8)}
            dcp.load(
                target,
                checkpoint_id=f"{folder}/{number}",
                planner=GlooCoordinatedLoadPlanner(config=CONFIG),
                process_group=groups[number % 2],
            )
            assert torch.equal(target["weight"], torch.full((8,), float(number)))


def test_one_planner_object_in_overlapping_saves_of_two_groups_never_mixes_their_state(tmp_path):
    run_ranks(share_one_planner, 3, str(tmp_path))
