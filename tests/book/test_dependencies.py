"""A changed line marks exactly the chapters that depend on it, by name, not by package."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.book import helpers as h
from tq.book.record.dependencies import REPORTING, changed, inputs, reading, source_hash, sources

PACKAGE = {
    "tq/__init__.py": (
        "from tq.quant.codec import Codec\nfrom tq.train.loop import Trainer as Loop\n__version__ = '1'\n"
    ),
    "tq/quant/__init__.py": "from .formats import nf4\n",
    "tq/quant/codebook.py": "import math\n",
    "tq/quant/codec.py": "from . import codebook\n\ndef f():\n    from tq.quant import dispatch\n",
    "tq/quant/dispatch.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tq.quant.codec import Codec\n"
        "def g():\n    from tq.kernels import cpu\n"
    ),
    "tq/quant/formats.py": "TABLE = 'formats.csv'\n",
    "tq/train/__init__.py": "",
    "tq/train/loop.py": "from ..quant.codebook import x\n",
    "tq/lazy/__init__.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tq.quant.formats import nf4\n"
        "def __getattr__(name):\n    import importlib\n    return importlib.import_module('tq.train.loop')\n"
    ),
    "tq/book/__init__.py": "",
    "tq/book/results.py": "from tq.book.record.results import chapter\n",
    "tq/book/record/__init__.py": "",
    "tq/book/record/results.py": "from tq.lab.stats import quartiles\nchapter = 1\n",
    "tq/book/run/__init__.py": "",
    "tq/book/run/bench.py": "from tq.lab import timing\n",
    "tq/lab/__init__.py": "",
    "tq/lab/stats.py": "def quartiles(): ...\n",
    "tq/lab/timing.py": "from tq.quant import codebook\n",
    "tq/lab/hosts.py": "COMMAND = ['-m', 'tq.lab.ranks']\n",
    "tq/lab/ranks.py": "",
    "tq/kernels/__init__.py": "",
    "kernels/cpu.py": "import numba\n",
    "data/formats.csv": "a\n",
    "data/prices/gpu.csv": "a\n",
    "data/results/cpu/quick/x.json": "{}",
}
# What the notebook says -> what it depends on.
CASES = {
    "from tq.quant.codebook import lloyd_max": {"tq/quant/codebook.py"},
    "from tq.quant import codebook": {"tq/quant/codebook.py"},
    "import tq.quant.codebook as c": {"tq/quant/codebook.py"},
    "from tq.quant.codec import Codec": {
        "tq/quant/codec.py", "tq/quant/codebook.py", "tq/quant/dispatch.py", "kernels/cpu.py",
    },
    "from tq import Codec": {
        "tq/__init__.py", "tq/quant/codec.py", "tq/quant/codebook.py", "tq/quant/dispatch.py", "kernels/cpu.py",
    },
    "from tq import Loop": {"tq/__init__.py", "tq/train/loop.py", "tq/quant/codebook.py"},
    "from tq import __version__": {"tq/__init__.py"},
    "import tq": {
        "tq/__init__.py", "tq/quant/codec.py", "tq/quant/codebook.py", "tq/quant/dispatch.py", "kernels/cpu.py",
        "tq/train/loop.py",
    },
    "import tq.train.loop\ntq.Loop": {"tq/__init__.py", "tq/train/loop.py", "tq/quant/codebook.py"},
    "from tq.quant import nf4": {"tq/quant/__init__.py", "tq/quant/formats.py", "data/formats.csv"},
    "from tq.lazy import nf4": {"tq/lazy/__init__.py", "tq/quant/formats.py", "data/formats.csv"},
    "from tq.lazy import other": {"tq/lazy/__init__.py", "tq/train/loop.py", "tq/quant/codebook.py"},
    "from tq.quant.dispatch import g": {"tq/quant/dispatch.py", "kernels/cpu.py"},
    "from tq.kernels import cpu": {"kernels/cpu.py"},
    "def f():\n    from tq.train.loop import Trainer": {"tq/train/loop.py", "tq/quant/codebook.py"},
    # what is shown is left out, what computes a recorded number is not
    "from tq.book import results": {"tq/lab/stats.py"},
    "from tq.book.record import results": {"tq/lab/stats.py"},
    "from tq.book.run import bench": {"tq/book/run/bench.py", "tq/lab/timing.py", "tq/quant/codebook.py"},
    "from tq.lab import hosts": {"tq/lab/hosts.py", "tq/lab/ranks.py"},  # started by its name
    "import numpy, torch.nn": set(),
    "x = open('../data/prices/gpu.csv'), 'prices/gpu.csv'": {"data/prices/gpu.csv"},
    "x = 'data/formats.csv'": {"data/formats.csv"},
    "x = 'results/cpu/quick/x.json'": set(),
    "%matplotlib inline\n!ls\nfrom tq.quant import codebook": {"tq/quant/codebook.py"},
}  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    chapters = {f"case-{i}": h.notebook(code) for i, code in enumerate(CASES)}
    for path, content in PACKAGE.items():
        h.write(tmp_path / path, content)
    monkeypatch.setenv("TQ_BOOK_ROOT", str(h.book(tmp_path, chapters)))
    return tmp_path


def notebooks(tree: Path) -> dict[str, Path]:
    return {code: tree / "notebooks" / f"case-{i}.ipynb" for i, code in enumerate(CASES)}


def test_inputs_are_what_the_code_names(tree: Path) -> None:
    for code, path in notebooks(tree).items():
        assert {p.relative_to(tree).as_posix() for p in inputs(path)} == CASES[code], code


@pytest.mark.parametrize("changed", [p for p in PACKAGE if "data/results" not in p])
def test_a_changed_line_marks_exactly_its_dependants(tree: Path, changed: str) -> None:
    before = {code: source_hash(path) for code, path in notebooks(tree).items()}
    with open(tree / changed, "a") as file:
        file.write("added = 1\n")
    stale = {code for code, path in notebooks(tree).items() if source_hash(path) != before[code]}
    assert stale == {code for code, needs in CASES.items() if changed in needs}


def test_words_about_the_code_do_not_count(tree: Path) -> None:
    before = {code: source_hash(path) for code, path in notebooks(tree).items()}
    for path in PACKAGE:
        if path.endswith(".py"):
            text = (tree / path).read_text()
            (tree / path).write_text(f'"""Reads data/formats.csv, no: says so."""\n\n# why\n\n{text}\n# the end\n')
    assert {code: source_hash(path) for code, path in notebooks(tree).items()} == before
    (tree / "tq/quant/codebook.py").write_text("x = 1  # another value\n")
    assert source_hash(notebooks(tree)["from tq.quant import codebook"]) != before["from tq.quant import codebook"]


def test_only_code_counts_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_BOOK_ROOT", str(h.book(tmp_path, {"a": h.notebook("x = 1", name="a")})))
    path = tmp_path / "notebooks" / "a.ipynb"
    before = source_hash(path)
    nb = h.notebook("x = 1  \n", name="a")
    nb["cells"][0]["source"] = "# another title"
    nb["cells"][3]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "1"}]
    injected = {"cell_type": "code", "metadata": {"tags": ["injected-parameters"]}, "source": "device = 'cuda'"}
    nb["cells"].insert(2, injected)
    assert source_hash(h.write(path, nb)) == before
    nb["cells"][1]["source"] = nb["cells"][1]["source"].replace("seed = 0", "seed = 1")
    assert source_hash(h.write(path, nb)) != before


def test_the_hash_does_not_know_where_the_tree_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = set()
    for name in ("here", "there"):
        root = h.book(tmp_path / name, {"a": h.notebook("from tq.quant import codebook", name="a")})
        h.write(root / "tq/quant/codebook.py", "x = 1\n")
        monkeypatch.setenv("TQ_BOOK_ROOT", str(root))
        hashes.add(source_hash(root / "notebooks/a.ipynb"))
    assert len(hashes) == 1 and re.fullmatch("[0-9a-f]{64}", hashes.pop())


def test_code_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_BOOK_ROOT", str(h.book(tmp_path, {"a": h.notebook("x = 1", "def (:")})))
    with pytest.raises(ValueError, match="a.ipynb, code cell 2"):
        source_hash(tmp_path / "notebooks/a.ipynb")


def test_the_kernels_of_another_device_count_only_where_they_are_imported(tree: Path) -> None:
    path = notebooks(tree)["from tq.quant.dispatch import g"]
    named = notebooks(tree)["from tq.kernels import cpu"]
    here = {device: source_hash(path, device) for device in ("cpu", "cuda")}
    assert here["cpu"] == source_hash(path) != here["cuda"] and source_hash(named, "cuda") == source_hash(named)
    with open(tree / "kernels/cpu.py", "a") as file:
        file.write("added = 1\n")
    assert source_hash(path, "cuda") == here["cuda"] and source_hash(path, "cpu") != here["cpu"]


# --- the real chapters ----------------------------------------------------------------------------------------


def test_what_a_chapter_measures_with_is_among_its_inputs() -> None:
    """Chapters whose results were once up to date although their instruments had changed."""
    for chapter, needs in {
        "data-parallel-training": (
            "tq/train/diloco.py", "tq/train/collectives.py", "tq/train/experiments/ranks.py", "tq/lab/net/hosts.py",
            "tq/lab/net/workloads.py", "tq/lab/net/_rank.py", "tq/lab/stats.py",
        ),
        "compressed-allreduce": ("tq/train/collectives.py", "tq/lab/net/hosts.py", "tq/lab/net/workloads.py"),
        "kernels": ("tq/lab/timing.py", "tq/lab/peers.py", "tq/book/run/bench.py"),
        "compressed-adamw": ("tq/lab/timing.py", "tq/lab/stats.py", "tq/train/optim.py"),
        "cost-structure": ("tq/book/claims/ledger.py", "data/claims.csv"),
        "competitive-positioning": ("tq/book/site/positioning.py", "data/positioning.csv"),
    }.items():  # fmt: skip
        found = {path.relative_to(h.ROOT).as_posix() for path in inputs(h.ROOT / "notebooks" / f"{chapter}.ipynb")}
        assert found >= set(needs), (chapter, set(needs) - found)


# Every function of a module in these packages that a run of the chapter has entered is edited in turn.
TRACED = """
import sys, threading, json
entered = set()
def note(frame, event, arg):
    if event == "call" and "/tq/" in frame.f_code.co_filename or "/kernels/" in frame.f_code.co_filename:
        entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
