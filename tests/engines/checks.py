"""What has to be true of every engine, as tests for a class of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest

HERE = Path(__file__).parent
DCP = "torch.distributed.checkpoint."


def run_trainer(tests, results, steps, *, through=()):
    """Run the trainer of ``tests`` with torchrun and return what each rank found."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *(f"--nproc-per-node={tests.world_size}", *through, str(HERE / tests.trainer), str(results), *steps),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DCP_")}
    environment.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    log = results.with_suffix(".log")
    with log.open("w") as output:
        torchrun = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            problem = torchrun.wait(timeout=250)
        except subprocess.TimeoutExpired as error:
            problem = error
            torchrun.terminate()  # it ends its ranks, whatever they wait for
            torchrun.wait()
    if problem:
        pytest.fail(f"{' '.join(command)}: {problem}\n{log.read_text()[-20000:]}")
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(tests.world_size)]


def read_checkpoint(folder):
    """Return every file's bytes, and in place of .metadata's what it says but for ids of the save."""
    files = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            name, data = str(path.relative_to(folder)), path.read_bytes()
            files[name] = without_ids(pickle.loads(data)) if path.name == ".metadata" else data
    return files


def without_ids(metadata):
    meta = metadata.storage_meta
    return dataclasses.replace(
        metadata, storage_meta=dataclasses.replace(meta, checkpoint_id=None, save_id=None)
    )


def of_dcp(call):
    return call["caller"].startswith(DCP)


def own_calls(step):
    """Return what the engine asks of torch.distributed itself, as (function, module): how often."""
    return Counter((call["function"], call["caller"]) for call in step["calls"] if not of_dcp(call))


@pytest.mark.timeout(600)  # the first test of a class starts both worlds
class EngineTests:
    """Two worlds of one engine, the fixtures: one switches in its script, the other is run unedited.

    ``calls`` says of each step how many collectives the ranks' coordination was in stock DCP, and how
    many the engine makes of its own, with us as without.
    """

    trainer: str
    world_size = 2
    saves = ("save",)
    calls: ClassVar[dict[str, tuple[int, int]]]

    def pairs(self, world, unedited):
        """Yield each step with coordination and the same rank's first of that kind without."""
        for one, other in zip(world, unedited, strict=True):
            stock = {}
            for step in one["steps"]:
                stock.setdefault(step["step"].split(":")[0], step)
            ours = [step for step in one["steps"] if step["step"].startswith("+")]
            for step in [*ours, *other["steps"]]:
                yield step, stock[step["step"].lstrip("+").split(":")[0]]

    def test_coordination_of_stock_dcp_is_seen_by_the_counters(self, world):
        for rank in world:
            for step in rank["steps"]:
                if not step["step"].startswith("+"):
                    found = sum(map(of_dcp, step["calls"])), sum(own_calls(step).values())
                    assert found == self.calls[step["step"].split(":")[0]], step["step"]
                    assert sum(step["grown"].values()) == len(step["calls"]), step["step"]

    def test_no_collective_of_coordination_is_left(self, world, unedited):
        for step, _ in self.pairs(world, unedited):
            assert [call for call in step["calls"] if of_dcp(call)] == [], step["step"]
            assert sum(step["grown"].values()) == len(step["calls"]), step["step"]
            if step["rank"] == 0:  # the coordinator
                assert "coordination over gloo took" in "".join(step["reports"]), step["step"]

    def test_what_the_engine_itself_does_is_the_same(self, world, unedited):
        for step, stock in self.pairs(world, unedited):
            assert own_calls(step) == own_calls(stock), step["step"]
            assert len(step["new_groups"]) == len(stock["new_groups"])

    def test_each_load_brings_back_every_bit(self, world, unedited):
        assert [rank["trained"] for rank in world] == [rank["trained"] for rank in unedited]
        for rank in [*world, *unedited]:
            for step in rank["steps"]:
                assert step["is_as_trained"], step["step"]

    def test_the_files_are_the_same(self, folder, world, unedited):
        for save in self.saves:
            stock = read_checkpoint(folder / f"{save}-stock")
            assert len([name for name in stock if name.endswith(".distcp")]) >= self.world_size
            for kind in ("ours", "run"):
                assert read_checkpoint(folder / f"{save}-{kind}") == stock, kind
