"""Other codes of keys and values, what the codec's are measured beside. Each maps [B, K, T, D] to what it decodes to.

All tokens are coded at once: the window of late tokens that some methods keep exact is left out for all of them alike.

Shapes: B batch, K key/value heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tq.infer.kv import Coder, cores
from tq.quant.codec import Codec
from tq.quant.inner_product import ProdCodec
from tq.train.model.gpt import GPT, apply_rope

Code = Callable[[Tensor], Tensor]
OUTLIERS = 0.01  # share of a vector that KVQuant keeps


RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)  # parts of a vector's range that a search tries


def _integers(x: Tensor, bits: int, dim: int, ranges: Sequence[float] = (1.0,)) -> Tensor:
    """Integers with a step and a zero point in fp16 for each vector along a dimension.

    ranges: parts of the range that are tried, about its middle; what is outside is clipped, and the least squared error
    of a vector wins.
    """
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    best, least = x, torch.full_like(low, torch.inf)
    for part in ranges:
        step = (part * (high - low) / (2**bits - 1)).half().float().clamp(min=1e-7)
        start = (low + (1 - part) / 2 * (high - low)).half().float()
        found = ((x - start) / step).round().clamp(0, 2**bits - 1) * step + start
        error = (found - x).square().sum(dim, keepdim=True)
        best, least = torch.where(error < least, found, best), torch.minimum(error, least)
    return best


@dataclass(frozen=True)
class PerToken:
    """Integers for each head's vector of a token, as FlexGen's and KIVI's of values (arXiv:2402.02750)."""

    bits: int

    def stored(self, size: int) -> float:
        """Bits per number."""
        return self.bits + 32 / size

    def __call__(self, x_BKTD: Tensor) -> Tensor:
        return _integers(x_BKTD, self.bits, 3)


@dataclass(frozen=True)
class PerChannel:
    """Integers for each channel of a group of tokens, as KIVI's of keys (arXiv:2402.02750)."""

    bits: int
    group: int = 32
    ranges: tuple[float, ...] = (1.0,)

    def stored(self, size: int) -> float:
        """Bits per number."""
        return self.bits + 32 / self.group

    def __call__(self, x_BKTD: Tensor) -> Tensor:
        parts = x_BKTD.split(self.group, 2)
        return torch.cat([_integers(part, self.bits, 2, self.ranges) for part in parts], 2)


@dataclass(frozen=True)
class Fp8:
    """E4M3, as it is or with a scale in fp16 for each head's vector of a token, which makes its largest number 448."""

    scaled: bool = False

    def stored(self, size: int) -> float:
        """Bits per number."""
        return 8 + 16 / size * self.scaled

    def __call__(self, x_BKTD: Tensor) -> Tensor:
        scale = torch.ones(())
        if self.scaled:
            scale = (x_BKTD.abs().amax(3, keepdim=True) / 448).half().float().clamp(min=1e-7)
        return (x_BKTD / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x_BKTD.dtype) * scale


@dataclass(frozen=True, eq=False)
class ExactAt:
    """Another code, of all tokens but one, the first as KVQuant's (arXiv:2401.18079): its neighbour stands in its
    place, so that the token widens no group's range."""

    code: Any
    place: int = 0

    def stored(self, size: int) -> float:
        """Bits per number of all tokens but the exact one."""
        return stored_bits(self.code, self.code, size)

    def __call__(self, x_BKTD: Tensor) -> Tensor:
        at = self.place
        rest = x_BKTD.clone()
        rest[:, :, at] = x_BKTD[:, :, at + 1]
        found = self.code(rest)
        found[:, :, at] = x_BKTD[:, :, at]
        return found


def first_exact(code: Any) -> Any:
    """The same code that keeps the first token as it is."""
    return replace(code, sinks=1) if isinstance(code, Coder) else ExactAt(code)


@dataclass(frozen=True)
class Product:
    """TurboQuant's own code for inner products (arXiv:2504.19874): levels, and a bit of each number's rest."""

    bits: int

    def stored(self, size: int) -> float:
        """Bits per number."""
        return self.bits + 64 / size

    def __call__(self, x_BKTD: Tensor) -> Tensor:
        codec = ProdCodec(self.bits, x_BKTD.shape[-1])
        return codec.decode(codec.encode(x_BKTD.reshape(-1, x_BKTD.shape[-1]))).view_as(x_BKTD)


