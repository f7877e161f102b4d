"""Which notebooks `make test` executes: every changed one, and all others in their turn."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMES = [f"chapter-{k:02}" for k in range(19)]


@pytest.fixture(scope="module")
def choice() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / ".ci" / "notebooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_changed_is_chosen_in_the_book_s_order(choice: ModuleType) -> None:
    changed = ["chapter-11", "chapter-02"]
    for day in range(30):
        names = choice.chosen(NAMES, changed, day)
        assert set(changed) < set(names) and len(names) == 5 and names == sorted(names)
    assert choice.chosen(NAMES, NAMES, 5) == NAMES
    assert choice.chosen(NAMES[:2], [], 5) == NAMES[:2]
    assert choice.chosen([], [], 5) == []


@pytest.mark.parametrize("start", [0, 740_123])
def test_each_has_its_turn_within_a_week(choice: ModuleType, start: int) -> None:
    seen = {name for day in range(start, start + 7) for name in choice.chosen(NAMES, [], day)}
    assert seen == set(NAMES)


def test_a_change_of_sources_is_seen(choice: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from tq.book import paths
    from tq.book.record import dependencies

    recorded: dict[str, str] = {"source_hash": "as it is"}
    monkeypatch.setattr(paths, "read_json", lambda path: recorded or None)
    monkeypatch.setattr(dependencies, "source_hash", lambda notebook, device: "as it is")
    assert not choice.has_changed("kernels")
    monkeypatch.setattr(dependencies, "source_hash", lambda notebook, device: "another")
    assert choice.has_changed("kernels")
    recorded.clear()  # never recorded
    assert choice.has_changed("kernels")


def test_the_command_names_notebooks_of_the_book() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci/notebooks.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert len(names) >= 3 and all((ROOT / name).is_file() for name in names)
    assert done.stderr.startswith("notebooks: ") and done.stdout.count("\n") == 1
