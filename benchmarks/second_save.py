"""The coordinator's CPU seconds from local plans to metadata, in a first and in an unchanged save.

One process plays the coordinator; what the ranks sent is there before the clock starts. Stock DCP's steps
of the write phase run beside it, each side in a forked child. Seconds of the writer's own finish, which makes
and pickles all objects of `.metadata`, are shown apart.

    python benchmarks/second_save.py [--ranks 512] [--entries 2812] [--short]
"""

import argparse
import gc
import json
import os
import pickle
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from wire import make_plan, make_results

from planner.column_plans import LocalPlans, PlanFrames, build_own_plan
from planner.dist_wrapper import _digest_of
from planner.save_columns import read_results
from planner.wire.gc_pause import paused_gc
from planner.wire.plans import encode_plan
from planner.wire.results import encode_results

FINISH = "writer's finish"


class Steps:
    def __init__(self):
        self.seconds = {}

    def run(self, name, step):
        start = time.process_time()
        result = step()
        self.seconds[name] = time.process_time() - start
        return result


def in_child(work):
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        gc.enable()
        os.write(write_end, json.dumps(work()).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.wait()
    if not text:
        sys.exit("a side of the benchmark failed, see above")
    return json.loads(text)


def written(folder):
    data = Path(folder, ".metadata").read_bytes()
    with paused_gc():
        start = time.process_time()
        pickle.loads(data)
        return {"nbytes": len(data), "load": time.process_time() - start}


def writer_in(folder):
    writer = FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    return writer


def stock_side(plans, pickled_results):
    steps = Steps()
    _, metadata = create_default_global_save_plan(plans)
    metadata.planner_data = plans[0].planner_data
    results = steps.run("read results", lambda: [pickle.loads(data) for data in pickled_results])
    with tempfile.TemporaryDirectory() as folder:
        steps.run(FINISH, lambda: writer_in(folder).finish(metadata, results))
        found = written(folder)
    found["received"] = len(steps.run("encode metadata", lambda: pickle.dumps(metadata)))
    return {"seconds": steps.seconds, **found}


def our_side(frames, own, result_frames):
    memory = {}
    return [save(frames, own, result_frames, memory) for _ in range(2)]


def save(frames, own, result_frames, memory):
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        writer = writer_in(folder)
        key = steps.run("digest", lambda: _digest_of(b"plans:", [part for pair in frames for part in pair]))
        columns = PlanFrames(frames)
        if key not in memory:
            steps.run("read plans", columns.read)
        local = LocalPlans(columns, 0, own, memory.get(key))
        plans, metadata = steps.run(
            "global plan", lambda: local.plan_globally(to_lowest_rank=False, merges_mappings=True)
        )
        plans = writer.prepare_global_plan(plans)
        finals = steps.run(
            "write final plans",
            lambda: [plan.items.encode(plan, path="plan", strict=True) for plan in plans],
        )
        steps.run("own final plan", lambda: build_own_plan(plans[0], finals[0], own))
        memory[key] = steps.run("note what to remember", lambda: local.to_remember(plans, finals))
        result_key = _digest_of(b"results:", [key, *result_frames])
        results = steps.run(
            "read results",
            lambda: read_results(local.planned, result_frames, result_key, memory.get(result_key)),
        )

        def finish():
            with paused_gc():
                writer.finish(metadata, results)

        steps.run(FINISH, finish)
        parts = steps.run("encode metadata", lambda: results.encode_metadata(metadata, strict=True))
        is_known = result_key in memory
        memory[result_key] = parts[1]
        received = len(parts[2]) + (0 if is_known else len(parts[0]) + len(parts[1]) + len(finals[1]))
        return {"seconds": steps.seconds, **written(folder), "received": received}


def results_of(frames, own):
    """Return what each rank's results are on the wire, ours and stock's."""
    local = LocalPlans(PlanFrames(frames), 0, own)
    local.plan_globally(to_lowest_rank=False, merges_mappings=True)
    encoded, pickled = [], []
    for rank in range(len(frames)):
        final = local.planned.outcome.build_plan(rank)
        results = make_results(final, rank)
        encoded.append(encode_results(results, final, strict=True))
        pickled.append(pickle.dumps(results))
    return encoded, pickled


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--entries", type=int, default=2812)
    parser.add_argument("--short", action="store_true", help="32 ranks")
    options = parser.parse_args()
    ranks, entries = 32 if options.short else options.ranks, options.entries
    gc.disable()
    plans = [make_plan(rank, ranks, entries) for rank in range(ranks)]
    frames = [encode_plan(plan, strict=True) for plan in plans]
    result_frames, pickled_results = results_of(frames, plans[0])
    stock = in_child(lambda: stock_side(plans, pickled_results))
    first, second = in_child(lambda: our_side(frames, plans[0], result_frames))
    print(f"{ranks} ranks x {entries} entries, torch {torch.__version__}, CPU seconds of the coordinator")
    print(f"{'':30}{'stock':>14}{'first':>12}{'unchanged':>12}")
    names = dict.fromkeys([*first["seconds"], *stock["seconds"]])
    for name in names:
        print(f"{name:30}", end="")
        for width, side in ((14, stock), (12, first), (12, second)):
            value = side["seconds"].get(name)
            print(f"{'' if value is None else f'{value:.3f}':>{width}}", end="")
        print()
    apart = [sum(side["seconds"].values()) - side["seconds"][FINISH] for side in (stock, first, second)]
    print(f"{'all but the finish':30}{'':>14}{apart[1]:>12.3f}{apart[2]:>12.3f}")
    for name, key in (("bytes of .metadata", "nbytes"), ("bytes a rank receives", "received")):
        print(f"{name:30}{stock[key]:>14,}{first[key]:>12,}{second[key]:>12,}")
    print(f"{'loading .metadata':30}{stock['load']:>14.3f}{first['load']:>12.3f}{second['load']:>12.3f}")


if __name__ == "__main__":
    main()
