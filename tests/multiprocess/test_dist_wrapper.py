"""``GlooDistWrapper`` on its own: the whole surface of the stock class, with the same outcome."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from planner import CoordinationMismatch, GlooDistWrapper
from planner.wire.outline import PlanOutline, make_plan_later, read_template
from tests.support.ranks import run_ranks

OBJECTS = [None, 5, "text", b"bytes", {"a": [1, (2, 3)]}, torch.Size((2, 3)), {1: {2, 3}}, [None, None], []]


def outcomes_of(wrapper, rank):
    world = wrapper.get_world_size()
    seen = [wrapper.get_rank(), world, wrapper.rank, wrapper.is_coordinator, wrapper.coordinator_rank]
    seen += [wrapper.global_coordinator_rank, wrapper.group]
    for value in OBJECTS:
        seen.append(wrapper.broadcast_object(value if wrapper.is_coordinator else None))
        seen.append(wrapper.gather_object((rank, value)))
        seen.append(wrapper.all_gather_object((rank, value)))
        seen.append(
            wrapper.scatter_object([(to, value) for to in range(world)] if wrapper.is_coordinator else None)
        )
        seen.append(
            wrapper.reduce_scatter("step", lambda v=value: (rank, v), lambda all_values: all_values[::-1])
        )
        seen.append(wrapper.all_reduce("step", lambda v=value: (rank, v), lambda all_values: all_values))
        seen.append(wrapper.all_gather("step", lambda v=value: v))
        seen.append(wrapper.broadcast("step", lambda v=value: (rank, v)))
    wrapper.barrier()
    for call in (
        lambda: wrapper.reduce_scatter(
            "scattering", lambda: fail_on(rank, [world - 1]), lambda values: values
        ),
        lambda: wrapper.all_reduce("reducing", lambda: 1, lambda values: fail_on(rank, [rank])),
        lambda: wrapper.all_gather("gathering", lambda: fail_on(rank, [0, 1])),
        lambda: wrapper.broadcast("casting", lambda: fail_on(rank, [rank])),
    ):
        with pytest.raises(CheckpointException) as caught:
            call()
        seen.append((caught.value.args[0], sorted(caught.value.failures)))
        seen.append([(type(error), str(error)) for _, (error, _) in sorted(caught.value.failures.items())])
    return seen


def fail_on(rank, ranks):
    if rank in ranks:
        raise ValueError("as the test wants")


def compare_outcomes(ours, stock):
    for found, expected in zip(outcomes_of(ours, ours.rank), outcomes_of(stock, stock.rank), strict=True):
        assert found == expected, (found, expected)


def compare(rank):
    compare_outcomes(GlooDistWrapper(None, True, 0), _DistWrapper(None, True, 0))
    members = [3, 1]
    group = dist.new_group(members, backend="gloo")
    if rank in members:
        for coordinator in (0, 1):
            compare_outcomes(
                GlooDistWrapper(group, True, coordinator), _DistWrapper(group, True, coordinator)
            )
    else:
        with pytest.raises(ValueError, match="not a member of the process group"):
            GlooDistWrapper(group, True, 0)
    compare_outcomes(GlooDistWrapper(None, False, 0), _DistWrapper(None, False, 0))


def test_every_method_gives_what_the_stock_class_gives(tmp_path):
    run_ranks(compare, 4, backend="gloo")


def exchange_plans_and_results(rank, wrapper):
    """Plans go around that nobody has looked at, then results that go to all, and both again."""
    found = []
    for name in "ab":
        template = read_template(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        outline = PlanOutline([f"{name}{rank}", f"{name} of all"], [0, 0], [template], {name: (name, rank)})
        own = make_plan_later(outline)
        plan = wrapper.reduce_scatter("plan", lambda p=own: p, lambda plans: [plans[0], *plans[:-1]])
        results = [WriteResult(item.index, 10 + rank, _StorageInfo("0", 0, 1)) for item in plan.items]
        written = wrapper.all_reduce("write", lambda r=results: r, lambda of_all: of_all[-1] + of_all[0])
        found.append((plan, written))
    return found


def compare_exchanges(rank):
    ours = GlooDistWrapper(None, True, 0)
    ours.begin()
    found = exchange_plans_and_results(rank, ours)
    ours.end(None)
    assert found == exchange_plans_and_results(rank, _DistWrapper(None, True, 0))
    assert [plan.items[0].index.fqn for plan, _ in found] == [f"a{max(rank - 1, 0)}", f"b{max(rank - 1, 0)}"]


def test_plans_and_results_may_go_from_any_rank_to_any_and_again():
    run_ranks(compare_exchanges, 3, backend="gloo")


def call_different_things(rank):
    wrapper = GlooDistWrapper(None, True, 0)
    with pytest.raises(CoordinationMismatch, match="barrier"):
        wrapper.barrier() if rank == 1 else wrapper.gather_object(5)
    assert wrapper.all_gather_object(rank) == [0, 1, 2]


def test_ranks_that_call_different_methods_are_refused_by_name():
    run_ranks(call_different_things, 3)


def test_the_surface_is_that_of_the_stock_class():
    for name, method in vars(_DistWrapper).items():
        if inspect.isfunction(method) and name != "__init__":
            ours = list(inspect.signature(getattr(GlooDistWrapper, name)).parameters)
            assert ours == list(inspect.signature(method).parameters), name
