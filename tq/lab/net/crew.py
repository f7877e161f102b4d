"""Ranks of a process group on the hosts of a lab, which wait for calls.

    with Lab(2, rate_mbit=100) as lab, Crew(lab) as crew:
        print(crew.call(workloads.measure, method="ours", numel=1 << 20))
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tq.lab.net.hosts import HostsFailed, Lab, tails
from tq.lab.net.namespaces import end


class Crew:
    """Ranks of one process group on the hosts of a lab, one a host, kept up between calls; a context manager.

    The links may be shaped anew between two calls. Functions are named, not sent: they must be importable.
    """

    def __init__(
        self, lab: Lab, backend: str = "gloo", timeout_s: float = 120, env: Mapping[str, str] | None = None
    ) -> None:
        self.lab, self.timeout_s = lab, timeout_s
        self._folder = tempfile.TemporaryDirectory()
        self._path, self._turn = Path(self._folder.name), 0
        self._outputs = [open(self._path / f"host-{h}.log", "w+") for h in range(len(lab.hosts))]  # noqa: SIM115
        arguments = ["-m", "tq.lab.net._rank", str(self._path), backend, str(timeout_s)]
        self._processes = lab.start_torchrun(arguments, outputs=self._outputs, env=env)
        try:
            self._wait([self._path / f"ready-{rank}.pt" for rank in range(len(lab.hosts))], 60 + timeout_s)
        except BaseException:
            self.close()
            raise

    def _wait(self, files: Sequence[Path], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not all(file.is_file() for file in files):
            gone = [host for host, process in enumerate(self._processes) if process.poll() is not None]
            if gone or time.monotonic() > deadline:
                missing = [rank for rank, file in enumerate(files) if not file.is_file()]
                why = f"hosts {gone} ended" if gone else f"ranks {missing} did not answer within {timeout_s:g} s"
                raise HostsFailed(f"{why}\n{self._tails()}")
            time.sleep(0.002)

    def _tails(self) -> str:
        return tails(self._outputs, range(len(self._outputs)))

    def call(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """``function(**arguments)`` on every rank at once; what the ranks return, in their order.

        arguments: JSON values; results: tensors, numbers, texts, and lists and dicts of these. Raises HostsFailed with
        the error of the first rank that raised one.
        """
        import torch

        order = {"module": function.__module__, "function": function.__name__, "arguments": arguments}
        turn, self._turn = self._turn, self._turn + 1
        self._order(turn, order)
        files = [self._path / f"result-{turn}-{rank}.pt" for rank in range(len(self.lab.hosts))]
        self._wait(files, self.timeout_s + 30)
        results = [torch.load(file, weights_only=True) for file in files]
        for rank, result in enumerate(results):
            if "error" in result:
                raise HostsFailed(f"rank {rank}: {result['error']}\n{self._tails()}")
        for file in files:
            file.unlink()
        return [result["value"] for result in results]

    def _order(self, turn: int, order: Any) -> None:
        waiting = self._path / "order.tmp"
        waiting.write_text(json.dumps(order))
        waiting.rename(self._path / f"call-{turn}.json")

    def close(self) -> None:
        """Ends the ranks, which get some seconds to take their leave; the lab stays up."""
        self._order(self._turn, None)
        deadline = time.monotonic() + 5
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            end(process)
        for output in self._outputs:
            output.close()
        self._folder.cleanup()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
