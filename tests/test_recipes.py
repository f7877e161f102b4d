"""Every Python block of the recipes runs as it stands, section by section, in a process of its own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "book" / "recipes.md").read_text()
SHARED, *SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(section: str) -> list[str]:
    return BLOCK.findall(section)


NAMED = {section.partition("\n")[0]: blocks(section) for section in SECTIONS if blocks(section)}


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_the_page_has_recipes() -> None:
    assert len(NAMED) >= 8 and len(blocks(SHARED)) == 1


@pytest.mark.parametrize("title", NAMED)
def test_a_recipe_runs(title: str, tmp_path: Path) -> None:
    own = "\n\n".join(NAMED[title])
    without_imports = re.sub(r"^(from|import) .*$", "", own, flags=re.MULTILINE)
    shares = re.search(r"\b(model|train)\b", without_imports)  # all others stand alone
    code = "\n\n".join([*blocks(SHARED), own]) if shares else own
    reads = "data/results/" in code  # in the root of the repository, as it says there
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "_toc.yml").touch()
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port())}
    where = {} if reads else {"TQ_BOOK_ROOT": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT if reads else tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | group | where | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
