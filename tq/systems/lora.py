"""Parameters of low-rank adapters: a product of width d by width k gets r (d + k) numbers beside its d k.

Source: Hu et al. 2021 (arXiv:2106.09685), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from tq.systems.arguments import instance, one_of, positive_int
from tq.systems.shape import Transformer

MATRICES = ("q", "k", "v", "o")  # of attention


def adapter_parameters(d: int, k: int, rank: int) -> int:
    """r (d + k), of the two factors of one product."""
    for name, value in (("d", d), ("k", k), ("rank", rank)):
        positive_int(name, value)
    return rank * (d + k)


def adapter_factor(d: int, k: int, rank: int) -> float:
    """How many times fewer they are than the product's own, d k / (r (d + k))."""
    return d * k / adapter_parameters(d, k, rank)


def lora_parameters(model: Transformer, rank: int, matrices: Sequence[str] = MATRICES) -> int:
    """Of adapters on these products of attention in every layer."""
    instance("model", model, Transformer)
    for name in matrices:
        one_of("matrices", name, MATRICES)
    widths = {"q": model.q_width, "k": model.kv_width, "v": model.kv_width, "o": model.q_width}
    return model.layers * sum(adapter_parameters(model.hidden, widths[name], rank) for name in matrices)
