"""One rank's failure is everybody's, with its cause, within seconds; and the next save works."""

import logging
import pickle
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

import planner.exchange
import planner.transport
from planner import (
    CoordinationConfig,
    CoordinationMismatch,
    CoordinationTimeout,
    GlooCoordinatedPlanner,
    GlooDistWrapper,
    PlannerError,
    RemoteError,
)
from planner.control import ControlPlane
from planner.wire import frame
from tests.support.faults import HOOKS, KINDS, make_storage_and_planner
from tests.support.ranks import arrive, await_arrivals, meet, run_ranks
from tests.support.states import mesh_of, sharded

WORLD = 3
# Plans are sent in every save here, so that they can be damaged, or a rank struck, on the way.
SHORT = CoordinationConfig(plan_timeout=timedelta(seconds=3), remembered_nbytes=0)


def state_of(rank):
    return {"weight": torch.arange(8.0) + 1, f"own{rank}": torch.full((2,), float(rank))}


def save(rank, folder, config=SHORT):
    return dcp.save(state_of(rank), checkpoint_id=folder, planner=GlooCoordinatedPlanner(config=config))


def check_that_saving_works(rank, folder):
    metadata = save(rank, folder)
    assert len(metadata.state_dict_metadata) == 1 + dist.get_world_size()
    assert pickle.loads(Path(folder, ".metadata").read_bytes()) == metadata


def fail_everywhere(rank, folder, hook):
    is_coordinators = HOOKS[hook][0]
    slowest = 0.0
    for kind, make in KINDS.items():
        for ranks in ([0],) if is_coordinators else ([0], [1], [1, 2], [0, 1, 2]):
            where = f"{folder}/{kind}-{''.join(map(str, ranks))}"
            writer, inner = make_storage_and_planner(where, hook, ranks, make)
            start = time.monotonic()
            with pytest.raises(CheckpointException) as caught:
                dcp.save(state_of(rank), storage_writer=writer, planner=GlooCoordinatedPlanner(inner))
            slowest = max(slowest, time.monotonic() - start)
            assert sorted(caught.value.failures) == ranks, (kind, ranks)
            if rank in ranks:
                assert type(caught.value.__cause__) is type(make())
            for failed in ranks:
                error, trace = caught.value.failures[failed]
                expected = type(make())
                travels = kind not in {"unpicklable", "unconstructible", "mute"}
                if travels:
                    assert type(error) is expected
                else:
                    assert type(error) is RemoteError
                    assert error.type_name.endswith(expected.__name__)
                    assert "in fail" in error.traceback_text
                if kind != "mute":
                    assert "no space left on device" in str(error)
                assert any(line.name == "fail" for line in trace)
            assert not Path(where, ".metadata").exists()
    check_that_saving_works(rank, f"{folder}/after")
    return slowest


@pytest.mark.parametrize("hook", HOOKS)
def test_whatever_one_rank_raises_reaches_every_rank_and_the_next_save_works(hook, tmp_path):
    outcomes = run_ranks(fail_everywhere, WORLD, str(tmp_path), hook, timeout=100)
    assert max(outcome.value for outcome in outcomes) < 10


def interrupt_twice(rank, folder):
    writer, inner = make_storage_and_planner(f"{folder}/x", "create_local_plan", [1], KINDS["interrupt"])
    with pytest.MonkeyPatch.context() as monkeypatch:
        if rank == 1:  # the first when it plans, the second when it tells the others of the first
            monkeypatch.setattr(planner.exchange.Exchange, "_put_failed", interrupt)
        with pytest.raises(KeyboardInterrupt if rank == 1 else CoordinationTimeout) as caught:
            dcp.save(
                state_of(rank), storage_writer=writer, planner=GlooCoordinatedPlanner(inner, config=SHORT)
            )
        assert rank == 1 or list(caught.value.ranks) == [1]
    meet("done", WORLD)
    check_that_saving_works(rank, f"{folder}/after")


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_second_interrupt_while_a_save_ends_leaves_the_rank_able_to_save(tmp_path):
    run_ranks(interrupt_twice, WORLD, str(tmp_path))


