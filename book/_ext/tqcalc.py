"""Sphinx directive of the calculators; everything that it shows comes from `tq.book.site.calculators`.

    ```{calculator} savings    a form and a table: savings, memory or codec
    ```{calculator} prices     the table of list prices
    ```{calculator} job        the reference job with its sources

The script and its style are loaded on pages that have one. Without the script the tables remain.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from tq.book import paths
from tq.book.site import calculators

STYLE, SCRIPT, MARK = "calculators.css", "calculators.js", "tq-has-calculator"


class Calculator(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        rules = Path(calculators.__file__)
        root = paths.root()
        models = [root / f"tq/economics/{name}.py" for name in ("calculator", "savings", "scenarios", "fields")]
        watched = [rules, *models, root / "data/prices.csv", root / "data/reference_job.csv"]
        for path in watched:
            self.env.note_dependency(str(path))
        try:
            html = calculators.html(self.arguments[0])
        except ValueError as error:
            raise self.error(str(error)) from None
        return [nodes.raw("", html, format="html", classes=[MARK])]


def assets(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Style, script and data on the pages that need them."""
    if doctree is None or not any(MARK in node["classes"] for node in doctree.findall(nodes.raw)):
        return
    app.add_css_file(STYLE)
    app.add_js_file(SCRIPT, loading_method="defer")
    context["body"] = context["body"] + calculators.script_data()


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("calculator", Calculator)
    app.connect("html-page-context", assets)
    return {"version": "1", "env_version": 1, "parallel_read_safe": True, "parallel_write_safe": True}
