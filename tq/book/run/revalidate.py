"""A stale recording counts again where today's code gives its kept runs anew, bit for bit.

A random sample of the runs that a recording rests on is computed with today's code. One difference, and it stays stale.
If all agree, the kept runs count as today's, and the recording takes today's hash and says what it was revalidated by;
but only if everything that has changed lies among what those runs are made of. A changed notebook cell, or an
instrument that the runs do not use, is not covered by them: then the chapter is to be reproduced, which takes the kept
runs and computes only the rest. So it is with a chapter that has no recording yet: its kept runs count again.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tq.book import paths
from tq.book.record import tasks
from tq.book.record.dependencies import changed, module_sources, source_hash, sources
from tq.book.record.provenance import commit, device_name
from tq.book.record.results import load
from tq.book.run import archive, former_code
from tq.book.run.stamps import now

SAMPLE = 6
TOLERANCE = 1e-3  # of a value's size (rms of a tensor), on another kind of processor than the recording's


@dataclass(frozen=True)
class Compared:
    """One run computed anew: the largest difference of any of its values over that value's size; 0: the same bits.

    value: what came of it today; code: the commit by whose code it was compared with here; "": with what was kept.
    why: it could not be compared so.
    """

    task: dict[str, Any]
    difference: float
    value: Any = None
    code: str = ""
    why: str = ""

    def agrees(self, bound: float) -> bool:
        return self.difference <= (0.0 if self.code else bound)

    def line(self, bound: float) -> str:
        said = "the same bits" if self.difference == 0 else f"differs by {self.difference:.2g} of a value's size"
        said += f" beside the code of {self.code[:10]} on this processor" if self.code else ""
        said += f" and was not compared by its own code: {self.why}" if self.why else ""
        return f"{'ok' if self.agrees(bound) else 'DIFFERS'}: {said}: {json.dumps(self.task, sort_keys=True)}"


def difference(a: Any, b: Any) -> float:
    """0 for the same bits (NaN included), else the largest difference over the size of the second; inf for other kinds.

    Tensors of all dtypes, numbers, texts, None, and lists, tuples and dicts of these.
    """
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensors(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return max((difference(a[key], b[key]) for key in a), default=0.0) if a.keys() == b.keys() else float("inf")
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        pairs = zip(a, b, strict=False)
        return max((difference(x, y) for x, y in pairs), default=0.0) if len(a) == len(b) else float("inf")
    if isinstance(a, float) and isinstance(b, float):
        return _tensors(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
    return 0.0 if type(a) is type(b) and a == b else float("inf")


def _tensors(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.dtype != b.dtype or a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    first, second = (x.detach().cpu().contiguous().reshape(-1) for x in (a, b))
    if torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
        return 0.0
    if not a.dtype.is_floating_point:
        return float("inf")
    first, second = first.double(), second.double()
    gap = (first - second).abs().max().item() / max(second.pow(2).mean().sqrt().item(), 1e-300)
    return gap if gap > 0 else float("inf")  # NaN in one of them, or zeros of two signs


def kept_runs(recorded: dict[str, Any], folder: Path) -> list[Path]:
    """The kept runs that a recording rests on; ValueError where some are missing."""
    runs = recorded.get("runs")
    if not runs:
        raise ValueError("this recording rests on no kept runs: reproduce the chapter instead")
    found = [path for path in map(folder.joinpath, runs["files"]) if path.is_file()]
    if len(found) < len(runs["files"]):
        raise ValueError(f"{len(runs['files']) - len(found)} of its {len(runs['files'])} runs are not kept here")
    return found


def _of(files: Sequence[Path], functions: Collection[str]) -> list[Path]:
    """The runs of these functions; of all where none is named."""
    made_by = {path: tasks.read(path)["function"].partition(":")[2] for path in files}
    if unknown := set(functions) - set(made_by.values()):
        known = ", ".join(sorted(set(made_by.values())))
        raise ValueError(f"functions must be among {known}, got {', '.join(sorted(unknown))}")
    return [path for path, name in made_by.items() if name in functions or not functions]


def compare(sample: Sequence[Path], device: str, jobs: int | None = None) -> list[Compared]:
    """Computes the runs of these files again with today's code."""
    kept = [tasks.read(path) for path in sample]
    compared = []
    with TemporaryDirectory() as scratch:  # not beside the kept ones: today's code must run
        for name in sorted({each["function"] for each in kept}):
            of = [each for each in kept if each["function"] == name]
            anew = tasks.outcomes(tasks.named(name), [each["task"] for each in of], Path(scratch), device, jobs)
            compared += [Compared(e["task"], difference(n, e["value"]), n) for e, n in zip(of, anew, strict=True)]
    return compared


