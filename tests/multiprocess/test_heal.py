"""After any failure the group is made anew, and nothing of the old one is left."""

import ctypes
import gc
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from planner import CoordinationConfig, CoordinationTimeout, GlooCoordinatedPlanner, TransportError
from planner.channel import _channels
from tests.support.faults import KINDS, make_storage_and_planner
from tests.support.ranks import run_ranks

CONFIG = CoordinationConfig(plan_timeout=timedelta(seconds=20))
ROUNDS = 50


def state_of(rank):
    return {"weight": torch.arange(8.0) + 1, f"own{rank}": torch.full((2,), float(rank))}


def save(rank, folder, config=CONFIG):
    return dcp.save(state_of(rank), checkpoint_id=folder, planner=GlooCoordinatedPlanner(config=config))


def count():
    gc.collect()
    store = dist.distributed_c10d._get_default_store()
    store.add("counted", 1)
    while store.add("counted", 0) % dist.get_world_size():
        pass  # all are here, so nobody's keys are in flight
    keys = store.num_keys()
    store.add("counted again", 1)
    while store.add("counted again", 0) % dist.get_world_size():
        pass
    ctypes.CDLL(None).malloc_trim(0)
    resident_nbytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    sockets = len(list(Path("/proc/self/fd").iterdir()))
    return sockets, threading.active_count(), keys, resident_nbytes, len(gc.get_objects())


def fail_and_heal(rank, folder):
    counts = []
    hooks = ["create_local_plan", "create_global_plan", "write_data", "finish"]
    for number in range(ROUNDS):
        hook = hooks[number % len(hooks)]
        struck = 0 if hook in {"create_global_plan", "finish"} else number % dist.get_world_size()
        writer, inner = make_storage_and_planner(f"{folder}/failed", hook, [struck], KINDS["plain"])
        with pytest.raises(CheckpointException):
            dcp.save(
                state_of(rank), storage_writer=writer, planner=GlooCoordinatedPlanner(inner, config=CONFIG)
            )
        save(rank, f"{folder}/{number % 3}")
        if number in {2, ROUNDS - 1}:
            counts.append(count())
    return counts


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_fifty_failed_saves_leave_no_sockets_threads_store_keys_or_memory_behind(tmp_path):
    outcomes = run_ranks(fail_and_heal, 3, str(tmp_path), timeout=150)
    for outcome in outcomes:
        sockets, threads, keys, resident_nbytes, num_objects = outcome.value[0]
        sockets_after, threads_after, keys_after, resident_nbytes_after, num_objects_after = outcome.value[1]
        assert sockets_after <= sockets
        assert threads_after <= threads
        assert keys_after <= keys + 1  # our own count
        assert resident_nbytes_after < resident_nbytes + 4 * 2**20  # a few hundred kB of malloc's own
        assert num_objects_after < num_objects + 4 * ROUNDS


def break_the_group(rank, folder):
    save(rank, f"{folder}/0")
    epochs = []
    for number in range(3):
        (channel,) = _channels.values()
        epochs.append(channel.epoch)
        if rank == 1:
            channel.open_group(CONFIG.plan_timeout).close()  # as after a failure of the network
        with pytest.raises(TransportError) as caught:
            save(rank, f"{folder}/broken")
        assert list(caught.value.ranks) in ([0], [1])
        save(rank, f"{folder}/{number + 1}")
    return epochs


def test_a_broken_group_is_an_error_once_and_is_made_anew_under_an_epoch_that_all_agree_on(tmp_path):
    outcomes = run_ranks(break_the_group, 3, str(tmp_path))
    assert len({tuple(outcome.value) for outcome in outcomes}) == 1
    assert len(set(outcomes[0].value)) == 3


def restart(rank, folder, port):
    for life in range(3):
        save(rank, f"{folder}/{life}")
        dist.destroy_process_group()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        # The same store, as an elastic agent keeps it over a restart of its workers.
        dist.init_process_group("gloo", store=dist.PrefixStore(f"life{life}", store), rank=rank, world_size=3)
    save(rank, f"{folder}/last")
    return len(_channels)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_process_groups_made_anew_in_the_same_process_are_noticed(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = run_ranks(restart, 3, str(tmp_path), store.port, backend="gloo")
    assert all(outcome.value == 1 for outcome in outcomes)
    assert (tmp_path / "last" / ".metadata").exists()


def restart_on_the_same_keys(rank, folder, port):
    for life in range(2):
        if life:
            dist.destroy_process_group()
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=3)
        if not (life == 0 and rank == 2):  # in its first life one rank never saves
            if life == 0:
                with pytest.raises(CoordinationTimeout):
                    save(rank, f"{folder}/0", CoordinationConfig(plan_timeout=timedelta(seconds=2)))
            else:
                save(rank, f"{folder}/1")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_new_life_never_takes_an_answer_of_an_old_one(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(restart_on_the_same_keys, 3, str(tmp_path), store.port)
    assert (tmp_path / "1" / ".metadata").exists()
