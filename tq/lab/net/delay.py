"""Hosts with a real time of flight between them, where the kernel has no network emulator.

Every host has a TAP device; one process passes frames on after a delay. What a host sends is limited by a token bucket,
what it receives is not: enough for messages that come one at a time.

    with Star(8, delay_ms=5, rate_mbit=20) as star, Exchange(star, range(8), pairs) as ring:
        print(ring.run(rounds, nbytes=8))
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tq.lab.net import _relay
from tq.lab.net import hosts as lab
from tq.lab.net.clos import INTERFACE, settings
from tq.lab.net.namespaces import Namespace, NetworkUnavailable, end, end_with_parent
from tq.systems.arguments import one_number, positive_int

BURST = 2 * 1514  # bytes that a host may send at once


class Star:
    """Hosts on one wire with the same delay between any two; a context manager.

    Arguments:
        hosts: how many, 2 to 16.
        delay_ms: from one to another.
        rate_mbit: of what a host sends, in 1e6 bit/s.

    Raises NetworkUnavailable with one sentence where it cannot be made.
    """

    def __init__(self, hosts: int, delay_ms: float, rate_mbit: float) -> None:
        positive_int("hosts", hosts, 2)
        if hosts > 16:
            raise ValueError(f"hosts must be at most 16, got {hosts}")
        one_number("delay_ms", delay_ms)
        one_number("rate_mbit", rate_mbit)
        as_user, reason = lab._way()
        if reason is None and not Path("/dev/net/tun").exists():
            reason = "this machine has no TAP devices (/dev/net/tun)"
        if reason is not None:
            raise NetworkUnavailable(reason)
        self.hosts: list[Namespace] = []
        self._relay: subprocess.Popen[str] | None = None
        try:
            for _ in range(hosts):
                self.hosts.append(Namespace(as_user, beside=self.hosts[0] if self.hosts else None))
            self._start(delay_ms)
            self._join(rate_mbit)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def address(host: int) -> str:
        return f"10.74.0.{11 + host}"

    def _start(self, delay_ms: float) -> None:
        command = [sys.executable, "-S", str(Path(_relay.__file__)), str(delay_ms / 1000)]
        self._relay = subprocess.Popen(
            self.hosts[0].command(*command, *(str(host.pid) for host in self.hosts)), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent,
        )  # fmt: skip
        assert self._relay.stdout is not None and self._relay.stderr is not None
        if self._relay.stdout.readline().strip() != "ready":
            said = (self._relay.stderr.read().strip().splitlines() or ["no reason given"])[-1]
            raise NetworkUnavailable(f"TAP devices are not allowed here ({said})")

    def _join(self, rate_mbit: float) -> None:
        for number, host in enumerate(self.hosts):
            lines = ["link set lo up", f"link set {INTERFACE} address 02:00:00:00:00:{number:02x}"]
            lines += [f"link set {INTERFACE} up", f"addr add {self.address(number)}/24 dev {INTERFACE}"]
            lines += [
                f"neigh add {self.address(n)} lladdr 02:00:00:00:00:{n:02x} dev {INTERFACE}"
                for n in range(len(self.hosts)) if n != number
            ]  # fmt: skip
            host.ip(*lines)
            settings(host, tcp_limit_output_bytes=1 << 17, tcp_slow_start_after_idle=0, tcp_no_metrics_save=1)
            # two frames: a larger bucket would let small messages through as if the link had no rate
            limit = f"burst {BURST} limit {1 << 20}"
            host.tc(f"qdisc replace dev {INTERFACE} root tbf rate {round(rate_mbit * 1000)}kbit {limit}")

    def close(self) -> None:
        """Ends everything on the hosts and takes them away. May be called twice."""
        for namespace in self.hosts[::-1]:
            namespace.close()
        if self._relay is not None:
            end(self._relay)
            for pipe in (self._relay.stdout, self._relay.stderr):
                assert pipe is not None
                pipe.close()
            self._relay = None

    def __enter__(self) -> Star:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