class NamelessWriter(dcp.FileSystemWriter):
    """Fails before DCP touches the planner, on one rank."""

    is_reset = False  # DCP's logger asks for the id once before that

    def reset(self, checkpoint_id=None):
        super().reset(checkpoint_id)
        self.is_reset = True

    @property
    def checkpoint_id(self):
        if self.is_reset and dist.get_rank() == 1:
            raise OSError("mount is gone")
        return self.path


def fail_before_the_planner(rank, folder):
    writer = NamelessWriter(f"{folder}/x")
    with pytest.raises((CheckpointException, OSError), match="mount is gone"):
        dcp.save(
            state_of(rank),
            checkpoint_id=f"{folder}/x",
            storage_writer=writer,
            planner=GlooCoordinatedPlanner(config=SHORT),
        )
    check_that_saving_works(rank, f"{folder}/after")


def test_a_rank_that_fails_before_its_planner_is_touched_does_not_go_to_the_device(tmp_path):
    outcomes = run_ranks(fail_before_the_planner, WORLD, str(tmp_path))
    assert max(outcome.seconds for outcome in outcomes) < 10


class NoPlan(dcp.DefaultSavePlanner):
    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def create_local_plan(self):
        return {"items": []} if self.hook == "create_local_plan" else super().create_local_plan()

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return {"create_global_plan": None, "too_few": (plans[1:], metadata), "no_metadata": (plans, {})}.get(
            self.hook, (plans, metadata)
        )

    def finish_plan(self, new_plan):
        return None if self.hook == "finish_plan" else super().finish_plan(new_plan)


def return_no_plans(rank, folder):
    for hook, ranks, text in (
        (
            "create_local_plan",
            [0, 1, 2],
            "NoPlan.create_local_plan must return a SavePlan, but returned a dict",
        ),
        ("create_global_plan", [0], "must return plans and metadata, but returned a NoneType"),
        ("too_few", [0], "must return a list of 3 SavePlans, but returned a list of 2"),
        ("no_metadata", [0], "must return a Metadata, but returned a dict"),
        ("finish_plan", [0, 1, 2], "NoPlan.finish_plan must return a SavePlan"),
    ):
        with pytest.raises(CheckpointException, match=text) as caught:
            dcp.save(
                state_of(rank), checkpoint_id=f"{folder}/{hook}", planner=GlooCoordinatedPlanner(NoPlan(hook))
            )
        assert sorted(caught.value.failures) == ranks
    with pytest.raises(CheckpointException):  # a lambda cannot be written
        dcp.save({"f": lambda: 1}, checkpoint_id=f"{folder}/lambda", planner=GlooCoordinatedPlanner())
    shape = (4, 2) if rank == 1 else (2, 2)
    clash = {"clash": sharded(torch.ones(*shape), mesh_of((3,)), [Shard(0)])}
    with pytest.raises(CheckpointException, match=r"invalid fill|out of bounds|overlap|size"):
        dcp.save(clash, checkpoint_id=f"{folder}/clash", planner=GlooCoordinatedPlanner())
    check_that_saving_works(rank, f"{folder}/after")


def test_a_planner_that_returns_no_plan_and_values_that_cannot_be_written_are_named_on_all_ranks(tmp_path):
    run_ranks(return_no_plans, WORLD, str(tmp_path))


def stay_away(rank, folder, absent):
    where = f"{folder}/first"
    start = time.monotonic()
    if rank not in absent:
        with pytest.raises(CoordinationTimeout) as caught:
            save(rank, where)
        error = caught.value
        assert list(error.ranks) == ([0] if 0 in absent else absent)
        assert error.operation == "save"
        assert error.checkpoint == where
        assert error.phase in {"plan", "enter"}
        assert isinstance(error, TimeoutError)
        assert isinstance(error, CheckpointException)
        assert isinstance(error, Exception)
        assert "never entered" in str(error)
        waited = time.monotonic() - start
        assert 2.5 < waited < 5.5, waited  # once plan_timeout, and not twice
    meet("done", WORLD)  # the absent go on when the others have given up
    check_that_saving_works(rank, f"{folder}/second")
    check_that_saving_works(rank, f"{folder}/third")
    assert not Path(where, ".metadata").exists()


