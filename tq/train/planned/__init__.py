"""Activations by a plan: each tensor that a step saves is kept, coded, offloaded or computed again, under a budget."""

from tq.train.planned.execution import PlannedActivations, Usage
from tq.train.planned.peak import plan_lowest_peak
from tq.train.planned.plan import Plan, compress_activations, plan_activations
from tq.train.planned.within import plan_within_peak

__all__ = [
    "Plan",
    "PlannedActivations",
    "Usage",
    "compress_activations",
    "plan_activations",
    "plan_lowest_peak",
    "plan_within_peak",
]
