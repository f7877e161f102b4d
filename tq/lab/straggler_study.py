"""What each policy against stragglers buys in time to a loss, each at the rate that suits it, on seeds that chose none.

Both scenarios have the same slowdown: one rank that is slow in every step, or every rank that is slow now and then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tq.lab.straggler_runs import seconds_to
from tq.systems.stragglers import POLICIES, Policy

SCENARIOS: Mapping[str, dict[str, Any]] = {"for-good": {"slow_rank": 3}, "sudden": {"sudden": 0.1}}
LOSS = 2.4  # held-out nats per token that ends the race; declared
RATES = (2e-3, 4e-3, 8e-3)  # of all policies; declared
Outcomes = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
Arm = tuple[str, int]  # scenario and number of the policy


def slug(policy: Policy) -> str:
    """The policy's name as a part of a key."""
    return policy.name.replace(" ", "-")


def arms(policies: Sequence[int] = tuple(range(len(POLICIES)))) -> list[Arm]:
    """All scenarios with all policies."""
    return [(scenario, policy) for scenario in SCENARIOS for policy in policies]


def task(arm: Arm, lr: float, seed: int, common: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``straggler_runs.virtual`` or ``real``."""
    scenario, policy = arm
    return {**common, **SCENARIOS[scenario], "policy": policy, "lr": lr, "seed": seed}


def race(
    outcomes: Outcomes, chosen: Sequence[Arm], common: Mapping[str, Any], *, tuning: Sequence[int],
    fresh: Sequence[int], rates: Sequence[float] = RATES, loss: float = LOSS,
) -> dict[Arm, dict[str, Any]]:  # fmt: skip
    """Seconds to the loss of every arm on the fresh seeds, at the rate that was fastest on the tuning seeds.

    Args:
        outcomes: of tasks; called twice, so that all of a kind can run side by side.
        chosen: the arms.
        common: fields of all tasks.
        tuning, fresh: seeds, none in both.
        rates: tried for every arm alike.
        loss: that ends the race.

    Returns:
        By arm: lr, at_an_end (whether the best rate is the lowest or highest), and seconds [fresh], None where the loss
        was not reached. A rate that did not reach it counts as infinitely slow; among such the lowest is taken.

    Raises:
        ValueError: for a seed in both.
    """
    if set(tuning) & set(fresh):
        raise ValueError(f"tuning and fresh must have no seed in common, got {sorted(set(tuning) & set(fresh))}")
    tried = iter(outcomes([task(arm, lr, seed, common) for arm in chosen for lr in rates for seed in tuning]))
    best: dict[Arm, float] = {}
    for arm in chosen:
        means = {}
        for lr in rates:
            times = [seconds_to(loss, next(tried)["losses"]) for _ in tuning]
            means[lr] = sum(math.inf if each is None else each for each in times)
        best[arm] = min(rates, key=lambda lr: (means[lr], lr))
    ended = iter(outcomes([task(arm, best[arm], seed, common) for arm in chosen for seed in fresh]))
    return {
        arm: {
            "lr": best[arm], "at_an_end": best[arm] in (min(rates), max(rates)),
            "seconds": [seconds_to(loss, next(ended)["losses"]) for _ in fresh],
        }
        for arm in chosen
    }  # fmt: skip
