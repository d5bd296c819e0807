"""One rank of a small job, in an interpreter of its own that ends as such jobs end.

python -m tests.npu.job RANK WORLD_SIZE FOLDER IMPORTS ENDING
"""

import importlib
import sys
from pathlib import Path

SAVED_AND_LOADED = "-- what follows is the end of the process"
# In this order, where TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from importing torch_npu itself.
IMPORTS = {
    "torch_npu first": ("torch", "torch_npu", "planner"),
    "planner first": ("planner", "torch_npu"),
    "transfer last": ("planner", "torch_npu.contrib.transfer_to_npu"),
}


def main(rank: int, world_size: int, folder: Path, imports: str, ending: str) -> None:
    for name in IMPORTS[imports]:
        importlib.import_module(name)
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from planner import GlooCoordinatedLoadPlanner, GlooCoordinatedPlanner

    dist.init_process_group("hccl", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.accelerator.set_device_index(rank)
    state = {"weight": torch.arange(8.0).npu(), f"own{rank}": torch.full((2,), float(rank)).npu()}
    dcp.save(state, checkpoint_id=folder / "checkpoint", planner=GlooCoordinatedPlanner())
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(loaded, checkpoint_id=folder / "checkpoint", planner=GlooCoordinatedLoadPlanner())
    same = all(torch.equal(loaded[name].cpu(), value.cpu()) for name, value in state.items())
    print("same" if same else "different", flush=True)
    print(SAVED_AND_LOADED, file=sys.stderr, flush=True)
    if ending == "destroyed":
        dist.destroy_process_group()
    elif ending == "raised":
        raise KeyError("the trainer's own error")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
