"""What is committed: portable, small, executed and clean; and the commands that the README names exist."""

import ast
import importlib
import json
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
VENDORED = "assets/"  # third-party files, byte for byte as published
MAX_BYTES = 2_000_000
LARGE = {"data/models/book-3m.safetensors": 7_000_000}  # what chapters and tests on inference work with
NOT_OURS = {"_build", ".venv", ".git", ".whl", ".site", "build", "dist", "__pycache__"}

# Written so that the patterns do not match themselves.
MACHINE_PATH = re.compile(r"(?<![\w.~-])(?:/(?:root|work|home|Users)/\w|/tmp/[a-z]|[A-Z]:\\Users\b)")
REGISTRY = re.compile(
    r"(?:pypi|pythonhosted|npmjs|anaconda|jsdelivr|unpkg|cdnjs)\.(?:org|com|net)"
    r"|download\.pytorch|(?:index-url|find-links|registry)[= ]+(?:https?|file):"
)
TEXT = {f".{s}" for s in "py md ipynb json csv yml yaml toml cff lock bib css svg txt".split()}


def repository_files() -> list[Path]:
    """What git tracks or would track; without git (an unpacked archive) everything that is not built."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode == 0:
        found = [ROOT / name for name in result.stdout.split("\0") if name]
    else:
        found = [p for p in ROOT.rglob("*") if not NOT_OURS & set(p.relative_to(ROOT).parts)]
    return [p for p in found if p.is_file()]


FILES = repository_files()


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def own_text() -> list[tuple[str, str]]:
    """(name, text) of every text file that we wrote."""
    names = {"Makefile", "run", "setup", "browser", "clock", "wheel", "LICENSE"}
    ours = [p for p in FILES if not name_of(p).startswith(VENDORED)]
    return [(name_of(p), p.read_text(encoding="utf-8")) for p in ours if p.suffix in TEXT or p.name in names]


# --- files ----------------------------------------------------------------------------------------------------


def test_no_path_of_a_machine() -> None:
    found = [f"{name}: {m.group()}" for name, text in own_text() for m in MACHINE_PATH.finditer(text)]
    assert found == []


def test_no_host_of_a_package_registry() -> None:
    found = [f"{name}: {m.group()}" for name, text in own_text() for m in REGISTRY.finditer(text)]
    assert found == []


@pytest.mark.parametrize("text", ["see /ro" + "ot/x", '"/wor' + 'k/main"', "in /hom" + "e/someone/x"])
def test_the_path_pattern_finds(text: str) -> None:
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("text", ["train/work", "https://x.org/a/root/b", "~/work", "network", "/workers"])
def test_the_path_pattern_leaves_alone(text: str) -> None:
    assert not MACHINE_PATH.search(text)


def test_no_large_file() -> None:
    found = [(name_of(p), p.stat().st_size) for p in FILES if not name_of(p).startswith(VENDORED)]
    assert [(name, size) for name, size in found if size > LARGE.get(name, MAX_BYTES)] == []


def test_vendored_mathjax_has_its_licence() -> None:
    assert {"LICENSE", "tex-svg.js"} <= {p.name for p in (ROOT / "assets" / "mathjax").iterdir()}


def test_licences() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    assert "Creative Commons Attribution 4.0 International" in (ROOT / "LICENSE-CC-BY-4.0").read_text()[:200]
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert "independent of the authors of TurboQuant and of the authors of the whitepaper" in readme
    assert "Apache-2.0" in readme and "CC BY 4.0" in readme


def test_built_things_are_ignored() -> None:
    ignored = set((ROOT / ".gitignore").read_text().split())
    assert {"_build/", ".venv/", ".whl/", ".site/", "__pycache__/"} <= ignored


# --- book -----------------------------------------------------------------------------------------------------


def toc_files() -> list[str]:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    return [toc["root"]] + [c["file"] for part in toc["parts"] for c in part["chapters"]]


def test_table_of_contents_names_every_page_once() -> None:
    listed = toc_files()
    assert len(listed) == len(set(listed))
    pages = {f"book/{p.stem}" for p in (ROOT / "book").iterdir() if p.suffix in (".md", ".ipynb")}
    pages |= {f"notebooks/{p.stem}" for p in NOTEBOOKS}
    assert set(listed) == pages


def test_pages_load_nothing_from_elsewhere() -> None:
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    assert config["execute"]["execute_notebooks"] == "off"
    settings = config["sphinx"]["config"]
    assert settings["mathjax_path"] == "../mathjax/tex-svg.js" and settings["nb_ipywidgets_js"] == {}
    assert not any(config["launch_buttons"].values())


# --- notebooks ------------------------------------------------------------------------------------------------


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [c for c in load(path)["cells"] if c["cell_type"] == "code" and "".join(c["source"]).strip()]


def tags(cell: dict[str, Any]) -> list[str]:
    return cell["metadata"].get("tags", [])


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


@each_notebook
def test_notebook_is_executed_from_top_to_bottom(path: Path) -> None:
    counts = [cell["execution_count"] for cell in code_cells(path)]
    assert all(isinstance(c, int) for c in counts), "cells without an execution count"
    assert counts == sorted(counts), "cells were executed out of order"
    kinds = [out["output_type"] for cell in code_cells(path) for out in cell["outputs"]]
    assert kinds and "error" not in kinds


@each_notebook
def test_notebook_is_clean(path: Path) -> None:
    notebook = load(path)
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    for number, cell in enumerate(notebook["cells"]):
        assert "injected-parameters" not in tags(cell), f"cell {number} was injected by papermill"
        assert not {"papermill", "execution"} & set(cell["metadata"]), f"cell {number} keeps timestamps"
        for out in cell.get("outputs", []):
            assert "application/vnd.jupyter.widget-view+json" not in out.get("data", {}), f"cell {number}: widget"
            assert out.get("name") != "stderr", f"cell {number} committed text on stderr"


@each_notebook
def test_notebook_has_one_parameters_cell(path: Path) -> None:
    (cell,) = [c for c in code_cells(path) if "parameters" in tags(c)]
    names = {
        target.id: ast.literal_eval(node.value)
        for node in ast.parse("".join(cell["source"])).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert names.items() >= {"device": "auto", "profile": "quick", "seed": 0}.items()


@each_notebook
def test_notebook_imports_what_there_is(path: Path) -> None:
    """A name that was changed in a module is found here, not only when the chapter is run."""
    cells = json.loads(path.read_text())["cells"]
    source = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tq":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


@each_notebook
def test_notebook_cells_are_short(path: Path) -> None:
    lengths = [len("".join(cell["source"]).strip().splitlines()) for cell in code_cells(path)]
    assert max(lengths) <= 20 and statistics.median(lengths) <= 6, lengths


@each_notebook
def test_notebook_has_checked_cells(path: Path) -> None:
    checked = [c for c in code_cells(path) if "NBVAL_CHECK_OUTPUT" in "".join(c["source"])]
    checked += [c for c in code_cells(path) if "nbval-check-output" in tags(c)]
    assert len(checked) >= 5
    assert all(cell["outputs"] for cell in checked), "a checked cell without output checks nothing"


# --- commands -------------------------------------------------------------------------------------------------


def make(*arguments: str) -> str:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands_in(text: str) -> set[str]:
    """Targets of every `make x` in code blocks and inline code."""
    blocks = re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
    return {target for block in blocks for target in re.findall(r"\bmake ([a-z]+)\b", block)}


@pytest.mark.parametrize("page", ["README.md", "book/how-to.md"])
def test_commands_of_the_page_exist(page: str) -> None:
    named = commands_in((ROOT / page).read_text())
    assert {"reproduce", "test"} <= named <= make_targets()


def test_make_alone_lists_every_target() -> None:
    assert set(re.findall(r"^  make ([a-z]+)", make(), re.MULTILINE)) == make_targets()
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony and set(phony.group(1).split()) == make_targets()


def test_make_passes_the_variables_on() -> None:
    variables = ["PY=python", "DEVICE=cuda", "PROFILE=full", "CHAPTERS=a b", "JOBS=2", "FORCE=1", "MINUTES=9"]
    wanted = "python -m tq.book reproduce a b --device cuda --profile full --jobs 2 --force --minutes 9 --book"
    compiles, runs = make("-n", "reproduce", *variables).splitlines()
    assert compiles.split()[1:] == ["-m", "tq.kernels"] and runs.split() == wanted.split()


def test_ci_calls_make_test_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "export CI=true", "make test"]
