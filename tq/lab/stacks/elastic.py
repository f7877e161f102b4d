"""Hosts that are lost and come back under torchrun: when training goes on, from where, and with equal replicas."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from tq.lab.net.hosts import HostsFailed, Lab, tails
from tq.lab.net.namespaces import end
from tq.lab.stacks.catalog import ROOT
from tq.lab.stacks.task import OUT, TASK

PATIENCE_S = 60.0
LATER = (2, 17)  # steps that all hosts take together before the next kill: drawn, so that it falls anywhere
# Without it, workers of torch 2.13 meet under a number of restarts that each agent counts by itself.
SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# An agent counts as gone after three intervals without a sign of life; by default they are of 5 s.
CONFIGURATION = "keep_alive_interval=1,last_call_timeout=1"


class Job:
    """A job of torchrun on the hosts of a lab, with as few as two of them; a context manager.

    Args:
        lab: its hosts; the first one keeps the rendezvous and stays.
        task: fields of ``Task``.
    """

    def __init__(self, lab: Lab, **task: Any) -> None:
        self.lab, self._task = lab, {"way": "backend", "batch": 12, "steps": 20_000, **task}
        self._kept = tempfile.TemporaryDirectory()
        self.folder = Path(self._kept.name)
        self._outputs: list[IO[str]] = [open(self.folder / f"host-{h}", "w+") for h in range(len(lab.hosts))]  # noqa: SIM115
        self._agents: dict[int, subprocess.Popen[str]] = {}
        self._read, self._lines = 0, ""

    def start(self, host: int) -> None:
        """An agent on a host."""
        first = self.lab.address(0)
        argv = [sys.executable, "-m", "torch.distributed.run", f"--nnodes=2:{len(self.lab.hosts)}"]
        argv += ["--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={first}:29400", "--rdzv-id=elastic"]
        argv += [f"--rdzv-conf={CONFIGURATION},is_host={'false' if host else 'true'}", "--max-restarts=1000"]
        argv += [f"--local-addr={self.lab.address(host)}", "-m", "tq.lab.stacks.with_elastic"]
        one = {name: "1" for name in ("OMP_NUM_THREADS", *os.environ) if name.endswith("_NUM_THREADS")}
        environment = {**one, **SETTINGS, "PYTHONPATH": str(ROOT), OUT: str(self.folder), TASK: json.dumps(self._task)}
        self._agents[host] = self.lab.start(host, argv, environment, self._outputs[host])

    def lose(self, host: int) -> None:
        """kill -9 of the agent of a host and its worker."""
        end(self._agents.pop(host))

    def steps(self) -> Iterator[dict[str, Any]]:
        """What workers told since the last call."""
        with open(self.folder / "steps") as file:
            file.seek(self._read)
            while (line := file.readline()).endswith("\n"):
                self._read = file.tell()
                yield json.loads(line)

    def wait(self, ranks: int, since: float, told: list[dict[str, Any]], more: int = 6) -> float:
        """Seconds from ``since`` until so many ranks have taken a step together; they take some more.

        Raises:
            HostsFailed: where they do not within a minute.
        """
        deadline, found = time.monotonic() + PATIENCE_S, None
        while time.monotonic() < deadline:
            if (self.folder / "steps").exists():
                told += self.steps()
            with_all = [one for one in told if one["ranks"] == ranks and one["at"] > since]
            steps = {one["step"] for one in with_all}
            if found is None and with_all:
                found = min(one["at"] for one in with_all) - since
            if found is not None and len(steps) > more:
                return found
            time.sleep(0.05)
        raise HostsFailed(f"{ranks} ranks took no steps\n{tails(self._outputs, range(len(self._outputs)))}")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents.values():
            end(agent)
        for output in self._outputs:
            output.close()
        with contextlib.suppress(OSError):
            self._kept.cleanup()


def churn(lab: Lab, turns: int, seed: int = 0, **task: Any) -> dict[str, Any]:
    """The last host of a lab is killed and comes back, so many times.

    Args:
        lab: at least three hosts.
        turns: how often.
        seed: draws how many steps are taken before each kill.
        task: fields of ``Task``.

    Returns:
        lost_s, back_s: [turns], seconds from the kill, and from the start of the new agent, to the next step;
        lost_steps: [turns], steps taken twice after the kill; equal: whether all ranks had the same weights after every
        step; carried: whether codes were numbered on from the checkpoint each time, so that no seed came twice.

    Raises:
        HostsFailed: where a job does not go on within a minute.
    """
    hosts, last, drawn = len(lab.hosts), len(lab.hosts) - 1, random.Random(f"churn-{seed}")
    told: list[dict[str, Any]] = []
    found: dict[str, Any] = {"lost_s": [], "back_s": [], "lost_steps": []}
    carried = []
    with Job(lab, **task) as job:
        began = time.time()
        for host in range(hosts):
            job.start(host)
        job.wait(hosts, began, told, drawn.randrange(*LATER))
        for _ in tqdm(range(turns), desc="hosts lost", disable=None):
            before, began = max(one["step"] for one in told), time.time()
            job.lose(last)
            found["lost_s"].append(job.wait(hosts - 1, began, told))
            first, went_on = _went_on(told, began, hosts - 1)
            found["lost_steps"].append(before + 1 - first)
            began = time.time()
            job.start(last)
            found["back_s"].append(job.wait(hosts, began, told, drawn.randrange(*LATER)))
            carried += [went_on, _went_on(told, began, hosts)[1]]
    return {**found, "equal": _equal(told), "carried": all(carried)}


def _went_on(told: list[dict[str, Any]], since: float, ranks: int) -> tuple[int, bool]:
    """(the first step after a change, whether its codes are numbered on from those of the step before it)."""
    after = [one for one in told if one["at"] > since and one["ranks"] == ranks]
    first = min(one["step"] for one in after)
    behind = [one["calls"] for one in told if one["step"] == first - 1]
    return first, bool(behind) and min(one["calls"] for one in after) > min(behind)


def _equal(told: list[dict[str, Any]]) -> bool:
    """Whether ranks that took a step together have the same weights after it."""
    weights: dict[tuple[int, int, int], set[str]] = defaultdict(set)
    for one in told:
        weights[one["ranks"], one["step"], one["calls"]].add(one["weights"])
    return bool(weights) and all(len(each) == 1 for each in weights.values())

