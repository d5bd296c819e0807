"""What coordination takes of the device's memory where HCCL works: stock DCP's by a formula, ours nothing.

P is the largest pickled object of all ranks, n the number of ranks. Where P is a multiple of 512 every rank
takes (2n+1)P for a gather, else (3n+2)P; for a scatter (2n+1)P.
"""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import Shard

from planner import GlooCoordinatedPlanner
from tests.npu.fake import device_work
from tests.support.states import mesh_of, sharded

REPORTED_NBYTES, REPORTED_RANKS, REPORTED_ENTRIES = 624.6e6, 512, 2812


def pickled_to(nbytes):
    overhead = len(pickle.dumps(b"x" * nbytes)) - nbytes
    return b"x" * (nbytes - overhead)


def peak_nbytes(call):
    device = torch.get_device_module()  # torch.accelerator's own cannot ask torch_npu 2.10
    device.synchronize()
    device.empty_cache()
    device.reset_peak_memory_stats()
    before = device.memory_allocated()
    call()
    device.synchronize()
    return device.max_memory_allocated() - before


def exchange_objects(rank, sizes):
    torch.accelerator.set_device_index(rank)
    dist.barrier()
    return [exchange_object(rank == 0, pickled_to(nbytes)) for nbytes in sizes]


def exchange_object(is_root, value):
    values = [value] * dist.get_world_size()
    results = list(values) if is_root else None
    return (
        peak_nbytes(lambda: dist.gather_object(value, results, dst=0)),
        peak_nbytes(lambda: dist.scatter_object_list([None], values if is_root else None, src=0)),
    )


@pytest.mark.parametrize("n", [2, 4, 8])
def test_stock_object_collectives_fill_every_device_in_proportion_to_the_number_of_ranks(npu_ranks, n):
    aligned, other = 512 * 200, 512 * 200 - 100

    for outcome in npu_ranks(exchange_objects, n, (aligned, other)):
        # A little more: the sizes are exchanged before, and every tensor takes whole blocks of 512 bytes.
        assert outcome.value == [
            (pytest.approx((2 * n + 1) * aligned, rel=0.03), pytest.approx((2 * n + 1) * aligned, rel=0.03)),
            (pytest.approx((3 * n + 2) * other, rel=0.03), pytest.approx((2 * n + 1) * other, rel=0.03)),
        ]


def make_state(entries):
    """Return a state dict of the report's kind: most entries are a part of a larger tensor."""
    mesh = mesh_of((dist.get_world_size() if dist.is_initialized() else 1,))
    full = torch.zeros(8, 2)
    return {
        f"model.layers.{number // 17}.mlp.experts.{number % 17}.down_proj.weight": sharded(
            full, mesh, [Shard(0)]
        )
        for number in range(entries)
    }


def largest_plan_nbytes(state):
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=False)
    return len(pickle.dumps(planner.create_local_plan()))


def save_both(rank, folder):
    torch.accelerator.set_device_index(rank)
    dist.barrier()
    state = make_state(300)
    stock = peak_nbytes(lambda: dcp.save(state, checkpoint_id=f"{folder}/stock"))
    planner = GlooCoordinatedPlanner()
    ours = peak_nbytes(lambda: dcp.save(state, checkpoint_id=f"{folder}/ours", planner=planner))
    # What is left is the writer's one wait for the stream, see test_writer.py.
    writer = dcp.FileSystemWriter(f"{folder}/again", per_thread_copy_ahead=0)
    _, work = device_work(dcp.save, state, storage_writer=writer, planner=planner)
    return largest_plan_nbytes(state), stock, ours, work


def test_a_whole_stock_save_takes_that_of_every_device_and_ours_does_not_touch_it(npu_ranks, tmp_path):
    n = 4
    for outcome in npu_ranks(save_both, n, str(tmp_path)):
        plan, stock, ours, work = outcome.value
        assert (2 * n + 1) * plan <= stock <= (3 * n + 2) * plan * 1.05
        assert ours == 0
        assert work == {}


def plan_of_the_report(rank):
    return largest_plan_nbytes(make_state(REPORTED_ENTRIES))


def test_the_reports_device_bytes_lie_between_what_the_formulas_give_for_its_entries_and_ranks(npu_ranks):
    plan = max(outcome.value for outcome in npu_ranks(plan_of_the_report, 2, devices=0))
    n = REPORTED_RANKS
    assert (2 * n + 1) * plan <= REPORTED_NBYTES <= (3 * n + 2) * plan
