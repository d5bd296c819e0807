"""Global planning on columns: what ``DefaultSavePlanner`` does, for all ranks at once.

::

    plan_globally      what DefaultSavePlanner.create_global_plan gives, or None where columns won't do
    GlobalPlan         its outcome: final plans as differences, real plans and metadata when asked for
    RankPlan           what one rank sent, in columns or as a plan

The layers below: ``table`` lays the items of all ranks out in arrays, ``dedup`` chooses who keeps what,
``layout`` numbers what is kept, ``validate`` and ``overlap`` find the tensors that stock DCP might refuse,
``order`` sorts. Whatever is not plainly in order is left to torch's own code, so that its verdicts and
messages are torch's in every version.
"""

from planner.global_plan.planning import GlobalPlan, RankPlan, plan_globally

__all__ = ["GlobalPlan", "RankPlan", "plan_globally"]
