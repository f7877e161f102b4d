"""Several hosts on one machine: namespaces joined by links of a real, limited rate.

A host is a network and a process namespace of its own, with one interface. Its link ends at a switch, a namespace too;
token buckets (``tc tbf``) limit both directions, so what crosses it is TCP as on a wire of that rate. Hosts can be
spread over sites, whose switches are joined by links of another rate.

    with Lab(2, rate_mbit=100) as lab:
        lab.torchrun(["train.py"], timeout_s=60)
        print(lab.sent_bytes(0))

Root is not needed where everyone may have a user namespace. Nothing is set up outside these namespaces, and they live
by the processes in them: when the process that made a lab ends, however it ends, the kernel ends every process on the
hosts, and takes the links away with them. The kernel looks at the thread: a lab that is made in a thread ends with it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from tq.lab.net.namespaces import Namespace, NetworkUnavailable, end, end_with_parent, missing_packages

INTERFACE = "eth0"
_NETWORK = "10.71"  # only ever seen inside the namespaces
_FIRST = 11  # of the addresses: all of the same length, so that their order as text is the order of the hosts
_LIMIT_S, _LIMIT_BYTES = 0.2, 1 << 20  # what a link holds back before it drops
_QUEUED = 1 << 17  # bytes of a connection in its interface's queue; a megabyte, the default, is .3 s at 25 Mbit/s
_GRACE_S = 5.0  # that other hosts get to end by themselves once one has failed


class HostsFailed(RuntimeError):
    """A command did not end well on some host; the message holds the end of what it said."""


def tails(outputs: Sequence[IO[str]], hosts: Sequence[int]) -> str:
    """The end of what these hosts have printed."""
    texts = []
    for host in hosts:
        outputs[host].flush()
        texts.append(f"--- host {host}\n" + Path(outputs[host].name).read_text(errors="replace")[-4000:])
    return "\n".join(texts)


@cache
def _way() -> tuple[bool, str | None]:
    """Whether hosts are made in a user namespace, and why none can be made here, in a sentence; None if they can."""
    if sys.platform != "linux":
        return False, f"network namespaces are Linux's, and this is {sys.platform}"
    if missing := missing_packages():
        return False, f"the commands of {' and '.join(missing)} are not installed"
    said = ""
    for as_user in (False, True) if os.geteuid() == 0 else (True,):
        try:
            with Lab(2, rate_mbit=100.0, _as_user=as_user):
                return as_user, None
        except (OSError, subprocess.SubprocessError, NetworkUnavailable) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip() or "no reason given"
    who = "root" if os.geteuid() == 0 else "whoever is not root"
    return False, f"namespaces or token buckets are not allowed to {who} here ({said.splitlines()[-1]})"


def obstacle() -> str | None:
    """Why no hosts can be made here, in a sentence; None if they can."""
    return _way()[1]


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
        between_mbit: Rate = None, _as_user: bool | None = None,
    ) -> None:  # fmt: skip
        if not 1 <= hosts <= 80:
            raise ValueError(f"hosts must be 1 to 80, got {hosts}")
        self.sites = [0] * hosts if sites is None else list(sites)
        if len(self.sites) != hosts or set(self.sites) != set(range(max(self.sites) + 1)):
            raise ValueError(f"sites must number the site of each of {hosts} hosts from 0 without gaps, got {sites}")
        _directions(rate_mbit), _directions(between_mbit)
        if _as_user is None:
            _as_user, reason = _way()
            if reason is not None:
                raise NetworkUnavailable(reason)
        self.burst_kb = burst_kb
        self.hosts: list[Namespace] = []
        self._started: list[subprocess.Popen[str]] = []
        self.switch = Namespace(_as_user)
        try:
            self.hosts += [Namespace(_as_user, beside=self.switch) for _ in range(hosts)]
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
            stderr=subprocess.STDOUT, text=True, preexec_fn=end_with_parent,
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
                    end(process)
            failed = [host for host, code in enumerate(codes) if code]
            late = [host for host, code in enumerate(codes) if code is None]
            if failed:
                more = f"; {late} were ended" if late else ""
                raise HostsFailed(f"hosts {failed}: ended with an error{more}\n{tails(outputs, failed)}")
            if late:
                raise HostsFailed(f"hosts {late}: after {timeout_s:g} s still at work\n{tails(outputs, late)}")

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
