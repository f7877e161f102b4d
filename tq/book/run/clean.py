"""An executed notebook as it is committed: only what the chapter says, nothing of where and when it ran.

Dropped: papermill's injected cell and marks, times, widget state, progress bars, versions of the kernel, and what
Matplotlib's calls return when a cell happens to end in one (an address in memory that no reader wants).
Refused: an output that holds a path of this machine (the book's own root is cut off instead).
Cleaning what is clean changes nothing; the same notebook gives the same bytes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tq.book import paths

DROPPED_TAGS = {"injected-parameters", "papermill-error-cell-tag"}
DROPPED_METADATA = {"papermill", "execution", "ExecuteTime", "vscode", "collapsed", "scrolled", "autoscroll", "trusted"}
WIDGET = "application/vnd.jupyter.widget-view+json"
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}
_PROGRESS = re.compile(r"\r|\d+%\|")
_DRAWN = re.compile(r"[\[(]?(?:<matplotlib\.|Text\()")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_IMAGE = re.compile(r"data:image/[a-z+]+;base64,[A-Za-z0-9+/=]*")


def _joined(text: Any) -> str:
    return text if isinstance(text, str) else "".join(text)


def _without_line_ends(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.split("\n"))


class _Paths:
    """Cuts off the book's root and finds other paths of this machine."""

    def __init__(self, root: Path) -> None:
        self._root = re.compile(re.escape(str(root)) + r"(/|(?![\w.-]))")
        private = {str(Path.home()), tempfile.gettempdir(), "/tmp", sys.prefix} - {"/", "/usr", "/usr/local"}
        places = sorted(map(re.escape, private)) + [r"/home/\w+", r"/Users/\w+", "/root"]
        self._foreign = re.compile(rf"(?<![\w.])(?:{'|'.join(places)})(?![\w-])[^\s\"'<>]*")

    def cleaned(self, text: str, where: str) -> str:
        text = self._root.sub(lambda found: "" if found[1] else ".", text)
        found = self._foreign.search(_IMAGE.sub("", text))  # base64 may spell a path by chance
        if found:
            raise ValueError(f"{where}: its output holds a path of this machine, {found[0]!r}; print no path")
        return text


def _output(output: dict[str, Any], count: int, where: str, machine: _Paths) -> dict[str, Any] | None:
    """One output, cleaned; None if nothing of it stays."""
    kind = output["output_type"]
    if kind == "stream":
        text = _joined(output["text"])
        if output["name"] == "stderr" and _PROGRESS.search(text):
            return None
        text = machine.cleaned(text, where)  # to the last blank: nbval compares it with what a cell prints
        return {"output_type": kind, "name": output["name"], "text": text} if text.strip() else None
    if kind == "error":
        trace = [machine.cleaned(_COLOUR.sub("", line), where) for line in output["traceback"]]
        evalue = machine.cleaned(output["evalue"], where)
        return {"output_type": kind, "ename": output["ename"], "evalue": evalue, "traceback": trace}
    if WIDGET in output["data"]:
        return None
    if set(output["data"]) == {"text/plain"} and _DRAWN.match(_joined(output["data"]["text/plain"])):
        return None
    data = {}
    for mime, content in output["data"].items():
        if isinstance(content, (str, list)):
            content = _joined(content)
            content = content if mime.startswith("image/") else machine.cleaned(content, where)
        data[mime] = content
    cleaned = {"output_type": kind, "data": data, "metadata": dict(output.get("metadata", {}))}
    return {**cleaned, "execution_count": count} if kind == "execute_result" else cleaned


