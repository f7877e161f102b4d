"""The claims ledger as HTML: a table with an anchor a row that needs no script, filters for those who have one.

Plain text in, HTML out, everything escaped; nothing of Sphinx is known here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from itertools import groupby

from tqbook import is_stale

from tq.book import paths
from tq.book.claims import judge, ledger
from tq.book.record import results


class Book:
    """Claims and verdicts, computed once a build."""

    def __init__(self) -> None:
        fresh = os.environ.get("TQ_BOOK_FRESH") == "1"
        self.claims = {claim.id: claim for claim in ledger.claims()}
        self.verdicts = {verdict.id: verdict for verdict in judge.verdicts(fresh)}
        self.changes = ledger.snapshot()["changes"]
        views = {(e.chapter, *e.view.split(":")) for v in self.verdicts.values() for e in v.evidence if e.view}
        self.stale = {
            f"{chapter}@{device}:{profile}"
            for chapter, device, profile in views
            if (
                found := (results.load(chapter, device, profile, fresh=True) if fresh else None)
                or results.load(chapter, device, profile)
            )
            and is_stale(paths.root(), chapter, found)
        }


@dataclass(frozen=True)
class View:
    """What a page needs to render the ledger. link: the address of a page as seen from it, None if it is not built."""

    book: Book
    link: Callable[[str], str | None]
    titles: Mapping[str, str]
    citing: Mapping[str, list[str]]

    def to(self, page: str) -> str:
        """A link to a page by its title; the bare title where there is no such page."""
        title, uri = escape(self.titles.get(page, page)), self.link(page)
        return f'<a href="{escape(uri)}">{title}</a>' if uri else title


def badge(verdict: str) -> str:
    return f'<span class="tq-verdict tq-is-{verdict.replace(" ", "-")}">{verdict}</span>'


def counts(of: Book, uri: str | None) -> str:
    """How many of the whitepaper's own claims have which verdict, linked to the filtered ledger where there is one; the
    other documents stand below, each by itself."""
    parts = []
    for seed, title in ledger.SEEDS.items():
        number = ledger.counts(v for v in of.verdicts.values() if of.claims[v.id].seed == seed)
        if not sum(number.values()):
            continue
        items = []
        for verdict, count in number.items():
            if not count:
                continue
            text = f"<b>{count}</b> {badge(verdict)}"
            target = f"#verdict-{seed}-{verdict.replace(' ', '-')}"
            anchor = f'<a href="{escape(uri)}{target}">{text}</a>' if uri is not None else text
            items.append(f"<li>{anchor}</li>")
        whole = f"{title}: {sum(number.values())} claims"
        parts.append(f'<p class="tq-counted">{escape(whole)}</p><ul class="tq-counts" aria-label="{escape(whole)}">'
                     f'{"".join(items)}</ul>')  # fmt: skip
    first, *others = parts or [""]
    more = f'<details><summary>The other documents</summary>{"".join(others)}</details>' if others else ""
    return f"{first}{more}"


def changes(of: Book) -> str:
    """Every change of a verdict, the latest first; what one commit changed is folded behind its date and reason."""
    if not of.changes:
        return "<p>No verdict has changed since the ledger was opened.</p>"
    parts = []
    for (date, commit, because), group in groupby(
        reversed(of.changes), lambda change: (change["date"], change["commit"], change.get("because", ""))
    ):
        items = [
            f'<li><a href="#claim-{escape(change["id"])}">{escape(change["id"])}</a> {badge(change["from"])} → '
            f"{badge(change['to'])} {escape(change['why'])}</li>"
            for change in group
        ]
        shown = f" (commit {escape(commit[:10])})" if commit else ""
        said = f": {escape(because)}" if because else ""
        number = f"{len(items)} verdict{'s' * (len(items) != 1)}"
        parts.append(
            f"<details><summary><time>{escape(date)}</time>{shown}, {number}{said}</summary>"
            f'<ul class="tq-changes">{"".join(items)}</ul></details>'
        )
    latest, earlier = "".join(parts[:3]), "".join(parts[3:])
    return latest + (f"<details><summary>Earlier changes</summary>{earlier}</details>" if earlier else "")


def table(view: View) -> str:
    """The whole ledger. Roles are spelled out because narrow screens turn the rows into cards."""
    rows = "\n".join(row(view, claim) for claim in view.book.claims.values())
    heads = "".join(f'<th role="columnheader" scope="col">{name}</th>' for name in HEADS)
    return (
        f"{controls(len(view.book.claims))}"
        '<div class="tq-ledger-wrap"><table class="tq-ledger" role="table" id="ledger">'
        '<caption class="tq-sr">Every claim with its verdict, the reason and the evidence</caption>'
        f'<thead role="rowgroup"><tr role="row">{heads}</tr></thead>\n'
        f'<tbody role="rowgroup">{rows}</tbody></table></div>'
    )


SHOWN = 6  # results of a chapter that a row shows; the others are a click away
HEADS = ("Id", "Claim", "Verdict", "Why", "Evidence")


def _claimed(claim: ledger.Claim, original: ledger.Claim) -> str:
    """What is claimed: paraphrase and figure, the document's own words, and where they stand."""
    figure = f' <b class="tq-figure-claimed">{escape(claim.figure)}</b>' if claim.figure else ""
    words = f'<br><q class="tq-quote">{escape(claim.quote)}</q>' if claim.quote else ""
    about = f"{ledger.SEEDS[claim.seed]}, {claim.section}"
    if claim.garbled_reading:
        about += f". Damaged in the source: {claim.garbled_reading}"
    if claim.same_as:
        about += f". Says the same as {claim.same_as}, and is counted once"
    of = {"theirs": "of their own system", "world": "of the world"}.get(original.scope, "")
    kind = ", ".join(part for part in (original.quantifier, of) if part)
    kind = f"<br><small>Read as: {escape(kind)}</small>" if kind else ""
    mark = ":" if figure else ""
    return f"{escape(claim.claim)}{mark}{figure}{words}<br><small>{escape(about)}</small>{kind}"


