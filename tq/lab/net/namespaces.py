"""Network and process namespaces, of root or of an ordinary user: what a host is made of.

Root makes them directly. Whoever is not root makes a user namespace first, in which these commands may do everything
and outside of which nothing more than before; that needs a kernel that lets everyone have one.

A namespace lives by the process that sleeps as its first, and that process ends with the thread that made it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_START_S = 10.0


class NetworkUnavailable(RuntimeError):
    """This machine cannot make hosts; the message is one sentence that says why."""


def _path_of(tool: str) -> str | None:
    """Also where only root's PATH leads, as ``tc`` on Debian."""
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def missing_packages() -> list[str]:
    """Debian's packages of those commands that are needed here and not found."""
    return sorted({package for tool, package in _PACKAGES.items() if _path_of(tool) is None})


def end_with_parent() -> None:
    """Run in a new process: it ends with the thread that started it, also from within a user namespace of ours."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end(process: subprocess.Popen[str]) -> None:
    """Ends a command on a host with all that it started, if it is not over."""
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()


class Namespace:
    """A network and a process namespace, held by a process that sleeps as its first; when it ends, all in it do.

    Arguments:
        as_user: in a user namespace, which needs no root.
        beside: another one, whose user namespace it shares; links join only namespaces of one user namespace.

    Raises NetworkUnavailable with what ``unshare`` said.
    """

    def __init__(self, as_user: bool, beside: Namespace | None = None) -> None:
        self._as_user = as_user
        before = [] if beside is None else beside._enter()
        own_user = ["--user", "--map-root-user"] if as_user and beside is None else []
        self._holder = subprocess.Popen(
            [*before, _tool("unshare"), *own_user, "--net", "--pid", "--fork", "--kill-child", "sleep", "infinity"],
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent,
        )  # fmt: skip
        self.pid = self._first_process()

    def _first_process(self) -> int:
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        ours = os.stat("/proc/self/ns/net").st_ino
        deadline = time.monotonic() + _START_S
        while self._holder.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError, IndexError):
                child = int(children.read_text().split()[0])
                if os.stat(f"/proc/{child}/ns/net").st_ino != ours and (not self._as_user or _has_users(child)):
                    return child
            time.sleep(0.001)
        self._holder.kill()
        raise NetworkUnavailable((self._holder.communicate()[1] or "unshare gave no namespace").strip())

    def _enter(self, *kinds: str) -> list[str]:
        """What stands before a command line to run it inside; --user first, which allows the others."""
        kinds = ("--user", "--preserve-credentials", *kinds) if self._as_user else kinds
        return [_tool("nsenter"), "--target", str(self.pid), *kinds, "--"] if kinds else []

    def command(self, *argv: str, processes: bool = False) -> list[str]:
        """The same command line, inside; processes: also in the process namespace."""
        return [*self._enter("--net", *(["--pid"] if processes else [])), *argv]

    def ip(self, *lines: str) -> None:
        self._batch("ip", lines)

    def tc(self, *lines: str) -> None:
        self._batch("tc", lines)

    def _batch(self, tool: str, lines: Sequence[str]) -> None:
        command, text = self.command(_tool(tool), "-batch", "-"), "\n".join(lines) + "\n"
        subprocess.run(command, input=text, text=True, check=True, capture_output=True)

    def counters(self, interface: str) -> tuple[int, int]:
        """Bytes that the interface has (received, sent), with the headers of Ethernet, IP and TCP."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                fields = numbers.split()
                return int(fields[0]), int(fields[8])
        raise ValueError(f"no interface {interface!r}")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stderr is not None
        self._holder.stderr.close()


def _has_users(pid: int) -> bool:
    """Whether its user namespace has its users: ``unshare`` writes them last, and until then nobody is root there."""
    return all(Path(f"/proc/{pid}/{kind}_map").read_text().strip() for kind in ("uid", "gid"))


def _tool(name: str) -> str:
    path = _path_of(name)
    if path is None:
        raise NetworkUnavailable(f"the commands of {_PACKAGES[name]} are not installed")
    return path
