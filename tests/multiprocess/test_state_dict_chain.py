"""The usual chain of an engine: ``get_state_dict``, ``dcp.save``, ``dcp.load``, ``set_state_dict``.

Its two DCP calls are ours to keep off the default group; the helpers around them are torch's. What those
put on which group is recorded here, and the README's table says it.
"""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner import GlooCoordinatedLoadPlanner, GlooCoordinatedPlanner
from tests.multiprocess.test_parity import bits
from tests.support.ranks import run_ranks


def make(seed):
    """Return a sharded model and its optimizer; all of their groups are of gloo, none is the default one."""
    group = dist.new_group(backend="gloo")
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3))
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that divides
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model, optimizer):
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model, optimizer):
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {}
    for part in get_state_dict(model, optimizer, options=flat):
        state |= {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in part.items()}
    return state


def save(rank, folder):
    model, optimizer = make(seed=0)
    train(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state},
        checkpoint_id=folder,
        planner=GlooCoordinatedPlanner(),
    )
    return bits(whole(model, optimizer))


def load(rank, folder):
    model, optimizer = make(seed=1)
    untrained = bits(whole(model, optimizer))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder, planner=GlooCoordinatedLoadPlanner())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return untrained, bits(whole(model, optimizer))


@pytest.mark.parametrize(("saving", "loading"), [(4, 4), (2, 4)])
def test_the_usual_chain_gives_every_value_back_on_a_default_group_that_refuses(saving, loading, tmp_path):
    trained = run_ranks(save, saving, str(tmp_path))[0].value

    for outcome in run_ranks(load, loading, str(tmp_path)):
        untrained, loaded = outcome.value
        assert loaded == trained
        assert untrained != trained


class Recorder(TorchDispatchMode):
    """Notes which collectives are made on the default group and on the mesh's."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in {"c10d", "_c10d_functional"}:
            for group in filter(None, map(as_group, [*args, *(kwargs or {}).values()])):
                on = "default" if group.group_name == _get_default_group().group_name else "mesh"
                self.seen.setdefault(on, set()).add(str(func).split(".")[1].strip("_"))
        return func(*args, **(kwargs or {}))


def as_group(value):
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except RuntimeError:
            return None  # a reduction, which is a script object too
    if isinstance(value, str) and value in dist.distributed_c10d._world.pg_names.values():
        return dist.distributed_c10d._resolve_process_group(value)
    return None


@contextmanager
def recorded(found, call):
    with Recorder() as recorder:
        yield
    found[call] = recorder.seen


FULL = StateDictOptions(full_state_dict=True)
FULL_OFFLOADED = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

STOCK = {"gather", "scatter", "broadcast", "allgather"}
EXPECTED = {  # kinds of collectives by group, as torch 2.13 makes them
    "get_state_dict before the first step": {},
    "get_state_dict": {},
    "get_state_dict, cpu_offload": {},
    "get_state_dict, full_state_dict": {"mesh": {"all_gather_into_tensor"}},
    "get_state_dict, full_state_dict, cpu_offload": {"mesh": {"all_gather_into_tensor"}},
    "full_tensor": {"mesh": {"all_gather_into_tensor"}},
    "save, ours": {},
    "save, stock": {"default": STOCK},
    "load, ours": {},
    "load, stock": {"default": STOCK},
    "set_state_dict": {},
    "set_state_dict, full_state_dict": {"mesh": {"scatter"}},
    "set_state_dict, broadcast_from_rank0": {"default": {"broadcast"}},
}


def record(rank, folder):
    found = {}
    model, optimizer = make(seed=0)
    with recorded(found, "get_state_dict before the first step"):
        get_state_dict(model, optimizer)
    train(model, optimizer)
    with recorded(found, "get_state_dict"):
        model_state, optimizer_state = get_state_dict(model, optimizer)
    with recorded(found, "get_state_dict, cpu_offload"):
        get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    with recorded(found, "get_state_dict, full_state_dict"):
        full_model, full_optimizer = get_state_dict(model, optimizer, options=FULL)
    with recorded(found, "get_state_dict, full_state_dict, cpu_offload"):
        get_state_dict(model, optimizer, options=FULL_OFFLOADED)
    with recorded(found, "full_tensor"):
        model[0].weight.full_tensor()
    state = {"model": model_state, "optimizer": optimizer_state}
    with recorded(found, "save, ours"):
        dcp.save(state, checkpoint_id=folder, planner=GlooCoordinatedPlanner())
    with recorded(found, "save, stock"):
        dcp.save(state, checkpoint_id=f"{folder}-stock")
    with recorded(found, "load, ours"):
        dcp.load(state, checkpoint_id=folder, planner=GlooCoordinatedLoadPlanner())
    with recorded(found, "load, stock"):
        dcp.load(state, checkpoint_id=folder)
    for call, options, model_part, optimizer_part in (
        ("set_state_dict", None, model_state, optimizer_state),
        ("set_state_dict, full_state_dict", FULL, full_model, full_optimizer),
        (
            "set_state_dict, broadcast_from_rank0",
            FROM_RANK_0,
            full_model if rank == 0 else {},
            full_optimizer if rank == 0 else {},
        ),
    ):
        with recorded(found, call):
            # Two calls: set_state_dict takes a rank without a model's part for one without a model.
            set_model_state_dict(model, dict(model_part), options=options)  # which shards it in place
            set_optimizer_state_dict(model, optimizer, optimizer_part, options=options)
    return found


def test_which_calls_of_the_chain_make_collectives_and_on_which_group(tmp_path):
    # A default group that can carry them, so that all can be seen.
    for outcome in run_ranks(record, 2, str(tmp_path / "x"), backend="gloo", timeout=120):
        assert outcome.value == EXPECTED