@pytest.mark.parametrize("absent", [[1], [1, 2], [0]])
def test_a_rank_that_never_saves_is_named_at_the_planning_deadline(absent, tmp_path):
    run_ranks(stay_away, WORLD, str(tmp_path), absent)


def stay_away_later(rank, folder, absent):
    save(rank, f"{folder}/zero")
    stay_away(rank, folder, absent)


@pytest.mark.parametrize("absent", [[1], [0]])
def test_a_rank_that_skips_a_later_save_is_named_and_is_in_step_again_with_the_next(absent, tmp_path):
    run_ranks(stay_away_later, WORLD, str(tmp_path), absent)


def numbered(number):
    return {
        "number": torch.full((4,), float(number)),
        f"own{dist.get_rank()}": torch.full((2,), float(number)),
    }


def come_late(rank, folder, late, num_missed, num_earlier, place):
    """Make the same saves on all ranks; one rank comes when the others are ahead by some."""
    for number in range(num_earlier):
        save(rank, f"{folder}/earlier{number}")
    if rank == late:
        await_arrivals("gave up", (WORLD - 1) * num_missed)
    for number in range(num_missed + 1):
        state, where = numbered(number), f"{folder}/{place.format(number)}"
        if number < num_missed:
            with pytest.raises(CoordinationTimeout) as caught:
                dcp.save(state, checkpoint_id=where, planner=GlooCoordinatedPlanner(config=SHORT))
            assert list(caught.value.ranks) == [late]
            assert not Path(where, ".metadata").exists()
            arrive("gave up")
        else:
            dcp.save(state, checkpoint_id=where, planner=GlooCoordinatedPlanner(config=SHORT))
    meet("saved", WORLD)
    target = {name: torch.zeros_like(value) for name, value in numbered(0).items()}
    target |= {f"own{peer}": torch.zeros(2) for peer in range(WORLD)}
    dcp.load(target, checkpoint_id=where, no_dist=True)
    assert {float(value[0]) for value in target.values()} == {float(num_missed)}  # one state, not two


@pytest.mark.parametrize("num_earlier", [0, 1])
@pytest.mark.parametrize("num_missed", [1, 2])
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_after_the_others_gave_up_does_not_join_a_save_that_is_not_its_own(
    late, num_missed, num_earlier, tmp_path
):
    outcomes = run_ranks(come_late, WORLD, str(tmp_path), late, num_missed, num_earlier, "same")
    assert outcomes[late].seconds < 30


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_late_by_saves_to_places_of_their_own_raises_for_each_and_spoils_no_other(late, tmp_path):
    run_ranks(come_late, WORLD, str(tmp_path), late, 2, 1, "place{}")


def be_late_once(rank, folder, late):
    ends = []
    for number in range(5):
        if number == 1 and rank == late:
            await_arrivals("gave up", WORLD - 1)
        try:
            save(rank, f"{folder}/{number}")
        except CoordinationTimeout:
            ends.append("timeout")
            arrive("gave up")
        except CoordinationMismatch:
            ends.append("mismatch")
        else:
            ends.append("saved")
    return ends


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_do_not_wait_for_a_late_one_are_soon_in_step_with_it(late, tmp_path):
    ends = [outcome.value for outcome in run_ranks(be_late_once, WORLD, str(tmp_path), late)]
    assert all(end[0] == "saved" and end[1] != "saved" and end[-1] == "saved" for end in ends), ends
    for number in range(5):  # all or nobody
        assert len({end[number] == "saved" for end in ends}) == 1, ends
        assert (tmp_path / str(number) / ".metadata").exists() == (ends[0][number] == "saved")


