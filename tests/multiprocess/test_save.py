"""The main job: ``dcp.save`` with our planner on a default group that cannot carry a collective."""

import copy
import dataclasses
import logging
import os
import pickle
import resource
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.utils import _DistWrapper

from planner import (
    CoordinationConfig,
    CoordinationMismatch,
    GlooCoordinatedLoadPlanner,
    GlooCoordinatedPlanner,
    TransportError,
    register_codec,
)
from planner.channel import _channels
from planner.column_plans import PendingItems
from tests.support.faults import KINDS, failing
from tests.support.ranks import run_ranks


def state_of(rank):
    return {
        "weight": torch.arange(8.0) + 1,
        "nested": {"own": torch.full((2,), float(rank))},
        f"only{rank}": rank,
    }


def save(rank, folder, **options):
    planner = GlooCoordinatedPlanner()
    return dcp.save(state_of(rank), checkpoint_id=folder, planner=planner, **options)


def written(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_a_save_completes_on_a_default_group_that_refuses_collectives(world_size, tmp_path):
    outcomes = run_ranks(save, world_size, str(tmp_path))
    assert all(outcome.value == written(tmp_path) for outcome in outcomes)


def stock_save(rank, folder):
    return dcp.save(state_of(rank), checkpoint_id=folder)


def test_stock_dcp_fails_on_that_group(tmp_path):
    outcomes = run_ranks(stock_save, 2, str(tmp_path), may_fail=True)
    assert all(outcome.error is not None for outcome in outcomes)


def save_beside_a_wedged_group(rank, folder):
    from tests.support.recording import CALLS

    groups_before = dist.distributed_c10d._world.group_count
    first = dcp.save(state_of(rank), checkpoint_id=f"{folder}/collectives", planner=GlooCoordinatedPlanner())
    dcp.save(
        state_of(rank),
        checkpoint_id=f"{folder}/rank_local",
        planner=GlooCoordinatedPlanner(),
        use_collectives=False,
    )
    assert dist.distributed_c10d._world.group_count == groups_before
    return list(CALLS), first


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_nothing_is_called_on_a_default_group_that_is_wedged(world_size, tmp_path):
    outcomes = run_ranks(
        save_beside_a_wedged_group, world_size, str(tmp_path), backend="tests.support.recording:recording"
    )
    assert all(outcome.value == ([], written(tmp_path / "collectives")) for outcome in outcomes)
    assert len(list((tmp_path / "rank_local").glob("*.metadata"))) == world_size


def stock_save_beside_a_wedged_group(rank, folder):
    from tests.support.recording import CALLS

    ended = threading.Event()

    def run():
        stock_save(rank, folder)
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    called = threading.Event()
    while not CALLS and not ended.wait(0.01):
        pass
    return list(CALLS), ended.wait(1), called.is_set()


def test_stock_dcp_hangs_on_a_wedged_group(tmp_path):
    outcomes = run_ranks(
        stock_save_beside_a_wedged_group, 2, str(tmp_path), backend="tests.support.recording:recording"
    )
    for outcome in outcomes:
        calls, has_ended, _ = outcome.value
        assert calls
        assert not has_ended


class RankLocalNoise(dcp.DefaultSavePlanner):
    pass


def save_with_others(rank, folder):
    seen = []
    original = _DistWrapper.__init__

    def spy(self, *args, **kwargs):
        seen.append(type(self))
        original(self, *args, **kwargs)

    GlooCoordinatedPlanner()  # installs the seam
    _DistWrapper.__init__ = spy
    try:
        group = dist.new_group(backend="gloo")
        for planner in (None, RankLocalNoise()):
            dcp.save(state_of(rank), checkpoint_id=f"{folder}/x", planner=planner, process_group=group)
        target = state_of(rank)
        dcp.load(target, checkpoint_id=f"{folder}/x", process_group=group)
    finally:
        _DistWrapper.__init__ = original
    assert seen == [_DistWrapper] * 3
    assert not _channels


def test_a_call_with_any_other_planner_gets_the_stock_class(tmp_path):
    run_ranks(save_with_others, 2, str(tmp_path))


def save_subgroups(rank, folder):
    first, second = [2, 3], [3, 1]
    groups = {"first": (dist.new_group(first, backend="gloo"), first)}
    groups["second"] = (dist.new_group(second, backend="gloo"), second)
    for name, (group, members) in groups.items():
        if rank in members:
            metadata = save(rank, f"{folder}/{name}", process_group=group)
            assert {f"only{member}" for member in members} <= set(metadata.state_dict_metadata)
            assert len([key for key in metadata.state_dict_metadata if key.startswith("only")]) == len(
                members
            )
        else:
            with pytest.raises(ValueError, match=r"Invalid process group|not a member"):
                save(rank, f"{folder}/{name}", process_group=group)
    save(rank, f"{folder}/all")
    return len(_channels)


def test_a_subgroup_coordinates_exactly_its_members(tmp_path):
    outcomes = run_ranks(save_subgroups, 4, str(tmp_path))
    assert [outcome.value for outcome in outcomes] == [1, 2, 2, 3]
    for name in ("first", "second", "all"):
        assert (tmp_path / name / ".metadata").exists()


def save_alone(rank, folder):
    store = dist.distributed_c10d._get_default_store()
    before = store.num_keys()
    metadata = save(rank, folder)
    return metadata, len(_channels), store.num_keys() - before


def test_one_rank_makes_no_group_and_no_store_keys(tmp_path):
    metadata, num_channels, num_keys = run_ranks(save_alone, 1, str(tmp_path))[0].value
    assert metadata == written(tmp_path)
    assert num_channels == 0
    assert num_keys == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_without_a_process_group_a_save_is_local(tmp_path):
    planner = GlooCoordinatedPlanner()
    metadata = dcp.save(state_of(0), checkpoint_id=tmp_path, planner=planner)
    assert metadata == written(tmp_path)
    assert planner.report is None or planner.report.world_size == 1


def save_many_times(rank, folder):
    kept = GlooCoordinatedPlanner()
    sockets = []
    keys = []
    for number in range(6):
        planner = kept if number % 2 else GlooCoordinatedPlanner(copy.copy(dcp.DefaultSavePlanner()))
        dcp.save(state_of(rank), checkpoint_id=f"{folder}/{number}", planner=planner)
        sockets.append(len(list(Path("/proc/self/fd").iterdir())))
        keys.append(dist.distributed_c10d._get_default_store().num_keys())
    (channel,) = _channels.values()
    assert sockets[1] == sockets[-1], sockets
    return channel.epoch, channel.save_number, keys


def test_the_group_is_made_once_and_later_saves_leave_nothing_behind(tmp_path):
    outcomes = run_ranks(save_many_times, 3, str(tmp_path))
    for outcome in outcomes:
        epoch, number, keys = outcome.value
        assert (epoch, number) == (1, 6)
        assert max(keys) - min(keys) <= 12  # in flight on other ranks
        assert keys[-1] <= keys[0] + 4


def save_eagerly_connected(rank, folder):
    save(rank, f"{folder}/first")
    save(rank, f"{folder}/second")


def test_torch_gloo_lazy_init_0_is_honoured(tmp_path):
    run_ranks(save_eagerly_connected, 4, str(tmp_path), env={"TORCH_GLOO_LAZY_INIT": "0"})


def save_on_its_interface(rank, folder):
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    with pytest.raises(CheckpointException, match="GLOO_SOCKET_IFNAME=nosuch0") as caught:
        save(rank, f"{folder}/first")
    assert list(caught.value.failures) == [1]
    assert type(caught.value.failures[1][0]) is TransportError
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    save(rank, f"{folder}/second")


def test_a_wrong_interface_on_one_rank_is_named_on_all(tmp_path):
    outcomes = run_ranks(save_on_its_interface, 3, str(tmp_path))
    assert max(outcome.seconds for outcome in outcomes) < 20
    assert not (tmp_path / "first" / ".metadata").exists()
    assert (tmp_path / "second" / ".metadata").exists()


def save_with_few_descriptors(rank, folder):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 0:
        num_open = len(list(Path("/proc/self/fd").iterdir()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 5, before[1]))
    with pytest.raises(CheckpointException, match=r"RLIMIT_NOFILE.*needs 7 more") as caught:
        save(rank, f"{folder}/first")
    assert list(caught.value.failures) == [0]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    save(rank, f"{folder}/second")


def test_too_few_file_descriptors_on_the_coordinator_are_named_on_all_ranks(tmp_path):
    run_ranks(save_with_few_descriptors, 8, str(tmp_path))


def save_in_two_threads(rank, folder):
    """Model and optimizer at once, begun in opposite order on two ranks."""
    ends = {}
    config = CoordinationConfig(plan_timeout=timedelta(seconds=20))

    def run(name):
        try:
            dcp.save(
                state_of(rank),
                checkpoint_id=f"{folder}/{name}",
                planner=GlooCoordinatedPlanner(config=config),
            )
            ends[name] = "saved"
        except CoordinationMismatch:
            ends[name] = "mismatch"

    save(rank, f"{folder}/zero")
    (channel,) = _channels.values()
    names = ["model", "optimizer"] if rank == 0 else ["optimizer", "model"]
    threads = []
    for name in names:
        num_before = len(channel.turns._waiting)
        threads.append(threading.Thread(target=run, args=(name,)))
        threads[-1].start()
        while name == names[0] and len(channel.turns._waiting) == num_before and threads[-1].is_alive():
            pass  # the first has its turn before the second begins
    for thread in threads:
        thread.join()
    save(rank, f"{folder}/after")
    return ends


def test_two_saves_at_once_in_opposite_order_are_refused_by_name_or_both_succeed(tmp_path):
    ends = [outcome.value for outcome in run_ranks(save_in_two_threads, 2, str(tmp_path))]
    assert ends[0] == ends[1]
    for name, end in ends[0].items():
        assert (tmp_path / name / ".metadata").exists() == (end == "saved")


class Odd:
    """Something that neither DCP nor we know."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is type(self) and other.value == self.value

    __hash__ = None


class Known(Odd):
    """Something with a registered codec."""


class OddPlanner(dcp.DefaultSavePlanner):
    """Puts objects of its own into plans, and wants them back at the coordinator."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def create_local_plan(self):
        plan = super().create_local_plan()
        self.sent = self.make()
        object.__setattr__(plan, "planner_data", {"map": plan.planner_data, "odd": self.sent})
        return plan

    def create_global_plan(self, all_plans):
        assert all(plan.planner_data["odd"] == self.sent for plan in all_plans)
        for plan in all_plans:
            object.__setattr__(plan, "planner_data", plan.planner_data["map"])
        return super().create_global_plan(all_plans)


def save_odd(rank, folder):
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("planner").addHandler(handler)
    for number in range(2):
        planner = GlooCoordinatedPlanner(OddPlanner(lambda: Odd(5)))
        dcp.save(state_of(rank), checkpoint_id=f"{folder}/{number}", planner=planner)
    about = [text for text in warnings if "Odd" in text]
    assert len(about) == (0 if rank == 0 else 1), warnings
    if about:
        assert "planner_data" in about[0]
    register_codec(Known, name="known", encode=lambda known: known.value, decode=Known)
    strict = CoordinationConfig(strict=True)
    dcp.save(
        state_of(rank),
        checkpoint_id=f"{folder}/known",
        planner=GlooCoordinatedPlanner(OddPlanner(lambda: Known(6)), config=strict),
    )
    with pytest.raises(CheckpointException, match=r"planner_data\['odd'\].*test_save.Odd") as caught:
        dcp.save(
            state_of(rank),
            checkpoint_id=f"{folder}/strict",
            planner=GlooCoordinatedPlanner(OddPlanner(lambda: Odd(5)), config=strict),
        )
    assert sorted(caught.value.failures) == [1, 2]


def test_unknown_objects_go_through_a_codec_or_pickled_alone_or_are_refused_when_strict(tmp_path):
    run_ranks(save_odd, 3, str(tmp_path))
    assert not (tmp_path / "strict" / ".metadata").exists()


def test_the_planner_pickles_and_wraps_any_planner():
    planner = GlooCoordinatedPlanner(
        RankLocalNoise(dedup_save_to_lowest_rank=True),
        config=CoordinationConfig(plan_timeout=timedelta(seconds=3)),
    )
    planner.inner.mappings = {"x": ("x",)}
    again = pickle.loads(pickle.dumps(planner))
    assert type(again.inner) is RankLocalNoise
    assert again.inner.dedup_save_to_lowest_rank
    assert again.config == planner.config
    assert again.mappings == {"x": ("x",)}  # attributes of the inner planner are seen through ours
    assert copy.deepcopy(planner).config == planner.config
    assert state_dict_saver._DistWrapper is not _DistWrapper


class MutatingPlanner(dcp.DefaultSavePlanner):
    """Changes the plans it is given in place, as nothing forbids."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        for plan, local_plan in zip(plans, all_plans, strict=True):
            for item in local_plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.requires_grad = True
            local_plan.items.reverse()
            object.__setattr__(local_plan, "storage_data", "marked")
            object.__setattr__(plan, "storage_data", "marked")
        return plans, metadata

    def finish_plan(self, new_plan):
        self.finished = new_plan
        return dataclasses.replace(new_plan, storage_data=_StoragePrefix(f"__{dist.get_rank()}_"))


def save_mutated(rank, folder):
    inner = MutatingPlanner()
    state_dict = {**state_of(rank), f"tensor{rank}": torch.ones(2)}
    metadata = dcp.save(state_dict, checkpoint_id=folder, planner=GlooCoordinatedPlanner(inner))
    assert inner.finished.storage_data == "marked"
    tensors = [item.tensor_data for item in inner.finished.items if item.tensor_data is not None]
    assert tensors
    assert all(data.properties.requires_grad for data in tensors)
    assert metadata.state_dict_metadata["weight"].properties.requires_grad
    target = state_of(rank)
    dcp.load(target, checkpoint_id=folder, planner=GlooCoordinatedLoadPlanner())
    assert torch.equal(target["weight"], state_of(rank)["weight"])


def test_a_global_step_that_changes_plans_in_place_reaches_the_ranks(tmp_path):
    run_ranks(save_mutated, 3, str(tmp_path))


def save_on_columns(rank, folder):
    results = {}
    for name, inner, writer in (
        ("pure", dcp.DefaultSavePlanner(), dcp.FileSystemWriter(f"{folder}/pure")),
        ("own planner", MutatingPlanner(), dcp.FileSystemWriter(f"{folder}/planner")),
        ("own writer", dcp.DefaultSavePlanner(), LookingWriter(f"{folder}/writer")),
    ):
        metadata = dcp.save(state_of(rank), storage_writer=writer, planner=GlooCoordinatedPlanner(inner))
        results[name] = type(metadata).__name__
        if rank == 0:
            kinds = {type(plan.items) for plan in inner.global_plan}
            assert kinds == ({PendingItems} if name == "pure" else {list}), (name, kinds)
    return results


class LookingWriter(dcp.FileSystemWriter):
    """Looks inside all plans, as nothing forbids."""

    def prepare_global_plan(self, plans):
        assert sum(len(plan.items) for plan in plans) > 3
        assert {type(item).__name__ for plan in plans for item in plan.items} == {"WriteItem"}
        return super().prepare_global_plan(plans)


def test_plans_are_made_on_the_coordinator_only_for_those_who_look_inside(tmp_path):
    outcomes = run_ranks(save_on_columns, 3, str(tmp_path))
    # A plain writer does not look at it either.
    assert outcomes[0].value == {
        "pure": "_PendingMetadata",
        "own planner": "Metadata",
        "own writer": "Metadata",
    }
    assert set(outcomes[1].value.values()) == {"_PendingMetadata"}


def save_unchanged(rank, folder):
    state_dict = {f"weight{number}": torch.ones(number + 1) for number in range(20)} | {
        f"own{rank}": torch.ones(2)
    }
    sent = []

    def save_once(name, values):
        planner = GlooCoordinatedPlanner()  # a new one each time
        metadata = dcp.save(values, checkpoint_id=f"{folder}/{name}", planner=planner)
        assert metadata.state_dict_metadata.keys() >= values.keys()
        sent.append((planner.report.sent_nbytes, planner.report.phases[0].remembered_nbytes))

    def fail(name):
        writer = failing(dcp.FileSystemWriter, "finish", [0], KINDS["plain"])(f"{folder}/{name}")
        with pytest.raises(CheckpointException):
            dcp.save(other, storage_writer=writer, planner=GlooCoordinatedPlanner())

    other = {f"other{number}": torch.ones(3) for number in range(20)}
    save_once("first", state_dict)
    save_once("again", state_dict)
    fail("failed")
    save_once("not remembered", other)
    save_once("remembered", other)
    dtype = {name: value.double() if rank == 1 else value for name, value in state_dict.items()}
    save_once("one rank changed", dtype)
    save_once("the first once more", state_dict)
    return sent


def test_an_unchanged_save_sends_nothing_and_a_failed_one_is_not_remembered(tmp_path):
    coordinator, *others = [outcome.value for outcome in run_ranks(save_unchanged, 3, str(tmp_path))]
    for sent in others:
        nbytes = [entry[0] for entry in sent]
        assert nbytes[0] > 0
        assert nbytes[1] == nbytes[3] == nbytes[5] == 0
    assert others[0][2][0] > 0  # equal plans: only the lowest rank sent them
    assert others[0][4][0] > 0
    assert [entry[1] > 0 for entry in coordinator] == [False, True, False, True, True, True]
