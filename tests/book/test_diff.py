"""What counts as moved, and that only today's results are promoted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.book import helpers as h
from tq.book import paths
from tq.book.record import figures, results
from tq.book.record.dependencies import source_hash
from tq.book.run import compare, stamps

numbers = st.floats(-1e6, 1e6)


def result(value: Any, low: float | None = None, high: float | None = None, unit: str = "s") -> dict[str, Any]:
    return {"value": value, "unit": unit} | ({} if low is None else {"low": low, "high": high})


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        (result(1.0), result(1.0), "within noise"),
        (result(1.0), result(1.0 + 1e-7), "within noise"),
        (result(1.0), result(1.0 + 1e-5), "moved"),
        (result(0.0), result(1e-9), "moved"),
        (result(3), result(3.0), "within noise"),
        (result(1.0, 0.5, 1.5), result(1.6, 1.4, 1.8), "within noise"),
        (result(1.0, 0.5, 1.5), result(1.9, 1.6, 2.0), "moved"),
        (result(1.0, 0.5, 1.5), result(1.4), "moved"),
        (result("a"), result("a"), "within noise"),
        (result("a"), result("b"), "moved"),
        (result(True), result(False), "moved"),
        (result(True), result(1.0), "moved"),
        (result(1.0, unit="s"), result(1.0, unit="ms"), "moved"),
        (None, result(1.0), "new"),
        (result(None), result(1.0), "new"),
        (result(1.0), None, "gone"),
        (result(1.0), result(None), "not measured"),
        (None, result(None), "not measured"),
    ],
)  # fmt: skip
def test_states(old: dict[str, Any] | None, new: dict[str, Any] | None, state: str) -> None:
    assert compare.state(old, new) == state


@given(numbers, numbers, st.floats(0, 1e3), st.floats(0, 1e3))
def test_being_within_noise_is_mutual(a: float, b: float, da: float, db: float) -> None:
    with_interval = (result(a, a - da, a + da), result(b, b - db, b + db))
    for old, new in (with_interval, (result(a), result(b))):
        assert compare.state(old, new) == compare.state(new, old)
        assert compare.state(old, old) == "within noise"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    chapters = {name: h.notebook("x = 1", name=name) for name in ("demo", "other")}
    monkeypatch.setenv("TQ_BOOK_ROOT", str(h.book(tmp_path, chapters)))
    return tmp_path


def measure(value: float, name: str = "demo", profile: str = "full") -> None:
    ch = results.chapter(name, device="cpu", profile=profile)
    ch.record("speed", value, "a|b")
    ch.record("later", None)
    ch.table("t", pd.DataFrame({"x": [value]}), "T")
    fig, ax = figures.figure("half")
    ax.plot([0, value], [0, 1])
    ch.figure("f", fig, alt="A line", caption="F")


def finish(root: Path, name: str = "demo", profile: str = "full") -> None:
    """What `reproduce` does with a chapter that went through: its results, its notebook and, last, its stamp."""
    where = stamps.folder("cpu", profile)
    for kind in stamps.KINDS:
        of = f"{name}.json" if kind == "results" else name
        made = paths.place(kind, "cpu", profile, of, paths.build())
        stamps.replace(made, paths.place(kind, "cpu", profile, of, where / f"{name}.run"))
    h.write(where / f"{name}.ipynb", (root / f"notebooks/{name}.ipynb").read_text())
    paths.write_json(where / f"{name}.json", {**stamps.key(name, "cpu", profile), "time_utc": "today", "wall_s": 1.0})


def states(root: Path) -> dict[str, str]:
    return {row.key: row.state for row in compare.diff()}


def test_promoted_results_are_the_committed_ones_until_something_moves(root: Path) -> None:
    measure(1.0)
    drawn = ("table t", "figure f", "table figure-f")
    assert states(root) == {"speed": "new", "later": "not measured", **dict.fromkeys(drawn, "new")}
    finish(root)
    compare.promote(["demo"])
    committed = results.load("demo")
    assert committed is not None and committed == results.load("demo", fresh=True)
    for entry in (committed["tables"]["t"], committed["figures"]["f"]):
        assert (root / "data" / entry["path"]).read_bytes() == (root / "_build" / entry["path"]).read_bytes()
    measure(1.0)
    assert set(states(root).values()) == {"within noise", "not measured"}
    measure(2.0)
    assert states(root) == {"speed": "moved", "later": "not measured", **dict.fromkeys(drawn, "redrawn")}
    assert "1 moved, 3 redrawn, 1 not measured" in compare.summary(compare.diff())
    results.chapter("demo", device="cpu", profile="full").record("only", 1.0)
    assert states(root)["speed"] == states(root)["figure f"] == "gone"
    finish(root)
    compare.promote()
    assert not (root / "data/figures/cpu/full/demo").exists()  # what is gone leaves no file behind
    done = h.tq_book(root, "diff", "--all")
    assert done.returncode == 0 and "only" in done.stdout and "1 within noise" in done.stdout
    measure(1.0)
    assert "| a\\|b |" in compare.write_page(compare.diff()).read_text()


def test_what_was_made_differently_is_said_beside_the_numbers(root: Path) -> None:
    measure(1.0)
    finish(root)
    compare.promote()
    h.write(root / "notebooks/demo.ipynb", h.notebook("x = 2", name="demo"))
    measure(1.0)
    rows = {row.key: row for row in compare.diff()}
    assert rows["source_hash"].committed != rows["source_hash"].fresh and rows["source_hash"].state == ""
    assert "moved" not in compare.summary(compare.diff())


def test_stale_results_are_not_promoted_and_nothing_else_with_them(root: Path) -> None:
    measure(1.0)
    measure(1.0, name="other")
    finish(root), finish(root, "other")
    h.write(root / "notebooks/other.ipynb", h.notebook("x = 2", name="other"))
    with pytest.raises(ValueError, match=r"other \(cpu, full\).*not of today's sources \(changed: its sources\)"):
        compare.promote()
    assert not (root / "data").exists()
    assert h.tq_book(root, "promote", "other").returncode == 1
    compare.promote(["demo"])
    compare.promote(["other"], force=True)
    table = compare.status().splitlines()
    assert sum("stale" in line and line.startswith("other") for line in table) == 2
    assert sum("up to date" in line and line.startswith("demo") for line in table) == 2


@pytest.mark.parametrize("profile", ["quick", "full"])
def test_only_a_run_that_reproduce_finished_is_promoted(root: Path, profile: str) -> None:
    """A notebook opened by hand and stopped after some cells leaves results, but no stamp."""
    measure(1.0, profile=profile)
    for named in (["demo"], ["other"], []):
        with pytest.raises(ValueError, match="no run of .* that reproduce has finished"):
            compare.promote(named)
    finish(root, profile=profile)
    measure(7.0, profile=profile)  # by hand, after the run that was finished
    compare.promote()
    assert results.value("demo", "speed", profile=profile) == 1.0


def elsewhere(root: Path, name: str = "demo") -> dict[str, Any]:
    """The files of a run as they come from a GPU: a recording, below `demo.partial`; returns what it says."""
    measure(1.0, name=name)
    said = paths.read_json(paths.place("results", "cpu", "full", f"{name}.json", paths.build())) or {}
    said |= {"device": "cuda", "device_name": "a GPU", "versions": {"torch": "1.0"}, "tables": {}, "figures": {}}
    said["source_hash"] = source_hash(paths.notebook(name), "cuda")
    run = stamps.folder("cuda", "full") / f"{name}.partial"
    paths.write_json(paths.place("results", "cuda", "full", f"{name}.json", run), said)
    return said


def test_a_recording_from_a_gpu_that_is_not_here_counts_by_its_sources(root: Path) -> None:
    said = elsewhere(root)
    where = stamps.folder("cuda", "full")
    (where / "demo.partial").rename(where / "demo.run")
    paths.write_json(paths.place("results", "cuda", "full", "demo.json", paths.build()), said)
    h.write(where / "demo.ipynb", (root / "notebooks/demo.ipynb").read_text())
    stamp = {key: said[key] for key in ("source_hash", "versions", "device_name")}
    paths.write_json(where / "demo.json", {**stamp, "time_utc": "today", "wall_s": 1.0})
    compare.promote(["demo"], "cuda", "full")
    assert results.value("demo", "speed", device="cuda") == 1.0
    h.write(root / "notebooks/demo.ipynb", h.notebook("x = 2", name="demo"))
    with pytest.raises(ValueError, match="not of today's sources"):
        compare.promote(["demo"], "cuda", "full")


def test_what_a_run_had_recorded_when_it_broke_off(root: Path) -> None:
    elsewhere(root)
    promote = ("promote", "demo", "--broken-off", "--profile", "full")
    assert "goes with one CHAPTER" in h.tq_book(root, *promote).stderr
    assert h.tq_book(root, *promote, "--device", "cuda").returncode == 0
    committed = results.load("demo", device="cuda")
    assert committed is not None and committed["broken_off"] is True and committed["results"]["speed"]["value"] == 1.0
    with pytest.raises(ValueError, match="no run that broke off"):
        compare.promote_broken_off("other", "cuda", "full")
    h.write(root / "notebooks/demo.ipynb", h.notebook("x = 2", name="demo"))
    with pytest.raises(ValueError, match="not of today's sources"):
        compare.promote_broken_off("demo", "cuda", "full")


def test_results_of_others_that_have_moved_make_a_run_stale(root: Path) -> None:
    measure(1.0, name="other")
    finish(root, "other")
    compare.promote(["other"])
    ch = results.chapter("demo", device="cpu", profile="full")
    ch.record("twice", 2 * results.value("other", "speed"))
    finish(root)
    compare.promote(["demo"])
    assert "up to date" in compare.status(["demo"]) and stamps.why_run("demo", "cpu", "full") is None
    measure(3.0, name="other")
    finish(root, "other")
    compare.promote(["other"])
    assert "stale: cpu/full/other" in compare.status(["demo"])
    assert stamps.why_run("demo", "cpu", "full") == "changed: results that it read (cpu/full/other)"


def test_chapters_never_run_are_not_measured(root: Path) -> None:
    assert "not measured" in compare.status(["demo"]) and "other" not in compare.status(["demo"])
