"""Rules over sharding, pipelines and layouts."""

from pathlib import Path

import pytest

from tests.book import helpers as h
from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims import ledger
from tq.book.claims.rules import parallelism as rules

BY_HAND = {
    "S1-005": (1, 1.25),
    "S3-028": (46.67, 41.18, 9.859, 14.89),  # 7/15, 7/17, 7/71, 7/47
    "S3-031": (3.988, 7.946),  # 16 over 4 + 12/1024 and 2 + 14/1024
    "S4-045": (1,),
    "S4-050": (2_048,),
    "S4-051": (12.21,),
    "S4-052": (1, 16),
    "S4-054": (400, 800),
    "S4-060": (3.821,),
    "S4-061": (7.211,),
    "S4-062": (1.5,),
    # 10 * 6.738e9 / 8 + 4 * 6.738e9 / 32, + 2 * 4096^2 * 32 + .539e9 or 32 * .539e9, + 8 * 4096 * 32,000
    "S4-111": (11.93, 27.58),
    "S4-120": (9.643, 1.205, 1.0714),  # 15/14, times 450/50, times 450/400
    "S4-122": (18.80, 2.089),  # 57,344 B at 50 or 450 GB/s, over 2.415 GFLOP at .4 * 989 TFLOP/s
}  # fmt: skip

RESULTS = {
    rules.CHAPTER: {
        "idle/gpipe/4": 0.45, "idle/gpipe/8": 0.3, "idle/gpipe/16": 0.18,
        "proof/passed": 24.0, "proof/layouts": 24.0, "wire/small-equal": 34.0, "wire/small": 34.0,
        "bytes/agree": 21.0, "bytes/formulas": 21.0,
        "idle/1f1b/4": 0.44, "idle/1f1b/8": 0.29, "idle/1f1b/16": 0.17,
    },
}  # fmt: skip
TURNS: list[s.Turn] = [
    ("S4-119", {}, F),
    ("S4-119", {"wire/small-equal": 33.0}, P),
    ("S4-119", {"proof/passed": 23.0, "bytes/agree": 20.0}, N),
    ("S4-121", {}, P),
    ("S4-121", {"idle/1f1b/16": 0.1}, F),
    ("S4-121", {"idle/gpipe/8": 0.17}, N),
    ("S4-121", {"idle/1f1b/8": 0.44}, N),
]

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS, apart=("S4-047", "S4-048")
)
test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)

#: source, model, billions of parameters, tensor and pipeline ways. The last five do not count: a model that was there
#: already, a small one, one of unknown size, one that does not split, one that does not say.
RUNS = (
    "a,x,70,8,8", "a,y,20,8,16", "b,x,175,4,12", "a,x,70,8,8", "b,small,19,2,2", "c,unknown,,2,2", "c,whole,30,1,1",
    "c,silent,30,,",
)  # fmt: skip


def runs(root: Path, *changed: str) -> None:
    """Writes these runs; one that is given takes the place of that of the same source and model."""
    names = {tuple(run.split(",")[:2]) for run in changed}
    kept = [run for run in RUNS if tuple(run.split(",")[:2]) not in names]
    h.write(root / "data" / "published_runs.csv", "\n".join(["source,model,params_B,TP,PP", *kept, *changed]))


def test_all_other_rules_are_formulas() -> None:
    assert s.over_results(rules) == {"S4-047", "S4-048", "S4-119", "S4-121"}


@pytest.mark.parametrize(
    ("name", "changed", "wanted", "said"),
    [
        ("S4-047", (), F, "Of 3 published models of 20B parameters or more with tensor parallelism, 2 use 8 ranks"),
        ("S4-047", ("a,y,20,16,16",), N, "Of 3 published models"),
        ("S4-047", ("a,x,70,2,8", "a,y,20,2,16"), N, "0 use 8 ranks"),
        ("S4-048", (), F, "Of 3 published models of 20B parameters or more with pipeline parallelism, 3 use 8 to 16"),
        ("S4-048", ("b,x,175,4,64",), F, "2 use 8 to 16 stages"),
        ("S4-048", ("b,x,175,4,64", "a,x,70,8,4"), N, "1 use 8 to 16 stages"),
    ],
)
def test_layouts_are_those_that_most_large_models_publish(
    root: Path, name: str, changed: tuple[str, ...], wanted: str, said: str
) -> None:
    runs(root, *changed)
    found = s.verdict(name)
    assert found.verdict == wanted and said in found.condition
    assert found.basis == ledger.PRINTED and "data/published_runs.csv" in found.evidence[0].text
