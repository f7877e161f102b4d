"""The verdict of every claim: by its rule (`tq.book.claims.rules`, a module a chapter) or by what was looked up in
sources; for what nothing decides yet, the chapter that will. `why` tells step by step how one came about.

A rule reads results through `Results` and may use formulas; what it read becomes its evidence. A result that no full
run has recorded gives "not measured". No rule reads the first guesses, and no verdict is typed in.

    for verdict in verdicts(): print(verdict.line())       # S0-001 partly — holds against fp32 ...
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from tq.book import paths
from tq.book.claims import ledger, rules, sources
from tq.book.claims.formulas import Formula
from tq.book.claims.ledger import (
    COMPUTED,
    LIMIT,
    MEASURED,
    MEASURING,
    NOT_CHECKABLE,
    NOT_MEASURED,
    NOT_YET,
    NOTE,
    PRINTED,
    REASONS,
    Claim,
    Evidence,
    Finding,
    NotRecorded,
    Results,
    Verdict,
)
from tq.book.claims.tolerance import NUMBER


def _undecided(claim: Claim) -> Finding:
    """Without a rule: a note, not checkable in principle, decided by a source, or waiting for a chapter, or for a run
    on a GPU of one that exists."""
    if claim.note:
        return Finding(NOTE, claim.note, "A sentence of the document that says so.")
    if claim.not_checkable_because:
        verdict = LIMIT if claim.not_checkable_because == "limit" else NOT_CHECKABLE
        return Finding(verdict, claim.reason or REASONS[claim.not_checkable_because], claim.would_change)
    found = sources.decide(claim)
    if found is not None:
        return found
    chapter = claim.chapter
    exists = paths.notebook(chapter).is_file() or (paths.root() / "book" / f"{chapter}.md").is_file()
    if exists and "gpu" in claim.kinds:
        text = f"Not recorded: {chapter} has nothing from a GPU that decides it."
        return Finding(NOT_MEASURED, text, claim.would_change)
    text = f"To be decided by {chapter}, which is not written yet."
    if exists:
        text = f"Open: {chapter} does not decide it yet."
    return Finding(NOT_YET, text, claim.would_change)


def rule_text(claim: Claim) -> str:
    """The rule of a claim in words: of a formula what it says of itself, of a function its docstring."""
    rule = rules.every().get(claim.id)
    if isinstance(rule, Formula):
        return rule.rule(claim)
    if rule is not None:
        return " ".join((inspect.getdoc(rule) or "").split())
    return "" if claim.not_checkable_because or claim.note else sources.RULE if "source" in claim.kinds else ""


def _basis(found: Finding, evidence: Sequence[Evidence], by_rule: bool) -> str:
    """What a decided verdict rests on: runs of this book, a computation, or what others printed."""
    if found.basis or found.verdict not in (*ledger.DECIDED, ledger.UNDECIDED):
        return found.basis
    if any(each.chapter in MEASURING and each.keys for each in evidence):
        return MEASURED
    return COMPUTED if by_rule else PRINTED


def judge(claim: Claim, results: Results) -> Verdict:
    """The verdict of one claim. ValueError where the claim has a rule and yet cannot be checked, or neither."""
    if claim.same_as:
        return replace(judge(ledger.claim(claim.same_as), results), id=claim.id, same_as=claim.same_as)
    rule, reads = rules.every().get(claim.id), results.of_a_claim()
    if claim.not_checkable_because and rule is not None:
        raise ValueError(
            f"{claim.id} has a rule, and not_checkable_because={claim.not_checkable_because!r} in data/claims.csv; "
            "accepted is one of them"
        )
    if claim.note and rule is not None:
        raise ValueError(f"{claim.id} has a rule, and is a note in data/claims.csv; accepted is one of them")
    if claim.kinds == ("none",) and not (claim.not_checkable_because or claim.note) and rule is None:
        raise ValueError(f"{claim.id} cannot be checked: its not_checkable_because in data/claims.csv must say why")
    try:
        found = _undecided(claim) if rule is None else rule(claim, reads)
    except NotRecorded as missing:
        gpu = " --device cuda" if missing.device == "cuda" else ""
        run = f"The full run: python -m tq.book reproduce {missing.chapter} --profile full{gpu}."
        change = claim.would_change or run
        found = Finding(NOT_MEASURED, f"Not recorded: {missing}.", change)
        reads = results.of_a_claim()
    formula = (Evidence(found.formula, found.see),) if found.formula else ()
    evidence = (*reads.evidence(), *formula)
    return Verdict(
        claim.id, found.verdict, found.condition, found.confidence, evidence, found.would_change, claim.chapter,
        rule_text(claim), found.checks, _basis(found, evidence, rule is not None),
    )  # fmt: skip


def tolerated(claim: Claim) -> str:
    """", to 5 %" behind a figure that is held to a tolerance; "" where it has no number or stands to be compared with
    none."""
    if not NUMBER.search(claim.value):
        return ""
    ends = sorted(set(claim.within()))
    return ", to " + " and ".join(f"{end:.0%}" for end in ends)


def why(name: str, fresh: bool = False) -> str:
    """How the verdict on one claim comes about, step by step. KeyError for an id that the ledger has not."""
    claim = ledger.claim(name)
    verdict = judge(claim, Results(fresh))
    original = ledger.claim(claim.same_as) if claim.same_as else claim
    steps = [("document", f"{ledger.SEEDS[claim.seed]}, {claim.section}")]
    steps += [("words", f"“{claim.quote}”")] if claim.quote else [("words", "not in the documents at hand")]
    steps += [("in English", f"“{claim.quote_en}”")] if claim.quote_en else []
    steps += [("same as", claim.same_as)] if claim.same_as else []
    of = {"theirs": "their own system", "world": "the world"}.get(original.scope, "")
    steps += [("kind", ", ".join(part for part in (original.quantifier, f"of {of}" if of else "") if part))]
    steps += [("figure", f"{original.figure}{tolerated(original)}")] if original.figure else []
    steps += [("readings", original.readings)] if original.readings else []
    steps += [("rule", verdict.rule)] if verdict.rule else []
    for evidence in verdict.evidence:
        where = f"{evidence.chapter} ({evidence.view}): " if evidence.view else ""
        steps += [("found", f"{where}{evidence.text}")]
    steps += [("compared", check.line()) for check in verdict.checks]
    sure = f", {verdict.confidence} confidence" if verdict.confidence else ""
    steps += [("verdict", f"{verdict.verdict}{sure}{f', {verdict.basis}' if verdict.basis else ''}")]
    steps += [("reason", verdict.condition), ("would change", verdict.would_change)]
    return "\n".join([name, *(f"  {what:13} {text}" for what, text in steps)])


def verdicts(fresh: bool = False) -> list[Verdict]:
    """Every claim judged, in the order of `data/claims.csv`. fresh: a fresh full run goes before the committed one."""
    results = Results(fresh)
    return [judge(claim, results) for claim in ledger.claims()]


def report(verdict: str | None = None, seed: str | None = None, ids: Sequence[str] = (), as_json: bool = False) -> str:
    """The chosen verdicts, a line each, and how many of each there are; or the same as JSON. An unknown id raises."""
    every = {claim.id: (claim, judged) for claim, judged in zip(ledger.claims(), verdicts(), strict=True)}
    unknown = [name for name in ids if name not in every]
    if unknown:
        raise ValueError(f"id={unknown[0]!r}: no such claim; accepted are S0-001 and the other ids of data/claims.csv")
    chosen = [
        (claim, judged)
        for name, (claim, judged) in every.items()
        if (not ids or name in ids) and verdict in (None, judged.verdict) and seed in (None, claim.seed)
    ]
    if as_json:
        rows = [{**asdict(claim), **asdict(judged)} for claim, judged in chosen]
        return json.dumps(rows, indent=1, ensure_ascii=False)
    return "\n".join([*(judged.line() for _, judged in chosen), *_counted(chosen)])


def _counted(chosen: Sequence[tuple[Claim, Verdict]]) -> list[str]:
    """How many of which verdict: of the whitepaper's own claims first, then of each other document."""
    lines = []
    for seed, title in ledger.SEEDS.items():
        number = ledger.counts(judged for claim, judged in chosen if claim.seed == seed)
        if any(number.values()):
            text = ", ".join(f"{count} {name}" for name, count in number.items() if count)
            lines.append(f"{title}, {sum(number.values())} claims: {text}")
    return lines or ["no claims"]


def record(because: str = "") -> str:
    """Brings `data/verdicts.json` in step with today's rules and results; says what changed. because: why, where it is
    not new results."""
    changes = ledger.record(verdicts(), because)
    lines = [f"{v.id}: {was or 'new'} -> {v.verdict}" for v, was in changes]
    return "\n".join([*lines, f"{len(changes)} changed; data/verdicts.json is in step"])
