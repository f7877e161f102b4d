"""Sphinx directives that show rows of `data/*.csv` as they are: only counts are computed, nothing is typed twice.

    ```{data-table} sources.csv
    :columns: Claim: claim | Found: found, note | Figure: figure unit | Read: checked, address
    :where: outcome=differs,partly | claim=*
    :caption: What sources say
    ```

    ```{data-counts} sources.csv
    :by: outcome
    :where: claim=*
    ```

`columns`: heading and fields of each column; a comma starts a paragraph, a blank joins fields in one. A field is
plain text, never markup, with two exceptions: an address becomes a link, and what stands in a field `bib` becomes a
citation. `where`: all conditions must hold; `*` is any value but the empty one, an empty list the empty one.
Ids of claims (S0-001) become links into the ledger by themselves. Semicolons in `claim` and `claims` separate ids.
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from tqbook import find_root

logger = logging.getLogger(__name__)
Row = dict[str, str]


class Problem(Exception):
    """What the author of the page did wrong, in one sentence."""


def read(path: Path) -> list[Row]:
    """The rows of a CSV file; every row has a value for every field."""
    if not path.is_file():
        raise Problem(f"there is no data/{path.name}")
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise Problem(f"data/{path.name} has no rows")
    return rows


def parts(text: str, mark: str) -> list[str]:
    return [part.strip() for part in text.split(mark) if part.strip()]


def known(rows: list[Row], fields: list[str]) -> None:
    unknown = [field for field in fields if field not in rows[0]]
    if unknown:
        raise Problem(f"no field {', '.join(map(repr, unknown))}; there are {', '.join(rows[0])}")


def selected(rows: list[Row], where: str) -> list[Row]:
    """The rows for which all conditions `field=value,value` hold."""
    for condition in parts(where, "|"):
        field, equals, values = (part.strip() for part in condition.partition("="))
        if not equals:
            raise Problem(f"the condition {condition!r} is not of the form field=value,value")
        known(rows, [field])
        accepted = parts(values, ",") or [""]
        rows = [row for row in rows if row[field] in accepted or (accepted == ["*"] and row[field])]
        if not rows:
            raise Problem(f"no row fulfils {where!r}")
    return rows


def columns(text: str) -> list[tuple[str, list[list[str]]]]:
    """[(heading, paragraphs)], a paragraph being the fields that stand in it."""
    found = []
    for column in parts(text, "|"):
        heading, colon, fields = (part.strip() for part in column.partition(":"))
        if not colon or not fields:
            raise Problem(f"the column {column!r} is not of the form heading: field, field")
        found.append((heading, [paragraph.split() for paragraph in parts(fields, ",")]))
    if not found:
        raise Problem("name at least one column")
    return found


class DataTable(SphinxDirective):
    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "columns": directives.unchanged_required,
        "where": directives.unchanged,
        "caption": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        try:
            return self.shown()
        except Problem as problem:
            logger.warning("%s: %s", self.name, problem, location=self.get_location(), type="tqtables")
            return []

    def rows(self) -> list[Row]:
        path = find_root(Path(self.env.srcdir)) / "data" / self.arguments[0]
        self.env.note_dependency(str(path))
        return selected(read(path), self.options.get("where", ""))

    def shown(self) -> list[nodes.Node]:
        rows, layout = self.rows(), columns(self.options.get("columns", ""))
        known(rows, [field for _, paragraphs in layout for fields in paragraphs for field in fields])
        table = nodes.table("", classes=["tq-data"])
        if "caption" in self.options:
            table += nodes.title("", self.options["caption"])
        group = nodes.tgroup("", cols=len(layout))
        group += [nodes.colspec("", colwidth=1) for _ in layout]
        head = nodes.row("", *(nodes.entry("", nodes.paragraph("", heading)) for heading, _ in layout))
        body = [nodes.row("", *(self.cell(row, paragraphs) for _, paragraphs in layout)) for row in rows]
        group += [nodes.thead("", head), nodes.tbody("", *body)]
        table += group
        return [table]

    def cell(self, row: Row, paragraphs: list[list[str]]) -> nodes.entry:
        entry = nodes.entry()
        for fields in paragraphs:
            pieces = [self.piece(field, row[field]) for field in fields if row[field]]
            for gap in range(len(pieces) - 1, 0, -1):
                pieces.insert(gap, [nodes.Text("\N{NO-BREAK SPACE}")])
            if pieces:
                entry += nodes.paragraph("", "", *(node for piece in pieces for node in piece))
        return entry

    def piece(self, field: str, value: str) -> list[nodes.Node]:
        if field == "bib":
            found, messages = self.state.inline_text("{cite:t}`" + value + "`", self.lineno)
            return [*found, *messages]
        if value.startswith(("https://", "http://")):
            host = value.split("/")[2].removeprefix("www.")
            return [nodes.reference("", host, refuri=value, reftitle=value, internal=False)]
        return [nodes.Text(value.replace(";", ", ") if field in ("claim", "claims") else value)]


class DataCounts(DataTable):
    """How many rows have which value of the field `by`, the most frequent first."""

    option_spec: ClassVar[dict[str, Any]] = {"by": directives.unchanged_required, "where": directives.unchanged}

    def shown(self) -> list[nodes.Node]:
        rows, by = self.rows(), self.options.get("by", "")
        known(rows, [by])
        counts = Counter(row[by] or "none" for row in rows)
        items = [
            nodes.list_item("", nodes.paragraph("", "", nodes.strong("", str(count)), nodes.Text(f" {value}")))
            for value, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        ]
        return [nodes.bullet_list("", *items)]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("data-table", DataTable)
    app.add_directive("data-counts", DataCounts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
