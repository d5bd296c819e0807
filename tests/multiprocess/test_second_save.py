"""A second save sends next to nothing, and is what it would be if nothing were remembered."""

import copy
import dataclasses
import pickle
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import planner.dist_wrapper
from planner import CoordinationConfig, GlooCoordinatedPlanner
from planner.cache import memory
from planner.wire.outline import PlanOutline
from tests.multiprocess.test_parity import bits, load_into, without_ids
from tests.support.faults import KINDS, failing
from tests.support.ranks import run_ranks
from tests.support.states import mesh_of, sharded

WORLD = 4
STRICT = CoordinationConfig(strict=True)


def model(rank, name="model", dtype=torch.float32):
    mesh = mesh_of((dist.get_world_size(),))
    full = torch.arange(64, dtype=dtype).reshape(16, 4)
    return {
        name: {
            f"weight{number}": sharded(full + number, mesh, mesh_placement(number)) for number in range(12)
        },
        "step": torch.tensor(3),
        f"own{rank}": torch.full((2,), float(rank)),
    }


def mesh_placement(number):
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate()] if number % 4 == 3 else [Shard(number % 2)]


class Saver:
    """Saves with a new planner each time, beside stock DCP, and holds one against the other."""

    def __init__(self, folder):
        self.folder = folder
        self.group = dist.new_group(backend="gloo")
        self.number = 0

    def save(self, state_dict, make_writer=dcp.FileSystemWriter, group=None, config=STRICT, **options):
        self.number += 1
        own = GlooCoordinatedPlanner(config=config, **options)
        ours = dcp.save(
            state_dict,
            storage_writer=make_writer(f"{self.folder}/{self.number}/ours"),
            planner=own,
            process_group=group,
        )
        self.report = own.report
        looked = copy.deepcopy(ours)
        stock = dcp.save(
            state_dict,
            storage_writer=make_writer(f"{self.folder}/{self.number}/stock"),
            planner=dcp.DefaultSavePlanner(**options),
            process_group=self.group if group is None else group,
        )
        assert without_ids(looked) == without_ids(stock)
        assert list(looked.state_dict_metadata) == list(stock.state_dict_metadata)
        if stock.storage_data is not None:
            assert list(looked.storage_data) == list(stock.storage_data)
            hints = [[index.index for index in metadata.storage_data] for metadata in (looked, stock)]
            assert hints[0] == hints[1]
        self.check_file(looked)
        return looked

    def check_file(self, metadata):
        path = Path(f"{self.folder}/{self.number}/ours/.metadata")
        if path.exists():
            assert pickle.loads(path.read_bytes()) == metadata

    def check_loads(self, state_dict):
        loaded = load_into(state_dict, f"{self.folder}/{self.number}/ours", self.group)
        assert bits(loaded) == bits(state_dict)

    @property
    def reuse(self):
        return [phase.reuse for phase in self.report.phases]


def save_unchanged(rank, folder):
    saver = Saver(folder)
    saver.save(model(rank))
    assert saver.reuse == ["miss: first save of this process"] * 2
    first = saver.report.received_nbytes
    saver.save(model(rank))
    assert saver.reuse == ["hit", "hit"]
    saver.check_loads(model(rank))
    return first, saver.report.sent_nbytes, saver.report.received_nbytes


def test_an_unchanged_save_sends_nothing_and_receives_next_to_nothing(tmp_path):
    _, *others = [outcome.value for outcome in run_ranks(save_unchanged, WORLD, str(tmp_path), timeout=150)]
    for first, sent, received in others:
        assert sent == 0
        assert 0 < received < 400 < first  # the head, with the path of the checkpoint in it


