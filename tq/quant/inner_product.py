"""TurboQuant_prod (arXiv:2504.19874, algorithm 2): unbiased inner products, b - 1 bits for the mse part, 1 for QJL.

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
from tq.quant.codec import Code, Codec
from tq.quant.memory import memory_range
from tq.quant.rotation import _normals, derive_seed
from tq.quant.settings import DTYPES, int_in


@dataclass(frozen=True)
class ProdCode:
    """Encoded vectors, as ``ProdCodec.encode`` returns them. Fields are checked by ``ProdCodec.decode``.

    Args:
        mse: ``Code`` [N, d] of b - 1 bits, or None at b = 1.
        sign_bits: uint8 [N, ceil(d / 8)], one bit per element: the signs of the projected residual.
        residual_norm: fp32 [N], norm of what the mse part lost of each vector.
        shape: of the original tensor, (..., d).

    Example:
        >>> import torch
        >>> from tq.quant.inner_product import ProdCodec
        >>> code = ProdCodec(bits=4, dim=64).encode(torch.ones(10, 64))
        >>> code.mse.nbytes, tuple(code.sign_bits.shape), tuple(code.residual_norm.shape), code.nbytes
        (280, (10, 8), (10,), 400)
    """

    mse: Code | None
    sign_bits: Tensor
    residual_norm: Tensor
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Stored bytes (int) of the mse part with its scales, the sign bits and the residual norms."""
        return (self.mse.nbytes if self.mse else 0) + self.sign_bits.nbytes + self.residual_norm.nbytes


@dataclass(frozen=True)
class ProdCodec:
    """Codec of vectors whose inner products with full-precision queries are unbiased estimates.

    The mse part is the paper's: rotation of the whole vector, Lloyd-Max codebook, scale "paper". One more bit per
    element holds the signs of the residual under a random projection (QJL).

    Args:
        bits: 1-8 bits per element in all, the sign bit included.
        dim: length d of the vectors, the last dimension of what is encoded; as ``block`` in ``Codec``.
        seed: of the rotation and the projection, int in [0, 2**64).
        rotation: "haar" as in the paper, or "hadamard".
        codebook: "sphere" as in the paper, or "gaussian".

    Raises:
        TypeError: ``bits``, ``dim`` or ``seed`` is not an int.
        ValueError: an argument is out of range.

    References:
        TurboQuant (Zandieh et al., arXiv:2504.19874), algorithm 2; QJL (Zandieh et al., arXiv:2406.03482).

    Example:
        >>> import torch
        >>> from tq.quant.inner_product import ProdCodec
        >>> generator = torch.Generator().manual_seed(0)
        >>> keys, query = torch.randn(200, 64, generator=generator), torch.randn(64, generator=generator)
        >>> codec = ProdCodec(bits=4, dim=64)
        >>> error = codec.decode(codec.encode(keys)) @ query - keys @ query
        >>> bool(error.mean().abs() < 0.5), bool(error.std() < 0.3 * (keys @ query).std())
        (True, True)
    """

    bits: int = 4
    dim: int = 128
    seed: int = 0
    rotation: str = "haar"
    codebook: str = "sphere"

    def __post_init__(self) -> None:
        int_in("bits", self.bits, 1, 8)
        _ = self.mse_codec  # raises for a bad dim, seed, rotation or codebook

    @property
    def mse_codec(self) -> Codec:
        """The ``Codec`` of the first b - 1 bits (at b = 1 it is made, and not used)."""
        bits = max(self.bits - 1, 1)
        return Codec(bits, self.dim, "paper", 1, 1, self.seed, rotation=self.rotation, codebook=self.codebook)

    def projection(self, device: torch.device | str = "cpu") -> Tensor:
        """S of the paper.

        Args:
            device: of the result.

        Returns:
            Tensor: fp32 [d, d], iid N(0, 1), drawn from the seed.
        """
        s = _normals(derive_seed(self.seed, "qjl", self.dim), (self.dim, self.dim))
        return torch.from_numpy(s).to(device, torch.float32)

    def encode(self, x: Tensor) -> ProdCode:
        """Encode vectors.

        Args:
            x: [..., d], fp32, bf16 or fp16, finite.

        Returns:
            ProdCode: on the device of x.

        Raises:
            TypeError: x has another dtype, is a subclass or has no memory.
            ValueError: the last dimension is not ``dim``, or x holds NaN or Inf.
        """
        memory_range("x", x)
        memory_range("results", torch.empty(1))  # of a tracer that is at work, they would be its own
        if x.dtype not in DTYPES:
            raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"x must have a last dimension of {self.dim}, got shape {tuple(x.shape)}")
        if not bool(x.isfinite().all()):
            raise ValueError("x holds NaN or Inf")
        x_Nd = x.detach().resolve_neg().float().reshape(-1, self.dim).contiguous()  # sums must not depend on strides
        mse = None
        residual_Nd = x_Nd
        if self.bits > 1:
            codec = self.mse_codec
            mse = codec.encode(x_Nd, impl="reference")
            residual_Nd = x_Nd - codec.decode(mse, impl="reference")
        positive_Nd = residual_Nd @ self.projection(x.device).T > 0
        return ProdCode(mse, pack(positive_Nd, 1), residual_Nd.norm(dim=1), tuple(x.shape))

    def decode(self, code: ProdCode) -> Tensor:
        """Decode to vectors whose inner product with any y is an unbiased estimate of <x, y>.

        Args:
            code: from ``encode`` of this codec.

        Returns:
            Tensor: fp32 [..., d], whatever dtype was encoded.

        Raises:
            TypeError, ValueError: ``code`` cannot be from ``encode`` of this codec.
        """
        self._check(code)
        sign_Nd = unpack(code.sign_bits, 1, self.dim).float() * 2.0 - 1.0
        # E[sign(<s, r>) s] = sqrt(2/pi) r / |r| for s ~ N(0, I); hence sqrt(pi/2) / d * |r| * S^T sign(S r)
        y_Nd = sign_Nd @ self.projection(code.sign_bits.device)
        y_Nd *= (code.residual_norm * (math.sqrt(math.pi / 2.0) / self.dim))[:, None]
        if code.mse is not None:
            y_Nd += self.mse_codec.decode(code.mse, impl="reference")
        return y_Nd.view(code.shape)

    def _check(self, code: ProdCode) -> None:
        if not isinstance(code, ProdCode):
            raise TypeError(f"code must be a ProdCode, got {type(code).__name__}")
        if not code.shape or code.shape[-1] != self.dim:
            raise ValueError(f"code must be of dimension {self.dim}, not of another dimension; got shape {code.shape}")
        count = math.prod(code.shape[:-1])
        wanted = {
            "sign_bits": (code.sign_bits, torch.uint8, (count, packed_bytes(1, self.dim))),
            "residual_norm": (code.residual_norm, torch.float32, (count,)),
        }
        for name, (tensor, dtype, shape) in wanted.items():
            memory_range(name, tensor)
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must be {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
        if (code.mse is None) != (self.bits == 1):
            wanted_mse = "None" if self.bits == 1 else "a Code"
            raise ValueError(f"mse must be {wanted_mse} at {self.bits} bits, got {code.mse}")
        if code.mse is not None and code.mse.shape != (count, self.dim):
            raise ValueError(f"mse must be a Code of shape {(count, self.dim)}, got {code.mse.shape}")
