"""The stacks: what each needs beside this package, pinned, and which program runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MARK = ".pins"


@dataclass(frozen=True)
class Stack:
    """One engine.

    Attributes:
        name: of its program, ``tq.lab.stacks.with_NAME``, and of its folder.
        title: as its makers write it, with the version.
        needs: pinned packages beside those of this book, all of them: nothing else is installed.
        ways: of ``task.WAYS`` that its program knows beside "plain".
        changes: what a user changes, in a line.
        launcher: "torchrun", or "own" where the program starts its workers itself.
        flags: of pip.
        environment: of pip and of the program.
    """

    name: str
    title: str
    needs: tuple[str, ...] = ()
    ways: tuple[str, ...] = ("backend",)
    changes: str = ""
    launcher: str = "torchrun"
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return f"tq.lab.stacks.with_{self.name}"

    @property
    def folder(self) -> Path:
        """Where ``install`` puts its packages: below TQ_STACKS, else below _build/stacks."""
        return Path(os.environ.get("TQ_STACKS", "_build/stacks")).absolute() / self.name

    def obstacle(self) -> str | None:
        """Why it cannot run here, in a sentence; None if it can."""
        pins = self.folder / MARK
        if not self.needs or (pins.is_file() and pins.read_text().split() == list(self.needs)):
            return None
        return f"{self.title} is not installed (python -m tq.lab.stacks install {self.name})"

    def install(self) -> None:
        """Fetch its pinned packages into its folder, unless they lie there.

        Raises:
            subprocess.CalledProcessError: where pip fails.
        """
        if self.obstacle() is None:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        argv += [*self.flags, "--target", str(self.folder), *self.needs]
        subprocess.run(argv, check=True, env={**os.environ, **self.environment})
        (self.folder / MARK).write_text("\n".join(self.needs))


STACKS = {
    stack.name: stack
    for stack in (
        Stack("ddp", "PyTorch DDP", ways=("backend", "hook"), changes='`init_process_group("tq")`'),
        Stack("fsdp", "PyTorch FSDP2", ways=("backend", "hook"), changes='`init_process_group("tq")`'),
    )
}
