"""Saves with random faults on random ranks, and the invariants after each: ``make chaos``.

A run is a row of worlds of 4 to 8 real ranks; in each world every round draws a fault from the table of
tests/multiprocess/test_faults.py and test_failures.py by a seed that all ranks share. After every round:
all ranks that were meant to end have ended, in time; nobody reports success unless the checkpoint is
complete and loads; a failed save has left no ``.metadata``; and the next save succeeds on all ranks.

    python -m tests.chaos --rounds 200 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from planner import CoordinationConfig, GlooCoordinatedLoadPlanner, GlooCoordinatedPlanner
from tests.multiprocess.test_failures import DAMAGES, damage
from tests.multiprocess.test_faults import COORDINATORS, NOT_COORDINATORS, PHASES, Armed
from tests.support.faults import HOOKS, KINDS, make_storage_and_planner
from tests.support.ranks import run_ranks

TIMEOUT = timedelta(seconds=3)
CONFIG = CoordinationConfig(plan_timeout=TIMEOUT)
AT_MOST = timedelta(seconds=60)
BOUND_S = 2 * TIMEOUT.total_seconds() + 12.0
ROUNDS_A_WORLD = 10

STRIKING = {"slow", "killed", "frozen", "damage"}
FAULTS = ("none", "raise", "raise", "slow", "absent", "late", "other", "damage", "frozen", "killed")


def state_of(rank, number):
    return {"weight": torch.full((8,), float(number)), f"own{rank}": torch.full((2,), float(rank + number))}


def save(rank, number, folder):
    planner_ = GlooCoordinatedPlanner(config=CONFIG)
    return dcp.save(state_of(rank, number), checkpoint_id=folder, planner=planner_)


def barrier(name, world):
    """Wait for all ranks, by the store that the test owns."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(name, 1) == world:
        store.set(f"all {name}", "1")
    store.wait([f"all {name}"], AT_MOST)


def draw(generator, world, *, is_last):
    fault = generator.choice(FAULTS)
    if fault == "killed" and not is_last:  # that ends the world
        fault = "raise"
    struck = generator.randrange(world)
    phases = [phase for phase in PHASES if phase not in (NOT_COORDINATORS if struck == 0 else COORDINATORS)]
    hooks = [hook for hook, (is_coordinators, _) in HOOKS.items() if struck == 0 or not is_coordinators]
    return {
        "fault": fault,
        "struck": struck,
        "phase": generator.choice(phases),
        "hook": generator.choice(hooks),
        "kind": generator.choice(list(KINDS)),
        "damage": generator.choice(list(DAMAGES)),
        "point": generator.choice(["parts", "verdict" if struck == 0 else "envelope"]),
    }


