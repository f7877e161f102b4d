"""The rule of the root conftest: skips are listed, and in CI an unexpected one fails the run, xdist or not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SKIPS = {
    "allowed": "import pytest\n\n@pytest.mark.skip(reason='needs a GPU: none here')\ndef test_a(): pass\n",
    "unexpected": "import pytest\n\ndef test_a():\n    pytest.skip('was in no mood')\n",
    "module": "import pytest\n\npytest.importorskip('there_is_no_such_module')\n\ndef test_a(): pass\n",
    "none": "def test_a(): pass\n",
}


def run(tmp_path: Path, kind: str, ci: str, workers: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(SKIPS[kind])
    (tmp_path / "test_other.py").write_text("def test_b(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**environment, "CI": ci})


@pytest.mark.parametrize(
    ("kind", "workers", "code"),
    [("allowed", "0", 0), ("none", "0", 0), ("unexpected", "0", 1), ("unexpected", "2", 1), ("module", "0", 1)],
)
def test_in_ci(tmp_path: Path, kind: str, workers: str, code: int) -> None:
    result = run(tmp_path, kind, "true", workers)
    assert result.returncode == code, result.stdout
    assert ("not allowed in CI" in result.stdout) == (code == 1)


def test_elsewhere_a_skip_is_listed_and_passes(tmp_path: Path) -> None:
    result = run(tmp_path, "unexpected", "", "0")
    assert result.returncode == 0
    assert "was in no mood" in result.stdout and "not allowed" not in result.stdout
