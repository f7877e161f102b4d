"""Keys and values of attention in few bits: each head's vector of a token is a block, coded once and never again.

Softmax does not change when the same number is added to all scores of a query. So q (k - c) serves as well as q k for
any c: *centring* keys by their mean over tokens is exact, and takes away what makes keys large, and with it the error.
(SageAttention, arXiv:2410.02367, smooths keys so.) Nor do scores change when channel d of keys is multiplied by t and
that of queries divided by it: *balancing* with t^2 = rms(q) / rms(k) makes each channel's error count alike
(QServe, arXiv:2405.04532, balances so for integers).

A *matrix* does more than factors: q k = (A^-T q) (A k) for any invertible A. A code that rotates at random and has one
scale per vector errs alike in all directions, in proportion to the vector's square. So the mean squared error of scores
goes as tr(M C_k) tr(M^-1 C_q), with M = A^T A and the covariance C_k of keys and second moment C_q of queries. It is
least where M is the geometric mean of C_k^-1 and C_q, and then (tr (C_k^1/2 C_q C_k^1/2)^1/2)^2. With diagonal matrices
that is balancing. Values have such a matrix too: the output projection stands in the place of queries. Weights of
attention sum to one, so a mean that is taken off values comes back as it is.

The first token is an *attention sink*: most queries give it much of their attention (Xiao et al., arXiv:2309.17453),
so an error of its key weighs as much as those of many others. It is kept exact, which costs one token of a cache.

Shapes: B batch, K key/value heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tq.infer.layers import shared
from tq.quant.codec import Code, Codec
from tq.train.model.gpt import GPT, Attention, CausalAttention


@dataclass(frozen=True, eq=False)
class Statistics:
    """What calibration knows of a layer's keys and values.

    Attributes:
        mean_KD: of keys over tokens, fp32 [K, D].
        balance_KD: factor of each channel, fp32 [K, D]; a pair that a rotary angle turns has one factor.
        weight_KD: what an error of a balanced channel counts, E[(k - mean)^2] E[q^2], fp32 [K, D].
        centred_share_K: share of the keys' squares that is left when they are centred, [K].
        key_matrix_KDD, value_matrix_KDD: what keys and values are multiplied by, fp32 [K, D, D], of determinant one.
        value_mean_KD: of values over tokens, fp32 [K, D].
    """

    mean_KD: Tensor
    balance_KD: Tensor
    weight_KD: Tensor
    centred_share_K: Tensor
    key_matrix_KDD: Tensor
    value_matrix_KDD: Tensor
    value_mean_KD: Tensor


DAMPING = 0.01  # of the mean of its diagonal, added to a covariance: calibration texts are few


@torch.no_grad()
def calibrate(model: GPT, ids_ST: Tensor) -> list[Statistics]:
    """Statistics of each layer's keys, after rotary positions, and values, over calibration texts.

    Matrices and the mean of values are of all tokens but the first, which a cache keeps exact.

    Args:
        model: a GPT.
        ids_ST: tokens, int64 [S, T], at least two a text.
    Raises:
        ValueError: texts are shorter.
    Example:
        >>> import torch
        >>> from tq.infer.kv import calibrate
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=2, hidden=64, heads=1, vocab=64, seq=32))
        >>> [known.mean_KD.shape for known in calibrate(model, torch.randint(64, (2, 32)))]
        [torch.Size([1, 64]), torch.Size([1, 64])]
    """
    if ids_ST.shape[1] < 2:
        raise ValueError(f"texts of two tokens or more calibrate, got {ids_ST.shape[1]}")
    found: dict[nn.Module, list[Tensor]] = {}

    def look(core: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> None:
        q_BHTD, k_BKTD, v_BKTD = (x.double() for x in given)
        q2_KD = q_BHTD.square().mean((0, 2)).view(k_BKTD.shape[1], -1, k_BKTD.shape[3]).mean(1)
        parts = [k_BKTD.mean((0, 2)), k_BKTD.square().mean((0, 2)), q2_KD]
        q_BKVTD, later_BKTD = q_BHTD.unflatten(1, (k_BKTD.shape[1], -1)), v_BKTD[:, :, 1:]
        parts += [_moments(x[..., 1:, :].flatten(2, -2)) for x in (k_BKTD, q_BKVTD, v_BKTD)]
        parts += [k_BKTD[:, :, 1:].mean((0, 2)), later_BKTD.mean((0, 2))]
        found[core] = [a + b for a, b in zip(found[core], parts, strict=True)] if core in found else parts

    hooks = [core.register_forward_pre_hook(look) for core in cores(model)]
    for ids in ids_ST:
        model(ids[None])
    for hook in hooks:
        hook.remove()
    known = []
    for block in model.blocks:
        assert isinstance(block.attention, Attention)
        parts = [x / len(ids_ST) for x in found[block.attention.core]]
        known.append(Statistics(*_channels(*parts[:3]), *_matrices(parts, _weight(block.attention.out).double())))
    return known


def _weight(layer: Any) -> Tensor:
    """[O, I], of a layer that may be quantized."""
    found: Tensor = layer.weight if isinstance(layer, nn.Linear) else layer.decoded()
    return found


def _moments(x_BKND: Tensor) -> Tensor:
    """Mean of x x^T, [K, D, D]."""
    return (x_BKND.transpose(2, 3) @ x_BKND).mean(0) / x_BKND.shape[2]


def _outer(x_KD: Tensor) -> Tensor:
    return x_KD[..., None] * x_KD[:, None]


def least_error(covariance_KDD: Tensor, weight_KDD: Tensor) -> Tensor:
    """A of determinant one with the least tr(A C A^T) tr(A^-T W A^-1): A^T A is the geometric mean of C^-1 and W.

    Args:
        covariance_KDD: C, of what is coded. Symmetric and not negative, fp64 [K, D, D], as is the other.
        weight_KDD: W, what errors count.
    Example:
        >>> import torch
        >>> from tq.infer.kv import least_error
        >>> c, w = torch.diag(torch.tensor([4.0, 1.0])).double(), torch.eye(2).double()
        >>> a = least_error(c[None], w[None])[0]
        >>> (a @ a.T / (a @ a.T)[0, 0]).diagonal().round(decimals=1)  # squares of factors go as 1 : 2
        tensor([1., 2.], dtype=torch.float64)
    """
    c_KDD, w_KDD = (x + DAMPING * _mean_diagonal(x) for x in (covariance_KDD, weight_KDD))
    root_KDD = _root(c_KDD)
    back_KDD = torch.linalg.inv(root_KDD)
    a_KDD = _root(back_KDD @ _root(root_KDD @ w_KDD @ root_KDD) @ back_KDD)
    return a_KDD / (torch.linalg.slogdet(a_KDD)[1] / a_KDD.shape[-1]).exp()[:, None, None]


def _mean_diagonal(x_KDD: Tensor) -> Tensor:
    """The mean of each diagonal, or a small number, times the identity."""
    mean_K = x_KDD.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-12)
    return mean_K[:, None, None] * torch.eye(x_KDD.shape[-1], dtype=x_KDD.dtype, device=x_KDD.device)


def _root(x_KDD: Tensor) -> Tensor:
    """Symmetric square roots of symmetric positive matrices."""
    values_KD, vectors_KDD = torch.linalg.eigh((x_KDD + x_KDD.transpose(1, 2)) / 2)
    return vectors_KDD * values_KD.clamp(min=0).sqrt()[:, None] @ vectors_KDD.transpose(1, 2)


def _channels(mean_KD: Tensor, k2_KD: Tensor, q2_KD: Tensor) -> list[Tensor]:
    """Of ``Statistics``, what needs each channel's mean and squares alone."""
    left_KD = (k2_KD - mean_KD.square()).clamp(min=1e-12)
    pairs = [x.view(len(x), 2, -1).mean(1).repeat(1, 2) for x in (left_KD, q2_KD)]  # of one rotary angle
    balance_KD = (pairs[1].clamp(min=1e-12) / pairs[0]) ** 0.25
    balance_KD = balance_KD / balance_KD.log().mean(1, keepdim=True).exp()
    share_K = left_KD.sum(1) / k2_KD.sum(1)
    return [x.float() for x in (mean_KD, balance_KD, left_KD * q2_KD, share_K)]


