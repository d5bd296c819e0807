"""A plan made later is the plan, however one looks, and its outline says all of it."""

import copy
import dataclasses
import pickle
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from planner.pending import is_pending
from planner.wire.final_plans import decode_final_plan, encode_final_plan
from planner.wire.objects import encode_object
from planner.wire.outline import PlanOutline, make_plan_later, outline_of, read_template
from planner.wire.plans import decode_plan, encode_plan
from tests import strategies
from tests.unit.test_wire_plans import QUICK, check_same, shard


def outline_from(plan):
    """The outline of a plan, and its own items aside from those that are not alike to any entry's."""
    items = {item.index.fqn: item for item in plan.items if read_template(item) is not None}
    templates = [read_template(item) for item in items.values()]
    return PlanOutline(list(items), list(range(len(items))), templates, plan.planner_data), SavePlan(
        list(items.values()), planner_data=plan.planner_data
    )


@QUICK
@given(strategies.plans(), st.data())
def test_an_outline_stands_for_its_plan(drawn, data):
    outline, plan = outline_from(drawn)
    check_same(outline(), plan)
    assert encode_plan(outline, strict=True) == encode_plan(plan, strict=True)

    # And a final plan comes of it as of the plan.
    kept = data.draw(st.lists(st.sampled_from(plan.items), unique_by=id)) if plan.items else []
    hinted = [
        dataclasses.replace(
            item, index=MetadataIndex(item.index.fqn, item.index.offset, data.draw(strategies.HINTS))
        )
        for item in kept
    ]
    if data.draw(st.booleans()):
        hinted.append(data.draw(strategies.ITEMS))
    final = SavePlan(hinted, data.draw(strategies.PLAIN), data.draw(st.just(plan.planner_data) | st.none()))
    check_same(decode_final_plan(encode_final_plan(final, plan, strict=True), outline), final)


@st.composite
def two_plans(draw):
    """Two plans with little between them, or nothing."""
    one = draw(strategies.plans())
    items, planner_data = copy.deepcopy((one.items, one.planner_data))
    change = draw(st.sampled_from(["nothing", "another item", "fewer", "order", "planner_data", "kind"]))
    if change == "another item":
        items[len(items) // 2 :] = [draw(strategies.ITEMS)]
    elif change == "fewer":
        items = items[1:]
    elif change == "order":
        items.reverse()
    elif change == "planner_data":
        planner_data = draw(
            strategies.MAPPINGS | st.sampled_from([1, True, 1.0, None, {}, (), [], "1", b"1"])
        )
    elif items and items[0].tensor_data is not None:
        items[0].tensor_data.properties.requires_grad ^= True
    return one, SavePlan(items, planner_data=planner_data)


@QUICK
@given(two_plans())
def test_two_outlines_have_one_digest_where_their_plans_are_sent_as_the_same_bytes(plans):
    (one, plan), (other, other_plan) = map(outline_from, plans)
    digests = one.digest(), other.digest()
    event("one digest" if digests[0] == digests[1] else "two")
    if None not in digests and digests[0] == digests[1]:
        assert encode_plan(plan, strict=True) == encode_plan(other_plan, strict=True)
    elif None not in digests:
        assert encode_plan(plan, strict=True) != encode_plan(other_plan, strict=True)


def test_planner_data_of_any_other_kind_has_no_digest():
    class Name(str):
        __slots__ = ()

    others = [Name("a"), True, 1.0, b"a", bytearray(2), np.zeros(2), np.int64(1), np.str_("a"), ["a"]]
    for planner_data in (
        object(),
        OrderedDict(a=("a",)),
        {Name("a"): ("a",)},
        {1: ("a",)},
        *others,
        *({"a": other} for other in others),
        *({"a": ("a", other)} for other in others),
    ):
        assert PlanOutline(["a"], [0], [read_template(shard())], planner_data).digest() is None
    digests = [PlanOutline([], [], [], {"a": ("a", number)}).digest() for number in (1, "1")]
    assert len({*digests, None}) == 3


def test_whatever_has_a_digest_travels_without_pickle():
    outline = PlanOutline([], [], [], {"\ud800": ("\ud800", 2**70, -(2**70)), "": ()})
    assert outline.digest() is not None
    check_same(decode_plan(*encode_plan(outline, strict=True)), outline())


# -- looking -----------------------------------------------------------------------------------------------

ITEMS = [shard("w"), shard("v", 8), WriteItem(MetadataIndex("b"), WriteItemType.BYTE_IO)]


def make():
    return SavePlan(copy.deepcopy(ITEMS), planner_data={"w": ("w",)})


def pending():
    return make_plan_later(
        PlanOutline(["w", "v", "b"], [0, 1, 2], list(map(read_template, ITEMS)), {"w": ("w",)})
    )


LOOKS = {
    "equal": lambda plan: plan == make(),
    "equal the other way round": lambda plan: make() == plan,
    "both pending": lambda plan: plan == pending(),
    "items": lambda plan: plan.items == ITEMS and type(plan.items) is list,
    "attribute with a default": lambda plan: plan.usable is True,
    "pickle": lambda plan: pickle.loads(pickle.dumps(plan)) == make(),
    "copy": lambda plan: copy.copy(plan) == make(),
    "deepcopy": lambda plan: copy.deepcopy(plan) == make(),
    "replace": lambda plan: dataclasses.replace(plan, storage_data=2) == SavePlan(ITEMS, 2, {"w": ("w",)}),
    "replace items": lambda plan: type(dataclasses.replace(plan, items=[])) is SavePlan,
    "vars": lambda plan: vars(plan) == vars(make()),
    "repr": lambda plan: repr(plan) == repr(make()),
    "sent": lambda plan: encode_plan(plan, strict=True) == encode_plan(make(), strict=True),
    "sent as an object": lambda plan: (
        encode_object([plan], path="", strict=True) == [encode_object(make(), path="", strict=True)]
    ),
    "fields": lambda plan: dataclasses.astuple(plan)[3] is True,
}


@pytest.mark.parametrize("look", LOOKS)
def test_however_one_looks_it_is_the_plan(look):
    plan = pending()
    assert outline_of(plan) is not None
    assert isinstance(plan, SavePlan)
    assert LOOKS[look](plan)
    assert not is_pending(plan)
    assert type(plan) is SavePlan
    assert outline_of(plan) is None


def test_what_is_set_round_the_frozen_plans_back_is_a_change_too():
    plan = pending()
    object.__setattr__(plan, "storage_data", {"dir": "x"})
    object.__setattr__(plan, "items", ITEMS[:1])
    assert outline_of(plan) is None
    assert encode_plan(plan, strict=True) == encode_plan(
        SavePlan(ITEMS[:1], {"dir": "x"}, {"w": ("w",)}), strict=True
    )
    assert type(plan) is SavePlan


def test_a_plan_made_later_is_as_frozen_and_as_little_hashable_as_any():
    with pytest.raises(dataclasses.FrozenInstanceError):
        pending().usable = False
    with pytest.raises(TypeError, match="unhashable"):
        hash(pending())