def save_different_things(rank, folder):
    with pytest.raises(CoordinationMismatch) as caught:
        save(rank, f"{folder}/{'model' if rank else 'optimizer'}")
    assert f"save of '{folder}/model'" in str(caught.value)
    assert f"save of '{folder}/optimizer'" in str(caught.value)
    assert "group ranks 1-2" in str(caught.value)
    assert list(caught.value.ranks) == [1, 2]
    check_that_saving_works(rank, f"{folder}/after")


def test_ranks_in_saves_of_different_checkpoints_are_refused_with_both_names(tmp_path):
    outcomes = run_ranks(save_different_things, WORLD, str(tmp_path))
    assert max(outcome.seconds for outcome in outcomes) < 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after"] or not list(
        tmp_path.glob("[mo]*/.metadata")
    )


def save_with_another_version(rank, folder):
    if rank == 1:
        frame.WIRE_VERSION += 1
    with pytest.raises(CoordinationMismatch, match="version"):
        save(rank, f"{folder}/first")
    if rank == 1:
        frame.WIRE_VERSION -= 1
    check_that_saving_works(rank, f"{folder}/after")


def test_ranks_with_another_wire_version_are_refused_on_all_ranks(tmp_path):
    outcomes = run_ranks(save_with_another_version, WORLD, str(tmp_path))
    assert max(outcome.seconds for outcome in outcomes) < 10


def save_beside_a_stock_rank(rank, folder):
    if rank == 1:
        with pytest.raises(BaseException):  # noqa: B017 - whatever the trip-wire raises
            dcp.save(state_of(rank), checkpoint_id=f"{folder}/first")
    else:
        with pytest.raises(CoordinationTimeout, match="without GlooCoordinatedPlanner") as caught:
            save(rank, f"{folder}/first")
        assert list(caught.value.ranks) == [1]
    meet("done", WORLD)
    check_that_saving_works(rank, f"{folder}/after")


def test_a_rank_that_saves_without_our_planner_is_named(tmp_path):
    run_ranks(save_beside_a_stock_rank, WORLD, str(tmp_path))


