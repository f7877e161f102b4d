"""Modules that no source hash covers: whatever is done to their arithmetic, no recorded value moves in silence."""

from __future__ import annotations

import ast
import json
import os
import random
import sys
from pathlib import Path

import pytest

from tests.book import helpers as h
from tq.book.record.dependencies import REPORTING

# What the probe records: a number of each kind through each way in.
PROBE = """
import json, os, sys
from pathlib import Path
import matplotlib
matplotlib.use("agg")
import numpy as np, pandas as pd, torch
from tq.book import results
from tq.book.record import figures

ch = results.chapter("probe", device="cpu", profile="quick", seed=3)
ch.record("number", 0.1 + 0.2, "s")
ch.record("interval", 2.5, "s", low=2.25, high=2.75, spread="ci95", n=5)
ch.record("whole", 7)
ch.record("text", "seven")
ch.record("flag", True)
ch.record("missing", None)
ch.record("array", np.float32(1.1))
ch.record_samples("samples", [3.0, 1.0, 2.0, 10.0])
ch.record("piece", float(ch.piece("p", lambda: torch.tensor([1.5, 2.5])).sum()))
ch.record("read", results.value("other", "k"))
fig, ax = figures.figure("half")
ax.plot([1, 2], [3, 4])
ch.figure("line", fig, alt="a line", caption="a line")
ch.table("rows", pd.DataFrame({"a": [1.0]}), "rows")
"""


def mutants(source: str) -> list[str]:
    """The source with one number or one arithmetic operation changed, for every place where there is one."""
    tree = ast.parse(source)
    made = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            before, node.value = node.value, node.value + 1
            made.append(ast.unparse(tree))
            node.value = before
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
            operation, node.op = node.op, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            made.append(ast.unparse(tree))
            node.op = operation
    return made


def recorded(root: Path, out: Path, module: str = "", source: str = "") -> dict[str, object] | None:
    """What the probe records where a module has this source, in a forked process; None where the probe fails."""
    child = os.fork()
    if child == 0:
        try:
            os.environ |= {"TQ_BOOK_ROOT": str(root), "TQ_BOOK_OUT": str(out)}
            sys.stdout = sys.stderr = open(os.devnull, "w")
            os.dup2(sys.stdout.fileno(), 1), os.dup2(sys.stdout.fileno(), 2)
            for name in [name for name in sys.modules if name == "tq" or name.startswith("tq.book")]:
                del sys.modules[name]
            if module:
                _replace(module, source)
            exec(compile(PROBE, "probe", "exec"), {"__name__": "probe"})
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if status:
        return None
    found: dict[str, object] = json.loads((out / "results/cpu/quick/probe.json").read_text())["results"]
    return found


def _replace(module: str, source: str) -> None:
    """From now on an import of this module gives this source."""
    import importlib.abc
    import importlib.util

    class Loader(importlib.abc.InspectLoader):
        def get_source(self, fullname: str) -> str:
            return source

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path: object, target: object = None) -> object:
            if fullname != module:
                return None
            real = h.ROOT.joinpath(*module.split("."))
            package = (real / "__init__.py").is_file()
            file = real / "__init__.py" if package else real.with_suffix(".py")
            spec = importlib.util.spec_from_loader(fullname, Loader(), is_package=package, origin=str(file))
            assert spec is not None
            spec.has_location = True
            if package:
                spec.submodule_search_locations = [str(real)]
            return spec

    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = h.book(tmp_path / "book", {"probe": h.notebook("x = 1", name="probe")})
    other = {"source_hash": "x", "results": {"k": {"value": 4.5, "unit": "1", "spread": "none", "n": 1}}}
    h.write(root / "data/results/cpu/full/other.json", other)
    return root


def file_of(module: str) -> Path:
    path = h.ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_no_value_depends_on_a_reporting_module(root: Path, tmp_path: Path) -> None:
    import matplotlib.pyplot  # noqa: F401  # imported once, before the forks
    import pandas  # noqa: F401
    import seaborn  # noqa: F401
    import torch  # noqa: F401

    whole = recorded(root, tmp_path / "whole")
    assert whole is not None and len(whole) == 10
    tried = 0
    for module in sorted(REPORTING):
        made = mutants(file_of(module).read_text())
        for i, source in enumerate(random.Random(module).sample(made, min(6, len(made)))):
            found = recorded(root, tmp_path / f"{module}-{i}", module, source)
            tried += found is not None
            assert found is None or found == whole, f"{module}: a recorded value moved with\n{source}"
    assert tried >= 20  # mutants under which the probe went through


def test_the_probe_would_tell(root: Path, tmp_path: Path) -> None:
    """A mutant of a recorder that rounds is found."""
    source = file_of("tq.book.record.results").read_text()
    rounding = '"value": round(value, 1) if isinstance(value, float) else value, "unit": unit'
    spoilt = source.replace('"value": value, "unit": unit', rounding)
    assert spoilt != source
    before, after = recorded(root, tmp_path / "a"), recorded(root, tmp_path / "b", "tq.book.record.results", spoilt)
    assert before is not None and after is not None and before != after


def test_the_list_is_short_and_names_modules_that_exist() -> None:
    assert len(REPORTING) <= 14 and all(file_of(module).is_file() for module in REPORTING)
    assert all(module == "tq.book" or module.startswith("tq.book.") for module in REPORTING)
