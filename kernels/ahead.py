"""Compiles every CPU kernel into Numba's cache, so that no later call has to wait for one: for images and before tests.

    python -m tq.kernels

Compiling takes memory that a process does not give back, so it is done in processes that end after some kernels.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from typing import Any

from tq.kernels import cpu, matvec, planes

KERNELS_A_PROCESS = 7  # some hundred megabytes
Name = tuple[str, tuple[Any, ...]]  # module, and the arguments of its ``_kernel``


def names() -> list[Name]:
    """Encoders and decoders of 1-8 bits, of v, of AdamW and of the lossless codec; of weights those for 2-4 bits.

    What is not named here, such as products with several vectors, is compiled when it is first called.
    """
    coders = [("cpu", (encodes, bits)) for encodes in (True, False) for bits in range(1, 9)]
    others = [("adamw", (width,)) for width in range(-1, 9)] + [("logscale", (encodes,)) for encodes in (True, False)]
    weights = [("gptq", (bits,)) for bits in matvec.BITS]
    ways = (False, True) if matvec.integers_run() else (False,)
    weights += [("matvec", (bits, 1, 1, 2, integers)) for bits in matvec.BITS for integers in ways]
    return coders + others + weights + [("planes", name) for name in planes.NAMES]


def build(some: list[Name]) -> int:
    """Compiles these; returns how many were not in the cache."""
    for module, arguments in some:
        import_module(f"tq.kernels.{module}")._kernel(*arguments)
    return sum(not kernel.cache_hits for kernel in cpu._compiled_kernels)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tq.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all processors)")
    jobs, begun, wanted = parser.parse_args().jobs, time.perf_counter(), names()
    if jobs < 1:
        parser.error(f"--jobs must be positive, got {jobs}")
    shares = [wanted[k : k + KERNELS_A_PROCESS] for k in range(0, len(wanted), KERNELS_A_PROCESS)]
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        compiled = sum(pool.map(build, shares))
    seconds = time.perf_counter() - begun
    print(f"{len(wanted)} CPU kernels: {compiled} compiled, {len(wanted) - compiled} were there, {seconds:.0f} s")
