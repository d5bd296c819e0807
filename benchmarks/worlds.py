"""State dicts of large models as their ranks have them, and the plans that torch's planner makes of them.

One process is any rank of any world here: torch's fake process group has as many ranks as one likes and moves
nothing. A plan depends on where a rank is in the meshes of its tensors, not on what is in them, so the
tensors are made once, one element each, and the meshes are told to be those of another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner import GlooCoordinatedPlanner

_NUM_MOE_PARAMETERS = 937
_HIDDEN, _EXPERTS, _EXPERT_WIDTH = 7168, 512, 4096
_MAX_EXPERT_PARALLEL = 64
_TENSOR_PARALLEL = 8


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be ``rank`` of a process group of ``world_size`` ranks that moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class World:
    """What every rank of a world saves.

    Attributes:
        state_dict: this rank's, with DTensors.
        meshes: those of its tensors.
        turns: whether each rank has its entries in another order.
    """

    state_dict: dict[str, Any]
    meshes: list[DeviceMesh]
    turns: bool = False

    def become(self, rank: int) -> dict[str, Any]:
        """Make the meshes those of ``rank``; return its state dict."""
        for mesh in self.meshes:
            mesh._rank = rank
            mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
        if not self.turns:
            return self.state_dict
        entries = list(self.state_dict.items())
        turn = rank * 7 % len(entries)
        return dict(entries[turn:] + entries[:turn])


def local_plan_of(state_dict: dict[str, Any]) -> SavePlan:
    """Return the local plan of DCP's own planner; ``tests/unit/test_local_plan.py`` holds that it is."""
    planner = GlooCoordinatedPlanner()
    planner.set_up_planner(state_dict, None, is_coordinator=False)
    return planner.create_local_plan()


def _mesh(*shape: int) -> DeviceMesh:
    ranks = torch.arange(dist.get_world_size()).reshape(shape)
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=dist.get_rank())


def _dtensor(mesh: DeviceMesh, placements: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype):
    stride = torch.empty(shape, device="meta").stride()
    local = torch.empty(1, dtype=dtype)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


# -- models ----------------------------------------------------------------------------------------------


