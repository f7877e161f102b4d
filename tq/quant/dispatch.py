"""The one door between the codec and its implementations, and the only importer of ``tq.kernels``.

"auto" takes Triton on a GPU and Numba on a CPU where they are installed and cover the setting, else the reference.
An explicit choice that cannot run raises; nothing falls back in silence.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tq.quant import reference
from tq.quant.codebook import lloyd_max
from tq.quant.rotation import signs

if TYPE_CHECKING:
    from tq.quant.codec import Codec

IMPLS = ("auto", "reference", "cpu", "triton")


@lru_cache(maxsize=256)
def _tables(bits: int, dim: int | None, device: str) -> tuple[Tensor, Tensor]:
    """(levels, thresholds) as fp32 tensors on ``device``. Cached: do not write into them."""
    levels, thresholds = lloyd_max(bits, dim)
    return torch.tensor(levels, dtype=torch.float32, device=device), torch.tensor(
        thresholds, dtype=torch.float32, device=device
    )


def multipliers(search: int) -> tuple[float, ...]:
    """The K = ``search`` multipliers: (1.0,), or K even steps over [.9, 1.1] for K <= 5 and over [.8, 1.2] above."""
    if search == 1:
        return (1.0,)
    reach = 0.1 if search <= 5 else 0.2
    return tuple(1.0 + reach * (2.0 * k / (search - 1) - 1.0) for k in range(search))


_DEVICE = {"cpu": "cpu", "triton": "cuda"}  # that an implementation serves


@lru_cache(maxsize=len(_DEVICE))
def _kernel(impl: str) -> ModuleType | str:
    """The module with the kernels of ``impl``, or a sentence why it cannot run here."""
    package = {"cpu": "numba", "triton": "triton"}[impl]
    if find_spec(package) is None:
        return f"{package} is not installed (pip install 'tq-book[kernels]')"
    try:
        if impl == "cpu":
            from tq.kernels import cpu as module
        else:
            from tq.kernels import gpu as module
    except ImportError as error:  # installed, but not for this machine or this version of what it needs
        return f"{package} cannot be imported here ({error})"
    return module


def _obstacle(impl: str, codec: Codec, device: torch.device) -> str | None:
    """Why the kernels of ``impl`` cannot serve this codec on this device; None if they can."""
    if device.type != _DEVICE[impl] and not (impl == "triton" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"it works on {_DEVICE[impl].upper()} tensors, got one on {device}"
    if codec.rotation != "hadamard":
        return f"it covers rotation='hadamard', got {codec.rotation!r}"
    kernel = _kernel(impl)
    return kernel if isinstance(kernel, str) else None


def resolve(impl: str, codec: Codec, device: torch.device) -> str:
    """Name of the implementation that ``impl`` means for this codec and device: "reference", "cpu" or "triton"."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")
    if impl == "auto":
        fitting = "triton" if device.type == "cuda" else "cpu"
        return "reference" if _obstacle(fitting, codec, device) else fitting
    if impl != "reference" and (obstacle := _obstacle(impl, codec, device)):
        raise RuntimeError(f"impl={impl!r} cannot run: {obstacle}")
    return impl


def _whole_rows(x_RD: Tensor, block: int) -> Tensor:
    """The same blocks as one long row where no row needs padding: kernels then see the simplest shape."""
    return x_RD.view(1, -1) if x_RD.shape[0] != 1 and x_RD.shape[1] % block == 0 else x_RD


def encode(codec: Codec, x_RD: Tensor, payload: Tensor, scales: Tensor, impl: str, factor: float = 1.0) -> bool | None:
    """Encode ``factor * x_RD`` into ``payload`` uint8 [N, W] and ``scales`` [N]; see ``reference.encode``.

    x_RD: contiguous [rows, dim]; every row starts a new block. Returns whether all scales are finite; None: not known.
    """
    device = str(x_RD.device)
    levels, thresholds = _tables(codec.bits, codec.sphere_dim, device)
    x_RD = _whole_rows(x_RD, codec.block)
    chosen = resolve(impl, codec, x_RD.device)
    if chosen != "reference":
        kernel = _kernel(chosen)
        assert isinstance(kernel, ModuleType)
        table = signs(codec.block, codec.rounds, codec.seed, device)
        trials = multipliers(codec.search)
        return kernel.encode(x_RD, payload, scales, table, levels, thresholds, trials, codec.bits, codec.scale, factor)
    reference.encode(
        x_RD, payload, scales, bits=codec.bits, block=codec.block, scale=codec.scale, rounds=codec.rounds,
        rotation=codec.rotation, seed=codec.seed, levels_L=levels, thresholds=thresholds,
        multipliers=multipliers(codec.search), factor=factor,
    )  # fmt: skip
    return None


def decode(codec: Codec, payload: Tensor, scales: Tensor, out_RD: Tensor, impl: str, accumulate: bool = False) -> None:
    """Decode into contiguous ``out_RD`` [rows, dim], or add to it in fp32; see ``reference.decode``."""
    device = str(payload.device)
    levels, _ = _tables(codec.bits, codec.sphere_dim, device)
    out_RD = _whole_rows(out_RD, codec.block)
    chosen = resolve(impl, codec, payload.device)
    if chosen != "reference":
        kernel = _kernel(chosen)
        assert isinstance(kernel, ModuleType)
        table = signs(codec.block, codec.rounds, codec.seed, device)
        kernel.decode(payload, scales, out_RD, table, levels, codec.bits, accumulate)
        return
    reference.decode(
        payload, scales, out_RD, bits=codec.bits, block=codec.block, rounds=codec.rounds, rotation=codec.rotation,
        seed=codec.seed, levels_L=levels, accumulate=accumulate,
    )  # fmt: skip