def save_and_count(rank, folder):
    counts = Counter()

    def counted(name, function):
        def count(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return count

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(PlanOutline, "__call__", counted("made", PlanOutline.__call__))
        monkeypatch.setattr(
            planner.dist_wrapper, "encode_plan", counted("encoded", planner.dist_wrapper.encode_plan)
        )
        for number in range(3):
            dcp.save(model(rank), checkpoint_id=f"{folder}/{number}", planner=GlooCoordinatedPlanner())
    return counts


def test_no_local_plan_is_made_of_items_and_one_that_is_unchanged_is_not_encoded_again(tmp_path):
    for outcome in run_ranks(save_and_count, WORLD, str(tmp_path)):
        assert outcome.value == {"encoded": 1}


def save_two_models(rank, folder):
    saver = Saver(folder)
    states = [model(rank), model(rank, "optim", torch.bfloat16)]
    for state_dict in (*states, *states, *states):
        saver.save(state_dict)
        saver.check_loads(state_dict)
        if saver.number > 2:
            assert saver.reuse == ["hit", "hit"], saver.number


def test_two_models_in_turn_are_both_remembered(tmp_path):
    run_ranks(save_two_models, WORLD, str(tmp_path), timeout=150)


def save_changed_on_one(rank, folder):
    saver = Saver(folder)
    saver.save(model(rank))
    changed = model(rank)
    if rank == 2:
        changed["own2"] = torch.ones(5, dtype=torch.int8)
    saver.save(changed)
    saver.check_loads(changed)
    reuse = saver.reuse
    saver.save(changed)
    assert saver.reuse == ["hit", "hit"]
    saver.save(model(rank))
    saver.check_loads(model(rank))
    return reuse


def test_a_change_on_one_rank_reaches_all_and_the_report_says_so(tmp_path):
    reuse = [outcome.value for outcome in run_ranks(save_changed_on_one, WORLD, str(tmp_path), timeout=150)]
    assert "1 of 4 ranks had new parts" in reuse[0][0]
    assert "the global plan was made anew" in reuse[0][0]
    assert reuse[1][0].startswith("hit")
    assert reuse[2][0].startswith("miss: the coordinator asked for")
    assert reuse[1][1].endswith("of 2 parts of the reply were new")


def save_across_restarts(rank, folder):
    saver = Saver(folder)
    state_dict = model(rank)
    saver.save(state_dict)
    for ranks in ([0], [2], [1, 3], [0, 2], [0, 1, 2, 3]):
        if rank in ranks:
            memory.remember({}, 0)  # what a new process has
        saver.save(state_dict)
        if rank in ranks or rank == 0:
            assert "hit" not in saver.reuse, (ranks, saver.reuse)
        elif 0 not in ranks:
            assert saver.reuse == ["hit", "hit"], (ranks, saver.reuse)
        saver.save(state_dict)
        assert saver.reuse == ["hit", "hit"], ranks
    saver.check_loads(state_dict)


def test_ranks_and_the_coordinator_may_restart(tmp_path):
    run_ranks(save_across_restarts, WORLD, str(tmp_path), timeout=150)


def save_after_failures(rank, folder):
    saver = Saver(folder)
    state_dict = model(rank)
    saver.save(state_dict)
    for hook, ranks in (("finish", [0]), ("write_data", [1]), ("prepare_global_plan", [0])):
        other = model(rank, hook)
        writer = failing(dcp.FileSystemWriter, hook, ranks, KINDS["plain"])(f"{folder}/{hook}")
        with pytest.raises(CheckpointException):
            dcp.save(other, storage_writer=writer, planner=GlooCoordinatedPlanner(config=STRICT))
        saver.save(other)
        assert all(text.startswith("miss") for text in saver.reuse) or rank > 1, (hook, saver.reuse)
        saver.save(state_dict)
        assert saver.reuse == ["hit", "hit"]


def test_nothing_is_remembered_of_a_save_that_failed(tmp_path):
    run_ranks(save_after_failures, WORLD, str(tmp_path), timeout=150)


def save_with_writers(rank, folder):
    saver = Saver(folder)
    state_dict = {"a": torch.ones(4), "b": {"c": torch.ones(2, 3)}, f"own{rank}": torch.ones(2)}
    writers = [
        dcp.FileSystemWriter,
        lambda path: dcp.FileSystemWriter(path, single_file_per_rank=False),
        lambda path: HuggingFaceStorageWriter(path, save_distributed=True),
    ]
    for make_writer in (*writers, *reversed(writers), *writers):
        saver.save(state_dict, make_writer)


def test_each_writer_gets_its_own_though_plans_are_the_same(tmp_path):
    run_ranks(save_with_writers, WORLD, str(tmp_path), timeout=150)


def save_in_groups(rank, folder):
    saver = Saver(folder)
    groups = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [3, 2])]
    state_dict = {"same": torch.ones(6), "note": "text"}
    for _ in range(2):
        saver.save(state_dict)
        own = copy.copy(saver)
        own.folder = f"{folder}/group{rank // 2}"
        own.save(state_dict, group=groups[rank // 2])
    assert saver.reuse == own.reuse == ["hit", "hit"]


def test_groups_of_other_ranks_that_plan_the_same_do_not_mix(tmp_path):
    run_ranks(save_in_groups, WORLD, str(tmp_path), timeout=150)


def save_with_settings(rank, folder):
    saver = Saver(folder)
    state_dict = {f"weight{number}": torch.ones(number + 1) for number in range(8)}
    settings = [{}, {"dedup_save_to_lowest_rank": True}, {"flatten_state_dict": False}]
    for options in (*settings, *settings):
        saver.save(state_dict, **options)


def test_the_planners_settings_count(tmp_path):
    run_ranks(save_with_settings, WORLD, str(tmp_path), timeout=150)


def save_and_change_what_came(rank, folder):
    saver = Saver(folder)
    kept = []
    for _ in range(3):
        planner = GlooCoordinatedPlanner(config=STRICT)
        metadata = dcp.save(model(rank), checkpoint_id=f"{folder}/{len(kept)}", planner=planner)
        kept.append(copy.deepcopy(metadata))
        metadata.state_dict_metadata["model.weight0"].chunks.clear()
        metadata.state_dict_metadata["more"] = BytesStorageMetadata()
        metadata.planner_data.clear()
        next(iter(metadata.storage_data.values())).offset = 77
        metadata.storage_data.clear()
        if rank == 0:
            for plan in planner.inner.global_plan:
                plan.planner_data["changed"] = ("changed",)
                plan.items[0].tensor_data.properties.requires_grad = True
    assert without_ids(kept[0]) == without_ids(kept[1]) == without_ids(kept[2])
    saver.save(model(rank))


def test_what_one_save_returns_can_be_changed_without_harm_to_the_next(tmp_path):
    run_ranks(save_and_change_what_came, WORLD, str(tmp_path), timeout=150)


class LateChange(dcp.DefaultSavePlanner):
    """Changes metadata after global planning, where only the coordinator has it."""

    def finish_plan(self, new_plan):
        if getattr(self, "metadata", None) is not None:
            self.metadata.state_dict_metadata["late"] = BytesStorageMetadata()
            self.metadata.planner_data["late"] = ("late",)
        return super().finish_plan(new_plan)


class ChangingWriter(dcp.FileSystemWriter):
    def finish(self, metadata, results):
        super().finish(metadata, results)
        metadata.state_dict_metadata["late"] = BytesStorageMetadata()
        metadata.storage_data[next(iter(metadata.storage_data))].length += 1


class LazyWriter(dcp.FileSystemWriter):
    def finish(self, metadata, results):
        assert [len(own) for own in results]
        assert results[0] == results[0][:]
        assert type(results) is list


class DoublingWriter(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        future = super().write_data(plan, planner)
        results = future.value()
        again = torch.futures.Future()
        moved = dataclasses.replace(results[-1].storage_data, offset=9)
        again.set_result([*results, dataclasses.replace(results[-1], storage_data=moved)])
        return again


def save_with_changes(rank, folder):
    state_dict = model(rank)
    found = {}
    for turn in range(2):
        for name, inner, writer in (
            ("planner", LateChange(), dcp.FileSystemWriter),
            ("changing", dcp.DefaultSavePlanner(), ChangingWriter),
            ("lazy", dcp.DefaultSavePlanner(), LazyWriter),
            ("doubling", dcp.DefaultSavePlanner(), DoublingWriter),
            ("plain", dcp.DefaultSavePlanner(), dcp.FileSystemWriter),
        ):
            metadata = dcp.save(
                state_dict,
                storage_writer=writer(f"{folder}/{turn}/{name}"),
                planner=GlooCoordinatedPlanner(inner, config=STRICT),
            )
            found[turn, name] = copy.deepcopy(metadata)
    return found


def test_what_a_planner_or_a_writer_does_to_metadata_late_reaches_all_ranks(tmp_path):
    first, *others = [
        outcome.value for outcome in run_ranks(save_with_changes, WORLD, str(tmp_path), timeout=150)
    ]
    for turn in range(2):
        assert "late" in first[turn, "planner"].state_dict_metadata
        assert first[turn, "planner"].planner_data["late"] == ("late",)
        assert "late" in first[turn, "changing"].state_dict_metadata
        assert first[turn, "lazy"].storage_data is None
        assert any(info.offset == 9 for info in first[turn, "doubling"].storage_data.values())
        assert "late" not in first[turn, "plain"].state_dict_metadata
    for found in others:
        assert found == first


class RetypingWriter(dcp.FileSystemWriter):
    """Changes an item of the local plan in place."""

    def prepare_local_plan(self, plan):
        plan = super().prepare_local_plan(plan)
        plan.items[0].tensor_data.properties.requires_grad = True
        return plan


def without_step(items):
    """Without an item that other ranks have too."""
    return [item for item in items if item.index.fqn != "step" or dist.get_rank() % 2]


class DroppingWriter(dcp.FileSystemWriter):
    """Changes the list of the local plan in place."""

    def prepare_local_plan(self, plan):
        plan = super().prepare_local_plan(plan)
        plan.items[:] = without_step(plan.items)
        return plan


class MappingWriter(dcp.FileSystemWriter):
    """Changes the mapping that is in the plan and in the planner."""

    def prepare_local_plan(self, plan):
        plan.planner_data["extra"] = ("extra",)
        return super().prepare_local_plan(plan)


class RemakingWriter(dcp.FileSystemWriter):
    """Makes the local plan anew."""

    def prepare_local_plan(self, plan):
        plan = super().prepare_local_plan(plan)
        return dataclasses.replace(plan, items=without_step(plan.items)[::-1])


def save_with_changed_local_plans(rank, folder):
    saver = Saver(folder)
    state_dict = model(rank)
    for writer in (RetypingWriter, DroppingWriter, MappingWriter, RemakingWriter):
        saver.save(state_dict)
        saver.save(state_dict, writer)
        assert rank or "new parts" in saver.reuse[0]
        saver.save(state_dict, writer)
        assert saver.reuse == ["hit", "hit"]


def test_a_local_plan_that_the_writer_changes_is_the_one_that_counts(tmp_path):
    run_ranks(save_with_changed_local_plans, WORLD, str(tmp_path), timeout=200)


def save_with_changed_tensors(rank, folder):
    saver = Saver(folder)
    state_dict = model(rank)
    weights = state_dict["model"]
    found = [without_ids(saver.save(state_dict))]
    for change in (
        weights["weight0"].requires_grad_,
        lambda: setattr(state_dict["step"], "data", torch.ones(2, dtype=torch.float64)),
        lambda: weights.update(weight2=weights["weight1"]),
        lambda: weights.update(weight2=weights.pop("weight2")),  # last now
        lambda: state_dict.update({"step": 3}),
        lambda: state_dict.update({"more": {"step": 3}}),
    ):
        change()
        found.append(without_ids(saver.save(state_dict)))
        assert saver.reuse[0] != "hit"
        saver.save(state_dict)
        assert saver.reuse == ["hit", "hit"]
        saver.check_loads(state_dict)
    return found


def test_entries_that_were_changed_in_place_or_moved_are_planned_anew(tmp_path):
    for outcome in run_ranks(save_with_changed_tensors, WORLD, str(tmp_path), timeout=200):
        for before, after in pairwise(outcome.value):
            assert before != after or list(before.planner_data) != list(after.planner_data)


def save_growing_objects(rank, folder):
    saver = Saver(folder)
    received = []
    for size in (3, 30, 300):
        saver.save({**model(rank), "rng": "x" * size})
        received.append(saver.report.received_nbytes)
    return received, saver.reuse


def test_where_only_lengths_change_the_names_and_chunks_do_not_follow_again(tmp_path):
    _, *others = [
        outcome.value for outcome in run_ranks(save_growing_objects, WORLD, str(tmp_path), timeout=150)
    ]
    for received, reuse in others:
        assert received[2] < received[0] - 100
        assert reuse[0] == "hit"
        assert reuse[1].endswith("1 of 2 parts of the reply were new")


def save_without_memory(rank, folder):
    saver = Saver(folder)
    off = CoordinationConfig(remembered_nbytes=0)
    for _ in range(2):
        saver.save(model(rank), config=off)
        assert saver.reuse == ["off: remembered_nbytes is 0"] * 2
        assert memory.is_empty
    saver.save(model(rank), config=CoordinationConfig(remembered_nbytes=100))
    saver.save(model(rank), config=CoordinationConfig(remembered_nbytes=100))
    assert saver.reuse[1].startswith("miss")
    assert memory._nbytes <= 100


def save_without_collectives(rank, folder):
    planner = GlooCoordinatedPlanner()
    dcp.save(model(rank), checkpoint_id=folder, planner=planner, use_collectives=False)
    return [phase.reuse for phase in planner.report.phases]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_phase_in_which_nothing_travels_claims_no_hit(tmp_path):
    for outcome in run_ranks(save_without_collectives, 2, str(tmp_path)):
        assert outcome.value == ["off: nothing travels in this phase"]


def test_memory_can_be_turned_off_and_is_bounded(tmp_path):
    run_ranks(save_without_memory, WORLD, str(tmp_path), timeout=150)


def save_with_some_remembering(rank, folder):
    saver = Saver(folder)
    config = CoordinationConfig(remembered_nbytes=0 if rank in {1, 2} else 2**20)
    for _ in range(3):
        saver.save(model(rank), config=config)


def test_ranks_that_remember_and_ranks_that_do_not_save_together(tmp_path):
    run_ranks(save_with_some_remembering, WORLD, str(tmp_path), timeout=150)
