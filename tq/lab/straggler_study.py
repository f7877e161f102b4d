"""What each policy against stragglers buys in time to a loss, each at the rate that suits it, on seeds that chose none.

Both scenarios have the same slowdown: one rank that is slow in every step, or every rank that is slow now and then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tq.lab.straggler_runs import Straggling, seconds_to
from tq.systems.stragglers import POLICIES, Policy

SCENARIOS: Mapping[str, dict[str, Any]] = {"for-good": {"slow_rank": 3}, "sudden": {"sudden": 0.1}}
LOSS = 2.4  # held-out nats per token that ends the race; declared
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)  # of all policies; declared
OUTER = (0.35, 0.7, 1.0)  # rates of the outer step, of local steps alone; declared
Outcomes = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
Arm = tuple[str, int]  # scenario and number of the policy


def slug(policy: Policy) -> str:
    """The policy's name as a part of a key."""
    return policy.name.replace(" ", "-")


def arms(policies: Sequence[int] = tuple(range(len(POLICIES)))) -> list[Arm]:
    """All scenarios with all policies."""
    return [(scenario, policy) for scenario in SCENARIOS for policy in policies]


def task(
    arm: Arm, lr: float, seed: int, common: Mapping[str, Any], outer_lr: float = Straggling.outer_lr
) -> dict[str, Any]:
    """Of ``straggler_runs.virtual`` or ``real``."""
    scenario, policy = arm
    found = {**common, **SCENARIOS[scenario], "policy": policy, "lr": lr, "seed": seed}
    return found if outer_lr == Straggling.outer_lr else {**found, "outer_lr": outer_lr}


def race(
    outcomes: Outcomes, chosen: Sequence[Arm], common: Mapping[str, Any], *, tuning: Sequence[int],
    fresh: Sequence[int], rates: Sequence[float] = RATES, outer: Sequence[float] = OUTER, loss: float = LOSS,
) -> dict[Arm, dict[str, Any]]:  # fmt: skip
    """Seconds to the loss of every arm on the fresh seeds, at the rates that were fastest on the tuning seeds.

    Args:
        outcomes: of tasks; called twice, so that all of a kind can run side by side.
        chosen: the arms.
        common: fields of all tasks.
        tuning, fresh: seeds, none in both.
        rates: tried for every arm alike.
        outer: rates of the outer step, tried with each of these for local steps.
        loss: that ends the race.

    Returns:
        By arm: lr, at_an_end (whether the best rate is the lowest or highest), outer_lr (None without local steps),
        outer_at_an_end, and seconds [fresh], None where the loss was not reached. Rates that did not reach it count as
        infinitely slow; among such the lowest are taken.

    Raises:
        ValueError: for a seed in both.
    """
    if set(tuning) & set(fresh):
        raise ValueError(f"tuning and fresh must have no seed in common, got {sorted(set(tuning) & set(fresh))}")
    tried = {
        arm: [(lr, step) for lr in rates for step in (outer if _local(arm) else (Straggling.outer_lr,))]
        for arm in chosen
    }
    ended = iter(outcomes([
        task(arm, lr, seed, common, step) for arm in chosen for lr, step in tried[arm] for seed in tuning
    ]))  # fmt: skip
    best: dict[Arm, tuple[float, float]] = {}
    for arm in chosen:
        means = {}
        for pair in tried[arm]:
            times = [seconds_to(loss, next(ended)["losses"]) for _ in tuning]
            means[pair] = sum(math.inf if each is None else each for each in times)
        best[arm] = min(tried[arm], key=lambda pair: (means[pair], pair))
    ended = iter(outcomes([task(arm, lr, seed, common, step) for arm, (lr, step) in best.items() for seed in fresh]))
    return {
        arm: {
            "lr": lr, "at_an_end": lr in (min(rates), max(rates)), "outer_lr": step if _local(arm) else None,
            "outer_at_an_end": _local(arm) and step in (min(outer), max(outer)),
            "seconds": [seconds_to(loss, next(ended)["losses"]) for _ in fresh],
        }
        for arm, (lr, step) in best.items()
    }  # fmt: skip


def _local(arm: Arm) -> bool:
    return POLICIES[arm[1]].local_steps > 1
