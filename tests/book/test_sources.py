"""A changed line marks exactly the chapters that depend on it, by name, not by package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.book import helpers as h
from tq.book.sources import inputs, source_hash

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
    "tq/book/results.py": "from tq.quant import codec\n",
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
    "from tq.book import results": set(),
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


@pytest.mark.parametrize("changed", [p for p in PACKAGE if "results" not in p])
def test_a_changed_line_marks_exactly_its_dependants(tree: Path, changed: str) -> None:
    before = {code: source_hash(path) for code, path in notebooks(tree).items()}
    with open(tree / changed, "a") as file:
        file.write("# a comment\n")
    stale = {code for code, path in notebooks(tree).items() if source_hash(path) != before[code]}
    assert stale == {code for code, needs in CASES.items() if changed in needs}


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
        file.write("# a comment\n")
    assert source_hash(path, "cuda") == here["cuda"] and source_hash(path, "cpu") != here["cpu"]
