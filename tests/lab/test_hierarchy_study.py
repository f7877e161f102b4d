"""The tasks of the chapter on memories: what they return is what their instruments say, and plain JSON."""

import json
from typing import Any

import pytest

from tq.lab import hierarchy
from tq.lab import hierarchy_study as study
from tq.systems import tiers


def plain(task: dict[str, Any]) -> dict[str, Any]:
    found = study.measure(task)
    assert json.loads(json.dumps(found)) == found and found["task"] == task
    return found


@pytest.mark.parametrize("layers", [2, 5])
def test_a_fused_update_makes_a_step_go_forward_and_back(layers: int) -> None:
    fused, swept = (plain(dict(what="recorded", layers=layers, fused=fused, seed=0)) for fused in (True, False))
    there, back = list(range(layers)), list(range(layers - 1))[::-1]
    assert fused["trace"] == there + back and swept["trace"] == there + back + there[1:]
    assert swept["peak"]["gradient"] >= swept["bytes"]["gradient"] == fused["bytes"]["gradient"]  # embedding beside it
    assert fused["peak"]["gradient"] < swept["peak"]["gradient"] / layers
    assert fused["peak"]["activation"] == swept["peak"]["activation"] > 0


def test_misses_per_layer_are_those_worked_out_before() -> None:
    forward_and_back = [*range(24), *range(22, -1, -1)]
    assert study.misses_per_layer(forward_and_back, 12, "lru") == study.misses_per_layer(forward_and_back, 12, "belady")
    swept = [*forward_and_back, *range(1, 24)]
    least = {policy: study.misses_per_layer(swept, 12, policy) for policy in tiers.POLICIES}
    assert least["belady"] == min(least.values()) > 1.4 and least["lru"] > 1.9


def test_attention_counts_both_ways() -> None:
    found = plain(dict(what="attention", tokens=256, head_size=64, seed=0))
    assert found["error"] < 1e-12 and found["plain"]["peak"] == 2 * 256 * 256 * 4
    assert found["tiled"]["peak"] < found["plain"]["peak"] / 4 and found["tiled"]["moved"] < found["plain"]["moved"]


def test_products_and_levels_are_measured() -> None:
    found = plain(dict(what="product", n=96, block=32, seed=0))
    assert set(found["seconds"]) == set(hierarchy.WAYS) and found["error"] < 1e-4
    slow = plain(dict(what="latency", sizes=[4096, 8192], huge=True, steps=20_000, seed=0))
    assert len(slow["seconds"]) == 2 and all(x > 0 for x in slow["seconds"])
    assert len(slow["huge_share"]) == 2 and all(x is None or 0 <= x <= 1 for x in slow["huge_share"])
    assert {"read", "write", "direct"} <= set(plain(dict(what="disk", nbytes=1 << 16, depth=2)))


def test_a_point_of_the_cliff_says_what_it_is_over_its_hit() -> None:
    found = plain(dict(what="cliff", block=4096, capacity=16, ratio=1.25, trace="cyclic", policy="lru"))
    assert found["misses"] == 1 and found["blocks"] == 20
    assert found["slowdown"] == pytest.approx(found["access_s"] / found["hit_s"])
    assert found["modelled"] == pytest.approx(found["miss_s"] / found["hit_s"])
    assert {"plain_s", "ahead_s", "in_memory_s", "read_s"} <= set(
        plain(dict(what="ahead", block=1 << 16, capacity=4, ratio=1.5, factor=1.0))
    )


def test_a_streamed_run_stands_beside_its_forecast_and_its_twin() -> None:
    (task,) = study.streams(False)
    found = plain(task | {"beside": True})
    assert found["same"] and found["forecast_s"] > 0 and found["measured_s"] > 0 and found["memory_s"] > 0
    assert 0 <= found["waited"] < 1 and found["binds"] in ("disk", "compute") and found["trial_s"] > 0


def test_a_pair_has_both_sides() -> None:
    run = dict(layers=2, hidden=64, seq=32, batch=1, steps=4, impl="reference")
    for sides in (study.pages(True)[0]["sides"], study.codes(True)[0]["sides"]):
        fixed = {} if "codes" in sides else {"state": None}
        found = plain(dict(what="paired", run=run | fixed, sides=sides, first=False, turn=0))
        assert all(found[f"{name}_s"] > 0 and 0 <= found[f"{name}_waited"] < 1 for name in sides)


def test_a_run_that_fails_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    none = {"refused": "killed"}
    monkeypatch.setattr(study.streaming, "forecast_and_measured", lambda folder, **run: none)
    with pytest.raises(RuntimeError, match="killed"):
        study.streamed(False, {})


def test_the_full_plan_holds_what_was_declared() -> None:
    assert len({(r["run"]["hidden"], r["run"]["seq"], r["run"]["layers"], str(r["run"]["state"]))
                for r in study.streams(True)}) >= 8  # fmt: skip
    assert {r["run"].get("clip") for r in study.streams(True)} == {None, 1.0}
    for pairs in (study.pages(True), study.codes(True)):
        assert [(p["turn"], p["first"]) for p in pairs] == list(zip(range(6), 3 * (True, False), strict=True))
    assert {(t["n"], t["block"], "naive" in t.get("ways", ["naive"])) for t in study.products(True, 0)} >= {
        (1024, 64, True), (1024, 256, False), (4096, 256, False)}  # fmt: skip
    assert {t["run"]["steps"] for t in study.ceilings(True) if t["run"]["layers"] == 320} == {20}
    points = study.cliffs(True)
    assert {t["block"] for t in points} == set(study.NAMES) and {0.9, 1.1} <= {t["ratio"] for t in points}
    json.dumps([study.levels(True, 0), points, study.streams(True), study.ceilings(True)])