sys.setprofile(note); threading.setprofile(note)
notebook, device, profile, seed = sys.argv[1], "cpu", "quick", 0
cells = ["".join(c["source"]) for c in json.load(open(notebook))["cells"] if c["cell_type"] == "code"]
space = {}
for source in cells:
    exec(compile(source, "cell", "exec"), space)
sys.setprofile(None)
print("ENTERED" + json.dumps(sorted(entered)))
"""


@pytest.mark.parametrize("chapter", ["energy", "rotation-and-codebook"])
def test_any_function_on_the_way_to_a_result_marks_it_stale(
    chapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty functions drawn from those that a run has entered; each is edited in a copy of the tree."""
    import ast
    import json
    import random
    import subprocess
    import sys

    notebook = h.ROOT / "notebooks" / f"{chapter}.ipynb"
    env = {**h.environment(h.ROOT), "TQ_BOOK_OUT": str(tmp_path / "out"), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-c", TRACED, str(notebook)], env=env, cwd=notebook.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    entered = json.loads(done.stdout.partition("ENTERED")[2].splitlines()[0])
    root = tmp_path / "tree"
    for folder in ("tq", "kernels", "notebooks", "data"):
        (root / folder).parent.mkdir(exist_ok=True)
        shutil.copytree(h.ROOT / folder, root / folder, ignore=shutil.ignore_patterns("results", "figures", "tables"))
    shutil.copy(h.ROOT / "_toc.yml", root)
    functions = []
    for file, line in entered:
        path = Path(file).resolve()
        if not path.is_relative_to(h.ROOT) or module_of(path) in REPORTING:
            continue
        inside = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef))
        at = [n for n in inside if line in (n.lineno, *(d.lineno for d in n.decorator_list))]
        functions += [(path.relative_to(h.ROOT), n.body[0].lineno, n.body[0].col_offset) for n in at]
    assert len(functions) >= 20
    monkeypatch.setenv("TQ_BOOK_ROOT", str(root))
    before = source_hash(root / "notebooks" / notebook.name, "cpu")
    for name, line, indent in random.Random(chapter).sample(functions, 20):
        lines = (root / name).read_text().splitlines(keepends=True)
        (root / name).write_text("".join([*lines[: line - 1], " " * indent + "assert True\n", *lines[line - 1 :]]))
        assert source_hash(root / "notebooks" / notebook.name, "cpu") != before, (name, line)
        (root / name).write_text("".join(lines))
    assert source_hash(root / "notebooks" / notebook.name, "cpu") == before


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(h.ROOT).with_suffix("").parts)


