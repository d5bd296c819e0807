"""``make demo NPU=1``: the field report's failure with torch_npu itself, and the same save with ours."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from planner import GlooCoordinatedPlanner
from tests.npu import fake
from tests.support.ranks import run_ranks

NUM_RANKS = 4
NUM_TENSORS = 100
STOCK, OURS = "stock dcp.save", "planner=GlooCoordinatedPlanner()"
ENVIRONMENT = {
    "ACL_STREAM_TIMEOUT": "2000",  # ms; the report's was 340000
    "FAKE_HCCL": "hang",
    "FAKE_NPU_DEVICES": str(NUM_RANKS),
    "HCCL_EXEC_TIMEOUT": "30",
}
DEVICE_WORK = {
    "collectives": "collectives on HCCL",
    "communicators": "HCCL communicators made",
    "allocations": "device allocations",
    "copies_to_host": "copies to the host",
}


def save(rank: int, folder: str, how: dict) -> dict[str, str]:
    """Save as an engine does, with weights on the NPU; return a column of the table."""
    torch.accelerator.set_device_index(rank)
    state = {f"rank{rank}.layer{number}": torch.full((4,), 1.0).npu() for number in range(NUM_TENSORS)}
    before = fake.read_counters()
    error = ""
    try:
        dcp.save(state, checkpoint_id=folder, **how)
    except RuntimeError as raised:
        error = str(raised)
    after = fake.read_counters()
    code = error.partition("error code is ")[2][:6]
    return {
        "outcome": f"error {code}" if error else "saved",
        **{title: str(after[name] - before[name]) for name, title in DEVICE_WORK.items()},
        "error": error,
    }


def main() -> int:
    """Run both and return 0 only if stock DCP failed as reported and ours saved."""
    columns = {}
    with tempfile.TemporaryDirectory(prefix="planner-demo-npu-") as folder:
        environment = {**ENVIRONMENT, "FAKE_HCCL_DIR": folder}
        for title, how in ((STOCK, {}), (OURS, {"planner": GlooCoordinatedPlanner()})):
            target = Path(folder, title)
            outcomes = run_ranks(save, NUM_RANKS, str(target), how, backend="hccl", env=environment)
            columns[title] = outcomes[0].value
            columns[title]["files written"] = str(sum(path.is_file() for path in target.glob("*")))
    error = columns[STOCK].pop("error")
    columns[OURS].pop("error")
    print(f"torch {torch.__version__} and torch_npu on a stand-in for CANN, {NUM_RANKS} ranks, weights on")
    print("the NPU, default group hccl, whose collectives never end, device timeout 2 s. Rank 0:\n")
    print(f"{'':26}{STOCK:>18}{OURS:>36}")
    for name, value in columns[STOCK].items():
        print(f"{name:26}{value:>18}{columns[OURS][name]:>36}")
    print("\nThe copies to the host are the weights. Stock DCP's error:\n")
    print(error.strip())
    return 0 if "507046" in error and columns[OURS]["outcome"] == "saved" else 1


if __name__ == "__main__":
    sys.exit(main())
