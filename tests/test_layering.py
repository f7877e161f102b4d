"""The floors of the house, held by parsing every import (design: a module imports only from floors below it).

Imports inside functions count for the floors: a lazy import is still a dependency. Imports under
`if TYPE_CHECKING:` do not count, they never run.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STDLIB = set(sys.stdlib_module_names) | {"__future__"}


@dataclass(frozen=True)
class Floor:
    """What one room may import at module level (`outside`), anywhere (`lazy` too), and from the house (`inside`)."""

    inside: tuple[str, ...] = ()
    outside: frozenset[str] = frozenset()
    lazy: frozenset[str] = field(default=frozenset())
    anything: bool = False  # the top floor may import any third-party package


BELOW_THE_BOOK = ("tq.quant", "tq.train", "tq.backend", "tq.infer", "tq.systems", "tq.economics", "tq.lab")
FLOORS = {
    "tq.kernels": Floor(inside=("tq.kernels",), outside=frozenset({"torch", "triton", "numba", "llvmlite", "numpy"})),
    "tq.quant": Floor(inside=("tq.quant",), outside=frozenset({"torch", "numpy"})),
    "tq.quant.dispatch": Floor(
        inside=("tq.quant", "tq.kernels"), outside=frozenset({"torch", "numpy"}), lazy=frozenset({"numba", "triton"})
    ),
    "tq.quant.rank_mean": Floor(  # its kernels serve no codec
        inside=("tq.quant", "tq.kernels.gpu", "tq.kernels.gpu_mean"), outside=frozenset({"torch"}),
        lazy=frozenset({"triton"}),
    ),
    "tq.quant.lossless": Floor(inside=("tq.quant", "tq.kernels.planes"), outside=frozenset({"torch", "numpy"})),
    "tq.train": Floor(
        inside=("tq.quant", "tq.train"),
        outside=frozenset({"torch", "numpy"}),
        lazy=frozenset({"tokenizers", "datasets", "tqdm", "safetensors"}),
    ),
    "tq.train.planned": Floor(  # a plan is the answer of a program that knows no tensors
        inside=(
            "tq.quant", "tq.train", "tq.systems.rematerialization", "tq.systems.backward_timeline",
            "tq.systems.peak_search",
        ),
        outside=frozenset({"torch"}),
        lazy=frozenset({"tqdm"}),
    ),
    "tq.train.model": Floor(  # what is trained knows nothing of how its gradients travel
        inside=("tq.quant", "tq.train.model", "tq.train.tqk"),
        outside=frozenset({"torch", "numpy"}),
        lazy=frozenset({"tokenizers", "datasets", "tqdm"}),
    ),
    "tq.train.mesh": Floor(  # a schedule is searched by a program that knows no tensors
        inside=("tq.quant", "tq.train", "tq.systems.schedule_search", "tq.systems.schedules"),
        outside=frozenset({"torch"}),
    ),
    "tq.train.stream": Floor(  # it says what a step will take, by the model that the book judges
        inside=("tq.quant", "tq.train", "tq.systems.tiers", "tq.systems.arguments"),
        outside=frozenset({"torch", "numpy"}),
        lazy=frozenset({"tqdm"}),
    ),
    "tq.train.comm": Floor(  # the wire knows neither models nor optimizers
        inside=("tq.quant", "tq.train.comm", "tq.train._torch_private"), outside=frozenset({"torch", "numpy"})
    ),
    "tq.backend": Floor(inside=("tq.quant", "tq.train", "tq.backend"), outside=frozenset({"torch"})),
    "tq.infer": Floor(  # models after training: what trains them is not asked
        inside=("tq.quant", "tq.train.model", "tq.train.tqk", "tq.infer"),
        outside=frozenset({"torch", "numpy"}),
        lazy=frozenset({"gguf", "safetensors", "tokenizers", "transformers"}),
    ),
    "tq.infer.cache": Floor(
        inside=("tq.quant", "tq.infer"), outside=frozenset({"torch", "transformers"})
    ),
    **dict.fromkeys(  # what is compiled for weights and caches has no other way in
        [
            f"tq.infer.{name}"
            for name in ("gptq", "trellis", "decoder", "direct", "pages", "product", "path_product")
        ],
        Floor(
            inside=("tq.kernels", "tq.quant", "tq.train.model", "tq.infer"), outside=frozenset({"torch", "numpy"})
        ),
    ),
    "tq.infer.__main__": Floor(
        inside=("tq.quant", "tq.train.model", "tq.infer"), outside=frozenset({"torch", "tqdm"})
    ),
    "tq.systems": Floor(inside=("tq.systems",), outside=frozenset({"numpy"}), lazy=frozenset({"scipy"})),
    "tq.economics": Floor(
        inside=("tq.systems", "tq.economics"),
        outside=frozenset({"numpy"}),
        lazy=frozenset({"scipy", "pandas", "SALib"}),
    ),
    "tq.lab": Floor(inside=BELOW_THE_BOOK, anything=True),
    **dict.fromkeys(  # they count what is compiled, and what is launched
        ("tq.lab.on_gpu", "tq.lab.static_gpu", "tq.lab.simulated_torch"),
        Floor(inside=(*BELOW_THE_BOOK, "tq.kernels"), anything=True),
    ),
    # in the book: what is recorded, then claims and runs over it, then pages; `python -m tq.book` sees them all
    "tq.book.paths": Floor(anything=True),
    "tq.book.record": Floor(inside=(*BELOW_THE_BOOK, "tq.book.paths", "tq.book.record"), anything=True),
    "tq.book.results": Floor(inside=("tq.book.record",)),
    "tq.book.claims": Floor(
        inside=(*BELOW_THE_BOOK, "tq.book.paths", "tq.book.record", "tq.book.claims"), anything=True
    ),
    "tq.book.run": Floor(inside=(*BELOW_THE_BOOK, "tq.book.paths", "tq.book.record", "tq.book.run"), anything=True),
    "tq.book.site": Floor(
        inside=(*BELOW_THE_BOOK, "tq.book.paths", "tq.book.record", "tq.book.claims", "tq.book.run", "tq.book.site"),
        anything=True,
    ),
    "tq.book": Floor(inside=("tq",), anything=True),
    "tq": Floor(inside=("tq.quant",)),  # tq/__init__.py itself: the public names of the codec and nothing heavier
}


def room(module: str) -> str:
    return max((r for r in FLOORS if module == r or module.startswith(r + ".")), key=len)


def modules_of(root: Path) -> dict[str, Path]:
    """{dotted name: file} of everything that is shipped; the shim tq/kernels/__init__.py is not."""
    found = {}
    for top, prefix in (("tq", ("tq",)), ("kernels", ("tq", "kernels"))):
        for path in sorted((root / top).rglob("*.py")):
            parts = prefix + path.relative_to(root / top).with_suffix("").parts
            if "__pycache__" not in parts and parts != ("tq", "kernels", "__init__"):
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(module: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int, bool]]:
    """(module, line, at module level) of each import; relative ones resolved, `from package import module` seen."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for statement in child.orelse:
                    yield from walk(statement, top)
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, child.lineno, top
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                origin = ".".join(base + (child.module.split(".") if child.module else []))
                for alias in child.names:
                    full = f"{origin}.{alias.name}"
                    is_module = full in known or full == "tq.kernels"
                    yield full if is_module else origin, child.lineno, top
            else:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, top and not function)

    yield from walk(ast.parse(path.read_text(), filename=str(path)), True)


