"""What codes of vectors keep: the bias that no number of seeds averages out, and states of a small GPT to search among.

Vectors are rows, fp32. Nothing is recorded here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tq.quant import vectors
from tq.quant.codec import Codec
from tq.quant.inner_product import ProdCodec
from tq.train.model import GPT, PRESETS, Corpus, TrainConfig, Trainer


def roundtrip(codec: Codec, x: Tensor, impl: str = "auto") -> Tensor:
    """What the codec makes of `x`."""
    return codec.decode(codec.encode(x, impl=impl), impl=impl)


def squared_bias(
    x: Tensor, seeds: int, groups: int = 20, impl: str = "auto", **settings: Any
) -> tuple[float, float]:
    """Estimate of |E y - x|^2 / |x|^2 over the codec's seeds, and its standard error (jackknife over groups of seeds).

    Products of the means of different groups only, so that the noise of a mean does not count as bias: for an unbiased
    codec the estimate scatters about zero. settings: the codec's. ValueError for seeds that do not fill the groups.
    """
    if groups < 3 or seeds < groups or seeds % groups:
        raise ValueError(f"seeds={seeds}, groups={groups}: at least 3 groups, seeds a multiple of them")
    means = torch.zeros(groups, x.numel(), dtype=torch.float64)
    for s in range(seeds):
        means[s % groups] += (roundtrip(Codec(seed=s, **settings), x, impl) - x).double() / (seeds // groups)
    gram = means @ means.T / x.double().square().sum()
    off = gram.sum() - gram.trace()
    without = off - 2 * (gram.sum(1) - gram.diagonal())  # each group left out in turn
    estimates = without / ((groups - 1) * (groups - 2))
    return float(off / (groups * (groups - 1))), float(estimates.std() * (groups - 1) / groups**0.5)


def coders(x: Tensor, bits: int, train: int, impl: str = "auto") -> dict[str, Callable[[], Tensor]]:
    """{code: what it makes of the vectors `x`}; product quantization learns from the first `train` of them."""

    def stored(scale: str, search: int = 1) -> Tensor:
        return roundtrip(Codec(bits, x.shape[1], scale, 1, search), x, impl)

    product = ProdCodec(bits, x.shape[1])
    return {
        "TurboQuant mse": partial(stored, "paper"),
        "same, least-squares scale": partial(stored, "mse"),
        "TurboQuant prod": lambda: product.decode(product.encode(x)),
        "EDEN scale": partial(stored, "unbiased"),
        "EDEN scale + search": partial(stored, "unbiased", 17),
        "RaBitQ": lambda: vectors.unbiased_decode(x, vectors.uniform_half(bits), 0, "hadamard"),
        "PQ": lambda: vectors.ProductQuantizer(8 // bits, 5).fit(x[:train]).roundtrip(x),
    }


def hidden_states(
    corpus: Corpus, steps: int, counts: Sequence[int], seed: int = 0, device: str = "cpu"
) -> list[Tensor]:
    """Unit vectors [count, d] of the last norm of a GPT trained for `steps`: of training files, then of held-out ones.

    Positions from 32 on, which have something to look back at.
    """
    run = Trainer(GPT(PRESETS["tiny"], seed=seed), corpus, TrainConfig(steps, 16, lr=2e-3, seed=seed), device)
    run.train(progress=False)
    seen: list[Tensor] = []
    run.model.final_norm.register_forward_hook(lambda module, given, out: seen.append(out[:, 32:]))
    parts = []
    for split, count in zip(("train", "valid"), counts, strict=True):
        seen.clear()
        with torch.no_grad():
            while sum(out[..., 0].numel() for out in seen) < count:
                run.loss(len(seen), split, seed=1)
        parts.append(F.normalize(torch.cat(seen).flatten(0, 1)[:count], dim=1).cpu())
    return parts
