"""Look into checkpoints, check them, and convert them.

examples:
  python -m tq.train.tqk inspect run/0000000100-0/rank-0.tqk
  python -m tq.train.tqk verify run/*/*.tqk
  python -m tq.train.tqk convert model.pt model.tqk
  python -m tq.train.tqk convert model.tqk model.safetensors
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tq.train import tqk
from tq.train.tqk.disk import attempt, durable
from tq.train.tqk.tree import take_apart

ENDINGS = (".tqk", ".pt", ".pth", ".safetensors")


def inspect(path: Path) -> str:
    """What a file holds: a line a tensor, then the sums."""
    with tqk.File(path) as file:
        lines = [f"{'tensor':40} {'dtype':10} {'shape':18} {'bytes':>14} {'stored':>14} {'ratio':>7}  predicted from"]
        total, stored = 0, 0
        for name in file.names():
            it = file.describe(name)
            if it["same"]:
                lines.append(f"{name:40} the same as {it['same']}")
                continue
            total, stored = total + it["nbytes"], stored + it["stored"]
            shape, dtype = "x".join(map(str, it["shape"])) or "-", str(it["dtype"]).removeprefix("torch.")
            ratio = it["nbytes"] / it["stored"] if it["stored"] else 1.0
            numbers = f"{it['nbytes']:14,} {it['stored']:14,} {ratio:7.3f}"
            lines.append(f"{name:40} {dtype:10} {shape:18} {numbers}  {it['given'] or ''}".rstrip())
        size = path.stat().st_size
        lines.append(f"{len(file.names())} tensors, {total:,} bytes in {size:,} ({total / size:.3f} times smaller)")
    return "\n".join(lines)


def read(path: Path) -> Any:
    """The state of a file of any kind.

    Raises:
        ValueError: for another ending, or a file that would have to run code to be read.
    """
    if path.suffix == ".tqk":
        return tqk.load(path)
    if path.suffix == ".safetensors":
        return _safetensors().load_file(path)
    if path.suffix in (".pt", ".pth"):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            why = str(error).strip().splitlines()[0]
            raise ValueError(f"{path.name} cannot be read without running what is in it: {why}") from error
    raise ValueError(f"{path.name}: the ending must be one of {', '.join(ENDINGS)}")


def write(path: Path, state: Any) -> None:
    """A state into a file of any kind; safetensors hold the tensors only.

    Raises:
        ValueError: for another ending.
    """
    if path.suffix == ".tqk":
        tqk.save(path, state)
    elif path.suffix == ".safetensors":
        tensors: dict[str, Tensor] = {}
        for name, tensor in take_apart(state)[1].items():
            tensors[name] = tensor.contiguous().clone()  # shared memory is not allowed there
        durable(path, [_safetensors().save(tensors)])
    elif path.suffix in (".pt", ".pth"):
        part = path.with_name(f"{path.name}.part")
        torch.save(state, part)
        attempt("write", path, lambda: part.replace(path))
    else:
        raise ValueError(f"{path.name}: the ending must be one of {', '.join(ENDINGS)}")


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ValueError("safetensors is not installed (pip install safetensors)") from error
    return safetensors.torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 where a file is damaged or cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="python -m tq.train.tqk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("inspect", "list the tensors of files"), ("verify", "read everything, compare all checksums")):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("file", nargs="+", type=Path, help="a .tqk file")
    command = commands.add_parser("convert", help="from one kind of file to another, by their endings")
    command.add_argument("source", type=Path, help=f"a file that ends with {', '.join(ENDINGS)}")
    command.add_argument("target", type=Path, help="likewise; what is there is replaced when the new file is whole")
    given, failed = parser.parse_args(arguments), 0
    try:
        if given.command == "convert":
            write(given.target, read(given.source))
            print(f"{given.target}: {given.target.stat().st_size:,} bytes, from {given.source.stat().st_size:,}")
            return 0
    except (OSError, ValueError, TypeError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    for path in given.file:
        try:
            if given.command == "inspect":
                print(inspect(path))
            else:
                tqk.load(path)
                print(f"{path}: whole")
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
