"""A world in which one rank lacks the package, and the others have the switch on by their environment.

Processes of their own, with a default group that works, as torchrun would start them. The cheaper cases
are elsewhere: the switch off on some ranks in test_switch.py, another version there and in test_failures.py.
"""

import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

RANK = """
import sys
rank, port, kind, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if kind == "without":
    sys.modules["planner"] = None  # as where it is not installed
else:
    import planner  # and the environment
import json, time
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
dist.barrier()
start = time.monotonic()
try:
    dcp.save({"weight": torch.ones(3), f"own{rank}": rank}, checkpoint_id=folder)
    end = {"error": ""}
except BaseException as error:
    end = {"error": type(error).__name__, "text": str(error), "ranks": getattr(error, "ranks", ())}
print(json.dumps({"seconds": time.monotonic() - start, **end}), flush=True)
sys.stdin.read()  # until the test has heard from everybody
"""

PLAN_TIMEOUT_S = 6


def run_world(kinds, folder):
    """Return how the save ended on each rank that has coordination on, by rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    ends = {}
    try:
        for rank, kind in enumerate(kinds):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "GLOO_SOCKET_IFNAME": "lo",
                "DCP_COORDINATION": "gloo",
                "DCP_COORDINATION_PLAN_TIMEOUT_S": str(PLAN_TIMEOUT_S),
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", RANK, str(rank), str(store.port), kind, str(folder)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for rank, kind in enumerate(kinds):
            if kind == "on":
                ends[rank] = json.loads(processes[rank].stdout.readline())
    finally:
        for process in processes:  # stock DCP waits for ranks that never come
            process.kill()
            process.communicate()
    return ends


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_without_the_package_is_named_within_the_deadline(odd, tmp_path):
    ends = run_world(["without" if rank == odd else "on" for rank in range(3)], tmp_path / "x")
    for end in ends.values():
        assert end["error"] == "CoordinationTimeout", end
        assert end["ranks"] == [odd], end
        assert "coordination" in end["text"].split("what to do: ")[1]
        assert end["seconds"] < PLAN_TIMEOUT_S + 10
    assert not (tmp_path / "x" / ".metadata").exists()
