"""The one door between the codecs and their implementations, and the only importer of ``tq.kernels``.

"auto" takes Triton on a GPU and Numba on a CPU where they are installed and cover the setting, else the reference.
An explicit choice that cannot run raises; nothing falls back in silence. What has no memory of its own is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tq.quant import reference
from tq.quant.codebook import lloyd_max
from tq.quant.memory import PLAIN, memory_range
from tq.quant.scale_search import Search, search
from tq.quant.settings import Settings

IMPLS = ("auto", "reference", "cpu", "triton")


@lru_cache(maxsize=256)
def _search(count: int, bits: int, dim: int | None) -> Search:
    levels, thresholds = (table.numpy().tobytes() for table in _tables(bits, dim, "cpu"))
    return search(count, bits, levels, thresholds)


@lru_cache(maxsize=256)
def _tables(bits: int, dim: int | None, device: str) -> tuple[Tensor, Tensor]:
    """(levels, thresholds) as fp32 tensors on ``device``. Cached: do not write into them."""
    levels, thresholds = (torch.from_numpy(table.astype(np.float32)).to(device) for table in lloyd_max(bits, dim))
    for table in (levels, thresholds):
        memory_range("codebook", table)  # nothing else may be kept
    return levels, thresholds


_DEVICE = {
    "cpu": "cpu",
    "log cpu": "cpu",
    "adamw cpu": "cpu",
    "triton": "cuda",
    "log triton": "cuda",
    "adamw triton": "cuda",
}  # that an implementation serves


@lru_cache(maxsize=len(_DEVICE))
def _kernel(impl: str) -> ModuleType | str:
    """The module with the kernels of ``impl``, or a sentence why it cannot run here."""
    package = "triton" if _DEVICE[impl] == "cuda" else "numba"
    if find_spec(package) is None:
        return f"{package} is not installed (pip install 'tq-book[kernels]')"
    try:
        if impl == "cpu":
            from tq.kernels import cpu as module
        elif impl == "log cpu":
            from tq.kernels import logscale as module
        elif impl == "adamw cpu":
            from tq.kernels import adamw as module
        elif impl == "log triton":
            from tq.kernels import gpu_logscale as module
        elif impl == "adamw triton":
            from tq.kernels import gpu_adamw as module
        else:
            from tq.kernels import gpu as module
    except ImportError as error:  # installed, but not for this machine or this version of what it needs
        return f"{package} cannot be imported here ({error})"
    return module


def _obstacle(impl: str, settings: Settings | None, device: torch.device) -> str | None:
    """Why the kernels of ``impl`` cannot serve these settings on this device; None if they can."""
    interpreted = _DEVICE[impl] == "cuda" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != _DEVICE[impl] and not interpreted:
        return f"it works on {_DEVICE[impl].upper()} tensors, got one on {device}"
    if settings is not None and settings.rotation != "hadamard":
        return f"it covers rotation='hadamard', got {settings.rotation!r}"
    kernel = _kernel(impl)
    return kernel if isinstance(kernel, str) else None


def resolve(impl: str, settings: Settings, device: torch.device) -> str:
    """Name of the implementation that ``impl`` means for these settings and device: "reference", "cpu" or "triton"."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")
    if impl == "auto":
        fitting = "triton" if device.type == "cuda" else "cpu"
        return "reference" if _obstacle(fitting, settings, device) else fitting
    if impl != "reference" and (obstacle := _obstacle(impl, settings, device)):
        raise RuntimeError(f"impl={impl!r} cannot run: {obstacle}")
    return impl


def _whole_rows(x_RD: Tensor, block: int) -> Tensor:
    """The same blocks as one long row where no row needs padding: kernels then see the simplest shape."""
    return x_RD.view(1, -1) if x_RD.shape[0] != 1 and x_RD.shape[1] % block == 0 else x_RD


@lru_cache(maxsize=256)
def _encoder(settings: Settings, chosen: str, device: torch.device) -> Callable[..., bool | None]:
    """Call with x_RD, payload, scales, seed and factor; see ``encode``. Made once for all seeds."""
    levels, thresholds = _tables(settings.bits, settings.sphere_dim, str(device))
    kernel, tried = _kernel_of(chosen), _search(settings.search, settings.bits, settings.sphere_dim)
    tables: dict[str, Any] = {"levels_L": levels, "thresholds": thresholds, "search": tried}
    if chosen == "cpu":
        wanted = settings.block, settings.rounds, settings.bits
        made: Callable[..., bool] = kernel.Encoder(
            *wanted, **tables, scale=settings.scale, scale_dtype=settings.scale_dtype
        )
        return made
    run = partial(kernel.encode, **tables, bits=settings.bits, scale=settings.scale)
    return lambda x_RD, payload, scales, seed, factor: run(
        x_RD, payload, scales, **_rotation(kernel, settings, seed, device), factor=factor
    )


