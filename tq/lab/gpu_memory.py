"""The memories of a GPU: how fast its second level is read, and a layer whose weights lie in three places.

A buffer that fits the second level is read from there every time but the first, one that does not comes from memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from tq.lab.timing import time_calls

TILE = 4096  # numbers that a program reads at a time
WARPS = 8
PROGRAMS = 8  # for every processor: as many as fit, of 8 warps each
READ = 1 << 32  # bytes that a launch reads, whatever the size of the buffer


@triton.jit
def _read_kernel(p_x, p_sums, tiles, turns, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program reads one tile after another, past the first level, and adds them up."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros([TILE], tl.float32)
    for turn in range(turns):
        tile = (program + turn * programs) % tiles
        total += tl.load(p_x + tile * TILE + tl.arange(0, TILE), cache_modifier=".cg")
    tl.store(p_sums + program, tl.sum(total))


def read_again(x: Tensor, sums: Tensor, turns: int) -> int:
    """Reads the fp32 numbers of x, a multiple of ``TILE``, again and again; returns the bytes read.

    sums: fp32 [programs]; each becomes the sum of what a program read in ``turns`` tiles.
    """
    if x.numel() % TILE or x.dtype != torch.float32:
        raise ValueError(f"x must hold a multiple of {TILE} numbers in fp32, got {x.numel()} in {x.dtype}")
    _read_kernel[(sums.numel(),)](x, sums, x.numel() // TILE, turns, TILE=TILE, num_warps=WARPS)
    return 4 * TILE * turns * sums.numel()


def read_rates(sizes: Sequence[int], repeats: int) -> dict[int, list[float]]:
    """{bytes of the buffer: bytes/s, turn by turn} at which a GPU reads it again and again; sizes take turns."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    sums = torch.empty(processors * PROGRAMS, device="cuda")
    turns = READ // (4 * TILE * sums.numel())
    buffers = {size: torch.ones(size // 4, device="cuda") for size in sizes}
    moved = {size: read_again(x, sums, turns) for size, x in buffers.items()}
    if not torch.equal(sums, torch.full_like(sums, TILE * turns)):
        raise RuntimeError("the sums are not those of what was to be read")
    calls = {size: lambda x=x: read_again(x, sums, turns) for size, x in buffers.items()}
    seconds = time_calls({str(size): call for size, call in calls.items()}, repeats, warmup=2)
    return {size: [moved[size] / t for t in seconds[str(size)]] for size in sizes}


def split_layer(side: int, tokens: int, device: str, repeats: int) -> dict[str, object]:
    """A linear layer [side, side] in bf16, a third of its rows each on the device, in host memory and in a file.

    Returns "same": whether its results have the bits of those with all weights on the device; "over": times as long as
    those, turn by turn. The file is read through the system's cache of pages.
    """
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(side, side, generator=generator).to(torch.bfloat16)
    x = torch.randn(tokens, side, generator=generator).to(torch.bfloat16).to(device)
    here, there, away = whole.tensor_split(3)
    here, there = here.to(device), there.pin_memory() if device == "cuda" else there.clone()
    resident = whole.to(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        path.write_bytes(away.contiguous().view(torch.uint8).numpy().tobytes())
        held = torch.empty_like(away, pin_memory=device == "cuda")

        def split() -> Tensor:
            with path.open("rb", buffering=0) as file:
                file.readinto(held.view(torch.uint8).view(-1).numpy().data)
            rows = [here, there.to(device, non_blocking=True), held.to(device, non_blocking=True)]
            return x @ torch.cat(rows).T

        same = torch.equal(split(), x @ resident.T)
        # one call a sample: the next would write to the rows that are still on their way
        seconds = time_calls({"split": split, "whole": lambda: x @ resident.T}, repeats, warmup=2, inner=1)
    ratios = [a / b for a, b in zip(seconds["split"], seconds["whole"], strict=True)]
    return {"same": same, "over": ratios}
