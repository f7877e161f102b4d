"""Fresh results beside the committed ones: what moved, what is stale, and the step that commits them.

A result is within noise if both intervals overlap, or, where one has no interval, if the values agree to 1e-6 (numbers)
or exactly (the rest). It compares the same chapter on the same device in the same profile, nothing across them.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tq.book import paths
from tq.book.record.dependencies import changed, source_hash
from tq.book.record.results import load
from tq.book.run import archive, clean, stamps

WITHIN, MOVED, NEW, GONE, MISSING, REDRAWN = "within noise", "moved", "new", "gone", "not measured", "redrawn"
STATES = (MOVED, NEW, GONE, REDRAWN, MISSING, WITHIN)
TOLERANCE = 1e-6
SHOWN = 3  # changed files that `status` names


@dataclass(frozen=True)
class Row:
    """One result, table or figure: what is committed, what is fresh, and what that means."""

    chapter: str
    device: str
    profile: str
    key: str
    state: str
    committed: str
    fresh: str
    unit: str = ""


def views(base: Path, chapters: Sequence[str]) -> set[tuple[str, str, str]]:
    """(chapter, device, profile) of every results file below `base`."""
    found = {(p.stem, p.parts[-3], p.parts[-2]) for p in (base / "results").glob("*/*/*.json")}
    return {view for view in found if not chapters or view[0] in chapters}


def state(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    """What a committed and a fresh result mean together; None: there is none."""
    if new is None:
        return GONE
    if old is None:
        return MISSING if new["value"] is None else NEW
    if old["value"] is None or new["value"] is None:
        return MISSING if new["value"] is None else NEW
    if old["unit"] != new["unit"]:
        return MOVED
    if "low" in old and "low" in new:
        return WITHIN if old["low"] <= new["high"] and new["low"] <= old["high"] else MOVED
    a, b = old["value"], new["value"]
    if any(isinstance(v, (bool, str)) for v in (a, b)):
        return WITHIN if type(a) is type(b) and a == b else MOVED
    return WITHIN if abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) else MOVED


def _text(result: dict[str, Any] | None) -> str:
    if result is None:
        return "-"
    value = result["value"]
    if value is None:
        return "not measured"
    if isinstance(value, (bool, str)):
        return str(value)
    span = f" ({result['low']:.4g} to {result['high']:.4g})" if "low" in result else ""
    return f"{value:.6g}{span}"


def _rows(view: tuple[str, str, str], old: dict[str, Any], new: dict[str, Any]) -> list[Row]:
    rows = []
    before, after = old.get("results", {}), new.get("results", {})
    for key in sorted(before.keys() | after.keys()):
        a, b = before.get(key), after.get(key)
        rows.append(Row(*view, key, state(a, b), _text(a), _text(b), (b or a or {}).get("unit", "")))
    for kind in ("tables", "figures"):
        before, after = old.get(kind, {}), new.get(kind, {})
        for name in sorted(before.keys() | after.keys()):
            a, b = (side.get(name, {}).get("sha256", "-")[:10] for side in (before, after))
            what = NEW if a == "-" else GONE if b == "-" else WITHIN if a == b else REDRAWN
            rows.append(Row(*view, f"{kind[:-1]} {name}", what, a, b))
    return rows


def _circumstances(view: tuple[str, str, str], old: dict[str, Any], new: dict[str, Any]) -> list[Row]:
    """Where the two were made differently, which explains what moved; these rows count as nothing moved."""
    rows = []
    for key in ("source_hash", "device_name", "seed", "parameters", "versions", "commit"):
        if old and old.get(key) != new.get(key):
            a, b = (str(side.get(key))[: 12 if key in ("source_hash", "commit") else 200] for side in (old, new))
            rows.append(Row(*view, key, "", a, b))
    return rows


def diff(chapters: Sequence[str] = (), device: str | None = None, profile: str | None = None) -> list[Row]:
    """Every result of every fresh view beside the committed one; None: all devices, all profiles."""
    rows: list[Row] = []
    for view in sorted(views(paths.build(), chapters)):
        if (device or view[1]) != view[1] or (profile or view[2]) != view[2]:
            continue
        old, new = load(*view) or {}, load(*view, fresh=True) or {}
        rows += _circumstances(view, old, new) + _rows(view, old, new)
    return rows


def summary(rows: Sequence[Row]) -> str:
    """One line: how many results are in which state."""
    counts = Counter(row.state for row in rows if row.state)
    if not counts:
        return "Against the committed results: nothing to compare."
    return "Against the committed results: " + ", ".join(f"{counts[s]} {s}" for s in STATES if counts[s]) + "."


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest entry."""
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    ruled = [header, ["-" * width for width in widths], *lines]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in ruled)


