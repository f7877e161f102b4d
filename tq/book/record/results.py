"""What a chapter found, with its provenance: numbers, tables, figures, and pieces of work that survive a kill.

A chapter writes to git-ignored `_build/` only, whoever runs it (the runner, plain papermill, nbval, a person).
Refused: NaN and infinities as results (None says "not measured"), intervals without a name for what they are,
figures without alt text. Nothing is filled in: what was not measured reads "not measured".
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from tq.book import paths
from tq.book.record import display, figures
from tq.book.record.dependencies import reading, source_hash, sources
from tq.book.record.figuredata import as_csv, rows
from tq.book.record.provenance import commit, device_name, resolve_device, versions
from tq.lab.stats import number, plain, quartiles

DATA_OF = "figure-"  # begins the name of the table that holds what a figure plots
SPREADS = ("none", "quartiles", "ci95", "range")
_KEY = re.compile(r"[a-z0-9_./-]+")
_NAME = re.compile(r"[a-z0-9_-]+")


def source_line(device: str, profile: str, name: str) -> str:
    """The small line under a figure or table; the build adds date and commit, which would make outputs differ."""
    command = f"make reproduce CHAPTERS={name} DEVICE={device} PROFILE={profile}"
    return (
        f'<small class="tq-provenance" data-view="{device}/{profile}/{name}">{device} · <code>{command}</code></small>'
    )


class Chapter:
    """The recorder of one chapter on one device in one profile. ``results.chapter`` checks the arguments and makes it.

    Args:
        name: name of the chapter.
        device: "cpu" or "cuda".
        profile: "quick" or "full"; the attribute ``full`` says whether it is "full".
        seed, parameters: as in ``chapter``; they are kept with the results.
    Example:
        >>> from tq.book import results
        >>> ch = results.chapter("example", device="cpu")
        >>> ch.record("error", 0.0094, low=0.0093, high=0.0095, spread="ci95", n=20)
        0.0094
    """

    def __init__(self, name: str, device: str, profile: str, seed: int, parameters: dict[str, Any]) -> None:
        self.name = name
        self.device = device
        self.profile = profile
        self.seed = seed
        self.full = profile == "full"
        self._start = time.perf_counter()
        self._resumed_s = 0.0  # what pieces of an earlier, killed run took
        self._pieces: dict[str, tuple[int, str, Any]] = {}
        self._results: dict[str, dict[str, Any]] = {}
        self._tables: dict[str, dict[str, Any]] = {}
        self._figures: dict[str, dict[str, Any]] = {}
        source = paths.notebook(name)
        head, dirty = commit()
        self._source_hash = source_hash(source, device) if source.is_file() else None  # by hand there may be none
        self._reads_before = len(_reads)
        self._provenance: dict[str, Any] = {
            "device_name": device_name(device),
            "device": device,
            "profile": profile,
            "commit": head,
            "dirty": dirty,
            "parameters": parameters,
            "seed": seed,
            "versions": versions(),
            "source_hash": self._source_hash,
            "sources": sources(source, device) if source.is_file() else {},
        }

    def _write(self) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        wall_s = round(time.perf_counter() - self._start + self._resumed_s, 3)
        found = {"results": self._results, "tables": self._tables, "figures": self._figures}
        target = paths.place("results", self.device, self.profile, f"{self.name}.json", paths.out())
        reads = dict(_reads[self._reads_before :])
        paths.write_json(target, {**self._provenance, **found, "reads": reads, "time_utc": now, "wall_s": wall_s})

    def record(
        self,
        key: str,
        value: Any,
        unit: str = "1",
        *,
        low: float | None = None,
        high: float | None = None,
        spread: str = "none",
        n: int = 1,
    ) -> Any:
        """Records one result, writes the chapter's file and returns the value, numbers as float.

        Args:
            key: name of the result: a-z, 0-9 and _ . / -.
            value: a number, bool or text; None says that it was not measured here.
            unit: unit of the value; "1" (default) means none.
            low, high: ends of the interval; None (default) means no interval.
            spread: what the interval is: "none" (default), "quartiles" of repeats, "ci95" over seeds, or full "range".
            n: repeats or seeds.
        Raises:
            ValueError: for a bad key, NaN or infinity, or an interval without both ends and a name.
        """
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(f"key={key!r}: accepted are a-z, 0-9 and _ . / -")
        if spread not in SPREADS:
            raise ValueError(f"spread={spread!r}: accepted are {', '.join(SPREADS)}")
        if (spread == "none") != (low is None and high is None) or (low is None) != (high is None):
            raise ValueError(f"spread={spread!r}, low={low!r}, high={high!r}: an interval needs both ends and a name")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n={n!r}: a whole number of repeats, at least 1, is needed")
        value = plain(value)
        if value is not None and not isinstance(value, (bool, str)):
            number(key, value)
        entry: dict[str, Any] = {"value": value, "unit": unit, "spread": spread, "n": n}
        if low is not None and high is not None:
            entry["low"], entry["high"] = number("low", low), number("high", high)
            if entry["low"] > entry["high"]:
                raise ValueError(f"low={low!r} lies above high={high!r}")
        self._results[key] = entry
        self._write()
        return value if value is None or isinstance(value, (bool, str)) else float(value)

    def record_samples(self, key: str, samples: Iterable[float], unit: str = "1") -> float:
        """Records the median of repeats, with their quartiles and number, and returns the median.

        Args:
            key, unit: as in ``record``.
            samples: the repeats, as numbers; an array or a tensor is accepted.
        """
        values = [number(key, value) for value in (samples.tolist() if hasattr(samples, "tolist") else samples)]
        low, median, high = quartiles(values)
        if len(values) == 1:
            return self.record(key, median, unit)
        return self.record(key, median, unit, low=low, high=high, spread="quartiles", n=len(values))

    def _source_line(self) -> str:
        return source_line(self.device, self.profile, self.name)

    def _keep(self, kind: str, name: str, suffix: str, data: bytes) -> dict[str, Any]:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"name={name!r}: accepted are a-z, 0-9, _ and -")
        target = paths.place(kind, self.device, self.profile, f"{self.name}/{name}{suffix}", paths.out())
        paths.write_bytes(target, data)
        path = target.relative_to(paths.out()).as_posix()  # the same below _build/ and below data/
        return {"path": path, "sha256": hashlib.sha256(data).hexdigest()}

    def table(self, name: str, frame: Any, caption: str) -> display.Table:
        """Keeps a pandas DataFrame as CSV and returns it as something that shows itself in a notebook.

        Missing values read "not measured". The index is kept when it is named or more than row numbers. ``name`` and
        ``caption`` are the table's, ``frame`` is the DataFrame. An empty caption raises ``ValueError``.
        """
        if not caption.strip():
            raise ValueError(f"caption={caption!r}: a table needs a caption")
        if name.startswith(DATA_OF):
            raise ValueError(f"name={name!r}: names that begin with {DATA_OF!r} hold the data of figures")
        import pandas as pd

        index = not isinstance(frame.index, pd.RangeIndex) or frame.index.name is not None
        kept = self._keep("tables", name, ".csv", frame.to_csv(index=index, lineterminator="\n").encode("utf-8"))
        self._tables[name] = {**kept, "caption": caption, "rows": len(frame)}
        self._write()
        return display.Table(frame, caption, self._source_line(), index, {"name": name})

    def figure(self, name: str, fig: Any, alt: str, caption: str) -> None:
        """Keeps the Matplotlib figure ``fig`` as PNG, shows it once with its alt text and caption, and closes it.

        What it plots is kept as a CSV table of the name "figure-<name>". Labels of lines are moved apart; ``problems``
        says what could still not be read. An empty ``alt`` or ``caption`` raises ``ValueError``.
        """
        if not alt.strip():
            raise ValueError(f"alt={alt!r}: a figure needs a text that says what it shows")
        if not caption.strip():
            raise ValueError(f"caption={caption!r}: a figure needs a caption")
        figures.apart(fig)
        buffer = io.BytesIO()
        fig.savefig(buffer, format="png", dpi=display.DPI, metadata={"Software": None})  # same figure, same bytes
        png = buffer.getvalue()
        kept = self._keep("figures", name, ".png", png)
        self._figures[name] = {**kept, "alt": alt, "caption": caption, "problems": figures.problems(fig)}
        drawn = rows(fig)
        if drawn:
            csv = self._keep("tables", DATA_OF + name, ".csv", as_csv(drawn).encode("utf-8"))
            self._tables[DATA_OF + name] = {**csv, "caption": f"Data of the figure {name!r}", "rows": len(drawn)}
        self._write()
        if "matplotlib.pyplot" in sys.modules:  # else the inline backend would show it a second time
            sys.modules["matplotlib.pyplot"].close(fig)
        text = display.figure_html(png, alt, caption, self._source_line(), {"name": name})
        display.show({"text/html": text, "text/plain": f"[figure: {alt}]"})

    def piece(self, name: str, compute: Callable[[], Any]) -> Any:
        """Returns ``compute()``, or what it gave before a kill if nothing that it depends on has changed.

        That is source, seed, parameters, versions and device. The runner drops a finished chapter's pieces.

        Args:
            name: of a-z, 0-9, _ and -; each piece needs its own, or asks for an equal ``partial``: else ``ValueError``.
            compute: returns tensors, numbers, texts, None, or lists, tuples and dicts of these, else ``TypeError``. It
                must seed its own generators, because a kept piece draws nothing.
        """
        import torch

        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"name={name!r}: accepted are a-z, 0-9, _ and -")
        # A cell may run again by hand, but two pieces of one name would silently be one.
        asked = (compute.func, compute.args, compute.keywords) if isinstance(compute, partial) else object()
        moment = (display.execution(), getattr(getattr(compute, "__code__", None), "co_filename", ""), asked)
        before = self._pieces.setdefault(name, moment)
        if before[2] != asked and (before[0] == moment[0] or before[1] != moment[1]):
            raise ValueError(f"name={name!r}: there is a piece of this name already; each needs its own")
        key = {k: self._provenance[k] for k in ("source_hash", "seed", "parameters", "versions", "device_name")}
        target = paths.pieces(self.name, self.device, self.profile) / f"{name}.pt"
        if target.is_file() and self._source_hash is not None:
            kept = torch.load(target, weights_only=True)
            if kept["key"] == key:
                self._resumed_s += kept["wall_s"]
                return kept["value"]
        start = time.perf_counter()
        value = compute()
        buffer = io.BytesIO()
        torch.save({"key": key, "value": value, "wall_s": time.perf_counter() - start}, buffer)
        buffer.seek(0)
        try:
            value = torch.load(buffer, weights_only=True)["value"]  # what a resumed run would load
        except Exception as error:
            raise TypeError(
                f"piece {name!r}: this {type(value).__name__} holds more than tensors, numbers, texts, lists and dicts "
                "and cannot be kept (NumPy arrays: torch.from_numpy)"
            ) from error
        paths.write_bytes(target, buffer.getvalue())
        return value

    def outcomes(
        self, function: Callable[..., Any], tasks: Sequence[dict[str, Any]], jobs: int | None = None
    ) -> list[Any]:
        """Returns ``function(task, device=...)`` of every task, each kept as soon as it is done, longer than a piece.

        The recording names the runs that it rests on, the devices they were made on, and those among them that an
        earlier commit made. ``tasks`` are dicts of JSON values; ``jobs`` of them run at a time, by default one per core
        on a CPU and one on a GPU. ``tq.book.record.tasks`` says when a kept result counts.
        """
        from tq.book.record.tasks import files, outcomes, read

        folder = paths.tasks(self.name, self.device, self.profile)
        found = outcomes(function, tasks, folder, self.device, jobs)
        runs = self._provenance.setdefault("runs", {"files": [], "devices": [], "revalidated": {}})
        for path in files(function, tasks, folder, self.device):
            kept = read(path)
            note = kept.get("revalidated")
            runs["devices"] = sorted({*runs["devices"], kept["device_name"]})
            runs["files"] = sorted({*runs["files"], path.name})
            if note is not None:
                at = (note["at"] or "unknown")[:10]
                runs["revalidated"][path.name] = f"by {note['sample']} of {note['of']} at {at}"
        return found


def chapter(
    name: str,
    device: str = "auto",
    profile: str = "quick",
    seed: int = 0,
    parameters: Mapping[str, Any] | None = None,
) -> Chapter:
    """Opens the recorder of a chapter. It has no results yet; the old file stays until the first is recorded.

    Args:
        name: name of the chapter: a-z, 0-9, _ and -.
        device: "cpu", "cuda" or "auto" (default), which takes the GPU if there is one.
        profile: "quick" (default) or "full".
        seed: seed of the chapter's random numbers, kept with the results; 0 by default.
        parameters: what else decides the results, as JSON values, kept with them; None (default) means nothing.
    Returns:
        A ``Chapter`` that writes to ``_build/`` of the book's tree.
    Raises:
        TypeError, ValueError: for a seed that is no int, a bad name, an unknown profile, or a device that is not there.
    Example:
        >>> from tq.book import results
        >>> results.chapter("example", device="cpu").profile
        'quick'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"name={name!r}: a chapter's name consists of a-z, 0-9, _ and -")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r}: a whole number is needed")
    device = resolve_device(device)
    paths.check_view(device, profile)
    return Chapter(name, device, profile, seed, dict(parameters or {}))


