"""Linear layers that multiply straight from their codes on a GPU, where few vectors come at once.

A decoder that serves few requests reads every weight once per token, so its time is bytes over bandwidth. Decoding the
weights first would write and read them as numbers; here they are read as the 2 to 4 bits that they are stored in. With
more vectors the product is limited by arithmetic, and decoding first is as good.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tq.infer.layers import QuantizedLinear, layers, put, shared
from tq.infer.product import plain
from tq.quant.codec import Code
from tq.quant.dispatch import codebook
from tq.quant.rotation import rotate
from tq.train.model.gpt import GPT


class DirectLinear(QuantizedLinear):
    """A quantized layer without bias. On a GPU, with up to eight vectors, its weight is never decoded.

    Args:
        code: of shape [O, I], with ``rows=True``; 2, 3 or 4 bits, rotation="hadamard", the Gaussian codebook.
    Raises:
        ValueError: it is another code.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.direct import DirectLinear
        >>> layer = DirectLinear(Codec(bits=4, block=64).encode(torch.randn(8, 128), rows=True))
        >>> layer(torch.ones(2, 128)).shape  # on a CPU it decodes first
        torch.Size([2, 8])
    """

    def __init__(self, code: Code) -> None:
        super().__init__(code)
        if self.codec.bits not in (2, 3, 4) or not plain(self.codec):
            raise ValueError(f"known are 2 to 4 bits, Hadamard rotations and the Gaussian codebook, got {self.codec}")

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return super().forward(x)
        from tq.kernels import gpu_codes

        vectors = x.numel() // x.shape[-1]
        if not 0 < vectors <= gpu_codes.VECTORS:
            return super().forward(x)
        codec, columns = self.codec, -(-x.shape[-1] // self.codec.block) * self.codec.block
        padded = F.pad(x.reshape(vectors, -1).float(), (0, columns - x.shape[-1]))
        rotated = rotate(padded.view(-1, codec.block), codec.rounds, codec.seed).view(vectors, columns)
        levels_L = codebook(codec.bits, str(x.device))[0]
        out = gpu_codes.multiply(self.payload, self.scales, rotated, codec.block, codec.bits, levels_L)
        return out.to(x.dtype).view(*x.shape[:-1], -1)


def direct(model: GPT) -> GPT:
    """The same model, whose quantized layers multiply straight from their codes where they can.

    Args:
        model: a GPT with layers of ``QuantizedLinear``, as ``tq.infer.weights`` makes; layers that cannot are shared.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.direct import direct
        >>> from tq.infer.weights import quantize
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=1, hidden=64, heads=1, vocab=64, seq=32))
        >>> small = quantize(model, Codec(4, 64, "mse"), torch.randint(64, (2, 32)))
        >>> type(direct(small).blocks[0].mlp.down).__name__
        'DirectLinear'
    """
    changed = shared(model)
    for name, layer in list(layers(changed, head=True)):
        if type(layer) is QuantizedLinear and layer.codec.bits in (2, 3, 4) and plain(layer.codec):
            put(changed, name, DirectLinear(layer.code))
    return changed
