"""Intervals between checkpoints are the best ones of the models that their papers state."""

import numpy as np
import pytest

from tq.systems import checkpoint
from tq.systems.checkpoint import daly_interval_s, expected_stretch, lost_share, young_interval_s

DELTA, MTBF = 60.0, 11_135.0  # 16,384 GPUs at Llama 3's rate


def test_youngs_interval_loses_least_by_the_first_order_model() -> None:
    tau = young_interval_s(DELTA, MTBF)
    assert tau / 60 == pytest.approx(19.3, abs=0.05)
    grid = tau * np.linspace(0.5, 2.0, 1501)
    assert grid[np.argmin(lost_share(grid, DELTA, MTBF, 600.0))] == pytest.approx(tau, rel=1e-3)
    assert lost_share(tau, DELTA, MTBF) == pytest.approx(np.sqrt(2 * DELTA / MTBF))


@pytest.mark.parametrize("delta", [1.0, 60.0, 900.0, 5_000.0, 15_000.0])
def test_dalys_interval_is_the_best_of_the_exact_model(delta: float) -> None:
    grid = MTBF * np.geomspace(1e-3, 3.0, 200_001)
    cost = expected_stretch(grid, delta, MTBF, 600.0)
    best = grid[np.argmin(cost)]
    tau = daly_interval_s(delta, MTBF)
    # equation 37 keeps three terms of a series in delta / 2M: near the optimum, and never a per cent off its cost
    assert tau == pytest.approx(best, rel=0.03 if delta < MTBF else 0.2)
    assert expected_stretch(tau, delta, MTBF, 600.0) <= cost.min() * 1.01
    if delta < MTBF / 10:
        young = expected_stretch(young_interval_s(delta, MTBF), delta, MTBF, 600.0)
        assert expected_stretch(tau, delta, MTBF, 600.0) <= young <= cost.min() * 1.05


def test_beyond_twice_the_mtbf_dalys_interval_is_the_mtbf() -> None:
    assert daly_interval_s(2.5 * MTBF, MTBF) == MTBF
    assert daly_interval_s(np.array([60.0, 3 * MTBF]), MTBF)[1] == MTBF


def test_the_exact_model_is_the_mean_of_simulated_runs() -> None:
    rng = np.random.default_rng(7)
    tau, delta, mtbf, restart = 900.0, 100.0, 3_000.0, 200.0
    wall, pieces = 0.0, 40_000
    for _ in range(pieces):
        needed = tau + delta
        while (until := rng.exponential(mtbf)) < needed:
            wall += until
            needed = restart + tau + delta
        wall += needed
    assert expected_stretch(tau, delta, mtbf, restart) == pytest.approx(wall / (pieces * tau), rel=0.02)


def test_the_first_order_model_is_the_exact_one_where_failures_are_rare() -> None:
    tau = young_interval_s(1.0, 1e7)
    assert 1 - 1 / expected_stretch(tau, 1.0, 1e7) == pytest.approx(lost_share(tau, 1.0, 1e7), rel=1e-3)


def test_bytes_and_seconds() -> None:
    assert checkpoint.checkpoint_bytes(70e9) == 14 * 70e9
    # weights, gradients and moments, as the account of 782 GiB for 70B has it
    parts = checkpoint.checkpoint_bytes(70e9, master=0.0, gradients=2.0)
    assert parts / 2**30 == pytest.approx(782.3, abs=0.1)
    assert checkpoint.write_s(405e9 * 12, 5e9) == pytest.approx(972)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="mtbf_s must be positive, got 0"):
        young_interval_s(60.0, 0.0)
    with pytest.raises(ValueError, match="gradients must be 0 or more and finite, got -1"):
        checkpoint.checkpoint_bytes(1e9, gradients=-1.0)