def _reason(view: View, claim: ledger.Claim, verdict: ledger.Verdict) -> str:
    """Why this word, and folded: the rule with its tolerance and every comparison, and what would change it."""
    original = view.book.claims.get(claim.same_as, claim)
    parts = []
    if verdict.rule:
        lines = "".join(f"<li>{escape(check.line())}</li>" for check in verdict.checks)
        figure = f"<p>Claimed: {escape(original.figure + judge.tolerated(original))}</p>" if original.figure else ""
        parts.append(
            f"<details><summary>The rule</summary><p>{escape(verdict.rule)}</p>{figure}"
            f'<ul class="tq-checks">{lines}</ul></details>'
        )
    if verdict.would_change:
        parts.append(f"<details><summary>What would change it</summary>{escape(verdict.would_change)}</details>")
    return escape(verdict.condition) + "".join(parts)


def row(view: View, claim: ledger.Claim) -> str:
    verdict = view.book.verdicts[claim.id]
    original = view.book.claims.get(claim.same_as, claim)
    confidence = f"<br><small>{verdict.confidence} confidence</small>" if verdict.confidence else ""
    basis = f"<br><small>{verdict.basis}</small>" if verdict.basis else ""
    if original.scope == "theirs" and verdict.basis == ledger.MEASURED:
        basis += "<br><small>on this book's code: theirs is not public</small>"
    cells = (
        _claimed(claim, original),
        f"{badge(verdict.verdict)}{confidence}{basis}",
        _reason(view, claim, verdict),
        evidence(view, verdict) + citations(view, claim.id),
    )
    data = "".join(
        f'<td role="cell" data-label="{name}">{cell}</td>' for name, cell in zip(HEADS[1:], cells, strict=True)
    )
    marks = f'data-seed="{claim.seed}" data-kind="{" ".join(claim.kinds)}" data-verdict="{verdict.verdict}"'
    head = f'<th role="rowheader" scope="row"><a href="#claim-{claim.id}">{claim.id}</a></th>'
    return f'<tr role="row" id="claim-{claim.id}" {marks}>{head}{data}</tr>'


