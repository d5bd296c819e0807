"""What is left of the device in a save: the stock writer waits for a stream, and what avoids that."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from planner import GlooCoordinatedPlanner
from tests.npu.fake import device_work

# Either keeps torch's writer from its _OverlappingCpuLoader, which asks for the stream.
REMEDIES = [{"per_thread_copy_ahead": 0}, {"thread_count": 2}]


def make_stream_stuck():
    """Leave a collective on the current stream that never ends, as a training step that hangs does."""
    gradient = torch.ones(3).npu()
    dist.all_reduce(gradient)
    while torch.accelerator.current_stream().query():  # it is put there from a thread of torch_npu's
        os.sched_yield()


def save(rank, folder, options, device, is_stuck):
    torch.accelerator.set_device_index(rank)
    state = {"a": torch.ones(3).to(device), f"b{rank}": torch.arange(4).to(device)}
    if is_stuck:
        make_stream_stuck()
    writer = dcp.FileSystemWriter(folder, **options)
    return device_work(dcp.save, state, storage_writer=writer, planner=GlooCoordinatedPlanner())[1]


def assert_writer_waited(outcomes):
    """Check that every rank was told that every rank's writer failed, with the device's error."""
    for outcome in outcomes:
        assert outcome.error.failures.keys() == {0, 1}
        assert "error code is 507046" in outcome.error_text
        assert "in write_data" in outcome.error_text


def test_the_stock_writer_waits_for_the_stream_although_all_tensors_are_on_the_cpu(npu_ranks, tmp_path):
    for outcome in npu_ranks(save, 2, str(tmp_path / "well"), {}, "cpu", False):
        assert outcome.value == {"synchronizations": 1}

    stuck = str(tmp_path / "stuck")
    assert_writer_waited(npu_ranks(save, 2, stuck, {}, "cpu", True, hccl="hang", may_fail=True))


@pytest.mark.parametrize("options", REMEDIES)
def test_with_either_option_tensors_on_the_cpu_are_saved_beside_a_stuck_stream(npu_ranks, tmp_path, options):
    for outcome in npu_ranks(save, 2, str(tmp_path), options, "cpu", True, hccl="hang"):
        assert outcome.value == {}


def test_tensors_on_a_device_whose_stream_is_stuck_fail_to_be_written_on_every_rank(npu_ranks, tmp_path):
    # With either option their copy waits without the device's timeout, so for ever.
    assert_writer_waited(npu_ranks(save, 2, str(tmp_path), {}, "npu", True, hccl="hang", may_fail=True))


class Gate(dcp.FileSystemWriter):
    """Begins to write when told."""

    may_write = threading.Event()

    def write_data(self, plan, planner):
        self.may_write.wait()
        return super().write_data(plan, planner)


def save_in_the_background(rank, folder):
    torch.accelerator.set_device_index(rank)
    state = {"a": torch.ones(3).npu(), f"b{rank}": torch.arange(4).npu()}
    future = dcp.async_save(state, storage_writer=Gate(folder), planner=GlooCoordinatedPlanner())
    make_stream_stuck()  # the training goes on, and hangs, after the state was copied
    Gate.may_write.set()
    future.result()


def test_a_background_save_needs_no_option_to_end_beside_a_stream_that_hangs_later(npu_ranks, tmp_path):
    # FileSystemWriter.stage, which copies the state, sets per_thread_copy_ahead to 0 by itself.
    npu_ranks(save_in_the_background, 2, str(tmp_path), hccl="hang")
