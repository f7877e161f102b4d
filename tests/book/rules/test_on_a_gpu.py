"""The rules over a GPU follow what it was measured to do."""

from pathlib import Path

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims import ledger
from tq.book.claims.rules import on_a_gpu as rules

ON_GPU: dict[str, s.Values] = {
    rules.CHAPTER: {
        "read/8-mib": 7.5, "read/16-mib": 7.4, "read/32-mib": 7.0, "card/second-level": 52.4,
        "away/update-on-the-host": 1.3, "away/moments-streamed": 1.1, "split/same": True, "split/over": 70.0,
        **s.every("over/{}/pytorch-reference", ("encode", "decode"), 2.9),
    }
}  # fmt: skip
TURNS: list[s.Turn] = [
    ("S3-042", {}, F),
    ("S3-042", {"card/second-level": 62.9}, P),
    ("S3-042", {"read/32-mib": 9.0}, P),
    ("S3-042", {"card/second-level": 62.9, "read/8-mib": 5.5, "read/16-mib": 5.5, "read/32-mib": 5.5}, N),
    ("S1-007", {}, F),
    ("S1-007", {"away/update-on-the-host": 1.7, "away/moments-streamed": 1.25}, P),
    ("S1-007", {"away/update-on-the-host": 1.7}, N),
    ("S1-037", {}, F),
    ("S1-037", {"split/same": False}, N),
    ("T-013", {}, F),
    ("T-013", {"over/decode/pytorch-reference": 1.9}, P),
    ("T-013", s.every("over/{}/pytorch-reference", ("encode", "decode"), 1.9), N),
]

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, {}, TURNS, on_gpu=ON_GPU, fewer={"S1-037": 2}
)


def test_a_cpu_decides_nothing_of_it(root: Path) -> None:
    s.put(root, rules.CHAPTER, ON_GPU[rules.CHAPTER], "cpu")
    assert s.verdict("S1-007").verdict == ledger.NOT_MEASURED
