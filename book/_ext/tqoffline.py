"""Sphinx extension: takes out of the pages what a browser refuses when they are opened from a disk.

The theme preloads its icon fonts with `crossorigin`, which is an error for `file:` and of no use anywhere: the fonts
are asked for without it a moment later. Thebe, which runs cells on a remote server, is switched off in _config.yml; its
configuration is still written into each page, twice, and declares one constant two times. Source maps of the theme,
over a megabyte that no reader asks for, are left out too, and so are its words in other languages, which only a build
in these reads, the layout of notebooks to download, and the indentation of the frame around a page. Icons are drawn by
the theme's font; its script of a megabyte and a half, which draws the same ones once more, is left out.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

GONE = (
    re.compile(r'\s*<link\b(?=[^>]*\brel="preload")(?=[^>]*\bas="font")[^>]*>'),
    re.compile(r"\s*<script>\s*const THEBE_JS_URL\b.*?</script>", re.DOTALL),
    re.compile(r'\s*<script\b[^>]*\bsrc="[^"]*sphinx-thebe\.js[^"]*"[^>]*>\s*</script>'),
    re.compile(r'\s*<link\b[^>]*\bhref="[^"]*sphinx-thebe\.css[^"]*"[^>]*>'),
    re.compile(r'\s*<script\b[^>]*\bsrc="[^"]*fontawesome/[^"]*/all\.min\.js[^"]*"[^>]*>\s*</script>'),
    re.compile(r'\s*<script type="text/x-thebe-config">.*?</script>', re.DOTALL),
)
BETWEEN = re.compile(r">\s*\n\s*<")  # tags of the frame around a page, which the theme indents by dozens of blanks
TRUETYPE = re.compile(r',\s*url\([^)]*\.ttf[^)]*\)\s*format\("truetype"\)')


def for_the_disk(text: str) -> str:
    """A page without what is listed above."""
    for pattern in GONE:
        text = pattern.sub("", text)
    top, begin, rest = text.partition("<article")
    inside, end, bottom = rest.rpartition("</article>")
    return BETWEEN.sub(">\n<", top) + begin + inside + end + BETWEEN.sub(">\n<", bottom)


def on_finished(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        cleaned = for_the_disk(text)
        if cleaned != text:
            page.write_text(cleaned, encoding="utf-8")
    for notebook in Path(app.outdir, "_sources").rglob("*.ipynb"):
        plain = json.loads(notebook.read_text(encoding="utf-8"))
        notebook.write_text(json.dumps(plain, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    shutil.rmtree(Path(app.outdir, "_static", "locales"), ignore_errors=True)
    for source_map in Path(app.outdir, "_static").rglob("*.map"):
        source_map.unlink()
    for style in Path(app.outdir, "_static").rglob("*.css"):  # no browser of the last ten years asks for the second
        text = style.read_text(encoding="utf-8")
        if TRUETYPE.search(text):
            style.write_text(TRUETYPE.sub("", text), encoding="utf-8")
    for script in Path(app.outdir, "_static", "vendor").rglob("all.min.js"):
        script.unlink()
    for font in Path(app.outdir, "_static").rglob("*.ttf"):
        if font.with_suffix(".woff2").exists():
            font.unlink()


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", on_finished)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
