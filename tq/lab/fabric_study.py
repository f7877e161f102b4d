"""Real networks beside their model: collectives on a routed Clos, collisions of hashes, failures, delays, a queue.

Every function sets up its network, measures, and returns plain numbers with what the model of `tq.systems` says of the
same network, computed from what is known before: rates, framing, ways, and the time of a round without bytes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tq.lab.net import _poisson
from tq.lab.net.clos import Clos
from tq.lab.net.delay import BURST, Star
from tq.lab.net.exchange import Exchange, pairs_of
from tq.lab.net.hosts import INTERFACE, HostsFailed, Lab
from tq.systems import fluid, queueing, traffic
from tq.systems.traffic import Round

#: Bytes on a full link for each byte of payload: a frame of 1,514 for 1,448, and half an acknowledgement of 66, as each
#: confirms two frames and the way back is in use too.
FRAMING = (1514 + 66 / 2) / 1448
ONE_WAY = 1514 / 1448  # the same where acknowledgements have the other direction for themselves
LEAVES, HOSTS, SPINES, RATE_MBIT = 2, 4, 2, 20.0
FAR_MBIT = 50.0  # of hosts with a time of flight between them
RANKS = LEAVES * HOSTS
PATTERNS: dict[str, tuple[str, list[Round]]] = {
    "ring, packed": ("packed", traffic.ring(RANKS)),
    "ring, interleaved": ("interleaved", traffic.ring(RANKS)),
    "two levels": ("packed", traffic.two_level(RANKS, HOSTS)),
    "all-to-all": ("packed", traffic.all_to_all(RANKS)),
}


def _bytes_per_s(rate_mbit: float) -> float:
    return rate_mbit * 1e6 / 8 / FRAMING


def _predicted(clos: Clos, run: Exchange, rounds: Sequence[Round], nbytes: float) -> float:
    """Seconds that the messages of these rounds take on the ways that the kernel has chosen."""
    rates, total = clos.graph().rates, 0.0
    for r in rounds:
        pairs = list(zip(r.sources.tolist(), r.destinations.tolist(), strict=True))
        routes = clos.routes([(run.place[a], run.place[b], run.ports[a, b]) for a, b in pairs])
        total += r.times * r.share * nbytes / _bytes_per_s(clos.rate_mbit) * fluid.slowest_s(routes, rates, 1.0)
    return total


def collective(pattern: str, ratio: float, nbytes: float, repeats: int, seed: int) -> dict[str, Any]:
    """One pattern of PATTERNS on 2 leaves of 4 hosts and 2 spines: {"measured": seconds [repeats], "alpha": seconds of
    all its rounds with a byte each, "predicted": seconds with them}. One run before them is not counted."""
    kind, rounds = PATTERNS[pattern]
    with Clos(LEAVES, HOSTS, SPINES, RATE_MBIT, ratio, hash_seed=seed + 1) as clos:
        place = traffic.layout(clos.graph(), kind)
        with Exchange(clos, place.tolist(), pairs_of(rounds)) as run:
            alpha = min(run.run(rounds, RANKS)[0] for _ in range(3))
            predicted = alpha + _predicted(clos, run, rounds, nbytes)
            run.run(rounds, nbytes / 4)
            measured = [run.run(rounds, nbytes)[0] for _ in range(repeats)]
    return {"pattern": pattern, "ratio": ratio, "alpha": alpha, "predicted": predicted, "measured": measured}


def collisions(seed: int, nbytes: float) -> dict[str, Any]:
    """Four flows from one leaf to another over two spines at 2:1, where each uplink is as fast as a host: one flow on a
    spine is not slowed down, two are by two. Every flow's spine is asked of the kernel before anything is sent.

    {"spines": said [4], "carried": share of the bytes that took the way that was said, "predicted", "measured":
    seconds of each flow [4]}.
    """
    pairs = [(i, HOSTS + i) for i in range(HOSTS)]
    with Clos(LEAVES, HOSTS, SPINES, RATE_MBIT, 2.0, hash_seed=seed + 1) as clos:
        a, b = (np.array(column) for column in zip(*pairs, strict=True))
        with Exchange(clos, range(RANKS), pairs) as run:
            flows = [(i, j, run.ports[i, j]) for i, j in pairs]
            spines = clos.spines_of(flows)
            routes = clos.routes(flows)
            predicted = fluid.completion_times(routes, clos.graph().rates, nbytes * ONE_WAY / (RATE_MBIT * 1e6 / 8))
            run.run([Round(a, b, 1.0)], nbytes / 8)
            before = clos.uplink_bytes()
            _, heard = run.run([Round(a, b, 1.0)], nbytes)
            sent = [clos.uplink_bytes()[0, s] - before[0, s] for s in range(SPINES)]
    wanted = [nbytes * 1514 / 1448 * spines.count(s) for s in range(SPINES)]
    missed = sum(max(0.0, s - 1.02 * w) for s, w in zip(sent, wanted, strict=True)) / sum(sent)
    return {
        "seed": seed, "spines": spines, "carried": 1 - missed, "predicted": predicted.tolist(),
        "measured": [heard[pair] for pair in pairs],
    }  # fmt: skip


def failure(resilient: bool, seed: int, connections: int = 512) -> dict[str, Any]:
    """Shares of connections over four spines that a drawn link moves: {"hurt": those that had crossed it, "moved":
    share of the others that go another way afterwards, "predicted": the model's share of these}."""
    flows = [(0, 1, 20_000 + i) for i in range(connections)]
    with Clos(2, 1, 4, RATE_MBIT, hash_seed=seed + 1, resilient=resilient) as clos:
        before = clos.spines_of(flows)
        clos.fail(0, 0)
        after = clos.spines_of(flows)
    others = [a != b for a, b in zip(before, after, strict=True) if a != 0]
    # four equal parts of the hash's range become three, in order: spines 1, 2, 3 keep 1/12, 1/6 and 1/4 of the range
    predicted = 0.0 if resilient else 1 - (1 / 12 + 1 / 6 + 1 / 4) / (3 / 4)
    return {"hurt": 1 - len(others) / len(flows), "moved": statistics.mean(others), "predicted": predicted}


def rounds(name: str, ranks: int, delay_ms: float, repeats: int) -> dict[str, Any]:
    """A collective of next to no bytes over real delays: {"rounds": how many, "measured": seconds [repeats]}."""
    plan = traffic.TRAFFIC[name](ranks)
    with Star(ranks, delay_ms, FAR_MBIT) as star, Exchange(star, range(ranks), pairs_of(plan)) as run:
        run.run(plan, ranks)
        measured = [run.run(plan, ranks)[0] for _ in range(repeats)]
    return {"name": name, "ranks": ranks, "rounds": sum(r.times for r in plan), "measured": measured}


def far_seconds(plan: Sequence[Round], nbytes: float, delay_ms: float) -> float:
    """Time of rounds between the hosts of a star by the model: each takes the delay, and its bytes over the rate but
    for those that the bucket lets through at once."""
    rate = FAR_MBIT * 1e6 / 8
    return sum(r.times * (delay_ms / 1000 + max(0.0, r.share * nbytes * ONE_WAY - BURST) / rate) for r in plan)


def crossing_bytes(ranks: int, delay_ms: float) -> float:
    """Bytes at which a ring and a tree take equally long by the model, to a thousandth."""
    plans = traffic.ring(ranks), traffic.binary_tree(ranks)
    for nbytes in np.geomspace(1e2, 1e9, 16_200):
        ring, tree = (far_seconds(plan, nbytes, delay_ms) for plan in plans)
        if ring <= tree:
            return float(nbytes)
    raise ValueError(f"a ring of {ranks} ranks is never as fast as a tree at {delay_ms:g} ms")


def sizes(ranks: int, delay_ms: float, factors: Sequence[float], repeats: int) -> dict[str, Any]:
    """Ring and tree at multiples of the predicted crossing: {"bytes": [factors], "ring", "tree": median seconds,
    "crossing": bytes where the measured lines cross, None where they do not, "predicted"}."""
    predicted = crossing_bytes(ranks, delay_ms)
    found: dict[str, Any] = {"bytes": [predicted * f for f in factors], "predicted": predicted}
    for name in ("ring", "tree"):
        plan = traffic.TRAFFIC[name](ranks)
        with Star(ranks, delay_ms, FAR_MBIT) as star, Exchange(star, range(ranks), pairs_of(plan)) as run:
            for _ in range(4):  # windows of TCP have opened afterwards
                run.run(plan, 8 * predicted)
            found[name] = [
                statistics.median(run.run(plan, size)[0] for _ in range(repeats)) for size in found["bytes"]
            ]  # fmt: skip
    return found | {"crossing": _crossing(found["bytes"], found["ring"], found["tree"])}


def _crossing(at: Sequence[float], ring: Sequence[float], tree: Sequence[float]) -> float | None:
    """Where the ring's lead changes its sign, between two sizes by the logarithm of both."""
    lead = np.log(np.array(ring) / np.array(tree))
    for i in range(len(lead) - 1):
        if lead[i] > 0 >= lead[i + 1]:
            part = lead[i] / (lead[i] - lead[i + 1])
            return float(np.exp(np.log(at[i]) + part * np.log(at[i + 1] / at[i])))
    return None


def queue(load: float, packets: int, seed: int, service_ms: float = 4.0) -> dict[str, Any]:
    """Poisson packets of one size through a token bucket of one packet, which is a server with constant services.

    The bucket holds a twentieth more, so that a timer that is late does not make the services longer.

    {"measured": mean wait in services, less that of the quickest packet; "same arrivals": that of Lindley's recursion
    for the moments at which they were sent; "formula", "exponential": Pollaczek-Khinchine's for constant and for
    exponential services at the load that was sent; "load": that was sent; "lost": packets}.
    """
    nbytes = 1000
    with Lab(2, None) as lab:
        rate = round(nbytes * 8 / service_ms)  # kbit/s
        bucket = f"rate {rate}kbit burst {nbytes * 21 // 20} limit {1 << 20}"
        lab.hosts[0].tc(f"qdisc replace dev {INTERFACE} root tbf {bucket}")
        file = str(Path(_poisson.__file__))
        command = lab.hosts[1].command(sys.executable, "-S", file, "receive", "9000", str(packets), processes=True)
        receiver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            words = [lab.address(1), "9000", str(packets), str(1000 * load / service_ms), str(nbytes), str(seed)]
            sender = lab.start(0, [sys.executable, "-S", file, "send", *words])
            if sender.wait(60 + 2 * packets * service_ms / load / 1000):
                raise HostsFailed("the sender ended with an error")
            rows = np.array(json.loads(receiver.stdout.readline()))
        finally:
            receiver.kill()
            receiver.communicate()
    rows = rows[np.argsort(rows[:, 0])]
    sent, delay = rows[:, 1], rows[:, 2] - rows[:, 1]
    real = (len(sent) - 1) / (sent[-1] - sent[0]) * service_ms / 1000
    waits = (delay - np.quantile(delay, 0.001)) * 1000 / service_ms
    services = np.full(len(sent), service_ms / 1000)
    return {
        "load": float(real), "lost": packets - len(rows), "measured": float(waits.mean()),
        "same arrivals": float(queueing.waits(sent, services).mean() * 1000 / service_ms),
        "formula": float(queueing.mean_wait(min(real, 0.999), 0.0)),
        "exponential": float(queueing.mean_wait(min(real, 0.999))),
    }  # fmt: skip
