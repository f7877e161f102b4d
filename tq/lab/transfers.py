"""Transfers to time side by side: between host memory and a GPU, within memory, and with a disk past its cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tq.train.offload import PAGE, Scratch, aligned


def calls(device: str, nbytes: int, folder: str | os.PathLike[str]) -> dict[str, Callable[[], Any]]:
    """Calls that each move nbytes (whole pages) one way, "both" nbytes each way. Two files of that size in ``folder``.

    On a CPU: "memory", "disk read", "disk write" and "disk both", which reads one file and writes the other. On a GPU,
    besides, "to GPU" and "from GPU" with page-locked memory, the same with "pageable", and "both".
    """
    if nbytes < PAGE or nbytes % PAGE:
        raise ValueError(f"nbytes must be a multiple of {PAGE}, got {nbytes!r}")
    files, (a, b) = [Scratch(Path(folder), nbytes) for _ in range(2)], (aligned(nbytes), aligned(nbytes))
    for file, buffer in zip(files, (a, b), strict=True):
        buffer.fill_(1)
        file.write(buffer)
    reader = ThreadPoolExecutor(1, "tq-transfers")

    def disk_both() -> None:
        reading = reader.submit(files[0].read, a)
        files[1].write(b)
        reading.result()

    found: dict[str, Callable[[], Any]] = {
        "memory": lambda: b.copy_(a), "disk read": lambda: files[0].read(a), "disk write": lambda: files[1].write(b),
        "disk both": disk_both,
    }  # fmt: skip
    return found | (_with_gpu(nbytes, a) if device == "cuda" else {})


def _with_gpu(nbytes: int, pageable: torch.Tensor) -> dict[str, Callable[[], Any]]:
    pinned, back = aligned(nbytes, pin=True), aligned(nbytes, pin=True)
    on_gpu, other = (torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            on_gpu.copy_(pinned, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            back.copy_(other, non_blocking=True)

    return {
        "to GPU": lambda: on_gpu.copy_(pinned, non_blocking=True),
        "from GPU": lambda: back.copy_(other, non_blocking=True),
        "to GPU, pageable": lambda: on_gpu.copy_(pageable),
        "from GPU, pageable": lambda: pageable.copy_(other),
        "both": both,
    }
