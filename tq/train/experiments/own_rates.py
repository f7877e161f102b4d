"""Arms of a comparison, each at the learning rate that suits it, on seeds that chose nothing.

Every arm is tuned on the same rates and the same seeds, rivals and ours alike, and then judged on fresh seeds at the
rate whose mean held-out loss was the lowest. An arm that is compared at another's rate alone is compared with bad luck.
But runs at two rates part by luck as well, so what an arm changes as a drop-in is judged at the baseline's rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tq.train.experiments.paired_runs import Run

Outcomes = Callable[[list[Run]], list[dict[str, Any]]]  # of ``paired_runs.train``, in the order of the runs


@dataclass(frozen=True)
class Tuned:
    """An arm at its own rate.

    Attributes:
        run: at that rate, of the first fresh seed.
        tuning: mean held-out loss by rate, nats per token; infinite where a run of it was no longer finite. Empty for
            a rate that was given.
        outcomes: of the fresh seeds, in their order.
    """

    run: Run
    tuning: dict[float, float]
    outcomes: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        """Held-out losses of the fresh seeds; NaN for a run that was no longer finite."""
        return [outcome["valid"] for outcome in self.outcomes]

    @property
    def at_an_end(self) -> bool:
        """Whether the best rate is the lowest or the highest of those tried, so that a better one may lie beyond."""
        return len(self.tuning) > 1 and self.run.lr in (min(self.tuning), max(self.tuning))


def own_rates(
    outcomes: Outcomes, arms: Mapping[str, Run], rates: Sequence[float], tuning: Sequence[int], fresh: Sequence[int]
) -> dict[str, Tuned]:
    """Every arm tuned and then run, by its name.

    Arguments:
        outcomes: computes runs; called twice, so that all of a kind can run side by side.
        rates: the same for all arms.
        tuning, fresh: seeds, none of them in both.

    An arm that no rate kept finite gets the lowest. Raises ``ValueError`` for seeds in both.
    """
    if both := set(tuning) & set(fresh):
        raise ValueError(f"tuning and fresh must have no seed in common, got {sorted(both)} in both")
    if not rates or not tuning or not fresh:
        raise ValueError("rates, tuning and fresh must not be empty")
    tried = [replace(run, lr=rate, seed=seed) for run in arms.values() for rate in rates for seed in tuning]
    ended = iter(outcomes(tried))
    means = {
        name: {rate: _mean([next(ended)["valid"] for _ in tuning]) for rate in rates} for name in arms
    }  # in the order of ``tried``
    best = {name: min(found, key=lambda rate: (found[rate], rate)) for name, found in means.items()}
    runs = [replace(run, lr=best[name], seed=seed) for name, run in arms.items() for seed in fresh]
    reached = iter(outcomes(runs))
    return {
        name: Tuned(replace(run, lr=best[name], seed=fresh[0]), means[name], [next(reached) for _ in fresh])
        for name, run in arms.items()
    }


def at_rate(outcomes: Outcomes, arms: Mapping[str, Run], rate: float, fresh: Sequence[int]) -> dict[str, Tuned]:
    """Every arm on the fresh seeds at one rate, that of a baseline: the arm as a drop-in, whose runs part from the
    baseline's by nothing else."""
    runs = [replace(run, lr=rate, seed=seed) for run in arms.values() for seed in fresh]
    reached = iter(outcomes(runs))
    return {
        name: Tuned(replace(run, lr=rate, seed=fresh[0]), {}, [next(reached) for _ in fresh])
        for name, run in arms.items()
    }


def _mean(losses: Sequence[float]) -> float:
    found = sum(losses) / len(losses)
    return found if math.isfinite(found) else math.inf


def null_pairs(outcomes: Outcomes, run: Run, seeds: Sequence[int]) -> list[float]:
    """Differences of held-out losses between two runs of one arm that only their codes' seeds tell apart.

    Either may be the first, so the differences are symmetric about zero: what an interval over them covers is known.
    """
    pairs = [replace(run, seed=seed, code_seed=2 * seed + side) for seed in seeds for side in range(2)]
    ended = [outcome["valid"] for outcome in outcomes(pairs)]
    return [a - b for a, b in zip(ended[::2], ended[1::2], strict=True)]
