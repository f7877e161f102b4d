"""Sphinx roles and directives of the claims ledger; all verdicts come from `tq.book.claims.judge`, none is typed.

    {claim}`S0-001`          link to the ledger's row, with the verdict as tooltip
    {verdict}`S0-001`        the verdict itself as such a link, for tables that set it beside a claim
    {verdict-count}`0 partly` how many claims of a document have a verdict; `0` alone: how many it has
    ```{verdict-counts}      how many claims have which verdict, the whitepaper's first, as links into the ledger
    ```{ledger}              every claim: a plain HTML table with an anchor a row; ledger.js adds filters where it runs
    ```{verdicts}            the claims that this chapter decides, each with its verdict and one sentence
    ```{verdict-changes}     verdicts that changed since they were first recorded
    ```{verdict-words}       what each verdict means
    ```{tolerances}          how far a figure may be off, by how a document writes it
    ```{assessment} effects  a table of the whitepaper's own summary beside what the verdicts add up to

Ids of claims in running text (S0-001, T-014) become such links by themselves. The ledger links back to the pages that
cite a claim. An unknown id in the role is a warning. The first guesses of the data are shown nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole
from tqledger_html import Book, View, changes, counts, examined, table

from tq import systems
from tq.book import paths
from tq.book.claims import assessment, judge, ledger, tolerance, words

logger = logging.getLogger(__name__)
CLAIM = re.compile(r"\b(?:S\d|T)-\d{3}\b")
STYLE, SCRIPT = "ledger.css", "ledger.js"


class claim_node(nodes.inline):
    """A claim that a page cites; becomes a link when the ledger's page is known."""


class ledger_node(nodes.General, nodes.Element):
    """The place of the ledger, its counts or its changes (`what`); becomes HTML once all pages are read."""


# --- what is known --------------------------------------------------------------------------------------------


def book(app: Sphinx) -> Book:
    if not hasattr(app, "tq_ledger"):
        app.tq_ledger = Book()  # type: ignore[attr-defined]
    found: Book = app.tq_ledger  # type: ignore[attr-defined]
    return found


def inputs() -> list[str]:
    """Files whose change means that verdicts may have changed."""
    root = paths.root()
    rules = [Path(module.__file__ or "") for module in (judge, ledger)]
    rules += [path for path in sorted(rules[0].parent.rglob("*.py")) if path not in rules]
    rules += sorted(Path(systems.__file__ or "").parent.glob("*.py"))  # what formulas compute with
    data = [*sorted((root / "data").glob("*.csv")), *(root / "data").glob("verdicts.json")]
    return [str(p) for p in [*data, *rules, *sorted(root.glob("data/results/*/full/*.json"))]]


def cited(env: BuildEnvironment) -> dict[str, set[str]]:
    """Page -> ids of the claims that it cites."""
    if not hasattr(env, "tq_cited"):
        env.tq_cited = {}  # type: ignore[attr-defined]
    found: dict[str, set[str]] = env.tq_cited  # type: ignore[attr-defined]
    return found


def citing(env: BuildEnvironment) -> dict[str, list[str]]:
    """Claim -> the pages that cite it, without the ledger's own."""
    found: dict[str, list[str]] = {}
    for page, names in sorted(cited(env).items()):
        for name in names if page != home(env) else ():
            found.setdefault(name, []).append(page)
    return found


def titles(env: BuildEnvironment) -> dict[str, str]:
    return {page: title.astext() for page, title in env.titles.items()}


def ledger_pages(env: BuildEnvironment) -> dict[str, set[str]]:
    """Page -> which of "ledger", "counts", "changes" stand on it."""
    if not hasattr(env, "tq_ledger_pages"):
        env.tq_ledger_pages = {}  # type: ignore[attr-defined]
    found: dict[str, set[str]] = env.tq_ledger_pages  # type: ignore[attr-defined]
    return found


def home(env: BuildEnvironment) -> str | None:
    """The page of the ledger."""
    return next((page for page, what in sorted(ledger_pages(env).items()) if "ledger" in what), None)


# --- reading --------------------------------------------------------------------------------------------------


def cite(env: BuildEnvironment, name: str, show: str = "id") -> claim_node:
    """show: "id" or "verdict"."""
    cited(env).setdefault(env.docname, set()).add(name)
    for path in inputs():
        env.note_dependency(path)
    return claim_node(name, name, claim=name, show=show)


