"""What a chapter depends on, and a hash over it: the reason why a result counts as up to date or stale.

Covered: the notebook's code cells (without outputs, Markdown and papermill's injected cell), the modules of `tq` and
`tq.kernels` that it imports directly or indirectly, all that runs of them (`code_text`), measuring instruments
included, and byte by byte the files of `data/` that these name. The text of the modules in `REPORTING` is left out;
what they import is followed all the same. So are functions that only write and read states (`kept_states`).
Not covered: installed packages (their versions stand with the result), modules whose name is put together at run time.

Names are followed, not packages: `from tq import Codec` depends on `tq/__init__.py` and on the module that Codec
comes from there, not on what else that file imports. Imports inside functions count; those for type checkers do not.
A text that is a module's whole name ("tq.lab.net._rank", for `python -m`) counts as its import.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tq.book import paths
from tq.book.record.code_text import running
from tq.book.record.kept_states import counted

# kernels that results of a device cannot depend on, unless a notebook imports them itself
ELSEWHERE = {"cpu": ("gpu", "gpu_logscale", "gpu_adamw"), "cuda": ("cpu", "simd", "logscale", "adamw")}
PRODUCED = ("results", "tables", "figures", "outcomes", "verdicts.json")  # what the book made, below data/
# Modules that take down, keep and show values and compute none: tests/book/test_reporting.py mutates each of them and
# sees that no recorded value moves.
REPORTING = frozenset({
    "tq.book", "tq.book.paths", "tq.book.results", "tq.book.record", "tq.book.record.results", "tq.book.record.display",
    "tq.book.record.figures", "tq.book.record.figuredata", "tq.book.record.provenance", "tq.book.record.dependencies",
    "tq.book.record.intervals", "tq.book.record.tasks", "tq.book.record.code_text", "tq.book.record.kept_states",
})  # fmt: skip


_MODULE = re.compile(r"tq(\.\w+)+")
_BINDING = (
    ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef,
    ast.Assign, ast.AnnAssign, ast.AugAssign,
)  # fmt: skip


@lru_cache(maxsize=1024)
def _parse(path: Path, stamp: tuple[int, int]) -> ast.Module:
    """`stamp` (size, time) is the cache's key to the content."""
    return ast.parse(counted(path), filename=path.name)


def _tree(path: Path) -> ast.Module:
    state = path.stat()
    return _parse(path, (state.st_size, state.st_mtime_ns))