_reads: list[tuple[str, str | None]] = []  # recordings of other chapters that this process has taken values from
_BY_HAND: dict[tuple[str, str, str], Chapter] = {}


def record(
    chapter_name: str,
    key: str,
    value: Any,
    unit: str = "1",
    *,
    device: str = "auto",
    profile: str = "quick",
    low: float | None = None,
    high: float | None = None,
    spread: str = "none",
    n: int = 1,
) -> Any:
    """Records one result by hand. All that one process records for a chapter goes to one file.

    Args:
        chapter_name: name of the chapter.
        key, value, unit, low, high, spread, n: as in ``Chapter.record``.
        device, profile: as in ``chapter``.
    Returns:
        The value, numbers as float.
    Raises:
        ValueError: as ``Chapter.record`` and ``chapter``.
    Example:
        >>> from tq.book import results
        >>> results.record("example", "speed", 12, unit="GB/s", device="cpu")
        12.0
    """
    view = (chapter_name, resolve_device(device), profile)
    if view not in _BY_HAND:
        _BY_HAND[view] = chapter(chapter_name, device=view[1], profile=profile)
    return _BY_HAND[view].record(key, value, unit, low=low, high=high, spread=spread, n=n)


def load(chapter: str, device: str = "cpu", profile: str = "full", fresh: bool = False) -> dict[str, Any] | None:
    """Reads a chapter's results file.

    A chapter that is recorded in the same process notes what it has read, and is stale when that is recorded anew.

    Args:
        chapter: name of the chapter.
        device: "cpu" (default) or "cuda".
        profile: "quick" or "full" (default).
        fresh: whether to read what was just run (``_build/``) instead of what is committed (``data/``, default).
    Returns:
        A dict of "results", "tables", "figures" and their provenance; None if there is no such file.
    Raises:
        ValueError: for an unknown device or profile, or a damaged file.
    Example:
        >>> from tq.book import results
        >>> _ = results.record("example", "error", 0.0094, device="cpu")
        >>> results.load("example", profile="quick", fresh=True)["results"]["error"]["value"]
        0.0094
    """
    if not fresh:
        view = f"{device}/{profile}/{chapter}"
        _reads.append((view, reading(view)))
    return _load(chapter, device, profile, fresh)


