"""What the tests of all chapters' rules share.

A test module states synthetic results and what turns each rule (`result_tests`), and what its formulas come to, worked
out by hand from their sources (`formula_tests`). Both return tests; a rule or a reading that is left out fails them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.book import helpers as h
from tq.book.claims import judge, ledger
from tq.book.claims.formulas import Formula, Free, RangeFormula
from tq.book.claims.ledger import Claim, Results

F, P, N, X = ledger.REPRODUCED, ledger.PARTLY, ledger.NOT_REPRODUCED, ledger.NOT_CHECKABLE
U, L, M = ledger.UNDECIDED, ledger.LIMIT, ledger.NOT_MEASURED
Values = Mapping[str, Any]  # key -> value, or (value, low, high)
Turn = tuple[str, Values, str]  # claim, results that are otherwise, verdict
Test = Callable[..., None]


def ends(key: str, low: float, high: float) -> dict[str, Any]:
    return {f"{key}/low": low, f"{key}/high": high}


def three(key: str, *values: float) -> dict[str, Any]:
    return {f"{key}/{name}": value for name, value in zip(("low", "mid", "high"), values, strict=True)}


def every(pattern: str, names: Iterable[object], value: Any) -> dict[str, Any]:
    """The same value for the pattern with each name."""
    return {pattern.format(name): value for name in names}


def put(root: Path, chapter: str, values: Values, device: str = "cpu", n: int = 3) -> None:
    """Records these values as the full run of a chapter."""
    found = {}
    for key, value in values.items():
        middle, *limits = value if isinstance(value, tuple) else (value,)
        found[key] = {"value": middle, "unit": "1", "spread": "range" if limits else "none", "n": n}
        found[key] |= dict(zip(("low", "high"), limits, strict=True)) if limits else {}
    path = root / "data" / "results" / device / "full" / f"{chapter}.json"
    h.write(path, {"source_hash": "x", "results": found})


def verdict(name: str) -> ledger.Verdict:
    """Today's, of one claim."""
    return judge.judge(ledger.claim(name), Results())


def over_results(rules: ModuleType) -> set[str]:
    return {name for name, rule in rules.RULES.items() if not isinstance(rule, Formula)}


def result_tests(
    rules: ModuleType, results: Mapping[str, Values], turns: Sequence[Turn], *,
    on_gpu: Mapping[str, Values] | None = None, fewer: Mapping[str, int] | None = None, apart: Sequence[str] = (),
) -> tuple[Test, Test]:  # fmt: skip
    """(each turn gives its verdict and evidence, each rule has turns). results, on_gpu: chapter -> what it recorded.
    fewer: claims that cannot reach three verdicts, and how many they reach. apart: rules with tests of their own."""
    views = [("cpu", *entry) for entry in results.items()] + [("cuda", *entry) for entry in (on_gpu or {}).items()]
    keys = {key for _, _, values in views for key in values}

    @pytest.mark.parametrize(("name", "changed", "wanted"), turns)
    def follows(root: Path, name: str, changed: Values, wanted: str) -> None:
        assert set(changed) <= keys, "a turn must change results that rules read"
        for device, chapter, values in views:
            put(root, chapter, {key: changed.get(key, value) for key, value in values.items()}, device)
        found = verdict(name)
        assert found.verdict == wanted, (found.condition, found.checks)
        if wanted in ledger.DECIDED:
            read = {(each.chapter, each.view) for each in found.evidence if each.keys}
            assert read <= {(chapter, f"{device}:full") for device, chapter, _ in views}
            assert rules.CHAPTER in {chapter for chapter, _ in read}, "a rule stands where its evidence is"

    def complete(root: Path) -> None:
        assert {name for name, _, _ in turns} == over_results(rules) - set(apart)
        for name in {name for name, _, _ in turns}:
            reached = {wanted for turned, _, wanted in turns if turned == name}
            assert len(reached) == (fewer or {}).get(name, 3), name
            assert verdict(name).verdict == ledger.NOT_MEASURED

    return follows, complete


def values_of(rule: Formula) -> list[Any]:
    """What a formula comes to: its readings, then its conditions; of a free parameter the value at the usual one."""
    first = [rule.of(rule.usual)] if isinstance(rule, Free) else list(rule.readings().values())
    return [*first, *rule.conditions().values()]


def claiming(rule: Formula, given: Claim, value: Any) -> tuple[Formula, Claim]:
    """The rule and a claim that claims this value, plainly: in the table, where the rule reads its figure there."""
    numbers = value if isinstance(value, tuple) else (value,)
    given = dataclasses.replace(given, quantifier="typical", quote="", quote_en="")
    if rule.claimed in (Claim.number, Claim.ends):
        return rule, dataclasses.replace(given, value="-".join(f"{number:.12f}" for number in numbers))
    if isinstance(rule, RangeFormula | Free):
        return dataclasses.replace(rule, claimed=(numbers[0], numbers[-1])), given
    return dataclasses.replace(rule, claimed=value), given


def formula_tests(rules: ModuleType, by_hand: Mapping[str, Sequence[Any]]) -> tuple[Test, Test]:
    """(each formula comes to what was found by hand, and its verdict turns with the claimed figure; all are there).
    by_hand: the values of each claim in their order, to three digits or more."""

    @pytest.mark.parametrize("name", by_hand)
    def comes_to(root: Path, name: str) -> None:
        rule, given = rules.RULES[name], ledger.claim(name)
        computed = values_of(rule)
        assert len(computed) == len(by_hand[name])
        for value, wanted in zip(computed, by_hand[name], strict=True):
            assert value == pytest.approx(wanted, rel=2e-3)
        judged = rule(given, Results())
        assert judged.verdict in ledger.DECIDED and judged.formula and judged.checks
        off = None if rule.within is None else max(rule.within, 5e-3)
        votes = 1 if isinstance(rule, Free) else len(rule.readings())
        for wanted in by_hand[name][:votes]:
            told, said = claiming(dataclasses.replace(rule, within=off), given, wanted)
            assert told(said, Results()).verdict in (F, P), "a claim of what was found by hand"
        told, said = claiming(rule, given, tuple(7e12 for _ in computed[0]) if isinstance(computed[0], tuple) else 7e12)
        assert told(said, Results()).verdict == N

    def complete() -> None:
        assert set(by_hand) == set(rules.RULES) - over_results(rules)

    return comes_to, complete
