"""``planner.enable`` and ``planner.coordinated`` on real ranks: every save and load, whatever its planner."""

import logging
import pickle
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import async_save, load, save, utils
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.utils import _DistWrapper

import planner
from planner import CoordinationConfig, CoordinationTimeout, GlooCoordinatedPlanner, GlooDistWrapper
from planner.wire import frame
from tests.support.faults import Gate
from tests.support.python import run_python
from tests.support.ranks import run_ranks

WEDGED = "tests.support.recording:recording"
CONFIG = CoordinationConfig(plan_timeout=timedelta(seconds=20))


class Namespaced(dcp.DefaultSavePlanner):
    """Has a meaning of its own, as planners of engines do: every name in the checkpoint gets a prefix."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        renamed = {f"ns.{name}": value for name, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class NamespacedLoad(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        renamed = {f"ns.{name}": value for name, value in state_dict.items()}
        super().set_up_planner(renamed, metadata, is_coordinator)


def state_of(rank, value=1.0):
    return {"weight": torch.full((8,), value), f"own{rank}": torch.full((2,), float(rank))}


def check_loads(rank, folder, **options):
    target = {"weight": torch.zeros(8), f"own{rank}": torch.zeros(2)}
    load(target, checkpoint_id=folder, **options)
    assert torch.equal(target["weight"], torch.full((8,), 1.0))


def written(folder):
    return pickle.loads(Path(folder, ".metadata").read_bytes())


def use_every_call(rank, folder):
    """What engines do, through names that they imported before anything was turned on."""
    from tests.support.recording import CALLS

    with planner.coordinated(CONFIG):
        assert save(state_of(rank), checkpoint_id=f"{folder}/plain") == written(f"{folder}/plain")
        dcp.save(state_of(rank), checkpoint_id=f"{folder}/local", use_collectives=False)
        save(state_of(rank), checkpoint_id=f"{folder}/own", planner=(inner := Namespaced()))
        assert inner.metadata.state_dict_metadata if rank == 0 else True  # the engine's own object was used
        thread = async_save(state_of(rank), checkpoint_id=f"{folder}/thread", planner=inner)
        process = async_save(
            state_of(rank),
            checkpoint_id=f"{folder}/process",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
    # Both began inside the block; so they are coordinated to their end.
    assert thread.result() == written(f"{folder}/thread")
    process.result()
    planner.enable(CONFIG)
    for name in ("plain", "local", "process"):
        check_loads(rank, f"{folder}/{name}")
    for name in ("own", "thread"):
        check_loads(rank, f"{folder}/{name}", planner=NamespacedLoad())
    planner.disable()
    assert CALLS == []
    return sorted(written(f"{folder}/own").state_dict_metadata)


def test_every_call_is_coordinated_with_no_planner_or_any_beside_a_wedged_group(tmp_path):
    outcomes = run_ranks(
        use_every_call,
        2,
        str(tmp_path),
        backend=WEDGED,
        env={"MASTER_ADDR": "127.0.0.1"},
        timeout=120,
        daemonic=False,
    )
    assert {tuple(outcome.value) for outcome in outcomes} == {("ns.own0", "ns.own1", "ns.weight")}


class Counting(_DistWrapper):
    """Somebody's own wrapper around one method."""

    def __init__(self, group):
        super().__init__(group, True, 0)
        self.calls = 0

    def gather_object(self, object):  # noqa: A002 - the stock name
        self.calls += 1
        return super().gather_object(object)


def use_the_class(rank):
    from tests.support.recording import CALLS

    before = _DistWrapper(None, True, 0)
    with planner.coordinated(CONFIG):
        for cls in (_DistWrapper, utils._DistWrapper):
            wrapper = cls(None, True, 0)
            assert isinstance(wrapper, _DistWrapper)
            assert wrapper.all_gather_object(rank) == [0, 1, 2]
            assert wrapper.broadcast("step", lambda: "from 0" if rank == 0 else "no") == "from 0"
            assert wrapper.reduce_scatter("plan", lambda: rank, lambda all_ranks: all_ranks[::-1]) == 2 - rank
            wrapper.barrier()
        counting = Counting(None)
        gathered = counting.gather_object(rank)
        assert gathered == ([0, 1, 2] if rank == 0 else None)
        assert counting.calls == 1
    assert type(before) is _DistWrapper  # made while it was off, and so for good
    assert type(_DistWrapper(None, True, 0)) is _DistWrapper
    assert wrapper.all_gather_object(rank) == [0, 1, 2]  # made while it was on, the same
    assert CALLS == []


def test_code_that_imports_the_wrapper_by_name_is_coordinated_while_it_is_on():
    run_ranks(use_the_class, 3, backend=WEDGED)


