"""Rules over published-rule."""

from tests.book.rules import scaffold as s
from tests.book.rules.scaffold import F, N, P
from tq.book.claims.rules import published_rule as rules

FAILS, FINE = (0.6, 0.5, 0.7), (0.004, 0.001, 0.007)


def arms(pattern: str, names: tuple[str, ...], value: s.Values | tuple[float, ...]) -> dict[str, object]:
    """Both gaps of each arm."""
    return {f"{pattern.format(name)}/{kind}": value for name in names for kind in ("gap", "own-gap")}


FED = "feedback/published-gradient-ef-{}-bits"
WHOLE, SHARED = f"{rules.START}/{rules.WHOLE}", f"{rules.START}/scale-of-a-tensor-mean-v-feedback"
RESULTS: dict[str, s.Values] = {
    rules.CHAPTER: {
        **arms("million/{}", ("gradient", "gradient-ef"), FINE),
        **arms("million/published-{}", ("gradient", "gradient-ef"), FAILS),
        **arms("feedback/{}", ("gradient-ef-4-bits",), FINE),
        **arms(FED, ("4",), FAILS),
        **arms("first-step/{}", (rules.WHOLE,), FINE),
        **arms("{}", (WHOLE, SHARED), (0.08, 0.07, 0.09)),
        f"{WHOLE}/distance": 0.1,
        "added/after-50-steps-in-fp32/gap": (0.004, -0.001, 0.009),
        "first-step/scale-of-a-tensor-mean-v-feedback/gap": 0.05,
        "as-reported/million/gap": 0.15,
    }
}
FED_FAILS = arms("feedback/{}", ("gradient-ef-4-bits",), FAILS)
SCHEME_FAILS = arms("first-step/{}", (rules.WHOLE,), FAILS)
TURNS: list[s.Turn] = [
    *(
        turn
        for name, kind in (("T-003", "gradient-ef"), ("T-004", "gradient"))
        for turn in (
            (name, {}, P),
            (name, arms("million/{}", (kind,), FAILS), F),
            (name, arms("million/{}", (f"published-{kind}",), FINE), N),
            (name, {f"million/published-{kind}/own-gap": FINE}, N),  # tuned it trains: no failure
            (name, {f"million/published-{kind}/gap": (0.6, 0.05, 1.1)}, N),  # the interval reaches below
        )
    ),
    ("S0-050", {}, P),
    ("S0-050", FED_FAILS, F),
    ("S0-050", {**FED_FAILS, **SCHEME_FAILS}, P),
    ("S0-050", SCHEME_FAILS, P),  # with a shared second moment it ends below feedback of gradients
    ("S0-050", {**arms(FED, ("4",), FINE), **SCHEME_FAILS}, N),
    ("T-012", {}, P),
    ("T-012", {"added/after-50-steps-in-fp32/gap": 0.02}, N),
    ("T-012", {"added/after-50-steps-in-fp32/gap": (0.004, -0.004, 0.012)}, N),  # its interval counts
    ("T-012", {f"{WHOLE}/distance": 0.0}, F),
]  # fmt: skip

test_each_rule_follows_the_results, test_every_rule_is_turned_and_waits_for_its_results = s.result_tests(
    rules, RESULTS, TURNS
)