def test_values_read_from_another_chapter_are_among_what_it_rests_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_BOOK_ROOT", str(h.book(tmp_path, {"a": h.notebook("x = 1", name="a")})))
    path = h.write(tmp_path / "data/results/cpu/full/other.json", {"results": {"k": {"value": 1}}})
    recorded = {"source_hash": source_hash(tmp_path / "notebooks/a.ipynb"), "reads": {"cpu/full/other": "old"}}
    assert changed(recorded, tmp_path / "notebooks/a.ipynb") == ["cpu/full/other"]
    recorded["reads"] = {"cpu/full/other": reading("cpu/full/other")}
    assert changed(recorded, tmp_path / "notebooks/a.ipynb") == []
    h.write(path, {"results": {"k": {"value": 2}}})
    assert changed(recorded, tmp_path / "notebooks/a.ipynb") == ["cpu/full/other"]
    path.unlink()
    assert changed(recorded, tmp_path / "notebooks/a.ipynb") == ["cpu/full/other"]


def test_a_stale_recording_names_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = h.book(tmp_path, {"a": h.notebook("from tq.quant import codebook", name="a")})
    h.write(root / "tq/quant/codebook.py", "x = 1\n")
    monkeypatch.setenv("TQ_BOOK_ROOT", str(root))
    path = root / "notebooks/a.ipynb"
    recorded = {"source_hash": source_hash(path), "sources": sources(path)}
    assert changed(recorded, path) == []
    h.write(root / "tq/quant/codebook.py", "x = 2\n")
    assert changed(recorded, path) == ["tq/quant/codebook.py"]
    h.write(path, h.notebook("from tq.quant import codebook\ny = 3", name="a"))
    assert changed(recorded, path) == ["notebooks/a.ipynb", "tq/quant/codebook.py"]
    assert changed({"source_hash": "of before"}, path) == ["its sources"]
