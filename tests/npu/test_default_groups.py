"""Default groups, and numbers of devices, that jobs on Ascend have: saves and loads that touch no device."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from planner import GlooCoordinatedLoadPlanner, GlooCoordinatedPlanner
from tests.npu.fake import device_work, read_counters

BACKENDS = ["hccl", "cpu:gloo,npu:hccl", "npu:hccl"]


def save_and_load(rank, folder, device):
    """Save tensors that are on ``device`` and load them into others there."""
    planner, load_planner = GlooCoordinatedPlanner(), GlooCoordinatedLoadPlanner()
    if device == "npu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    state = {"weight": torch.arange(8.0).to(device), f"own{rank}": torch.full((2,), float(rank)).to(device)}
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)  # see test_writer.py
    _, work = device_work(dcp.save, state, storage_writer=writer, planner=planner)
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(loaded, checkpoint_id=folder, planner=load_planner)
    assert all(torch.equal(loaded[name].cpu(), value.cpu()) for name, value in state.items())
    return work


def save_and_load_without_device(rank, folder):
    save_and_load(rank, folder, "cpu")
    return {name: value for name, value in read_counters().items() if value}


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_device_nothing_ever_asks_for_one(npu_ranks, tmp_path, backend):
    for outcome in npu_ranks(save_and_load_without_device, 2, str(tmp_path), backend=backend, devices=0):
        assert outcome.value == {}


@pytest.mark.parametrize(
    ("backend", "devices"), [("hccl", 1), ("hccl", 2), ("cpu:gloo,npu:hccl", 1), ("npu:hccl", 2)]
)
def test_with_devices_nothing_but_the_weights_is_copied(npu_ranks, tmp_path, backend, devices):
    for outcome in npu_ranks(
        save_and_load, 2, str(tmp_path), "npu", backend=backend, devices=devices, hccl="hang"
    ):
        assert outcome.value.keys() <= {"copies_to_host", "synchronizations"}
        assert 1 <= outcome.value["copies_to_host"] <= 2


def test_without_a_default_group_one_process_saves(npu_ranks, tmp_path):
    [outcome] = npu_ranks(save_and_load, 1, str(tmp_path), "npu", backend="", hccl="hang")
    assert outcome.value["copies_to_host"] == 2
