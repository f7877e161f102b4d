"""Attention whose scores are never whole: tile by tile with a running maximum and sum, and the bytes of both ways.

Source: FlashAttention (Dao et al. 2022), after the online softmax of Milakov & Gimelshein 2018. In plain PyTorch: it
shows what is stored and moved, not how fast a kernel is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Traffic:
    """Bytes to and from memory, as if a tile's work stayed in fast memory; peak: most of scores held at once."""

    moved: int = 0
    peak: int = 0

    def move(self, *tensors: Tensor) -> None:
        """These pass between slow and fast memory."""
        self.moved += sum(x.numel() * x.element_size() for x in tensors)

    def hold(self, *tensors: Tensor) -> None:
        """So much is held at once."""
        self.peak = max(self.peak, sum(x.numel() * x.element_size() for x in tensors))


def plain(q: Tensor, k: Tensor, v: Tensor, traffic: Traffic) -> Tensor:
    """Causal attention [T, D] that writes its scores and their softmax [T, T]."""
    scores = q @ k.T / math.sqrt(q.shape[1])
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    traffic.move(q, k, scores)
    weights = scores.softmax(1)
    traffic.move(scores, weights)
    out = weights @ v
    traffic.move(weights, v, out)
    traffic.hold(scores, weights)
    return out


def tiled(q: Tensor, k: Tensor, v: Tensor, traffic: Traffic, rows: int = 64, columns: int = 64) -> Tensor:
    """The same function, in tiles: for each run of queries the keys come by, and a sum is corrected as maxima rise."""
    out = torch.empty_like(q)
    for first in range(0, len(q), rows):
        mine = q[first : first + rows]
        top = torch.full((len(mine), 1), -math.inf, dtype=q.dtype)
        total, mixed = torch.zeros_like(top), torch.zeros_like(mine)
        traffic.move(mine)
        for start in range(0, first + len(mine), columns):
            keys, values = k[start : start + columns], v[start : start + columns]
            scores = mine @ keys.T / math.sqrt(q.shape[1])
            later = torch.arange(start, start + len(keys)) > torch.arange(first, first + len(mine))[:, None]
            scores = scores.masked_fill(later, -math.inf)
            highest = torch.maximum(top, scores.amax(1, keepdim=True))
            weights, shrink = (scores - highest).exp(), (top - highest).exp()
            total, top = total * shrink + weights.sum(1, keepdim=True), highest
            mixed = mixed * shrink + weights @ values
            traffic.move(keys, values)
            traffic.hold(scores, weights, mixed)
        out[first : first + rows] = mixed / total
        traffic.move(mixed)
    return out


def longest(budget: int, head_size: int, way: str, element: int = 4) -> int:
    """The most tokens whose q, k, v, output and what is held of their scores fit in so many bytes; 0 if none do."""
    if way not in ("plain", "tiled"):
        raise ValueError(f"way must be plain or tiled, got {way!r}")

    def fits(n: int) -> bool:
        held = 2 * n * n if way == "plain" else 2 * 64 * 64 + 64 * head_size
        return element * (4 * n * head_size + held) <= budget

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
