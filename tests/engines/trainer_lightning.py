"""Lightning Fabric with ``ModelParallelStrategy``: FSDP2 and tensor parallel, saved with DCP."""

from __future__ import annotations

import lightning
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from trainer import Trainer, main, make_batch, make_model

TENSOR_PARALLEL = 2


def parallelize(model, device_mesh):
    columns = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, device_mesh["tensor_parallel"], {"0": columns, "3": columns})
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=device_mesh["data_parallel"])
    return model


class LightningTrainer(Trainer):
    def __init__(self) -> None:
        strategy = ModelParallelStrategy(
            parallelize, data_parallel_size=2, tensor_parallel_size=TENSOR_PARALLEL
        )
        self.fabric = Fabric(accelerator="cpu", devices=2 * TENSOR_PARALLEL, strategy=strategy)
        self.fabric.launch()
        self.model = self.fabric.setup_module(make_model())
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        self.state = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self, step: int) -> None:
        self.optimizer.zero_grad()
        batch = make_batch(step, dist.get_rank() // TENSOR_PARALLEL)
        self.fabric.backward(self.model(batch).square().mean())
        self.optimizer.step()
        self.state["step"] = step

    def extra(self):
        return self.state["step"]

    def save(self, folder: str) -> None:
        self.fabric.save(folder, self.state)

    def load(self, folder: str) -> None:
        self.fabric.load(folder, self.state)


if __name__ == "__main__":
    main(LightningTrainer, lightning.__version__)