def violations(root: Path) -> list[str]:
    known = modules_of(root)
    found = []
    for module, path in known.items():
        floor = FLOORS[room(module)]
        for target, line, top in imports(module, path, known):
            first = target.split(".")[0]
            where = f"{path.relative_to(root)}:{line}"
            if first == "tq":
                own_kernels = target == "tq.kernels" or target.startswith("tq.kernels.")
                allowed = any(target == i or target.startswith(i + ".") for i in floor.inside)
                if not allowed or own_kernels and not any(i.startswith("tq.kernels") for i in floor.inside):
                    found.append(f"{where}: {module} must not import {target}")
            elif first == "kernels":
                found.append(f"{where}: import tq.kernels, not a top-level `kernels`")
            elif first not in STDLIB and not floor.anything:
                if first not in floor.outside and not (first in floor.lazy and not top):
                    how = "at module level" if first in floor.lazy else "at all"
                    found.append(f"{where}: {module} must not import {first} {how}")
    return found


def cycles(root: Path) -> list[list[str]]:
    """Import circles between modules, lazy imports included."""
    known = modules_of(root)
    graph = {m: {t for t, _, _ in imports(m, p, known) if t in known and t != m} for m, p in known.items()}
    found: list[list[str]] = []
    state: dict[str, int] = {}

    def visit(module: str, trail: list[str]) -> None:
        state[module] = 1
        for target in sorted(graph[module]):
            if state.get(target) == 1:
                found.append([*trail[trail.index(target) :], target])
            elif target not in state:
                visit(target, [*trail, target])
        state[module] = 2

    for module in sorted(graph):
        if module not in state:
            visit(module, [module])
    return found


# --- the house as it stands -----------------------------------------------------------------------------------


def test_floors() -> None:
    assert violations(ROOT) == []


