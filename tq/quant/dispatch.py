"""The one door between the codec and its implementations, and the only importer of ``tq.kernels``.

"auto" takes Triton on a GPU and Numba on a CPU where they are installed and cover the setting, else the reference.
An explicit choice that cannot run raises; nothing falls back in silence.
"""

from __future__ import annotations

from functools import lru_cache
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


@lru_cache(maxsize=1)
def _cpu_kernel() -> ModuleType | str:
    """The Numba kernels, or a sentence why they cannot run here."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return "Numba is not installed (pip install 'tq-book[kernels]')"
    from tq.kernels import cpu

    return cpu


def resolve(impl: str, codec: Codec, device: torch.device) -> str:
    """Name of the implementation that ``impl`` means for this codec and device: "reference" or "cpu"."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")
    if impl == "triton":
        raise NotImplementedError("impl='triton': this release has no Triton kernel; use 'auto' or 'reference'")
    if impl == "reference":
        return impl
    obstacle = None
    if device.type != "cpu":
        obstacle = f"it works on CPU tensors, got one on {device}"
    elif codec.rotation != "hadamard":
        obstacle = f"it covers rotation='hadamard', got {codec.rotation!r}"
    elif isinstance(kernel := _cpu_kernel(), str):
        obstacle = kernel
    if obstacle is None:
        return "cpu"
    if impl == "cpu":
        raise RuntimeError(f"impl='cpu' cannot run: {obstacle}")
    return "reference"


def encode(codec: Codec, x: Tensor, payload: Tensor, scales: Tensor, impl: str) -> None:
    """Encode flat ``x`` into ``payload`` uint8 [N, W] and ``scales`` [N]; see ``reference.encode``."""
    levels, thresholds = _tables(codec.bits, codec.sphere_dim, str(x.device))
    if resolve(impl, codec, x.device) == "cpu":
        kernel = _cpu_kernel()
        assert isinstance(kernel, ModuleType)
        table = signs(codec.block, codec.rounds, codec.seed)
        ms = torch.tensor(multipliers(codec.search), dtype=torch.float32)
        kernel.encode(x, payload, scales, table, levels, thresholds, ms, codec.bits, codec.scale)
        return
    reference.encode(
        x, payload, scales, bits=codec.bits, block=codec.block, scale=codec.scale, rounds=codec.rounds,
        rotation=codec.rotation, seed=codec.seed, levels_L=levels, thresholds=thresholds,
        multipliers=multipliers(codec.search),
    )  # fmt: skip


def decode(codec: Codec, payload: Tensor, scales: Tensor, out: Tensor, impl: str) -> None:
    """Decode into flat ``out``; see ``reference.decode``."""
    levels, _ = _tables(codec.bits, codec.sphere_dim, str(payload.device))
    if resolve(impl, codec, payload.device) == "cpu":
        kernel = _cpu_kernel()
        assert isinstance(kernel, ModuleType)
        kernel.decode(payload, scales, out, signs(codec.block, codec.rounds, codec.seed), levels, codec.bits)
        return
    reference.decode(
        payload, scales, out, bits=codec.bits, block=codec.block, rounds=codec.rounds, rotation=codec.rotation,
        seed=codec.seed, levels_L=levels,
    )  # fmt: skip
