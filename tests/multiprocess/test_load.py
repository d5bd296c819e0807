"""``dcp.load`` with our planner: the same promises as for saves."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

from planner import (
    CoordinationConfig,
    CoordinationError,
    CoordinationMismatch,
    CoordinationTimeout,
    GlooCoordinatedLoadPlanner,
    GlooCoordinatedPlanner,
)
from planner.channel import _channels
from planner.exchange import Exchange
from tests.multiprocess.test_parity import bits, emptied
from tests.support.faults import KINDS, failing
from tests.support.ranks import await_arrivals, meet, run_ranks
from tests.support.states import ALL, mesh_of, sharded

SHORT = CoordinationConfig(plan_timeout=timedelta(seconds=3))
STRICT = CoordinationConfig(strict=True)


def save_and_load_all(rank, folder):
    for name, make in ALL.items():
        state_dict = make(rank)
        where = f"{folder}/{name}"
        dcp.save(state_dict, checkpoint_id=where, planner=GlooCoordinatedPlanner(config=STRICT))
        target = emptied(state_dict)
        planner = GlooCoordinatedLoadPlanner(config=STRICT)
        dcp.load(target, checkpoint_id=where, planner=planner)
        assert bits(target) == bits(state_dict), name
        assert planner.report.operation == "load"
        assert planner.report.sent_nbytes == planner.report.received_nbytes == 0, name


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_loads_complete_on_a_group_that_refuses_and_no_plan_travels(world_size, tmp_path):
    run_ranks(save_and_load_all, world_size, str(tmp_path), timeout=120)


def load_only(rank, folder):
    target = {"a": torch.zeros(8, 3)}
    dcp.load(target, checkpoint_id=folder, planner=GlooCoordinatedLoadPlanner())
    assert torch.equal(target["a"], full_state()["a"])
    (channel,) = _channels.values()
    return channel._group is None


def test_a_load_alone_makes_no_gloo_group(tmp_path):
    run_ranks(save_sharded, 2, str(tmp_path))
    assert all(outcome.value for outcome in run_ranks(load_only, 3, str(tmp_path)))


def interrupt_the_coordinator(rank, folder, late):
    """The coordinator is interrupted while it waits for a rank; that rank must not join the next save."""
    dcp.save(full_state(), checkpoint_id=folder, planner=GlooCoordinatedPlanner(config=SHORT))
    if rank == late:
        await_arrivals("left", 2)
    if rank == 0:
        original = Exchange._collect

        def interrupted(self, *args):
            raise KeyboardInterrupt

        Exchange._collect = interrupted
    with pytest.raises((KeyboardInterrupt, CheckpointException)) as caught:
        dcp.save(full_state(), checkpoint_id=folder, planner=GlooCoordinatedPlanner(config=SHORT))
    if rank == late:
        assert type(caught.value) is CoordinationError
        assert "KeyboardInterrupt" in str(caught.value)
    if rank == 0:
        Exchange._collect = original
    meet("left", 3)
    dcp.save(full_state(), checkpoint_id=folder, planner=GlooCoordinatedPlanner(config=SHORT))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_rank_late_to_a_save_that_the_coordinator_was_interrupted_in_is_told_so(tmp_path):
    run_ranks(interrupt_the_coordinator, 3, str(tmp_path), 2)


def load_beside_a_wedged_group(rank, folder):
    from tests.support.recording import CALLS

    state_dict = {"weight": torch.arange(4.0), "step": 3}
    dcp.save(state_dict, checkpoint_id=folder, planner=GlooCoordinatedPlanner())
    target = emptied(state_dict)
    dcp.load(target, checkpoint_id=folder, planner=GlooCoordinatedLoadPlanner())
    dcp.save(state_dict, checkpoint_id=f"{folder}l", planner=GlooCoordinatedPlanner(), use_collectives=False)
    other = emptied(state_dict)
    dcp.load(other, checkpoint_id=f"{folder}l", planner=GlooCoordinatedLoadPlanner())
    assert bits(target) == bits(other) == bits(state_dict)
    assert CALLS == []


def test_loads_call_nothing_on_a_wedged_group_with_global_and_with_rank_local_metadata(tmp_path):
    run_ranks(load_beside_a_wedged_group, 4, str(tmp_path / "x"), backend="tests.support.recording:recording")


def full_state():
    return {"a": torch.arange(24.0).reshape(8, 3), "b": torch.arange(10.0).reshape(5, 2)}


def save_sharded(rank, folder):
    mesh = mesh_of((dist.get_world_size(),))
    full = full_state()
    state_dict = {
        "a": sharded(full["a"], mesh, [Shard(0)]),
        "b": sharded(full["b"], mesh, [Shard(1)]),
        "step": 7,
    }
    dcp.save(state_dict, checkpoint_id=folder, planner=GlooCoordinatedPlanner())


def load_resharded(rank, folder):
    world = dist.get_world_size()
    full = full_state()
    for mesh, placements in (
        (mesh_of((world,)), [Shard(0)]),
        (mesh_of((world,)), [Shard(1)]),
        (mesh_of((2, world // 2)), [Shard(1), Shard(0)]),
    ):
        wanted = {name: sharded(value, mesh, placements) for name, value in full.items()}
        target = emptied(wanted)
        dcp.load(target, checkpoint_id=folder, planner=GlooCoordinatedLoadPlanner())
        assert bits(target) == bits(wanted)
    partial = {"b": torch.zeros(5, 2), "new": torch.ones(1)}
    with pytest.raises(CheckpointException, match="new") as caught:
        dcp.load(dict(partial), checkpoint_id=folder, planner=GlooCoordinatedLoadPlanner())
    assert sorted(caught.value.failures) == list(range(world))
    planner = GlooCoordinatedLoadPlanner(allow_partial_load=True)
    dcp.load(partial, checkpoint_id=folder, planner=planner)
    assert torch.equal(partial["b"], full["b"])


@pytest.mark.parametrize("world_size", [2, 8])
def test_loads_reshard_onto_fewer_and_more_ranks_and_other_meshes(world_size, tmp_path):
    run_ranks(save_sharded, 4, str(tmp_path))
    run_ranks(load_resharded, world_size, str(tmp_path))


class SwappingPlanner(dcp.DefaultLoadPlanner):
    """A global step of its own: marks each plan, and changes that of the last rank."""

    def create_global_plan(self, global_plan):
        assert all(len(plan.items) == 2 for plan in global_plan)
        self.seen = [{item.dest_index.fqn for item in plan.items} for plan in global_plan]
        last = global_plan[-1]
        last.planner_data = {"marked": 1}
        return global_plan

    def finish_plan(self, new_plan):
        self.final = new_plan
        return new_plan


def load_with_a_global_step(rank, folder):
    state_dict = {"a": torch.arange(4.0), "b": {"c": 1}}
    dcp.save(state_dict, checkpoint_id=folder, planner=GlooCoordinatedPlanner())
    target = emptied(state_dict)
    inner = SwappingPlanner()
    planner = GlooCoordinatedLoadPlanner(inner, config=STRICT)
    dcp.load(target, checkpoint_id=folder, planner=planner)
    assert bits(target) == bits(state_dict)
    if rank == 0:
        assert inner.seen == [{"a", "b.c"}] * dist.get_world_size()
    is_last = rank == dist.get_world_size() - 1
    assert inner.final.planner_data == ({"marked": 1} if is_last else None)
    return planner.report.sent_nbytes


def test_a_planner_with_a_global_step_of_its_own_gets_all_plans(tmp_path):
    outcomes = run_ranks(load_with_a_global_step, 3, str(tmp_path))
    assert all(outcome.value > 0 for outcome in outcomes)


class BadPlanner(dcp.DefaultLoadPlanner):
    """Its local plan holds what strict mode refuses to send."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        if dist.get_rank() == 1:
            plan.planner_data = KINDS["plain"]
        return plan

    def create_global_plan(self, global_plan):
        return list(global_plan)


