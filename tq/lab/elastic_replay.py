"""A run whose workers, agents and hosts are killed, and the same membership without a kill: bit for bit one run.

    python -m tq.lab.elastic_replay                 20 kills of three hosts under torchrun, then the replay
    python -m tq.lab.elastic_replay --kills 3

The run is torchrun's: after every kill it goes on from the last checkpoint with whoever is there. What counts of it is,
of every step, the last time that it was taken. The replay trains with the same numbers of ranks from the same steps on
in one crew of processes that keep their weights: nobody dies, and no checkpoint is read. Losses and weights after every
step must be equal in every bit. This holds what elastic training promises: that a kill costs time and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import psutil
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import tq.backend
from tq.lab.net.hosts import HostsFailed, Lab, tails
from tq.lab.net.namespaces import end
from tq.lab.stacks.elastic import Job
from tq.lab.stacks.task import OUT, Task
from tq.train.crew import crew
from tq.train.tqk import Checkpoints

KINDS = ("worker", "agent", "host of the store")
EVERY = 5  # steps from one checkpoint to the next
STEPS = (2, 13)  # taken between two events: drawn
PROGRAM = "tq.lab.elastic_replay"


class Part:
    """Training from one change of the membership to the next, on the ranks of the default group.

    Args:
        task: what is trained.
        state: weights, optimizer, codes so far and the step; None: the start.
    """

    def __init__(self, task: Task, state: dict[str, Any] | None) -> None:
        self.task, self.done = task, 0
        self.model = DistributedDataParallel(task.model(task.seeds[0]))
        self.optimizer = task.optimizer(self.model.parameters())
        if state is not None:
            self.model.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            tq.backend.load_state_dict(state["codec"])
            self.done = state["step"]
        self._batches = iter(task.batches(task.seeds[0], self.done))

    def step(self) -> dict[str, Any]:
        """Takes a step; what is compared: its number, this rank's loss, and the weights after it."""
        ids, targets = next(self._batches)
        self.optimizer.zero_grad()
        loss: Tensor = self.model(ids, targets)
        loss.backward()
        self.optimizer.step()
        self.done += 1
        weights = self.task.digest(self.model.parameters())
        return {"step": self.done, "rank": self.task.rank, "loss": float(loss).hex(), "weights": weights}

    def state(self) -> dict[str, Any]:
        model, optimizer = self.model.module.state_dict(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "codec": tq.backend.state_dict(), "step": self.done}


def work() -> None:
    """A worker of torchrun: from the last checkpoint on, until it is killed or the file "stop" is there."""
    task, folder = Task.asked(), Path(os.environ[OUT])
    dist.init_process_group(task.backend)
    saved = Checkpoints(folder / "saved")
    part = Part(task, saved.load() if saved.steps() else None)
    began = [os.getpid()]
    dist.broadcast_object_list(began)  # all ranks name what they do together by the first one's process
    while True:
        told = part.step()
        with open(folder / "steps", "a") as file:
            file.write(json.dumps({**told, "at": time.time(), "ranks": task.ranks, "attempt": began[0]}) + "\n")
        if task.rank == 0 and part.done % EVERY == 0:
            saved.save(part.done, part.state())


class _Hosts:
    """The hosts of a lab, on which a job's agents run this module's workers."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lab, name)

    def start(self, host: int, argv: list[str], environment: dict[str, str], output: IO[str]) -> subprocess.Popen[str]:
        return self._lab.start(host, [*argv[:-1], PROGRAM], environment, output)


class Killed(Job):
    """A job of torchrun whose workers, agents and hosts can be lost."""

    def __init__(self, lab: Lab, **task: Any) -> None:
        super().__init__(cast(Lab, _Hosts(lab)), **task)

    def kill_worker(self, host: int) -> None:
        """kill -9 of the training process of a host, whose agent stays."""
        for child in psutil.Process(self._agents[host].pid).children(recursive=True):
            if PROGRAM in child.cmdline() and "torch.distributed.run" not in child.cmdline():
                child.kill()
                return
        raise HostsFailed(f"host {host} runs no worker\n{tails(self._outputs, range(len(self._outputs)))}")

    def restart(self) -> None:
        """All hosts are lost, and come back."""
        for agent in self._agents.values():
            end(agent)
        self._agents.clear()
        for host in range(len(self.lab.hosts)):
            self.start(host)


@dataclass
class Run:
    """What a run told. lost_s: by kind of kill, seconds from each to the next step; told: steps of ranks."""

    lost_s: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    told: list[dict[str, Any]] = field(default_factory=list)

    def attempts(self) -> list[list[dict[str, Any]]]:
        """Steps that were taken in one go by the same ranks, in the order of time."""
        found: dict[int, list[dict[str, Any]]] = {}
        for one in sorted(self.told, key=lambda one: one["at"]):
            found.setdefault(one["attempt"], []).append(one)
        return [*found.values()]

    def membership(self) -> list[tuple[int, int, int]]:
        """(ranks, the first step, the last) of every attempt that counts: up to where the next one went on."""
        firsts = [(attempt[0]["ranks"], min(one["step"] for one in attempt)) for attempt in self.attempts()]
        last, found = max(one["step"] for one in self._whole(self.attempts()[-1])), []
        for ranks, first in reversed(firsts):
            if first <= last:
                found.append((ranks, first, last))
            last = min(last, first - 1)
        return found[::-1]

    def steps(self) -> dict[int, list[dict[str, Any]]]:
        """{step: what its ranks told, the last time that all took it}, by rank."""
        found: dict[int, list[dict[str, Any]]] = {}
        for attempt in self.attempts():
            by_step: dict[int, list[dict[str, Any]]] = {}
            for one in self._whole(attempt):
                by_step.setdefault(one["step"], []).append(one)
            found |= {step: sorted(ones, key=lambda one: one["rank"]) for step, ones in by_step.items()}
        return found

    @staticmethod
    def _whole(attempt: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Steps that all ranks of an attempt told; a kill may come between two of them."""
        count: dict[int, int] = {}
        for one in attempt:
            count[one["step"]] = count.get(one["step"], 0) + 1
        return [one for one in attempt if count[one["step"]] == one["ranks"]]


