"""Arms beside a baseline: the tests count the arms, and what is recorded is what was found."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tq.book.record import figures, intervals
from tq.lab.equivalence import equivalence
from tq.lab.judged import judge, record, rows, slug
from tq.train.experiments.own_rates import Tuned
from tq.train.experiments.paired_runs import Run

MARGIN = 0.003
BASE = [2.0, 2.1, 2.2, 2.3]


def _arm(shifts: list[float], seed: int = 100, **run: Any) -> Tuned:
    outcomes = [
        {"valid": loss + shift, "bits": 32 * 0.2 + 4.25 * 0.8, "drift": abs(shift)}
        for loss, shift in zip(BASE, shifts, strict=True)
    ]
    tuning = {1e-3: 2.5, 2e-3: 2.4, 4e-3: 2.6}
    chosen = {"variant": "gradient", "lr": 2e-3, "steps": 200, "warmup": 40, **run}
    return Tuned(Run(seed=seed, **chosen), tuning, outcomes)


ARMS = {
    "4 bits": _arm([0.0005, 0.0007, 0.0004, 0.0006]),
    "near": _arm([0.0005, 0.0025, -0.0012, 0.0019]),
    "far": _arm([0.1, 0.2, 0.1, 0.2]),
    "lost": _arm([math.nan, 0.1, 0.1, 0.1]),
}
OWN = ARMS | {"far": _arm([0.05, 0.1, 0.05, 0.1], lr=4e-3)}
FP32 = _arm([0.0] * 4, variant="exact", warmup=0)


class _Ledger(dict[str, Any]):
    def record(self, key: str, value: Any, unit: str = "1", **more: Any) -> Any:
        self[key] = value
        return value


def test_the_number_of_arms_makes_each_test_harder() -> None:
    alone = judge({"near": ARMS["near"]}, OWN, FP32, MARGIN)["near"]
    among = judge(ARMS, OWN, FP32, MARGIN)
    p = equivalence(ARMS["near"].losses, FP32.losses, MARGIN).p
    assert alone.p == pytest.approx(p) and among["near"].p == pytest.approx(3 * p)
    assert among["4 bits"].equivalent and not among["far"].equivalent and not among["lost"].equivalent
    assert among["far"].own.at_an_end and not among["4 bits"].own.at_an_end
    assert among["far"].own_gap.mean == pytest.approx(0.075) and among["near"].own_gap == among["near"].gap


def test_bits_are_those_after_the_start() -> None:
    found = judge(ARMS, OWN, FP32, MARGIN)["4 bits"]
    assert found.sent == pytest.approx(4.25) and found.drift == pytest.approx(0.0007)
    assert judge({"fp32": FP32}, {"fp32": FP32}, FP32, MARGIN)["fp32"].sent == 32


def test_what_was_found_is_recorded_and_shown_in_the_table_and_the_figure() -> None:
    found, ledger = judge(ARMS, OWN, FP32, MARGIN), _Ledger()
    record(ledger, found, "formats/")
    assert ledger["formats/4-bits/gap"] == pytest.approx(0.00055) and ledger["formats/4-bits/equivalent"] is True
    assert ledger["formats/lost/gap"] is None and ledger["formats/lost/gap-high"] is None
    assert ledger["formats/far/lr-at-an-end"] is True and ledger["formats/far/lr"] == 4e-3
    assert ledger["formats/far/gap"] == pytest.approx(0.15) and ledger["formats/far/own-gap"] == pytest.approx(0.075)
    table = rows(found)
    assert table["4 bits"]["within 0.003"] == "shown" and table["lost"]["loss gap as a drop-in"] == "not finite"
    assert table["far"]["own rate"] == "0.004 (end)" and table["near"]["own rate"] == "0.002"
    short = intervals.rows(found)
    assert short["4 bits"]["bits sent per element"] == "4.25"
    places = {name: row["margin ±0.003"] for name, row in short.items()}
    assert places == {"4 bits": "within", "near": "undecided", "far": "outside", "lost": "outside"}
    assert short["near"]["at its own rate"] == "the same" and short["lost"]["loss gap, nats"] == "not finite"
    assert short["far"]["at its own rate"].endswith("at 0.004, end of the grid")
    _, ax = figures.figure("half")
    intervals.draw(ax, found, {"far": "int4"}, linear=0.01)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["4 bits, 7.5×", "near, 7.5×", "far, 7.5×"]  # what is not finite has no place
    assert all(ax.get_xlim()[0] <= t <= ax.get_xlim()[1] for t in ax.get_xticks())
    assert intervals.message(found, "arms") == "1 of 4 arms is equivalent to fp32 within ±0.003 nats"


def test_runs_of_one_worker_send_nothing() -> None:
    alone = _arm([0.0005, 0.0007, 0.0004, 0.0006], workers=1)
    found, ledger = judge({"4 bits": alone}, {"4 bits": alone}, _arm([0.0] * 4, workers=1), MARGIN), _Ledger()
    assert found["4 bits"].sent is None and found["4 bits"].drift is None
    record(ledger, found)
    assert "4-bits/gap" in ledger and "4-bits/sent" not in ledger and "4-bits/drift" not in ledger
    assert "bits sent" not in rows(found)["4 bits"]


def test_other_seeds_are_no_pairs_and_names_become_keys() -> None:
    for wrong, said in ((_arm([0.0] * 4, seed=101), "other seeds"), (_arm([0.0] * 4, lr=4e-3), "the rate 0.004")):
        with pytest.raises(ValueError, match=said):
            judge({"moved": wrong}, {"moved": wrong}, FP32, MARGIN)
    assert slug("top-k 1 %") == "top-k-1-pc" and slug("gradient 4/4") == "gradient-4-4"
    assert slug("published, no feedback") == "published-no-feedback"
