"""Collectives as real messages between hosts of a lab: the rounds of `tq.systems.traffic` over TCP, timed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tq.lab.net import _exchange
from tq.lab.net.hosts import HostsFailed
from tq.lab.net.namespaces import Namespace, end, end_with_parent
from tq.systems.traffic import Round

PORT = 9000
CONGESTION = "cubic"  # BBR, the default of some kernels, ignores losses and shares unfairly
_SETTLE_S = 0.5  # that a rank ended by a signal gets to be seen as such
_LEAD_S = 0.15  # that all hosts get to read what to do before they start


class Network(Protocol):
    """Hosts that have addresses."""

    hosts: list[Namespace]

    def address(self, host: int) -> str: ...


class Exchange:
    """Processes on hosts, one a rank, that send each other what rounds say; a context manager.

    Arguments:
        network: whose hosts they run on.
        place: host of each rank.
        pairs: (source, destination) ranks that will talk, each over a connection of its own.
        ports: source port of each pair's connection; default: 20000 and up. Hashes of switches depend on them.
    """

    def __init__(
        self, network: Network, place: Sequence[int], pairs: Sequence[tuple[int, int]],
        ports: Mapping[tuple[int, int], int] | None = None,
    ) -> None:  # fmt: skip
        self.place, self.pairs = [int(host) for host in place], [(int(a), int(b)) for a, b in pairs]
        self.ports = dict(ports) if ports is not None else {pair: 20_000 + i for i, pair in enumerate(self.pairs)}
        if len(set(self.place)) != len(self.place):
            raise ValueError(f"place must name a host of its own for each rank, got {list(place)}")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._processes: list[subprocess.Popen[str]] = []
        try:
            program = [sys.executable, "-S", str(Path(_exchange.__file__))]
            for host in self.place:
                command = network.hosts[host].command(*program, processes=True)
                self._processes.append(subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                    preexec_fn=end_with_parent,
                ))  # fmt: skip
            for rank in range(len(self.place)):
                out = [
                    (b, network.address(self.place[b]), self.ports[a, b]) for a, b in self.pairs if a == rank
                ]  # fmt: skip
                self._tell(rank, {
                    "rank": rank, "address": network.address(self.place[rank]), "port": PORT, "out": out,
                    "in": sum(b == rank for _, b in self.pairs), "congestion": CONGESTION,
                })  # fmt: skip
            for rank in range(len(self.place)):
                if (said := self._hear(rank)) != "ready":
                    raise HostsFailed(f"rank {rank} did not get ready, it said {said!r}")
        except BaseException:
            self.close()
            raise

    def _failed(self, rank: int) -> HostsFailed:
        """Names the rank that a signal has ended, if there is one: others end after it, since it has gone."""
        deadline = time.monotonic() + _SETTLE_S
        killed: list[int] = []
        while not killed and time.monotonic() < deadline:
            codes = [process.poll() for process in self._processes]
            killed = [i for i, code in enumerate(codes) if code is not None and not 0 <= code <= 128]
            time.sleep(0.01)
        self._log.seek(0)
        return HostsFailed(f"rank {(killed or [rank])[0]} has ended\n{self._log.read()[-4000:]}")

    def _tell(self, rank: int, what: Any) -> None:
        pipe = self._processes[rank].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(what) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._failed(rank) from None

    def _hear(self, rank: int) -> str:
        pipe = self._processes[rank].stdout
        assert pipe is not None
        line = pipe.readline().strip()
        if not line:
            raise self._failed(rank)
        return line

    def run(self, rounds: Sequence[Round], nbytes: float) -> tuple[float, dict[tuple[int, int], float]]:
        """Runs rounds with so many bytes a rank: (seconds until the last rank is done, {pair: seconds until all of its
        last message had come})."""
        plans: list[list[dict[str, Any]]] = [[] for _ in self.place]
        for r in rounds:
            size, times = max(1, round(r.share * nbytes)), int(r.times)
            turns: list[dict[str, Any]] = [{"send": [], "receive": [], "times": times} for _ in self.place]
            for a, b in zip(r.sources.tolist(), r.destinations.tolist(), strict=True):
                turns[a]["send"].append([b, size])
                turns[b]["receive"].append([a, size])
            for plan, turn in zip(plans, turns, strict=True):
                plan.append(turn)
        start = time.monotonic() + _LEAD_S
        for rank, plan in enumerate(plans):
            self._tell(rank, {"start": start, "rounds": plan})
        found = [json.loads(self._hear(rank)) for rank in range(len(self.place))]
        heard = {
            (int(peer), rank): at - start for rank, one in enumerate(found) for peer, at in one["heard"].items()
        }  # fmt: skip
        return max(one["end"] for one in found) - start, heard

    def close(self) -> None:
        """Ends the processes. May be called twice."""
        for process in self._processes:
            with contextlib.suppress(OSError, ValueError):
                assert process.stdin is not None
                process.stdin.close()
            end(process)
            assert process.stdout is not None
            process.stdout.close()
        self._processes.clear()
        self._log.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pairs_of(rounds: Sequence[Round]) -> list[tuple[int, int]]:
    """(source, destination) of every message, once each, in order."""
    found = {pair: None for r in rounds for pair in zip(r.sources.tolist(), r.destinations.tolist(), strict=True)}
    return list(found)