def _merged(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring pieces of one stream as one: where a stream was cut depends on timing."""
    merged: list[dict[str, Any]] = []
    for output in outputs:
        last = merged[-1] if merged else {}
        if output["output_type"] == "stream" and last.get("name") == output["name"] and "text" in last:
            merged[-1] = {**last, "text": _joined(last["text"]) + _joined(output["text"])}
        else:
            merged.append(output)
    return merged


def clean(nb: dict[str, Any], root: Path | None = None) -> dict[str, Any]:
    """A cleaned copy of an executed notebook (a dict of nbformat 4); root: the book's, found if not given."""
    machine = _Paths(root or paths.root())
    nb = copy.deepcopy(dict(nb))
    cells: list[dict[str, Any]] = []
    ids: set[str] = set()
    count = 0
    for cell in nb["cells"]:
        metadata = {k: v for k, v in cell.get("metadata", {}).items() if k not in DROPPED_METADATA}
        if DROPPED_TAGS & set(metadata.get("tags", [])):
            continue
        if not metadata.get("tags"):
            metadata.pop("tags", None)
        source = _joined(cell["source"])
        cleaned: dict[str, Any] = {"cell_type": cell["cell_type"], "metadata": metadata}
        if cell["cell_type"] == "code":
            count += bool(source.strip())
            where = f"code cell {count} ({source.strip().splitlines()[0] if source.strip() else 'empty'})"
            found = [_output(o, count, where, machine) for o in _merged(cell.get("outputs", []))]
            cleaned["source"] = _without_line_ends(source).strip("\n")
            cleaned["outputs"] = [output for output in found if output is not None]
            cleaned["execution_count"] = count if source.strip() else None
        else:
            cleaned["source"] = source.rstrip()  # two spaces at a line's end mean something in Markdown
            if cell.get("attachments"):
                cleaned["attachments"] = cell["attachments"]
        number = len(cells)
        cleaned["id"] = cell.get("id") or hashlib.sha256(f"{number} {source}".encode()).hexdigest()[:8]
        if cleaned["id"] in ids:
            raise ValueError(f"cell {number + 1}: its id {cleaned['id']!r} occurs twice in the notebook")
        ids.add(cleaned["id"])
        cells.append(cleaned)
    kept = {k: v for k, v in nb.get("metadata", {}).items() if k not in DROPPED_METADATA | {"widgets"}}
    metadata = {**kept, "kernelspec": KERNELSPEC, "language_info": LANGUAGE}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def dumps(nb: dict[str, Any]) -> str:
    """A notebook as text: sorted keys, one space of indentation, texts as lists of lines, newline at the end."""
    nb = copy.deepcopy(nb)
    for cell in nb["cells"]:
        cell["source"] = _joined(cell["source"]).splitlines(keepends=True)
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = _joined(output["text"]).splitlines(keepends=True)
            for mime, content in output.get("data", {}).items():
                if isinstance(content, str) and not mime.startswith("image/"):
                    output["data"][mime] = content.splitlines(keepends=True)
    return json.dumps(nb, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def clean_file(path: Path) -> bool:
    """Cleans a notebook where it lies; True if that changed it."""
    nb = paths.read_json(path)
    if nb is None:
        raise FileNotFoundError(f"no notebook {path}")
    before, after = path.read_text(encoding="utf-8"), dumps(clean(nb))
    if before != after:
        paths.write_text(path, after)
    return before != after


def with_outputs(notebook: dict[str, Any], executed: dict[str, Any]) -> dict[str, Any]:
    """Today's notebook with the outputs of a run of the same code, so that prose edited since is not lost.

    Raises ValueError where the code cells are not the same: then those outputs are not this notebook's.
    """
    merged = copy.deepcopy(dict(notebook))
    ran = [
        cell
        for cell in executed["cells"]
        if cell["cell_type"] == "code" and not DROPPED_TAGS & set(cell.get("metadata", {}).get("tags", []))
    ]
    cells = [cell for cell in merged["cells"] if cell["cell_type"] == "code"]
    today, then = ([_without_line_ends(_joined(c["source"])).strip() for c in side] for side in (cells, ran))
    if today != then:
        raise ValueError("the executed notebook has other code cells than today's: reproduce it first")
    for cell, source in zip(cells, ran, strict=True):
        cell["outputs"], cell["execution_count"] = source["outputs"], source["execution_count"]
    return merged
