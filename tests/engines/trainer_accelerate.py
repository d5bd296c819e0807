"""Accelerate with FSDP2: ``Accelerator.save_state`` and ``load_state``, which save with DCP."""

from __future__ import annotations

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from trainer import Trainer, main, make_batch, make_model


class AccelerateTrainer(Trainer):
    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True)
        # Accelerate turns FSDP on for accelerators only; these are the settings that it then makes.
        PartialState().distributed_type = DistributedType.FSDP
        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=50
        )
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def train(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.accelerator.backward(self.model(make_batch(step, dist.get_rank())).square().mean())
        self.optimizer.step()
        self.scheduler.step()

    def extra(self):
        return self.scheduler.state_dict()

    def save(self, folder: str) -> None:
        self.accelerator.save_state(folder)

    def load(self, folder: str) -> None:
        self.accelerator.load_state(folder)


if __name__ == "__main__":
    main(AccelerateTrainer, accelerate.__version__)
