"""Failures and checkpoints: golden values, the exponential case against Daly, simulation against the sum."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from tq.systems import checkpoint, renewal

# write, mtbf, restart -> Young, Daly, best interval, waste there
GOLDEN = {
    (60, 11_133, 600): (1155.8, 1116.2, 1116.19, 0.14747),
    (10, 11_133, 600): (471.9, 465.2, 465.23, 0.09206),
    (905, 1_425_600, 600): (50_797.0, 50_195.5, 50_195.47, 0.03562),
    (300, 3_600, 300): (1469.7, 1276.5, 1276.88, 0.40628),
    (600, 600, 60): (848.5, 495.7, 504.84, 0.85650),
}


@pytest.mark.parametrize(("case", "expected"), GOLDEN.items())
def test_golden_values(case: tuple[float, float, float], expected: tuple[float, ...]) -> None:
    write, mtbf, restart = case
    young, daly, best, lost = expected
    assert checkpoint.young_interval_s(write, mtbf) == pytest.approx(young, abs=0.05)
    assert checkpoint.daly_interval_s(write, mtbf) == pytest.approx(daly, abs=0.05)
    found = renewal.best_interval_s(write, mtbf)
    assert found == pytest.approx(best, abs=0.005)
    assert renewal.waste(found, write, mtbf, restart) == pytest.approx(lost, abs=5e-6)
    stretch = checkpoint.expected_stretch(found, write, mtbf, restart)
    assert renewal.waste(found, write, mtbf, restart) == pytest.approx(1 - 1 / stretch, rel=1e-12)
    for other in (0.99 * found, 1.01 * found):
        assert renewal.waste(other, write, mtbf, restart) > renewal.waste(found, write, mtbf, restart)


@pytest.mark.parametrize(
    ("row", "shape", "lost"),
    [(0, 0.5, 0.1265), (0, 0.7, 0.1394), (0, 1.5, 0.1512), (3, 0.5, 0.3425), (3, 0.7, 0.3777), (3, 1.5, 0.4256)],
)
def test_weibull_lives(row: int, shape: float, lost: float) -> None:  # lost: as simulated elsewhere, to four digits
    write, mtbf, restart = list(GOLDEN)[row]
    interval = renewal.best_interval_s(write, mtbf)  # of exponential lives
    exact = renewal.waste(interval, write, mtbf, restart, shape)
    # `lost` was simulated over two million lives and rounded to four digits, so it has an error of its own
    _, error = renewal.simulated_waste(interval, write, mtbf, restart, shape=shape, lives=200_000)
    assert abs(exact - lost) < 4 * error * 0.1**0.5 + 5e-5
    best = renewal.best_interval_s(write, mtbf, restart, shape)
    assert renewal.waste(best, write, mtbf, restart, shape) <= exact


def test_simulation_agrees_with_the_sum_on_a_grid() -> None:
    apart = []
    for number, (write, shape) in enumerate((w, k) for w in (10, 60, 300) for k in (0.5, 0.7, 1.0, 1.5, 3.0)):
        for interval in (400.0, 2000.0):
            exact = renewal.waste(interval, write, 9000, 300, shape)
            share, error = renewal.simulated_waste(
                interval, write, 9000, 300, shape=shape, lives=60_000, seed=number
            )
            apart.append(abs(share - exact) / error)
    assert len(apart) == 30 and max(apart) < 4 and np.mean(apart) < 1.3


def test_the_best_interval_is_lambert_s() -> None:
    from scipy.special import lambertw

    for ratio in (1e-9, 1e-6, 1e-3, 0.1, 1.0, 10.0):
        exact = 1 + lambertw(-np.exp(-ratio - 1)).real
        assert renewal.best_interval_s(ratio * 5000, 5000) / 5000 == pytest.approx(exact, rel=3e-7)


def test_nearly_exponential_lives_are_the_limit() -> None:
    assert renewal.waste(1000, 60, 9000, 300, 1.0001) == pytest.approx(renewal.waste(1000, 60, 9000, 300), abs=1e-4)


@pytest.mark.parametrize("placement", ["pairs", "ring"])
def test_survival_of_peers_by_counting(placement: str) -> None:
    nodes = 8
    for lost in range(nodes + 1):
        sets = list(combinations(range(nodes), lost))
        step = (lambda i: i ^ 1) if placement == "pairs" else (lambda i: (i + 1) % nodes)
        whole = sum(all(step(i) not in chosen for i in chosen) for chosen in map(set, sets))
        assert renewal.survives(nodes, lost, placement) == pytest.approx(whole / len(sets))


def test_survival_golden_values() -> None:
    assert renewal.survives(16, 2) == pytest.approx(0.9333, abs=5e-5) and renewal.survives(16, 3) == pytest.approx(0.8)
    assert renewal.survives(16, 2, "ring") == pytest.approx(0.8667, abs=5e-5)
    assert renewal.survives(2048, 2) == pytest.approx(0.9995, abs=5e-5)


def test_two_levels_lose_less_than_the_far_one_alone() -> None:
    both = renewal.two_levels((1, 60), (12_000, 160_000), 60)
    rate = 1 / (1 / 12_000 + 1 / 160_000)
    alone = renewal.waste(renewal.best_interval_s(60, rate), 60, rate, 60)
    assert both["waste"] < alone and both["near_s"] < both["far_s"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: renewal.waste(0, 60, 9000), "interval_s"), (lambda: renewal.waste(10, 60, -1), "mtbf_s"),
        (lambda: renewal.waste(10, 60, 9000, -1), "restart_s"), (lambda: renewal.waste(10, 60, 9000, shape=0), "shape"),
        (lambda: renewal.waste(1e-3, 1e-3, 9000, shape=0.5), "too short"),
        (lambda: renewal.survives(7, 1), "even"), (lambda: renewal.survives(8, 9), "more than"),
        (lambda: renewal.survives(8, 2, "star"), "placement"), (lambda: renewal.best_interval_s(60, 0), "mtbf_s"),
    ],
)  # fmt: skip
def test_wrong_arguments(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
