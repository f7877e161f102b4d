"""The verdict of every claim: by its rule (`tq.book.claims.rules`, a module a chapter) or by what was looked up in
sources; for what nothing decides yet, the chapter that will.

A rule reads results through `Results` and may use formulas; what it read becomes its evidence. A result that no full
run has recorded gives "not measured". No rule reads the first guesses, and no verdict is typed in.

    for verdict in verdicts(): print(verdict.line())       # S0-001 partly — holds against fp32 ...
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from tq.book import paths
from tq.book.claims import ledger, rules, sources
from tq.book.claims.ledger import (
    NOT_CHECKABLE,
    NOT_MEASURED,
    NOT_YET,
    REASONS,
    Claim,
    Evidence,
    Finding,
    NotRecorded,
    Results,
    Verdict,
)


def _undecided(claim: Claim) -> Finding:
    """Without a rule: not checkable in principle, decided by a source, or waiting for a chapter, or for a run on a GPU
    of one that exists."""
    if claim.not_checkable_because:
        why, change = REASONS[claim.not_checkable_because]
        return Finding(NOT_CHECKABLE, why, change)
    found = sources.decide(claim)
    if found is not None:
        return found
    chapter = claim.chapter
    exists = paths.notebook(chapter).is_file() or (paths.root() / "book" / f"{chapter}.md").is_file()
    if exists and "gpu" in claim.kinds:
        return Finding(NOT_MEASURED, f"{chapter} has recorded nothing on a GPU that decides it", "Such a recording.")
    text = f"{chapter} does not decide it yet" if exists else f"to be decided by {chapter}, which is not written yet"
    return Finding(NOT_YET, text, "That chapter.")


def judge(claim: Claim, results: Results) -> Verdict:
    """The verdict of one claim. ValueError where the claim has a rule and yet cannot be checked, or neither."""
    rule, reads = rules.every().get(claim.id), results.of_a_claim()
    if claim.not_checkable_because and rule is not None:
        raise ValueError(
            f"{claim.id} has a rule, and not_checkable_because={claim.not_checkable_because!r} in data/claims.csv; "
            "accepted is one of them"
        )
    if claim.kinds == ("none",) and not claim.not_checkable_because and rule is None:
        raise ValueError(f"{claim.id} cannot be checked: its not_checkable_because in data/claims.csv must say why")
    try:
        found = _undecided(claim) if rule is None else rule(claim, reads)
    except NotRecorded as missing:
        gpu = " --device cuda" if missing.device == "cuda" else ""
        change = f"The full run: python -m tq.book reproduce {missing.chapter} --profile full{gpu}."
        found = Finding(NOT_MEASURED, str(missing), change)
        reads = results.of_a_claim()
    formula = (Evidence(found.formula, found.see),) if found.formula else ()
    evidence = (*reads.evidence(), *formula)
    return Verdict(
        claim.id, found.verdict, found.condition, found.confidence, evidence, found.would_change, claim.chapter
    )


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
    found = ", ".join(f"{count} {name}" for name, count in ledger.counts(j for _, j in chosen).items())
    return "\n".join([*(judged.line() for _, judged in chosen), f"{len(chosen)} of {len(every)} claims: {found}"])


def record() -> str:
    """Brings `data/verdicts.json` in step with today's rules and results; says what changed."""
    changes = ledger.record(verdicts())
    lines = [f"{v.id}: {was or 'new'} -> {v.verdict}" for v, was in changes]
    return "\n".join([*lines, f"{len(changes)} changed; data/verdicts.json is in step"])