def _locate(root: Path, module: str) -> Path | None:
    """The file of a module of this project; None for a foreign or missing one."""
    parts = module.split(".")
    if parts[0] != "tq" or not all(parts):
        return None
    # kernels/ is installed as tq.kernels; the folder tq/kernels holds only a shim.
    moved = parts[:2] == ["tq", "kernels"] and len(parts) > 2
    base = root.joinpath("kernels", *parts[2:]) if moved else root.joinpath(*parts)
    for candidate in (base.with_name(base.name + ".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _chain(node: ast.AST) -> str:
    """ "a.b.c" of a name or of attributes of a name, else ""."""
    if isinstance(node, ast.Name):
        return node.id
    base = _chain(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if isinstance(node, ast.Attribute) and base else ""


@lru_cache(maxsize=4096)  # a chapter asks again before every run, and the trees of files are kept
def _nodes(node: ast.AST, typing: bool = False) -> tuple[ast.AST, ...]:
    """The nodes below that may import or bind a name, without the branches that only type checkers see unless
    `typing`; a small part of all, which every notebook that reaches the file goes through."""
    return tuple(found for found in _walk(node, typing) if _counts(found))


def _counts(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and _MODULE.fullmatch(node.value) is not None
    return isinstance(node, _BINDING) or (isinstance(node, ast.Call) and _chain(node.func).endswith("import_module"))


def _walk(node: ast.AST, typing: bool) -> Iterator[ast.AST]:
    yield node
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and _chain(node.test).endswith("TYPE_CHECKING") and not typing:
        children = node.orelse
    for child in children:
        yield from _walk(child, typing)


def _from(node: ast.ImportFrom, package: list[str]) -> str:
    """Absolute name of the module in `from ... import`; `package` is where the importing file lies."""
    if not node.level:
        return node.module or ""
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


class _Dependencies:
    """The files that a notebook reaches. A file is `whole` when all its imports count, else only `seen`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: set[Path] = set()
        self._whole: set[str] = set()
        self._names: set[tuple[str, str]] = set()

    def module(self, name: str) -> None:
        """All of a module: its bytes and everything that it imports."""
        path = _locate(self.root, name)
        if path is None or name in self._whole:
            return
        self._whole.add(name)
        if name not in REPORTING:
            self.files.add(path)
        self.code(_tree(path), self._package(name, path))

    def code(self, tree: ast.AST, package: list[str], typing: bool = False) -> None:
        """Everything that this code imports."""
        for node in _nodes(tree, typing):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.module(alias.name)
                    if alias.asname is None and "." in alias.name and alias.name.startswith("tq."):
                        self._attributes(tree)  # the statement binds `tq`, so tq.Codec works as well
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.name(_from(node, package), alias.name)
            elif isinstance(node, ast.Call) and node.args:  # of import_module
                if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                    self.module(node.args[0].value)
            elif isinstance(node, ast.Constant):
                self.module(str(node.value))  # a module's whole name

    def name(self, module: str, name: str) -> None:
        """`from module import name`."""
        path = _locate(self.root, module)
        if path is None:  # a folder without __init__.py, or nothing of ours
            self.module(f"{module}.{name}")
            return
        if (module, name) in self._names:
            return
        self._names.add((module, name))
        if path.name != "__init__.py" or name == "*":
            self.module(module)
            return
        if _locate(self.root, f"{module}.{name}") is not None:
            self.module(f"{module}.{name}")
            if not self._binding(_tree(path), name, typing=False):
                return
        if module not in REPORTING:
            self.files.add(path)
        self._defined(module, path, name)

    def _defined(self, module: str, path: Path, name: str) -> None:
        """What stands behind one name of a package's `__init__.py`."""
        tree, package = _tree(path), self._package(module, path)
        bound = self._binding(tree, name, typing=False)
        if not bound and self._binding(tree, "__getattr__", typing=False):
            # A lazy package: it tells type checkers where its names come from, or all its imports count.
            bound = self._binding(tree, name, typing=True)
            if not bound:
                self.code(tree, package)
        for statement in bound:
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        self.name(_from(statement, package), alias.name)
                    elif alias.name == "*":
                        self.module(_from(statement, package))
                continue
            self.code(statement, package)
            for used in {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} - {name}:
                if (module, used) not in self._names:
                    self._names.add((module, used))
                    self._defined(module, path, used)

    @staticmethod
    def _binding(tree: ast.Module, name: str, typing: bool) -> list[ast.AST]:
        """The top-level statements that give a name its meaning."""
        found: list[ast.AST] = []
        for node in _nodes(tree, typing):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.asname or alias.name.split(".")[0] for alias in node.names]
                if name in names or any(alias.name == "*" for alias in node.names):
                    found.append(node)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if node.name == name and node in tree.body:
                    found.append(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node in tree.body:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(n, ast.Name) and n.id == name for target in targets for n in ast.walk(target)):
                    found.append(node)
        return found

    def _attributes(self, tree: ast.AST) -> None:
        """Chains such as `tq.Codec` or `tq.quant.codec.Codec` in code that binds `tq` itself."""
        for node in ast.walk(tree):
            module, _, name = _chain(node).rpartition(".")
            if module.split(".")[0] == "tq" and _locate(self.root, f"{module}.{name}") is None:
                self.name(module, name)

    @staticmethod
    def _package(name: str, path: Path) -> list[str]:
        return name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]


def cells(notebook: Path) -> list[str]:
    """Sources of the code cells that count, without white space at line ends."""
    found = paths.read_json(notebook)
    if found is None:
        raise FileNotFoundError(f"no notebook {notebook}")
    sources = []
    for cell in found.get("cells", []):
        if cell.get("cell_type") != "code" or "injected-parameters" in cell.get("metadata", {}).get("tags", []):
            continue
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        source = "\n".join(line.rstrip() for line in source.strip().splitlines())
        if source:
            sources.append(source)
    return sources


def _parse_cell(source: str, where: str) -> ast.Module:
    """A cell as Python; IPython's own lines (%, !, ?) stand aside."""
    try:
        return ast.parse(source)
    except SyntaxError:
        plain = []
        for line in source.splitlines():
            indent = line[: len(line) - len(line.lstrip())]
            plain.append(f"{indent}pass" if line.lstrip().startswith(("%", "!", "?")) else line)
    try:
        return ast.parse("\n".join(plain))
    except SyntaxError as error:
        raise ValueError(f"{where}: not Python, its imports are unknown ({error.msg}, line {error.lineno})") from error


@lru_cache(maxsize=1024)
def _texts(tree: ast.AST) -> set[str]:
    """All strings but docstrings."""
    constants = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {str(node.value) for node in constants if id(node) not in docstrings}


def _data(root: Path) -> dict[str, Path]:
    """The inputs by the names under which code may speak of them."""
    folder = root / "data"
    found = {}
    for path in folder.rglob("*") if folder.is_dir() else ():
        relative = path.relative_to(folder)
        if path.is_file() and relative.parts[0] not in PRODUCED:
            found[relative.as_posix()] = found[f"data/{relative.as_posix()}"] = path
    return found


def inputs(notebook: Path | str, device: str | None = None) -> list[Path]:
    """The modules and data files that a notebook's code depends on, on this device: absolute paths, sorted."""
    notebook, root = Path(notebook), paths.root()
    reached = _Dependencies(root)
    trees: list[ast.AST] = [
        _parse_cell(source, f"{notebook.name}, code cell {number}") for number, source in enumerate(cells(notebook), 1)
    ]
    whole = ast.Module(body=[statement for tree in trees for statement in getattr(tree, "body", [])], type_ignores=[])
    reached.code(whole, [])
    text = "\n".join(cells(notebook))
    for kernel in ELSEWHERE.get(device or "", ()):
        if not re.search(rf"^\s*(from|import) tq\.kernels\b.*\b{kernel}\b", text, re.MULTILINE):
            reached.files.discard(root / "kernels" / f"{kernel}.py")
    _add_data(reached.files, [whole, *map(_tree, reached.files)], root)
    return sorted(reached.files)


def _add_data(files: set[Path], trees: Iterable[ast.AST], root: Path) -> None:
    """The files of `data/` that the code names."""
    data = _data(root)
    if data:
        named = {text for tree in trees for text in _texts(tree)}
        files.update(data[name] for name in named & data.keys())


@lru_cache(maxsize=4096)
def _file_digest(path: Path, stamp: tuple[int, int]) -> str:
    """Of what runs of a Python file, of all bytes of another; `stamp` as above."""
    return hashlib.sha256(running(counted(path)) if path.suffix == ".py" else path.read_bytes()).hexdigest()


def _digests(files: Iterable[Path], root: Path) -> dict[str, str]:
    found = {}
    for path in files:
        state = path.stat()
        found[path.relative_to(root).as_posix()] = _file_digest(path, (state.st_size, state.st_mtime_ns))
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8")).hexdigest()


def sources(notebook: Path | str, device: str | None = None) -> dict[str, str]:
    """{file: SHA-256} of all inputs of a notebook, and of its code cells under the notebook's own name.

    Names are relative to the tree, so they are the same wherever it lies. device: "cpu" or "cuda" leaves out the
    kernels of the other one; None leaves out nothing.
    """
    notebook, root = Path(notebook), paths.root()
    return {**_digests(inputs(notebook, device), root), f"notebooks/{notebook.name}": _digest(cells(notebook))}


def source_hash(notebook: Path | str, device: str | None = None) -> str:
    """SHA-256 over ``sources``: what makes a recording up to date or stale."""
    return _digest(sources(notebook, device))


def module_sources(module: str, device: str | None = None) -> dict[str, str]:
    """{file: SHA-256} of a module of ``tq`` and of everything that it imports from the project; device: as above."""
    root = paths.root()
    reached = _Dependencies(root)
    reached.module(module)
    for kernel in ELSEWHERE.get(device or "", ()):
        reached.files.discard(root / "kernels" / f"{kernel}.py")
    _add_data(reached.files, map(_tree, reached.files), root)
    return _digests(sorted(reached.files), root)


def module_hash(module: str, device: str | None = None) -> str:
    """SHA-256 over ``module_sources``."""
    return _digest([module, module_sources(module, device)])


def changed(
    recorded: Mapping[str, Any], notebook: Path, today: Mapping[str, str] | None = None
) -> list[str] | None:
    """What of a recording's inputs is another today: files, and recordings of other chapters that it read.

    [] where nothing is; None where there is no notebook to compare with. A recording that lists no files says only
    "its sources". today: ``sources`` of the notebook on the recording's device, where the caller has them already.
    """
    if not notebook.is_file():
        return None
    found = []
    today = sources(notebook, recorded.get("device")) if today is None else today
    if recorded.get("source_hash") != _digest(today):
        before = recorded.get("sources")
        if before is None:
            found = ["its sources"]
        else:
            found = sorted(name for name in before.keys() | today.keys() if before.get(name) != today.get(name))
    return found + [view for view, seen in sorted(recorded.get("reads", {}).items()) if reading(view) != seen]


def reading(view: str) -> str | None:
    """A digest of the committed values of `device/profile/chapter`; None where nothing is committed."""
    recorded = paths.read_json(paths.root() / "data" / "results" / f"{view}.json")
    return None if recorded is None else _digest(recorded.get("results"))
