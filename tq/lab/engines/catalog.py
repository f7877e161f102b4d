"""The engines: what each needs beside this package, pinned, and how it is run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MARK = ".pins"


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        name: of its folder.
        title: as its makers write it, with the version.
        needs: pinned packages, all of them: nothing else is installed.
        node: whether they are packages of Node.js, and its program is one.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    node: bool = False

    @property
    def folder(self) -> Path:
        """Where ``install`` puts its packages: below TQ_ENGINES, else below the checkout's _build/engines."""
        return Path(os.environ.get("TQ_ENGINES", ROOT / "_build" / "engines")).absolute() / self.name

    def obstacle(self) -> str | None:
        """Why it cannot run here, in a sentence; None if it can."""
        if self.node and shutil.which("node") is None:
            return f"{self.title} needs Node.js"
        pins = self.folder / MARK
        if pins.is_file() and pins.read_text().split() == list(self.needs):
            return None
        return f"{self.title} is not installed (make engines)"

    def install(self) -> None:
        """Fetch its pinned packages into its folder, unless they lie there.

        Raises:
            subprocess.CalledProcessError: where pip or npm fails.
        """
        if self.obstacle() is None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self.node:
            command = ["npm", "install", "--silent", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund"]
            command += ["--prefix", str(self.folder)]
        else:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            command += ["--target", str(self.folder)]
        subprocess.run([*command, *self.needs], check=True)
        (self.folder / MARK).write_text("\n".join(self.needs))

    def run(self, program: str, *arguments: str, timeout_s: float = 1800) -> str:
        """What a program of this folder prints, run with the engine's packages.

        Args:
            program: module name below ``tq.lab.engines``, or file of Node.js beside this one.
            arguments: of it.
            timeout_s: after which it is ended.
        Raises:
            EngineFailed: it cannot run here, or failed.
        """
        if why := self.obstacle():
            raise EngineFailed(why)
        command, environment = self._command(program, arguments)
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT
        )
        if done.returncode:
            raise EngineFailed(f"{self.title}: {(done.stderr.strip() or done.stdout.strip())[-1500:]}")
        return done.stdout

    def _command(self, program: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        if self.node:
            # packages are found from where the program lies
            shutil.copy(Path(__file__).with_name(program), self.folder / program)
            return ["node", str(self.folder / program), *arguments], dict(os.environ)
        path = os.pathsep.join((str(self.folder), str(ROOT), os.environ.get("PYTHONPATH", "")))
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        environment = os.environ | offline | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        return [sys.executable, "-m", f"tq.lab.engines.{program}", *arguments], environment


class EngineFailed(Exception):
    """An engine cannot run here, or failed; says why."""


COMPRESSOR = Engine(
    "compressor", "llm-compressor 0.14.0.1",
    (
        "llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "transformers==5.17.0", "huggingface_hub==1.33.0",
        "accelerate==1.15.0", "auto-round==0.15.1", "datasets==5.2.0", "pyarrow==26.0.1", "loguru==0.7.3",
        "nvidia-ml-py==13.615.71", "regex==2026.11.19", "py-cpuinfo==9.0.0", "typer==0.29.2", "xxhash==4.1.0",
        "annotated-doc==0.0.7", "shellingham==1.5.4", "pydantic==2.14.4", "pydantic-core==2.50.5",
        "annotated-types==0.8.0", "typing-inspection==0.4.5",
    ),
)  # fmt: skip
LLAMA = Engine(
    "llama", "llama.cpp, node-llama-cpp 3.22.1",
    ("node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1"), node=True,
)  # fmt: skip
ENGINES = {engine.name: engine for engine in (COMPRESSOR, LLAMA)}
