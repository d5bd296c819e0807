"""The model of the demo: a small mixture of experts under FSDP2 and expert parallelism, on gloo.

Every collective of the training runs on the groups made here, none on the default group: that one
stays free to be as unusable as the demo wants it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

DIM, HIDDEN, NUM_EXPERTS, TOP_K = 32, 64, 8, 2


@dataclass(frozen=True)
class Meshes:
    """The gloo groups of the training.

    Attributes:
        group: all ranks.
        dense: all ranks in one dimension; shards everything but the experts.
        experts: ``(fsdp, ep)``; each ``ep`` rank owns some experts, ``fsdp`` ranks share each of them.
    """

    group: dist.ProcessGroup
    dense: DeviceMesh
    experts: DeviceMesh


def make_meshes() -> Meshes:
    """Make the groups of the training: pairs of ranks share their experts, from four ranks on."""
    world_size = dist.get_world_size()
    ranks = torch.arange(world_size).view(2 if world_size % 4 == 0 else 1, -1)
    world, fsdp, ep = (
        dist.new_subgroups_by_enumeration(groups.tolist(), backend="gloo")[0]  # type: ignore[no-untyped-call]
        for groups in (ranks.view(1, -1), ranks.T, ranks)
    )
    return Meshes(
        group=world,
        dense=DeviceMesh.from_group(world, "cpu", mesh_dim_names=("fsdp",)),
        experts=DeviceMesh.from_group([fsdp, ep], "cpu", mesh=ranks, mesh_dim_names=("fsdp", "ep")),
    )


class Experts(nn.Module):
    """Experts stacked along dimension 0, which expert parallelism shards."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.w_out = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)

    def forward(self, tokens: Tensor, gates: Tensor) -> Tensor:
        """Return this rank's experts' share of the output, ``gates`` being their columns only."""
        w_in, w_out = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w_in, self.w_out))
        out = torch.relu(tokens @ w_in) @ w_out  # [expert, token, DIM]
        return (out * gates.T.unsqueeze(-1)).sum(dim=0)


class Block(nn.Module):
    """A dense layer, then experts that see the tokens of every rank of their ``ep`` group."""

    def __init__(self, ep_mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.dense = nn.Linear(DIM, DIM)
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.experts = Experts()
        self.ep_mesh = ep_mesh

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens after this block, in their order."""
        tokens = tokens + torch.tanh(self.dense(self.norm(tokens)))
        scores = self.router(tokens)
        kept = torch.zeros_like(scores).scatter(-1, scores.topk(TOP_K).indices, 1.0)
        gates = torch.softmax(scores, dim=-1) * kept
        mine = self.ep_mesh.get_local_rank()
        out = self.experts(self._gather(tokens), self._gather(gates).chunk(self.ep_mesh.size(), dim=-1)[mine])
        # Summed over the experts' owners; each rank keeps its own tokens.
        shared = DTensor.from_local(out, self.ep_mesh, [Partial()])
        return tokens + shared.redistribute(placements=[Shard(0)]).to_local()

    def _gather(self, rows: Tensor) -> Tensor:
        sharded = DTensor.from_local(rows, self.ep_mesh, [Shard(0)])
        return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def build(layers: int, meshes: Meshes, seed: int) -> tuple[nn.Module, torch.optim.Adam]:
    """Build the sharded model and its optimizer, the same on every rank for one ``seed``."""
    torch.manual_seed(seed)
    ep_mesh, fsdp_mesh = meshes.experts["ep"], meshes.experts["fsdp"]
    blocks = [Block(ep_mesh) for _ in range(layers)]
    model = nn.Sequential(*blocks, nn.Linear(DIM, DIM))
    for block in blocks:
        for name, weight in list(block.experts.named_parameters()):
            sharded = distribute_tensor(weight.detach(), ep_mesh, [Shard(0)], src_data_rank=None)
            setattr(block.experts, name, nn.Parameter(sharded))
        # Dimension 0 is the expert; FSDP takes the next one.
        fully_shard(block.experts, mesh=fsdp_mesh, shard_placement_fn=lambda _: Shard(1))
        fully_shard(block, mesh=meshes.dense)
    fully_shard(model, mesh=meshes.dense)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The experts' gradients already hold the tokens of their whole ep group.
            module.set_gradient_divide_factor(meshes.group.size())
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that divides
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, group: dist.ProcessGroup
) -> list[float]:
    """Train on tokens that differ from rank to rank and return the mean loss of each step."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    losses = []
    for _ in range(steps):
        tokens = torch.randn(16, DIM, generator=generator)
        loss = (model(tokens) - tokens.roll(1, dims=-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, group=group)
        losses.append(mean.item() / group.size())
    return losses


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a copy of every tensor and value of both, unsharded, under one flat name each.

    Called on all ranks.
    """
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state: dict[str, Any] = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    state |= {
        f"optimizer.{name}": value
        for name, value in get_optimizer_state_dict(model, optimizer, options=flat).items()
    }
    return {name: v.full_tensor() if isinstance(v, DTensor) else deepcopy(v) for name, v in state.items()}
