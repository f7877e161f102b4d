"""Bits for each linear layer of a model: more where an error changes the predictions more, as many on average.

What rounding a layer's weights changes in the predictions is known to second order: half of the squared error of each
weight, times the squared gradient of the log-probability of tokens that the model itself drew, its Fisher information
(LeCun et al. 1990; Dong et al. 2020). The error that so many bits leave follows from the weights, and from the second
moments of the layer's inputs, as GPTQ corrects some of it: four times less for each bit. So the sum over all layers is
least where the next bit of any of them would gain about the same per weight (Shoham and Gersho 1988). The calibration
texts go through the model forth and back for the gradients, and once more, block by block, for the moments.

Shapes: S sequences, T tokens, V vocabulary, I columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tq.infer.gptq import corrections, prepared
from tq.infer.layers import FIRST, Moments, layers, plain_linear, put, rebuild, shared
from tq.infer.trellis import BITS, DAMPING, loudest_first
from tq.quant.codec import Codec
from tq.train.model.gpt import GPT


def allocate_bits(
    model: GPT,
    codec: Codec,
    calibration_ST: Tensor,
    *,
    mean: float | None = None,
    widths: Sequence[int] = BITS,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, int]:
    """Bits for each linear layer in the blocks, of which a given number is the mean over all weights.

    Args:
        model: a GPT in fp32 with plain layers.
        codec: that ``quantize`` is to use, with other bits.
        calibration_ST: tokens, int64 [S, T].
        mean: bits of a weight on average, at most; None (default) means the codec's.
        widths: bits that a layer may have, each number from the least to the most.
        seed: of the tokens that the model draws.
        progress: called with what is done and with the total, of texts and then of layers.
    Returns:
        {name of a layer: bits}, as ``quantize(..., widths=)`` takes them.
    Raises:
        ValueError: the mean is not between two of the widths, or these leave a number out.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.allocation import allocate_bits
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=2, hidden=64, heads=2, vocab=64, seq=32))
        >>> found = allocate_bits(model, Codec(bits=3, block=64), torch.randint(64, (4, 32)))
        >>> len(found), min(found.values()) >= 2
        (12, True)
    """
    low, high = min(widths, default=0), max(widths, default=0)
    mean = codec.bits if mean is None else mean
    if sorted(widths) != list(range(low, high + 1)) or not low < mean < high:
        raise ValueError(f"widths must be numbers that follow each other, with {mean} between them, got {widths!r}")
    shapes = {name: layer.weight.shape for name, layer in layers(model) if isinstance(layer, nn.Linear)}
    sizes = {name: rows * (-(-columns // codec.block) * codec.block) for name, (rows, columns) in shapes.items()}
    texts, total = len(calibration_ST), len(calibration_ST) + len(sizes)
    gradient = squared_gradients(model, calibration_ST, seed, lambda done: progress(done, total))
    error = _errors(model, codec, calibration_ST, lambda done: progress(texts + done, total))
    return divided({name: gradient[name] * error[name] for name in sizes}, sizes, mean, low, high)


def divided(costs: Mapping[str, float], sizes: Mapping[str, int], mean: float, low: int, high: int) -> dict[str, int]:
    """Bits for which the sum of cost * size * 4**-bits is about the least, with a mean over sizes of at most ``mean``.

    Args:
        costs: of a weight of each layer, at no bits.
        sizes: stored weights of each layer.
        mean, low, high: bits: on average, at least and at most.
    """
    bits, room = dict.fromkeys(costs, low), math.floor((mean - low) * sum(sizes.values()) * (1 + 1e-12))
    while fits := [name for name in costs if bits[name] < high and sizes[name] <= room]:
        best = max(fits, key=lambda name: costs[name] * 4.0 ** -bits[name])
        bits[best], room = bits[best] + 1, room - sizes[best]
    return bits


@torch.enable_grad()
def squared_gradients(
    model: GPT, ids_ST: Tensor, seed: int = 0, progress: Callable[[int], None] = lambda done: None
) -> dict[str, float]:
    """{layer: squared gradient of a text's log-probability, mean over its weights, sum over texts and per token}.

    Tokens are drawn one by one from what the model predicts. So what each adds to a gradient has a mean of zero, and no
    two of them go together: the square of the sum over a text is on average the sum of squares.
    """
    model, generator = shared(model), torch.Generator().manual_seed(seed)
    total: dict[str, float] = {}

    def add(weight: Tensor, name: str) -> None:
        assert weight.grad is not None
        total[name] += float(torch.linalg.vector_norm(weight.grad, dtype=torch.float64)) ** 2 / weight.numel()
        weight.grad = None  # at once, or a second model's worth of gradients would stand in memory

    weights = []
    for name, layer in list(layers(model)):
        made, total[name] = plain_linear(layer.get_parameter("weight").detach()), 0.0
        weights.append(made.weight.requires_grad_())
        made.weight.register_post_accumulate_grad_hook(partial(add, name=name))
        put(model, name, made)
    for done, ids in enumerate(ids_ST, 1):
        logits_TV = model(ids[None])[0][0].float()
        drawn_T = torch.multinomial(logits_TV.detach().softmax(-1), 1, generator=generator)[:, 0]
        F.cross_entropy(logits_TV, drawn_T, reduction="sum").backward(inputs=weights)
        progress(done)
    return {name: value / ids_ST.numel() for name, value in total.items()}


def _errors(
    model: GPT, codec: Codec, calibration_ST: Tensor, progress: Callable[[int], None]
) -> dict[str, float]:
    """{layer: mean squared error of a weight at no bits, less what GPTQ's corrections make good}."""
    found: dict[str, float] = {}
    known: dict[str, Tensor] = {}

    def look(name: str, layer: nn.Linear, moments: Moments) -> nn.Module:
        where, number, inside = name.split(".", 2)
        group = f"{where}.{number}.{FIRST[inside]}"
        w_OI, h_II = prepared(layer.weight, moments(), codec)
        order_I = loudest_first(h_II, codec.block)[1]
        if group not in known:
            known.clear()
            known[group] = corrections(h_II[order_I][:, order_I], DAMPING).diagonal() ** -2
            known[group] /= h_II.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)  # inputs may be zeros
        found[name] = float((known[group] * w_OI[:, order_I].double().square().mean(0)).mean())
        progress(len(found))
        return layer

    rebuild(model, calibration_ST, look)
    return found
