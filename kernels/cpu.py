"""Numba encoder and decoder of blocks: one pass a block through a buffer that stays in the first-level cache.

Same results as the PyTorch reference up to rounding: codes differ only where a coordinate falls on a threshold within
fp32 rounding. Hadamard rotations only. Imports torch and Numba only; signs and codebooks arrive as tensors.

Shapes: N blocks, B block size, W packed bytes a block, R rounds, L = 2**bits levels, K multipliers.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numba
import numpy as np
import torch
from numba.core.errors import NumbaPerformanceWarning
from torch import Tensor

_GROUP = 64  # blocks a parallel task takes, so that its buffers are allocated once for all of them
_SCALES = {"paper": 0, "mse": 1, "unbiased": 2, "norm": 3}
_PLANE_WIDTHS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
# "contract" lets the compiler fuse multiply-adds; nothing that would assume away NaN or reorder comparisons
_jit = numba.njit(cache=True, fastmath={"contract", "nsz", "reassoc"}, inline="never")


@_jit
def _butterflies(v: np.ndarray) -> None:
    """Unnormalised Walsh-Hadamard transform of v [B], in place."""
    size, half = v.shape[0], 1
    while half < size:
        for first in range(0, size, 2 * half):
            for i in range(first, first + half):
                a, b = v[i], v[i + half]
                v[i] = a + b
                v[i + half] = a - b
        half *= 2


@_jit
def _bucket(v: np.ndarray, factor: float, thresholds: np.ndarray, index: np.ndarray) -> None:
    """index[i] = number of thresholds strictly below v[i] * factor, by bisection (thresholds: 2**b - 1 of them)."""
    size, steps = v.shape[0], thresholds.shape[0] + 1
    for i in range(size):
        u = v[i] * factor
        at, step = 0, steps // 2
        while step > 0:
            at += step if thresholds[at + step - 1] < u else 0
            step //= 2
        index[i] = at


@_jit
def _products(z: np.ndarray, index: np.ndarray, levels: np.ndarray) -> tuple[float, float]:
    dot = square = np.float32(0.0)
    for i in range(z.shape[0]):
        q = levels[index[i]]
        dot += z[i] * q
        square += q * q
    return dot, square


@_jit
def _pack(index: np.ndarray, widths: np.ndarray, out: np.ndarray) -> None:
    at = shift = 0
    for width in widths:
        per_byte = 8 // width
        mask = (1 << width) - 1
        for first in range(0, index.shape[0], per_byte):
            byte = 0
            for k in range(per_byte):
                byte |= ((index[first + k] >> shift) & mask) << (k * width)
            out[at] = byte
            at += 1
        shift += width


@_jit
def _unpack(code: np.ndarray, widths: np.ndarray, index: np.ndarray) -> None:
    index[:] = 0
    at = shift = 0
    for width in widths:
        per_byte = 8 // width
        mask = (1 << width) - 1
        for first in range(0, index.shape[0], per_byte):
            byte = code[at]
            for k in range(per_byte):
                index[first + k] |= ((byte >> (k * width)) & mask) << shift
            at += 1
        shift += width


@numba.njit(cache=True, parallel=True, fastmath={"contract", "nsz", "reassoc"})
def _encode(x, payload, scales, signs, levels, thresholds, multipliers, widths, kind, limit):
    n_blocks, size = scales.shape[0], signs.shape[1]
    inverse_root = np.float32(1.0 / math.sqrt(size))
    for group in numba.prange((n_blocks + _GROUP - 1) // _GROUP):
        z = np.empty(size, np.float32)
        index = np.empty(size, np.uint8)
        best = np.empty(size, np.uint8)
        for n in range(group * _GROUP, min((group + 1) * _GROUP, n_blocks)):
            first = n * size
            count = min(size, x.shape[0] - first)
            largest = np.float32(0.0)
            finite = True
            for i in range(count):
                magnitude = abs(x[first + i])
                finite &= magnitude <= np.float32(3.4028235e38)  # False for Inf and NaN
                largest = max(largest, magnitude)
            if not finite or largest == 0.0:
                scales[n] = np.float32(0.0) if finite else np.float32(np.nan)
                payload[n] = 0
                continue
            exponent = math.frexp(largest)[1]
            for i in range(count):
                z[i] = np.float32(math.ldexp(float(x[first + i]), -exponent))
            z[count:] = 0.0
            for r in range(signs.shape[0]):
                for i in range(size):
                    z[i] *= signs[r, i]
                _butterflies(z)
                for i in range(size):
                    z[i] *= inverse_root
            energy = np.float32(0.0)
            for i in range(size):
                energy += z[i] * z[i]
            norm = math.sqrt(energy)
            to_unit = math.sqrt(np.float32(size)) / norm
            _bucket(z, np.float32(to_unit * multipliers[0]), thresholds, best)
            dot, square = _products(z, best, levels)
            for k in range(1, multipliers.shape[0]):
                _bucket(z, np.float32(to_unit * multipliers[k]), thresholds, index)
                trial_dot, trial_square = _products(z, index, levels)
                if trial_dot / math.sqrt(trial_square) > dot / math.sqrt(square):
                    best[:] = index
                    dot, square = trial_dot, trial_square
            if kind == 0:
                scale = norm * inverse_root
            elif kind == 1:
                scale = dot / square
            elif kind == 2:
                scale = energy / dot
            else:
                scale = norm / math.sqrt(square)
            scale = math.ldexp(float(scale), exponent)  # float64: exact until the store
            if abs(scale) >= limit:
                scales[n] = np.float32(np.nan)
                payload[n] = 0
            else:
                scales[n] = np.float32(scale)
                _pack(best, widths, payload[n])


@numba.njit(cache=True, parallel=True, fastmath={"contract", "nsz", "reassoc"})
def _decode(payload, scales, out, signs, levels, widths, limit):
    n_blocks, size = scales.shape[0], signs.shape[1]
    inverse_root = np.float32(1.0 / math.sqrt(size))
    for group in numba.prange((n_blocks + _GROUP - 1) // _GROUP):
        y = np.empty(size, np.float32)
        index = np.empty(size, np.uint8)
        for n in range(group * _GROUP, min((group + 1) * _GROUP, n_blocks)):
            first = n * size
            count = min(size, out.shape[0] - first)
            _unpack(payload[n], widths, index)
            for i in range(size):
                y[i] = levels[index[i]]
            for r in range(signs.shape[0] - 1, -1, -1):
                _butterflies(y)
                for i in range(size):
                    y[i] *= inverse_root * signs[r, i]
            scale = scales[n]
            for i in range(count):
                v = y[i] * scale
                # both comparisons are False for NaN, which therefore passes
                if v > limit:
                    v = limit
                elif v < -limit:
                    v = -limit
                out[first + i] = v


_LOCK = threading.Lock()


@contextmanager
def _parallel() -> Iterator[None]:
    """As many threads as torch uses, one call at a time: Numba's work queue aborts the process on concurrent calls."""
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaPerformanceWarning)
        numba.set_num_threads(max(1, min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)))
        yield


