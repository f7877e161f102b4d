"""Sphinx role `val`: a measured number in the prose, read from the result that code recorded.

    {val}`chapter/key@device:profile|format`

`format` is a Python format spec, and two words may follow it: `unit` appends the recorded unit, `range` the recorded
interval; `{val}`kernels/encode_gbs@cpu:quick|.1f unit range``. Without `@device:profile` the role wants exactly one
recording that has the key. Inside a Markdown table write the bar as `\\|`.

The number carries its provenance as a tooltip. Results of chapters that run a model look different from measured ones.
A missing file or key is a Sphinx warning, so a build with -W fails;
a value that is null reads "not measured". Nothing is computed here: what is not in the file cannot be shown.

Files: `data/results/<device>/<profile>/<chapter>.json` under TQ_BOOK_ROOT (else the folder above the sources that
has `data/`). With TQ_BOOK_FRESH=1 a file of the same name under `_build/results/` goes first. A number whose chapter
has changed since it was recorded is marked as stale.
"""

from __future__ import annotations

import html
import json
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

logger = logging.getLogger(__name__)

TARGET = re.compile(
    r"^(?P<chapter>[^/@|\s]+)/(?P<key>[^@|]+?)(?:@(?P<device>[^:|\s]+):(?P<profile>[^|\s]+))?(?:\|(?P<format>.*))?$"
)
FLAGS = ("unit", "range")
DIMENSIONLESS = (None, "", "1")
SPREADS = {"ci95": "95 % confidence interval", "quartiles": "quartiles", "range": "range", "none": "range"}
NOT_MEASURED = "not measured"
# Chapters that compute from models and tables; the others measure (a test holds this beside the ledger's list).
MODELLED = (
    "cost-structure", "impact-communication", "impact-infrastructure", "impact-training-cost", "impact-memory",
    "energy", "competitive-positioning", "industry-impact",
)  # fmt: skip
STALE = "stale: the sources have changed since"
BROKEN_OFF = "broken off: the rest is not measured"


class Problem(Exception):
    """What the author of the page did wrong, in one sentence."""


class val_node(nodes.inline):
    """Inline text with a tooltip."""


# --- where the numbers are ------------------------------------------------------------------------------------


def find_root(srcdir: Path) -> Path:
    if os.environ.get("TQ_BOOK_ROOT"):
        return Path(os.environ["TQ_BOOK_ROOT"])
    for folder in (srcdir, *srcdir.parents):
        if (folder / "data" / "results").is_dir():
            return folder
    return srcdir


def result_roots(root: Path) -> list[Path]:
    """Folders that hold `<device>/<profile>/<chapter>.json`, the preferred one first."""
    committed, fresh = root / "data" / "results", root / "_build" / "results"
    return [fresh, committed] if os.environ.get("TQ_BOOK_FRESH") == "1" else [committed]


def locate(root: Path, chapter: str, key: str, device: str | None, profile: str | None) -> Path:
    """The one file that the role means."""
    roots = result_roots(root)
    if device and profile:
        for base in roots:
            path = base / device / profile / f"{chapter}.json"
            if path.is_file():
                return path
        raise Problem(f"no results of chapter {chapter!r} on {device}:{profile}")
    found: dict[tuple[str, str], Path] = {}
    for base in roots:
        for path in sorted(base.glob(f"*/*/{chapter}.json")):
            if key in read(path).get("results", {}):
                found.setdefault((path.parts[-3], path.parts[-2]), path)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise Problem(f"no results of chapter {chapter!r} have the key {key!r}")
    raise Problem(f"{chapter}/{key} was recorded on {', '.join(':'.join(k) for k in found)}; add @device:profile")


