"""``python -m tq.lab.stacks``: list the stacks, install one, run its program on two ranks of this machine."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from tq.lab.stacks.catalog import STACKS
from tq.lab.stacks.run import StackFailed, here
from tq.lab.stacks.task import WAYS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tq.lab.stacks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the stacks, and whether they are installed")
    install = commands.add_parser("install", help="fetch pinned packages into a folder of their own")
    install.add_argument("names", nargs="*", choices=[*STACKS, []], metavar="NAME", help="default: all")
    run = commands.add_parser("run", help="train with one on two ranks of this machine")
    run.add_argument("name", choices=STACKS)
    run.add_argument("--way", choices=WAYS, default="backend", help="how gradients are coded (default: backend)")
    run.add_argument("--steps", type=int, default=20, help="default: 20")
    run.add_argument("--no-codes", action="store_true", help="the same way with the codec off: it sends fp32")
    asked = parser.parse_args(argv)
    if asked.command == "list":
        for stack in STACKS.values():
            print(f"{stack.name:<15} {stack.title:<40} {stack.obstacle() or 'ready'}")
        return 0
    try:
        if asked.command == "install":
            for name in asked.names or STACKS:
                print(f"{name}: {' '.join(STACKS[name].needs) or 'needs nothing'}", flush=True)
                STACKS[name].install()
            return 0
        stack = STACKS[asked.name]
        if why := stack.obstacle():
            raise StackFailed(why)
        told = here(stack, way=asked.way, steps=asked.steps, codes=not asked.no_codes)
    except (StackFailed, subprocess.CalledProcessError) as error:
        print(f"stacks: {error}", file=sys.stderr)
        return 1
    for rank, found in enumerate(told):
        for one in found["runs"]:
            step_s = statistics.median(one["seconds"])
            print(f"rank {rank}: held-out loss {one['valid']:.4f}, {step_s:.3f} s a step, weights {one['digest']}")
    for kind, count in told[0]["counts"].items():
        print(f"{kind}: {count['plain']:,.0f} bytes, sent as {count['sent']:,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