def flip(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


DAMAGES = {
    "flipped": flip,
    "zeroed": lambda data: bytes(len(data)),
    "foreign": lambda data: (b"PK\x03\x04" * len(data))[: len(data)],
    "mis-versioned": lambda data: data[:4] + b"\x63\x00" + data[6:],
}


def damage(monkeypatch, point, change):
    """Damage what this rank puts on the wire at ``point``."""
    if point == "parts":
        original = planner.transport._as_tensor
        monkeypatch.setattr(planner.transport, "_as_tensor", lambda data: original(change(bytes(data))))
    else:
        put = ControlPlane.put

        def damaged(self, key, value):
            is_it = "/v/" in key if point == "verdict" else "/u/" in key
            put(self, key, change(bytes(value)) if is_it and value else value)

        monkeypatch.setattr(ControlPlane, "put", damaged)


def save_damaged(rank, folder, point, source):
    for name, change in DAMAGES.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank == source:
                damage(monkeypatch, point, change)
            with pytest.raises((CheckpointException, PlannerError)) as caught:
                save(rank, f"{folder}/{name}")
            assert isinstance(caught.value, CheckpointException)
        assert not Path(folder, name, ".metadata").exists()
        check_that_saving_works(rank, f"{folder}/after-{name}")


@pytest.mark.parametrize(("point", "source"), [("parts", 1), ("parts", 0), ("envelope", 1), ("verdict", 0)])
def test_damaged_bytes_at_any_point_are_an_error_on_all_ranks_and_the_next_save_works(
    point, source, tmp_path
):
    run_ranks(save_damaged, WORLD, str(tmp_path), point, source, timeout=120)


def send_other_lengths(rank, folder):
    original = planner.transport.send_parts
    for name, change in (("shorter", lambda part: part[:-7]), ("longer", lambda part: part + b"1234567")):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank == 1:  # the envelope then promises what is sent, so the frame itself must be refused
                monkeypatch.setattr(
                    "planner.dist_wrapper.encode_value",
                    lambda *args, _change=change, _original=planner.dist_wrapper.encode_value, **options: (
                        tuple(_change(part) for part in _original(*args, **options))
                    ),
                )
            with pytest.raises(CheckpointException, match="length") as caught:
                save(rank, f"{folder}/{name}")
            assert list(caught.value.failures) == [1]
        check_that_saving_works(rank, f"{folder}/after-{name}")
    with pytest.MonkeyPatch.context() as monkeypatch:
        if rank == 1:  # less than the envelope promised
            monkeypatch.setattr(
                "planner.exchange.send_parts",
                lambda group, parts, **where: original(group, [part[:-7] for part in parts], **where),
            )
        with pytest.raises(CheckpointException, match="digest") as caught:
            save(rank, f"{folder}/broken-promise")
        assert list(caught.value.failures) == [1]
    check_that_saving_works(rank, f"{folder}/after")


def test_frames_of_another_length_are_refused_and_named(tmp_path):
    run_ranks(send_other_lengths, WORLD, str(tmp_path))


class SlowWriter(dcp.FileSystemWriter):
    """Takes its time on one rank, in ``write_data`` or in ``finish``."""

    def __init__(self, folder, where, rank, seconds):
        super().__init__(folder, sync_files=False)
        self.where, self.slow_rank, self.seconds = where, rank, seconds

    def _take_time(self, where):
        if where == self.where and dist.get_rank() == self.slow_rank:
            threading.Event().wait(self.seconds)

    def write_data(self, plan, planner):
        self._take_time("write_data")
        return super().write_data(plan, planner)

    def finish(self, metadata, results):
        self._take_time("finish")
        super().finish(metadata, results)


def collect_log():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("planner").addHandler(handler)
    logging.getLogger("planner").setLevel(logging.INFO)
    return records


def write_slowly(rank, folder):
    log = collect_log()
    quick = timedelta(seconds=1)
    # A living rank is waited for beyond plan_timeout, and who waits says for whom.
    patient = CoordinationConfig(plan_timeout=timedelta(seconds=2), progress_interval=quick)
    for where, slow in (("write_data", 1), ("finish", 0)):
        writer = SlowWriter(f"{folder}/{where}", where, slow, 5.0)
        planner = GlooCoordinatedPlanner(config=patient)
        dcp.save(state_of(rank), storage_writer=writer, planner=planner)
        if where == "write_data" and rank == 0:
            waits = [text for text in log if "waiting for 1 of 3 ranks" in text]
            assert 2 <= len(waits) <= 6, log
            assert all("not there: group ranks 1" in text for text in waits)
            assert planner.report.phases[1].last_ranks[-1] == 1
    if rank == 2:
        assert any("the coordinator, which is waiting in phase 'write'" in text for text in log), log
        assert any("which is reducing what all ranks sent in phase 'write'" in text for text in log), log
    # With io_timeout it is not.
    strict = CoordinationConfig(plan_timeout=timedelta(seconds=20), io_timeout=timedelta(seconds=2))
    writer = SlowWriter(f"{folder}/late", "write_data", 1, 5.0)
    start = time.monotonic()
    with pytest.raises(CoordinationTimeout, match="did not finish in time") as caught:
        dcp.save(state_of(rank), storage_writer=writer, planner=GlooCoordinatedPlanner(config=strict))
    assert list(caught.value.ranks) == [1]
    assert time.monotonic() - start < 8
    assert not Path(folder, "late", ".metadata").exists()
    check_that_saving_works(rank, f"{folder}/after")


def test_a_slow_living_rank_is_waited_for_and_named_in_the_log_unless_io_timeout_ends_it(tmp_path):
    run_ranks(write_slowly, WORLD, str(tmp_path))


def be_late_to_the_first(rank, folder, late):
    """The others give up their first save, and go on to the next, to the same place."""
    if rank == late:
        await_arrivals("gave up", WORLD - 1)
    ends = []
    for step in (100, 200, 300):
        state_dict = {f"own{rank}": torch.tensor(step)}
        try:
            dcp.save(state_dict, checkpoint_id=folder, planner=GlooCoordinatedPlanner(config=SHORT))
        except CheckpointException as error:
            ends.append(type(error).__name__)
            arrive("gave up")
        else:
            target = {f"own{other}": torch.tensor(0) for other in range(WORLD)}
            dcp.load(target, checkpoint_id=folder, no_dist=True)
            ends.append(sorted({int(value) for value in target.values()}))
    return ends


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_late_to_the_first_save_never_mixes_its_state_into_the_next(late, tmp_path):
    ends = [outcome.value for outcome in run_ranks(be_late_to_the_first, WORLD, str(tmp_path), late)]
    saved = [[end for end in rank_ends if isinstance(end, list)] for rank_ends in ends]
    assert all(len(steps) == 1 for rank_saved in saved for steps in rank_saved), ends


class RankLocalWriter(SlowWriter):
    """Slow, or out of space, in a save where each rank writes for itself."""

    def write_data(self, plan, planner):
        if self.where == "fails" and dist.get_rank() == self.slow_rank:
            raise OSError(28, "no space left on device")
        return super().write_data(plan, planner)


def save_rank_locally(rank, folder):
    quick = CoordinationConfig(plan_timeout=timedelta(seconds=2))

    def save_locally(name, where="", struck=0):
        dcp.save(
            state_of(rank),
            storage_writer=RankLocalWriter(f"{folder}/{name}", where, struck, 4.0),
            planner=GlooCoordinatedPlanner(config=quick),
            use_collectives=False,
        )

    save_locally("slow-coordinator", "write_data", 0)  # longer than plan_timeout, in the very first save
    save_locally("slow-rank", "write_data", 1)
    with pytest.raises((CheckpointException, OSError), match="no space left on device"):
        save_locally("full", "fails", 1)
    save_locally("after")
    with pytest.raises((CheckpointException, OSError), match="no space left on device"):
        save_locally("full-coordinator", "fails", 0)
    save_locally("after-that")
    if rank != 1:
        with pytest.raises(CoordinationTimeout, match="never entered") as caught:
            save_locally("missing")
        assert list(caught.value.ranks) == [1]
    meet("done", WORLD)
    save_locally("at-last")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_saves_without_collectives_wait_for_slow_ranks_and_name_failed_and_missing_ones(tmp_path):
    outcomes = run_ranks(save_rank_locally, WORLD, str(tmp_path))
    assert max(outcome.seconds for outcome in outcomes) < 45


def save_with_a_wrong_coordinator(rank):
    with pytest.raises(ValueError, match="coordinator_rank is 5, but the group has 3 ranks"):
        GlooDistWrapper(None, True, 5)


def test_a_coordinator_that_is_no_member_is_refused_at_once():
    run_ranks(save_with_a_wrong_coordinator, WORLD)


def save_replicated(rank, folder):
    metadata = dcp.save(
        {"same": torch.ones(4)}, checkpoint_id=folder, planner=GlooCoordinatedPlanner(config=SHORT)
    )
    assert list(metadata.state_dict_metadata) == ["same"]


def test_equal_plans_are_saved_also_where_all_ranks_connect_at_once(tmp_path):
    run_ranks(save_replicated, WORLD, str(tmp_path), env={"TORCH_GLOO_LAZY_INIT": "0"})


def fail_over_an_earlier_checkpoint(rank, folder):
    save(rank, folder)
    meet("saved", WORLD)
    before = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    for hook in ("set_up_planner", "create_local_plan", "create_global_plan", "prepare_global_plan"):
        writer, inner = make_storage_and_planner(folder, hook, [0], KINDS["plain"])
        with pytest.raises(CheckpointException):
            dcp.save(state_of(rank), storage_writer=writer, planner=GlooCoordinatedPlanner(inner))
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == before


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_save_that_fails_before_it_writes_leaves_an_earlier_checkpoint_untouched(tmp_path):
    run_ranks(fail_over_an_earlier_checkpoint, WORLD, str(tmp_path))
