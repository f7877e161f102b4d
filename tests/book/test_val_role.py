"""The `val` role: numbers of the prose come from result files, with provenance, or the build says what is wrong."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402


@pytest.fixture(scope="module")
def tqbook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tqbook", ROOT / "book" / "_ext" / "tqbook.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["tqbook"] = module
    spec.loader.exec_module(module)
    return module


RESULTS: dict[str, Any] = {
    "mse/b4": {"value": 0.0095012, "unit": "1", "low": 0.0094, "high": 0.0096, "spread": "ci95", "n": 5},
    "speed": {"value": 1234.5, "unit": "GB/s", "low": 1200.0, "high": 1300.0, "spread": "quartiles", "n": 9},
    "gap": {"value": -0.017, "unit": "nats", "low": None, "high": None, "spread": "none", "n": 1},
    "gpu": {"value": None, "unit": "GB/s", "low": None, "high": None, "spread": "none", "n": 0},
}


def write(root: Path, where: str, device: str, profile: str, results: dict[str, Any]) -> Path:
    path = root / where / device / profile / "demo.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"device_name": 'A "CPU" <2 cores>', "device": device, "profile": profile, "commit": "0123456789abcdef"}
    path.write_text(json.dumps({**head, "time_utc": "2026-11-20T11:00:00Z", "dirty": True, "results": results}))
    return path


@pytest.mark.parametrize(
    ("key", "spec", "text"),
    [
        ("mse/b4", ".4f", "0.0095"),
        ("mse/b4", ".2%", "0.95%"),
        ("mse/b4", ".4f unit", "0.0095"),
        ("mse/b4", ".4f range", "0.0095 (0.0094 to 0.0096)"),
        ("speed", ",.0f unit", "1,234\N{NO-BREAK SPACE}GB/s"),
        ("gap", ".3f", "\N{MINUS SIGN}0.017"),
        ("gpu", ".1f unit", "not measured"),
    ],
)
def test_formats(tqbook: ModuleType, key: str, spec: str, text: str) -> None:
    assert tqbook.render(RESULTS[key], spec) == text


@pytest.mark.parametrize(("key", "spec"), [("mse/b4", "d"), ("gap", ".3f range"), ("gap", ".3f .2f")])
def test_bad_formats_raise(tqbook: ModuleType, key: str, spec: str) -> None:
    with pytest.raises(tqbook.Problem):
        tqbook.render(RESULTS[key], spec)


def test_locate_wants_exactly_one_recording(tqbook: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("TQ_BOOK_FRESH", raising=False)
    with pytest.raises(tqbook.Problem, match="no results"):
        tqbook.locate(tmp_path, "demo", "speed", None, None)
    cpu = write(tmp_path, "data/results", "cpu", "quick", RESULTS)
    assert tqbook.locate(tmp_path, "demo", "speed", None, None) == cpu
    gpu = write(tmp_path, "data/results", "cuda", "full", {"speed": RESULTS["speed"]})
    with pytest.raises(tqbook.Problem, match="add @device:profile"):
        tqbook.locate(tmp_path, "demo", "speed", None, None)
    assert tqbook.locate(tmp_path, "demo", "mse/b4", None, None) == cpu
    assert tqbook.locate(tmp_path, "demo", "speed", "cuda", "full") == gpu


def test_fresh_results_go_first_only_when_asked(tqbook: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    committed = write(tmp_path, "data/results", "cpu", "quick", RESULTS)
    fresh = write(tmp_path, "_build/results", "cpu", "quick", RESULTS)
    monkeypatch.delenv("TQ_BOOK_FRESH", raising=False)
    assert tqbook.locate(tmp_path, "demo", "speed", "cpu", "quick") == committed
    monkeypatch.setenv("TQ_BOOK_FRESH", "1")
    assert tqbook.locate(tmp_path, "demo", "speed", "cpu", "quick") == fresh
    assert tqbook.locate(tmp_path, "demo", "speed", None, None) == fresh
    fresh.unlink()
    assert tqbook.locate(tmp_path, "demo", "speed", "cpu", "quick") == committed


def build(tqbook: ModuleType, tmp_path: Path, page: str, monkeypatch: Any) -> tuple[str, str]:
    """(html of the page, warnings) of a one-page Sphinx build with the extension."""
    import io

    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace

    monkeypatch.setenv("TQ_BOOK_ROOT", str(tmp_path))
    monkeypatch.delenv("TQ_BOOK_FRESH", raising=False)
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "index.md").write_text(page)
    warnings = io.StringIO()
    with docutils_namespace():
        app = Sphinx(
            source,
            None,
            tmp_path / "out",
            tmp_path / "tree",
            "html",
            confoverrides={"extensions": ["myst_parser", "tqbook"], "html_theme": "basic"},
            status=None,
            warning=warnings,
        )
        app.build()
    return (tmp_path / "out" / "index.html").read_text(), warnings.getvalue()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_page(tqbook: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    path = write(tmp_path, "data/results", "cpu", "quick", RESULTS)
    page = "# Page\n\nIt is {val}`demo/mse/b4@cpu:quick|.4f`.\n\n| a |\n|---|\n| {val}`demo/speed@cpu:quick\\|.1f` |\n"
    html, warnings = build(tqbook, tmp_path, page, monkeypatch)
    assert warnings == ""
    assert ">0.0095</span>" in html and ">1234.5</span>" in html
    title = html.split('class="tq-val" title="')[1].split('"')[0]
    for part in ("A &quot;CPU&quot; &lt;2 cores&gt;", "cpu", "quick", "0123456789 with changes", "2026-11-20", "n: 5"):
        assert part in title, part
    assert "95 % confidence interval: 0.0094 to 0.0096" in title

    # An incremental build sees a new number, because the page depends on the file.
    changed = {**RESULTS, "mse/b4": {**RESULTS["mse/b4"], "value": 0.5}}
    write(tmp_path, "data/results", "cpu", "quick", changed)
    h.touch(path, later_s=10)
    html, warnings = build(tqbook, tmp_path, page, monkeypatch)
    assert ">0.5000</span>" in html and warnings == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize(
    ("role", "complaint"),
    [
        ("demo/nothing@cpu:quick|.1f", "has no key 'nothing'"),
        ("demo/speed@cuda:full|.1f", "no results of chapter 'demo' on cuda:full"),
        ("other/speed", "no results of chapter 'other'"),
        ("speed", "expected chapter/key"),
        ("demo/speed@cpu:quick|.1q", "cannot be written"),
    ],
)
def test_what_is_missing_is_a_warning(
    tqbook: ModuleType, tmp_path: Path, monkeypatch: Any, role: str, complaint: str
) -> None:
    write(tmp_path, "data/results", "cpu", "quick", RESULTS)
    _, warnings = build(tqbook, tmp_path, f"# Page\n\n{{val}}`{role}`\n", monkeypatch)
    assert complaint in warnings and "index.md" in warnings


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_a_stale_number_is_marked(tqbook: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    from tests.book import helpers as h
    from tq.book.record.dependencies import source_hash

    h.book(tmp_path, {"demo": h.notebook("1", name="demo")})
    path = write(tmp_path, "data/results", "cpu", "quick", RESULTS)
    page = "# Page\n\n{val}`demo/mse/b4@cpu:quick|.4f`\n"
    html, warnings = build(tqbook, tmp_path, page, monkeypatch)
    assert warnings == "" and 'class="tq-val tq-stale"' in html and "stale: the sources have changed since" in html
    assert '0.0095<sup class="tq-mark">stale</sup></span>' in html
    monkeypatch.setenv("TQ_BOOK_ROOT", str(tmp_path))
    data = json.loads(path.read_text()) | {"source_hash": source_hash(tmp_path / "notebooks/demo.ipynb")}
    path.write_text(json.dumps(data))
    h.touch(path, later_s=10)
    html, _ = build(tqbook, tmp_path, page, monkeypatch)
    assert 'class="tq-val"' in html and "stale" not in html


def test_modelled_numbers_look_different_from_measured_ones(
    tqbook: ModuleType, tmp_path: Path, monkeypatch: Any
) -> None:
    from tests.book import helpers as h
    from tq.book.claims import ledger

    chapters = {path.stem for path in (h.ROOT / "notebooks").glob("*.ipynb")}
    assert set(tqbook.MODELLED) | set(ledger.MEASURING) == chapters
    assert not set(tqbook.MODELLED) & set(ledger.MEASURING)
    path = write(tmp_path, "data/results", "cpu", "quick", RESULTS)
    path.rename(path.with_name("energy.json"))
    html, _ = build(tqbook, tmp_path, "# Page\n\n{val}`energy/mse/b4@cpu:quick|.4f`\n", monkeypatch)
    assert 'class="tq-val tq-modelled"' in html and 'title="modelled: computed from a model' in html
