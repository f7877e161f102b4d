"""How tables and figures of a chapter show themselves in a notebook and in the book: plain HTML with text for all.

No scripts, no random ids: the same content gives the same output.
"""

from __future__ import annotations

import base64
import html
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
        text = self.frame.to_html(index=self._index, border=0, na_rep="not measured", float_format=lambda x: f"{x:.4g}")
        head, body = text.replace(' style="text-align: right;"', "").split("<tbody>", 1)
        head = head.replace("<th>", '<th scope="col">')
        body = body.replace("<th>", '<th scope="row">')
        # Not <caption>: browsers squeeze that to the width of the table.
        return (
            f'<figure class="tq-table"{_attributes(self._data)}><div style="overflow-x:auto">'
            f"{head}<tbody>{body}</div>\n"
            f"<figcaption>{html.escape(self.caption)}<br>{self._source}</figcaption></figure>"
        )

    def __repr__(self) -> str:
        return f"{self.caption}\n{self.frame.to_string(index=self._index, na_rep='not measured')}"


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
