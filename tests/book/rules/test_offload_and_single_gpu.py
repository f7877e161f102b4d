"""The rules over offloading follow results that only a GPU gives, and what the document itself says."""

import dataclasses
from pathlib import Path

import pytest

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P, X
from tq.book.claims import ledger
from tq.book.claims.rules import offload_and_single_gpu as rules

APART = ("S1-001", "S1-002", "S1-004", "S1-018")
BY_HAND = {
    "S1-006": (75.07, 87.5),  # activations of `tq.systems.memory`, which its own tests count
    "S1-008": (85.46, 99.61),
    "S1-009": (390.6,),  # 24 / 5e9 s a parameter over 6 * 16,384 / 80e12
    "S1-015": (390.6, 640),
    "S1-019": (14, 1.75),
    "S1-020": (0.125, 47_529),  # 2 TB / 16; 6 * 1e12 * 20e12 / 80e12 / 3.156e7
    "S1-023": (36.11, 140, 1120),
    "S1-024": (1.960, 4.312),  # 5,366.8 dollars in 26,298 hours at 80 TFLOP/s
    "S1-030": (640, 40),
    "S1-031": (600, 2_400),
    "S1-032": (0.1872,),  # a thousand steps of 491.5 s: 6 * 1e11 * 65,536 / 80e12
    "S3-052": (8, 9.286),
    "S3-055": (0.025, 0.09412),
    "S3-056": (0.175, 1.4),
    "S3-057": (1.75, 0.85, 0.325),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)


@pytest.mark.parametrize(
    ("billions", "wanted", "said"),
    [
        ("14", F, "take 0.2 TB of drives"),  # 120 N^2 operations at 80 TFLOP/s are 9.3 years
        ("15", P, "take 11 years"),
        ("100", P, "take 475 years"),
        ("1,000", P, "take 16.0 TB of drives"),
        ("1,100", N, "take 17.6 TB of drives"),
    ],
)
def test_to_hold_a_model_is_not_to_train_it(billions: str, wanted: str, said: str) -> None:
    judged = rules.on_one_card(dataclasses.replace(ledger.claim("S1-001"), value=billions), ledger.Results())
    assert judged.verdict == wanted and said in judged.condition and judged.formula


def test_the_documents_own_methods_count(root: Path) -> None:
    assert s.verdict("S1-002").verdict == N and "8-bit optimizers" in s.verdict("S1-002").condition
    path = root / "data" / "claims.csv"
    path.write_text(path.read_text(encoding="utf-8").replace("8-bit optimizer", "paged optimizer"), encoding="utf-8")
    assert s.verdict("S1-002").verdict == F


def test_what_cannot_be_checked_says_why(root: Path) -> None:
    assert s.verdict("S1-004").verdict == X and "not defined" in s.verdict("S1-004").condition
    found = s.verdict("S1-018")
    assert found.verdict == X
    assert "36.1 GB at 4.127 bits per parameter and do not fit the card's 24 GB" in found.condition
    smaller = rules.tuned_on_one_card(dataclasses.replace(ledger.claim("S1-018"), value="40"), ledger.Results())
    assert smaller.verdict == X
    assert "20.6 GB at 4.127 bits per parameter and fit the card's 24 GB" in smaller.condition