@lru_cache(maxsize=256)
def _decoder(settings: Settings, chosen: str, device: torch.device) -> Callable[..., None]:
    """Call with payload, scales, out_RD, seed and accumulate; see ``decode``. Made once for all seeds."""
    levels, _ = _tables(settings.bits, settings.sphere_dim, str(device))
    kernel = _kernel_of(chosen)
    if chosen == "cpu":
        made: Callable[..., None] = kernel.Decoder(settings.block, settings.rounds, settings.bits, levels_L=levels)
        return made
    run = partial(kernel.decode, levels_L=levels, bits=settings.bits)
    return lambda payload, scales, out_RD, seed, accumulate: run(
        payload, scales, out_RD, **_rotation(kernel, settings, seed, device), accumulate=accumulate
    )


def _kernel_of(chosen: str) -> Any:
    """The module that encodes and decodes."""
    return reference if chosen == "reference" else _kernel(chosen)


def _rotation(kernel: ModuleType, settings: Settings, seed: int, device: torch.device) -> dict[str, Any]:
    """What tells others than the CPU's kernels the rotation: a GPU makes the signs in a launch of its own."""
    if kernel is reference:
        return {"block": settings.block, "rounds": settings.rounds, "rotation": settings.rotation, "seed": seed}
    return {"signs_RB": kernel.signs(settings.block, settings.rounds, seed, str(device))}


def encode(
    settings: Settings, x_RD: Tensor, payload: Tensor, scales: Tensor, impl: str, factor: float = 1.0
) -> bool | None:
    """Encode ``factor * x_RD`` into ``payload`` uint8 [N, W] and ``scales`` [N]; see ``reference.encode``.

    x_RD: contiguous [rows, dim]; every row starts a new block. Returns whether all scales are finite; None: not known.
    """
    if type(x_RD) not in PLAIN:  # a copy on the way here may be a tracer's
        memory_range("x", x_RD)
    device = x_RD.device
    run = _encoder(settings.unseeded, resolve(impl, settings, device), device)
    return run(_whole_rows(x_RD, settings.block), payload, scales, settings.seed, factor)


def decode(
    settings: Settings, payload: Tensor, scales: Tensor, out_RD: Tensor, impl: str, accumulate: bool = False
) -> None:
    """Decode into contiguous ``out_RD`` [rows, dim], or add to it in fp32; see ``reference.decode``."""
    if type(out_RD) not in PLAIN:
        memory_range("out", out_RD)
    device = payload.device
    run = _decoder(settings.unseeded, resolve(impl, settings, device), device)
    run(payload, scales, _whole_rows(out_RD, settings.block), settings.seed, accumulate)


def _log_kernel(impl: str, device: torch.device, block: int) -> ModuleType | None:
    """The kernels of the logarithmic codec; None for the reference."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")
    if impl == "reference":
        return None
    chosen = impl if impl != "auto" else "triton" if device.type == "cuda" else "cpu"
    obstacle, kernel = _obstacle(f"log {chosen}", None, device), _kernel(f"log {chosen}")
    if obstacle is None and not isinstance(kernel, str):
        obstacle = kernel.why_not(block) if hasattr(kernel, "why_not") else None
        if obstacle is None:
            return kernel
    if impl != "auto":
        raise RuntimeError(f"impl={impl!r} cannot run: {obstacle}")
    return None


def log_encode(
    v: Tensor, codes: Tensor, ranges: Tensor, seed: int, impl: str, *, block: int, bits: int, octaves: int
) -> None:
    """Encode contiguous fp32 ``v`` into ``codes`` [N, W] and ``ranges`` [N, 2]; see ``reference.log_encode``."""
    for name, tensor in {"v": v, "codes": codes, "ranges": ranges}.items():
        memory_range(name, tensor)
    kernel = _log_kernel(impl, v.device, block)
    run = kernel.encode if kernel else reference.log_encode
    run(v, codes, ranges, seed, block=block, bits=bits, octaves=octaves)


def log_decode(codes: Tensor, ranges: Tensor, out: Tensor, impl: str, *, block: int, bits: int) -> None:
    """Decode into contiguous fp32 ``out``; see ``reference.log_decode``."""
    for name, tensor in {"codes": codes, "ranges": ranges, "out": out}.items():
        memory_range(name, tensor)
    kernel = _log_kernel(impl, out.device, block)
    (kernel.decode if kernel else reference.log_decode)(codes, ranges, out, block=block, bits=bits)


def codebook(bits: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(levels, thresholds) of the Gaussian codebook as fp32 tensors. Cached: do not write into them."""
    return _tables(bits, None, device)


def adamw_kernels(impl: str, device: torch.device) -> ModuleType | str:
    """The kernels of AdamW's step on tensors there, or a sentence why there are none. impl: "auto", "cpu", "triton"."""
    chosen = f"adamw {'triton' if device.type == 'cuda' else 'cpu'}" if impl == "auto" else f"adamw {impl}"
    obstacle = _obstacle(chosen, None, device)
    return _kernel(chosen) if obstacle is None else obstacle
