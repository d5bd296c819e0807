"""torchtitan's ``CheckpointManager``, with ``async_mode`` off or not, beside its optimizer and scheduler."""

from __future__ import annotations

from importlib.metadata import version

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from trainer import Trainer, main, make_batch, make_model

STEP = 2


class TrainState:
    """What else torchtitan's trainer saves: a Stateful of counts."""

    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict):
        self.step = int(state_dict["step"])


class TitanTrainer(Trainer):
    def __init__(self) -> None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = make_model()
        for layer in (self.model[0], self.model[3], self.model):
            fully_shard(layer, mesh=mesh)
        optimizer = default_adamw(lr=0.1)
        optimizer.implementation = "for-loop"
        self.optimizers = optimizer.build(model_parts=[self.model])
        (self.optimizer,) = self.optimizers
        schedule = LRSchedulersContainer.Config(warmup_steps=1, total_steps=10)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=10)
        self.train_state = TrainState()

    def manager(self, folder: str, async_mode: str) -> CheckpointManager:
        config = CheckpointManager.Config(
            enable=True, folder=folder, interval=1, async_mode=async_mode, keep_latest_k=0
        )
        return config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.train_state},
            sd_adapter=None,
        )

    def train(self, step: int) -> None:
        self.optimizers.zero_grad()
        self.model(make_batch(step, dist.get_rank())).square().mean().backward()
        self.optimizers.step()
        self.schedulers.step()
        self.train_state.step = step

    def extra(self):
        return self.train_state.step, self.schedulers.state_dict()

    def save(self, folder: str) -> None:
        assert self.manager(folder, "disabled").save(STEP)

    def save_async(self, folder: str) -> None:
        manager = self.manager(folder, "async")
        assert manager.save(STEP)
        manager.maybe_wait_for_saving()

    def load(self, folder: str) -> None:
        assert self.manager(folder, "disabled").load(STEP)


if __name__ == "__main__":
    main(TitanTrainer, version("torchtitan"))
