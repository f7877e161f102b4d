"""`python -m tq.systems`: questions to the models of systems. Nothing is fetched.

Exit codes: 0 done; 2 a wrong command line or input, said in one line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from tq.systems import ask_topology


class Parser(argparse.ArgumentParser):
    """An error is one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (--help shows what is accepted)", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="python -m tq.systems", description=(__doc__ or "").splitlines()[0])
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    topology = commands.add_parser(
        "topology", help="how long a traffic pattern takes on a network, by placement and routing",
        description=ask_topology.__doc__, epilog=ask_topology.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    ask_topology.arguments(topology)
    topology.set_defaults(run=ask_topology.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; SystemExit(2) with one line on stderr for what it cannot be."""
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"python -m tq.systems {args.command}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
