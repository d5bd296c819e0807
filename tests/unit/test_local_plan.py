"""Setting up DCP's own planner and making its local plan in our way gives exactly what torch's way gives."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import event, given
from hypothesis import strategies as st
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardedProperties
from torch.distributed.checkpoint import default_planner, planner_helpers
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner import GlooCoordinatedPlanner, local_plan
from planner.pending import is_pending

WORLD_SIZE = 24


@pytest.fixture(autouse=True, scope="module")
def fake_world():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


def mesh_of(shape, rank=3, first=0):
    ranks = first + torch.arange(torch.Size(shape).numel()).reshape(shape)
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)


def dtensor(mesh, placements, shape, *, dtype=torch.float32, local=None):
    stride = torch.empty(shape, device="meta").stride()
    local = torch.empty(1, dtype=dtype) if local is None else local  # plans do not look at its shape
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


# -- comparing ---------------------------------------------------------------------------------------------


def details(value):
    """Everything an object of DCP consists of, also what ``==`` leaves out."""
    if dataclasses.is_dataclass(value):
        return type(value), {name: details(part) for name, part in vars(value).items()}
    if type(value) is list:
        return [details(part) for part in value]
    return type(value), value


def outcome_of(planner, state_dict, *, is_coordinator=False):
    try:
        planner.set_up_planner(state_dict, None, is_coordinator)
        plan = planner.create_local_plan()
    except Exception as error:  # noqa: BLE001 - what torch raises, ours must
        return type(error), str(error)
    inner = getattr(planner, "inner", planner)
    assert inner.plan is plan
    kept = {
        name: value for name, value in vars(inner).items() if name not in {"plan", "state_dict", "mappings"}
    }
    return (
        details(plan),
        list(inner.mappings.items()),
        [(name, id(value)) for name, value in inner.state_dict.items()],
        type(inner.state_dict),
        kept,
    )


def assert_same(state_dict, *, is_coordinator=False, **options):
    stock = outcome_of(DefaultSavePlanner(**options), state_dict, is_coordinator=is_coordinator)
    ours = outcome_of(GlooCoordinatedPlanner(**options), state_dict, is_coordinator=is_coordinator)
    assert ours == stock
    return ours


# -- state dicts -------------------------------------------------------------------------------------------


class Custom:
    """An object that makes its own write items, one of them under another name."""

    def __create_write_items__(self, fqn, obj):
        return [WriteItem(MetadataIndex(fqn + suffix), WriteItemType.BYTE_IO) for suffix in ("", ".more")]


PLAIN = [1, 2.5, "text", b"bytes", None, True, (1, torch.ones(2)), (), [1, 2], [], [[]], Custom, Custom()]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


@st.composite
def placements(draw, num_dims, num_mesh_dims):
    kinds = st.sampled_from(
        ["shard", "replicate", "strided", "shard", "partial" if draw(st.booleans()) else "shard"]
    )
    found = []
    for _ in range(num_mesh_dims):
        kind = draw(kinds)
        if kind == "partial":
            found.append(Partial())
        elif kind == "replicate" or not num_dims:
            found.append(Replicate())
        elif kind == "strided":
            found.append(
                _StridedShard(draw(st.integers(0, num_dims - 1)), split_factor=draw(st.integers(1, 4)))
            )
        else:
            found.append(Shard(draw(st.integers(0, num_dims - 1))))
    return found


@st.composite
def tensors(draw, rank):
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    if draw(st.integers(0, 3)) == 0:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        mesh_shape = draw(st.sampled_from([(1,), (2,), (5,), (8,), (2, 2), (4, 3), (2, 2, 2), (1, 4, 2)]))
        mesh = mesh_of(mesh_shape, rank, first=draw(st.sampled_from([0, 0, 0, 4])))
        tensor = dtensor(mesh, draw(placements(len(shape), len(mesh_shape))), shape, dtype=dtype)
    if dtype.is_floating_point and draw(st.integers(0, 3)) == 0:
        tensor = torch.nn.Parameter(tensor) if draw(st.booleans()) else tensor.requires_grad_()
    return tensor


@st.composite
def state_dicts(draw):
    rank = draw(st.integers(0, 9))
    pool = [
        *draw(st.lists(tensors(rank), min_size=1, max_size=4)),
        *draw(st.lists(st.sampled_from(PLAIN), max_size=3)),
    ]
    # Several entries of one layout: the same tensor, or another one like it.
    values = st.sampled_from(pool).map(
        lambda value: (
            torch.empty_like(value) if isinstance(value, torch.Tensor) and not value.is_leaf else value
        )
    )
    keys = st.one_of(st.sampled_from(["a", "b", "weight", "a.b", "", "0"]), st.integers(0, 2))
    nested = st.recursive(
        values,
        lambda children: st.one_of(
            st.dictionaries(keys, children, max_size=4),
            st.dictionaries(keys, children, max_size=4).map(OrderedDict),
            st.lists(children, max_size=3),
        ),
        max_leaves=12,
    )
    return draw(st.dictionaries(keys, nested, max_size=6))


@given(state_dicts(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_any_state_dict_gives_the_plan_and_the_errors_that_torch_gives(
    state_dict, is_coordinator, flatten_state_dict, flatten_sharded_tensors, no_grad
):
    with torch.set_grad_enabled(not no_grad):
        outcome = assert_same(
            state_dict,
            is_coordinator=is_coordinator,
            flatten_state_dict=flatten_state_dict or flatten_sharded_tensors,
            flatten_sharded_tensors=flatten_sharded_tensors,
        )
    event("raises" if len(outcome) == 2 else "plans")


@given(st.data(), st.integers(0, 7), st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2)]))
def test_every_rank_of_a_mesh_gets_its_own_shard_of_uneven_tensors(data, rank, mesh_shape):
    mesh = mesh_of(mesh_shape, rank)
    shape = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=3))
    cut = [p for p in data.draw(placements(len(shape), len(mesh_shape))) if not isinstance(p, Partial)]
    cut += [Replicate()] * (len(mesh_shape) - len(cut))
    assert_same({f"layers.{layer}": dtensor(mesh, cut, shape) for layer in range(3)})


def test_fsdp_with_tensor_parallelism_has_its_strided_shards_where_torch_has_them():
    for rank in range(8):
        # As FSDP2 does it: each parameter has a mesh object of its own.
        state_dict = {
            f"{name}.{layer}": dtensor(mesh_of((4, 2), rank), [how, Shard(0)], (24, 6))
            for layer in range(4)
            for name, how in (("strided", _StridedShard(0, split_factor=2)), ("plain", Shard(0)))
        }
        plan, *_ = assert_same(state_dict)
        if rank == 1:  # the two are cut differently
            offsets = {str(item[1]["index"]) for item in plan[1]["items"]}
            assert len(offsets) == len(state_dict)


def test_meshes_of_one_shape_in_which_a_rank_has_different_places_are_told_apart():
    state_dict = {
        f"{first}.{n}": dtensor(mesh_of((8,), rank=6, first=first), [Shard(0)], (16, 4))
        for first in (0, 4, 8)
        for n in range(2)
    }
    plan, *_ = assert_same(state_dict)
    offsets = [item[1]["index"][1]["offset"][1] for item in plan[1]["items"]]
    assert offsets == [(12, 0), (12, 0), (4, 0), (4, 0)]


# -- what it costs -----------------------------------------------------------------------------------------


def test_torch_is_asked_once_for_each_layout(monkeypatch):
    asked = []
    original = default_planner.create_default_local_save_plan

    def spy(state_dict, is_coordinator):
        asked.extend(state_dict)
        return original(state_dict, is_coordinator)

    monkeypatch.setattr(local_plan, "default_planner", SimpleNamespace(create_default_local_save_plan=spy))
    monkeypatch.setattr(local_plan, "_is_code_known", lambda: True)
    mesh = mesh_of((8,))
    state_dict = {}
    for layer in range(5):
        state_dict |= {
            f"{layer}.weight": dtensor(mesh, [Shard(0)], (16, 4)),
            f"{layer}.bias": dtensor(mesh, [Shard(0)], (16,)),
            f"{layer}.step": torch.tensor(1.0),
        }
    assert_same(state_dict)
    assert asked == ["0.weight", "0.bias", "0.step"]


def test_no_item_is_made_before_somebody_looks_whatever_is_in_the_state_dict():
    mesh = mesh_of((8,))
    state_dict = {
        "weight": dtensor(mesh, [Shard(0)], (16, 4)),
        "elsewhere": dtensor(mesh_of((4,), rank=3, first=8), [Shard(0)], (8,)),
        "step": torch.tensor(1.0),
        "options": {"lr": 0.1, "betas": (0.9, 0.999), "groups": [1, {"a": None}]},
        "objects": [object(), Custom],
    }
    assert_same(state_dict)
    planner = GlooCoordinatedPlanner()
    planner.set_up_planner(state_dict)
    assert type(planner.create_local_plan()) is SavePlan  # in no save, so whoever asks may look at its type
    planner.storage_in_use = dcp.FileSystemWriter("/nowhere")
    assert is_pending(planner.create_local_plan())
    planner.storage_in_use = OwnWriter("/nowhere")
    assert type(planner.create_local_plan()) is SavePlan


class OwnWriter(dcp.FileSystemWriter):
    def prepare_local_plan(self, plan):
        return type(plan)(plan.items)


def test_the_known_functions_of_torch_are_those_of_the_torch_in_use():
    assert local_plan._is_code_known()


# -- nothing is kept ---------------------------------------------------------------------------------------


def test_a_change_in_place_is_seen_by_the_next_plan():
    mesh = mesh_of((8,))
    weight, step = dtensor(mesh, [Shard(0)], (16, 4)), torch.tensor(1.0)
    state_dict = {"first": dtensor(mesh, [Shard(0)], (16, 4)), "weight": weight, "step": step}
    planner = GlooCoordinatedPlanner()
    before = outcome_of(planner, state_dict)
    weight.requires_grad_()
    step.data = torch.ones(2, dtype=torch.float64)
    changed = outcome_of(planner, state_dict)
    assert changed != before
    assert changed == outcome_of(DefaultSavePlanner(), state_dict)
    state_dict["weight"] = dtensor(mesh, [Replicate()], (16, 4))
    assert outcome_of(planner, state_dict) == outcome_of(DefaultSavePlanner(), state_dict)


def test_no_object_that_can_be_changed_is_in_two_items_or_in_two_plans():
    mesh = mesh_of((8,))
    planner = GlooCoordinatedPlanner()
    planner.set_up_planner({str(n): dtensor(mesh, [Shard(0)], (16, 4)) for n in range(6)})
    items = [item for _ in range(2) for item in planner.create_local_plan().items]
    for parts in (
        [item.tensor_data.chunk for item in items],
        [item.tensor_data.properties for item in items],
        items,
    ):
        assert len({id(part) for part in parts}) == len(items)


# -- what is left to torch, or to whoever replaced it --------------------------------------------------------


def test_a_planner_with_a_hook_of_its_own_runs_it():
    calls = []

    class Engine(DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            calls.append("set_up_planner")
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

        def create_local_plan(self):
            calls.append("create_local_plan")
            return super().create_local_plan()

    planner = GlooCoordinatedPlanner(inner=Engine())
    planner.set_up_planner({"a": torch.ones(2)})
    planner.create_local_plan()
    assert calls == ["set_up_planner", "create_local_plan"]


def test_dcps_own_cache_of_plans_still_sees_every_plan(monkeypatch):
    monkeypatch.setattr(DefaultSavePlanner, "_cached_save_plan", {})
    planner = GlooCoordinatedPlanner(enable_plan_caching=True)
    planner.set_up_planner({"a": torch.ones(2)})
    plan = planner.create_local_plan()
    assert planner.inner._pending_local_plan is plan


def test_a_function_of_torch_that_was_replaced_is_called_for_every_entry(monkeypatch):
    calls = []
    original = planner_helpers._create_write_items_for_dtensor

    def replaced(fqn, tensor):
        calls.append(fqn)
        return original(fqn, tensor)

    monkeypatch.setattr(planner_helpers, "_create_write_items_for_dtensor", replaced)
    planner = GlooCoordinatedPlanner()
    state_dict = {name: dtensor(mesh_of((8,)), [Shard(0)], (16, 4)) for name in "abc"}
    planner.set_up_planner(state_dict)
    planner.create_local_plan()
    assert calls == ["a", "b", "c"]


def test_a_torch_that_looks_at_more_of_a_tensor_makes_every_item_itself(monkeypatch):
    def create_from_tensor(tensor):
        return TensorProperties(
            tensor.dtype,
            memory_format=torch.channels_last if tensor.stride() == (1, 4) else torch.contiguous_format,
        )

    monkeypatch.setattr(TensorProperties, "create_from_tensor", staticmethod(create_from_tensor))
    state_dict = {"rows": torch.empty(4, 4), "columns": torch.empty(4, 4).t()}
    assert_same(state_dict)


def test_a_replaced_flattening_is_used(monkeypatch):
    def flatten_state_dict(state_dict):
        return {"only": torch.ones(1)}, {"only": ("only",)}

    monkeypatch.setattr(default_planner, "flatten_state_dict", flatten_state_dict)
    assert_same_keys = GlooCoordinatedPlanner()
    assert_same_keys.set_up_planner({"a": torch.ones(2)})
    assert list(assert_same_keys.inner.state_dict) == ["only"]


@pytest.mark.parametrize("on", ["value", "local"])
def test_a_tensor_with_write_items_of_its_own_keeps_them(on):
    mesh = mesh_of((8,))
    special = dtensor(mesh, [Shard(0)], (16, 4))
    owner = special if on == "value" else special._local_tensor
    owner.__create_write_items__ = Custom().__create_write_items__
    plan, *_ = assert_same({"a": dtensor(mesh, [Shard(0)], (16, 4)), "special": special})
    assert len(plan[1]["items"]) == 3


def sharded_tensor(tensor):
    shard = ShardMetadata([0, 0], list(tensor.shape), "rank:3/cpu")
    other = ShardMetadata([tensor.shape[0], 0], list(tensor.shape), "rank:4/cpu")
    metadata = ShardedTensorMetadata(
        [shard, other],
        torch.Size([2 * tensor.shape[0], tensor.shape[1]]),
        ShardedProperties(tensor.dtype, torch.strided, False, torch.contiguous_format, False),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata([TensorShard(tensor, shard)], metadata)


def test_sharded_tensors_are_planned_as_torch_plans_them():
    tensor = sharded_tensor(torch.ones(4, 2))
    plan, *_ = assert_same({"nested": {"sharded": tensor, "again": tensor}, "plain": torch.ones(2)})
    assert len(plan[1]["items"]) == 3


def test_names_that_clash_when_flat_raise_torchs_error():
    outcome = assert_same({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})
    assert outcome == (ValueError, "duplicated flatten key a.b")


def test_a_partial_placement_raises_torchs_error():
    kind, message = assert_same({"a": torch.ones(1), "b": dtensor(mesh_of((8,)), [Partial()], (4,))})
    assert kind is ValueError
    assert "partial" in message.lower()


def test_a_rank_outside_of_a_mesh_plans_nothing_of_it():
    mesh = mesh_of((4,), rank=3, first=8)
    plan, *_ = assert_same({"a": dtensor(mesh, [Shard(0)], (8,)), "b": dtensor(mesh, [Shard(0)], (8,))})
    assert plan[1]["items"] == []
