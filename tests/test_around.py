"""Workflows and containers, which nothing here can run: they parse, and they do what the README says."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tq.book.__main__ import main
from tq.book.site.build import with_launch_buttons

ROOT = Path(__file__).resolve().parents[1]
PINNED = r"actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v1"  # the index's own action for trusted publishing
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_a_workflow_parses_and_its_steps_are_pinned(path: Path) -> None:
    found: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert found["permissions"]["contents"] == "read" and True in found  # YAML reads the key `on` as true
    for job in found["jobs"].values():
        assert job["runs-on"] != "ubuntu-latest" and job["steps"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "uses" not in step or re.fullmatch(PINNED, step["uses"])


def test_the_workflows_run_what_everybody_runs() -> None:
    found = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"] for path in WORKFLOWS}
    runs = {
        name: [step.get("run", "") for job in jobs.values() for step in job["steps"]] for name, jobs in found.items()
    }
    assert ".ci/run" in runs["ci"] and {"make book", "make wheel"} <= set(runs["publish"])
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = {word for steps in runs.values() for step in steps for word in re.findall(r"make (\w+)", step)}
    assert asked <= targets


def test_the_container_is_the_two_commands_as_an_ordinary_user() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    steps = [line.split(None, 1) for line in lines if line.strip() and not line.startswith("#")]
    known = {"FROM", "RUN", "USER", "WORKDIR", "COPY", "ARG", "EXPOSE", "CMD"}
    assert {step[0] for step in steps} <= known and steps[0] == ["FROM", "debian:12-slim"]
    user = next(i for i, step in enumerate(steps) if step[0] == "USER")
    after = [step[1] for step in steps[user:] if step[0] == "RUN"]
    assert after[0] == "make reproduce" and after[1].endswith("make test")
    command = json.loads(steps[-1][1])
    assert command[:2] == ["make", "serve"]


def test_the_development_container_uses_it() -> None:
    found = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert (ROOT / ".devcontainer" / found["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert found["postCreateCommand"] == "make reproduce"


def test_launch_buttons_need_a_repository() -> None:
    config = (ROOT / "_config.yml").read_text(encoding="utf-8")
    assert with_launch_buttons(config, "") == config
    made = yaml.safe_load(with_launch_buttons(config, "someone/book"))
    assert made["repository"]["url"] == "https://github.com/someone/book"
    assert made["launch_buttons"]["colab_url"] and made["html"]["use_repository_button"] is True
    with pytest.raises(ValueError, match="owner/name"):
        with_launch_buttons(config, "https://github.com/someone/book")


def test_the_notebook_for_a_free_gpu_can_run() -> None:
    notebook = json.loads((ROOT / "book/free-gpu.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for source in code:
        compile(source, "cell", "exec")
    whole = "\n".join(code)
    assert all(not cell.get("outputs") for cell in notebook["cells"]) and not re.search(r"https?://", whole)
    for command in ("reproduce", "diff"):
        assert f'"tq.book", "{command}", *asked' in whole
        with pytest.raises(SystemExit) as ended:
            main([command, "--device", "cuda", "--profile", "full", "--help"])
        assert ended.value.code == 0


def test_it_rehearses_from_top_to_bottom_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with one small chapter, from an archive of this tree; nothing is installed. Again: nothing is left."""
    monkeypatch.chdir(tmp_path)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open("repository.tar", "w") as archive:
        for name in filter(None, files.decode().split("\0")):
            if (ROOT / name).is_file() and "results/cpu/quick/energy" not in name:  # as if it had never been recorded
                archive.add(ROOT / name, f"tree/{name}")
    notebook = json.loads((ROOT / "book/free-gpu.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code.insert(1, 'SOURCE, DEVICE, PROFILE, CHAPTERS = "repository.tar", "cpu", "quick", ["energy"]')
    ran, run = [], subprocess.run

    def without_pip(command: list[str], **options: Any) -> Any:
        if "pip" in command:
            return None
        done = run(command, **options | {"stderr": subprocess.PIPE, "text": True})
        ran.append((command[3], done.returncode, done.stderr))
        return done

    monkeypatch.setattr(subprocess, "run", without_pip)
    for _ in range(2):
        names: dict[str, Any] = {}
        for source in code:
            exec(source, names)
    assert [each[:2] for each in ran] == [("reproduce", 0), ("diff", 0)] * 2
    assert "energy: starts" in ran[0][2] and "skipped" in ran[2][2]
    with tarfile.open("recordings.tar.gz") as archive:
        assert "_build/results/cpu/quick/energy.json" in archive.getnames()


def test_its_archive_holds_what_promote_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((ROOT / "book/free-gpu.ipynb").read_text(encoding="utf-8"))
    (source,) = ["".join(c["source"]) for c in notebook["cells"] if "tarfile" in "".join(c["source"])]
    for name in ("results", "figures", "tables", "executed", "tasks"):
        (tmp_path / f"tq-book/_build/{name}/cuda").mkdir(parents=True)
        (tmp_path / f"tq-book/_build/{name}/cuda/file").write_text(name)
    monkeypatch.chdir(tmp_path)
    exec(source, {"root": Path("tq-book")})
    with tarfile.open("recordings.tar.gz") as archive:
        names = {name for name in archive.getnames() if name.endswith("file")}
    assert names == {f"_build/{name}/cuda/file" for name in ("results", "figures", "tables", "executed")}