def beside_its_code(path: Path, found: Compared, device: str, jobs: int | None = None) -> Compared:
    """A run of today beside that of the code that the kept one stands for, both computed here."""
    kept = tasks.read(path)
    at = kept.get("revalidated", {}).get("at") or kept["commit"]
    try:
        if kept["versions"] != tasks.circumstances(tasks.named(kept["function"]), device)["versions"]:
            raise ValueError("it was computed with other versions of libraries")
        if at is None:
            raise ValueError("its commit is not known")
        (beside,) = former_code.outcomes(at, kept["function"], [found.task], device, jobs)
        if beside["sources"] != kept["sources"]:
            raise ValueError(f"the sources of {at[:10]} are not those that it was computed with")
    except ValueError as error:
        return replace(found, why=str(error))
    return Compared(found.task, difference(found.value, beside["value"]), found.value, at)


def _adopt(files: Sequence[Path], device: str, note: dict[str, Any]) -> list[str]:
    """Lets kept runs count as today's; returns the names that they have as such."""
    names = []
    for path in files:
        kept = tasks.read(path)
        function = tasks.named(kept["function"])
        around = tasks.circumstances(function, device)
        name = tasks.file_name(function, kept["task"], around)
        if not (path.parent / name).is_file():
            made_on = kept["device_name"]
            tasks.write(path.parent / name, {**kept, **around, "device_name": made_on, "revalidated": note})
        names.append(name)
    return sorted(set(names))


def revalidate(
    chapter: str, device: str = "cpu", profile: str = "full", *, sample: int = SAMPLE, jobs: int | None = None,
    functions: Collection[str] = (),
) -> tuple[bool, str]:  # fmt: skip
    """(whether the recording counts as today's, what was found, in lines).

    sample: runs that are computed anew, drawn by a generator that the recording and today's sources seed: a second try
    draws the same. Without a recording: whether the kept runs count as today's. functions: names of those whose runs
    are sampled and count again; others, as of what measures time, which never comes out the same, are left to
    ``reproduce``. Raises ValueError where there is nothing to revalidate or not all its runs are kept.
    """
    if sample < 1:
        raise ValueError(f"sample={sample!r}: at least 1")
    recorded, notebook = load(chapter, device, profile), paths.notebook(chapter)
    if recorded is None:
        return _runs_alone(chapter, device, profile, sample, jobs)
    stale = changed(recorded, notebook)
    if not stale:
        return True, f"{chapter} ({device}, {profile}) is up to date"
    if archive.place(chapter, device, profile).is_file():
        archive.unpack(chapter, device, profile)
    files = _of(kept_runs(recorded, paths.tasks(chapter, device, profile)), functions)
    today = source_hash(notebook, device)
    chosen = random.Random(f"{recorded['source_hash']} {today}").sample(files, min(sample, len(files)))
    agree, bound, lines = _try(chosen, device, jobs)
    if not agree:
        return False, "\n".join([*lines, "today's code gives other results: the recording stays stale"])
    note = {
        "at": commit()[0], "time_utc": now(), "sample": len(chosen), "of": len(files), "allowed": bound,
        "found": list(lines),
        "recorded_hash": recorded["source_hash"],
    }  # fmt: skip
    adopted = _adopt(files, device, note)
    apart = _not_covered(files, stale, set(sources(notebook, device)), device) + _of_its_own(notebook)
    if functions or apart:
        rest = f", but do not cover what else changed: {', '.join(apart)}" if apart else ""
        lines.append(f"the {len(files)} kept runs count again{rest}")
        lines.append(f"python -m tq.book reproduce {chapter} --profile {profile} computes the rest")
        return False, "\n".join(lines)
    target = paths.place("results", device, profile, f"{chapter}.json", paths.root() / "data")
    runs = {**recorded["runs"], "files": adopted}
    fresh = {"source_hash": today, "sources": sources(notebook, device), "runs": runs, "revalidated": note}
    paths.write_json(target, {**recorded, **fresh})
    at = (recorded["commit"] or "unknown")[:10]
    lines.append(f"recorded at {at}, revalidated by {len(chosen)} of {len(files)} runs")
    return True, "\n".join(lines)


