"""A Clos network of namespaces: its rates, the ways that its kernel announces, failures, delays; nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from tq.lab.net import hosts
from tq.lab.net.clos import Clos
from tq.lab.net.delay import Star
from tq.lab.net.exchange import Exchange, pairs_of
from tq.lab.net.hosts import HostsFailed
from tq.lab.net.namespaces import end
from tq.systems import fluid, traffic
from tq.systems.traffic import Round

WHY = hosts.obstacle()
needs_hosts = pytest.mark.skipif(WHY is not None, reason=f"needs hosts: {WHY}")


@pytest.fixture(scope="module")
def clos() -> Iterator[Clos]:
    with Clos(2, 2, 4, rate_mbit=40, oversubscription=4, hash_seed=7) as made:
        yield made


def one_way(pairs: list[tuple[int, int]]) -> list[Round]:
    a, b = (np.array(column) for column in zip(*pairs, strict=True))
    return [Round(a, b, 1.0)]


@needs_hosts
def test_flows_go_where_the_kernel_said_and_share_the_uplink_that_it_said(clos: Clos) -> None:
    assert clos.uplink_mbit == 5.0
    pairs = [(0, 2), (1, 3)]
    asked = [(0, 2, port) for port in range(20_000, 20_100)] + [(1, 3, port) for port in range(20_000, 20_100)]
    spines = clos.spines_of(asked)
    assert set(spines) == {0, 1, 2, 3} and clos.spines_of(asked) == spines
    assert clos.spines_of([(0, 1, 20_000)]) == [None]
    first = asked[0][2]
    together = next(port for (a, _, port), spine in zip(asked, spines, strict=True) if a == 1 and spine == spines[0])
    before = clos.uplink_bytes()
    size = 400_000
    with Exchange(clos, range(4), pairs, {(0, 2): first, (1, 3): together}) as both:
        seconds, heard = both.run(one_way(pairs), size)
    sent = {key: value - before[key] for key, value in clos.uplink_bytes().items()}
    assert sent[0, spines[0]] == pytest.approx(2 * size * 1.05, rel=0.05)
    assert sum(n for (leaf, spine), n in sent.items() if leaf == 0 and spine != spines[0]) < 0.02 * size
    assert set(heard) == set(pairs)
    routes = clos.routes([(0, 2, first), (1, 3, together)])
    rates = fluid.max_min(routes, clos.graph().rates) * 40e6 / 8
    assert rates == pytest.approx(np.full(2, 2.5e6 / 8))
    assert 0.8 < seconds / (size * 1.07 / rates[0]) < 1.6


@needs_hosts
@pytest.mark.parametrize("resilient", [False, True])
def test_a_failed_link_is_not_used_and_moves_others_only_without_resilient_tables(resilient: bool) -> None:
    with Clos(2, 1, 4, rate_mbit=40, hash_seed=3, resilient=resilient) as net:
        flows = [(0, 1, port) for port in range(20_000, 20_400)]
        before = net.spines_of(flows)
        assert min(np.bincount([s for s in before if s is not None], minlength=4)) > 40
        net.fail(0, 0)
        after = net.spines_of(flows)
        assert 0 not in after
        moved = [a != b for a, b in zip(before, after, strict=True) if a != 0]
        assert sum(moved) == 0 if resilient else abs(sum(moved) / len(moved) - 1 / 3) < 0.1
        with Exchange(net, range(2), [(0, 1)]) as alive:
            assert alive.run(one_way([(0, 1)]), 10_000)[0] < 5
        net.mend(0, 0)
        assert 0 in net.spines_of(flows) or resilient


@needs_hosts
def test_hash_seeds_decide() -> None:
    found = []
    for seed in (1, 1, 2):
        with Clos(2, 1, 2, rate_mbit=40, hash_seed=seed) as net:
            found.append(net.spines_of([(0, 1, port) for port in range(20_000, 20_064)]))
    assert found[0] == found[1] != found[2]


@needs_hosts
def test_rounds_take_as_many_delays_as_there_are() -> None:
    try:
        star = Star(4, delay_ms=20, rate_mbit=50)
    except hosts.NetworkUnavailable as error:
        pytest.skip(f"needs hosts: namespaces or token buckets are not allowed: {error}")
    with star:
        for rounds, count in ((traffic.ring(4), 6), (traffic.doubling(4), 2), (traffic.binary_tree(4), 4)):
            with Exchange(star, range(4), pairs_of(rounds)) as run:
                run.run(rounds, 8)
                seconds = min(run.run(rounds, 8)[0] for _ in range(3))
            assert 0.98 < seconds / (count * 0.020) < 1.35


@needs_hosts
def test_a_rank_that_dies_is_named(clos: Clos) -> None:
    rounds = one_way([(0, 1)])
    with Exchange(clos, range(2), [(0, 1)]) as run:
        run.run(rounds, 10)
        end(run._processes[1])
        with pytest.raises(HostsFailed, match="rank 1 has ended"):
            for _ in range(3):
                run.run(rounds, 1_000_000)
    with pytest.raises(ValueError, match="place must name a host of its own"):
        Exchange(clos, [0, 0], [(0, 1)])


HOLD = """
import os, sys, time
from tq.lab.net.clos import Clos
from tq.lab.net.delay import Star
from tq.lab.net.exchange import Exchange
made = Clos(2, 1, 1, rate_mbit=40) if sys.argv[1] == "clos" else Star(2, 5, 40)
run = Exchange(made, [0, 1], [(0, 1)])
print("up", flush=True)
time.sleep(60)
"""


@needs_hosts
@pytest.mark.parametrize("kind", ["clos", "star"])
def test_nothing_stays_after_a_kill(kind: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "up"
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 4
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below if psutil.pid_exists(p.pid)):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)


def test_bad_arguments() -> None:
    for call, said in (
        (lambda: Clos(0, 1, 1, 10), "leaves must be"), (lambda: Clos(2, 40, 1, 10), "at most 64 hosts"),
        (lambda: Clos(2, 1, 1, 0), "rate_mbit must be"), (lambda: Clos(2, 1, 1, 10, -1), "oversubscription must be"),
        (lambda: Clos(2, 1, 1, 10, hash_seed=0), "hash_seed must be"), (lambda: Star(1, 5, 10), "hosts must be"),
        (lambda: Star(17, 5, 10), "at most 16"), (lambda: Star(2, 0, 10), "delay_ms must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            call()
