"""A real barrier with injected jitter takes what the slowest takes, and a little more."""

import pytest

from tq.lab import barriers
from tq.systems.synchronisation import expected_max


@pytest.mark.xdist_group("ranks")
def test_a_barrier_waits_for_the_slowest() -> None:
    found = barriers.measure({"ranks": 3, "steps": 30, "kind": "exponential", "spread_s": 0.02, "seed": 1})
    assert found["slowest_s"] <= found["mean_s"] < found["slowest_s"] + 0.03
    assert found["error_s"] > 0


@pytest.mark.parametrize("kind", ["normal", "exponential"])
def test_drawn_times_have_the_maximum_of_theory(kind: str) -> None:
    drawn = barriers.drawn(kind, 0.02, 8, 20_000)
    mean = 0.1 if kind == "normal" else 0.02
    assert drawn.max(1).mean() == pytest.approx(mean + 0.02 * expected_max(8, kind), rel=0.01)
    assert drawn.min() >= 0 and (barriers.drawn(kind, 0.02, 8, 20_000) == drawn).all()


def test_other_jitter_is_refused() -> None:
    with pytest.raises(ValueError, match="kind"):
        barriers.drawn("cauchy", 0.1, 2, 2)


def test_staggered_ranks_come_one_after_the_other() -> None:
    drawn = barriers.drawn("staggered", 0.01, 4, 50)
    assert (sorted(drawn[0].tolist()), drawn.max()) == ([0.01, 0.02, 0.03, 0.04], 0.04)
    assert len({tuple(row) for row in drawn.tolist()}) > 10  # in another order in each step
