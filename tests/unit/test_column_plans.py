"""Local plans in columns are made once, however they are looked at."""

from torch.distributed.checkpoint.planner import SavePlan

import planner.column_plans
from planner.column_plans import LocalPlans, PlanFrames
from planner.wire.plans import encode_plan


def test_asking_for_each_plan_by_rank_makes_each_once(monkeypatch):
    made = []
    original = planner.column_plans.make_plan
    monkeypatch.setattr(planner.column_plans, "make_plan", lambda *parts: made.append(1) or original(*parts))
    own = SavePlan([], planner_data={})
    plans = LocalPlans(PlanFrames([encode_plan(own, strict=True)] * 8), 0, own)
    assert [plans[rank] for rank in range(8)] == [own] * 8
    assert plans[0] is own
    assert len(made) == 7