def _widths(bits: int) -> np.ndarray:
    return np.array(_PLANE_WIDTHS[bits], dtype=np.int64)


def encode(
    x: Tensor, payload_NW: Tensor, scale_N: Tensor, signs_RB: Tensor, levels_L: Tensor, thresholds: Tensor,
    multipliers_K: Tensor, bits: int, scale: str,
) -> None:  # fmt: skip
    """Encode flat ``x`` [n] (fp32, bf16, fp16) into ``payload_NW`` uint8 and ``scale_N`` (fp32, bf16), on the CPU."""
    scales = scale_N if scale_N.dtype == torch.float32 else torch.empty(scale_N.shape, dtype=torch.float32)
    # values from half a step above the largest number of the stored type on would round to infinity
    info = torch.finfo(scale_N.dtype)
    limit = float(info.max) * (1.0 + info.eps / 4.0)
    with _parallel():
        _encode(
            x.float().numpy(), payload_NW.numpy(), scales.numpy(), signs_RB.numpy(), levels_L.numpy(),
            thresholds.numpy(), multipliers_K.numpy(), _widths(bits), _SCALES[scale], limit,
        )  # fmt: skip
    if scales is not scale_N:
        scale_N.copy_(scales)


def decode(payload_NW: Tensor, scale_N: Tensor, out: Tensor, signs_RB: Tensor, levels_L: Tensor, bits: int) -> None:
    """Decode into flat ``out`` [n] (fp32, bf16, fp16), all on the CPU."""
    y = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
    with _parallel():
        _decode(
            payload_NW.numpy(), scale_N.float().numpy(), y.numpy(), signs_RB.numpy(), levels_L.numpy(),
            _widths(bits), np.float32(torch.finfo(out.dtype).max),
        )  # fmt: skip
    if y is not out:
        out.copy_(y)
