"""Rules over checkpoints and failures."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, M, N, P
from tq.book.claims import ledger
from tq.book.claims.rules import checkpoints_and_failures as rules

BY_HAND = {
    "S2-001": (782.3, 840),
    "S2-002": (521.5, 560),
    "S2-003": (4, 1.333),
    "S2-004": (1.1265, 1.2096),
    # 4,860 GB at 5 GB/s; M = 50,677 / 128 hours, so sqrt(2 * 972 s / M) = 3.693 % are lost
    "S2-005": (218_972, 15_184),
    "S2-010": (419, 466),
    "S2-011": (19.27, 877.3),
    "S2-013": (66.67, 50),
    "S2-017": (7_715, 53.58),
    "S4-081": (11.84,),
    "S4-082": (5, 7),
    "S4-083": (19.27,),
}  # fmt: skip

test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)


def test_all_other_rules_are_formulas() -> None:
    assert s.over_results(rules) == {
        "S2-007", "S2-008", "S2-014", "S2-015", "S2-016", "S2-018", "S2-019", "S4-085",
    }  # fmt: skip


RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        "month/as-the-document/every-30-min": 219_168.0,
        "month/in-the-background/every-30-min": 2_951.0,
        "month/losslessly-compressed/every-30-min": 163_070.0,
        "month/saved-by-compression-at-best": 2_014.0,
        "ratio/ours/mix": 1.345,
        "short/lines": 24.0, "short/exact": 1.0, "short/ratio": 1.19,
        "slow-writer/least-wait": 1.02,
        "cold/ours-over-torch": 0.9, "cold/disk": 0.9,
        "repeat/same-ranks": 1.0, "repeat/other-ranks": 0.0,
    }
}
LEFT, RATIO = "month/in-the-background/every-30-min", "ratio/ours/mix"
BEST, OFTEN = "month/saved-by-compression-at-best", "month/losslessly-compressed/every-30-min"
TURNS: list[s.Turn] = [
    # of 70B 1,209,600 GB at 0.015 to 0.1 dollars, of 405B 6,998,400 GB, $218,972 of idle time, less 1 / ratio of each
    ("S2-008", {}, P),  # $4,654 to $31,027 of 70B; of 405B $26,927 to $179,513, and $56,168 of idle time
    ("S2-008", {RATIO: 1.8}, F),  # $8,064 to $53,760
    ("S2-008", {RATIO: 1.1}, P),  # $63,622 at most of 405B, and $19,907 of idle time
    ("S2-008", {RATIO: 1.05}, N),  # $33,326 at most
    ("S2-007", {}, F),
    ("S2-007", {"short/lines": 34.0}, N),
    ("S2-007", {"short/exact": 0.0}, N),
    ("S2-007", {"short/ratio": 1.05}, N),
    ("S2-014", {}, F),
    ("S2-014", {"slow-writer/least-wait": 0.5}, N),
    ("S2-016", {}, F),
    ("S2-016", {"cold/ours-over-torch": 0.97}, N),
    ("S4-085", {}, M),
    ("S4-085", {"repeat/same-ranks": 0.0}, F),
    ("S2-015", {}, P),  # 1.3 % of the loss is left, and the bytes still shrink
    ("S2-015", {LEFT: 43_900.0}, F),  # 20 %
    ("S2-015", {LEFT: 43_700.0, RATIO: 1.05}, N),
    ("S2-019", {}, P),  # $2,014 of $405,504, and $56,098 at the document's interval
    ("S2-019", {BEST: 20_300.0}, F),
    ("S2-019", {OFTEN: 200_000.0}, N),
]
test_each_turn, test_each_rule_turns = s.result_tests(
    rules, RESULTS, TURNS, fewer={"S2-007": 2, "S2-014": 2, "S2-016": 2, "S4-085": 2}, apart=("S2-018",)
)


def test_storage_is_a_part_of_what_idle_gpus_cost() -> None:
    """972 s * 1,440 / 3,600 h * 128 * $4.40 = $218,972 against 1,440 * 4,860 GB * $0.023 = $160,963: 1.36 times."""
    judged = rules.idle_against_storage(ledger.claim("S2-018"), ledger.Results())
    assert judged.verdict == P and "$218,972" in judged.condition and "$160,963" in judged.condition