def read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Problem(f"{path.name} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise Problem(f"{path.name} is not a JSON object")
    return data


@lru_cache(maxsize=256)
def _sources(notebook: str, stamp: int, device: str | None) -> dict[str, str]:
    """Today's sources, once for all recordings of a device: nothing changes while a book is built."""
    from tq.book.record.dependencies import sources

    return sources(notebook, device)


@lru_cache(maxsize=256)
def _changed(notebook: str, stamp: int, recorded: str) -> bool:
    """Whether what a recording (as JSON) rests on is another today; False where the tree is no book."""
    from tq.book.record.dependencies import changed  # imports torch: only where there is something to compare

    rests_on = json.loads(recorded)
    try:
        return bool(changed(rests_on, Path(notebook), _sources(notebook, stamp, rests_on.get("device"))))
    except FileNotFoundError:
        return False


def is_stale(root: Path, chapter: str, data: dict[str, Any]) -> bool:
    """Whether the sources of a chapter have changed since this recording; what has no notebook never is."""
    notebook = root / "notebooks" / f"{chapter}.ipynb"
    if not notebook.is_file():
        return False
    rests_on = {key: data.get(key) for key in ("source_hash", "device")} | {"reads": data.get("reads") or {}}
    return _changed(str(notebook), notebook.stat().st_mtime_ns, json.dumps(rests_on, sort_keys=True))


# --- how they read --------------------------------------------------------------------------------------------


def formatted(value: Any, spec: str) -> str:
    try:
        text = format(value, spec)
    except (TypeError, ValueError) as error:
        raise Problem(f"{value!r} cannot be written with the format {spec!r}") from error
    # A typographic minus, but never inside 1e-05 or a word.
    return "\N{MINUS SIGN}" + text[1:] if re.match(r"-[\d.]", text) else text


def render(result: dict[str, Any], spec: str) -> str:
    words = spec.split()
    flags = [w for w in words if w in FLAGS]
    specs = [w for w in words if w not in FLAGS]
    if len(specs) > 1:
        raise Problem(f"the format {spec!r} holds more than one format spec")
    spec = specs[0] if specs else ""
    value = result.get("value")
    if value is None:
        return NOT_MEASURED
    text = formatted(value, spec)
    if "unit" in flags and result.get("unit") not in DIMENSIONLESS:
        text += f"\N{NO-BREAK SPACE}{result['unit']}"
    if "range" in flags:
        if result.get("low") is None or result.get("high") is None:
            raise Problem("no interval was recorded, so `range` has nothing to show")
        text += f" ({formatted(result['low'], spec)} to {formatted(result['high'], spec)})"
    return text


def tooltip(data: dict[str, Any], result: dict[str, Any], path: Path, key: str, stale: bool = False) -> str:
    def short(number: Any) -> str:
        return f"{number:.6g}" if isinstance(number, int | float) else str(number)

    kind = "modelled: computed from a model and its inputs" if path.stem in MODELLED else "measured"
    lines = [kind, f"{path.stem}/{key}" + (f" [{result['unit']}]" if result.get("unit") not in DIMENSIONLESS else "")]
    if result.get("value") is not None:
        lines.append(f"value: {short(result['value'])}")
    if result.get("low") is not None and result.get("high") is not None:
        spread = result.get("spread") or "range"
        lines.append(f"{SPREADS.get(spread, spread)}: {short(result['low'])} to {short(result['high'])}")
    if result.get("n") is not None:
        lines.append(f"n: {result['n']}")
    device, profile = data.get("device") or path.parts[-3], data.get("profile") or path.parts[-2]
    name = data.get("device_name")
    lines.append(f"device: {name} ({device}), profile: {profile}" if name else f"device: {device}, profile: {profile}")
    commit = str(data.get("commit") or "unknown")[:10] + (" with changes" if data.get("dirty") else "")
    lines.append(f"commit: {commit}, recorded {data.get('time_utc') or 'at an unknown time'}")
    if stale:
        lines.append(STALE)
    return "\n".join(lines)


class ValRole(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            return [self.number()], []
        except Problem as problem:
            logger.warning("val: %s (%s)", problem, self.text, location=self.get_location(), type="tqbook")
            return [nodes.problematic(self.rawtext, f"[{self.text}: {problem}]")], []

    def number(self) -> nodes.Node:
        match = TARGET.match(self.text.strip())
        if not match:
            raise Problem("expected chapter/key@device:profile|format")
        chapter, key = match["chapter"], match["key"].strip()
        root = find_root(Path(self.env.srcdir))
        if match["device"]:  # also a file that is not there yet: its appearing must rebuild the page
            for base in result_roots(root):
                self.env.note_dependency(str(base / match["device"] / match["profile"] / f"{chapter}.json"))
        path = locate(root, chapter, key, match["device"], match["profile"])
        self.env.note_dependency(str(path))
        data = read(path)
        if key not in data.get("results", {}):
            raise Problem(f"{path.parts[-3]}:{path.parts[-2]} has no key {key!r}")
        result = data["results"][key]
        text = render(result, match["format"] or "")
        stale = is_stale(root, chapter, data)
        classes = ["tq-val"] + ["tq-modelled"] * (chapter in MODELLED)
        classes += ["tq-not-measured"] * (text == NOT_MEASURED) + ["tq-stale"] * stale
        return val_node(self.rawtext, text, classes=classes, tooltip=tooltip(data, result, path, key, stale))


# --- output ---------------------------------------------------------------------------------------------------


def visit_html(self: Any, node: val_node) -> None:
    title = html.escape(node["tooltip"], quote=True).replace("\n", "&#10;")
    # In the tab order, because a title alone is out of reach of a keyboard and of a finger; tq.css shows it then.
    self.body.append(f'<span class="{" ".join(node["classes"])}" title="{title}" tabindex="0">')


def depart_html(self: Any, node: val_node) -> None:
    self.body.append('<sup class="tq-mark">stale</sup></span>' if "tq-stale" in node["classes"] else "</span>")


def pass_through(self: Any, node: val_node) -> None:
    """Other builders show the text alone."""


def setup(app: Sphinx) -> dict[str, Any]:
    plain = (pass_through, pass_through)
    app.add_node(val_node, html=(visit_html, depart_html), latex=plain, text=plain, man=plain, texinfo=plain)
    app.add_role("val", ValRole())
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
