"""Finished runs of chapters on this machine: their stamps, and whether they are still up to date.

    _build/executed/<device>/<profile>/<chapter>.ipynb     the executed notebook, as papermill left it
                                       <chapter>.json      its stamp: key, time, seconds of each cell
                                       <chapter>.run/      the results, tables and figures of that run
                                       <chapter>.partial*  an interrupted or failed run

The stamp is written last, so what has a stamp is complete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tq.book import paths
from tq.book.record.dependencies import changed, source_hash
from tq.book.record.provenance import device_name, versions

KINDS = ("results", "tables", "figures")


class Busy(RuntimeError):
    """Another run holds the lock."""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@contextmanager
def lock(name: str = "lock") -> Iterator[None]:
    """Holds `_build/<name>`. The kernel gives it back when the process ends, however it ends, so it is never stale."""
    path = paths.build() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise Busy(f"another run holds _build/{name}: {file.read().strip()}; wait for it or end it") from None
        file.truncate(0)
        file.write(f"process {os.getpid()}, started {now()}")
        file.flush()
        yield
        file.truncate(0)


def folder(device: str, profile: str) -> Path:
    return paths.build() / "executed" / device / profile


def key(chapter: str, device: str, profile: str) -> dict[str, Any]:
    """What makes two runs the same run."""
    return {
        "source_hash": source_hash(paths.notebook(chapter), device),
        "parameters": {"device": device, "profile": profile},
        "versions": versions(),
        "device_name": device_name(device),
    }


def stamp(chapter: str, device: str, profile: str) -> dict[str, Any] | None:
    """The stamp of the last finished run, up to date or not."""
    return paths.read_json(folder(device, profile) / f"{chapter}.json")


def why_run(chapter: str, device: str, profile: str) -> str | None:
    """Why the chapter has to be executed, in a few words; None if its last run is still up to date."""
    last = stamp(chapter, device, profile)
    where = folder(device, profile)
    if last is None:
        broken_off = (where / f"{chapter}.partial.ipynb").exists()
        kept = len(list(paths.pieces(chapter, device, profile).glob("*.pt")))
        return f"broken off or failed before, {kept} pieces kept" if broken_off else "never run here"
    if not (where / f"{chapter}.ipynb").is_file() or not (where / f"{chapter}.run").is_dir():
        return "its files are gone"
    today = key(chapter, device, profile)
    other = [name for name in today if last.get(name) != today[name]]
    words = {"source_hash": "its sources", "parameters": "parameters", "versions": "package versions"}
    if other:
        return f"changed: {', '.join(words.get(name, 'the device') for name in other)}"
    recorded = paths.place("results", device, profile, f"{chapter}.json", where / f"{chapter}.run")
    read = changed(paths.read_json(recorded) or {"source_hash": today["source_hash"]}, paths.notebook(chapter))
    return f"changed: results that it read ({', '.join(read)})" if read else None


def publish(chapter: str, device: str, profile: str) -> None:
    """Puts the results, tables and figures of the last finished run where fresh results are looked for."""
    run = folder(device, profile) / f"{chapter}.run"
    for kind in KINDS:
        name = f"{chapter}.json" if kind == "results" else chapter
        source, target = (paths.place(kind, device, profile, name, base) for base in (run, paths.build()))
        replace(source, target)


def replace(source: Path, target: Path) -> None:
    """Makes target a copy of source, a file or a folder; where there is no source, nothing is left of target."""
    if source.is_file():
        paths.write_bytes(target, source.read_bytes())
        return
    shutil.rmtree(target, ignore_errors=True)
    for path in sorted(source.rglob("*")) if source.is_dir() else ():
        if path.is_file():
            paths.write_bytes(target / path.relative_to(source), path.read_bytes())