def killed(lab: Lab, kills: int, seed: int = 0, progress: bool = True, **task: Any) -> Run:
    """Trains while ``kills`` of ``KINDS`` in turn fall on drawn hosts after drawn numbers of steps.

    Raises:
        HostsFailed: where training does not go on within a minute.
    """
    hosts, drawn, run = len(lab.hosts), random.Random(f"elastic-{seed}"), Run()
    job = Killed(lab, **task)
    with job:
        began = time.time()
        for host in range(hosts):
            job.start(host)
        job.wait(hosts, began, run.told, drawn.randrange(*STEPS))
        for number in tqdm(range(kills), desc="kills", disable=not progress or None):
            kind, host, began = KINDS[number % len(KINDS)], drawn.randrange(1, hosts), time.time()
            if kind == "worker":
                job.kill_worker(drawn.randrange(hosts))
                run.lost_s[kind].append(job.wait(hosts, began, run.told, drawn.randrange(*STEPS)))
            elif kind == "agent":
                job.lose(host)
                run.lost_s[kind].append(job.wait(hosts - 1, began, run.told, drawn.randrange(*STEPS)))
                began = time.time()
                job.start(host)
                job.wait(hosts, began, run.told, drawn.randrange(*STEPS))
            else:
                job.restart()
                run.lost_s[kind].append(job.wait(hosts, began, run.told, drawn.randrange(*STEPS)))
    return run


def replayed(folder: Path, membership: list[tuple[int, int, int]], task: dict[str, Any]) -> list[dict[str, Any]]:
    """On each rank of a crew: what it tells of the steps in which it takes part."""
    me, told, state = dist.get_rank(), [], None
    most = max(ranks for ranks, *_ in membership)
    task = {"way": "backend", **task}
    for number, (ranks, _, last) in enumerate(membership):
        dist.barrier()  # a group that one rank leaves while others still connect is lost to them
        dist.destroy_process_group()
        os.environ |= {"RANK": str(me), "WORLD_SIZE": str(ranks), "TQ_BITS": str(Task(**task).bits), "TQ_WARMUP": "0"}
        if me < ranks:
            store = dist.FileStore(str(folder / f"part-{number}"), ranks)
            dist.init_process_group("tq", store=store, rank=me, world_size=ranks)
            handed = [state]
            dist.broadcast_object_list(handed)  # who was not there takes the weights from the first
            part = Part(Task(**task), handed[0])
            while part.done < last:
                told.append(part.step())
            state = part.state()
            dist.barrier()
            dist.destroy_process_group()
        store = dist.FileStore(str(folder / f"between-{number}"), most)
        dist.init_process_group("gloo", store=store, rank=me, world_size=most)
    return told


def differing(run: Run, **task: Any) -> tuple[int, list[int]]:
    """(steps compared, those whose losses or weights on any rank differ in the replay)."""
    membership = run.membership()
    most = max(ranks for ranks, *_ in membership)
    by_rank = crew(f"{PROGRAM}:replayed", most, membership=membership, task={"batch": 12, "steps": 20_000, **task})
    again: dict[int, dict[int, tuple[str, str]]] = {}
    for one in (one for told in by_rank for one in told):
        again.setdefault(one["step"], {})[one["rank"]] = one["loss"], one["weights"]
    taken = {step: {one["rank"]: (one["loss"], one["weights"]) for one in ones} for step, ones in run.steps().items()}
    compared = range(1, membership[-1][2] + 1)
    return len(compared), [step for step in compared if taken.get(step) != again.get(step)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tq.lab.elastic_replay", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--kills", type=int, default=20, help="(20)")
    parser.add_argument("--hosts", type=int, default=3, help="three or more (3)")
    parser.add_argument("--seed", type=int, default=0, help="draws hosts and steps (0)")
    parser.add_argument("--json", type=Path, help="file for all that workers told")
    given = parser.parse_args(arguments)
    if given.kills < 1 or given.hosts < 3:
        parser.error(f"--kills must be positive and --hosts three or more, got {given.kills} and {given.hosts}")
    with Lab(given.hosts) as lab:
        run = killed(lab, given.kills, given.seed)
    if given.json:
        given.json.write_text(json.dumps(asdict(run)))
    for kind, seconds in run.lost_s.items():
        if seconds:
            middle = sorted(seconds)[len(seconds) // 2]
            print(f"{kind:18s} {len(seconds):3d} times, the next step after {middle:.1f} s, at most {max(seconds):.1f}")
    steps, wrong = differing(run)
    print(f"{steps} steps of {len(run.membership())} memberships replayed: {len(wrong)} differ {wrong[:5] or ''}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    if OUT in os.environ:
        work()
    else:
        main()
