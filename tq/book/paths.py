"""Where things lie in the book's tree, which chapters there are, and how files are written so that no kill halves them.

The root is `TQ_BOOK_ROOT`, else the tree that this package lies in, else the first folder upwards from the working
directory that holds `_toc.yml` and `notebooks/`. Without such a tree it raises: results need a place.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DEVICES = ("cpu", "cuda")
PROFILES = ("quick", "full")
PACKAGE = Path(__file__).resolve().parents[2]  # the folder that holds `tq`


def _is_root(folder: Path) -> bool:
    return (folder / "_toc.yml").is_file() and (folder / "notebooks").is_dir()


def root() -> Path:
    """The root of the book's tree, absolute."""
    override = os.environ.get("TQ_BOOK_ROOT")
    if override:
        folder = Path(override).resolve()
        if not _is_root(folder):
            raise FileNotFoundError(f"TQ_BOOK_ROOT={override!r} holds no _toc.yml and notebooks/")
        return folder
    here = Path.cwd().resolve()
    for folder in (PACKAGE, here, *here.parents):
        if _is_root(folder):
            return folder
    raise FileNotFoundError(
        "no book here: neither this package's folder nor the working directory or a folder above it holds _toc.yml and "
        "notebooks/; run inside a checkout of the book or set TQ_BOOK_ROOT to one"
    )


def build() -> Path:
    """The git-ignored folder for everything that is made."""
    return root() / "_build"


def out() -> Path:
    """Where a running chapter writes: `_build`, or the place that the runner gives to unfinished runs."""
    return Path(os.environ["TQ_BOOK_OUT"]) if os.environ.get("TQ_BOOK_OUT") else build()


def place(kind: str, device: str, profile: str, name: str, base: Path) -> Path:
    """`<base>/<kind>/<device>/<profile>/<name>`; every device and profile has its own."""
    return base / kind / device / profile / name


def pieces(chapter: str, device: str, profile: str) -> Path:
    """The folder of a chapter's kept pieces."""
    return place("pieces", device, profile, chapter, build())


def tasks(chapter: str, device: str, profile: str) -> Path:
    """The folder of the outcomes of a chapter's tasks."""
    return place("tasks", device, profile, chapter, build())


def check_view(device: str, profile: str) -> None:
    """Raises unless device and profile name a view of the book."""
    if device not in DEVICES:
        raise ValueError(f"device={device!r}: accepted are 'cpu' and 'cuda'")
    if profile not in PROFILES:
        raise ValueError(f"profile={profile!r}: accepted are 'quick' and 'full'")


def _files(node: Any) -> list[str]:
    """Every `file:` of a jb-book table of contents, in reading order."""
    if isinstance(node, list):
        return [f for item in node for f in _files(item)]
    if not isinstance(node, dict):
        return []
    own = [node["file"]] if "file" in node else []
    return own + [f for key in ("parts", "chapters", "sections", "subtrees", "entries") for f in _files(node.get(key))]


def notebook(chapter: str) -> Path:
    """The source notebook of a chapter; it need not exist."""
    return root() / "notebooks" / f"{chapter}.ipynb"


def chapters() -> list[str]:
    """The executable chapters in the order of `_toc.yml`. One that is listed and missing raises."""
    import yaml

    toc_file = root() / "_toc.yml"
    toc = yaml.safe_load(toc_file.read_text(encoding="utf-8")) or {}
    names = []
    for entry in [str(toc.get("root", "")), *_files(toc)]:
        page = Path(entry)
        if page.parts[:1] != ("notebooks",):
            continue
        name = page.name.removesuffix(".ipynb").removesuffix(".md")
        if not notebook(name).is_file():
            raise FileNotFoundError(f"_toc.yml lists {entry!r}, but notebooks/{name}.ipynb does not exist")
        if name in names:
            raise ValueError(f"_toc.yml lists {entry!r} twice")
        names.append(name)
    return names


def write_bytes(path: Path, data: bytes) -> None:
    """Writes in one step: a reader or a kill sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # or a power cut may leave the new name with nothing in it
    os.replace(part, path)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Sorted keys, no NaN: the same value gives the same bytes."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file; damage raises with the path."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