class ClaimRole(SphinxRole):
    show = "id"

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        name = self.text.strip()
        if name not in book(self.env.app).claims:
            logger.warning("claim: the ledger has no %r", name, location=self.get_location(), type="tqledger")
            return [nodes.problematic(self.rawtext, f"[no claim {name}]")], []
        return [cite(self.env, name, self.show)], []


class VerdictRole(ClaimRole):
    show = "verdict"


class CountRole(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        seed, _, verdict = self.text.strip().partition(" ")
        of = book(self.env.app)
        number = ledger.counts(v for v in of.verdicts.values() if of.claims[v.id].seed == seed)
        if seed not in ledger.SEEDS or (verdict and verdict not in number):
            logger.warning("verdict-count: nothing counts %r", self.text, location=self.get_location(), type="tqledger")
            return [nodes.problematic(self.rawtext, f"[{self.text}]")], []
        for path in inputs():
            self.env.note_dependency(path)
        return [nodes.inline("", str(number[verdict] if verdict else sum(number.values())))], []


class CiteInText(SphinxTransform):
    """Ids of claims in running text become citations: what a page names, the ledger should know."""

    default_priority = 700
    LEAVE = (nodes.literal, nodes.literal_block, nodes.FixedTextElement, nodes.reference, nodes.title, nodes.raw)
    SKIP = (*LEAVE, nodes.comment, nodes.problematic, claim_node)

    def apply(self, **kwargs: Any) -> None:
        known = book(self.app).claims if CLAIM.search(self.document.astext()) else {}
        for text in list(self.document.findall(nodes.Text)) if known else []:
            parent: nodes.Node | None = text.parent
            while parent is not None and not isinstance(parent, self.SKIP):
                parent = parent.parent
            parts: list[nodes.Node] = []
            end = 0
            for match in CLAIM.finditer(str(text)) if parent is None else ():
                if match.group() in known:
                    parts += [nodes.Text(str(text)[end : match.start()]), cite(self.env, match.group())]
                    end = match.end()
            if parts:
                text.parent.replace(text, [*parts, nodes.Text(str(text)[end:])])


class Place(SphinxDirective):
    what = ""

    def run(self) -> list[nodes.Node]:
        ledger_pages(self.env).setdefault(self.env.docname, set()).add(self.what)
        for path in inputs():
            self.env.note_dependency(path)
        return [ledger_node(what=self.what)]


class LedgerDirective(Place):
    what = "ledger"


class CountsDirective(Place):
    what = "counts"


class ChangesDirective(Place):
    what = "changes"


class VerdictsDirective(Place):
    what = "verdicts"

    def run(self) -> list[nodes.Node]:
        chapter = self.env.docname.rpartition("/")[2]
        cited(self.env).setdefault(self.env.docname, set()).update(
            name for name, claim in book(self.env.app).claims.items() if claim.chapter == chapter
        )
        return super().run()


class Table(SphinxDirective):
    """A table of strings; the first row is its head."""

    def rows(self) -> list[tuple[str, ...]]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        for path in inputs():
            self.env.note_dependency(path)
        head, *rows = self.rows()
        grid = nodes.table("", classes=["tq-data"])
        group = nodes.tgroup("", cols=len(head))
        group += [nodes.colspec("", colwidth=1) for _ in head]

        def line(cells: tuple[str, ...]) -> nodes.row:
            return nodes.row("", *(nodes.entry("", nodes.paragraph("", cell)) for cell in cells))

        group += nodes.thead("", line(head))
        group += nodes.tbody("", *map(line, rows))
        grid += group
        return [grid]


class WordsDirective(Table):
    def rows(self) -> list[tuple[str, ...]]:
        return [("verdict", "it means that the claim"), *words.MEANINGS.items()]


class TolerancesDirective(Table):
    def rows(self) -> list[tuple[str, ...]]:
        return [
            ("a figure", "may be off by", "such as"),
            *((how, f"{share:.0%}", example) for how, share, example in tolerance.table()),
        ]


class AssessmentDirective(SphinxDirective):
    """One row a line of `tq.book.claims.assessment.TABLES`; its claims are cited here, with their verdicts."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        judged = {name: verdict.verdict for name, verdict in book(self.env.app).verdicts.items()}
        try:
            rows = assessment.assess(self.arguments[0], judged)
        except ValueError as problem:
            logger.warning("assessment: %s", problem, location=self.get_location(), type="tqledger")
            return []
        heads = ("", "Whitepaper", "This book", "Rests on")
        table = nodes.table("", classes=["tq-data", "colwidths-given"])
        group = nodes.tgroup("", cols=len(heads))
        group += [nodes.colspec("", colwidth=width) for width in (18, 28, 20, 34)]
        group += nodes.thead("", self.row([[nodes.Text(head)] for head in heads]))
        body = nodes.tbody()
        for row, word, undecided in rows:
            known = f"{word}; {undecided} of {len(row.claims)} not decided" if undecided else word
            claims: list[nodes.Node] = []
            for name in row.claims:
                claims += [cite(self.env, name), nodes.Text(f" {judged[name]}; ")]
            claims[-1] = nodes.Text(f" {judged[row.claims[-1]]}")
            cells = [[nodes.strong("", row.name)], [nodes.Text(row.claimed)], [nodes.Text(known)], claims]
            body += self.row(cells)
        group += body
        table += group
        return [table]

    @staticmethod
    def row(cells: list[list[nodes.Node]]) -> nodes.row:
        return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cell)) for cell in cells))


# --- writing --------------------------------------------------------------------------------------------------


def resolve(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Claims become links; the ledger's places become HTML."""
    where = home(app.env)

    def link(target: str) -> str | None:
        return app.builder.get_relative_uri(page, target) if target in app.env.found_docs else None

    for node in list(doctree.findall(claim_node)):
        verdict = book(app).verdicts[node["claim"]]
        title = f"{verdict.verdict}: {verdict.condition}"
        shown = verdict.verdict if node["show"] == "verdict" else node["claim"]
        if where is None:
            node.replace_self(nodes.inline("", shown, classes=["tq-claim"]))
            continue
        uri = f"{link(where) if page != where else ''}#claim-{node['claim']}"
        reference = nodes.reference("", shown, refuri=uri, reftitle=title, internal=True, classes=["tq-claim"])
        node.replace_self(reference)
    for place in list(doctree.findall(ledger_node)):
        if place["what"] == "ledger":
            html = table(View(book(app), link, titles(app.env), citing(app.env)))
        elif place["what"] == "verdicts":
            view = View(book(app), link, titles(app.env), citing(app.env))
            html = examined(view, page.rpartition("/")[2])
        elif place["what"] == "counts":
            html = counts(book(app), "" if page == where else (link(where) if where else None))
        else:
            html = changes(book(app))
        place.replace_self(nodes.raw("", html, format="html"))


# --- events ---------------------------------------------------------------------------------------------------


def forget(app: Sphinx, env: BuildEnvironment, page: str) -> None:
    cited(env).pop(page, None)
    ledger_pages(env).pop(page, None)


def merge(app: Sphinx, env: BuildEnvironment, pages: set[str], other: BuildEnvironment) -> None:
    for keep in (cited, ledger_pages):
        keep(env).update({page: found for page, found in keep(other).items() if page in pages})


def rewrite(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """The ledger names the pages that cite a claim and shows new results: it is written with every build."""
    return list(ledger_pages(env))


def assets(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Style where verdicts or citations are shown, the script on the ledger's page alone."""
    what = ledger_pages(app.env).get(page, set())
    if what or page in cited(app.env):
        app.add_css_file(STYLE)
    if "ledger" in what:
        app.add_js_file(SCRIPT, loading_method="defer")


def setup(app: Sphinx) -> dict[str, Any]:
    for node in (claim_node, ledger_node):
        app.add_node(node)
    app.add_role("claim", ClaimRole())
    app.add_role("verdict", VerdictRole())
    app.add_role("verdict-count", CountRole())
    app.add_directive("ledger", LedgerDirective)
    app.add_directive("verdicts", VerdictsDirective)
    app.add_directive("verdict-counts", CountsDirective)
    app.add_directive("verdict-changes", ChangesDirective)
    app.add_directive("verdict-words", WordsDirective)
    app.add_directive("tolerances", TolerancesDirective)
    app.add_directive("assessment", AssessmentDirective)
    app.add_transform(CiteInText)
    app.connect("env-purge-doc", forget)
    app.connect("env-merge-info", merge)
    app.connect("env-updated", rewrite)
    app.connect("doctree-resolved", resolve)
    app.connect("html-page-context", assets)
    return {"version": "1", "env_version": 1, "parallel_read_safe": True, "parallel_write_safe": True}