def suffer(rank, world, number, folder, drawn):
    """Save once under the drawn fault; return how it ended on this rank."""
    fault, is_struck = drawn["fault"], rank == drawn["struck"]
    where = f"{folder}/{number}"
    writer, inner = dcp.FileSystemWriter(where, sync_files=False), dcp.DefaultSavePlanner()
    if fault == "raise":
        writer, inner = make_storage_and_planner(
            where, drawn["hook"], [drawn["struck"]], KINDS[drawn["kind"]]
        )
    if fault == "other" and is_struck:
        writer = dcp.FileSystemWriter(f"{where}-other", sync_files=False)
    # What is remembered does not travel, and cannot be struck on its way.
    config = CONFIG if fault not in STRIKING else dataclasses.replace(CONFIG, remembered_nbytes=0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if is_struck and fault in {"slow", "killed", "frozen"}:
            writer, inner = Armed(drawn["phase"], fault).make(where, monkeypatch)
        if is_struck and fault == "damage":
            damage(monkeypatch, drawn["point"], DAMAGES[drawn["damage"]])
        if is_struck and fault == "absent":
            return "absent", 0.0
        if is_struck and fault == "late":
            dist.distributed_c10d._get_default_store().wait([f"all gave up {number}"], AT_MOST)
        start = time.monotonic()
        try:
            dcp.save(
                state_of(rank, number),
                storage_writer=writer,
                planner=GlooCoordinatedPlanner(inner, config=config),
            )
        except CheckpointException as error:
            return f"{type(error).__name__}: {error}"[:300], time.monotonic() - start
        return "saved", time.monotonic() - start


def play(rank, seed, rounds, folder):
    """Play one world; return each round's fault, its end here, and its seconds here."""
    world = dist.get_world_size()
    generator = random.Random(seed)
    save(rank, 0, f"{folder}/first")
    story = []
    for number in range(1, rounds + 1):
        drawn = draw(generator, world, is_last=number == rounds)
        end, seconds = suffer(rank, world, number, folder, drawn)
        story.append((drawn, end, seconds))
        assert seconds < BOUND_S, (drawn, end, seconds)
        if drawn["fault"] == "killed":
            return story
        if drawn["fault"] == "late" and rank != drawn["struck"]:
            barrier(f"gave up {number}", world - 1)
        store = dist.distributed_c10d._get_default_store()
        frozen_key = f"frozen{drawn['struck']}"
        if drawn["fault"] == "frozen" and rank != drawn["struck"] and store.check([frozen_key]):
            barrier(f"ended {number}", world - 1)
            os.kill(int(store.get(frozen_key)), signal.SIGCONT)
        barrier(f"round {number}", world)
        is_complete = Path(folder, str(number), ".metadata").exists()
        assert is_complete or end != "saved", (drawn, end)
        if drawn["fault"] in {"none", "slow"}:
            assert end == "saved", (drawn, end)
        if is_complete:
            target = {"weight": torch.zeros(8), f"own{rank}": torch.zeros(2)}
            load_planner = GlooCoordinatedLoadPlanner(config=CONFIG)
            dcp.load(target, checkpoint_id=f"{folder}/{number}", planner=load_planner)
            assert torch.equal(target["weight"], state_of(rank, number)["weight"]), drawn
        save_until_in_step(rank, number, folder, drawn)
    return story


def save_until_in_step(rank, number, folder, drawn):
    """Save; the first save after one that a rank was not in at all may be refused, the second may not."""
    for attempt in range(3):
        try:
            save(rank, number, f"{folder}/after-{number}-{attempt}")
        except CheckpointException:
            assert attempt < 2, drawn
            assert drawn["fault"] in {"absent", "late", "other", "frozen", "damage"}, drawn
            end = "refused"
        else:
            end = "saved"
        store = dist.distributed_c10d._get_default_store()
        key = f"after {number} {attempt} {end}"
        store.add(key, 1)
        barrier(f"after {number} {attempt}", dist.get_world_size())
        if end == "saved":
            assert store.add(key, 0) == dist.get_world_size(), drawn  # all or nobody
            return


def run(rounds, seed):
    """Play worlds until there were ``rounds`` rounds; return the count of faults and the slowest end."""
    generator = random.Random(seed)
    faults = collections.Counter()
    slowest = 0.0
    played = 0
    while played < rounds:
        world, world_seed = generator.randint(4, 8), generator.randrange(2**32)
        num_rounds = min(ROUNDS_A_WORLD, rounds - played)
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run_ranks(
                play, world, world_seed, num_rounds, folder, may_fail=True, timeout=60 + num_rounds * 40
            )
        stories = [outcome.value for outcome in outcomes if outcome.value is not None]
        texts = [outcome.error_text for outcome in outcomes if outcome.error is not None]
        if texts:
            raise AssertionError(
                f"seed {seed}, world of {world}, world seed {world_seed}:\n" + "\n".join(texts)
            )
        drawn = [entry[0] for entry in stories[0]]
        is_killed = drawn[-1]["fault"] == "killed"
        died = [rank for rank, outcome in enumerate(outcomes) if outcome.died]
        assert died == ([drawn[-1]["struck"]] if is_killed else []), (seed, world_seed, died)
        faults.update(entry["fault"] for entry in drawn)
        slowest = max(slowest, *(seconds for story in stories for _, _, seconds in story))
        played += num_rounds
        print(f"{played:4} rounds, world of {world}, slowest end so far {slowest:.1f} s", flush=True)
    return faults, slowest


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}: replay with --seed {options.seed} --rounds {options.rounds}", flush=True)
    faults, slowest = run(options.rounds, options.seed)
    print(f"{options.rounds} rounds, {dict(faults)}, slowest end {slowest:.1f} s of {BOUND_S:.0f} s allowed")
    return 0


if __name__ == "__main__":
    from tests.chaos import main as importable_main  # the ranks import this module by its name

    sys.exit(importable_main())
