"""Rules over impact-memory."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import impact_memory as rules

SETTINGS = (*rules.KEEPING, "full")
RESULTS: dict[str, float] = {
    **{f"gain/{size}/{s}": 1.6 if s == "full" else 3.2 for size in rules.SIZES for s in SETTINGS},
    **{f"recompute-gain/{size}": 9.0 for size in rules.SIZES},
    **{"table/7b/selective/batch": 100.0, "table/7b/full/batch": 50.0},
    **{"table/13b/selective/batch": 52.0, "table/13b/full/batch": 27.0},
    **{f"table/{size}/{s}/context": 500.0 for size in ("7b", "13b") for s in ("selective", "full")},
    **{"time/400g/coded/most": 0.01, "time/400g/free/most": 0.02, "time/instead-of-recompute": 0.18},
    **{"tp/layouts": 59.0, "tp/reach": 0.15, "tp/keep": 0.6, "tp/nothing": 0.3, "tp/enabled": 0.47},
    **{f"least/{n}/{r}": v for n in ("plain", "coded") for r, v in (("none", 32.0), ("full", 16.0))},
    "hours/halved-coded": 0.94,
}


def every(pattern: str, value: float) -> dict[str, float]:
    """The same value wherever a key has this beginning and this end."""
    first, last = pattern.split("*")
    return {key: value for key in RESULTS if key.startswith(first) and key.endswith(last)}


TURNS: list[s.Turn] = [
    # twice, less a tenth
    ("S0-009", {}, P),
    ("S0-009", every("gain/*/full", 1.9), F),
    ("S0-009", {"gain/13b/selective": 1.7}, N),
    *(
        # 64-96 and 32-48, wider by a twentieth
        (name, {f"table/{size}/selective/batch": batch}, wanted)
        for name, size, batches in (("S0-045", "7b", (61.0, 101.0, 60.0)), ("S0-047", "13b", (50.0, 52.0, 30.0)))
        for batch, wanted in zip(batches, (F, P, N), strict=True)
    ),
    ("S0-046", {}, N),
    ("S0-046", {"time/400g/coded/most": 0.17, "time/instead-of-recompute": 0.3}, N),
    ("S0-046", {"time/400g/coded/most": 0.19}, F),
    ("S0-048", {}, N),
    ("S0-048", {"tp/reach": 0.25}, P),
    ("S0-048", {"tp/reach": 0.7}, P),
    ("S0-048", {"tp/reach": 0.85}, F),
    ("S0-010", {}, P),
    ("S0-010", {"least/coded/full": 8.0, "tp/enabled": 0.0}, F),
    ("S0-010", {"least/coded/none": 16.0, "tp/enabled": 0.0}, F),
    ("S0-010", {"least/coded/none": 18.0, "tp/enabled": 0.1}, N),  # saves 44 %
]  # fmt: skip
#: Two: one comparison alone.
FEWER = {"S0-046": 2}

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, {rules.CHAPTER: RESULTS}, TURNS, fewer=FEWER
)
#: Of the step model, which tests/systems compares with published runs.
BY_HAND = {"S0-074": (0.9704, 1.0014, 1.1058, 1.1463)}
test_each_formula_comes_to, test_every_formula_is_worked_out = s.formula_tests(rules, BY_HAND)
