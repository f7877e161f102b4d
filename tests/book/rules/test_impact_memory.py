"""Rules over impact-memory."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import impact_memory as rules

SETTINGS = ("none", "none-fused", "selective", "full")
SIZES = ("7b", "13b", "70b")
RESULTS: dict[str, float] = {
    **{f"gain/{size}/{s}": 1.6 if s == "full" else 3.2 for size in SIZES for s in SETTINGS},
    **{f"recompute-gain/{size}": 9.0 for size in SIZES},
    "needed/2": 0.68,
    "needed/3": 0.91,
    **{f"table/7b/{s}/batch": 50.0 if s == "full" else 100.0 for s in SETTINGS},
    **{f"table/13b/{s}/batch": 27.0 if s == "full" else 52.0 for s in SETTINGS},
    **{f"table/{size}/{s}/context": 500.0 for size in ("7b", "13b") for s in SETTINGS},
    **{f"time/{n}/coded/most": v for n, v in (("400g", 0.01), ("100g", 0.01), ("25g", 0.4))},
    "time/400g/free/most": 0.02,
    "time/instead-of-recompute": 0.18,
    **{"tp/layouts": 59.0, "tp/reach": 0.15, "tp/keep": 0.6, "tp/nothing": 0.3, "tp/enabled": 0.47},
    **{f"least/{n}/{r}": v for n in ("plain", "coded") for r, v in (("none", 32.0), ("full", 16.0))},
    **{"hours/halved": 1.0, "hours/coded": 0.94, "hours/halved-coded": 0.94},
}


def every(pattern: str, value: float) -> dict[str, float]:
    """The same value wherever a key has this beginning and this end."""
    first, last = pattern.split("*")
    return {key: value for key in RESULTS if key.startswith(first) and key.endswith(last)}


TURNS: list[s.Turn] = [
    ("S0-009", {}, P),
    ("S0-009", every("gain/*/full", 2.2), F),
    ("S0-009", every("gain/*none", 1.5), N),
    *(
        (name, changed, wanted)
        for name, size, good in (("S0-045", "7b", 80.0), ("S0-047", "13b", 40.0))
        for changed, wanted in (
            ({}, P), (every(f"table/{size}/*batch", good), F), (every(f"table/{size}/*batch", 20.0), N)
        )
    ),
    ("S0-046", {}, P),
    ("S0-046", every("time/*coded/most", 0.25), F),
    ("S0-046", {"time/25g/coded/most": 0.05}, N),
    ("S0-046", {"time/25g/coded/most": 0.05, "time/instead-of-recompute": 0.25}, P),
    ("S0-048", {}, P),
    ("S0-048", {"tp/reach": 0.95}, F),
    ("S0-048", {"tp/reach": 0.0}, N),
    *(
        (name, changed, wanted)
        for name in ("S0-010", "S0-049")
        for changed, wanted in (
            ({}, P), ({"least/coded/none": 16.0, "least/coded/full": 8.0}, F), ({"tp/enabled": 0.0}, N)
        )
    ),
]  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, {rules.CHAPTER: RESULTS}, TURNS
)