@dataclass(frozen=True, eq=False)
class BeforeRotary:
    """Keys as they are before rotary positions, per channel, on levels learnt from calibration texts, with the largest
    of each vector kept exact: as KVQuant's (arXiv:2401.18079), without its weighting by gradients.

    Attributes:
        bits: of each number.
        offset_KD, scale_KD: of each channel, from calibration; fp32 [K, D].
        levels_L: of what is left, ascending, fp32 [2**bits].
        cos_TD, sin_TD: of all places, fp32 [T', D / 2].
        outliers: share of each vector that is kept in fp16, with 16 bits for where it is.
    """

    bits: int
    offset_KD: Tensor
    scale_KD: Tensor
    levels_L: Tensor
    cos_TD: Tensor
    sin_TD: Tensor
    outliers: float = OUTLIERS

    def stored(self, size: int) -> float:
        """Bits per number."""
        return self.bits + 32 * _outliers(size, self.outliers) / size

    def __call__(self, x_BKTD: Tensor) -> Tensor:
        length = x_BKTD.shape[2]
        cos, sin = self.cos_TD[:length], self.sin_TD[:length]
        back = apply_rope(x_BKTD.transpose(1, 2), cos, -sin).transpose(1, 2)
        z = (back - self.offset_KD[:, None]) / self.scale_KD[:, None]
        found = self.levels_L[torch.bucketize(z.contiguous(), (self.levels_L[1:] + self.levels_L[:-1]) / 2)]
        kept = z.abs().topk(_outliers(z.shape[-1], self.outliers), dim=3).indices
        found = found.scatter(3, kept, z.gather(3, kept).half().float())
        back = found * self.scale_KD[:, None] + self.offset_KD[:, None]
        return apply_rope(back.transpose(1, 2), cos, sin).transpose(1, 2)


@torch.no_grad()
def before_rotary(model: GPT, ids_ST: Tensor, bits: int, skipped: int = 0) -> list[BeforeRotary]:
    """Of each layer, learnt on calibration texts; levels from what is not kept as an outlier.

    Args:
        model: a GPT.
        ids_ST: tokens, int64 [S, T].
        bits: of each number.
        skipped: first tokens of each text that are left out, as they will not be coded.
    """
    found: dict[Any, list[Tensor]] = {core: [] for core in cores(model)}
    cos, sin = model.cos[: ids_ST.shape[1]], model.sin[: ids_ST.shape[1]]

    def look(core: Any, given: tuple[Tensor, ...]) -> None:
        found[core].append(apply_rope(given[1].transpose(1, 2), cos, -sin)[0, skipped:])  # [T, K, D]

    hooks = [core.register_forward_pre_hook(look) for core in found]
    for ids in ids_ST:
        model(ids[None])
    for hook in hooks:
        hook.remove()
    made = []
    for keys in found.values():
        k_TKD = torch.cat(keys)
        offset_KD, scale_KD = k_TKD.mean(0), k_TKD.std(0).clamp(min=1e-6)
        z_TKD = (k_TKD - offset_KD) / scale_KD
        kept = z_TKD.abs().topk(_outliers(z_TKD.shape[2], OUTLIERS), dim=2).indices
        inside = torch.ones_like(z_TKD, dtype=torch.bool).scatter(2, kept, False)
        made.append(BeforeRotary(bits, offset_KD, scale_KD, _learnt(z_TKD[inside], bits), model.cos, model.sin))
    return made


def _outliers(size: int, share: float) -> int:
    """Numbers of a vector that are kept exact."""
    return max(1, round(share * size))


def _learnt(values: Tensor, bits: int, rounds: int = 30) -> Tensor:
    """Lloyd's levels of a sample, from its quantiles on."""
    sample = values[:: max(1, len(values) // 50_000)].sort().values
    levels = sample[((torch.arange(2**bits) + 0.5) / 2**bits * len(sample)).long()]
    for _ in range(rounds):
        cell = torch.bucketize(sample, (levels[1:] + levels[:-1]) / 2)
        count = torch.bincount(cell, minlength=len(levels))
        mean = torch.bincount(cell, sample, minlength=len(levels)) / count.clamp(min=1)
        levels = torch.where(count > 0, mean.float(), levels).sort().values
    return levels


def stored_bits(key: Any | None, value: Any | None, size: int) -> float:
    """Stored bits per number, of keys and values together: of a ``Coder``, of those here, of 16 for None."""
    each = []
    for one in (key, value):
        if one is None:
            each.append(16.0)
        elif hasattr(one, "bytes_per_vector"):
            each.append(8 * one.bytes_per_vector(size) / size)
        else:
            each.append(one.stored(size))
    return sum(each) / 2


def split_codecs(bits: int, extra: int, channels: int, size: int, search: int = 1) -> tuple[Codec, Codec]:
    """(of the other channels, of those with ``extra`` more bits), for heads of a size."""
    coarse = Codec(bits, size - channels, "mse", search=search, rotation="haar", scale_dtype=torch.bfloat16)
    return coarse, replace(coarse, bits=bits + extra, block=channels)


def biased(code: Code | None, offset_KD: Tensor) -> Code:
    """A code of keys that all have a constant more, and that give it back: what a model with a bias of keys stores."""

    def coded(x_BKTD: Tensor) -> Tensor:
        shifted = x_BKTD + offset_KD[:, None]
        return (shifted if code is None else code(shifted)) - offset_KD[:, None]

    return coded


def pairs(keys: Sequence[Any | None] | None, values: Sequence[Any | None] | None, layers: int) -> list[Any]:
    """(of keys, of values) of each layer; None for exact ones."""
    nothing = [None] * layers
    return list(zip(keys or nothing, values or nothing, strict=True))