def _runs_alone(chapter: str, device: str, profile: str, sample: int, jobs: int | None) -> tuple[bool, str]:
    """The kept runs of a chapter without a recording."""
    if archive.place(chapter, device, profile).is_file():
        archive.unpack(chapter, device, profile)
    kept = {path: tasks.read(path) for path in sorted(paths.tasks(chapter, device, profile).glob("*.pt"))}
    if not kept:
        raise ValueError(f"{chapter} ({device}, {profile}) has no recording and no kept runs")
    functions = {each["function"] for each in kept.values()}
    today = {name: tasks.circumstances(tasks.named(name), device) for name in functions}
    names = {path: tasks.file_name(tasks.named(each["function"]), each["task"], today[each["function"]])
             for path, each in kept.items()}  # fmt: skip
    stale = [path for path, name in names.items() if not (path.parent / name).is_file()]
    if not stale:
        return True, f"{chapter} ({device}, {profile}): {len(set(names.values()))} kept runs are today's"
    draw = random.Random(f"{[path.name for path in stale]} {sorted(str(each) for each in today.values())}")
    chosen = draw.sample(stale, min(sample, len(stale)))
    agree, bound, lines = _try(chosen, device, jobs)
    if not agree:
        return False, "\n".join([*lines, "today's code gives other results: these runs do not count"])
    note: dict[str, Any] = {"at": commit()[0], "time_utc": now(), "sample": len(chosen), "of": len(stale)}
    note |= {"allowed": bound, "found": list(lines)}
    _adopt(stale, device, note)
    for path in stale:
        path.unlink()
    return True, "\n".join([*lines, f"{len(stale)} kept runs count as today's; the chapter has no recording yet"])


def _try(chosen: Sequence[Path], device: str, jobs: int | None) -> tuple[bool, float, list[str]]:
    """Whether these runs come out the same today, the difference that is allowed, and a line for each."""
    names, here = {tasks.read(path)["device_name"] for path in chosen}, device_name(device)
    bound = 0.0 if names == {here} else TOLERANCE
    chosen = sorted(chosen, key=lambda path: str(tasks.read(path)["function"]))  # as compare orders them
    compared = compare(chosen, device, jobs)
    if bound:
        compared = [
            one if one.agrees(bound) else beside_its_code(path, one, device, jobs)
            for path, one in zip(chosen, compared, strict=True)
        ]
    lines = [each.line(bound) for each in compared]
    if bound:
        lines.insert(0, f"recorded on {', '.join(sorted(names))}, here {here}: {bound:g} of a value's size is allowed")
    return all(each.agrees(bound) for each in compared), bound, lines


def _of_its_own(notebook: Path) -> list[str]:
    """What cells measure themselves: no run holds it, so code that gives the same runs may give other times."""
    own = re.search(r"\.piece\(|time_calls\(", notebook.read_text(encoding="utf-8"))
    return ["what cells of the notebook measure themselves"] if own else []


def _not_covered(files: Sequence[Path], stale: Sequence[str], inputs: set[str], device: str) -> list[str]:
    """What has changed and is no part of what these runs are made of. For files that are gone, what is left answers."""
    modules = {tasks.read(path)["function"].partition(":")[0] for path in files}
    made_of = {name for module in modules for name in module_sources(module, device)}
    files_of = {name for name in stale if name.startswith(("tq/", "kernels/", "data/", "notebooks/"))}
    return sorted(set(stale) - made_of - (files_of - inputs))
