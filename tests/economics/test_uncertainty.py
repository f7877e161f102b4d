"""Monte-Carlo, tornado and variance shares against functions whose answers are known."""

from __future__ import annotations

import importlib.util
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq.economics.intervals import Interval
from tq.economics.uncertainty import SHAPES, Uncertain, monte_carlo, sample, sobol, tornado

UNIT = {name: Uncertain(-math.pi, 0, math.pi, "uniform") for name in "xyz"}


def ishigami(x, y, z):
    return np.sin(x) + 7 * np.sin(y) ** 2 + 0.1 * z**4 * np.sin(x)


@pytest.mark.parametrize("shape", SHAPES)
@given(low=st.floats(0.1, 10), up=st.floats(0, 5), more=st.floats(0, 5))
def test_quantiles_rise_and_stay_inside(shape: str, low: float, up: float, more: float) -> None:
    each = Uncertain(low, low + up, low + up + more, shape)
    values = each.at(np.linspace(0, 1, 101))
    assert np.all(np.diff(values) >= -1e-12) and np.all(np.isfinite(values))
    if shape != "quantiles":
        assert values.min() >= low - 1e-9 and values.max() <= each.high + 1e-9


def test_what_the_shapes_promise() -> None:
    tenths = np.array([0.1, 0.5, 0.9])
    assert Uncertain(2, 3, 9, "quantiles").at(tenths).tolist() == pytest.approx([2, 3, 9])
    assert Uncertain(2, 3, 9, "halves").at(np.array([0.25, 0.5, 0.75])).tolist() == pytest.approx([2.5, 3, 6])
    assert Uncertain(1, 2, 100, "loguniform").at(np.array([0.5])) == pytest.approx(10)
    drawn = monte_carlo(lambda a: a, {"a": Uncertain(0, 1, 5)}, 20_000).values
    assert drawn.mean() == pytest.approx(2, rel=1e-3) and drawn.var() == pytest.approx((25 + 1 - 5) / 18, rel=1e-2)


def test_a_latin_hypercube_has_one_sample_a_slice_and_a_seed() -> None:
    inputs = {"a": Uncertain(0, 0.5, 1, "uniform"), "b": Uncertain(0, 0.5, 1, "uniform")}
    drawn = sample(inputs, 500, seed=3)
    assert sorted((drawn["a"] * 500).astype(int)) == list(range(500))
    assert abs(np.corrcoef(drawn["a"], drawn["b"])[0, 1]) < 0.15
    assert np.array_equal(drawn["a"], sample(inputs, 500, seed=3)["a"])
    assert not np.array_equal(drawn["a"], sample(inputs, 500, seed=4)["a"])


def test_interval_of_a_sum_of_many_is_the_normal_one() -> None:
    inputs = {f"u{i}": Uncertain(0, 0.5, 1, "uniform") for i in range(12)}  # variance 1 in all
    found = monte_carlo(lambda **u: sum(u.values()), inputs)
    interval = found.interval()
    assert interval.high - interval.low == pytest.approx(2 * 1.2816, rel=0.03)
    assert found.share(6.0) == pytest.approx(0.5, abs=0.02)


def test_ten_thousand_samples_are_quick() -> None:
    start = time.process_time()
    monte_carlo(ishigami, UNIT, 10_000)
    assert time.process_time() - start < 2


def test_tornado_of_a_product() -> None:
    bars = tornado(
        lambda a, b, c: a * b + 0 * c, {"a": Uncertain(1, 2, 3), "b": Uncertain(5, 10, 30), "c": Uncertain(0, 1, 2)}
    )
    assert [bar.name for bar in bars] == ["b", "a", "c"]
    assert (bars[0].at_low, bars[0].at_high, bars[0].middle, bars[1].swing, bars[2].swing) == (10, 60, 20, 20, 0)


@pytest.mark.parametrize("use_salib", [False, None])
def test_variance_shares_of_the_ishigami_function(use_salib: bool | None) -> None:
    found = sobol(ishigami, UNIT, 1 << 14, use_salib=use_salib)
    v = 0.5 + 49 / 8 + 0.1 * math.pi**4 / 5 + 0.01 * math.pi**8 / 18
    v_x, v_y = 0.5 * (1 + 0.1 * math.pi**4 / 5) ** 2, 49 / 8
    v_xz = 0.01 * math.pi**8 * (1 / 18 - 1 / 50)
    assert list(found.first.values()) == pytest.approx([v_x / v, v_y / v, 0], abs=0.03)
    assert list(found.total.values()) == pytest.approx([(v_x + v_xz) / v, v_y / v, v_xz / v], abs=0.03)
    installed = importlib.util.find_spec("SALib") is not None
    assert (found.method == "SALib") == (installed and use_salib is not False)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Uncertain(2, 1, 3), "low <= mid <= high"),
        (lambda: Uncertain(1, math.nan, 3), "finite"),
        (lambda: Uncertain(1, 2, 3, "bell"), "shape must be one of"),
        (lambda: Uncertain(0, 1, 2, "loguniform"), "low must be positive"),
        (lambda: Uncertain.around(1, 1.0), "relative must be within"),
        (lambda: monte_carlo(ishigami, {}), "at least one"),
        (lambda: monte_carlo(ishigami, UNIT, 1), "samples must be an int"),
        (lambda: monte_carlo(lambda x, y, z: x / 0 * np.inf, UNIT), "not finite"),
        (lambda: monte_carlo(ishigami, UNIT).interval(1), "level must be within"),
        (lambda: sobol(ishigami, UNIT, 100), "power of two"),
        (lambda: sobol(lambda x, y, z: 0 * x, UNIT, 64, use_salib=False), "does not depend"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero|invalid value:RuntimeWarning")
def test_bad_input_is_named(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1e-3, 1e3))
def test_units_of_an_interval_round_trip(a: float, b: float, c: float, unit: float) -> None:
    low, mid, high = sorted((a, b, c))
    back = Interval(low, mid, high) * unit * (1 / unit)
    assert (back.low, back.mid, back.high) == pytest.approx((low, mid, high))
    assert mid in Interval(low, mid, high)
