"""Keys and values of attention in few bits: each head's vector of a token is a block, coded once and never again.

Softmax does not change when the same number is added to all scores of a query. So q (k - c) serves as well as q k for
any c: *centring* keys by their mean over tokens is exact, and takes away what makes keys large, and with it the error.
(SageAttention, arXiv:2410.02367, smooths keys so.) Nor do scores change when channel d of keys is multiplied by t and
that of queries divided by it: *balancing* with t^2 = rms(q) / rms(k) makes each channel's error count alike
(QServe, arXiv:2405.04532, balances so for integers). Values need neither.

Shapes: B batch, K key/value heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tq.infer.weights import shared
from tq.quant.codec import Code, Codec
from tq.train.model.gpt import GPT, Attention, CausalAttention


@dataclass(frozen=True, eq=False)
class Statistics:
    """What calibration knows of a layer's keys.

    Attributes:
        mean_KD: of keys over tokens, fp32 [K, D].
        balance_KD: factor of each channel, fp32 [K, D]; a pair that a rotary angle turns has one factor.
        centred_share_K: share of the keys' squares that is left when they are centred, [K].
    """

    mean_KD: Tensor
    balance_KD: Tensor
    centred_share_K: Tensor


@torch.no_grad()
def calibrate(model: GPT, ids_ST: Tensor) -> list[Statistics]:
    """Statistics of each layer's keys, after rotary positions, over calibration texts.

    Args:
        model: a GPT.
        ids_ST: tokens, int64 [S, T].
    """
    found: dict[nn.Module, list[Tensor]] = {}

    def look(core: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> None:
        q_BHTD, k_BKTD = (x.double() for x in given[:2])
        q2_KD = q_BHTD.square().mean((0, 2)).view(k_BKTD.shape[1], -1, k_BKTD.shape[3]).mean(1)
        parts = [k_BKTD.mean((0, 2)), k_BKTD.square().mean((0, 2)), q2_KD]
        found[core] = [a + b for a, b in zip(found[core], parts, strict=True)] if core in found else parts

    hooks = [core.register_forward_pre_hook(look) for core in cores(model)]
    for ids in ids_ST:
        model(ids[None])
    for hook in hooks:
        hook.remove()
    return [_statistics(*(x / len(ids_ST) for x in found[core])) for core in cores(model)]


def _statistics(mean_KD: Tensor, k2_KD: Tensor, q2_KD: Tensor) -> Statistics:
    left_KD = (k2_KD - mean_KD.square()).clamp(min=1e-12)
    pairs = [x.view(len(x), 2, -1).mean(1).repeat(1, 2) for x in (left_KD, q2_KD)]  # of one rotary angle
    balance_KD = (pairs[1].clamp(min=1e-12) / pairs[0]) ** 0.25
    balance_KD = balance_KD / balance_KD.log().mean(1, keepdim=True).exp()
    return Statistics(mean_KD.float(), balance_KD.float(), (left_KD.sum(1) / k2_KD.sum(1)).float())


def cores(model: GPT) -> list[nn.Module]:
    """The modules of a GPT that see q, k and v, one of each layer."""
    return [block.attention.core for block in model.blocks if isinstance(block.attention, Attention)]


@dataclass(frozen=True, eq=False)
class Coder:
    """Codes of keys, or of values, of one layer.

    Attributes:
        codec: of each head's vector of a token; its block is at least the head size.
        mean_KD: taken off before and added after; None for none.
        factor_KD: multiplied before and divided after; None for none.
    """

    codec: Codec
    mean_KD: Tensor | None = None
    factor_KD: Tensor | None = None

    def encode(self, x_BKTD: Tensor) -> Code:
        """The code of [B, K, T, D], rows apart."""
        if self.mean_KD is not None:
            x_BKTD = x_BKTD - self.mean_KD[:, None].to(x_BKTD)
        if self.factor_KD is not None:
            x_BKTD = x_BKTD * self.factor_KD[:, None].to(x_BKTD)
        return self.codec.encode(x_BKTD, rows=True)

    def decode(self, code: Code) -> Tensor:
        """What was encoded, nearly: [B, K, T, D]."""
        x_BKTD = self.codec.decode(code)
        if self.factor_KD is not None:
            x_BKTD = x_BKTD / self.factor_KD[:, None].to(x_BKTD)
        if self.mean_KD is not None:
            x_BKTD = x_BKTD + self.mean_KD[:, None].to(x_BKTD)
        return x_BKTD

    def __call__(self, x_BKTD: Tensor) -> Tensor:
        return self.decode(self.encode(x_BKTD))


def coders(
    keys: Codec | None, values: Codec | None, statistics: Sequence[Statistics], *, centred: bool = True,
    balanced: bool = True,
) -> list[tuple[Coder | None, Coder | None]]:  # fmt: skip
    """(of keys, of values) of each layer, with seeds of their own; None leaves them as they are.

    Args:
        keys, values: codecs; None for exact ones.
        statistics: from ``calibrate``.
        centred, balanced: what is done to keys.
    """
    made = []
    for layer, known in enumerate(statistics):
        parts = known.mean_KD if centred else None, known.balance_KD if balanced else None
        key = Coder(keys.derive("keys", layer), *parts) if keys else None
        made.append((key, Coder(values.derive("values", layer)) if values else None))
    return made


class CodedAttention(CausalAttention):
    """Attention of all tokens at once to keys and values that were coded first, as a cache would hold them.

    Args:
        keys, values: from [B, K, T, D] to the same; None for as they are.
    """

    def __init__(self, keys: Any | None, values: Any | None) -> None:
        super().__init__()
        self.keys, self.values = keys, values

    def forward(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        k_BKTD = k_BKTD if self.keys is None else self.keys(k_BKTD).to(k_BKTD)
        v_BKTD = v_BKTD if self.values is None else self.values(v_BKTD).to(v_BKTD)
        return super().forward(q_BHTD, k_BKTD, v_BKTD)


def with_coded_attention(model: GPT, made: Sequence[tuple[Any | None, Any | None]]) -> GPT:
    """The same weights, with (keys, values) of each layer coded on their way into attention.

    Args:
        model: a GPT.
        made: of each layer, as ``coders`` gives, or any functions from [B, K, T, D] to the same.
    Raises:
        ValueError: there are more or fewer than layers.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.kv import calibrate, coders, with_coded_attention
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=1, hidden=64, heads=1, vocab=64, seq=32))
        >>> ids = torch.randint(64, (2, 32))
        >>> coded = with_coded_attention(model, coders(Codec(4, block=64), Codec(3, block=64), calibrate(model, ids)))
        >>> coded(ids)[0].shape
        torch.Size([2, 32, 64])
    """
    if len(made) != len(model.blocks):
        raise ValueError(f"one pair for each of {len(model.blocks)} layers, got {len(made)}")
    changed = shared(model)
    for block, (keys, values) in zip(changed.blocks, made, strict=True):
        assert isinstance(block.attention, Attention)
        block.attention.core = CodedAttention(keys, values)
    return changed


def bytes_per_token(model: GPT, keys: Codec | None, values: Codec | None, plain_bytes: int = 2) -> float:
    """Stored bytes of a token's keys and values over all layers; exact ones take ``plain_bytes`` a number."""
    config = model.config
    size = config.head_size
    each = [c.block_bytes * -(-size // c.block) if c else plain_bytes * size for c in (keys, values)]
    return config.layers * config.groups * sum(each)