def _load(chapter: str, device: str, profile: str, fresh: bool = False) -> dict[str, Any] | None:
    paths.check_view(device, profile)
    base = paths.build() if fresh else paths.root() / "data"
    return paths.read_json(paths.place("results", device, profile, f"{chapter}.json", base))


def value(chapter: str, key: str, device: str = "cpu", profile: str = "full", fresh: bool = False) -> Any:
    """Reads one recorded value.

    Args:
        chapter, device, profile, fresh: as in ``load``.
        key: name of the result.
    Returns:
        The value, in the unit in which it was recorded; None if it was not measured on that device.
    Raises:
        KeyError: if the file has no such result.
    Example:
        >>> from tq.book import results
        >>> _ = results.record("example", "error", 0.0094, device="cpu")
        >>> results.value("example", "error", profile="quick", fresh=True)
        0.0094
    """
    found = load(chapter, device, profile, fresh)
    if found is None:
        return None
    if key not in found["results"]:
        raise KeyError(f"{chapter!r} on {device} ({profile}) has no result {key!r}; it has {sorted(found['results'])}")
    return found["results"][key]["value"]


def show(value: Any, format: str = "") -> str:
    """Formats a value for prose; None reads "not measured".

    Args:
        value: a number, bool or text, or None.
        format: a format specification such as ".3g"; empty by default.
    Returns:
        The text.
    Example:
        >>> from tq.book import results
        >>> results.show(0.0094, ".2%"), results.show(None)
        ('0.94%', 'not measured')
    """
    return "not measured" if value is None else f"{value:{format}}"


