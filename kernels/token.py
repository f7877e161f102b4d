"""Numba kernels for what a decoder does between two products, with one token: norms, rotations, attention.

Vectors come out as ``matvec`` reads them: rotated block by block, in its order, in fp32 or as 8-bit integers.

Shapes: I width, N blocks, B block size, R rounds; H heads, K key/value heads, D head size, T tokens so far.
"""

from __future__ import annotations

import math

import numba
import numpy as np

_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}, "cache": True}
_inline = numba.njit(**_OPTIONS)


@_inline
def _transform(x):
    """Walsh-Hadamard transform of a block, in place, not normalised."""
    half = 1
    while half < x.size:
        for start in range(0, x.size, 2 * half):
            for i in range(start, start + half):
                a, b = x[i], x[i + half]
                x[i], x[i + half] = a + b, a - b
        half *= 2


@_inline
def _turned(x, signs):
    """Blocks of a vector rotated, in place: signs, fp32 [R, B]."""
    rounds, block = signs.shape
    factor = np.float32(1.0 / math.sqrt(block))
    for first in range(0, x.size, block):
        part = x[first : first + block]
        for r in range(rounds):
            for i in range(block):
                part[i] *= signs[r, i] * factor
            _transform(part)


@_inline
def _laid_out(x, lanes, out):
    """Of each 64 numbers, lane i of ``lanes`` takes those from 64 / lanes * i on, one register after the other."""
    each = 64 // lanes
    for run in range(0, x.size, 64):
        for i in range(lanes):
            for k in range(each):
                out[run + k * lanes + i] = x[run + each * i + k]


@_inline
def _whole(x, block, lanes, step, values, scales, sums):
    """Integers of 8 bits with a scale for each block; scales come out times ``step``, that of the levels."""
    for n in range(x.size // block):
        part, largest = x[n * block : (n + 1) * block], np.float32(0)
        for i in range(block):
            largest = max(largest, abs(part[i]))
        inverse = np.float32(127) / largest if largest > 0 else np.float32(0)
        total = np.int32(0)
        for i in range(block):
            part[i] = np.rint(part[i] * inverse)
            total += np.int32(part[i])
        _laid_out(part, lanes, values[n * block : (n + 1) * block])
        scales[n], sums[n, 0] = largest / np.float32(127) * step, np.int32(-128) * total


@numba.njit(**_OPTIONS)
def give(x, signs, lanes, step, exact, values, scales, sums):
    """A vector, fp32 [I], which is written over, as a product reads it: exact, fp32 [I], where ``step`` is 0; else
    values, int8 [I], scales, fp32 [N], sums, int32 [N, 16]. lanes: of ``matvec.Vectors``."""
    _turned(x, signs)
    if step == 0:
        _laid_out(x, lanes, exact)
    else:
        _whole(x, signs.shape[1], lanes, step, values, scales, sums)


@numba.njit(**_OPTIONS)
def add_and_norm(stream, more, weight, eps, out):
    """stream += more; out = stream / rms(stream) * weight: fp32 [I]."""
    total = np.float32(0)
    for i in range(stream.size):
        stream[i] += more[i]
        total += stream[i] * stream[i]
    factor = np.float32(1.0 / math.sqrt(total / stream.size + eps))
    for i in range(stream.size):
        out[i] = stream[i] * factor * weight[i]


@numba.njit(**_OPTIONS)
def silu_gate(both, out):
    """out = silu(gate) * up, for both = [gate, up]: fp32 [2 I] to [I]."""
    for i in range(out.size):
        x = both[i]
        out[i] = x / (np.float32(1) + np.exp(-x)) * both[out.size + i]


@_inline
def _rotary(x, cos, sin):
    half = cos.size
    for i in range(half):
        a, b = x[i], x[half + i]
        x[i], x[half + i] = a * cos[i] - b * sin[i], a * sin[i] + b * cos[i]


@_inline
def attend_group(qkv, cos, sin, keys, values, at, out, g):
    """Attention of one token, for the queries of key/value head ``g``. qkv: fp32 [(H + 2 K) D]; cos, sin: fp32 [D / 2],
    of its place; keys, values: fp32 [K, T', D], where the token's own are put at place ``at``; out: fp32 [H D]."""
    groups, _, size = keys.shape
    heads = qkv.size // size - 2 * groups
    scores = np.empty(at + 1, np.float32)
    key = qkv[(heads + g) * size : (heads + g + 1) * size]
    _rotary(key, cos, sin)
    keys[g, at] = key
    values[g, at] = qkv[(heads + groups + g) * size : (heads + groups + g + 1) * size]
    for h in range(g * heads // groups, (g + 1) * heads // groups):
        q = qkv[h * size : (h + 1) * size]
        _rotary(q, cos, sin)
        _attend_head(q, keys[g], values[g], scores, out[h * size : (h + 1) * size])


@_inline
def _attend_head(q, keys, values, scores, out):
    size, factor, highest = q.size, np.float32(1.0 / math.sqrt(q.size)), np.float32(-np.inf)
    for t in range(scores.size):
        key, score = keys[t], np.float32(0)
        for i in range(size):
            score += q[i] * key[i]
        scores[t] = score * factor
        highest = max(highest, scores[t])
    total = np.float32(0)
    for t in range(scores.size):
        scores[t] = np.exp(scores[t] - highest)
        total += scores[t]
    out[:] = 0
    for t in range(scores.size):
        value, share = values[t], scores[t] / total
        for i in range(size):
            out[i] += share * value[i]
