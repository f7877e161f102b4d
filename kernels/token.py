"""Numba kernels for what a decoder does between two products, with one token: norms, rotations, attention.

Vectors come out as ``matvec`` reads them: rotated block by block, in its order, in fp32 or as 8-bit integers.

Shapes: I width, N blocks, B block size, R rounds; H heads, K key/value heads, D head size, T tokens so far.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from llvmlite import ir

from . import cpu
from .simd import _INT, _INTS, LANES, _Code, _codelet, _Vector

_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}, "cache": True}
_inline = numba.njit(**_OPTIONS)


@_codelet("vectors")
def turn(code, x, signs, factor, vectors):
    """One round of the rotation of a block of 16 numbers times ``vectors``, in place; x, signs: fp32; factor: fp32."""
    factor = code.splat(factor)
    found = [code.load(x, 64 * k) * (code.load(signs, 64 * k) * factor) for k in range(vectors)]
    for half in (1, 2, 4, 8):  # of numbers in one register
        partner = [lane ^ half for lane in range(LANES)]
        sign = _Vector(code, ir.Constant(found[0].value.type, [-1.0 if lane & half else 1.0 for lane in range(LANES)]))
        found = [code.fma(v, sign, code.shuffle(v, v, partner)) for v in found]
    for k, v in enumerate(code.butterflies(found)):
        code.store(v, x, 64 * k)


@_codelet("vectors", "lanes")
def to_bytes(code, x, values, scale, total, step, vectors, lanes):
    """A block of numbers as integers of 8 bits, in the order of ``_laid_out``; see ``_whole``.

    x: fp32; values: int8; scale: where the scale goes, fp32, times ``step``; total: where -128 times the sum goes, an
    int32.
    """
    b, whole = code.b, _rounded(code, x, scale, total, step, vectors, -128)
    each = 64 // lanes
    order = [each * (at % lanes) + at // lanes for at in range(64)]
    for run in range(vectors // 4):
        found = _joined(code, [b.trunc(v.value, ir.VectorType(ir.IntType(8), LANES)) for v in whole[4 * run :][:4]])
        places = ir.Constant(ir.VectorType(_INT, 64), order)
        found = b.shuffle_vector(found, ir.Constant(found.type, ir.Undefined), places)
        b.store(found, code.at(values, 64 * run, found.type), align=1)


@_codelet("vectors")
def to_words(code, x, words, scale, total, step, vectors):
    """Likewise in their own order, each as a word of four times the same byte; total: -510 times the sum."""
    for k, v in enumerate(_rounded(code, x, scale, total, step, vectors, -510)):
        four = code.b.mul((v & 0xFF).value, ir.Constant(_INTS, [0x01010101] * LANES))
        code.store(_Vector(code, four), words, 64 * k)


def _rounded(
    code: _Code, x: ir.Value, scale: ir.Value, total: ir.Value, step: ir.Value, vectors: int, times: int
) -> list[_Vector]:
    """Numbers as integers up to 127; stores their scale times ``step``, and ``times`` times their sum."""
    b, given = code.b, [code.load(x, 64 * k) for k in range(vectors)]
    largest = code.call("llvm.fabs.v16f32", given[0])
    for v in given[1:]:
        largest = code.call("llvm.maxnum.v16f32", largest, code.call("llvm.fabs.v16f32", v))
    for half in (8, 4, 2, 1):
        partner = code.shuffle(largest, largest, [lane ^ half for lane in range(LANES)])
        largest = code.call("llvm.maxnum.v16f32", largest, partner)
    most = b.extract_element(largest.value, ir.Constant(_INT, 0))
    end, zero = (ir.Constant(most.type, value) for value in (127.0, 0.0))
    inverse = code.splat(b.select(b.fcmp_ordered(">", most, zero), b.fdiv(end, most), zero))
    whole = [_Vector(code, b.fptosi(code.call("llvm.rint.v16f32", v * inverse).value, _INTS)) for v in given]
    summed = whole[0]
    for v in whole[1:]:
        summed = summed + v
    for half in (8, 4, 2, 1):
        summed = summed + code.shuffle(summed, summed, [lane ^ half for lane in range(LANES)])
    sum_ = b.extract_element(summed.value, ir.Constant(_INT, 0))
    b.store(b.mul(sum_, ir.Constant(_INT, times)), code.at(total, 0, _INT), align=4)
    b.store(b.fmul(b.fdiv(most, end), step), code.at(scale, 0, most.type), align=4)
    return whole


def _joined(code: _Code, parts: list[ir.Value]) -> ir.Value:
    """Vectors one after the other as one."""
    while len(parts) > 1:
        both = ir.Constant(ir.VectorType(_INT, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [code.b.shuffle_vector(*pair, both) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _exp(code: _Code, x: _Vector) -> _Vector:
    """e**x to a few units in the last place: 2**n times a polynomial on half of ln 2 to either side (Cephes)."""
    x = code.call("llvm.minnum.v16f32", code.call("llvm.maxnum.v16f32", x, code.vector(-87.0)), code.vector(88.0))
    n = code.call("llvm.rint.v16f32", x * code.vector(1.44269504))
    r = code.fma(n, code.vector(-0.693359375), x)
    r = code.fma(n, code.vector(2.12194440e-4), r)
    found = code.vector(1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        found = code.fma(found, r, code.vector(term))
    found = code.fma(found, r * r, r + code.vector(1.0))
    power = (_Vector(code, code.b.fptosi(n.value, _INTS)) + code.vector(127, _INTS)) << 23
    return found * power.floats()


@_codelet()
def gated(code, gate, up, out):
    """out = silu(gate) * up for 16 numbers, fp32."""
    x = code.load(gate)
    below = _exp(code, code.vector(0.0) - x) + code.vector(1.0)
    code.store(_Vector(code, code.b.fdiv(x.value, below.value)) * code.load(up), out)


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
        at = cpu._address(part)
        for r in range(rounds):
            if block == 64:
                turn(at, cpu._address(signs[r]), factor, 4)
            elif block == 128:
                turn(at, cpu._address(signs[r]), factor, 8)
            elif block == 256:
                turn(at, cpu._address(signs[r]), factor, 16)
            else:
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
        part = x[n * block : (n + 1) * block]
        if block == 64 and lanes == 32:
            to_bytes(cpu._address(part), cpu._address(values) + 64 * n, cpu._address(scales) + 4 * n,
                     cpu._address(sums[n]), step, 4, 32)  # fmt: skip
        elif block == 64 and lanes == 16:
            to_bytes(cpu._address(part), cpu._address(values) + 64 * n, cpu._address(scales) + 4 * n,
                     cpu._address(sums[n]), step, 4, 16)  # fmt: skip
        else:
            _whole_of_any(part, lanes, step, values[n * block : (n + 1) * block], scales, sums, n)


@_inline
def _whole_of_any(part, lanes, step, values, scales, sums, n):
    """One block, of any size."""
    largest = np.float32(0)
    for i in range(part.size):
        largest = max(largest, abs(part[i]))
    inverse = np.float32(127) / largest if largest > 0 else np.float32(0)
    total = np.int32(0)
    for i in range(part.size):
        part[i] = np.rint(part[i] * inverse)
        total += np.int32(part[i])
    _laid_out(part, lanes, values)
    scales[n], sums[n, 0] = largest / np.float32(127) * step, np.int32(-128) * total


@_inline
def _words(x, block, step, words, scales, sums):
    """Integers of 8 bits with a scale for each block, as ``path_product`` reads them.

    words: int32 [I]; scales: fp32 [N]; sums: int32 [N].
    """
    for n in range(x.size // block):
        at, to = cpu._address(x) + 4 * n * block, cpu._address(words) + 4 * n * block
        scale, total = cpu._address(scales) + 4 * n, cpu._address(sums) + 4 * n
        if block == 64:
            to_words(at, to, scale, total, step, 4)
        elif block == 128:
            to_words(at, to, scale, total, step, 8)
        else:
            to_words(at, to, scale, total, step, 16)


@numba.njit(**_OPTIONS)
def give_paths(x, signs, step, integers, exact, words, scales, sums):
    """A vector, fp32 [I], which is written over, as a product with paths reads it: exact, fp32 [I]; or, in integers,
    words, int32 [I], scales, fp32 [N], sums, int32 [N]. step: that of the values."""
    _turned(x, signs)
    if integers:
        _words(x, signs.shape[1], step, words, scales, sums)
    else:
        exact[:] = x


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
    whole = out.size // LANES * LANES
    for i in range(0, whole, LANES):
        gated(cpu._address(both) + 4 * i, cpu._address(both) + 4 * (out.size + i), cpu._address(out) + 4 * i)
    for i in range(whole, out.size):
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
