"""A routed Clos network on one machine: hosts, leaves and spines as namespaces, ECMP by the kernel's own hash.

Every leaf is a router with a bridge for its hosts and a link to each spine; what is for another leaf goes to one of the
spines by a hash of addresses and ports. Token buckets limit every link in both directions, so leaves can be
oversubscribed. Which spine a connection takes is the kernel's answer to `ip route get`, before a byte is sent.

    with Clos(2, 4, 2, rate_mbit=20, oversubscription=4) as clos:
        print(clos.spine(0, 4, 20_000), clos.uplink_bytes())

As with ``Lab``, nothing is set up outside these namespaces, and they end with the process, or thread, that made them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

import numpy as np

from tq.lab.net import hosts as lab
from tq.lab.net.exchange import PORT
from tq.lab.net.namespaces import Namespace, NetworkUnavailable, _tool
from tq.systems import fabrics
from tq.systems.arguments import one_number, positive_int
from tq.systems.fabrics import Fabric
from tq.systems.routing import Routes

INTERFACE = "eth0"
_HOSTS, _LINKS = "10.72", "10.73"  # only ever seen inside the namespaces
_FIRST = 11
_QUEUE_S = 0.2  # that a link holds back before it drops
_TICK_S = 0.004  # a bucket must let through what a tick of the slowest clock allows
_GROUP = 1000
#: Addresses, protocol and ports, chosen field by field (policy 3). Policy 1, which means the same, takes a hash that a
#: packet carries already: here its sender's socket's, which is drawn at random, and drawn anew after a time-out.
_FIELDS = 0x37


def bucket_bytes(rate_mbit: float) -> int:
    """Size of a link's token bucket: a tick's worth and at least two frames. A larger one would let through whole
    messages at the speed of memory, and hide that the link is slow."""
    return max(2 * 1514, round(rate_mbit * 1e6 / 8 * _TICK_S))


def settings(namespace: Namespace, **values: int) -> None:
    """Sets the kernel's IPv4 settings of a namespace."""
    text = "; ".join(f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in values.items())
    subprocess.run(namespace.command("sh", "-ec", text), check=True, capture_output=True, text=True)


