"""Time of one transformer layer's forward pass on one micro-batch: products with weights, attention, everything else.

A GEMM takes the longer of flops / (peak * e_gemm) and bytes / (memory bandwidth * e_hbm). Fused attention computes half
of the scores, as it is causal, and keeps none; its backward pass forms them again, so that it has five products where
the forward one has two [Dao 2023, arXiv:2307.08691, section 3.1]. What is neither runs at the memory's pace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tq.systems.arguments import Real
from tq.systems.layout import Layout
from tq.systems.shape import Transformer

FP16 = 2.0
FLASH_SHARE = 0.6  # of a large GEMM's speed that fused attention reaches; an assumption
FLASH_BACKWARD = 2.5  # time of fused attention's backward pass over that of its forward pass: five products to two


class Rates(NamedTuple):
    """FLOP/s and bytes/s that are reached."""

    flops: Real
    hbm: Real
    intra: Real
    inter: Real


class Forward(NamedTuple):
    """Seconds of a mean layer. last: of gemm, the product whose result nothing in the backward pass needs."""

    gemm: Real
    attention: Real
    rest: Real
    last: Real


def gemm_s(rates: Rates, m: float, k: float, n: float) -> Real:
    """Of a product [m, k] x [k, n] of 16-bit numbers."""
    compute, traffic = 2.0 * m * k * n / rates.flops, FP16 * (m * k + k * n + m * n) / rates.hbm
    if isinstance(compute, float) and isinstance(traffic, float):  # np.maximum of two numbers is slow
        return max(compute, traffic)
    return np.maximum(compute, traffic)


def _experts_s(model: Transformer, layout: Layout, rates: Rates, tokens: float) -> Real:
    """The products of a layer with experts: routed, shared, and the router's."""
    assert model.moe is not None
    h, ups = float(model.hidden), 2 if model.gated else 1
    width, local = model.expert_width / layout.tp, model.moe.count / layout.ep
    # tokens of all ep ranks meet here, spread evenly over this rank's experts
    each = tokens * model.moe.active / local
    routed = local * (gemm_s(rates, each, h, ups * width) + gemm_s(rates, each, width, h))
    if model.moe.shared:
        wide = model.moe.shared * width
        routed = routed + gemm_s(rates, tokens, h, ups * wide) + gemm_s(rates, tokens, wide, h)
    return routed + gemm_s(rates, tokens, h, float(model.moe.count))


def _attention_s(model: Transformer, layout: Layout, rates: Rates, tokens: float, flash: bool) -> Real:
    scores = model.score_flops * tokens / layout.tp
    if flash:  # causal: half of the scores are not computed
        time = scores / 2 / (rates.flops * FLASH_SHARE)
        return time + FP16 * tokens * 2 * (model.q_width + model.kv_width) / layout.tp / rates.hbm
    # scores written and read by the product, the softmax and the dropout: 2 bytes six times, a mask once
    return scores / rates.flops + tokens * model.seq * model.heads * 13.0 / layout.tp / rates.hbm


def _elementwise_bytes(model: Transformer, layout: Layout) -> float:
    """Of a token: norms, residual sums and dropout outside, activation function and rotation inside what tensor
    parallelism splits."""
    h = float(model.hidden)
    visited = 1.0
    if model.moe is not None:
        dense_layers = model.layers - model.moe_layers
        visited = (dense_layers + model.moe_layers * (model.moe.active + model.moe.shared)) / model.layers
    # norms, read and written; residual sums of two inputs, or one of three, with a mask a dropout
    sums, masks = (12.0, 2.0) if model.norms == 2 else (8.0, 2.0)
    outside = 4 * model.norms * h + (sums + (0.0 if model.gated else masks)) * h
    inside = (6.0 if model.gated else 4.0) * model.width * visited + 6.0 * (model.q_width + 2 * model.kv_width) / 3
    outside = outside / layout.tp if layout.sequence_parallel else outside
    if model.moe is not None:  # tokens are copied in the order of their experts and back, whole ones on every rank
        outside += FP16 * 2 * (model.moe.active + 1) * h * model.moe_layers / model.layers
    return outside + inside / layout.tp


def forward(model: Transformer, layout: Layout, rates: Rates, flash: bool) -> Forward:
    """A mean layer on one micro-batch. flash: attention is fused."""
    t, h = layout.tp, float(model.hidden)
    tokens = layout.micro_batch * model.seq / layout.cp
    gemm = gemm_s(rates, tokens, h, (model.q_width + 2 * model.kv_width) / t)
    gemm = gemm + gemm_s(rates, tokens, model.q_width / t, h)
    ups = 2 if model.gated else 1
    dense = (model.layers - model.moe_layers) / model.layers
    last: Real = 0.0
    if dense:
        last = gemm_s(rates, tokens, model.width / t, h)
        gemm = gemm + (gemm_s(rates, tokens, h, ups * model.width / t) + last) * dense
    if model.moe is not None:
        gemm = gemm + _experts_s(model, layout, rates, tokens) * (model.moe_layers / model.layers)
    rest = tokens * _elementwise_bytes(model, layout) / rates.hbm
    return Forward(gemm, _attention_s(model, layout, rates, tokens, flash), rest, last * dense)
