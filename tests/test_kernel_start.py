"""A kernel that dies before its first word, as one does whose port was taken meanwhile, is started anew, once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
DIES = """
import os, pathlib, sys
if "ipykernel_launcher" in sys.orig_argv:
    with pathlib.Path(__file__).with_name("starts").open("a") as starts:
        starts.write(".")
        first = starts.tell() <= {deaths}
    if first:
        os._exit(1)
"""


@pytest.mark.parametrize(("deaths", "code"), [(1, 0), (9, 1)])
def test_a_kernel_that_died_is_started_once_more(tmp_path: Path, deaths: int, code: int) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(DIES.format(deaths=deaths))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 + 1 == 2")])
    nbformat.write(notebook, tmp_path / "it.ipynb")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(tmp_path / "site")
    ran = subprocess.run([*command, "it.ipynb"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert len((tmp_path / "site" / "starts").read_text()) == 2
