"""A new chapter is four files of one name and a line in `_toc.yml`: a copy of the book gets one, from run to page."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.book import helpers as h

MODEL = '''"""How often a toy falls over: a model that only this test knows."""

import torch

from tq.quant.codec import Codec


def falls(task: dict, device: str) -> float:
    """Mean squared error of a coded vector."""
    numbers = torch.randn(256, generator=torch.Generator().manual_seed(task["seed"]))
    codec = Codec(4)
    return float((codec.decode(codec.encode(numbers, impl="reference"), impl="reference") - numbers).pow(2).mean())
'''
RULES = '''"""Rules over the toy."""

from tq.book.claims.ledger import Claim, Finding, Results, Rule, verdict_for


def small(claim: Claim, results: Results) -> Finding:
    """At most the claimed error."""
    error = results("toy-chapter", "error")
    return Finding(verdict_for(error <= claim.number(), False), f"a mean of {error:.3f}", "Other numbers.", "high")


RULES: dict[str, Rule] = {"S0-900": small}
'''
CELLS = (
    "from tq.train.experiments import toy_chapter",
    "found = ch.outcomes(toy_chapter.falls, [{'seed': s} for s in range(12)], jobs=1)",
    "ch.record('error', sum(found) / len(found))",
    "import pandas as pd\nch.table('errors', pd.DataFrame({'error': found}), 'Errors of the toy.')",
)


def run(root: Path, *commands: str, code: int = 0) -> str:
    """`python -m tq.book COMMAND` of each in turn, with the code of the copy, in one process; what they say."""
    env = {**h.environment(root), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    env.pop("CI", None)
    script = "import sys; from tq.book.__main__ import main; sys.exit(max(main(c.split()) for c in sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, *commands], env=env, cwd=root, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the house whose book is a front page, the ledger and the toy."""
    root = tmp_path_factory.mktemp("copy")
    skip = shutil.ignore_patterns("__pycache__", "figures", "tables", "results", "outcomes")
    for folder in ("tq", "kernels", "data", "book", "assets"):
        shutil.copytree(h.ROOT / folder, root / folder, ignore=skip)
    for file in ("_config.yml", "README.md"):
        shutil.copy(h.ROOT / file, root)
    (root / "book" / "index.md").write_text("# A copy\n\nThe toy: S0-900, an error of {val}`toy-chapter/error|.4f`.\n")
    toc = "format: jb-book\nroot: book/index\nchapters:\n  - file: notebooks/toy-chapter\n  - file: book/claims\n"
    (root / "_toc.yml").write_text(toc + "  - file: book/bibliography\n")
    # the four files
    h.write(root / "notebooks/toy-chapter.ipynb", h.notebook(*CELLS, name="toy-chapter"))
    h.write(root / "tq/train/experiments/toy_chapter.py", MODEL)
    h.write(root / "tq/book/claims/rules/toy_chapter.py", RULES)
    with open(root / "data/claims.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    toy = dict(rows[0]) | {"id": "S0-900", "value": "0.02", "claim": "Toys are precise", "chapter": "toy-chapter"}
    with open(root / "data/claims.csv", "a", newline="") as file:
        csv.DictWriter(file, rows[0]).writerow(toy)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "toy"]):
        git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@example.org", *command]
        subprocess.run(git, check=True, env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"})
    return root


def recorded(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "data/results/cpu/full/toy-chapter.json").read_text())
    return found


def test_a_new_chapter_goes_all_the_way(root: Path) -> None:
    claim, status = "claims --id S0-900", "status toy-chapter"
    full = "reproduce toy-chapter --profile full"
    said = run(root, claim, full, "diff toy-chapter", "promote toy-chapter", claim, status)
    assert "S0-900 not measured" in said and "toy-chapter: done" in said and "largest process" in said
    assert "promoted: toy-chapter (cpu, full)" in said and "S0-900 reproduced" in said and "up to date" in said
    found = recorded(root)
    assert len(found["runs"]["files"]) == 12 and found["usage"]["largest_bytes"] > 1 << 20
    assert (root / "data/outcomes/cpu/full/toy-chapter.tar.xz").is_file()


def test_what_it_found_is_on_the_built_pages(root: Path) -> None:
    run(root, "build")
    assert "toy-chapter" in (root / "_build/html/notebooks/toy-chapter.html").read_text()
    front = (root / "_build/html/book/index.html").read_text()
    assert f"{recorded(root)['results']['error']['value']:.4f}" in front
    assert "S0-900" in (root / "_build/html/book/claims.html").read_text()


def test_a_change_that_changes_nothing_is_lifted_by_a_sample(root: Path) -> None:
    model = root / "tq/train/experiments/toy_chapter.py"
    model.write_text(MODEL.replace("numbers", "vector"))
    before = recorded(root)
    said = run(root, "status toy-chapter", "revalidate toy-chapter --sample 6", "status toy-chapter")
    assert "stale: tq/train/experiments/toy_chapter.py" in said
    assert said.count("ok: the same bits") == 6 and "up to date, revalidated by 6 of 12 runs" in said
    after = recorded(root)
    assert after["results"] == before["results"] and after["source_hash"] != before["source_hash"]
    assert after["commit"] == before["commit"] and after["revalidated"]["sample"] == 6


def test_a_change_that_the_runs_do_not_cover_is_not_lifted(root: Path) -> None:
    stats = root / "tq/lab/stats.py"
    text = stats.read_text()
    stats.write_text(text + "\nANOTHER = True  # instrument\n")
    said = run(root, "revalidate toy-chapter", "status toy-chapter", code=1)
    assert "do not cover what else changed: tq/lab/stats.py" in said and "stale: tq/lab/stats.py" in said
    stats.write_text(text)


def test_runs_of_named_functions_count_again_and_the_rest_is_left(root: Path) -> None:
    model = root / "tq/train/experiments/toy_chapter.py"
    model.write_text(MODEL.replace("numbers", "row"))
    said = run(root, "revalidate toy-chapter --sample 2 --functions falls", "status toy-chapter", code=1)
    assert said.count("ok: the same bits") == 2 and "the 12 kept runs count again" in said
    assert "stale: tq/train/experiments/toy_chapter.py" in said
    with pytest.raises(AssertionError, match="functions must be among falls, got rises"):
        run(root, "revalidate toy-chapter --functions rises")
    model.write_text(MODEL.replace("numbers", "vector"))


def test_one_changed_rounding_in_the_codec_stays_stale(root: Path) -> None:
    reference = root / "tq/quant/reference.py"
    text, exact = reference.read_text(), "return norm_N * norm_N / dot_N"
    assert text.count(exact) == 1
    reference.write_text(text.replace(exact, "return norm_N * (norm_N / dot_N)"))  # one rounding elsewhere
    before = recorded(root)
    said = run(root, "revalidate toy-chapter", "status toy-chapter", code=1)
    assert "DIFFERS" in said and "stays stale" in said and recorded(root) == before
    assert "stale: tq/quant/reference.py" in said
    reference.write_text(text)
