"""Several hosts on one machine: namespaces joined by links of a real, limited rate.

A host is a network and a process namespace of its own, with one interface. Its link ends at a switch, a namespace too;
token buckets (``tc tbf``) limit both directions, so what crosses it is TCP as on a wire of that rate. Hosts can be
spread over sites, whose switches are joined by links of another rate.

    with Lab(2, rate_mbit=100) as lab:
        lab.torchrun(["train.py"], timeout_s=60)
        print(lab.sent_bytes(0))

Nothing is set up outside these namespaces, and they live by the processes in them: when the process that made a lab
ends, however it ends, the kernel ends every process on the hosts, and takes the links away with them. The kernel looks
at the thread: a lab that is made in a thread ends with that thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil

INTERFACE = "eth0"
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_NETWORK = "10.71"  # only ever seen inside the namespaces
_FIRST = 11  # of the addresses: all of the same length, so that their order as text is the order of the hosts
_LIMIT_S, _LIMIT_BYTES = 0.2, 1 << 20  # what a link holds back before it drops
_QUEUED = 1 << 17  # bytes of a connection in its interface's queue; a megabyte, the default, is .3 s at 25 Mbit/s
_GRACE_S = 5.0  # that other hosts get to end by themselves once one has failed


class NetworkUnavailable(RuntimeError):
    """This machine cannot make hosts; the message is one sentence that says why."""


class HostsFailed(RuntimeError):
    """A command did not end well on some host; the message holds the end of what it said."""


@cache
def obstacle() -> str | None:
    """Why no hosts can be made here, in a sentence; None if they can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces with links between them need root"
    missing = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    if missing:
        return f"the commands of {' and '.join(missing)} are not installed"
    try:
        with Lab(2, rate_mbit=100.0, _checked=True):
            return None
    except (OSError, subprocess.SubprocessError, NetworkUnavailable) as error:
        said = getattr(error, "stderr", None) or str(error)
        return (
            f"namespaces or token buckets are not allowed here ({(said.strip() or 'no reason given').splitlines()[-1]})"
        )


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a command on a host with all that it started, if it is not over."""
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class _Namespace:
    """A network and a process namespace, held by a process that sleeps as its first; when it ends, all in it do."""

    def __init__(self) -> None:
        self._outer = subprocess.Popen(
            ["unshare", "--net", "--pid", "--fork", "--kill-child", "sleep", "infinity"],
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        children, ours = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children"), os.stat("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        self.pid = 0
        while not self.pid:
            if self._outer.poll() is not None or time.monotonic() > deadline:
                self._outer.kill()
                raise NetworkUnavailable((self._outer.communicate()[1] or "unshare gave no namespace").strip())
            with contextlib.suppress(OSError, ValueError, IndexError):
                child = int(children.read_text().split()[0])
                if os.stat(f"/proc/{child}/ns/net").st_ino != ours.st_ino:
                    self.pid = child
            time.sleep(0.001)

    def command(self, *argv: str, processes: bool = False) -> list[str]:
        """The same command line, inside; processes: also in the process namespace."""
        where = ["--net", "--pid"] if processes else ["--net"]
        return ["nsenter", "--target", str(self.pid), *where, "--", *argv]

    def ip(self, *lines: str) -> None:
        self._batch("ip", lines)

    def tc(self, *lines: str) -> None:
        self._batch("tc", lines)

    def _batch(self, tool: str, lines: Sequence[str]) -> None:
        subprocess.run(
            self.command(tool, "-batch", "-"), input="\n".join(lines) + "\n", text=True, check=True, capture_output=True
        )

    def counters(self, interface: str) -> tuple[int, int]:
        """Bytes that the interface has (received, sent), with the headers of Ethernet, IP and TCP."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                fields = numbers.split()
                return int(fields[0]), int(fields[8])
        raise ValueError(f"no interface {interface!r}")

    def close(self) -> None:
        self._outer.kill()
        self._outer.wait()
        assert self._outer.stderr is not None
        self._outer.stderr.close()


def _bucket(interface: str, rate_mbit: float | None, burst_kb: float) -> str:
    if rate_mbit is None:
        return f"qdisc replace dev {interface} root pfifo limit 10000"
    limit = max(_LIMIT_BYTES, rate_mbit * 1e6 / 8 * _LIMIT_S)
    return (
        f"qdisc replace dev {interface} root tbf rate {round(rate_mbit * 1000)}kbit burst {round(burst_kb * 1024)} "
        f"limit {round(limit)}"
    )


