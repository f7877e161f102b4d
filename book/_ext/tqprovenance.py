"""Sphinx extension: where each figure and table came from, completed when the book is built.

A chapter's outputs hold `<figure class="tq-figure|tq-table">` with a `<small class="tq-provenance" data-view=...>`.
Here that line gets the device, the date, the commit, the command that regenerates it, and links to its data; a stale
recording and a value that was not measured get a badge; a chapter's title is followed by the list of its recordings.
In the notebooks themselves dates and commits would change with every run.

A figure is found by its name, by the hash of its picture or by its caption. What is not found says so; no number is
computed here. Pictures leave the page and become files of their own, so that a page stays small.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from tqbook import BROKEN_OFF, NOT_MEASURED, STALE, _changed, find_root, is_stale, read, result_roots

FIGURE = re.compile(
    r'<figure class="(?P<kind>tq-figure|tq-table)"(?P<attributes>[^>]*)>(?P<body>.*?)</figure>', re.DOTALL
)
LINE = re.compile(r'<small class="tq-provenance" data-view="(?P<view>[^"]+)">.*?</small>', re.DOTALL)
CAPTION = re.compile(r"<figcaption>(.*?)(?:<br>\s*)?(?:<small|</figcaption>)", re.DOTALL)
PICTURE = re.compile(r'(<img\b[^>]*?)src="data:image/png;base64,([A-Za-z0-9+/=\s]+)"([^>]*>)')
ATTRIBUTE = re.compile(r'data-([a-z]+)="([^"]*)"')
CELL = re.compile(rf"(<td[^>]*>)\s*{NOT_MEASURED}\s*(</td>)")
DEVICES, PROFILES = ("cpu", "cuda"), ("quick", "full")
DATA_OF = "figure-"  # as in tq.book.record.results
KINDS = {"tq-figure": "figures", "tq-table": "tables"}


@dataclass
class Recording:
    """One results file: a chapter on a device in a profile."""

    path: Path
    base: Path  # what the paths of its figures and tables are relative to
    data: dict[str, Any]
    stale: bool

    @property
    def view(self) -> str:
        return f"{self.path.parts[-3]}/{self.path.parts[-2]}/{self.path.stem}"

    @property
    def command(self) -> str:
        device, profile, chapter = self.view.split("/")
        return regenerate(device, profile, chapter)

    @property
    def date(self) -> str:
        return str(self.data.get("time_utc") or "date unknown")[:10]

    @property
    def commit(self) -> str:
        return str(self.data.get("commit") or "unknown")[:10] + (" with changes" if self.data.get("dirty") else "")

    @property
    def kept(self) -> str:
        """By which right it counts though code has changed since, and which runs it took over; or nothing."""
        by, runs = self.data.get("revalidated"), (self.data.get("runs") or {}).get("revalidated") or {}
        if by:
            day, at = str(by["time_utc"])[:10], str(by["at"] or "unknown")[:10]
            return f", revalidated by {by['sample']} of {by['of']} runs at {at} ({day})"
        if runs:
            return f", {len(runs)} runs made before, revalidated {', '.join(sorted(set(runs.values())))}"
        return ""

    @property
    def device_name(self) -> str:
        return str(self.data.get("device_name") or self.data.get("device") or "device unknown")


def regenerate(device: str, profile: str, chapter: str) -> str:
    return f"make reproduce CHAPTERS={chapter} DEVICE={device} PROFILE={profile}"


def badge(text: str, kind: str) -> str:
    return f'<strong class="tq-badge {kind}">{html.escape(text)}</strong>'


class Page:
    """Completes the raw HTML of one page; notes what it depends on and which files it links."""

    def __init__(self, root: Path, docname: str) -> None:
        self.root = root
        self.up = "../" * docname.count("/")
        self.depends: set[str] = set()
        self.files: dict[str, str | bytes] = {}  # place in the site -> file or content
        self._ids: set[str] = set()
        fresh = os.environ.get("TQ_BOOK_FRESH_CHAPTERS")  # set: only the outputs of these chapters are fresh
        self._fresh = None if fresh is None else set(fresh.split())

    # --- recordings -----------------------------------------------------------------------------------------------

    def recording(self, view: str) -> Recording | None:
        """What was recorded of `device/profile/chapter`; fresh before committed in a book of fresh runs."""
        device, profile, chapter = view.split("/")
        for base in result_roots(self.root):
            committed = base.parent.name == "data"
            if not committed and self._fresh is not None and chapter not in self._fresh:
                continue
            path = base / device / profile / f"{chapter}.json"
            self.depends.add(str(path))
            if path.is_file():
                data = read(path)
                return Recording(path, base.parent, data, is_stale(self.root, chapter, data))
        return None

    def link(self, place: str, content: str | bytes, text: str, title: str) -> str:
        self.files[place] = content
        return f'<a href="{self.up}{place}" download title="{html.escape(title)}">{text}</a>'

    # --- the line under a figure or table ---------------------------------------------------------------------------

    def _identify(self, found: Recording, kind: str, attributes: str, body: str, png: bytes | None) -> str | None:
        entries = found.data.get(KINDS[kind], {})
        name = dict(ATTRIBUTE.findall(attributes)).get("name")
        if name is not None:
            return name if name in entries else None
        if png is not None:
            sha256 = hashlib.sha256(png).hexdigest()
            same = [n for n, e in entries.items() if e.get("sha256") == sha256]
            if len(same) == 1:
                return str(same[0])
        caption = CAPTION.search(body)
        text = html.unescape(caption[1]).strip() if caption else None
        same = [n for n, e in entries.items() if str(e.get("caption", "")).strip() == text]
        return str(same[0]) if len(same) == 1 else None

    def _line(self, view: str, kind: str, attributes: str, body: str, png: bytes | None) -> tuple[str, str | None]:
        """(the line, the name of the figure or table)"""
        found = self.recording(view)
        device, profile, chapter = view.split("/")
        command = f'<code class="tq-command">{html.escape(regenerate(device, profile, chapter))}</code>'
        if found is None:
            missing = badge("no results recorded", "tq-not-measured")
            return self._small(view, [html.escape(device), f"profile {profile}", missing, command]), None
        rehearsal = [badge("rehearsal: the quick profile", "tq-rehearsal")] if profile == "quick" else []
        parts = [html.escape(found.device_name), f"profile {profile}", found.date, f"commit {found.commit}{found.kept}"]
        parts += rehearsal
        name = self._identify(found, kind, attributes, body, png)
        links = []
        if name is not None:
            entry = found.data[KINDS[kind]][name]
            table = found.data.get("tables", {}).get(DATA_OF + name if kind == "tq-figure" else name)
            if table is not None and (found.base / table["path"]).is_file():
                source = found.base / table["path"]
                links.append(self.link(f"_downloads/{table['path']}", str(source), "CSV", f"the data of {name}"))
            if png is not None and hashlib.sha256(png).hexdigest() != entry.get("sha256"):
                parts.append(badge("not the recorded picture", "tq-stale"))
        if png is not None:
            place = self._place(view, name, png)
            links.append(self.link(place, png, "PNG", f"the figure {name or ''}".strip()))
        if links:
            parts.append("download: " + ", ".join(links))
        parts.append(command)
        if found.stale:
            parts.append(badge(STALE, "tq-stale"))
        return self._small(view, parts), name

    @staticmethod
    def _small(view: str, parts: list[str]) -> str:
        """Folded behind one word, so that captions speak; what warns stays in sight."""
        marks = "".join(f" {part}" for part in parts if 'class="tq-badge' in part)
        return (
            f'<details class="tq-source"><summary>Source{marks}</summary>'
            f'<small class="tq-provenance" data-view="{view}">{" · ".join(parts)}</small></details>'
        )

    @staticmethod
    def _place(view: str, name: str | None, png: bytes) -> str:
        return f"_images/{view}/{name or hashlib.sha256(png).hexdigest()[:16]}.png"

    def _figure(self, match: re.Match[str]) -> str:
        kind, attributes, body = match["kind"], match["attributes"], match["body"]
        picture = PICTURE.search(body)
        png = base64.b64decode(picture[2]) if picture else None
        names: list[str | None] = []
        view = ""

        def complete(line: re.Match[str]) -> str:
            nonlocal view
            view = line["view"]
            text, name = self._line(view, kind, attributes, body, png)
            names.append(name)
            return text

        made = LINE.sub(complete, body).replace('<br><details class="tq-source"', '<details class="tq-source"')
        name = next((n for n in names if n), None)
        if picture and png is not None and view:
            place = self._place(view, name, png)
            self.files[place] = png
            address = f"{self.up}{place}"  # a link, because on a phone the letters are too small
            made = PICTURE.sub(rf'<a class="tq-enlarge" href="{address}">\1src="{address}"\3</a>', made, count=1)
        anchor = f"{kind.removeprefix('tq-')}-{name}"
        identity = ""
        if name and anchor not in self._ids:
            self._ids.add(anchor)
            identity = f' id="{anchor}"'
        return f'<figure class="{kind}"{identity}{attributes}>{made}</figure>'

    def _beside(self, match: re.Match[str]) -> str:
        """A table of recorded results is made anew from what is recorded now."""
        asked = dict(ATTRIBUTE.findall(match["attributes"])).get("beside")
        if asked is None:
            return match[0]
        from tq.book.record.results import beside

        return str(beside(**json.loads(html.unescape(asked)))._repr_html_())

    def complete(self, text: str) -> str:
        """The raw HTML of an output, completed."""
        text = FIGURE.sub(self._figure, FIGURE.sub(self._beside, text))
        return CELL.sub(rf'\1<span class="tq-badge tq-not-measured">{NOT_MEASURED}</span>\2', text)

    # --- under the title ----------------------------------------------------------------------------------------------

    def recordings(self, chapter: str, shown: str) -> str:
        """What the page shows, and every recording of the chapter beside it."""
        first = self.recording(shown)
        device, profile, _ = shown.split("/")
        if first is None:
            head = f"{device} · profile {profile} · {badge('no results recorded', 'tq-not-measured')}"
        else:
            parts = [html.escape(first.device_name), f"profile {profile}", first.date, f"commit {first.commit}"]
            parts += [badge(STALE, "tq-stale")] if first.stale else []
            parts += [badge(BROKEN_OFF, "tq-stale")] if first.data.get("broken_off") else []
            head = " · ".join(parts)
        rows = []
        for device in DEVICES:
            for profile in PROFILES:
                view = f"{device}/{profile}/{chapter}"
                found = self.recording(view)
                start = f'<tr><th scope="row">{device}, {profile}</th>'
                if found is None:
                    rows.append(f'{start}<td colspan="5">{badge(NOT_MEASURED, "tq-not-measured")}</td></tr>')
                    continue
                state = badge("stale", "tq-stale") if found.stale else "up to date"
                wall = f"{found.data['wall_s']:.0f} s" if isinstance(found.data.get("wall_s"), int | float) else ""
                place = f"_downloads/results/{view}.json"
                # without the layout: all of the site is held to 40 MB
                dense = json.dumps(found.data, ensure_ascii=False, separators=(",", ":")).encode()
                data = self.link(place, dense, "JSON", f"all results of {chapter} on {device}, {profile}")
                cells = [
                    html.escape(found.device_name),
                    found.date,
                    html.escape(found.commit),
                    wall,
                    f"{state} · {data}",
                ]
                rows.append(start + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        names = ("recording", "device", "date", "commit", "run time", "results")
        header = "".join(f'<th scope="col">{name}</th>' for name in names)
        return (
            '<details class="tq-recordings"><summary>'
            f'<small class="tq-provenance">Recorded on {head}</small></summary>\n'
            f'<div style="overflow-x:auto" tabindex="0"><table class="table"><thead><tr>{header}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div></details>"
        )


# --- events -------------------------------------------------------------------------------------------------------


def _files(env: BuildEnvironment) -> dict[str, dict[str, str | bytes]]:
    if not hasattr(env, "tq_files"):
        env.tq_files = {}
    found: dict[str, dict[str, str | bytes]] = env.tq_files
    return found


def on_doctree_read(app: Sphinx, doctree: nodes.document) -> None:
    docname = app.env.docname
    page = Page(find_root(Path(app.env.srcdir)), docname)
    shown = None
    for node in doctree.findall(nodes.raw):
        text = node.astext()
        if "html" not in node.get("format", "").split() or not ("tq-" in text or "dataframe" in text):
            continue
        view = LINE.search(text)
        shown = shown or (view["view"] if view else None)
        node.clear()
        node += nodes.Text(page.complete(text))
    folder, _, chapter = docname.rpartition("/")
    title = next(iter(doctree.findall(nodes.title)), None)
    if folder == "notebooks" and title is not None:
        if shown is None or shown.split("/")[2] != chapter:
            views = [f"{device}/full/{chapter}" for device in DEVICES]
            shown = next((view for view in views if page.recording(view) is not None), views[0])
        title.parent.insert(
            title.parent.index(title) + 1, nodes.raw("", page.recordings(chapter, shown), format="html")
        )
    for path in page.depends:
        app.env.note_dependency(path)
    if page.files:
        _files(app.env)[docname] = page.files


def on_purge(app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    _files(env).pop(docname, None)


def on_merge(app: Sphinx, env: BuildEnvironment, docnames: list[str], other: BuildEnvironment) -> None:
    for docname in set(docnames) & set(_files(other)):
        _files(env)[docname] = _files(other)[docname]


def on_finished(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    for files in _files(app.env).values():
        for place, content in files.items():
            target = Path(app.outdir) / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                target.write_bytes(content)
            else:
                shutil.copyfile(content, target)


def setup(app: Sphinx) -> dict[str, Any]:
    _changed.cache_clear()
    app.setup_extension("tqbook")
    app.connect("doctree-read", on_doctree_read)
    app.connect("env-purge-doc", on_purge)
    app.connect("env-merge-info", on_merge)
    app.connect("build-finished", on_finished)
    return {"version": "1", "env_version": 1, "parallel_read_safe": True, "parallel_write_safe": True}