HEADER = ("chapter", "device", "profile", "result", "state", "committed", "fresh", "unit")


def _line(row: Row) -> tuple[str, ...]:
    return (row.chapter, row.device, row.profile, row.key, row.state, row.committed, row.fresh, row.unit)


def as_table(rows: Sequence[Row], everything: bool = False) -> str:
    """The rows as a table for the terminal; what is within noise only if `everything`."""
    lines = [_line(row) for row in rows if everything or row.state != WITHIN]
    return (table(HEADER, lines) + "\n\n" if lines else "") + summary(rows)


def write_page(rows: Sequence[Row]) -> Path:
    """The same as Markdown, in `_build/diff.md`; returns its path."""

    def cells(line: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in line) + " |"

    body = [cells(HEADER), cells(["---"] * len(HEADER)), *(cells(_line(row)) for row in rows)]
    path = paths.build() / "diff.md"
    paths.write_text(path, f"# Fresh against committed results\n\n{summary(rows)}\n\n" + "\n".join(body) + "\n")
    return path


UP_TO_DATE = "up to date"


def staleness(found: dict[str, Any] | None, chapter: str) -> str:
    """ "-" without results, else whether they belong to today's sources (or were revalidated), or what has changed."""
    if found is None:
        return "-"
    stale = changed(found, paths.notebook(chapter))
    if stale is None:
        return "no notebook"
    if stale:
        return f"stale: {', '.join(stale[:SHOWN])}" + (f" and {len(stale) - SHOWN} more" if len(stale) > SHOWN else "")
    by = found.get("revalidated")
    return UP_TO_DATE + (f", revalidated by {by['sample']} of {by['of']} runs" if by else "")


def is_stale(found: dict[str, Any], chapter: str) -> bool:
    """Whether anything that the recording rests on has changed, or its notebook is gone."""
    return changed(found, paths.notebook(chapter)) != []


def status(chapters: Sequence[str] = ()) -> str:
    """Per chapter, device and profile: committed and fresh results with age, commit and wall time; as a table."""
    every = views(paths.root() / "data", chapters) | views(paths.build(), chapters)
    lines = []
    for chapter in paths.chapters():
        if chapters and chapter not in chapters:
            continue
        mine = sorted(view for view in every if view[0] == chapter) or [(chapter, "-", "-")]
        every -= set(mine)
        for view in mine:
            lines += _status(view)
    for view in sorted(every):  # results of what is no chapter (any more)
        lines += _status(view)
    return table(("chapter", "device", "profile", "results", "state", "recorded", "commit", "wall s"), lines)


def _status(view: tuple[str, str, str]) -> list[tuple[str, ...]]:
    if view[1] == "-":
        return [(*view, "none", "not measured", "-", "-", "-")]
    lines: list[tuple[str, ...]] = []
    for name, fresh in (("committed", False), ("fresh", True)):
        found = load(*view, fresh=fresh)
        if found is not None:
            commit = (found["commit"] or "unknown")[:10] + (" +changes" if found["dirty"] else "")
            lines.append((*view, name, staleness(found, view[0]), found["time_utc"], commit, f"{found['wall_s']:.1f}"))
    return lines