def _matrices(parts: Sequence[Tensor], out_ED: Tensor) -> list[Tensor]:
    """Of ``Statistics``, what needs more than each channel alone.

    parts: first the mean of keys, and last, of all tokens but the first, second moments of keys, queries and values,
        and means of keys and values.
    """
    k2_KDD, q2_KDD, v2_KDD, key_KD, value_KD = parts[-5:]
    off_KD = key_KD - parts[0]  # as keys are centred by the mean of all
    out_KDE = out_ED.T.reshape(len(value_KD), -1, value_KD.shape[1], len(out_ED))  # of each head that reads values
    of_out_KDD = (out_KDE @ out_KDE.transpose(2, 3)).sum(1)
    key_KDD = least_error(k2_KDD - _outer(key_KD) + _outer(off_KD), q2_KDD)
    value_KDD = least_error(v2_KDD - _outer(value_KD), of_out_KDD)
    return [x.float() for x in (key_KDD, value_KDD, value_KD)]


def cores(model: GPT) -> list[nn.Module]:
    """The modules of a GPT that see q, k and v, one of each layer."""
    return [block.attention.core for block in model.blocks if isinstance(block.attention, Attention)]


@dataclass(frozen=True, eq=False)
class Coder:
    """Codes of keys, or of values, of one layer.

    Args:
        codec: of each head's vector of a token, or of what is left of it; its block is at least that long.
        mean_KD: taken off before and added after; None for none.
        factor_KD: multiplied before and divided after; None for none.
        fine: codec of the channels that are coded apart, with more bits; None for none.
        order_KD: int64 [K, D], the channels, those of ``fine`` first, as many as its block is long.
        sinks: first tokens of a sequence that are kept exact.
        matrix_KDD: multiplied before, and its inverse after, in fp32; in the place of ``factor_KD`` and ``fine``. None
            for none.
    Raises:
        ValueError: a matrix comes with factors or with channels apart.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.kv import Coder
        >>> Coder(Codec(bits=4, block=64))(torch.randn(1, 2, 10, 64)).shape
        torch.Size([1, 2, 10, 64])
    """

    codec: Codec
    mean_KD: Tensor | None = None
    factor_KD: Tensor | None = None
    fine: Codec | None = None
    order_KD: Tensor | None = None
    sinks: int = 0
    matrix_KDD: Tensor | None = None

    def __post_init__(self) -> None:
        if self.matrix_KDD is not None and not (self.factor_KD is None and self.fine is None):
            raise ValueError("a matrix takes the place of factors and of channels coded apart")

    @cached_property
    def inverse_KDD(self) -> Tensor | None:
        """Of ``matrix_KDD``."""
        return None if self.matrix_KDD is None else torch.linalg.inv(self.matrix_KDD.double()).float()

    def parts(self, x_BKTD: Tensor) -> tuple[Tensor, ...]:
        """Payload and scales of x_BKTD, each [B, K, T, bytes or blocks]; twice where channels are coded apart."""
        if self.matrix_KDD is not None:
            x_BKTD = x_BKTD.float()
        if self.mean_KD is not None:
            x_BKTD = x_BKTD - self.mean_KD[:, None].to(x_BKTD)
        if self.matrix_KDD is not None:
            x_BKTD = _multiplied(x_BKTD, self.matrix_KDD)
        if self.factor_KD is not None:
            x_BKTD = x_BKTD * self.factor_KD[:, None].to(x_BKTD)
        if self.fine is None:
            return _stored(self.codec, x_BKTD)
        assert self.order_KD is not None
        sorted_BKTD = x_BKTD.gather(3, self.order_KD[None, :, None].expand(x_BKTD.shape))
        fine, coarse = sorted_BKTD.tensor_split([self.fine.block], 3)
        return *_stored(self.fine, fine), *_stored(self.codec, coarse)

    def whole(self, parts: tuple[Tensor, ...], size: int, dtype: torch.dtype) -> Tensor:
        """What was coded as ``parts``, nearly: [B, K, T, D] of ``dtype``; size: D."""
        if self.inverse_KDD is not None:
            x_BKTD = _multiplied(_restored(self.codec, parts, size, torch.float32), self.inverse_KDD)
        elif self.fine is None:
            x_BKTD = _restored(self.codec, parts, size, dtype)
        else:
            assert self.order_KD is not None
            fine = _restored(self.fine, parts[:2], self.fine.block, dtype)
            coarse = _restored(self.codec, parts[2:], size - self.fine.block, dtype)
            sorted_BKTD = torch.cat([fine, coarse], 3)
            x_BKTD = torch.empty_like(sorted_BKTD)
            x_BKTD.scatter_(3, self.order_KD[None, :, None].expand(x_BKTD.shape), sorted_BKTD)
        if self.factor_KD is not None:
            x_BKTD = x_BKTD / self.factor_KD[:, None].to(x_BKTD)
        if self.mean_KD is not None:
            x_BKTD = x_BKTD + self.mean_KD[:, None].to(x_BKTD)
        return x_BKTD.to(dtype)

    def __call__(self, x_BKTD: Tensor) -> Tensor:
        first, rest = x_BKTD.tensor_split([self.sinks], 2)
        if not rest.shape[2]:
            return first.clone()
        return torch.cat([first, self.whole(self.parts(rest), x_BKTD.shape[-1], x_BKTD.dtype)], 2)

    def bytes_per_vector(self, size: int) -> int:
        """Stored bytes of a head's vector of ``size`` numbers."""
        if self.fine is None:
            return self.codec.block_bytes * -(-size // self.codec.block)
        left = size - self.fine.block
        return self.fine.block_bytes + self.codec.block_bytes * -(-left // self.codec.block)


def _multiplied(x_BKTD: Tensor, matrix_KDD: Tensor) -> Tensor:
    """A x of each vector, in fp32 whatever is around."""
    with torch.autocast(x_BKTD.device.type, enabled=False):
        return x_BKTD @ matrix_KDD.to(x_BKTD.device).transpose(1, 2)


def _stored(codec: Codec, x_BKTD: Tensor) -> tuple[Tensor, Tensor]:
    code = codec.encode(x_BKTD, rows=True)
    return code.payload.view(*x_BKTD.shape[:3], -1), code.scales.view(*x_BKTD.shape[:3], -1)


def _restored(codec: Codec, parts: tuple[Tensor, ...], size: int, dtype: torch.dtype) -> Tensor:
    payload, scales = parts
    shape = (*payload.shape[:3], size)
    return codec.decode(Code(codec, shape, dtype, payload.reshape(-1, codec.packed_bytes), scales.reshape(-1), True))


def coders(
    keys: Codec | None, values: Codec | None, statistics: Sequence[Statistics], *, centred: bool = True,
    balanced: bool | str = "matrix", fine: Codec | None = None, sinks: int = 1,
) -> list[tuple[Coder | None, Coder | None]]:  # fmt: skip
    """(of keys, of values) of each layer, with seeds of their own; None leaves them as they are.

    Args:
        keys, values: codecs; None for exact ones.
        statistics: from ``calibrate``.
        centred: take the mean off keys; with a matrix always.
        balanced: "matrix" (default): keys and values are multiplied by a matrix for each head, and the mean of values
            is taken off; True: keys by a factor for each channel; False: neither. Both are for caches with ``sinks``:
            without, factors raised the KL of a pretrained model's keys and a matrix that of its values
            (``notebooks/kv-cache.ipynb``), as its first token is unlike all others.
        fine: codec of the keys' channels that count most, as many as its block is long (rotation="haar" takes any
            length); ``keys`` is then of the others. None (default) codes all alike. Not with a matrix.
        sinks: first tokens of a sequence whose keys and values are kept exact.
    Raises:
        ValueError: there is no such ``balanced``, or a matrix comes with ``fine`` or without ``centred``.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.kv import calibrate, coders
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=1, hidden=64, heads=1, vocab=64, seq=32))
        >>> (keys, values), = coders(Codec(4, 64), None, calibrate(model, torch.randint(64, (2, 32))))
        >>> keys(torch.randn(1, 1, 32, 64)).shape, values
        (torch.Size([1, 1, 32, 64]), None)
    """
    if balanced not in (True, False, "matrix"):
        raise ValueError(f"balanced must be 'matrix', True or False, got {balanced!r}")
    mixed = balanced == "matrix"
    if mixed and (fine or not centred):
        raise ValueError("a matrix is of centred keys, with all channels alike: balanced must be True or False")
    made = []
    for layer, known in enumerate(statistics):
        mean, balance = known.mean_KD if centred else None, known.balance_KD if balanced and not mixed else None
        of_keys, of_values = (known.key_matrix_KDD, known.value_matrix_KDD) if mixed else (None, None)
        offset = known.value_mean_KD if mixed else None
        own = fine.derive("fine keys", layer) if fine else None
        order = known.weight_KD.argsort(1, descending=True) if fine else None
        key = Coder(keys.derive("keys", layer), mean, balance, own, order, sinks, of_keys) if keys else None
        value = Coder(values.derive("values", layer), offset, sinks=sinks, matrix_KDD=of_values) if values else None
        made.append((key, value))
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
    """Stored bytes of a token's keys and values over all layers.

    Args:
        model: a GPT.
        keys, values: codecs; None for exact ones.
        plain_bytes: of an exact number.
    Example:
        >>> from tq import Codec
        >>> from tq.infer.kv import bytes_per_token
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=2, hidden=128, heads=2, vocab=64, seq=32))
        >>> bytes_per_token(model, None, None), bytes_per_token(model, Codec(4, 64), Codec(4, 64))
        (1024, 288)
    """
    config = model.config
    size = config.head_size
    each = [c.block_bytes * -(-size // c.block) if c else plain_bytes * size for c in (keys, values)]
    return config.layers * config.groups * sum(each)