def examined(view: View, chapter: str) -> str:
    """The claims that a chapter decides or gives evidence for: verdict, claim, and why, the whitepaper's and its
    report's first; those of the side documents, and those that wait for something, are folded."""
    verdicts = view.book.verdicts
    mine = [
        claim
        for claim in view.book.claims.values()
        if claim.chapter == chapter or any(e.view and e.chapter == chapter for e in verdicts[claim.id].evidence)
    ]
    waiting = [claim for claim in mine if verdicts[claim.id].verdict in (ledger.NOT_MEASURED, ledger.NOT_YET)]
    decided = [claim for claim in mine if claim not in waiting]
    first = [claim for claim in decided if claim.seed in ("0", "T")] or decided[:SHOWN]
    others = [claim for claim in decided if claim not in first]

    def listed(claims: list[ledger.Claim]) -> str:
        return f'<ul class="tq-examined">{"".join(line(view, claim) for claim in claims)}</ul>'

    def folded(claims: list[ledger.Claim], what: str) -> str:
        number = f"{len(claims)} claim{'s' * (len(claims) != 1)}"
        return f"<details><summary>{number} {what}</summary>{listed(claims)}</details>" if claims else ""

    if not mine:
        return "<p>No claim of the ledger rests on this chapter.</p>"
    more = folded(others, "of the side documents") + folded(waiting, "that this chapter does not decide yet")
    return (listed(first) if first else "") + more


def line(view: View, claim: ledger.Claim) -> str:
    """One claim of a chapter's box, with a link to its row in the ledger."""
    verdict = view.book.verdicts[claim.id]
    where = view.link("book/claims")
    name = f'<a class="tq-claim" href="{escape(where)}#claim-{claim.id}">{claim.id}</a>' if where else claim.id
    figure = f": <b>{escape(claim.figure)}</b>" if claim.figure else ""
    return (
        f"<li>{badge(verdict.verdict)} <span>{escape(claim.claim)}{figure} <small>({ledger.SEEDS[claim.seed]}, "
        f"{name})</small><br>{escape(verdict.condition)}</span></li>"
    )


def place(view: View, chapter: str) -> str | None:
    """The page of a chapter, be it a notebook or prose; None if it is not built."""
    return next((page for page in (f"notebooks/{chapter}", f"book/{chapter}") if view.link(page)), None)


def evidence(view: View, verdict: ledger.Verdict) -> str:
    parts = []
    for item in verdict.evidence:
        if not item.view:
            page = place(view, item.chapter) if item.chapter else None
            shown = f"{view.to(page)} " if page else ""
            parts.append(f"{shown}<small>{escape(item.text)}</small>")
            continue
        stale = f"{item.chapter}@{item.view}" in view.book.stale
        mark = ' <strong class="tq-stale">stale</strong>' if stale else ""
        chapter = view.to(f"notebooks/{item.chapter}")
        results = item.text.split(", ")
        first, rest = (escape(", ".join(some)) for some in (results[:SHOWN], results[SHOWN:]))
        more = f"<details><summary>{len(results) - SHOWN} more</summary><small>{rest}</small></details>" if rest else ""
        parts.append(f"{chapter} <small>({escape(item.view)}) {first}</small>{mark}{more}")
    waiting = verdict.verdict in (ledger.NOT_MEASURED, ledger.NOT_YET)
    page = place(view, verdict.chapter) if waiting else None
    if page:
        parts.append(view.to(page))
    return "<br>".join(parts) or "–"


def citations(view: View, name: str) -> str:
    links = ", ".join(view.to(page) for page in view.citing.get(name, []))
    return f'<br><small class="tq-cited">Cited in {links}</small>' if links else ""


def controls(count: int) -> str:
    """The filters, hidden until ledger.js shows them: without it they would do nothing."""
    choices = (
        ("seed", "Document", ledger.SEEDS.items()),
        ("kind", "How to check", ledger.KINDS.items()),
        ("verdict", "Verdict", ((v, v) for v in (*ledger.VERDICTS, ledger.NOTE))),
    )
    fields = "".join(
        f'<label>{label} <select name="{name}"><option value="">all</option>'
        + "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in options)
        + "</select></label>"
        for name, label, options in choices
    )
    return (
        '<form class="tq-filter" role="search" aria-label="Filter the claims" aria-controls="ledger" hidden>'
        f'{fields}<label>Text <input type="search" name="q" autocomplete="off"></label>'
        f'<button type="reset">Show all</button><output aria-live="polite">{count} claims</output></form>'
    )
