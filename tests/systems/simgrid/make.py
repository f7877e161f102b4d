"""Makes cases.json: flows that share links, with the rates and completion times that SimGrid gives them.

    apt-get install python3-simgrid && /usr/bin/python3 tests/systems/simgrid/make.py

SimGrid 3.32, model CM02 (max-min fair, no latency here) without cross traffic. It is the peer of tq.systems.fluid and
no dependency: this file imports nothing of the package, and tests read the numbers that it has written.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

CASES = 80


def random_case(r: random.Random) -> dict:
    """Any links, any flows: a flow uses one to five of the links, in no order that a network would have."""
    links = [float(r.choice((1, 2, 4, 10)) * 10**r.uniform(6, 8)) for _ in range(r.randint(2, 24))]
    flows = [sorted(r.sample(range(len(links)), r.randint(1, min(5, len(links))))) for _ in range(r.randint(1, 40))]
    return {"kind": "any", "links": links, "flows": flows}


def clos_case(r: random.Random) -> dict:
    """Leaves and spines, oversubscribed, every flow up to a spine drawn at random."""
    leaves, hosts, spines = r.choice((2, 3, 4)), r.choice((2, 4, 8)), r.choice((2, 4))
    rate, ratio = 1e8, r.choice((1, 2, 4, 7))
    up = rate * hosts / spines / ratio
    n, trunks = leaves * hosts, leaves * spines
    links = [rate] * (2 * n) + [up] * (2 * trunks)
    flows = []
    for _ in range(r.randint(4, 3 * n)):
        a, b = r.sample(range(n), 2)
        way = [a, n + b]
        if a // hosts != b // hosts:
            spine = r.randrange(spines)
            way[1:1] = [2 * n + a // hosts * spines + spine, 2 * n + trunks + b // hosts * spines + spine]
        flows.append(way)
    return {"kind": f"clos {ratio}:1", "links": links, "flows": flows}


def torus_case(r: random.Random) -> dict:
    """A ring of hosts with links both ways; a flow goes the shorter way round."""
    n = r.randint(4, 12)
    links = [1e8] * (2 * n)
    flows = []
    for _ in range(r.randint(n, 3 * n)):
        a, d = r.randrange(n), r.randint(1, n - 1)
        right = 2 * d <= n
        flows.append([(a + i) % n if right else n + (a - i - 1) % n for i in range(d if right else n - d)])
    return {"kind": "ring", "links": links, "flows": flows}


def solve(case: dict) -> dict:
    """SimGrid's answer, in this process, which has one engine."""
    import simgrid as sg

    engine = sg.Engine(["make"])
    for setting in ("network/model:CM02", "network/crosstraffic:0", "surf/precision:1e-12",
                    "maxmin/precision:1e-12"):  # fmt: skip
        sg.Engine.set_config(setting)
    zone = sg.NetZone.create_full_zone("z")
    links = [zone.create_link(f"l{i}", rate).seal() for i, rate in enumerate(case["links"])]
    pairs = []
    for i, way in enumerate(case["flows"]):
        a, b = (zone.create_host(f"{end}{i}", 1e9).seal() for end in "ab")
        zone.add_route(a.netpoint, b.netpoint, None, None, [sg.LinkInRoute(links[k]) for k in way], False)
        pairs.append((a, b))
    zone.seal()
    found: dict[str, list[float]] = {"rates": [], "times": [0.0] * len(pairs)}
    early = min(case["sizes"]) / max(case["links"]) / 2  # before anything can be through

    def watch() -> None:
        # SimGrid takes sizes as whole bytes
        comms = [sg.Comm.sendto_async(a, b, int(s)) for (a, b), s in zip(pairs, case["sizes"], strict=True)]
        sg.this_actor.sleep_until(early)
        found["rates"] = [(s - c.remaining) / early for s, c in zip(case["sizes"], comms, strict=True)]
        open_ = list(range(len(comms)))
        while open_:
            done = sg.Comm.wait_any([comms[i] for i in open_])
            found["times"][open_.pop(done)] = sg.Engine.clock if isinstance(sg.Engine.clock, float) else engine.clock

    sg.Actor.create("watch", pairs[0][0], watch)
    engine.run()
    return found


def main() -> None:
    r, kinds = random.Random(7), (random_case, clos_case, torus_case)
    cases = []
    for number in range(CASES):
        case = kinds[number % len(kinds)](r)
        case["sizes"] = [float(round(10 ** r.uniform(8, 10))) for _ in case["flows"]]
        said = subprocess.run(
            [sys.executable, __file__, "solve"], input=json.dumps(case), capture_output=True, text=True, check=True
        )
        cases.append(case | json.loads(said.stdout))
    version = subprocess.run(
        [sys.executable, "-c", "import simgrid; print(simgrid.simgrid_version)"], capture_output=True, text=True
    ).stdout.split()[-1]
    lines = ",\n".join(json.dumps(case) for case in cases)
    text = f'{{"made_by": "SimGrid {version}, CM02, no cross traffic", "cases": [\n{lines}\n]}}\n'
    (Path(__file__).parent / "cases.json").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:] == ["solve"]:
        print(json.dumps(solve(json.load(sys.stdin))))
    else:
        main()
