"""How tables and figures of a chapter show themselves in a notebook and in the book: plain HTML with text for all.

No scripts, no random ids: the same content gives the same output.
"""

from __future__ import annotations

import base64
import csv
import html
import re
import struct
import sys
from typing import Any

DPI = 200  # of the file; on the page an inch is 96 pixels wide


class Table:
    """What `Chapter.table` returns: shows itself as an accessible HTML table without random ids."""

    def __init__(self, frame: Any, caption: str, source: str, index: bool, data: dict[str, str] | None = None) -> None:
        self.frame = frame
        self.caption = caption
        self._source = source
        self._index = index
        self._data = data or {}

    def _repr_html_(self) -> str:
        text = self.frame.to_csv(index=self._index, lineterminator="\n")
        return table_html(text, self.caption, self._source, self._data)

    def __repr__(self) -> str:
        return f"{self.caption}\n{self.frame.to_string(index=self._index, na_rep='not measured')}"


def _cell(text: str) -> str:
    """A cell as it is read: numbers with at most four digits that say something, whole ones with all of theirs."""
    if text in ("True", "False"):
        return "yes" if text == "True" else "no"
    if re.fullmatch(r"-?\d{5,}(?:\.0)?", text):
        return f"{int(float(text)):,}"
    if re.fullmatch(r"-?\d*\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+", text):
        digits = text.partition("e")[0].replace("-", "").replace(".", "").lstrip("0")
        text = f"{float(text):.4g}" if len(digits) > 4 or "e" in text else text.removesuffix(".0")
    return text.replace("-", "\N{MINUS SIGN}", 1) if re.match(r"-[\d.]", text) else text


def table_html(csv_text: str, caption: str, source: str, data: dict[str, str] | None = None) -> str:
    """A table, given as CSV with its head, as an accessible HTML table without random ids.

    The first column heads the rows. An empty cell among numbers reads "not measured"; an empty column is left out.
    """
    head, *rows = csv.reader(csv_text.splitlines())
    columns = [column for column in range(len(head)) if not rows or any(row[column] for row in rows)]
    filled = {c: [row[c] for row in rows if row[c]] for c in columns}
    numeric = {c for c, texts in filled.items() if 2 * sum(any(map(str.isdigit, text)) for text in texts) >= len(texts)}
    lines = []
    for row in rows:
        cells = [_cell(row[c]) if row[c] or c not in numeric else "not measured" for c in columns]
        first, *others = map(html.escape, cells)
        lines.append(f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>')
    heads = "".join(f'<th scope="col">{html.escape(head[c])}</th>' for c in columns)
    body = "\n".join(lines)
    # Not <caption>: browsers squeeze that to the width of the table.
    return (
        f'<figure class="tq-table"{_attributes(data or {})}><div style="overflow-x:auto" tabindex="0" '
        f'role="region" aria-label="{html.escape(caption)}">'
        f'<table class="dataframe">\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n'
        f"<figcaption>{html.escape(caption)}<br>{source}</figcaption></figure>"
    )


def _attributes(data: dict[str, str]) -> str:
    """`data-*` attributes by which the build finds what was recorded."""
    return "".join(f' data-{name}="{html.escape(value)}"' for name, value in data.items())


def figure_html(png: bytes, alt: str, caption: str, source: str, data: dict[str, str] | None = None) -> str:
    """A PNG with its alt text and caption; `source` is the small line of HTML below.

    HTML and not an image/png output: of that, myst-nb keeps width and height but drops the alt text.
    """
    width, height = (round(side * 96 / DPI) for side in struct.unpack(">II", png[16:24]))
    return (
        f'<figure class="tq-figure"{_attributes(data or {})}>'
        f'<img alt="{html.escape(alt)}" width="{width}" height="{height}" '
        f'style="max-width:100%;height:auto" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{html.escape(caption)}<br>{source}</figcaption></figure>"
    )


def _shell() -> Any:
    """The IPython shell that runs this code; None outside of a notebook."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    return get_ipython()


def execution() -> int:
    """Number of the cell execution under way; 0 outside of a notebook."""
    shell = _shell()
    return int(shell.execution_count) if shell is not None else 0


def show(bundle: dict[str, str]) -> None:
    """Shows a bundle in the running notebook; outside of one there is nothing to show."""
    if _shell() is not None:
        from IPython.display import display

        display(bundle, raw=True)
