"""Global planning on columns gives what torch's own planner gives, whatever the ranks planned."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import random

import pytest
import torch
from hypothesis import currently_in_test_context, given, settings
from hypothesis import event as hypothesis_event
from hypothesis import strategies as st
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from planner.global_plan import plan_globally
from planner.wire.final_plans import encode_final_plan
from planner.wire.plans import decode_plan_columns, decode_schema, encode_plan, make_plan
from tests import strategies
from tests.support.states import build_metadata

NAMES = ["a", "a.b", "model.layers.0.weight", "step", "z", "optim.state"]
SHARD, TENSOR, BYTE_IO = WriteItemType.SHARD, WriteItemType.TENSOR, WriteItemType.BYTE_IO


def event(what):
    if currently_in_test_context():
        hypothesis_event(what)


def tensor_item(name, offsets, sizes, total, *, kind=SHARD, dtype=torch.float32, hint=None):
    offsets = torch.Size(offsets)
    tensor_data = TensorWriteData(
        ChunkStorageMetadata(offsets, torch.Size(sizes)), TensorProperties(dtype=dtype), torch.Size(total)
    )
    return WriteItem(MetadataIndex(name, offsets, hint), kind, tensor_data=tensor_data)


def bytes_item(name, hint=None, nbytes=None):
    data = None if nbytes is None else BytesIOWriteData(nbytes)
    return WriteItem(MetadataIndex(name, None, hint), BYTE_IO, data)


# -- worlds --------------------------------------------------------------------------------------------


def cuts(draw, length, num_parts):
    """Cut a dimension as torch.chunk does, empty parts at its end, or anywhere."""
    if draw(st.booleans()):
        step = -(-length // num_parts)
        edges = [min(part * step, length) for part in range(num_parts + 1)]
    else:
        inner = draw(st.lists(st.integers(0, length), min_size=num_parts - 1, max_size=num_parts - 1))
        edges = [0, *sorted(inner), length]
    return list(itertools.pairwise(edges))


@st.composite
def shardings(draw, name, num_ranks):
    """Give each rank the items of one tensor: every box of a grid to one rank or to several."""
    num_dims = draw(st.integers(1, 3))
    size = [draw(st.integers(0, 9)) for _ in range(num_dims)]
    grid = [cuts(draw, length, draw(st.sampled_from([1, 2, 3, num_ranks]))) for length in size]
    boxes = list(itertools.product(*grid))[: 3 * num_ranks]
    if draw(st.booleans()):
        boxes = draw(st.permutations(boxes))
    own = [[] for _ in range(num_ranks)]
    first, stride = draw(st.integers(0, num_ranks - 1)), draw(st.integers(1, 3))
    for number, box in enumerate(boxes):
        offsets, sizes = [low for low, _ in box], [high - low for low, high in box]
        holders = {(first + number * stride) % num_ranks}
        if draw(st.integers(0, 3)) == 0:
            holders |= draw(st.sets(st.integers(0, num_ranks - 1), max_size=num_ranks))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16])) if number == 0 else torch.float32
        for rank in holders:
            own[rank].append(tensor_item(name, offsets, sizes, size, dtype=dtype))
    return own


@st.composite
def replicas(draw, name, num_ranks):
    """An item that all ranks have, or some of them."""
    holders = draw(st.just(range(num_ranks)) | st.sets(st.integers(0, num_ranks - 1)))
    kind = draw(st.sampled_from(["bytes", "scalar", "tensor"]))
    if kind == "bytes":
        item = bytes_item(name, nbytes=draw(st.none() | st.integers(0, 9)))
    else:
        size = [] if kind == "scalar" else draw(st.lists(st.integers(0, 5), min_size=1, max_size=2))
        item = tensor_item(name, [0] * len(size), size, size, kind=draw(st.sampled_from([TENSOR, SHARD])))
    return [[dataclasses.replace(item)] if rank in holders else [] for rank in range(num_ranks)]


@st.composite
def damaged(draw, item, num_ranks):
    """Another item, wrong in a way that stock DCP has a word for, or is silent about."""
    data = item.tensor_data
    if data is None:
        return draw(
            st.sampled_from([bytes_item(item.index.fqn, 3, 7), tensor_item(item.index.fqn, [0], [2], [2])])
        )
    offsets, sizes, total = list(data.chunk.offsets), list(data.chunk.sizes), list(data.size)
    way = draw(st.sampled_from(["offset", "size", "total", "kind", "dims", "bytes", "hint", "dtype", "far"]))
    event(f"damage: {way}")
    kind, hint, dtype = item.type, item.index.index, data.properties.dtype
    if way == "dims":
        offsets, sizes, total = [*offsets, 0], [*sizes, 1], [*total, 1]
    elif way == "bytes":
        return bytes_item(item.index.fqn)
    elif way == "kind":
        kind = TENSOR
    elif way == "hint":
        hint = draw(st.integers(0, 3))
    elif way == "dtype":
        dtype = torch.int8
    elif total:
        target = {"offset": offsets, "size": sizes, "total": total, "far": offsets}[way]
        dim = draw(st.integers(0, len(total) - 1))
        target[dim] += draw(st.integers(-2, 2)) if way != "far" else draw(st.sampled_from([2**61, 2**62]))
    try:
        return tensor_item(item.index.fqn, offsets, sizes, total, kind=kind, hint=hint, dtype=dtype)
    except RuntimeError:  # a torch.Size takes what it takes
        return item


@st.composite
def worlds(draw):
    num_ranks = draw(st.integers(1, 6) | st.sampled_from([9, 17, 34]))
    names = draw(st.lists(st.sampled_from(NAMES), max_size=5, unique=True))
    own = [[] for _ in range(num_ranks)]
    for name in names:
        entry = draw(shardings(name, num_ranks) | replicas(name, num_ranks))
        for rank, items in enumerate(entry):
            own[rank] += items
    if draw(st.integers(0, 2)) == 0:
        for _ in range(draw(st.integers(1, 3))):
            rank = draw(st.sampled_from([rank for rank in range(num_ranks) if own[rank]] or [None]))
            if rank is not None:
                position = draw(st.integers(0, len(own[rank]) - 1))
                way = draw(st.sampled_from(["replace", "add", "repeat", "drop"]))
                event(f"way: {way}")
                item = own[rank][position]
                new = item if way == "repeat" else draw(damaged(item, num_ranks))
                own[rank][position : position + 1] = {"replace": [new], "drop": []}.get(way, [item, new])
    if draw(st.booleans()):
        own = [draw(st.permutations(items)) for items in own]
    if draw(st.integers(0, 3)) == 0:
        own = [
            [
                dataclasses.replace(
                    item, index=dataclasses.replace(item.index, index=draw(st.none() | st.integers(0, 4)))
                )
                for item in items
            ]
            for items in own
        ]
    return [
        SavePlan(
            items,
            draw(st.none() | st.just(_StoragePrefix("__0_"))),
            {item.index.fqn: (item.index.fqn, draw(st.integers(0, 2))) for item in items},
            draw(st.integers(0, 9)) > 0,
        )
        for items in own
    ]


def columnar(plans, *, shares=True):
    """Send plans over the wire; equal schemas become one object."""
    schemas = {}
    found = []
    for plan in plans:
        frame, body = encode_plan(plan, strict=True)
        schema = schemas.get(frame) if shares else None
        if schema is None:
            schema = schemas[frame] = decode_schema(frame)
        found.append((schema, decode_plan_columns(schema, body)))
    return found


# -- comparison ----------------------------------------------------------------------------------------


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append((record.levelname, record.getMessage()))


def outcome_of(work):
    """Return what ``work`` gave, raised (with its type and text) and logged."""
    heard = Heard()
    default_planner.logger.addHandler(heard)
    propagates, default_planner.logger.propagate = default_planner.logger.propagate, False
    try:
        return work(), None, heard.messages
    except Exception as error:  # noqa: BLE001 - whatever torch raises is the expectation
        return None, (type(error), str(error)), heard.messages
    finally:
        default_planner.logger.propagate = propagates
        default_planner.logger.removeHandler(heard)


def plan_fields(plan):
    """Return all of a plan, hints and orders too, which == does not look at."""
    return (
        plan,
        [item.index.index for item in plan.items],
        ["offset" in item.index.__dict__ for item in plan.items],
        list(plan.planner_data.items()) if type(plan.planner_data) is dict else plan.planner_data,
    )


def metadata_fields(metadata):
    data = metadata.planner_data
    return (
        metadata,
        list(metadata.state_dict_metadata.items()),
        list(data.items()) if type(data) is dict else data,
    )


def check_like_torch(plans, *, to_lowest_rank=False, flatten=True, shares=True):
    """Compare with torch's planner; return the outcome, None where columns could not tell."""
    planner = DefaultSavePlanner(flatten_state_dict=flatten, dedup_save_to_lowest_rank=to_lowest_rank)
    stock, stock_error, stock_log = outcome_of(lambda: planner.create_global_plan(plans))
    columns = columnar(plans, shares=shares)
    ours, error, log = outcome_of(
        lambda: plan_globally(columns, to_lowest_rank=to_lowest_rank, merges_mappings=flatten)
    )
    if ours is None and error is None:
        assert log == []
        # What the caller does then.
        real = [make_plan(*plan) for plan in columns]
        assert [plan_fields(plan) for plan in real] == [plan_fields(plan) for plan in plans]
        event("left to torch")
        return None
    assert error == stock_error
    assert log == stock_log
    if error is not None:
        event(f"raises {error[0].__name__}")
        return None
    event("planned")
    final_plans, metadata = stock
    assert len(ours.local_plans) == len(final_plans)
    assert metadata_fields(build_metadata(ours)) == metadata_fields(metadata)
    for rank, final_plan in enumerate(final_plans):
        assert plan_fields(ours.build_plan(rank)) == plan_fields(final_plan)
        check_encoded(ours, rank, final_plan, make_plan(*columns[rank]))
        check_places(ours, rank, final_plan, metadata)
    return ours


