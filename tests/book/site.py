"""The HTML of the whole book, built once for all test processes of a run, away from the tree."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.book import helpers as h


def pages() -> list[str]:
    """Every page of the table of contents, and those that Sphinx adds."""
    toc = yaml.safe_load((h.ROOT / "_toc.yml").read_text(encoding="utf-8"))
    return [toc["root"], *(c["file"] for part in toc["parts"] for c in part["chapters"]), "search", "genindex"]


def tree(target: Path) -> Path:
    """A tree like the repository's with a `_build` of its own."""
    target.mkdir()
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(h.ROOT / name, target / name)
    shutil.copytree(h.ROOT / "notebooks", target / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for name in ("assets", "book", "data", "kernels", "tests", "tq"):
        (target / name).symlink_to(h.ROOT / name, target_is_directory=True)
    return target


def built(factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """(folder of the HTML, seconds that the build took); the first process builds, the others wait for it."""
    base = factory.getbasetemp()
    base = base.parent if base.name.startswith("popen-") else base  # of xdist: one folder a worker
    with open(base / "site.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        root, note = base / "site", base / "site.txt"
        if not note.exists():
            start = time.monotonic()
            env = h.environment(tree(root))
            command = [sys.executable, "-m", "tq.book", "build"]
            done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            seconds = time.monotonic() - start
            note.write_text(f"{seconds} {done.stderr}" if done.returncode else f"{seconds}", encoding="utf-8")
        seconds_text, _, problem = note.read_text(encoding="utf-8").partition(" ")
    assert not problem, problem
    return root / "_build" / "html", float(seconds_text)