def beside(chapter: str, keys: Iterable[str], profile: str = "full", format: str = ".4g") -> display.Table:
    """A table of committed results with their intervals: one row per key, one column per device.

    A cell reads "not measured" if the device has no recording of the chapter, or its recording lacks the key. The book
    makes this table anew whenever it is built, so it shows what is recorded then.

    Args:
        chapter, keys: names of the chapter and of the results.
        profile: "quick" or "full" (default).
        format: format specification of numbers; ".4g" by default.
    Returns:
        A table that shows itself in a notebook; ``frame`` holds it as a pandas DataFrame.
    Example:
        >>> from tq.book import results
        >>> results.beside("no-such-chapter", ["error"]).frame.loc["error", "cpu, full"]
        'not measured'
    """
    import pandas as pd

    columns: dict[str, dict[str, str]] = {}
    lines, keys = [], list(keys)
    for device in paths.DEVICES:
        recorded = _load(chapter, device, profile)  # shown as it is when the book is built: no result rests on it
        if recorded is not None:
            lines.append(f'<small class="tq-provenance" data-view="{device}/{profile}/{chapter}">{device}</small>')
        found = (recorded or {"results": {}})["results"]
        column = columns.setdefault(f"{device}, {profile}", {})
        for key in keys:
            entry = found.get(key, {"value": None})
            text = show(entry["value"], format if isinstance(entry["value"], float) else "")
            if "low" in entry and entry["value"] is not None:
                text += f" [{entry['low']:{format}}, {entry['high']:{format}}]"
            column[key] = text
    asked = {"chapter": chapter, "keys": keys, "profile": profile, "format": format}
    caption = f"Recorded in the {profile} profile."
    return display.Table(pd.DataFrame(columns), caption, "".join(lines), True, {"beside": json.dumps(asked)})