def check_places(ours, rank, final_plan, metadata):
    names = list(metadata.state_dict_metadata)
    entries, chunks = ours.places(rank)
    for item, entry, chunk in zip(final_plan.items, entries.tolist(), chunks.tolist(), strict=True):
        assert names[entry] == item.index.fqn
        if item.tensor_data is None:
            assert chunk == 0
        else:
            assert metadata.state_dict_metadata[names[entry]].chunks[chunk] == item.tensor_data.chunk
            assert chunk == item.index.index


def check_encoded(ours, rank, final_plan, base):
    own_storage = ours.local_plans[rank][1].storage_data
    for storage_data in (own_storage, _StoragePrefix("__7_"), None):
        is_own = storage_data is own_storage
        real = dataclasses.replace(
            final_plan,
            storage_data=base.storage_data if is_own else storage_data,
            planner_data=base.planner_data,
        )
        assert ours.encode_final_plan(rank, storage_data=storage_data, strict=True) == encode_final_plan(
            real, base, strict=True
        )


@given(worlds(), st.booleans(), st.booleans(), st.booleans())
def test_any_world_is_planned_as_torch_plans_it(plans, to_lowest_rank, flatten, shares):
    check_like_torch(plans, to_lowest_rank=to_lowest_rank, flatten=flatten, shares=shares)