Rate = float | tuple[float | None, float | None] | None


def _directions(rate: Rate) -> tuple[float | None, float | None]:
    up, down = rate if isinstance(rate, tuple) else (rate, rate)
    for value in (up, down):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"a rate must be positive Mbit/s or None for no limit, got {value}")
    return up, down


class Lab:
    """Hosts 0 ... hosts - 1, up from construction until ``close``; a context manager.

    Arguments:
        hosts: how many.
        rate_mbit: of every host's link in 1e6 bit/s: one number, (to the switch, from it), or None for no limit.
        burst_kb: size of the token buckets in KiB; at least what a tick of the clock lets through.
        sites: number of the site of each host; None: all at one.
        between_mbit: of the link from each site to what joins the sites, as ``rate_mbit``.

    Raises NetworkUnavailable with one sentence where hosts cannot be made.
    """

    def __init__(
        self, hosts: int, rate_mbit: Rate = None, *, burst_kb: float = 64, sites: Sequence[int] | None = None,
        between_mbit: Rate = None, _checked: bool = False,
    ) -> None:  # fmt: skip
        if not 1 <= hosts <= 80:
            raise ValueError(f"hosts must be 1 to 80, got {hosts}")
        self.sites = [0] * hosts if sites is None else list(sites)
        if len(self.sites) != hosts or set(self.sites) != set(range(max(self.sites) + 1)):
            raise ValueError(f"sites must number the site of each of {hosts} hosts from 0 without gaps, got {sites}")
        _directions(rate_mbit), _directions(between_mbit)
        if not _checked and (reason := obstacle()):
            raise NetworkUnavailable(reason)
        self.burst_kb = burst_kb
        self.hosts: list[_Namespace] = []
        self._started: list[subprocess.Popen[str]] = []
        self.switch = _Namespace()
        try:
            self.hosts += [_Namespace() for _ in range(hosts)]
            self._join()
            self.shape(rate_mbit)
            self.shape_sites(between_mbit)
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        count = max(self.sites) + 1
        lines = [f"link add site{s} type bridge" for s in range(count)]
        if count > 1:
            lines.append("link add core type bridge")
            for s in range(count):
                lines += [f"link add up{s} type veth peer name down{s}", f"link set up{s} master site{s}"]
                lines.append(f"link set down{s} master core")
        for number, host in enumerate(self.hosts):
            lines.append(f"link add port{number} type veth peer name {INTERFACE} netns {host.pid}")
            lines.append(f"link set port{number} master site{self.sites[number]}")
        ports = [line.split()[2] for line in lines if line.startswith("link add")]
        ports += [f"down{s}" for s in range(count)] if count > 1 else []
        self.switch.ip(*lines, *(f"link set {port} up" for port in ports))
        for number, host in enumerate(self.hosts):
            host.ip("link set lo up", f"link set {INTERFACE} up", f"addr add {self.address(number)}/16 dev {INTERFACE}")
            limit = f"echo {_QUEUED} > /proc/sys/net/ipv4/tcp_limit_output_bytes"
            subprocess.run(host.command("sh", "-c", limit), check=True, capture_output=True, text=True)

    @staticmethod
    def address(host: int) -> str:
        return f"{_NETWORK}.0.{_FIRST + host}"

    def shape(self, rate_mbit: Rate, host: int | None = None) -> None:
        """A new rate of every host's link, or of one's."""
        up, down = _directions(rate_mbit)
        chosen = range(len(self.hosts)) if host is None else [host]
        for number in chosen:
            self.hosts[number].tc(_bucket(INTERFACE, up, self.burst_kb))
        self.switch.tc(*(_bucket(f"port{number}", down, self.burst_kb) for number in chosen))

    def shape_sites(self, between_mbit: Rate) -> None:
        """A new rate of the links between the sites."""
        up, down = _directions(between_mbit)
        if (count := max(self.sites) + 1) > 1:
            lines = [_bucket(f"up{s}", up, self.burst_kb) for s in range(count)]
            self.switch.tc(*lines, *(_bucket(f"down{s}", down, self.burst_kb) for s in range(count)))

    def cut(self, host: int) -> None:
        """Nothing passes the host's link any more, as when a cable is drawn; connections do not notice at once."""
        self.switch.ip(f"link set port{host} nomaster")

    def mend(self, host: int) -> None:
        self.switch.ip(f"link set port{host} master site{self.sites[host]}")

    def kill(self, host: int) -> None:
        """The host is gone, with everything on it."""
        self.hosts[host].close()

    def received_bytes(self, host: int) -> int:
        return self.hosts[host].counters(INTERFACE)[0]

    def sent_bytes(self, host: int) -> int:
        """Bytes that left the host's interface so far, headers included."""
        return self.hosts[host].counters(INTERFACE)[1]

    def site_bytes(self, site: int) -> int:
        """Bytes that left a site so far."""
        return self.switch.counters(f"up{site}")[1]

    def start(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, output: IO[str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts a command on a host; its streams go to ``output`` (default: nowhere)."""
        process = subprocess.Popen(
            self.hosts[host].command(*argv, processes=True),
            env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE, **(env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL if output is None else output,
            stderr=subprocess.STDOUT, text=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        self._started.append(process)
        return process

    def start_torchrun(
        self, arguments: Sequence[str], *, per_host: int = 1, max_restarts: int = 0,
        env: Mapping[str, str] | None = None, outputs: Sequence[IO[str]] | None = None,
    ) -> list[subprocess.Popen[str]]:  # fmt: skip
        """Starts ``torchrun`` with these arguments on every host; ranks count up with the hosts."""
        count = len(self.hosts)
        processes = []
        for host in range(count):
            argv = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", f"--nproc-per-node={per_host}"]
            argv += ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.address(0)}:29400", "--rdzv-id=lab"]
            argv += [f"--rdzv-conf=is_host={'false' if host else 'true'}"]  # else it asks the name of the machine
            argv += [f"--local-addr={self.address(host)}", f"--max-restarts={max_restarts}", *arguments]
            # One thread a rank unless it is said otherwise, as torchrun sets it for OpenMP: what the caller's
            # environment grants to one process, for MKL too, is no ration for each of several.
            one = {name: "1" for name in ("OMP_NUM_THREADS", *os.environ) if name.endswith("_NUM_THREADS")}
            given = {**one, **(env or {})}
            processes.append(self.start(host, argv, given, None if outputs is None else outputs[host]))
        return processes

    def torchrun(self, arguments: Sequence[str], *, timeout_s: float, **options: Any) -> None:
        """Runs ``torchrun`` on every host to its end.

        Raises HostsFailed with the end of the output of the hosts that did not end well, or did not end in time.
        """
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            outputs = [stack.enter_context(open(f"{folder}/{host}", "w+")) for host in range(len(self.hosts))]
            processes = self.start_torchrun(arguments, outputs=outputs, **options)
            deadline = time.monotonic() + timeout_s
            try:
                while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
                    if any(codes):  # the others will hardly come to their end
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
                    time.sleep(0.05)
            finally:
                for process in processes:
                    _end(process)
            failed = [host for host, code in enumerate(codes) if code]
            late = [host for host, code in enumerate(codes) if code is None]
            if failed or late:
                still = f"hosts {late}: after {timeout_s:g} s still at work"
                why = (
                    f"hosts {failed}: ended with an error" + (f"; {late} were ended" if late else "")
                    if failed
                    else still
                )
                texts = []
                for host in failed or late:
                    outputs[host].seek(0)
                    texts.append(f"--- host {host}\n" + outputs[host].read()[-4000:])
                raise HostsFailed(f"{why}\n" + "\n".join(texts))

    def close(self) -> None:
        """Ends everything on the hosts and takes them away. May be called twice."""
        for namespace in (*self.hosts, self.switch):
            namespace.close()
        for process in self._started:
            process.wait()
        self._started.clear()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        arguments = ["-m", "tq.book._rank", str(self._path), backend, str(timeout_s)]
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
                raise HostsFailed(f"{why}\n{self.said()}")
            time.sleep(0.002)

    def said(self) -> str:
        """The end of what the hosts have printed."""
        texts = []
        for host, output in enumerate(self._outputs):
            output.flush()
            texts.append(f"--- host {host}\n" + Path(output.name).read_text(errors="replace")[-3000:])
        return "\n".join(texts)

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
                raise HostsFailed(f"rank {rank}: {result['error']}\n{self.said()}")
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
            _end(process)
        for output in self._outputs:
            output.close()
        self._folder.cleanup()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
