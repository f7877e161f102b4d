"""The closed forms against the models that they simplify, and the laws that a reader would expect of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

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
