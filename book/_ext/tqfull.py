"""Sphinx extension: a chapter's page shows its full recording (see `tq.book.site.full`).

The notebook that the page offers for download stays the committed one. Chapters whose fresh run is shown
(TQ_BOOK_FRESH_CHAPTERS) show that.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from tqbook import find_root

from tq.book.site import full


def on_source_read(app: Sphinx, docname: str, source: list[str]) -> None:
    folder, _, chapter = docname.rpartition("/")
    fresh = os.environ.get("TQ_BOOK_FRESH_CHAPTERS", "").split()
    if folder != "notebooks" or (os.environ.get("TQ_BOOK_FRESH") == "1" and chapter in fresh):
        return
    root = find_root(Path(app.srcdir))
    for device in full.DEVICES:
        app.env.note_dependency(str(root / "data" / "results" / device / full.PROFILE / f"{chapter}.json"))
    source[0] = json.dumps(full.page(json.loads(source[0]), chapter, root))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", on_source_read)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
