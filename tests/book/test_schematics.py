"""Schematics: parts of a page in its own colours, and the numbers of the codec's from the codec."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.book import helpers as h
from tq.book.site import schematics

FOLDER = h.ROOT / "book/_static/schematics"
FILES = sorted(FOLDER.glob("*.svg"))


def test_the_codec_s_numbers_come_from_the_codec() -> None:
    assert (FOLDER / "rotate-scale-codebook-pack.svg").read_text(encoding="utf-8") == schematics.codec_on_a_block()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_schematic_follows_the_page_and_says_what_it_shows(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ElementTree.fromstring(text)
    (title,) = tree.findall("{http://www.w3.org/2000/svg}title")
    (said,) = tree.findall("{http://www.w3.org/2000/svg}desc")
    assert title.text and said.text and tree.get("role") == "img"
    assert not re.search(r"<(script|image|style|foreignObject)\b|https?://(?!www\.w3\.org)", text)
    css = (h.ROOT / "book/_static/tq.css").read_text(encoding="utf-8")
    used = set(re.findall(r"var\((--[\w-]+)", text))
    assert used and all(css.count(f"{name}:") == 2 for name in used)  # light and dark


def test_ids_are_unique_over_all() -> None:
    ids = [i for path in FILES for i in re.findall(r'\bid="([^"]+)"', path.read_text(encoding="utf-8"))]
    assert len(ids) == len(set(ids)) > 0


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_schematic_stands_on_a_page(path: Path) -> None:
    pages = [*(h.ROOT / "book").glob("*.md"), *(h.ROOT / "notebooks").glob("*.ipynb")]
    assert any(f"{{schematic}} {path.stem}" in page.read_text(encoding="utf-8") for page in pages)