def load_what_cannot_travel(rank, folder):
    state_dict = {"a": torch.arange(4.0)}
    dcp.save(state_dict, checkpoint_id=folder, planner=GlooCoordinatedPlanner())
    with pytest.raises(CheckpointException, match="planner_data") as caught:
        dcp.load(
            emptied(state_dict),
            checkpoint_id=folder,
            planner=GlooCoordinatedLoadPlanner(BadPlanner(), config=STRICT),
        )
    assert list(caught.value.failures) == [1]
    target = emptied(state_dict)
    dcp.load(target, checkpoint_id=folder, planner=GlooCoordinatedLoadPlanner())
    assert bits(target) == bits(state_dict)


def test_a_plan_that_cannot_travel_is_named_on_all_ranks(tmp_path):
    outcomes = run_ranks(load_what_cannot_travel, 3, str(tmp_path))
    assert max(outcome.seconds for outcome in outcomes) < 15


def load_in_different_modes(rank, folder):
    state_dict = {"a": torch.arange(4.0)}
    dcp.save(state_dict, checkpoint_id=f"{folder}/g", planner=GlooCoordinatedPlanner())
    dcp.save(state_dict, checkpoint_id=f"{folder}/g", planner=GlooCoordinatedPlanner(), use_collectives=False)

    class HalfBlindReader(dcp.FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            if dist.get_rank() == 1 and kwargs.get("rank") is None:
                raise FileNotFoundError(f"{self.path}/.metadata is not on this host")
            return super().read_metadata(*args, **kwargs)

    class BlindReader(dcp.FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            if dist.get_rank() == 1:
                raise FileNotFoundError(f"{self.path}/.metadata is not on this host")
            return super().read_metadata(*args, **kwargs)

    start = time.monotonic()
    with pytest.raises(CoordinationMismatch) as caught:
        dcp.load(
            emptied(state_dict),
            storage_reader=HalfBlindReader(f"{folder}/g"),
            planner=GlooCoordinatedLoadPlanner(),
        )
    text = str(caught.value)
    assert f"group ranks 0,2: load of '{folder}/g' in phase 'plan', from global metadata" in text
    assert "group ranks 1: load" in text
    assert "from rank-local metadata" in text
    with pytest.raises(CheckpointException, match="is not on this host") as caught:
        dcp.load(
            emptied(state_dict),
            storage_reader=BlindReader(f"{folder}/g"),
            planner=GlooCoordinatedLoadPlanner(),
        )
    assert list(caught.value.failures) == [1]
    assert time.monotonic() - start < 5


def test_ranks_that_see_different_metadata_all_raise_at_once(tmp_path):
    run_ranks(load_in_different_modes, 3, str(tmp_path))


LOAD_HOOKS = {
    "read_metadata": False,
    "set_up_planner": True,
    "set_up_storage_reader": False,
    "create_local_plan": True,
    "prepare_local_plan": False,
    "create_global_plan": True,
    "prepare_global_plan": False,
    "finish_plan": True,
    "read_data": False,
    "resolve_tensor": True,
}


def fail_everywhere(rank, folder, hook):
    state_dict = {"a": torch.arange(4.0) + 1}
    dcp.save(state_dict, checkpoint_id=folder, planner=GlooCoordinatedPlanner())
    for kind, make in KINDS.items():
        for ranks in ([0],) if "global" in hook else ([0], [2], [1, 2]):
            reader, planner = dcp.FileSystemReader, dcp.DefaultLoadPlanner
            if LOAD_HOOKS[hook]:
                planner = failing(planner, hook, ranks, make)
            else:
                reader = failing(reader, hook, ranks, make)
            with pytest.raises(CheckpointException) as caught:
                dcp.load(
                    emptied(state_dict),
                    storage_reader=reader(folder),
                    planner=GlooCoordinatedLoadPlanner(planner()),
                )
            assert sorted(caught.value.failures) == ranks, (kind, ranks, str(caught.value))
    target = emptied(state_dict)
    dcp.load(target, checkpoint_id=folder, planner=GlooCoordinatedLoadPlanner())
    assert bits(target) == bits(state_dict)


@pytest.mark.parametrize("hook", LOAD_HOOKS)
def test_whatever_one_rank_raises_in_a_load_reaches_every_rank(hook, tmp_path):
    outcomes = run_ranks(fail_everywhere, 3, str(tmp_path), hook, timeout=100)
    assert max(outcome.seconds for outcome in outcomes) < 60


def load_damaged_shard(rank, folder):
    state_dict = {"a": torch.arange(400.0), f"own{rank}": torch.ones(3)}
    dcp.save(state_dict, checkpoint_id=folder, planner=GlooCoordinatedPlanner())
    if rank == 0:
        Path(folder, "__1_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointException) as caught:
        dcp.load(emptied(state_dict), checkpoint_id=folder, planner=GlooCoordinatedLoadPlanner())
    assert 1 in caught.value.failures
    assert len(caught.value.failures) < 3
    with pytest.raises(CheckpointException, match="Size mismatch") as caught:
        dcp.load(
            {"a": torch.zeros(4 if rank == 2 else 400)},
            checkpoint_id=folder,
            planner=GlooCoordinatedLoadPlanner(),
        )
    assert 2 in caught.value.failures


def test_an_unreadable_shard_and_a_wrong_size_on_one_rank_are_every_ranks_cause(tmp_path):
    run_ranks(load_damaged_shard, 3, str(tmp_path))


def one_loads_the_others_save(rank, folder):
    state_dict = {"a": torch.arange(4.0)}
    dcp.save(state_dict, checkpoint_id=folder, planner=GlooCoordinatedPlanner())
    call, planner = (
        (dcp.load, GlooCoordinatedLoadPlanner) if rank == 1 else (dcp.save, GlooCoordinatedPlanner)
    )
    with pytest.raises(CoordinationMismatch, match=r"(?s)save of .*load of"):
        call(dict(state_dict), checkpoint_id=folder, planner=planner())
    if rank != 1:
        with pytest.raises(CoordinationTimeout) as caught:
            dcp.load(
                emptied(state_dict), checkpoint_id=folder, planner=GlooCoordinatedLoadPlanner(config=SHORT)
            )
        assert list(caught.value.ranks) == [1]
        assert caught.value.operation == "load"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_load_never_answers_a_save_and_a_missing_rank_is_named(tmp_path):
    run_ranks(one_loads_the_others_save, 3, str(tmp_path))