def save_both_ways(rank, folder):
    group = dist.new_group(backend="gloo")
    for name, options in (("none", {}), ("own", {"planner": Namespaced()})):
        stock = save(state_of(rank), checkpoint_id=f"{folder}/stock/{name}", process_group=group, **options)
        with planner.coordinated(CONFIG):
            ours = save(state_of(rank), checkpoint_id=f"{folder}/ours/{name}", process_group=group, **options)
        assert ours.state_dict_metadata == stock.state_dict_metadata
        assert ours.storage_data == stock.storage_data
        assert ours.planner_data == stock.planner_data
    check_loads(rank, f"{folder}/ours/none", process_group=group)
    with planner.coordinated(CONFIG):
        check_loads(rank, f"{folder}/stock/none", process_group=group)


def test_a_checkpoint_does_not_depend_on_the_switch(tmp_path):
    run_ranks(save_both_ways, 4, str(tmp_path))
    for name in ("none", "own"):
        stock, ours = (
            {path.name: path.read_bytes() for path in Path(tmp_path, way, name).glob("*.distcp")}
            for way in ("stock", "ours")
        )
        assert stock == ours
        assert len(stock) == 4


def switch_while_saving(rank, folder):
    planner.enable(CONFIG)
    future = async_save(state_of(rank), storage_writer=Gate(f"{folder}/x"))
    Gate.entered.wait()
    with pytest.raises(
        planner.SwitchError, match=r"asynchronous save of thread 'MainThread', save of thread"
    ):
        planner.disable()
    with pytest.raises(planner.SwitchError, match="nothing was changed"):
        planner.enable(CoordinationConfig())
    planner.enable(CONFIG)  # as it is: nothing to do
    with planner.coordinated(CoordinationConfig()):
        pass  # a block is for what begins inside
    Gate.opened.set()
    future.result()
    planner.disable()


def test_the_switch_is_refused_while_a_save_runs_and_works_after_it(tmp_path):
    run_ranks(switch_while_saving, 2, str(tmp_path))


def share_one_engine_planner(rank, folder):
    groups = [dist.new_group([0, 1], backend="gloo"), dist.new_group([1, 2], backend="gloo")]
    inner = Namespaced()
    planner.enable(CONFIG)
    futures = {
        number: async_save(
            state_of(rank, float(number)),
            checkpoint_id=f"{folder}/{number}",
            planner=inner,
            process_group=groups[number % 2],
        )
        for number in range(6)
        if rank in ([0, 1], [1, 2])[number % 2]
    }
    for number, future in futures.items():
        future.result()
        target = {"weight": torch.zeros(8)}
        load(
            target,
            checkpoint_id=f"{folder}/{number}",
            planner=NamespacedLoad(),
            process_group=groups[number % 2],
        )
        assert torch.equal(target["weight"], torch.full((8,), float(number)))


def test_one_engine_planner_in_overlapping_saves_of_two_groups_never_mixes_their_state(tmp_path):
    run_ranks(share_one_engine_planner, 3, str(tmp_path))


def save_with_the_switch_on_some_ranks(rank, folder, on):
    config = CoordinationConfig(plan_timeout=timedelta(seconds=3))
    if rank not in on:
        try:
            save(state_of(rank), checkpoint_id=f"{folder}/x")
        except Exception as error:  # noqa: BLE001 - of the default group, which refuses
            return repr(error)
    with planner.coordinated(config), pytest.raises(CoordinationTimeout) as caught:
        save(state_of(rank), checkpoint_id=f"{folder}/x")
    return caught.value.ranks


@pytest.mark.parametrize("off", [[0], [1], [1, 2]])
def test_ranks_with_the_switch_off_are_named_on_those_with_it_on(off, tmp_path):
    on = [rank for rank in range(3) if rank not in off]
    outcomes = run_ranks(save_with_the_switch_on_some_ranks, 3, str(tmp_path), on)
    for rank in on:
        assert outcomes[rank].value == tuple(off)
        assert outcomes[rank].seconds < 15
    assert not (tmp_path / "x" / ".metadata").exists()


def save_with_another_version_on_a_rank(rank, folder, odd):
    if rank == odd:
        frame.WIRE_VERSION += 1
    with planner.coordinated(CONFIG), pytest.raises(planner.CoordinationMismatch, match="version") as caught:
        save(state_of(rank), checkpoint_id=f"{folder}/x")
    return caught.value.ranks


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_with_another_version_is_named_on_all_ranks(odd, tmp_path):
    outcomes = run_ranks(save_with_another_version_on_a_rank, 3, str(tmp_path), odd)
    for rank, outcome in enumerate(outcomes):  # to the odd one the others are
        assert odd in outcome.value or rank == odd
    assert not (tmp_path / "x" / ".metadata").exists()