@given(
    st.lists(strategies.plans(strategies.ITEMS | strategies.odd_items()), min_size=1, max_size=4),
    st.booleans(),
)
@settings(max_examples=max(50, settings.default.max_examples // 4))
def test_any_plan_at_all_is_planned_as_torch_plans_it(plans, to_lowest_rank):
    check_like_torch(plans, to_lowest_rank=to_lowest_rank, flatten=False)


@st.composite
def holders_and_sizes(draw):
    num_ranks = draw(st.integers(2, 40))
    keys = draw(
        st.lists(
            st.tuples(
                st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks),
                st.integers(0, 2),
                st.sampled_from([0, 0, 1]),
            ),
            max_size=16,
        )
    )
    return num_ranks, keys


@given(holders_and_sizes())
@settings(max_examples=max(40, settings.default.max_examples // 10))
def test_ties_go_where_a_set_of_ranks_sends_them(world):
    num_ranks, keys = world
    own = [[] for _ in range(num_ranks)]
    for number, (holders, base, step) in enumerate(keys):
        for rank in holders:
            # Where ranks disagree about a size, the last rank's counts, whoever keeps the item.
            size = (base + step * rank) % 3
            own[rank].append(tensor_item(f"w{number}", [0], [size], [size], kind=TENSOR))
    ours = check_like_torch([SavePlan(items, None, {}) for items in own])
    assert ours is not None


def test_where_ranks_disagree_about_a_size_the_last_one_counts():
    def items(own_size):
        shared = tensor_item("shared", [0], [own_size], [own_size])
        return [shared, *(tensor_item(f"w{number}", [0], [3], [3]) for number in range(4))]

    ours = check_like_torch([SavePlan(items(1), None, {}), SavePlan(items(9), None, {})])
    assert ours is not None
    assert ours.kept(0).tolist() == [True, False, False, False, True]


# -- single cases --------------------------------------------------------------------------------------


def world_of(chunks, total, *, name="w", num_ranks=None):
    """One chunk a rank, or all of them on the first of ``num_ranks``."""
    items = [tensor_item(name, offsets, sizes, total) for offsets, sizes in chunks]
    if num_ranks is None:
        return [SavePlan([item], None, {name: (name,)}) for item in items]
    return [SavePlan(items, None, {})] + [SavePlan([], None, {})] * (num_ranks - 1)


PINWHEEL = [([0, 0], [2, 1]), ([0, 1], [1, 2]), ([1, 2], [2, 1]), ([2, 0], [1, 2]), ([1, 1], [1, 1])]


def test_a_pinwheel_is_proven_apart(counted_overlap_checks):
    """No straight line cuts it in two, and its chunks lie on no grid of their greatest size."""
    columns = columnar(world_of(PINWHEEL, [3, 3]))
    assert plan_globally(columns, to_lowest_rank=False, merges_mappings=True) is not None
    assert counted_overlap_checks == []
    check_like_torch(world_of(PINWHEEL, [3, 3]))


@pytest.fixture
def counted_overlap_checks(monkeypatch):
    calls = []
    stock = default_planner._check_box_overlap
    monkeypatch.setattr(
        default_planner, "_check_box_overlap", lambda *boxes: calls.append(boxes) or stock(*boxes)
    )
    return calls


def short_dimension_pieces(num_shards, *, uneven, shuffled):
    rng = random.Random(7)
    edges = list(range(0, 2 * num_shards + 1, 2))
    if uneven:
        edges[1:-1] = [edge + rng.randrange(2) for edge in edges[1:-1]]
    pieces = list(itertools.pairwise(edges))
    if shuffled:
        rng.shuffle(pieces)
    return pieces


def short_dimension_plan(num_keys, num_shards, low, high):
    names = [f"experts.{number}" for number in range(num_keys)]
    total = [2 * num_shards, 200 * num_shards]
    items = [tensor_item(name, [low, 0], [high - low, total[1]], total) for name in names]
    return SavePlan(items, None, {name: (name,) for name in names})


def short_dimension_world(num_keys, num_shards, *, uneven, shuffled):
    return [
        short_dimension_plan(num_keys, num_shards, low, high)
        for low, high in short_dimension_pieces(num_shards, uneven=uneven, shuffled=shuffled)
    ]


def short_dimension_columns(num_keys, num_shards, *, uneven, shuffled):
    """The same in columns, without a thousand plans."""
    ((schema, columns),) = columnar([short_dimension_plan(num_keys, num_shards, 0, 1)])
    found = []
    for low, high in short_dimension_pieces(num_shards, uneven=uneven, shuffled=shuffled):
        offsets, sizes = columns.offsets.copy(), columns.sizes.copy()
        offsets[::2], sizes[::2] = low, high - low
        found.append((schema, dataclasses.replace(columns, offsets=offsets, sizes=sizes)))
    return found


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("uneven", [False, True])
def test_shards_along_the_short_dimension_are_not_compared_pair_by_pair(
    monkeypatch, counted_overlap_checks, uneven, shuffled
):
    sorted_rows = []
    from planner.global_plan import overlap

    stock = overlap.stable_order
    monkeypatch.setattr(
        overlap, "stable_order", lambda keys, num_rows: sorted_rows.append(num_rows) or stock(keys, num_rows)
    )
    columns = short_dimension_columns(64, 1024, uneven=uneven, shuffled=shuffled)
    ours = plan_globally(columns, to_lowest_rank=False, merges_mappings=True)
    assert ours is not None
    assert counted_overlap_checks == []
    assert sum(sorted_rows) <= (64 * 1024 + 64) * 4  # each chunk's four corners, and the tensors'
    assert bool(sorted_rows) == (uneven and shuffled)


def test_a_small_such_world_is_as_torch_has_it():
    for uneven, shuffled in itertools.product([False, True], repeat=2):
        assert check_like_torch(short_dimension_world(3, 16, uneven=uneven, shuffled=shuffled)) is not None


@pytest.mark.parametrize(
    ("chunks", "total"),
    [
        ([([0], [4]), ([3], [4])], [7]),  # overlap
        ([([0], [3]), ([4], [3])], [7]),  # gap
        ([([0], [4]), ([4], [4])], [7]),  # out of bounds
        ([([0], [4]), ([-1], [4])], [7]),
        ([([0], [4]), ([4], [-1])], [7]),
        ([([0], [4]), ([0], [5])], [9]),  # one offset, two sizes: the second is taken for a replica
        ([([0], [5]), ([2], [0])], [5]),  # an empty chunk within another, which torch calls an overlap
        ([([0], [5]), ([5], [0])], [5]),  # and at its end, which torch does not
        ([([0], [5]), ([5], [0]), ([0], [0])], [5]),
        ([([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 1], [2, 2]), ([2, 3], [2, 1]), ([2, 0], [2, 1])], [4, 4]),
        ([([0, 0], [2, 2]), ([1, 1], [2, 2]), ([2, 2], [2, 2]), ([0, 2], [1, 2])], [4, 4]),
        ([([0], [2**62]), ([2**62], [2**62])], [2**63 - 1]),
        ([([0, 0], [2**40, 2**40])] * 2, [2**40, 2**40]),
    ],
)
@pytest.mark.parametrize("num_ranks", [None, 1, 3])
def test_verdicts_are_those_of_torch(chunks, total, num_ranks):
    check_like_torch(world_of(chunks, total, num_ranks=num_ranks))


def test_messages_come_in_the_order_of_the_metadata_and_are_cut_as_torch_cuts_them():
    names = [f"tensor.{number}" for number in range(12)]
    first = [tensor_item(name, [0, 0], [2, 4], [4, 4]) for name in names]
    second = [tensor_item(name, [2 - number % 3, 0], [2, 4], [4, 4]) for number, name in enumerate(names)]
    plans = [SavePlan(first, None, {}), SavePlan(second[::-1], None, {})]
    columns = columnar(plans)
    _, error, log = outcome_of(lambda: plan_globally(columns, to_lowest_rank=False, merges_mappings=True))
    assert error[0] is ValueError
    assert error[1].startswith("Failed to validate global plan")
    assert len(log) == 8  # four tensors overlap, four have a gap
    check_like_torch(plans)


@pytest.mark.parametrize(
    "second",
    [
        tensor_item("w", [0], [2], [4], kind=TENSOR),
        tensor_item("w", [2], [2], [4], kind=TENSOR),
        tensor_item("w", [0, 0], [2, 2], [2, 2]),
        bytes_item("w"),
    ],
)
@pytest.mark.parametrize(
    "first", [tensor_item("w", [0], [2], [4]), tensor_item("w", [0], [2], [4], kind=TENSOR), bytes_item("w")]
)
def test_clashing_kinds_are_refused_as_torch_refuses_them(first, second):
    check_like_torch([SavePlan([first], None, {}), SavePlan([second], None, {})])
    check_like_torch([SavePlan([first, second], None, {}), SavePlan([], None, {})])


def test_another_number_of_dimensions_that_torch_lets_pass_is_left_to_it():
    plans = world_of([([0], [2])], [4]) + world_of([([2, 0], [2, 1])], [4])
    columns = columnar(plans)
    assert plan_globally(columns, to_lowest_rank=False, merges_mappings=True) is None


def test_mappings_merge_as_a_chain_map():
    items = [bytes_item("a"), bytes_item("b")]
    mappings = [
        {"a": ("a", 1), "b": ("b", 1)},
        {"c": (1,), "b": ("b", 2)},
        {"a": ("a", 1), "b": ("b", 1)},
        {},
    ]
    assert check_like_torch([SavePlan(items, None, mapping) for mapping in mappings]) is not None


def test_no_plans_and_empty_plans():
    assert check_like_torch([SavePlan([], None, {})] * 3) is not None
    assert check_like_torch([SavePlan([bytes_item("a")], None, {}), SavePlan([], None, {})]) is not None


def test_what_is_not_in_columns_is_left_to_torch():
    regular = SavePlan([bytes_item("a")], None, {})
    odd = SavePlan([dataclasses.replace(bytes_item("a"), bytes_io_data=BytesIOWriteData(-1))], None, {})
    no_mapping = SavePlan([bytes_item("b")], None, None)
    huge = SavePlan([tensor_item("w", [0], [2**62], [2**62])], None, {})
    for other in (odd, no_mapping, huge):
        columns = columnar([regular, other])
        assert plan_globally(columns, to_lowest_rank=False, merges_mappings=True) is None
    (column,) = columnar([regular])
    assert plan_globally([column, regular], to_lowest_rank=False, merges_mappings=True) is None


def test_equal_sizes_of_metadata_are_one_object_and_what_can_change_is_not():
    plans = short_dimension_world(2, 4, uneven=False, shuffled=False)
    ours = plan_globally(columnar(plans), to_lowest_rank=False, merges_mappings=True)
    entries = list(build_metadata(ours).state_dict_metadata.values())
    assert all(type(entry) is TensorStorageMetadata for entry in entries)
    first, second = (entry.chunks for entry in entries)
    assert first[1].offsets is second[1].offsets
    assert first[0].sizes is first[1].sizes
    assert first[0] is not second[0]
    assert entries[0].properties is not entries[1].properties
    assert build_metadata(ours) is not build_metadata(ours)


def test_stable_order_sorts_any_integers():
    import numpy as np

    from planner.global_plan.order import stable_order

    rng = random.Random(3)
    extremes = [-(2**63), -1, 0, 1, 2**16 - 1, 2**16, 2**31, 2**63 - 1]
    keys = [np.asarray([rng.choice(extremes) for _ in range(500)], dtype=np.int64) for _ in range(2)]
    expected = sorted(range(500), key=lambda row: (keys[0][row], keys[1][row]))
    assert stable_order(keys, 500).tolist() == expected
    assert bisect.bisect_left(keys[0][stable_order(keys, 500)].tolist(), 0) == int((keys[0] < 0).sum())
