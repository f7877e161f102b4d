"""TurboQuant_prod (arXiv:2504.19874, algorithm 2): unbiased inner products, b - 1 bits of mse code and 1 bit of QJL.

For conformance with the paper; the EDEN scale of ``Codec(scale="unbiased")`` has less variance at equal bits, so this
is the default nowhere. Refused: two-sided quantization (the query y stays in full precision).

Shapes: N vectors, d dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tq.quant.bits import pack, packed_bytes, unpack
from tq.quant.codec import DTYPES, Code, Codec, _int_in
from tq.quant.rotation import _normals, derive_seed


@dataclass(frozen=True)
class ProdCode:
    """mse: Code of b - 1 bits, or None at b = 1; sign_bits: uint8 [N, ceil(d/8)]; residual_norm: fp32 [N]; shape."""

    mse: Code | None
    sign_bits: Tensor
    residual_norm: Tensor
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Stored bytes: mse code with its norms, sign bits, residual norms."""
        return (self.mse.nbytes if self.mse else 0) + self.sign_bits.nbytes + self.residual_norm.nbytes


@dataclass(frozen=True)
class ProdCodec:
    """bits: 1-8 in all. dim: length d of the vectors (last dimension). rotation, codebook: as in ``Codec``.

    The mse part is the paper's: rotation of the whole vector, Lloyd-Max codebook, scale "paper".
    """

    bits: int = 4
    dim: int = 128
    seed: int = 0
    rotation: str = "haar"
    codebook: str = "sphere"

    def __post_init__(self) -> None:
        _int_in("bits", self.bits, 1, 8)
        _ = self.mse_codec  # raises for a bad dim, seed, rotation or codebook

    @property
    def mse_codec(self) -> Codec:
        """The codec of the first b - 1 bits (at b = 1 it is made, and not used)."""
        return Codec(
            max(self.bits - 1, 1), self.dim, "paper", 1, 1, self.seed, self.rotation, self.codebook, torch.float32
        )

    def projection(self, device: torch.device | str = "cpu") -> Tensor:
        """S of the paper: fp32 [d, d], iid N(0, 1), drawn from the seed."""
        s = _normals(derive_seed(self.seed, "qjl", self.dim), (self.dim, self.dim))
        return torch.from_numpy(s).to(device, torch.float32)

    def encode(self, x: Tensor) -> ProdCode:
        """x: [..., d] fp32, bf16 or fp16, finite. Raises TypeError or ValueError otherwise."""
        if x.dtype not in DTYPES:
            raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"x must have a last dimension of {self.dim}, got shape {tuple(x.shape)}")
        if not bool(x.isfinite().all()):
            raise ValueError("x holds NaN or Inf")
        x_Nd = x.detach().float().reshape(-1, self.dim)
        mse = None
        residual_Nd = x_Nd
        if self.bits > 1:
            codec = self.mse_codec
            mse = codec.encode(x_Nd, impl="reference")
            residual_Nd = x_Nd - codec.decode(mse, impl="reference")
        positive_Nd = residual_Nd @ self.projection(x.device).T > 0
        return ProdCode(mse, pack(positive_Nd, 1), residual_Nd.norm(dim=1), tuple(x.shape))

    def decode(self, code: ProdCode) -> Tensor:
        """fp32 vectors [..., d] whose inner product with any y is an unbiased estimate of <x, y>."""
        if code.sign_bits.shape[1] != packed_bytes(1, self.dim):
            raise ValueError(f"code was made for another dimension than {self.dim}")
        sign_Nd = unpack(code.sign_bits, 1, self.dim).float() * 2.0 - 1.0
        # E[sign(<s, r>) s] = sqrt(2/pi) r / |r| for s ~ N(0, I); hence sqrt(pi/2) / d * |r| * S^T sign(S r)
        y_Nd = sign_Nd @ self.projection(code.sign_bits.device)
        y_Nd *= (code.residual_norm * (math.sqrt(math.pi / 2.0) / self.dim))[:, None]
        if code.mse is not None:
            y_Nd += self.mse_codec.decode(code.mse, impl="reference")
        return y_Nd.view(code.shape)
