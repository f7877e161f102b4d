"""One rank of a ``Crew``: waits for calls in a folder, makes them, and writes what they return.

torchrun -m tq.lab.net._rank FOLDER BACKEND TIMEOUT_S
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def _write(path: Path, value: object) -> None:
    torch.save(value, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


def main(folder: Path, backend: str, timeout_s: float) -> None:
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    rank, turn = dist.get_rank(), 0
    _write(folder / f"ready-{rank}.pt", os.getpid())
    while True:
        order = folder / f"call-{turn}.json"
        while not order.is_file():
            time.sleep(0.005)
        call = json.loads(order.read_text())
        if call is None:
            dist.destroy_process_group()
            return
        try:
            function = getattr(importlib.import_module(call["module"]), call["function"])
            result = {"value": function(**call["arguments"])}
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        _write(folder / f"result-{turn}-{rank}.pt", result)
        turn += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
