"""The field report, as an A/B test: the default group's collectives never end, the weights are on the NPU.

Single variable: ``planner=``. Model and optimizer are saved by a call each, as the report's engine does.
"""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

from planner import GlooCoordinatedLoadPlanner, GlooCoordinatedPlanner
from tests.npu.fake import device_work

REPORTED = "c10_npu::acl::AclrtSynchronizeStreamWithTimeout(copy_stream), error code is 507046"
LAYOUTS = ["plain", "fsdp2"]
COORDINATION = {
    "communicators",
    "collectives",
    "allocations",
    "allocated_nbytes",
    "copies_to_device",
    "kernels",
}
PLAN_COLLECTIVES = 7  # of torch_npu's gather_object (4) and torch's scatter_object_list (3)


def make_states(rank, layout, seed=0):
    torch.accelerator.set_device_index(rank)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)).npu()
    if layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("npu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    states = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    states["model"][f"expert{rank}"] = torch.full((3,), float(rank + seed)).npu()
    return states


def values_of(state):
    """Return every tensor's own part, on the CPU."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    return [getattr(tensor, "_local_tensor", tensor).cpu() for tensor in tensors]


def save(rank, folder, layout, **how):
    return [
        device_work(dcp.save, {what: state}, checkpoint_id=f"{folder}/{what}", **how)[1]
        for what, state in make_states(rank, layout).items()
    ]


def save_stock(rank, folder, layout):
    save(rank, folder, layout)


def save_ours(rank, folder, layout):
    return save(rank, folder, layout, planner=GlooCoordinatedPlanner())


def load(rank, folder, layout, **how):
    states = make_states(rank, layout, seed=1)
    work = [
        device_work(dcp.load, {what: state}, checkpoint_id=f"{folder}/{what}", **how)[1]
        for what, state in states.items()
    ]
    saved = make_states(rank, layout)
    pairs = zip(values_of(states), values_of(saved), strict=True)
    return work, all(torch.equal(loaded, expected) for loaded, expected in pairs)


def load_stock(rank, folder, layout):
    load(rank, folder, layout)


def load_ours(rank, folder, layout):
    return load(rank, folder, layout, planner=GlooCoordinatedLoadPlanner())


def assert_failed_as_reported(outcome, phase):
    assert REPORTED in outcome.error_text
    assert "all tasks in the specified stream are not completed" in outcome.error_text
    assert f"distW.{phase}" in outcome.error_text
    assert "torch_npu/distributed/distributed_c10d.py" in outcome.error_text  # its _gather_object


def files_in(folder):
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stock_dcp_fails_in_the_plan_exchange_with_the_reports_error_and_no_file(npu_ranks, tmp_path, layout):
    folder = tmp_path / "checkpoint"

    for outcome in npu_ranks(save_stock, 2, str(folder), layout, hccl="hang", may_fail=True):
        assert_failed_as_reported(outcome, 'reduce_scatter("plan"')
    assert files_in(folder) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_our_planner_it_saves_and_loads_and_coordination_reaches_no_device(npu_ranks, tmp_path, layout):
    folder = tmp_path / "checkpoint"

    saved = npu_ranks(save_ours, 2, str(folder), layout, hccl="hang")
    loaded = npu_ranks(load_ours, 2, str(folder), layout, hccl="hang")

    for outcome in saved:
        for work in outcome.value:
            assert not COORDINATION & work.keys()
            assert work["copies_to_host"] > 0  # the weights, by the writer
    for outcome in loaded:
        work, same = outcome.value
        assert same
        for counted in work:
            assert not {"communicators", "collectives"} & counted.keys()


def test_stock_load_fails_with_the_reports_error_too(npu_ranks, tmp_path):
    folder = str(tmp_path / "checkpoint")
    npu_ranks(save_ours, 2, folder, "plain", hccl="hang")

    for outcome in npu_ranks(load_stock, 2, folder, "plain", hccl="hang", may_fail=True):
        assert_failed_as_reported(outcome, 'reduce_scatter("plan"')


def test_where_hccl_hangs_only_after_the_plans_stock_dcp_leaves_shards_without_metadata(npu_ranks, tmp_path):
    folder = tmp_path / "checkpoint"

    for outcome in npu_ranks(
        save_stock, 2, str(folder), "plain", hccl="hang", after=PLAN_COLLECTIVES, may_fail=True
    ):
        assert_failed_as_reported(outcome, 'all_reduce("write"')
    assert files_in(folder) == ["__0_0.distcp", "__1_0.distcp"]


def train_then_save(rank, folder, layout):
    torch.accelerator.set_device_index(rank)
    for _ in range(3):
        gradient = torch.ones(4).npu()
        dist.all_reduce(gradient)
        assert gradient.cpu().tolist() == [2.0] * 4
    return save_ours(rank, folder, layout)


def test_with_our_planner_it_saves_when_hccl_hangs_after_some_training(npu_ranks, tmp_path):
    for outcome in npu_ranks(train_then_save, 2, str(tmp_path), "plain", hccl="hang", after=3):
        assert not any(COORDINATION & work.keys() for work in outcome.value)


@pytest.mark.parametrize(
    ("hccl", "said"), [("error", "operator name is HcclAllgather"), ("initfail", "hcclCommInitRootInfo")]
)
def test_ours_does_not_notice_what_stock_dcp_raises_for(npu_ranks, tmp_path, hccl, said):
    folder = tmp_path / "stock"
    for outcome in npu_ranks(save_stock, 2, str(folder), "plain", hccl=hccl, may_fail=True):
        assert said in outcome.error_text
    assert files_in(folder) == []

    for outcome in npu_ranks(save_ours, 2, str(tmp_path / "ours"), "plain", hccl=hccl):
        assert not any(COORDINATION & work.keys() for work in outcome.value)


def save_async(rank, folder, mode):
    for what, state in make_states(rank, "fsdp2").items():
        how = {"checkpoint_id": f"{folder}/{what}", "async_checkpointer_type": AsyncCheckpointerType(mode)}
        with pytest.raises((AssertionError, ValueError), match=r"(?i)cpu"):
            dcp.async_save({what: state}, **how)  # stock asks for a CPU backend on the default group
        dcp.async_save({what: state}, planner=GlooCoordinatedPlanner(), **how).result()


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_asynchronous_saves_need_neither_the_device_nor_a_cpu_backend(npu_ranks, tmp_path, mode):
    folder = tmp_path / "checkpoint"

    # The daemons of the process mode import torch anew.
    npu_ranks(save_async, 2, str(folder), mode, hccl="hang", daemonic=False, timeout=150)

    assert all(outcome.value[1] for outcome in npu_ranks(load_ours, 2, str(folder), "fsdp2", hccl="hang"))
    assert pickle.loads((folder / "model" / ".metadata").read_bytes()).state_dict_metadata