def promote(
    chapters: Sequence[str] = (), device: str | None = None, profile: str | None = None, force: bool = False
) -> list[Row]:
    """Copies fresh results, tables and figures to `data/`, and the cleaned notebook of (cpu, quick) to `notebooks/`.

    Only runs that `reproduce` has finished and stamped count: what a notebook opened by hand has written, or a run that
    was broken off, is refused. The runs of a full recording are packed beside it. Returns the diff as it was before.
    Nothing is copied if any of it is stale; force: also what is stale, which stays marked so. None: all devices, all
    profiles.
    """
    chosen = [
        view
        for view in sorted(views(paths.build(), chapters))
        if (device or view[1]) == view[1] and (profile or view[2]) == view[2] and stamps.stamp(*view) is not None
    ]
    missing = sorted(set(chapters) - {view[0] for view in chosen})
    if missing or not chosen:
        which = ", ".join(missing) or "any chapter"
        raise ValueError(f"no run of {which} that reproduce has finished: run python -m tq.book reproduce first")
    notebooks = {}
    for view in chosen:
        where = f"{view[0]} ({view[1]}, {view[2]})"
        executed = stamps.folder(*view[1:]) / f"{view[0]}.ipynb"
        why = _why_refused(*view)
        if why is not None and not force:
            raise ValueError(f"{where}: its last run is not of today's sources ({why}); reproduce it first")
        stamps.publish(*view)  # results and notebook of one run, whatever was written in between
        if view[1:] == ("cpu", "quick"):
            today, ran = (paths.read_json(path) or {} for path in (paths.notebook(view[0]), executed))
            if not force:  # forced outputs need not be of today's code
                ran = clean.with_outputs(today, ran)
            notebooks[view[0]] = clean.dumps(clean.clean(ran))
        found = load(*view, fresh=True) or {}
        if is_stale(found, view[0]) and not force:
            stale = staleness(found, view[0])
            raise ValueError(f"{where}: its fresh results are not of today's sources ({stale}); reproduce it first")
    rows = [row for view in chosen for row in diff([view[0]], view[1], view[2])]
    for view in chosen:
        _commit(view)
    for chapter, text in notebooks.items():
        paths.write_text(paths.notebook(chapter), text)
    return rows


def promote_broken_off(chapter: str, device: str, profile: str) -> list[Row]:
    """Copies what a run had recorded when it broke off, marked so: a GPU may be lent for minutes, and not again.

    ValueError where there is no such run, where a later one has finished, or where its sources are not today's.
    """
    run = stamps.folder(device, profile) / f"{chapter}.partial"
    found = paths.read_json(paths.place("results", device, profile, f"{chapter}.json", run))
    if found is None or stamps.stamp(chapter, device, profile) is not None:
        raise ValueError(f"{chapter} ({device}, {profile}): no run that broke off after it had recorded something")
    if found["source_hash"] != source_hash(paths.notebook(chapter), device):
        raise ValueError(f"{chapter} ({device}, {profile}): the run that broke off is not of today's sources")
    for kind in stamps.KINDS:
        name = f"{chapter}.json" if kind == "results" else chapter
        source, target = (paths.place(kind, device, profile, name, base) for base in (run, paths.build()))
        stamps.replace(source, target)
    target = paths.place("results", device, profile, f"{chapter}.json", paths.build())
    paths.write_json(target, found | {"broken_off": True})
    rows = diff([chapter], device, profile)
    _commit((chapter, device, profile))
    return rows


def _why_refused(chapter: str, device: str, profile: str) -> str | None:
    """Why the last finished run is none of today's; of one from a GPU that is not here, only its sources count."""
    import torch

    last = stamps.stamp(chapter, device, profile)
    if device == "cpu" or torch.cuda.is_available() or last is None:
        return stamps.why_run(chapter, device, profile)
    same = last["source_hash"] == source_hash(paths.notebook(chapter), device)
    return None if same else "changed: its sources"


def _commit(view: tuple[str, str, str]) -> None:
    """Copies what the fresh results file names, and nothing that an older run left beside it."""
    build, data = paths.build(), paths.root() / "data"
    found = load(*view, fresh=True) or {}
    for kind in ("tables", "figures"):
        shutil.rmtree(paths.place(kind, view[1], view[2], view[0], data), ignore_errors=True)
        for entry in found.get(kind, {}).values():
            paths.write_bytes(data / entry["path"], (build / entry["path"]).read_bytes())
    if view[2] == "full" and found.get("runs"):
        archive.pack(*view, names=found["runs"]["files"])
    target = paths.place("results", view[1], view[2], f"{view[0]}.json", data)
    paths.write_bytes(target, paths.place("results", view[1], view[2], f"{view[0]}.json", build).read_bytes())
