"""The closed forms against the models that they simplify, and the laws that a reader would expect of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tq.economics import breakeven
from tq.economics import calculator as calc
from tq.systems import Bits, Compression, Layout, Transformer, memory

GIB = 2.0**30


def value(field: calc.Field) -> st.SearchStrategy[float]:
    if field.choices:
        return st.sampled_from([each for each, _ in field.choices])
    if field.whole:
        return st.integers(int(field.low), int(min(field.high, 1e6))).map(float)
    return st.floats(field.low, field.high)


def cases(name: str, **fixed: float) -> st.SearchStrategy[dict[str, float]]:
    fields = {field.name: value(field) for field in calc.FIELDS[name]}
    return st.fixed_dictionaries(fields | {key: st.just(each) for key, each in fixed.items()})


@given(cases("savings"))
def test_savings_are_finite_ordered_and_never_negative_in_cost(case: dict[str, float]) -> None:
    try:
        found = calc.savings(case)
    except ValueError as error:
        assert any(word in str(error) for word in ("gpus_per_replica", "base_bits"))
        return
    assert all(each is None or math.isfinite(each) for each in found.values())
    n = {name: each for name, each in found.items() if each is not None}
    assert n["plain_s"] > 0 and n["coded_s"] > 0 and n["plain_usd"] > 0 and n["coded_usd"] > 0
    slack = 1e-9 * (1 + abs(n["saving"]))
    assert n["saving_low"] - slack <= n["saving"] <= n["saving_high"] + slack
    money = 1e-9 * n["plain_usd"] * case["overhead"] / (1 - case["uncertainty"])
    assert n["saved_usd_low"] - money <= n["saved_usd"] <= n["saved_usd_high"] + money
    assert 0 <= n["share"] < 1 or n["share"] == pytest.approx(1)


@given(cases("savings", uncertainty=0.3), st.floats(0, 1), st.floats(0, 1))
def test_every_case_within_the_uncertainty_lies_in_the_interval(case: dict[str, float], a: float, b: float) -> None:
    try:
        whole = calc.savings(case)
        inside = dict(case, link_gbit=case["link_gbit"] * (0.7 + 0.6 * a), tflops=case["tflops"] * (0.7 + 0.6 * b))
        one = calc.savings(inside)
    except ValueError:
        return
    for name in ("saving", "saved_usd"):
        low, at, high = whole[f"{name}_low"], one[name], whole[f"{name}_high"]
        assert low is not None and at is not None and high is not None
        slack = 1e-9 * (abs(low) + abs(high) + 1)
        assert low - slack <= at <= high + slack


@given(cases("savings", base_bits=16.0, overlap=0.0, bits=4.0), st.floats(1.01, 3))
def test_cost_rises_with_price_and_overhead(case: dict[str, float], more: float) -> None:
    try:
        base = calc.savings(case)
    except ValueError:
        return
    dearer = calc.savings(dict(case, usd_per_gpu_hour=min(case["usd_per_gpu_hour"] * more, 1e4)))
    slower = calc.savings(dict(case, overhead=min(case["overhead"] * more, 100)))
    assert dearer["plain_usd"] >= base["plain_usd"] and dearer["coded_usd"] >= base["coded_usd"]  # type: ignore[operator]
    assert slower["saving"] <= base["saving"]  # type: ignore[operator]


def test_without_overlap_savings_are_amdahl_s() -> None:
    case = calc.defaults("savings")
    found = calc.savings(case)
    expected = breakeven.saving(found["share"], found["ratio"], case["overhead"])  # type: ignore[arg-type]
    assert found["saving"] == pytest.approx(float(expected))
    limit = breakeven.breakeven_overhead(found["share"], found["ratio"])  # type: ignore[arg-type]
    assert found["breakeven_overhead"] == pytest.approx(float(limit))
    at_limit = calc.savings(dict(case, link_gbit=found["breakeven_gbit"] or 0.0))
    assert at_limit["saving"] == pytest.approx(0, abs=1e-9)


def test_pays_says_yes_depends_and_no() -> None:
    case = calc.defaults("savings")
    links = (25.0, 243.0, 1e6)
    assert [calc.savings(dict(case, link_gbit=link))["pays"] for link in links] == [1.0, 0.0, -1.0]
    assert calc.savings(dict(case, overhead=1.0))["breakeven_gbit"] is None
    assert calc.savings(dict(case, link_gbit=1e6))["pays"] == -1.0


RECOMPUTE = ("none", "selective", "full")


@given(cases("memory", coded=1.0))
def test_memory_is_that_of_the_systems_model(case: dict[str, float]) -> None:
    case = dict(case, layers=1 + case["layers"] % 100, heads=8 * (1 + case["heads"] % 16), tp=2 ** (case["tp"] % 4))
    case |= {"hidden": case["heads"] * (1 + case["hidden"] % 200), "pp": 1 + case["pp"] % 8, "dp": 1 + case["dp"] % 64}
    case |= {"seq": 1 + case["seq"] % 10_000, "micro_batch": 1 + case["micro_batch"] % 8, "scale_bits": 32.0}
    case |= {"micro_batches": 1 + case["micro_batches"] % 64, "block": 128.0}
    assume(case["pp"] <= case["layers"])
    found = calc.memory(case)
    n = {name: int(each) for name, each in case.items()}
    shape = Transformer(n["layers"], n["hidden"], n["heads"], n["vocab"], n["seq"])
    layout = Layout(
        n["tp"], n["pp"], n["dp"], n["micro_batch"], n["dp"] * n["micro_batch"] * n["micro_batches"],
        RECOMPUTE[n["recompute"]], bool(n["sequence_parallel"]), zero=n["zero"],
    )  # fmt: skip
    for coded in (False, True):
        compression = Compression(activations=Bits(n["bits"])) if coded else None
        held = memory(shape, layout, compression=compression, gradient_bytes=n["gradient_bytes"], stage="first")
        assert found["weights_gib"] == pytest.approx(held.weights / GIB, rel=0.02)
        assert found["gradients_gib"] == pytest.approx(held.gradients / GIB, rel=0.02)
        assert found["states_gib"] == pytest.approx(held.states / GIB, rel=0.02)
        name = "coded_activations_gib" if coded else "activations_gib"
        assert found[name] == pytest.approx(held.activations / GIB, rel=0.02)
        name = "coded_total_gib" if coded else "total_gib"
        assert found[name] == pytest.approx(held.total / GIB, rel=0.05)


def test_the_largest_batch_just_fits() -> None:
    case = calc.defaults("memory")
    found = calc.memory(case)
    room = case["gpu_gib"] - case["reserve_gib"]
    for name, total in (("largest_batch", "total_gib"), ("coded_largest_batch", "coded_total_gib")):
        batch = found[name]
        assert batch is not None and batch >= 1
        assert calc.memory(dict(case, micro_batch=batch))[total] <= room  # type: ignore[operator]
        assert calc.memory(dict(case, micro_batch=batch + 1))[total] > room  # type: ignore[operator]
    assert calc.memory(dict(case, gpu_gib=8.0))["largest_batch"] == 0


def test_memory_falls_with_the_zero_stage() -> None:
    totals = [calc.memory(calc.defaults("memory") | {"zero": float(stage)})["total_gib"] for stage in range(3)]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 3  # type: ignore[type-var]


@pytest.mark.parametrize("bits", range(1, 9))
def test_codec_takes_the_distortion_that_it_is_given(bits: int) -> None:
    found = calc.codec(calc.defaults("codec") | {"bits": float(bits)}, {bits: 0.2})
    assert found["nmse"] == 0.2 and found["nmse_unbiased"] == pytest.approx(0.25)
    assert found["bytes"] == math.ceil(1e6 / 128) * (16 * bits + 4)
    assert found["ratio_fp32"] == pytest.approx(2 * found["ratio_bf16"])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("savings", {"overlap": 1.5}, "overlap must be a number from 0 to 1, got 1.5"),
        ("savings", {"gpus": 2.5}, "gpus must be an int from 1"),
        ("savings", {"gpus": -4.0}, "gpus must be"),
        ("savings", {"base_bits": 8.0}, "base_bits must be one of 16, 32"),
        ("savings", {"tflops": float("nan")}, "tflops must be"),
        ("savings", {"tflops": "fast"}, "tflops must be"),
        ("savings", {"gpus_per_replica": 512.0}, "gpus_per_replica must be at most gpus=256"),
        ("savings", {"base_bits": 16.0, "bits": 8.0, "block": 2.0}, "bits must leave less than base_bits=16"),
        ("savings", {"colour": 1.0}, "unknown: colour"),
        ("memory", {"heads": 60.0}, "heads must divide hidden=8192, got 60"),
        ("memory", {"tp": 7.0}, "tp must divide heads=64, got 7"),
        ("memory", {"pp": 100.0}, "pp must be at most layers=80"),
        ("memory", {"zero": 4.0}, "zero must be one of"),
    ],
)
def test_bad_input_is_named(name: str, change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(calc, name)(calc.defaults(name) | change)


def test_a_missing_field_is_named() -> None:
    case = calc.defaults("memory")
    del case["tp"]
    with pytest.raises(ValueError, match="missing: tp"):
        calc.memory(case)
