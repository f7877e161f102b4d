"""A crew: ranks on this machine that are forked from one clean process, ready in a second, and gone with their parent.

    crew("tq.lab.layouts:proof", 8, layouts=["ddp", "tp"])

A new process imports PyTorch once and forks the ranks, so that eight cost little more than one. The kernel kills every
process of the crew when its parent dies (``PR_SET_PDEATHSIG``), also by a kill -9: none is left behind. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


class CrewError(RuntimeError):
    """A rank of a crew failed; the message ends with its trace."""


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent, whose id is given, dies; at once if it is dead by now."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def crew(
    work: str, ranks: int, timeout_s: float = 600.0, prefix: Sequence[str] = (), **arguments: Any
) -> list[Any]:  # fmt: skip
    """What a function returns on each rank of a new gloo group.

    Args:
        work: "module:function"; it takes the folder that all ranks share, and ``arguments``.
        ranks: processes, one thread each.
        timeout_s: seconds after which the whole crew is stopped.
        prefix: a command that runs the crew, as ("unshare", "--net").
        arguments: of the function; JSON can say them, and what it returns.

    Raises:
        CrewError: if a rank raises or dies, or time is up.
    """
    module, _, name = work.partition(":")
    if not name or ranks < 1:
        raise ValueError(f"work must be 'module:function' on at least one rank, got {work!r} on {ranks}")
    with tempfile.TemporaryDirectory(prefix="crew-") as folder:
        asked = {"module": module, "name": name, "ranks": ranks, "timeout_s": timeout_s, "arguments": arguments}
        Path(folder, "asked.json").write_text(json.dumps(asked))
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [*prefix, sys.executable, "-m", "tq.train.crew", folder, str(os.getpid())]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            _, said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            stacks = "".join(f"{path.name}:\n{path.read_text()}" for path in sorted(Path(folder).glob("stack-*.txt")))
            raise CrewError(f"{work} on {ranks} ranks took more than {timeout_s:g} s\n{stacks}") from None
        finally:
            process.kill()
            process.wait()
        errors = sorted(Path(folder).glob("error-*.txt"), key=lambda path: path.stat().st_mtime)
        if errors:
            raise CrewError(f"{work} failed on a rank:\n{errors[0].read_text()}")
        if process.returncode:
            raise CrewError(f"{work} ended with {process.returncode}: {said.decode(errors='replace')[-2000:]}")
        return [json.loads(Path(folder, f"found-{rank}.json").read_text()) for rank in range(ranks)]


def _rank(rank: int, folder: str, asked: dict[str, Any], parent: int) -> None:
    import torch
    import torch.distributed as dist

    die_with_parent(parent)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    stacks = Path(folder, f"stack-{rank}.txt").open("w")  # where a rank that hangs is
    faulthandler.dump_traceback_later(max(1.0, 0.9 * asked["timeout_s"]), file=stacks)
    store = dist.FileStore(f"{folder}/store", asked["ranks"])
    timeout = timedelta(seconds=asked["timeout_s"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=asked["ranks"], timeout=timeout)
    found = getattr(importlib.import_module(asked["module"]), asked["name"])(Path(folder), **asked["arguments"])
    Path(folder, f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _forked(folder: str, asked: dict[str, Any]) -> list[int]:
    parent, children = os.getpid(), []
    for rank in range(asked["ranks"]):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            _rank(rank, folder, asked, parent)
            code = 0
        except BaseException:
            Path(folder, f"error-{rank}.txt").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    return children


def _main(folder: str, caller: int, behind: int) -> int:
    """Forks the ranks and waits: one that fails ends all."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # alone in a network of its own: switch lo on
        if "lo" in dict(socket.if_nameindex()).values():
            subprocess.run(["ip", "link", "set", "lo", "up"], check=False, capture_output=True, timeout=5)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    asked = json.loads(Path(folder, "asked.json").read_text())
    importlib.import_module("torch.distributed.pipelining")
    importlib.import_module(asked["module"])
    children = set(_forked(folder, asked))
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            time.sleep(0.02)
            continue
        children.discard(child)
        if status:
            time.sleep(0.3)  # the others may say why
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    sys.exit(_main(sys.argv[1], int(sys.argv[2]), 0))
