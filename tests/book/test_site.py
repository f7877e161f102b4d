"""The built book: small, quick to build, complete, and loading nothing from elsewhere. What needs no browser to see."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

from tests.book import helpers as h
from tests.book import site as s
from tq.book.run import clean

MAX_BYTES, MAX_S = 40_000_000, 90.0
LOADING = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}


@pytest.fixture(scope="session")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return s.built(tmp_path_factory)[0]


def soup(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def test_it_builds_without_a_warning_in_ninety_seconds(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, seconds = s.built(tmp_path_factory)  # the command has -W, -n and --all
    assert (folder / "index.html").is_file() and seconds < MAX_S


def test_it_is_small(html: Path) -> None:
    assert sum(p.stat().st_size for p in html.rglob("*") if p.is_file()) <= MAX_BYTES


@pytest.mark.parametrize("page", s.pages())
def test_every_local_link_leads_somewhere_and_nothing_remote_is_loaded(html: Path, page: str) -> None:
    path = html / f"{page}.html"
    document = soup(path)
    ids = {tag["id"] for tag in document.find_all(id=True)}
    broken = []
    for tag in document.find_all(["a", *LOADING]):
        address = tag.get(LOADING.get(tag.name, "href"))
        if not address or address.startswith(("mailto:", "data:", "javascript:")):
            continue
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            if tag.name != "a":
                broken.append(f"loads {address}")
            continue
        if not parts.path:
            # The ledger's own: which rows its script shows, no place on the page.
            state = "=" in parts.fragment or parts.fragment.startswith("verdict-")
            if parts.fragment and not state and unquote(parts.fragment) not in ids:
                broken.append(address)
        elif not (path.parent / unquote(parts.path)).resolve().is_file():
            broken.append(address)
    assert broken == []
    styles = " ".join(tag.get_text() for tag in document.find_all("style"))
    assert not re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", styles)


@pytest.mark.parametrize("page", [p for p in s.pages() if p.startswith("notebooks/")])
def test_every_figure_and_table_says_where_it_came_from(html: Path, page: str) -> None:
    chapter = page.rpartition("/")[2]
    document = soup(html / f"{page}.html")
    assert document.select_one("details.tq-recordings th[scope=row]")
    figures = document.select("figure.tq-figure, figure.tq-table:not([data-beside])")
    for figure in figures:
        (line,) = figure.select("small.tq-provenance")
        device, profile, _ = line["data-view"].split("/")
        assert f"make reproduce CHAPTERS={chapter} DEVICE={device} PROFILE={profile}" in line.get_text()
        recorded = h.ROOT / "data/results" / device / profile / f"{chapter}.json"
        if not recorded.is_file():
            assert "no results recorded" in line.get_text()
            continue
        found = json.loads(recorded.read_text(encoding="utf-8"))
        for part in (found["device_name"], found["time_utc"][:10], (found["commit"] or "unknown")[:10]):
            assert part in line.get_text()
        links = {a.get_text(): (html / page).parent / a["href"] for a in line.select("a[download]")}
        assert ("PNG" in links) == ("tq-figure" in figure["class"])
        if "tq-table" in figure["class"]:
            assert len(list(csv.reader(links["CSV"].read_text(encoding="utf-8").splitlines()))) > 1
    assert all(img.get("alt", "").strip() for img in document.select("img"))


@pytest.mark.parametrize("page", [p for p in s.pages() if p.startswith("notebooks/")])
def test_the_notebook_can_be_downloaded_as_it_is_committed(html: Path, page: str) -> None:
    (link,) = {a["href"] for a in soup(html / f"{page}.html").select("a[href$='.ipynb']")}
    copy = json.loads(((html / page).parent / link).read_text(encoding="utf-8"))
    assert copy == json.loads(clean.dumps(clean.clean(json.loads((h.ROOT / f"{page}.ipynb").read_text("utf-8")))))