def test_no_circles() -> None:
    assert cycles(ROOT) == []


def test_every_folder_has_a_floor() -> None:
    rooms = {p.name for p in (ROOT / "tq").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert {f"tq.{name}" for name in rooms} <= set(FLOORS)


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


#: More positional parameters than six: PyTorch's own signatures, which ours stand in for.
AS_IN_TORCH = {"tq/train/optim.py:__init__", "tq/train/linear.py:linear", "tq/train/linear.py:_"}


def test_rooms_modules_and_functions_stay_small() -> None:
    """Kernels apart: their bodies are unrolled by hand."""
    found = []
    assert len([p for p in (ROOT / "tq" / "book").iterdir() if p.name != "__pycache__"]) <= 8
    for path in sorted([*(ROOT / "tq").rglob("*.py"), *(ROOT / "book" / "_ext").glob("*.py")]):
        name, lines = path.relative_to(ROOT).as_posix(), len(path.read_text().splitlines())
        found += [f"{name}: {lines} lines, 450 are allowed"] if lines > 450 else []
        for function in _functions(path):
            length = (function.end_lineno or 0) - function.lineno + 1
            takes = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
            many = len(takes) - (takes[:1] in (["self"], ["cls"]))
            where = f"{name}:{function.name}"
            found += [f"{where}: {length} lines, 60 are allowed"] if length > 60 else []
            if many > 6 and where not in AS_IN_TORCH:
                found.append(f"{where}: {many} positional parameters, 6 are allowed")
    assert not found, "\n".join(found)


# --- the checker itself: each planted fault is found ----------------------------------------------------------

HEALTHY = {
    "tq/__init__.py": "from tq.quant.codec import Codec\n",
    "tq/quant/__init__.py": "",
    "tq/quant/codec.py": "import math\nimport torch\nfrom tq.quant import dispatch\n",
    "tq/quant/dispatch.py": "def f():\n    from tq.kernels import cpu\n    import numba\n",
    "tq/train/loop.py": "from ..quant.codec import Codec\n",
    "tq/book/run/go.py": "import pandas\nimport tq.train.loop\n",
    "tq/book/record/keep.py": "",
    "kernels/cpu.py": "import numba\nimport numpy as np\n",
}
FAULTS = {
    "quant imports train": ("tq/quant/codec.py", "from tq.train import loop\n"),
    "quant imports train, relative": ("tq/quant/codec.py", "from ..train import loop\n"),
    "quant imports scipy": ("tq/quant/codec.py", "import scipy.stats\n"),
    "quant imports kernels outside dispatch": ("tq/quant/codec.py", "def f():\n    from tq.kernels import cpu\n"),
    "quant imports kernels by name": ("tq/quant/codec.py", "def f():\n    from tq import kernels\n"),
    "dispatch imports numba at the top": ("tq/quant/dispatch.py", "import numba\n"),
    "kernel imports tq": ("kernels/cpu.py", "def f():\n    from tq.quant import codec\n"),
    "train imports book": ("tq/train/loop.py", "def f():\n    import tq.book.run.go\n"),
    "systems imports torch": ("tq/systems/memory.py", "def f():\n    import torch\n"),
    "systems imports train": ("tq/systems/memory.py", "from tq.train import loop\n"),
    "top-level kernels": ("tq/quant/dispatch.py", "import kernels\n"),
    "a recorder imports the runner": ("tq/book/record/keep.py", "from tq.book.run import go\n"),
    "the runner imports a page": ("tq/book/run/go.py", "def f():\n    from tq.book.site import build\n"),
    "tq imports train": ("tq/__init__.py", "from tq.train import loop\n"),
}


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_checker_accepts_a_healthy_house(tmp_path: Path) -> None:
    assert violations(plant(tmp_path, HEALTHY)) == []
    assert cycles(tmp_path) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_checker_finds(fault: str, tmp_path: Path) -> None:
    name, text = FAULTS[fault]
    plant(tmp_path, {**HEALTHY, name: text})
    found = violations(tmp_path)
    assert len(found) == 1 and found[0].startswith(name), found


def test_checker_ignores_type_checking_imports(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tq.book import run\n"
    assert violations(plant(tmp_path, {**HEALTHY, "tq/train/loop.py": text})) == []


def test_checker_finds_a_circle(tmp_path: Path) -> None:
    plant(tmp_path, {**HEALTHY, "tq/quant/bits.py": "from .codec import Codec\n"})
    plant(tmp_path, {"tq/quant/codec.py": "def f():\n    from tq.quant import bits\n"})
    assert cycles(tmp_path) == [["tq.quant.codec", "tq.quant.bits", "tq.quant.codec"]]
