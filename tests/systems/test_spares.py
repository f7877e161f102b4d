"""Spare and slow nodes against simulations and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tq.systems.spares import best_spares, jitter_factor, slow_nodes_factor, waiting_share


def test_waiting_share_is_the_tail_of_poisson() -> None:
    from scipy.stats import poisson

    for nodes, spares, life, repair in (
        (8, 0, 1e6, 1e4), (1000, 4, 5e7, 86_400), (2048, 20, 3e7, 2e5), (200_000, 2000, 2.28e7, 86_400)
    ):  # fmt: skip
        expected = poisson.sf(spares, nodes * repair / life)
        exact = 1e-12 if nodes < 10_000 else 1e-11
        assert waiting_share(nodes, spares, life, repair) == pytest.approx(expected, abs=exact)
    assert waiting_share(100, 0, 1e6, 0.0) == 0


def test_waiting_share_against_failures_that_are_replayed() -> None:
    rng = np.random.default_rng(5)
    nodes, spares, life, repair, until = 50, 2, 1e5, 2_000.0, 4e7
    starts = np.sort(rng.uniform(0, until, rng.poisson(nodes * until / life)))
    ends = starts + rng.uniform(0, 2 * repair, len(starts))  # not exponential: only its mean matters
    times = np.concatenate([starts, ends])
    order = np.argsort(times)
    broken = np.cumsum(np.repeat([1, -1], len(starts))[order])
    share = np.diff(times[order])[broken[:-1] > spares].sum() / until
    assert waiting_share(nodes, spares, life, repair) == pytest.approx(share, rel=0.06)


def test_best_spares_is_best() -> None:
    clusters = ((16, 1e6, 1e4), (1000, 5e7, 86_400), (2048, 2e7, 86_400), (4, 1e9, 1.0), (200_000, 2.28e7, 86_400))
    for nodes, life, repair in clusters:
        def useful(spares: int) -> float:
            return nodes / (nodes + spares) * (1 - waiting_share(nodes, spares, life, repair))  # noqa: B023

        best = best_spares(nodes, life, repair)
        assert useful(best) == max(useful(spares) for spares in range(best + 60))


def test_slow_nodes() -> None:
    assert slow_nodes_factor(1, 0.25, 3.0) == pytest.approx(1.5)
    assert slow_nodes_factor(10_000, 0.01, 2.0) == pytest.approx(2.0)
    assert slow_nodes_factor(5, 0.0, 2.0) == 1 and slow_nodes_factor(5, 1.0, 2.0) == 2


def test_jitter() -> None:
    rng = np.random.default_rng(1)
    for nodes, spread in ((1, 0.3), (16, 0.1), (1024, 0.05)):
        drawn = np.exp(spread * rng.standard_normal((4000, nodes))).max(1)
        error = drawn.std() / math.sqrt(len(drawn))
        assert abs(jitter_factor(nodes, spread) - drawn.mean()) < 4 * error
    assert jitter_factor(1, 0.5) == pytest.approx(math.exp(0.125), rel=1e-6)
    assert jitter_factor(7, 0.0) == 1


@pytest.mark.parametrize(
    "call",
    (
        lambda: waiting_share(0, 1, 1.0, 1.0),
        lambda: waiting_share(1, -1, 1.0, 1.0),
        lambda: waiting_share(1, 1, 0.0, 1.0),
        lambda: slow_nodes_factor(1, 1.5, 2.0),
        lambda: slow_nodes_factor(1, 0.5, 0.5),
        lambda: jitter_factor(1, -0.1),
    ),
)
def test_errors(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError):
        call()