def save_after_another_librarys_patch(rank, folder):
    from torch.distributed.checkpoint import state_dict_saver

    ours = state_dict_saver._DistWrapper
    state_dict_saver._DistWrapper = lambda *args: utils._DistWrapper(*args)  # noqa: PLW0108 - somebody's
    with pytest.raises(planner.SwitchError, match=r"state_dict_saver\._DistWrapper was replaced by"):
        planner.enable()
    with pytest.raises(planner.CoordinationError, match="would run over the device group"):
        save(state_of(rank), checkpoint_id=f"{folder}/x", planner=GlooCoordinatedPlanner())
    state_dict_saver._DistWrapper = _DistWrapper  # somebody "restores" what was there before us
    save(state_of(rank), checkpoint_id=f"{folder}/x", planner=GlooCoordinatedPlanner())
    assert state_dict_saver._DistWrapper is ours

    ours = state_dict_saver._save_state_dict
    state_dict_saver._save_state_dict = ours.__wrapped__  # torch's own
    with pytest.raises(planner.CoordinationError, match="would run over the device group"):
        save(state_of(rank), checkpoint_id=f"{folder}/x", planner=GlooCoordinatedPlanner())
    with planner.coordinated(CONFIG):
        assert state_dict_saver._save_state_dict is ours
        save(state_of(rank), checkpoint_id=f"{folder}/x")


def test_a_patch_of_another_library_ends_in_an_error_and_never_on_the_device_group(tmp_path):
    run_ranks(save_after_another_librarys_patch, 2, str(tmp_path))


def fail_under_the_switch(rank, folder):
    class Failing(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            if rank == 1:
                raise ValueError("no plan today")
            return super().create_local_plan()

    planner.enable(CONFIG)
    with pytest.raises(CheckpointException, match="no plan today") as caught:
        save(state_of(rank), checkpoint_id=f"{folder}/x", planner=Failing())
    assert list(caught.value.failures) == [1]
    save(state_of(rank), checkpoint_id=f"{folder}/x")
    planner.disable()
    assert type(_DistWrapper(None, False, 0)) is _DistWrapper
    assert not isinstance(_DistWrapper(None, True, 0), GlooDistWrapper)


def test_a_failure_of_an_engines_planner_is_every_ranks_and_the_next_save_works(tmp_path):
    run_ranks(fail_under_the_switch, 3, str(tmp_path))


UNEDITED = """
import sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("cuda:gloo")  # refuses every collective
dcp.save({"weight": torch.ones(4)}, checkpoint_id=sys.argv[1])
"""


def test_a_script_that_nobody_edits_runs_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(UNEDITED)
    done = run_python(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
        *("-m", "planner", "run", str(script), str(tmp_path / "x")),
        timeout=150,
        GLOO_SOCKET_IFNAME="lo",
    )
    assert done.returncode == 0, done.stderr
    assert written(tmp_path / "x").state_dict_metadata.keys() == {"weight"}


def save_and_listen(rank, folder):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.name}: {record.getMessage()}")
    logging.getLogger("planner").addHandler(handler)
    planner.enable(CONFIG)  # before logging is set up, as at `import planner`
    logging.getLogger("planner").setLevel(logging.INFO)
    for name in ("model", "optimizer"):
        save(state_of(rank), checkpoint_id=f"{folder}/{name}")
    return lines


def test_one_line_says_how_it_was_turned_on_and_one_a_save_what_it_took(tmp_path):
    coordinator, other = [outcome.value for outcome in run_ranks(save_and_listen, 2, str(tmp_path))]
    turned_on, *saves = coordinator
    assert re.fullmatch(
        r"planner\.switch: .* coordinated over gloo, by planner\.enable\(\) at .*:\d+", turned_on
    )
    for name, line in zip(("model", "optimizer"), saves, strict=True):
        assert re.fullmatch(
            rf"planner\.exchange: save of '{tmp_path}/{name}' on 2 ranks: coordination over gloo took "
            r"[\d.]+ s of [\d.]+ s; this rank sent [\d,]+ bytes and received [\d,]+",
            line,
        )
    assert [line.split(" at ")[0] for line in other] == [turned_on.split(" at ")[0]]


class Talking(dcp.FileSystemWriter):
    """Talks to the other ranks by a wrapper of its own, in the middle of the save."""

    def write_data(self, plan, planner):
        utils._DistWrapper(None, True, 0).barrier()
        return super().write_data(plan, planner)


def save_with_a_talking_storage(rank, folder):
    planner.enable(CONFIG)
    with pytest.raises(CheckpointException, match="in this very thread") as caught:
        save(state_of(rank), storage_writer=Talking(f"{folder}/x"))
    assert sorted(caught.value.failures) == [0, 1]
    save(state_of(rank), checkpoint_id=f"{folder}/x")


def test_a_storage_that_makes_its_own_wrapper_inside_a_save_is_refused_by_name_at_once(tmp_path):
    outcomes = run_ranks(save_with_a_talking_storage, 2, str(tmp_path))
    assert max(outcome.seconds for outcome in outcomes) < 15
