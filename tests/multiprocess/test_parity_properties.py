"""Parity with stock DCP on state dicts that hypothesis makes up."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from planner import CoordinationConfig, GlooCoordinatedPlanner
from tests.multiprocess.test_parity import bits, load_into, without_ids
from tests.support.ranks import run_ranks
from tests.support.states import mesh_of, sharded

WORLD = 4
STRICT = CoordinationConfig(strict=True)

names = st.text(max_size=6)
sizes = st.lists(st.integers(0, 5), max_size=3)
placements = st.sampled_from(["plain", "own", "replicated", "0", "1", "last"])
values = st.one_of(
    st.tuples(
        st.just("tensor"), sizes, placements, st.sampled_from(["float32", "int64", "bool", "bfloat16"])
    ),
    st.tuples(
        st.just("object"), st.one_of(st.none(), st.integers(), st.text(max_size=3), st.binary(max_size=3))
    ),
    st.tuples(st.just("ranks"), st.sets(st.integers(0, WORLD - 1))),
)
trees = st.recursive(
    values,
    lambda inner: st.one_of(
        st.tuples(st.just("dict"), st.dictionaries(names, inner, max_size=4)),
        st.tuples(st.just("list"), st.lists(inner, max_size=3)),
    ),
    max_leaves=12,
)
worlds = st.dictionaries(names, trees, max_size=6)


def make(spec, rank, mesh):
    kind, *rest = spec
    if kind == "dict":
        return {name: make(inner, rank, mesh) for name, inner in rest[0].items()}
    if kind == "list":
        return [make(inner, rank, mesh) for inner in rest[0]]
    if kind == "object":
        return rest[0]
    if kind == "ranks":
        return {"here": torch.full((2,), float(rank))} if rank in rest[0] else {}
    size, placement, dtype = rest
    full = torch.arange(torch.Size(size).numel()).reshape(size).to(getattr(torch, dtype))
    if placement == "own":
        return {f"of {rank}": full}
    if placement == "plain" or not size:
        return full
    dim = {"0": 0, "1": min(1, len(size) - 1), "last": len(size) - 1}.get(placement)
    return sharded(full, mesh, [Replicate() if dim is None else Shard(dim)])


def load(state_dict, folder, group):
    """Return what stock DCP loads, or how it fails: some of these it saves but cannot load."""
    try:
        return bits(load_into(state_dict, folder, group))
    except dcp.api.CheckpointException as error:
        return {at: type(cause) for at, (cause, _) in error.failures.items()}


def save_both(rank, folder, specs):
    group = dist.new_group(backend="gloo")
    mesh = mesh_of((WORLD,))
    for number, spec in enumerate(specs):
        state_dict = {name: make(inner, rank, mesh) for name, inner in spec.items()}
        saved = {}
        errors = {}
        for kind, options in (
            ("ours", {"planner": GlooCoordinatedPlanner(config=STRICT)}),
            ("stock", {"process_group": group}),
        ):
            try:
                saved[kind] = dcp.save(state_dict, checkpoint_id=f"{folder}/{number}/{kind}", **options)
            except dcp.api.CheckpointException as error:
                errors[kind] = {at: (type(cause), str(cause)) for at, (cause, _) in error.failures.items()}
        assert errors.get("ours") == errors.get("stock"), spec
        if saved:
            assert without_ids(saved["ours"]) == without_ids(saved["stock"]), spec
            assert list(saved["ours"].storage_data) == list(saved["stock"].storage_data), spec
            ours, stock = (load(state_dict, f"{folder}/{number}/{kind}", group) for kind in ("ours", "stock"))
            assert ours == stock, spec


@settings(
    max_examples=4,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # shrinking would start hundreds of worlds; the state dict is in the error
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(worlds, min_size=8, max_size=8))
def test_whatever_the_state_dict_holds_the_checkpoint_is_that_of_stock_dcp(specs):
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(save_both, WORLD, str(Path(folder)), specs, timeout=150)
