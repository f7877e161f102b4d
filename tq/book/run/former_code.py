"""What the code of a former commit computes on this machine."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tq.book import paths
from tq.book.record import tasks

COMPUTE = """
import json, sys
from pathlib import Path
from tq.book.record import tasks
function, asked, folder, device, jobs = json.load(sys.stdin)
tasks.outcomes(tasks.named(function), asked, Path(folder), device, jobs)
"""


def outcomes(
    at: str, function: str, asked: Sequence[dict[str, Any]], device: str = "cpu", jobs: int | None = None
) -> list[dict[str, Any]]:
    """``tasks.outcomes`` of a function ``module:name``, as they are kept, by the sources of commit ``at`` and today's
    libraries.

    Raises ValueError where git has no such commit here, or its code fails.
    """
    with TemporaryDirectory() as scratch:
        tree, folder = Path(scratch, "tree"), Path(scratch, "kept")
        _unpack(at, tree)
        given = json.dumps([function, list(asked), str(folder), device, jobs]).encode()
        around = {**os.environ, "PYTHONPATH": str(tree), "TQ_BOOK_ROOT": str(tree), "TQ_COMMIT": at}
        ended = subprocess.run([sys.executable, "-c", COMPUTE], input=given, capture_output=True, cwd=tree, env=around)
        if ended.returncode:
            raise ValueError(f"the code of {at[:10]} failed at {function}: {_last_line(ended.stderr)}")
        kept = [tasks.read(path) for path in folder.glob("*.pt")]
    return in_order(kept, asked)


def in_order(kept: Sequence[dict[str, Any]], asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kept runs of the tasks asked for, in which a tuple has become a list on its way."""
    found = {json.dumps(one["task"], sort_keys=True): one for one in kept}
    return [found[json.dumps(task, sort_keys=True)] for task in asked]


def _unpack(at: str, tree: Path) -> None:
    """The files of a commit into a folder; the checkout, its branches and its worktrees stay as they are."""
    ended = subprocess.run(["git", "archive", "--format=tar", at], cwd=paths.root(), capture_output=True)
    if ended.returncode:
        raise ValueError(f"the code of {at[:10]} is not here: {_last_line(ended.stderr)}")
    with tarfile.open(fileobj=io.BytesIO(ended.stdout)) as archive:
        archive.extractall(tree, filter="data")


def _last_line(said: bytes) -> str:
    return (said.decode(errors="replace").strip() or "nothing said").splitlines()[-1]
