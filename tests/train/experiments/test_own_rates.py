"""Rates are chosen on seeds that judge nothing, by every arm for itself."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tq.train.experiments.own_rates import at_rate, null_pairs, own_rates
from tq.train.experiments.paired_runs import Run, fields, train

ARMS = {"fp32": Run("tiny"), "4 bits": Run("tiny", variant="gradient")}
RATES = (1e-3, 2e-3, 4e-3)


def _made_up(best: dict[str, float], seen: list[Run]) -> Any:
    """Losses with a valley at the best rate of a variant; on other seeds than 0 and 1 the valley lies elsewhere."""

    def outcomes(runs: list[Run]) -> list[dict[str, Any]]:
        seen.extend(runs)
        shift = {run: 1.0 if run.seed < 2 else 8.0 for run in runs}
        found = [abs(math.log(run.lr / (shift[run] * best[run.variant]))) + run.seed / 100 for run in runs]
        lost = [run.lr > 3e-3 and run.seed == 1 for run in runs]
        return [{"valid": math.nan if gone else x} for gone, x in zip(lost, found, strict=True)]

    return outcomes


def test_each_arm_takes_its_own_rate_from_the_tuning_seeds() -> None:
    seen: list[Run] = []
    found = own_rates(_made_up({"exact": 2e-3, "gradient": 1e-3}, seen), ARMS, RATES, (0, 1), (7, 8, 9))
    assert {name: arm.run.lr for name, arm in found.items()} == {"fp32": 2e-3, "4 bits": 1e-3}
    assert not found["fp32"].at_an_end and found["4 bits"].at_an_end
    assert math.isinf(found["fp32"].tuning[4e-3])  # one of its runs was not finite
    assert [run.seed for run in seen[-6:]] == [7, 8, 9] * 2 and len(seen) == 2 * 3 * 2 + 6
    assert found["fp32"].losses == sorted(found["fp32"].losses) and len(found["fp32"].losses) == 3


def test_seeds_that_chose_may_not_judge_and_what_never_stays_finite_takes_the_lowest_rate() -> None:
    outcomes = _made_up({"exact": 2e-3, "gradient": 1e-3}, [])
    with pytest.raises(ValueError, match=r"\[1\] in both"):
        own_rates(outcomes, ARMS, RATES, (0, 1), (1, 2))
    with pytest.raises(ValueError, match="not be empty"):
        own_rates(outcomes, ARMS, (), (0,), (2,))
    lost = own_rates(outcomes, ARMS, (8e-3, 4e-3), (1,), (2,))["fp32"]
    assert lost.run.lr == 4e-3 and all(math.isinf(mean) for mean in lost.tuning.values())


def test_a_drop_in_keeps_the_rate_of_the_baseline() -> None:
    seen: list[Run] = []
    found = at_rate(_made_up({"exact": 2e-3, "gradient": 1e-3}, seen), ARMS, 2e-3, (7, 8))
    assert [(run.variant, run.lr, run.seed) for run in seen] == [
        (variant, 2e-3, seed) for variant in ("exact", "gradient") for seed in (7, 8)
    ]
    assert found["4 bits"].run.seed == 7 and len(found["4 bits"].losses) == 2 and not found["4 bits"].at_an_end


def test_a_null_pair_differs_by_the_codes_seed_alone() -> None:
    seen: list[Run] = []

    def outcomes(runs: list[Run]) -> list[dict[str, Any]]:
        seen.extend(runs)
        return [train(fields(run)) for run in runs]

    short = Run("tiny", steps=4, batch=2, workers=2, variant="gradient", bits=(2, 2), max_bytes=400_000, evaluated=2)
    (first, second), own = null_pairs(outcomes, short, (3, 5)), short.code_seed
    assert own is None and first != 0 and second != 0 and abs(first) < 0.1
    assert [(run.seed, run.code_seed) for run in seen] == [(3, 6), (3, 7), (5, 10), (5, 11)]
    exact = Run("tiny", steps=2, batch=2, workers=2, max_bytes=400_000, evaluated=2)
    assert null_pairs(outcomes, exact, (3,)) == [0.0]  # nothing is coded, so nothing differs
