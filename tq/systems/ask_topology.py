"""`python -m tq.systems topology`: how long a traffic pattern takes on a fabric, by placement and routing."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tq.systems import fabrics, traffic
from tq.systems.fabrics import Fabric
from tq.systems.loads import grid, svg, text
from tq.systems.routing import Router

EXAMPLES = """examples:
  python -m tq.systems topology --hosts 1024 --oversubscription 4 --traffic ring
  python -m tq.systems topology --hosts 1024 --oversubscription 4 --traffic all-to-all --svg loads.svg
  python -m tq.systems topology --topology dragonfly --hosts 72 --traffic permutation --routing ecmp valiant
  python -m tq.systems topology --topology tree --hosts 1024 --traffic opposite --routing ecmp
  python -m tq.systems topology --hosts 256 --traffic two-level --mb 100 --compute-ms 50 --json

A model: fluid flows that share links max-min fairly, rounds one after another, nothing overlapped. Times of ecmp are
medians over --seeds hashes, in brackets the range. Placement: ranks one rack after another (packed), a host of each
rack in turn (interleaved), or in random order. The picture shows the load of every uplink of the racks.
"""
SHAPES = ("leaf-spine", "fat-tree", "tree", "fat-binary-tree", "rails", "torus", "dragonfly")
KINDS = (*traffic.TRAFFIC, "two-level")
MOST = 4096
SERVER = 8  # GPUs of one, under rails


def build(shape: str, hosts: int, oversubscription: float = 1.0, ports: int = 64) -> Fabric:
    """The smallest fabric of a shape with at least so many hosts; a torus has just as many."""
    if shape == "leaf-spine":
        return fabrics.leaf_spine_of(hosts, oversubscription, ports)
    if oversubscription != 1 and shape != "rails":
        raise ValueError(f"--oversubscription is of leaf-spine and rails; a {shape} has none to choose")
    if shape == "fat-tree":
        return fabrics.fat_tree(next(k for k in range(2, 10**4, 2) if k**3 // 4 >= hosts))
    if shape in ("tree", "fat-binary-tree"):
        return fabrics.tree(2, max(1, (hosts - 1).bit_length()), shape != "tree")
    if shape == "rails":
        servers = math.ceil(hosts / SERVER)
        per_pod = servers if servers <= ports else ports // 2
        spines = max(1, round(per_pod / oversubscription / 2))
        return fabrics.rails(per_pod, SERVER, math.ceil(servers / per_pod), spines, oversubscription)
    if shape == "torus":
        a = max(d for d in range(1, round(hosts ** (1 / 3)) + 1) if hosts % d == 0)
        b = max(d for d in range(1, math.isqrt(hosts // a) + 1) if hosts // a % d == 0)
        return fabrics.torus(a, b, hosts // a // b)
    h = next(h for h in range(1, 10**3) if 2 * h * h * (2 * h * h + 1) >= hosts)
    return fabrics.dragonfly(2 * h, h, h, max(2, math.ceil(hosts / (2 * h * h))))


@dataclass(frozen=True)
class Answer:
    """Seconds of a pattern under one layout and routing: median, least and most over the hashes; ``ideal``: on one
    switch."""

    layout: str
    routing: str
    seconds: float
    least: float
    most: float
    ideal: float

    @property
    def slowdown(self) -> float:
        return self.seconds / self.ideal if self.ideal else 1.0


def rounds_of(kind: str, ranks: int, fabric: Fabric) -> list[traffic.Round]:
    """What is sent; two-level has groups of as many consecutive ranks as the largest rack that divides them."""
    if kind != "two-level":
        return traffic.TRAFFIC[kind](ranks)
    rack = int(np.bincount(fabric.rack).max())
    return traffic.two_level(ranks, max(g for g in range(1, rack + 1) if ranks % g == 0))


def answers(args: argparse.Namespace, fabric: Fabric) -> Iterator[Answer]:
    """Each layout under each routing."""
    router, rounds = Router(fabric), rounds_of(args.traffic, args.hosts, fabric)
    one = Router(fabrics.leaf_spine(1, args.hosts, 1))
    speed = {
        "nbytes": args.mb * 1e6, "bytes_per_s": args.gbit * 1e9 / 8, "alpha_s": args.alpha_us * 1e-6,
        "hop_s": args.hop_us * 1e-6,
    }  # fmt: skip
    ideal = traffic.collective(one, rounds, np.arange(args.hosts), policy="single", **speed).seconds
    for kind in args.layout:
        for policy in args.routing:
            seeds = range(args.seeds if policy in ("ecmp", "resilient", "valiant") else 1)
            place = traffic.layout(fabric, kind, args.seed)[: args.hosts]
            times = [
                traffic.collective(router, rounds, place, policy=policy, seed=args.seed + s, **speed).seconds
                for s in seeds
            ]  # fmt: skip
            yield Answer(kind, policy, statistics.median(times), min(times), max(times), ideal)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _shown(args: argparse.Namespace, fabric: Fabric, found: list[Answer]) -> str:
    bill = fabrics.bill(fabric)
    racks = int(fabric.rack.max()) + 1
    levels = int(fabric.levels.max())
    on = f" on {levels} levels" if levels > 1 else ""
    lines = [
        f"{fabric.name}: {fabric.hosts:,} hosts in {racks:,} racks, {bill.switches:,} switches{on}, "
        f"{bill.cables:,} cables, {bill.transceivers:,} transceivers, {bill.per_host:,.0f} $ a host",
        f"{args.traffic}, {args.hosts:,} ranks, {args.mb:g} MB each, links of {args.gbit:g} Gbit/s; "
        f"on one switch {_time(found[0].ideal)}", "",
        f"  {'placement':<13}{'routing':<13}{'time':>10}  {'x one switch':>12}"
        + (f"  {'of a step lost':>14}" if args.compute_ms else ""),
    ]  # fmt: skip
    for a in found:
        spread = f"  [{a.least / a.ideal:.2f}, {a.most / a.ideal:.2f}]" if a.most > a.least else ""
        lost = a.seconds / (a.seconds + args.compute_ms * 1e-3)
        lines.append(
            f"  {a.layout:<13}{a.routing:<13}{_time(a.seconds):>10}  {a.slowdown:>12.2f}"
            + (f"  {lost:>14.1%}" if args.compute_ms else "") + spread
        )  # fmt: skip
    return "\n".join(lines)


def _picture(args: argparse.Namespace, fabric: Fabric, worst: Answer) -> tuple[Any, str]:
    place = traffic.layout(fabric, worst.layout, args.seed)[: args.hosts]
    router = Router(fabric)
    load = traffic.link_load(router, rounds_of(args.traffic, args.hosts, fabric), place, worst.routing, args.seed)
    # of a byte that a host sends out, so that 1 is a link as busy as one of a host that sends all the time
    load = load / max(float(load[fabric.tails < fabric.hosts].max(initial=0.0)), 1e-300)
    return grid(fabric, load), f"{worst.layout} placement, {worst.routing}"


def _number(low: float, open_low: bool = False) -> Any:
    def convert(said: str) -> float:
        try:
            value = float(said)
        except ValueError:
            value = math.nan
        if not (value > low if open_low else value >= low) or value > 1e12:
            above = "above" if open_low else "of at least"
            raise argparse.ArgumentTypeError(f"a number {above} {low:g} is accepted, got {said!r}")
        return value

    return convert


def _count(low: int, high: int) -> Any:
    def convert(said: str) -> int:
        if not said.isdecimal() or not low <= int(said) <= high:
            raise argparse.ArgumentTypeError(f"a whole number from {low} to {high} is accepted, got {said[:40]!r}")
        return int(said)

    return convert


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--topology", choices=SHAPES, default="leaf-spine", help="default: leaf-spine")
    add("--hosts", type=_count(2, MOST), default=64, metavar="N", help=f"ranks, one a host, 2 to {MOST}; default: 64")
    add("--oversubscription", type=_number(0, True), default=1.0, metavar="X", help="hosts over uplinks; default: 1")
    add("--ports", type=_count(2, 1024), default=64, metavar="K", help="of a switch of leaf-spine; default: 64")
    add("--traffic", choices=KINDS, default="ring", help="default: ring, an all-reduce")
    add("--layout", choices=traffic.LAYOUTS, nargs="+", default=list(traffic.LAYOUTS), help="default: all")
    add("--routing", choices=("single", "destination", "ecmp", "resilient", "spray", "valiant"), nargs="+",
        default=["spray", "ecmp"], help="default: spray ecmp")  # fmt: skip
    add("--mb", type=_number(0), default=1000.0, metavar="X", help="that each rank holds; default: 1000")
    add("--gbit", type=_number(0, True), default=400.0, metavar="X", help="Gbit/s of a host's link; default: 400")
    add("--alpha-us", type=_number(0), default=5.0, metavar="X", help="of each round; default: 5")
    add("--hop-us", type=_number(0), default=0.5, metavar="X", help="of each link on the way; default: 0.5")
    add("--compute-ms", type=_number(0), default=0.0, metavar="X", help="of a step beside; shows the share lost")
    add("--seed", type=_count(0, 10**9), default=0, metavar="N", help="of random placement and of hashes")
    add("--seeds", type=_count(1, 1000), default=5, metavar="N", help="hashes that are tried; default: 5")
    add("--json", action="store_true", help="for programs")
    add("--svg", type=Path, metavar="FILE", help="the picture of the slowest case also as SVG")
    add("--no-picture", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Answers; ValueError for what no fabric can be."""
    fabric = build(args.topology, args.hosts, args.oversubscription, args.ports)
    found: list[Answer] = []
    total = len(args.layout) * len(args.routing)
    for answer in answers(args, fabric):
        found.append(answer)
        if sys.stderr.isatty():
            done = "\r\x1b[K" if len(found) == total else f"\r\x1b[K{len(found)} of {total}"
            print(done, end="", file=sys.stderr, flush=True)
    worst = max(found, key=lambda a: a.seconds)
    if args.json:
        rows = [vars(a) | {"slowdown": a.slowdown} for a in found]
        made_of = {"fabric": fabric.name, "hosts": fabric.hosts, "bill": vars(fabrics.bill(fabric))}
        print(json.dumps(made_of | {"answers": rows}))
    else:
        print(_shown(args, fabric, found))
    if args.svg or not (args.json or args.no_picture):
        cells, what = _picture(args, fabric, worst)
        if args.svg:
            args.svg.write_text(svg(cells, f"{args.traffic} on a {fabric.name}: {what}"), encoding="utf-8")
        if not (args.json or args.no_picture):
            print(text(cells, what))
    return 0
