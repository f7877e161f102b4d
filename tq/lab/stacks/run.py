"""Runs a stack's program on the hosts of a lab, or on the ranks of this machine, and reads what its ranks told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tq.lab.net.hosts import Lab
from tq.lab.stacks.catalog import ROOT, Stack
from tq.lab.stacks.task import OUT, TASK


class StackFailed(RuntimeError):
    """A program did not end well; the message holds the end of what it said."""


def _environment(stack: Stack, task: dict[str, Any], folder: str) -> dict[str, str]:
    if (way := task.get("way", "plain")) not in ("plain", "forward", *stack.ways):
        raise ValueError(f"way must be one of plain, forward, {', '.join(stack.ways)} with {stack.title}, got {way!r}")
    said = [str(stack.folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**stack.environment, "PYTHONPATH": os.pathsep.join(said), TASK: json.dumps(task), OUT: folder}


def _told(folder: str, ranks: int) -> list[dict[str, Any]]:
    files = [Path(folder) / f"rank-{rank}.json" for rank in range(ranks)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise StackFailed(f"{', '.join(missing)} were not written")
    return [json.loads(file.read_text()) for file in files]


def on_hosts(stack: Stack, lab: Lab, timeout_s: float = 600, **task: Any) -> list[dict[str, Any]]:
    """One rank a host.

    Args:
        stack: one that torchrun launches.
        lab: its hosts.
        timeout_s: of the whole run.
        task: fields of ``Task``.

    Returns:
        What each rank told: {"runs": [{"seed", "valid", "digest", "held", "seconds", "sent", "counted"}], "counts"}.

    Raises:
        HostsFailed, StackFailed: where the program does not end well.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A host's processes have numbers of their own: with the machine's /proc, programs do not find themselves in it.
        own_proc = ["unshare", "--mount", "sh", "-c", 'mount -t proc proc /proc && exec "$@"', "sh"]
        argv = ["--no-python", *own_proc, sys.executable, "-m", stack.module]
        lab.torchrun(argv, timeout_s=timeout_s, env=_environment(stack, task, folder))
        return _told(folder, len(lab.hosts))


def here(stack: Stack, ranks: int = 2, timeout_s: float = 600, **task: Any) -> list[dict[str, Any]]:
    """As ``on_hosts``, with all ranks on this machine: for stacks that start their workers, and without namespaces."""
    argv = [sys.executable]
    if stack.launcher == "torchrun":
        argv += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        one = {name: "1" for name in ("OMP_NUM_THREADS", *os.environ) if name.endswith("_NUM_THREADS")}
        environment = {**os.environ, **one, **_environment(stack, task, folder)}
        try:
            done = subprocess.run(
                [*argv, "-m", stack.module], env=environment, timeout=timeout_s, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            raise StackFailed(f"{stack.title}: after {timeout_s:g} s still at work\n{late.output}") from None
        if done.returncode:
            raise StackFailed(f"{stack.title}: ended with {done.returncode}\n{done.stdout[-4000:]}")
        return _told(folder, ranks)