def _moe_parameters() -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield name, shape, and whether it is stacked over experts; latent attention, 2.8T in all."""
    hidden, width = _HIDDEN, _EXPERT_WIDTH
    yield "model.embed_tokens.weight", (163840, hidden), False
    yield "model.norm.weight", (hidden,), False
    yield "lm_head.weight", (163840, hidden), False
    layer = 0
    while True:
        for name, shape in (
            ("self_attn.q_a_proj.weight", (1536, hidden)),
            ("self_attn.q_a_layernorm.weight", (1536,)),
            ("self_attn.q_b_proj.weight", (24576, 1536)),
            ("self_attn.kv_a_proj_with_mqa.weight", (576, hidden)),
            ("self_attn.kv_a_layernorm.weight", (512,)),
            ("self_attn.kv_b_proj.weight", (32768, 512)),
            ("self_attn.o_proj.weight", (hidden, 16384)),
            ("input_layernorm.weight", (hidden,)),
            ("post_attention_layernorm.weight", (hidden,)),
            ("mlp.gate.weight", (_EXPERTS, hidden)),
            ("mlp.shared_experts.gate_proj.weight", (width, hidden)),
            ("mlp.shared_experts.up_proj.weight", (width, hidden)),
            ("mlp.shared_experts.down_proj.weight", (hidden, width)),
        ):
            yield f"model.layers.{layer}.{name}", shape, False
        for name, shape in (
            ("gate_proj", (_EXPERTS, width, hidden)),
            ("up_proj", (_EXPERTS, width, hidden)),
            ("down_proj", (_EXPERTS, hidden, width)),
        ):
            yield f"model.layers.{layer}.mlp.experts.{name}.weight", shape, True
        layer += 1


def _moe(make_entry: Callable[..., dict[str, Any]]) -> tuple[dict[str, Any], list[DeviceMesh]]:
    world_size = dist.get_world_size()
    parallel = min(world_size, _MAX_EXPERT_PARALLEL)
    dense, experts = _mesh(world_size), _mesh(world_size // parallel, parallel)
    state: dict[str, Any] = {}
    for name, shape, is_stacked in islice(_moe_parameters(), _NUM_MOE_PARAMETERS):
        # FSDP2 over all ranks; experts over the ranks of expert parallelism, and cut in rows over the others.
        mesh, cut = (experts, (Shard(1), Shard(0))) if is_stacked else (dense, (Shard(0),))
        state[name] = make_entry(mesh, cut, shape)
    return state, [dense, experts]


def _adam(mesh: DeviceMesh, cut: tuple[Any, ...], shape: tuple[int, ...]) -> dict[str, Any]:
    return {
        "exp_avg": _dtensor(mesh, cut, shape, torch.float32),
        "exp_avg_sq": _dtensor(mesh, cut, shape, torch.float32),
        "step": torch.tensor(1.0),
    }


def moe_optimizer() -> World:
    """937 parameters x (exp_avg, exp_avg_sq and a step that every rank has), and 1 object: 2,812."""
    state, meshes = _moe(_adam)
    return World({"optimizer": {"state": state, "num_steps": 1}}, meshes)


def moe_model() -> World:
    """937 parameters."""
    state, meshes = _moe(lambda mesh, cut, shape: _dtensor(mesh, cut, shape, torch.bfloat16))
    return World({"model": state}, meshes)


def dense() -> World:
    """80 layers, FSDP2 with tensor parallelism of 8; parameters and their optimizer, 2,892 entries."""
    world_size = dist.get_world_size()
    mesh = _mesh(world_size // _TENSOR_PARALLEL, _TENSOR_PARALLEL)
    columns = (_StridedShard(0, split_factor=_TENSOR_PARALLEL), Shard(0))
    rows, whole = (Shard(0), Shard(1)), (Shard(0), Replicate())
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "embed_tokens.weight": (columns, (128256, 8192)),
        "norm.weight": (whole, (8192,)),
        "lm_head.weight": (columns, (128256, 8192)),
    }
    for layer in range(80):
        for name, cut, shape in (
            ("self_attn.q_proj.weight", columns, (8192, 8192)),
            ("self_attn.k_proj.weight", columns, (1024, 8192)),
            ("self_attn.v_proj.weight", columns, (1024, 8192)),
            ("self_attn.o_proj.weight", rows, (8192, 8192)),
            ("mlp.gate_proj.weight", columns, (28672, 8192)),
            ("mlp.up_proj.weight", columns, (28672, 8192)),
            ("mlp.down_proj.weight", rows, (8192, 28672)),
            ("input_layernorm.weight", whole, (8192,)),
            ("post_attention_layernorm.weight", whole, (8192,)),
        ):
            shapes[f"layers.{layer}.{name}"] = cut, shape
    model = {name: _dtensor(mesh, cut, shape, torch.bfloat16) for name, (cut, shape) in shapes.items()}
    optimizer = {name: _adam(mesh, cut, shape) for name, (cut, shape) in shapes.items()}
    return World({"model": model, "optimizer": {"state": optimizer}}, [mesh])


def unalike() -> World:
    """As the optimizer of the MoE, with another order of entries on each rank: no two schemas are alike."""
    world = moe_optimizer()
    entries = world.state_dict["optimizer"]["state"]
    flat = {f"{name}.{key}": value for name, values in entries.items() for key, value in values.items()}
    return World(flat, world.meshes, turns=True)


WORLDS: dict[str, Callable[[], World]] = {
    "moe-optimizer": moe_optimizer,
    "moe-model": moe_model,
    "dense-70b": dense,
    "unalike": unalike,
}
