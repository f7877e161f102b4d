"""What the studies of simulated events return, on small models."""

import pytest

from tq.lab import event_study

MODEL = {"objects": 64, "population": 4, "end": 10.0, "lookahead": 0.1}


def test_engines_agree_and_a_wrong_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"model": MODEL, "processors": 8}
    found = event_study.agree(task)
    assert found["equal"] and found["events"] > 2000 and set(found["seconds"]) == {
        "sequential", "conservative", "optimistic"
    }  # fmt: skip
    other = event_study.sequential(event_study.Phold(**MODEL | {"seed": 1}))
    monkeypatch.setattr(event_study, "sequential", lambda model: other)
    assert not event_study.agree(task)["equal"]


def test_waste_by_lookahead() -> None:
    few, many = (
        event_study.wasted({"model": MODEL | {"lookahead": x}, "processors": 16, "barrier": 1.0}) for x in (0.01, 0.5)
    )
    assert few["conservative"] < many["conservative"] and few["barriers"] > many["barriers"]
    assert 0 <= few["undone"] < 1 and few["undone-held"] <= few["undone"] and 0 < few["messages"] < 1


def test_negative_scaling_is_where_the_law_says() -> None:
    task = {
        "model": {"objects": 256, "population": 8, "end": 4.0, "lookahead": 0.2},
        "processors": [1, 2, 4, 8, 16, 32, 64, 128, 256], "per_rank": 0.5, "per_doubling": 0.5,
    }  # fmt: skip
    found = event_study.scaling(task)
    assert 0.5 <= found["best_linear"] / found["n_star"] <= 2
    assert found["linear"][-1] > 1.2 * min(found["linear"]) and found["best_tree"] > found["best_linear"]


def test_ring() -> None:
    found = event_study.ring({"sites": 500, "rounds": 300, "warm": 300})
    assert found["utilisation"] == pytest.approx(0.2465, abs=0.01)
