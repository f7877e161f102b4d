"""Results keep what they were given, with its spread and provenance, and refuse what is none."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import strategies as st

from tests.book import helpers as h
from tq.book import paths
from tq.book.record import figures, results
from tq.book.record.dependencies import source_hash

finite = st.floats(-1e12, 1e12)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TQ_BOOK_ROOT", str(h.book(tmp_path, {"demo": h.notebook("x = 1", name="demo")})))
    return tmp_path


@pytest.fixture
def ch(root: Path) -> results.Chapter:
    return results.chapter("demo", device="cpu")


def test_a_file_says_what_was_measured_on_what(root: Path) -> None:
    ch = results.chapter("demo", device="cpu", profile="full", seed=3, parameters={"runs": 2})
    assert ch.full and (ch.name, ch.device, ch.profile, ch.seed) == ("demo", "cpu", "full", 3)
    assert ch.record("speed/gbs", torch.tensor(2.5), "GB/s", low=2, high=3.0, spread="ci95", n=5) == 2.5
    found = h.results(root, "demo", view="cpu/full")
    assert found["results"] == {
        "speed/gbs": {"value": 2.5, "unit": "GB/s", "low": 2.0, "high": 3.0, "spread": "ci95", "n": 5}
    }
    assert found["source_hash"] == source_hash(root / "notebooks/demo.ipynb")
    assert (found["device"], found["profile"], found["seed"]) == ("cpu", "full", 3)
    assert found["parameters"] == {"runs": 2} and torch.__version__.startswith(found["versions"]["torch"])
    assert found["versions"]["torch"] and found["device_name"]
    assert found["wall_s"] >= 0 and found["time_utc"].endswith("Z")
    text = (root / "_build/results/cpu/full/demo.json").read_text()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def test_the_commit_comes_from_git_else_from_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(root.parent))
    monkeypatch.delenv("TQ_COMMIT", raising=False)
    results.chapter("demo", device="cpu").record("a", 1)
    assert (h.results(root, "demo")["commit"], h.results(root, "demo")["dirty"]) == (None, None)
    monkeypatch.setenv("TQ_COMMIT", "abc123")
    results.chapter("demo", device="cpu").record("a", 1)
    assert h.results(root, "demo")["commit"] == "abc123"
    git = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for arguments in (["init", "-q"], ["add", "notebooks"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True)
    results.chapter("demo", device="cpu").record("a", 1)
    assert len(h.results(root, "demo")["commit"]) == 40 and h.results(root, "demo")["dirty"] is True


@pytest.mark.parametrize(
    ("key", "value", "more", "message"),
    [
        ("a", float("nan"), {}, "nan"),
        ("a", float("inf"), {}, "inf"),
        ("a", torch.tensor(float("nan")), {}, "nan"),
        ("a", [1.0], {}, "number is needed"),
        ("A b", 1.0, {}, "'A b'"),
        ("a", 1.0, {"low": 0.5}, "both ends"),
        ("a", 1.0, {"low": 0.5, "high": 1.5}, "both ends and a name"),
        ("a", 1.0, {"spread": "ci95"}, "both ends"),
        ("a", 1.0, {"low": 2.0, "high": 1.5, "spread": "range"}, "lies above"),
        ("a", 1.0, {"low": float("nan"), "high": 1.5, "spread": "range"}, "nan"),
        ("a", 1.0, {"spread": "sigma"}, "'sigma'"),
        ("a", 1.0, {"n": 0}, "n=0"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_refused(ch, root, key, value, more, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((ValueError, TypeError), match=message):
        ch.record(key, value, **more)
    assert not (root / "_build/results").exists()


@pytest.mark.parametrize("value", [None, True, False, "text", 3, -2.5])
def test_values_come_back_as_they_were(ch: results.Chapter, value: object) -> None:
    returned = ch.record("k", value)
    kept = results.value("demo", "k", profile="quick", fresh=True)
    assert kept == value and type(kept) is type(value)
    assert returned == value and (value is None or isinstance(returned, (bool, str, float)))


def test_samples_become_median_quartiles_and_count(ch: results.Chapter, root: Path) -> None:
    assert ch.record_samples("t", torch.tensor([4.0, 1.0, 3.0, 2.0]), "ms") == 2.5
    assert h.results(root, "demo")["results"]["t"] == {
        "value": 2.5, "unit": "ms", "low": 1.75, "high": 3.25, "spread": "quartiles", "n": 4,
    }  # fmt: skip
    ch.record_samples("one", [7.0])
    assert h.results(root, "demo")["results"]["one"] == {"value": 7.0, "unit": "1", "spread": "none", "n": 1}
    for bad in ([], [1.0, float("nan")]):
        with pytest.raises(ValueError):
            ch.record_samples("bad", bad)


def test_a_chapter_opened_anew_replaces_the_file_at_its_first_result(ch: results.Chapter, root: Path) -> None:
    ch.record("old", 1)
    again = results.chapter("demo", device="cpu")
    assert set(h.results(root, "demo")["results"]) == {"old"}
    again.record("new", 1)
    assert set(h.results(root, "demo")["results"]) == {"new"}


def test_by_hand_results_gather_in_one_file(root: Path) -> None:
    results.record("by-hand", "a", 1, device="cpu")
    results.record("by-hand", "b", 2.0, "s", device="cpu")
    found = h.results(root, "by-hand")
    assert set(found["results"]) == {"a", "b"} and found["source_hash"] is None


def test_what_was_not_measured_says_so(ch: results.Chapter, root: Path) -> None:
    ch.record("later", None, "s")
    (root / "data").mkdir()
    (root / "_build/results").rename(root / "data/results")
    assert results.load("demo") is None and results.load("demo", profile="quick") is not None
    assert results.value("demo", "later", device="cuda") is None
    assert results.value("demo", "later", profile="quick") is None
    assert results.show(None, ".3g") == "not measured" and results.show(1.23456, ".3g") == "1.23"
    with pytest.raises(KeyError, match="'gone'.*later"):
        results.value("demo", "gone", profile="quick")
    (root / "data/results/cpu/quick/demo.json").write_text("{")
    with pytest.raises(ValueError, match="demo.json"):
        results.load("demo", profile="quick")


def test_a_table_is_kept_and_shown_with_its_gaps(ch: results.Chapter, root: Path) -> None:
    frame = pd.DataFrame({"method": ["tq", "nf4"], "mse": [0.25, None]})
    shown = ch.table("errors", frame, "Errors < 1")._repr_html_()
    assert (root / "_build/tables/cpu/quick/demo/errors.csv").read_text() == "method,mse\ntq,0.25\nnf4,\n"
    assert h.results(root, "demo")["tables"]["errors"]["caption"] == "Errors < 1"
    assert "not measured" in shown and "Errors &lt; 1" in shown and 'scope="col"' in shown
    assert shown == ch.table("errors", frame, "Errors < 1")._repr_html_()
    ch.table("named", frame.set_index("method"), "By method")
    assert (root / "_build/tables/cpu/quick/demo/named.csv").read_text().startswith("method,mse\n")
    with pytest.raises(ValueError, match="caption"):
        ch.table("errors", frame, " ")


def test_a_figure_has_the_same_bytes_again_and_needs_alt_text(ch: results.Chapter, root: Path) -> None:
    files = []
    for name in ("one", "two"):
        fig, ax = figures.figure("half")
        ax.plot([1, 2], [3, 4])
        ch.figure(name, fig, alt="A line that rises", caption="A line")
        files.append((root / f"_build/figures/cpu/quick/demo/{name}.png").read_bytes())
    assert files[0] == files[1] and b"matplotlib" not in files[0].lower()
    kept = h.results(root, "demo")["figures"]["one"]
    assert kept["alt"] == "A line that rises" and kept["sha256"] == hashlib.sha256(files[0]).hexdigest()
    assert (root / "_build" / kept["path"]).is_file()
    for alt, caption in (("", "c"), ("a", "\n")):
        with pytest.raises(ValueError, match="alt|caption"):
            ch.figure("three", figures.figure("half")[0], alt=alt, caption=caption)


def test_a_piece_is_computed_once_under_the_same_sources_and_seed(root: Path) -> None:
    calls = []

    def compute() -> dict[str, object]:
        calls.append(1)
        return {"w": torch.arange(3), "loss": [1.0, 2.0], "name": "x", "t": (1, None)}

    first = results.chapter("demo", device="cpu").piece("a", compute)
    again = results.chapter("demo", device="cpu").piece("a", compute)
    assert len(calls) == 1 and again["loss"] == first["loss"] and torch.equal(again["w"], first["w"])
    assert again["t"] == (1, None)
    results.chapter("demo", device="cpu", seed=1).piece("a", compute)
    results.chapter("demo", device="cpu", parameters={"n": 2}).piece("a", compute)
    results.chapter("demo", device="cpu", profile="full").piece("a", compute)
    assert len(calls) == 4
    h.write(root / "notebooks/demo.ipynb", h.notebook("x = 2", name="demo"))
    results.chapter("demo", device="cpu", parameters={"n": 2}).piece("a", compute)
    assert len(calls) == 5


def test_a_cell_may_ask_twice_for_one_piece_if_it_is_the_same_call(ch: results.Chapter) -> None:
    def add(a: int, b: int) -> int:
        return a + b

    assert [ch.piece("sum", partial(add, 1, b=2)) for _ in range(2)] == [3, 3]
    for other in (partial(add, 1, b=3), partial(add, 2, b=2), partial(max, 1, 2), lambda: 3):
        with pytest.raises(ValueError, match="there is a piece of this name already"):
            ch.piece("sum", other)


def test_a_piece_refuses_what_could_not_be_loaded_and_a_name_twice(ch: results.Chapter) -> None:
    with pytest.raises(TypeError, match="'b'.*cannot be kept"):
        ch.piece("b", lambda: Path("x"))
    for i in range(2):
        if i:
            with pytest.raises(ValueError, match="'c'"):
                ch.piece("c", lambda: 1)
        else:
            ch.piece("c", lambda: 1)


def test_doors(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert results.resolve_device("auto") in ("cpu", "cuda") and results.resolve_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="'tpu'"):
        results.resolve_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU"):
            results.resolve_device("cuda")
    with pytest.raises(ValueError, match="'fast'"):
        results.chapter("demo", device="cpu", profile="fast")
    with pytest.raises(ValueError, match="'../x'"):
        results.chapter("../x", device="cpu")
    with pytest.raises(TypeError, match="1.5"):
        results.chapter("demo", device="cpu", seed=1.5)  # type: ignore[arg-type]
    monkeypatch.setenv("TQ_BOOK_ROOT", str(root / "data"))
    with pytest.raises(FileNotFoundError, match="TQ_BOOK_ROOT"):
        paths.root()


def test_away_from_a_tree_the_error_says_what_to_do(tmp_path: Path) -> None:
    # The file name stands for a package that lies outside of any tree, as in site-packages.
    code = "from pathlib import Path; import tq.book.paths as p; p.PACKAGE = Path('/nowhere'); print('root', p.root())"
    env = h.environment(tmp_path)
    del env["TQ_BOOK_ROOT"]
    inside = h.book(tmp_path / "book", {})
    for folder, expected in ((tmp_path, "no book here"), (inside / "notebooks", f"root {inside}")):
        done = subprocess.run([sys.executable, "-c", code], env=env, cwd=folder, capture_output=True, text=True)
        assert expected in done.stdout + done.stderr


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut between the two must not leave the new name with nothing in it."""
    order: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("name"), replace(a, b)))
    paths.write_bytes(tmp_path / "x", b"content")
    assert order == ["sync", "name"] and (tmp_path / "x").read_bytes() == b"content"
