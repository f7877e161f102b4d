"""Sphinx directives of pages: recorded figures, schematics as SVG inside the page, the scoreboard of predictions.

    ```{recorded} chapter/name   a figure or table of a chapter's full recording, with its source
    ```
    ```{schematic} name          book/_static/schematics/<name>.svg, in the page's own colours, light and dark
    caption                      (optional)
    ```
    ```{scoreboard}              every prediction of data/predictions.csv with what was measured
    ```{scoreboard} counts       how many hit and missed, in one sentence
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from tqbook import find_root

from tq.book.site import full, predictions

logger = logging.getLogger(__name__)
SCHEMATICS = "book/_static/schematics"
BADGES = {
    predictions.HIT: "reproduced", predictions.MISS: "not-reproduced", predictions.UNTESTED: "undecided",
    predictions.OPEN: "not-measured",
}  # fmt: skip


class Recorded(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        chapter, _, name = self.arguments[0].partition("/")
        made = full.recorded(chapter, find_root(Path(self.env.srcdir)))
        found = made.get(("figure", name), made.get(("table", name)))
        if found is None:
            logger.warning(
                "recorded: %s has no figure or table %r", chapter, name, location=self.get_location(), type="tqpages"
            )
            return []
        return [nodes.raw("", found, format="html")]


class Schematic(SphinxDirective):
    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir) / SCHEMATICS / f"{self.arguments[0]}.svg"
        self.env.note_dependency(str(path))
        if not path.is_file():
            logger.warning("schematic: there is no %s", path.name, location=self.get_location(), type="tqpages")
            return []
        svg = path.read_text(encoding="utf-8")
        head = nodes.raw("", f'<div class="tq-schematic" tabindex="0">{svg}</div>', format="html")
        caption = nodes.container(classes=["tq-schematic-caption"])
        self.state.nested_parse(self.content, self.content_offset, caption)
        return [head, caption] if self.content else [head]


class Scoreboard(SphinxDirective):
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        root = find_root(Path(self.env.srcdir))
        for path in [root / "data/predictions.csv", *sorted(root.glob("data/results/*/full/*.json"))]:
            self.env.note_dependency(str(path))
        found = predictions.predictions(root)
        number = predictions.counts(found)
        said = f"{number[predictions.HIT]} of {len(found)} predictions hit, {number[predictions.MISS]} missed"
        for outcome in (predictions.UNTESTED, predictions.OPEN):
            said += f", {number[outcome]} are {outcome}" if number[outcome] else ""
        if self.arguments == ["counts"]:
            return [nodes.paragraph("", f"{said}.")]
        self.env.tq_scores = getattr(self.env, "tq_scores", set()) | {self.env.docname}  # type: ignore[attr-defined]
        return [nodes.raw("", self.table(found), format="html")]

    def table(self, found: list[predictions.Prediction]) -> str:
        lines, last = [], ""
        up = os.path.relpath("notebooks", os.path.dirname(self.env.docname) or ".")
        for one in found:
            if one.chapter != last:
                title = one.chapter.replace("-", " ").capitalize()
                link = f'<a href="{up}/{one.chapter}.html">{escape(title)}</a>'
                lines.append(f'<tr><th colspan="4" scope="rowgroup">{link}</th></tr>')
                last = one.chapter
            unit = f" {one.unit}" if one.unit not in ("", "1") else ""
            value = predictions.OPEN if one.value is None else f"{one.value:.4g}{unit}"
            mark = f'<span class="tq-verdict tq-is-{BADGES[one.outcome]}">{one.outcome}</span>'
            why = escape(one.why) + (f"<br>Not tested: {escape(one.untested)}" if one.untested else "")
            lines.append(
                f'<tr id="prediction-{one.id}"><td>{escape(one.text)}<br><small>{why}</small></td>'
                f"<td>{one.allowed}{escape(unit)}</td><td>{escape(value)}</td><td>{mark}</td></tr>"
            )
        heads = "".join(f'<th scope="col">{head}</th>' for head in ("predicted, and why", "range", "found", "outcome"))
        return (
            f'<div class="pst-scrollable-table-container"><table class="table tq-cards tq-scores"><thead><tr>{heads}'
            f"</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        )


def assets(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    if page in getattr(app.env, "tq_scores", set()):
        app.add_css_file("ledger.css")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("recorded", Recorded)
    app.add_directive("schematic", Schematic)
    app.add_directive("scoreboard", Scoreboard)
    app.connect("html-page-context", assets)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