class Clos:
    """Leaves, each with as many hosts, and spines; a context manager.

    Arguments:
        leaves, hosts_per_leaf, spines: how many.
        rate_mbit: of a host's link, in 1e6 bit/s.
        oversubscription: of a leaf: its hosts' rates over those of its uplinks.
        hash_seed: of the kernel's hash, for every leaf the same; above 0.
        resilient: tables of next hops that keep the ways of all other connections when a link fails.

    Raises NetworkUnavailable with one sentence where namespaces cannot be made.
    """

    def __init__(
        self, leaves: int, hosts_per_leaf: int, spines: int, rate_mbit: float, oversubscription: float = 1.0, *,
        hash_seed: int = 1, resilient: bool = False,
    ) -> None:  # fmt: skip
        for name, value in (("leaves", leaves), ("hosts_per_leaf", hosts_per_leaf), ("spines", spines)):
            positive_int(name, value)
        if leaves * hosts_per_leaf > 64 or hosts_per_leaf > 200 or leaves > 16 or spines > 8:
            raise ValueError("at most 64 hosts, 16 leaves and 8 spines fit one machine")
        one_number("rate_mbit", rate_mbit)
        one_number("oversubscription", oversubscription)
        positive_int("hash_seed", hash_seed)
        as_user, reason = lab._way()
        if reason is not None:
            raise NetworkUnavailable(reason)
        self.rate_mbit, self.oversubscription, self.resilient = rate_mbit, oversubscription, resilient
        self.hosts: list[Namespace] = []
        self.leaves: list[Namespace] = []
        self.spines: list[Namespace] = []
        try:
            for group, count in ((self.leaves, leaves), (self.spines, spines), (self.hosts, leaves * hosts_per_leaf)):
                for _ in range(count):
                    group.append(Namespace(as_user, beside=self.leaves[0] if self.leaves else None))
            self.hosts_per_leaf, self._dead = hosts_per_leaf, set[tuple[int, int]]()
            self._join(hash_seed)
        except BaseException:
            self.close()
            raise

    @property
    def uplink_mbit(self) -> float:
        """Rate of a link from a leaf to a spine."""
        return self.rate_mbit * self.hosts_per_leaf / (len(self.spines) * self.oversubscription)

    def leaf(self, host: int) -> int:
        """The leaf of a host."""
        return host // self.hosts_per_leaf

    def address(self, host: int) -> str:
        return f"{_HOSTS}.{self.leaf(host)}.{_FIRST + host % self.hosts_per_leaf}"

    def _link(self, leaf: int, spine: int, end: int) -> str:
        """Address of one end of a link: 0 the spine's, 1 the leaf's."""
        return f"{_LINKS}.{leaf}.{2 * spine + end}"

    def _join(self, seed: int) -> None:
        for number, leaf in enumerate(self.leaves):
            lines = ["link set lo up", "link add lan type bridge", "link set lan up"]
            lines.append(f"addr add {_HOSTS}.{number}.1/24 dev lan")
            for n, spine in enumerate(self.spines):
                lines.append(f"link add up{n} type veth peer name down{number} netns {spine.pid}")
                lines += [f"link set up{n} up", f"addr add {self._link(number, n, 1)}/31 dev up{n}"]
            mine = [n for n in range(len(self.hosts)) if self.leaf(n) == number]
            for n in mine:
                lines.append(f"link add port{n} type veth peer name {INTERFACE} netns {self.hosts[n].pid}")
                lines += [f"link set port{n} master lan", f"link set port{n} up"]
            leaf.ip(*lines)
            settings(leaf, ip_forward=1, fib_multipath_hash_policy=3, fib_multipath_hash_fields=_FIELDS,
                     fib_multipath_hash_seed=seed)  # fmt: skip
            leaf.tc(*(self.bucket(f"port{n}", self.rate_mbit) for n in mine),
                    *(self.bucket(f"up{n}", self.uplink_mbit) for n in range(len(self.spines))))  # fmt: skip
        for number, spine in enumerate(self.spines):
            lines = ["link set lo up"]
            for n in range(len(self.leaves)):
                lines += [f"link set down{n} up", f"addr add {self._link(n, number, 0)}/31 dev down{n}"]
                lines.append(f"route add {_HOSTS}.{n}.0/24 via {self._link(n, number, 1)}")
            spine.ip(*lines)
            settings(spine, ip_forward=1)
            spine.tc(*(self.bucket(f"down{n}", self.uplink_mbit) for n in range(len(self.leaves))))
        for number in range(len(self.leaves)):
            self._routes(number, new=True)
        for number, host in enumerate(self.hosts):
            host.ip("link set lo up", f"link set {INTERFACE} up", f"addr add {self.address(number)}/24 dev {INTERFACE}",
                    f"route add default via {_HOSTS}.{self.leaf(number)}.1")  # fmt: skip
            settings(host, tcp_limit_output_bytes=1 << 17, tcp_slow_start_after_idle=0, tcp_no_metrics_save=1)
            host.tc(self.bucket(INTERFACE, self.rate_mbit))

    @staticmethod
    def bucket(interface: str, rate: float) -> str:
        limit = max(1 << 16, round(rate * 1e6 / 8 * _QUEUE_S))
        return (
            f"qdisc replace dev {interface} root tbf rate {round(rate * 1000)}kbit burst {bucket_bytes(rate)} "
            f"limit {limit}"
        )

    def _routes(self, leaf: int, new: bool = False) -> None:
        """The leaf's next hops to every other leaf: spines with both links alive, as a protocol would say."""
        lines = []
        if self.resilient and new:
            lines += [
                f"nexthop add id {s + 1} via {self._link(leaf, s, 0)} dev up{s}" for s in range(len(self.spines))
            ]  # fmt: skip
        for other in range(len(self.leaves)):
            if other == leaf:
                continue
            alive = [s for s in range(len(self.spines)) if not {(leaf, s), (other, s)} & self._dead]
            if not alive:
                raise ValueError(f"no spine is left between leaf {leaf} and leaf {other}")
            verb, net = "add" if new else "replace", f"{_HOSTS}.{other}.0/24"
            if self.resilient:
                group = "/".join(str(s + 1) for s in alive)
                lines.append(f"nexthop {verb} id {_GROUP + other} group {group} type resilient buckets 64 idle_timer 0")
                lines += [f"route add {net} nhid {_GROUP + other}"] if new else []
            else:
                hops = " ".join(f"nexthop via {self._link(leaf, s, 0)} dev up{s}" for s in alive)
                lines.append(f"route {verb} {net} {hops}")
        self.leaves[leaf].ip(*lines)

    def fail(self, leaf: int, spine: int) -> None:
        """A link is drawn, and every leaf knows of it."""
        self._dead.add((leaf, spine))
        for number in range(len(self.leaves)):
            self._routes(number)
        self.spines[spine].tc(f"qdisc replace dev down{leaf} root pfifo limit 0")
        self.leaves[leaf].tc(f"qdisc replace dev up{spine} root pfifo limit 0")

    def mend(self, leaf: int, spine: int) -> None:
        """The link is back."""
        self._dead.discard((leaf, spine))
        self.spines[spine].tc(self.bucket(f"down{leaf}", self.uplink_mbit))
        self.leaves[leaf].tc(self.bucket(f"up{spine}", self.uplink_mbit))
        for number in range(len(self.leaves)):
            self._routes(number)

    def spines_of(self, flows: Sequence[tuple[int, int, int]]) -> list[int | None]:
        """Spine of each connection (source host, destination host, source port), as the kernel of the source's leaf
        answers; None within a leaf."""
        found: dict[tuple[int, int, int], int | None] = {}
        for leaf in range(len(self.leaves)):
            mine = [f for f in dict.fromkeys(flows) if self.leaf(f[0]) == leaf]
            across = [f for f in mine if self.leaf(f[1]) != leaf]
            found |= dict.fromkeys(mine)
            if not across:
                continue
            asked = "\n".join(
                f"route get {self.address(b)} from {self.address(a)} iif lan ipproto tcp sport {port} dport {PORT}"
                for a, b, port in across
            )
            said = subprocess.run(
                self.leaves[leaf].command(_tool("ip"), "-batch", "-"), input=asked, text=True, check=True,
                capture_output=True,
            ).stdout  # fmt: skip
            ways = [int(n) for n in re.findall(r"dev up(\d+)", said)]
            if len(ways) != len(across):
                raise RuntimeError(f"the kernel of leaf {leaf} gave {len(ways)} ways for {len(across)} connections")
            found |= dict(zip(across, ways, strict=True))
        return [found[f] for f in flows]

    def uplink_bytes(self) -> dict[tuple[int, int], int]:
        """{(leaf, spine): bytes that have left the leaf for the spine}."""
        return {
            (leaf, spine): namespace.counters(f"up{spine}")[1]
            for leaf, namespace in enumerate(self.leaves) for spine in range(len(self.spines))
        }  # fmt: skip

    def graph(self) -> Fabric:
        """The same network as a model; rates in those of a host's link."""
        return fabrics.leaf_spine(
            len(self.leaves), self.hosts_per_leaf, len(self.spines), self.oversubscription, parallel=False
        )

    def routes(self, flows: Sequence[tuple[int, int, int]]) -> Routes:
        """Ways of these connections through ``graph``, as the kernel has chosen them."""
        ways, count = [], len(self.hosts)
        for (a, b, _), spine in zip(flows, self.spines_of(flows), strict=True):
            up = [] if spine is None else [2 * (count + self.leaf(a) * len(self.spines) + spine)]
            down = [] if spine is None else [2 * (count + self.leaf(b) * len(self.spines) + spine) + 1]
            ways.append([2 * a, *up, *down, 2 * b + 1])
        hops = np.array([len(way) for way in ways], np.int64)
        link = np.array([link for way in ways for link in way], np.int64)
        return Routes(np.repeat(np.arange(len(ways)), hops), link, np.ones(len(link)), hops)

    def close(self) -> None:
        """Ends everything on the hosts and takes them away. May be called twice."""
        for namespace in (*self.hosts, *self.spines, *self.leaves[::-1]):
            namespace.close()

    def __enter__(self) -> Clos:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
