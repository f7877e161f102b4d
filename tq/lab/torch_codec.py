"""The codec in PyTorch's own operations on whole tensors, as a rival of the kernels on a GPU: the reference works in
chunks that fit a CPU's cache, which a GPU has no use for. Compiled, PyTorch fuses what it can."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tq.quant.bits import pack, unpack
from tq.quant.codebook import lloyd_max
from tq.quant.codec import Codec
from tq.quant.rotation import rotate


class WholeTensors:
    """Codes of a codec with the scale "unbiased" and no search; as the codec's, but for coordinates on a threshold.

    A rotation is one product with a matrix, whatever its number of rounds. What the kernels do beyond: NaN and Inf,
    magnitudes whose squares leave fp32, lengths that are no multiple of the block.

    Args:
        codec: whose codes are made; ValueError for another scale or a search.
        device: of the tensors.
        compiled: by ``torch.compile``, for one shape.
    """

    def __init__(self, codec: Codec, device: torch.device | str, compiled: bool = False) -> None:
        if codec.scale != "unbiased" or codec.search > 1:
            raise ValueError(f'scale must be "unbiased", without a search, got {codec.scale!r}, {codec.search}')
        self.codec = codec
        unit = torch.eye(codec.block)
        self._rotation = rotate(unit, codec.rounds, codec.seed, codec.rotation).to(device)
        tables = lloyd_max(codec.bits, codec.sphere_dim)
        self._levels, self._thresholds = (torch.tensor(t, dtype=torch.float32, device=device) for t in tables)
        wrap: Callable[..., Callable[..., Tensor]] = torch.compile if compiled else lambda call, **_: call
        self._encode = wrap(self._encoded, dynamic=False)
        self._decode = wrap(self._decoded, dynamic=False)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Payload, uint8 [blocks, bytes], and scales, fp32 [blocks], of x, fp32, a multiple of the block."""
        payload, scales = self._encode(x)
        return payload, scales

    def decode(self, payload: Tensor, scales: Tensor) -> Tensor:
        """The numbers of a code, fp32 [blocks * block]."""
        return self._decode(payload, scales)

    def _encoded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = x.view(-1, self.codec.block) @ self._rotation
        square = (z * z).sum(1)
        u = z * (square / self.codec.block).rsqrt()[:, None]
        index = torch.bucketize(u, self._thresholds, out_int32=True)
        return pack(index, self.codec.bits), square / (z * self._levels[index]).sum(1)

    def _decoded(self, payload: Tensor, scales: Tensor) -> Tensor:
        index = unpack(payload, self.codec.bits, self.codec.block).int()
        return ((self._levels[index] @ self._rotation.T) * scales[:, None]).view(-1)
