"""``python -m tq.lab.engines``: list the engines, install them."""

from __future__ import annotations

import argparse
import subprocess
import sys

from tq.lab.engines.catalog import ENGINES


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tq.lab.engines", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the engines, and whether they are installed")
    install = commands.add_parser("install", help="fetch pinned packages, each into a folder of its own")
    install.add_argument("names", nargs="*", choices=[*ENGINES, []], metavar="NAME", help="default: all")
    asked = parser.parse_args(argv)
    if asked.command == "list":
        for engine in ENGINES.values():
            print(f"{engine.name:<12} {engine.title:<36} {engine.obstacle() or 'ready'}")
        return 0
    for name in asked.names or ENGINES:
        print(f"{name}: {' '.join(ENGINES[name].needs)}", flush=True)
        try:
            ENGINES[name].install()
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            print(f"engines: {name} could not be installed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
