"""Triton kernel of AdamW on a GPU: one pass that reads gradient, weight and moments, and writes weight and moments.

A program works on a few blocks of a bucket. It decodes their moments, updates every parameter that has numbers among
them, and codes the moments anew, all in registers: one pass over memory, in one launch, or two where the last program
of a bucket is not full. What changes from step to step (bias corrections, a clipping factor, seeds) are arguments of
the launch. With a ``Clock`` it lies in tensors on the device, so that a CUDA graph can hold the step. What is uploaded
goes from page-locked memory, and nothing waits for it. Same results as the unfused path up to rounding: products and
sums may be contracted.

Shapes: n numbers of a bucket, one flat vector; N = ceil(n / B) blocks, B = 128; S segments (parameters); in a program
G blocks as [G, B] where numbers are read, written and updated, and as [E, M] where they are coded: see ``gpu``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gpu
from .gpu import (
    _cell_count,
    _cells,
    _check,
    _decode_tile,
    _encode_tile,
    _float,
    _gathered,
    _in_range,
    _rotated,
    _scattered,
    _signed_seed,
    _tile,
    _words,
)  # fmt: skip
from .gpu_logscale import _DITHER, _INFINITY, _OCTAVE, _chances, _dither, _grid, _index, _number, _range
from .moments import Coded, Settings

BLOCK = 128
_THREADS = 32
_WEIGHTS = tl.constexpr(4)  # what Philox's numbers are for
_STEP, _ROTATION = gpu._STEP, gpu._SIGNS
_ROW = tl.constexpr(8)  # fp32 numbers of a row of constants


@triton.jit
def _seed_of(seed, p_step, AHEAD: tl.constexpr, STEPPED: tl.constexpr):
    """The seed; STEPPED: that of the step number AHEAD after the one at ``p_step``, under it."""
    if STEPPED:
        step = tl.load(p_step) + AHEAD
        low, high, _, _ = tl.philox(seed, step.to(tl.int32), (step >> 32).to(tl.int32), 0, _STEP)
        seed = (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64)
    return seed


@triton.jit
def _signs(low, high, seed, p_step, AHEAD: tl.constexpr, STEPPED: tl.constexpr, B: tl.constexpr):
    """The signs [B] of a rotation of one round, B = 128, from their bits ``low`` and ``high``, see ``_sign_bits``;
    STEPPED: from the seed, see ``_seed_of``."""
    if STEPPED:
        a, b, c, d = tl.philox(_seed_of(seed, p_step, AHEAD, STEPPED), 0, B, 0, _ROTATION)
        low = a.to(tl.uint32).to(tl.int64) | (b.to(tl.uint32).to(tl.int64) << 32)
        high = c.to(tl.uint32).to(tl.int64) | (d.to(tl.uint32).to(tl.int64) << 32)
    o = tl.arange(0, B)
    return 1.0 - 2.0 * ((tl.where(o < 64, low, high) >> (o % 64)) & 1).to(tl.float32)


@triton.jit
def _dither_tile(seed, i_G, USE: tl.constexpr, G: tl.constexpr, B: tl.constexpr):
    """The numbers of ``_dither`` for the blocks of a program [G, B]."""
    return tl.reshape(_dither(seed, i_G.to(tl.int64) * G, USE, G), [G, B])


@triton.jit
def _whole_range(place_EM, G: tl.constexpr, T: tl.constexpr):
    """Of the bits of each block's numbers, the same in all of its threads: the least but 0, and the greatest [M]."""
    low_G = tl.min(tl.reshape(tl.min(tl.where(place_EM == 0, _INFINITY, place_EM), 0), [G, T]), 1)
    high_G = tl.max(tl.reshape(tl.max(place_EM, 0), [G, T]), 1)
    low_M = tl.reshape(tl.broadcast_to(low_G[:, None], [G, T]), [G * T])
    return low_M, tl.reshape(tl.broadcast_to(high_G[:, None], [G, T]), [G * T])


@triton.jit
def _v_places(i_G, BITS: tl.constexpr, B: tl.constexpr, G: tl.constexpr):
    """Offsets [G, bytes] of the bytes of the codes of v."""
    return i_G.to(tl.int64) * (G * B * BITS // 8) + (
        tl.arange(0, G)[:, None] * (B * BITS // 8) + tl.arange(0, B * BITS // 8)[None, :]
    )


@triton.jit
def _decode_v(
    i_G, N, p_codes, p_ranges, TILING: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr, G: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """v as [G, B]."""
    PARTS: tl.constexpr = 8 // BITS
    B: tl.constexpr = E * T
    o_M = i_G * G + tl.arange(0, G * T) // T
    if TILING == "full":
        packed_GW = tl.load(p_codes + _v_places(i_G, BITS, B, G)).to(tl.int32)
    else:
        there_GW = (i_G * G + tl.arange(0, G) < N)[:, None]
        packed_GW = tl.load(p_codes + _v_places(i_G, BITS, B, G), mask=there_GW, other=0).to(tl.int32)
    shifts = (tl.arange(0, PARTS) * BITS)[None, None, :]
    index_GB = tl.reshape((packed_GW[:, :, None] >> shifts) & (2**BITS - 1), [G, B])
    low_M = tl.load(p_ranges + 2 * o_M, mask=o_M < N, other=0)
    high_M = tl.load(p_ranges + 2 * o_M + 1, mask=o_M < N, other=0)
    low_M, width_M = _grid(low_M, high_M, BITS)
    v_EM = _number(_gathered(index_GB, E, G, T), low_M[None, :], width_M[None, :], high_M[None, :])
    return _scattered(v_EM, E, G, T)


@triton.jit
def _encode_v(
    v_GB, chance_GB, i_G, N, p_codes, p_ranges, reach, TILING: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr,
    G: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 8 // BITS
    M: tl.constexpr = G * T
    B: tl.constexpr = E * T
    v_EM, o_M = _gathered(v_GB, E, G, T), i_G * G + tl.arange(0, M) // T
    low_M, high_M = _whole_range(v_EM.to(tl.int32, bitcast=True), G, T)
    low_M, high_M = _range(low_M, high_M, reach)
    once_M = (o_M < N) & (tl.arange(0, M) % T == 0)
    tl.store(p_ranges + 2 * o_M, low_M.to(tl.int16), mask=once_M)
    tl.store(p_ranges + 2 * o_M + 1, high_M.to(tl.int16), mask=once_M)
    low_M, width_M = _grid(low_M, high_M, BITS)
    inverse_M = tl.div_rn(tl.full([M], 1.0, tl.float32), width_M)
    chance_EM = _gathered(chance_GB, E, G, T)
    code_EM = _index(v_EM, chance_EM, low_M[None, :], width_M[None, :], inverse_M[None, :], BITS)
    code_GB = tl.reshape(_scattered(code_EM, E, G, T), [G, B // PARTS, PARTS])
    packed_GW = tl.sum(code_GB << (tl.arange(0, PARTS) * BITS)[None, None, :], 2)
    if TILING == "full":
        tl.store(p_codes + _v_places(i_G, BITS, B, G), packed_GW.to(tl.uint8))
    else:
        there_GW = (i_G * G + tl.arange(0, G) < N)[:, None]
        tl.store(p_codes + _v_places(i_G, BITS, B, G), packed_GW.to(tl.uint8), mask=there_GW)


@triton.jit
def _updated(p, g, m, v, p_rows, k, row, UNIFORM: tl.constexpr):
    """(weights, m, v) after AdamW's step with the k-th row of constants, those of ``simd.adamw``; UNIFORM: ``row``."""
    if UNIFORM:
        w, c, beta2, left, size, correction, eps = row
    else:
        p_row = p_rows + _ROW * k
        w, c, beta2, left = tl.load(p_row), tl.load(p_row + 1), tl.load(p_row + 2), tl.load(p_row + 3)
        size, correction, eps = tl.load(p_row + 4), tl.load(p_row + 5), tl.load(p_row + 6)
    if w < 0.5:  # ``lerp`` starts from the nearer end
        m = m + w * (g - m)
    else:
        m = g + (w - 1.0) * (g - m)
    v = v * beta2 + (c * g) * g
    # Root and quotient to two units of the last place: what is added to a weight is far smaller than the weight.
    return p * left + size * m / (tl.sqrt(v) * (1.0 / correction) + eps), m, v


@triton.jit
def _aligned(p_some, address, SIZE: tl.constexpr):
    """The pointer to an address that 16 divides, counted in numbers of SIZE bytes from another such pointer.

    Of a number that is made a pointer the compiler forgets that 16 divides it.
    """
    return p_some + tl.multiple_of((address - p_some.to(tl.int64)) // SIZE, 16 // SIZE)


@triton.jit
def _stepped(
    p_p, p_g, o_GB, mine_GB, p_rows, k, row, gradient_by, chance_GB, m_GB, v_GB,
    ALL: tl.constexpr, UNIFORM: tl.constexpr, AT_RANDOM: tl.constexpr,
):  # fmt: skip
    """(m, v) after the step of a parameter, which is written; ALL: the numbers of the program are all its own."""
    if ALL:
        g_GB, p_GB = _float(tl.load(p_g + o_GB)), _float(tl.load(p_p + o_GB))
    else:
        g_GB = _float(tl.load(p_g + o_GB, mask=mine_GB, other=0.0))
        p_GB = _float(tl.load(p_p + o_GB, mask=mine_GB, other=0.0))
    p_GB, new_m_GB, new_v_GB = _updated(p_GB, g_GB * gradient_by, m_GB, v_GB, p_rows, k, row, UNIFORM)
    kept_GB = _narrowed(p_GB, chance_GB, p_p.dtype.element_ty, AT_RANDOM)
    if ALL:
        tl.store(p_p + o_GB, kept_GB)
    else:
        tl.store(p_p + o_GB, kept_GB, mask=mine_GB)
        new_m_GB, new_v_GB = tl.where(mine_GB, new_m_GB, m_GB), tl.where(mine_GB, new_v_GB, v_GB)
    return new_m_GB, new_v_GB


@triton.jit
def _narrowed(p, chance, TYPE: tl.constexpr, AT_RANDOM: tl.constexpr):
    """Weights as they are kept. chance: int32 in [0, 2**16), by which bf16 is rounded up or down."""
    if TYPE == tl.bfloat16:
        bits = p.to(tl.uint32, bitcast=True)
        moved = bits + chance.to(tl.uint32) if AT_RANDOM else bits + 0x7FFF + ((bits >> 16) & 1)
        nearest = tl.where(p == p, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)  # infinities stay
        finite = (bits & 0x7F800000) != 0x7F800000
        kept = tl.where(finite, moved, nearest)
        return (kept >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return p.to(TYPE)


@triton.jit(
    do_not_specialize=[
        "seed_old", "old_low", "old_high", "seed", "new_low", "new_high", "dither_seed", "weights_seed", "reach", "N",
        "first_program",
    ]
)
def _adamw_kernel(
    p_weights, p_gradients, p_segments, p_first, p_rows, p_scalars, p_step, p_m, p_v, p_payload_old, p_scale_old,
    p_codes_old, p_ranges_old, p_payload, p_scale, p_codes, p_ranges, p_levels, p_thresholds, p_cells, p_search,
    gradient_by, w, c, beta2, left, size, correction, eps, n, N,
    seed_old: tl.int64, old_low: tl.int64, old_high: tl.int64, seed: tl.int64, new_low: tl.int64, new_high: tl.int64,
    dither_seed: tl.int64, weights_seed: tl.int64, reach, first_program,
    M_BITS: tl.constexpr, V_BITS: tl.constexpr, SCALE: tl.constexpr, STARTED: tl.constexpr, STEPPED: tl.constexpr,
    UNIFORM: tl.constexpr, AT_RANDOM: tl.constexpr, TILING: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
    E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """See ``step``; any of the weights and of the gradients. M_BITS 0: moments in fp32 at ``p_m`` and ``p_v``.

    TILING: "full" or "tail", see ``gpu._tile``. STEPPED: ``Clock`` has what the step depends on. UNIFORM: the constants
    are those given, for all parameters.
    """
    T: tl.constexpr = B // E
    G: tl.constexpr = M // T
    row = (w, c, beta2, left, size, correction, eps)
    if STEPPED:
        if tl.load(p_scalars + 2) != 0:  # the step is left out
            return
        gradient_by = tl.load(p_scalars + 1) / tl.load(p_scalars)
    i_G = tl.program_id(0) + first_program
    first, o_GB, live_GB = _tile(n, n, N, N, i_G, TILING, B, G)
    if M_BITS == 0:
        if TILING == "full":
            m_GB, v_GB = tl.load(p_m + first + o_GB), tl.load(p_v + first + o_GB)
        else:
            m_GB = tl.load(p_m + first + o_GB, mask=live_GB, other=0.0)
            v_GB = tl.load(p_v + first + o_GB, mask=live_GB, other=0.0)
    elif STARTED:
        s_B = _signs(old_low, old_high, seed_old, p_step, 0, STEPPED, B)
        m_GB, s_G = _decode_tile(i_G, N, p_payload_old, p_scale_old, p_levels, p_levels, TILING, B, M_BITS, 1, E, M)
        m_GB = m_GB * s_B[None, :] * s_G[:, None]
        v_GB = _decode_v(i_G, N, p_codes_old, p_ranges_old, TILING, V_BITS, E, G, T)
    else:
        m_GB, v_GB = tl.zeros([G, B], tl.float32), tl.zeros([G, B], tl.float32)
    chance_GB = tl.zeros([G, B], tl.int32)
    if AT_RANDOM:
        chance_GB = _dither_tile(_seed_of(weights_seed, p_step, 0, STEPPED), i_G, _WEIGHTS, G, B)
    k, last = tl.load(p_first + 2 * i_G), tl.load(p_first + 2 * i_G + 1)
    # most programs work inside one parameter, whose numbers they can read and write sixteen bytes at a time
    start, size = tl.load(p_segments + 4 * k), tl.load(p_segments + 4 * k + 1)
    P_SIZE: tl.constexpr = p_weights.dtype.element_ty.primitive_bitwidth // 8
    G_SIZE: tl.constexpr = p_gradients.dtype.element_ty.primitive_bitwidth // 8
    p_at = tl.load(p_segments + 4 * k + 2) + (first - start) * P_SIZE
    g_at = tl.load(p_segments + 4 * k + 3) + (first - start) * G_SIZE
    inside = (first >= start) & (first + G * B <= start + size) & (tl.load(p_segments + 4 * k + 3) != 0)
    even = (p_at | g_at | p_weights.to(tl.int64) | p_gradients.to(tl.int64)) % 16 == 0
    if inside & even:
        p_p, p_g = _aligned(p_weights, p_at, P_SIZE), _aligned(p_gradients, g_at, G_SIZE)
        m_GB, v_GB = _stepped(
            p_p, p_g, o_GB, live_GB, p_rows, k, row, gradient_by, chance_GB, m_GB, v_GB, True, UNIFORM,
            AT_RANDOM,
        )  # fmt: skip
        k = last
    while k < last:
        start, size = tl.load(p_segments + 4 * k), tl.load(p_segments + 4 * k + 1)
        if tl.load(p_segments + 4 * k + 3) != 0:
            p_p = tl.load(p_segments + 4 * k + 2).to(p_weights.dtype) + (first - start)
            p_g = tl.load(p_segments + 4 * k + 3).to(p_gradients.dtype) + (first - start)
            begin = tl.maximum(start - first, 0).to(tl.int32)
            mine_GB = (o_GB >= begin) & (o_GB < tl.minimum(start + size - first, G * B).to(tl.int32))
            m_GB, v_GB = _stepped(
                p_p, p_g, o_GB, mine_GB, p_rows, k, row, gradient_by, chance_GB, m_GB, v_GB, False, UNIFORM,
                AT_RANDOM,
            )  # fmt: skip
        k += 1
    if M_BITS == 0:
        if TILING == "full":
            tl.store(p_m + first + o_GB, m_GB)
            tl.store(p_v + first + o_GB, v_GB)
        else:
            tl.store(p_m + first + o_GB, m_GB, mask=live_GB)
            tl.store(p_v + first + o_GB, v_GB, mask=live_GB)
    else:
        if TILING != "full":  # what lies beyond the bucket is zero in its last block
            m_GB, v_GB = tl.where(live_GB, m_GB, 0.0), tl.where(live_GB, v_GB, 0.0)
        x_GB, inverse_M = _in_range(m_GB, G, T)
        s_B = _signs(new_low, new_high, seed, p_step, 1, STEPPED, B)
        z_EM, norm2_M = _rotated(x_GB * s_B[None, :], p_levels, 1, E, G, T)
        _encode_tile(
            z_EM, norm2_M, inverse_M, i_G, N, p_payload, p_scale, p_levels, p_thresholds, p_cells, p_search, 1.0,
            TILING, B, M_BITS, 1, SCALE, 1, C, E, M,
        )  # fmt: skip
        chance_GB = _chances(_dither_tile(_seed_of(dither_seed, p_step, 1, STEPPED), i_G, _DITHER, G, B))
        _encode_v(v_GB, chance_GB, i_G, N, p_codes, p_ranges, reach, TILING, V_BITS, E, G, T)


@triton.jit(do_not_specialize=[f"a{i}" for i in range(16)])
def _write_kernel(
    p_out, a0: tl.int64, a1: tl.int64, a2: tl.int64, a3: tl.int64, a4: tl.int64, a5: tl.int64, a6: tl.int64,
    a7: tl.int64, a8: tl.int64, a9: tl.int64, a10: tl.int64, a11: tl.int64, a12: tl.int64, a13: tl.int64, a14: tl.int64,
    a15: tl.int64,
):  # fmt: skip
    """16 numbers that a graph is to remember, not where on the host they stood: arguments of a launch are copied."""
    i = tl.arange(0, 16)
    first = tl.where(i < 4, _of_four(i, a0, a1, a2, a3), _of_four(i - 4, a4, a5, a6, a7))
    last = tl.where(i < 12, _of_four(i - 8, a8, a9, a10, a11), _of_four(i - 12, a12, a13, a14, a15))
    tl.store(p_out + i, tl.where(i < 8, first, last))


@triton.jit
def _of_four(i, a0, a1, a2, a3):
    return tl.where(i == 0, a0, tl.where(i == 1, a1, tl.where(i == 2, a2, a3))).to(tl.int64)


class Clock(NamedTuple):
    """What a step reads on the device; the seeds of moments in few bits are then those that steps have theirs under.

    step: int64 [1], the steps done before this one. scalars: fp32 [3], what gradients are divided by, what they are
    then multiplied by, and whether the step is left out (not 0).
    """

    step: Tensor
    scalars: Tensor


def launch(m_bits: int, at_random: bool = False) -> dict[str, int]:
    """E, M and launch options, by measurements on an H200: many small programs hide best what each waits for.

    As many registers as spill nothing. A plane of one bit, which odd ``m_bits`` have, wants 32 numbers to a word.
    """
    registers = 192 if at_random else 112 if m_bits > 3 else 168
    return dict(E=32 if m_bits % 2 else 16, M=_THREADS, num_warps=_THREADS // 32, maxnreg=registers)


@cache  # a graph may hold its addresses: they are never given back
def _layout(sizes: tuple[int, ...], reach: int, device: str) -> tuple[tuple[int, ...], Tensor]:
    """(where each segment starts, int32 [programs, 2]: of each program the first segment and the one after its last).

    reach: numbers of a program.
    """
    ends = np.cumsum(sizes)
    first = np.arange(-(-ends[-1] // reach)) * reach
    last = np.minimum(first + reach, ends[-1])
    bounds = np.stack((np.searchsorted(ends, first, side="right"), np.searchsorted(ends, last) + 1), 1)
    return (0, *ends[:-1].tolist()), torch.from_numpy(bounds.astype(np.int32)).to(device)


def _uploaded(rows: Any, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Numbers of the host on the device; nothing waits."""
    made = torch.tensor(rows, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else made


@lru_cache(maxsize=256)
def _sign_bits(seed: int) -> tuple[int, int, int]:
    """(seed, the bits of the signs of a rotation of one round: the first 64 of them, the others), as int64.

    What ``gpu._signs_kernel`` computes: Philox with ten rounds, of which word 0 has the first 32 bits.
    """
    a, b, c, d, low, high, word = 0, BLOCK, 0, gpu._SIGNS.value, seed & 0xFFFFFFFF, seed >> 32, 0xFFFFFFFF
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ low, second & word, first >> 32 ^ d ^ high, first & word
        low, high = low + 0x9E3779B9 & word, high + 0xBB67AE85 & word
    return _signed_seed(seed), _signed_seed(a | b << 32), _signed_seed(c | d << 32)


@lru_cache(maxsize=4096)
def _segments(places: tuple[tuple[int, int, int, int], ...], device: str) -> Tensor:
    """int64 [S, 4] of start, size, and the addresses of weights and gradients (0: none)."""
    return _uploaded(places, torch.int64, device)


def _written(places: tuple[tuple[int, int, int, int], ...], device: torch.device) -> Tensor:
    """``_segments`` made by launches, for a graph that is being captured."""
    values = [x for place in places for x in place]
    out = torch.empty(-(-len(places) // 4), 4, 4, dtype=torch.int64, device=device)
    for row in out.view(-1, 16):
        some, values = values[:16], values[16:]
        _write_kernel[(1,)](row, *some, *[0] * (16 - len(some)))
    return out.view(-1, 4)


@cache
def _compile_write(device: str) -> None:
    """In a step before the capture, as nothing can be compiled during one."""
    _written(((0, 0, 0, 0),), torch.device(device))


def step(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], constants: Sequence[Sequence[float]] | Tensor,
    moments: tuple[Tensor, Tensor] | tuple[Coded | None, Coded], settings: Settings | None = None, *,
    divisor: float = 1.0, factor: float = 1.0, negated: bool = False, seed: int | None = None,
    clock: Clock | None = None,
) -> None:  # fmt: skip
    """One AdamW step of parameters that lie in a row in the moments, in place, as of ``adamw.step``; on a GPU.

    Weights all of one dtype, gradients likewise. clock: the step takes its number, divisor, factor and whether it is
    done at all from there, and ``constants`` is a tensor [S, 8] on the device.
    """
    sizes, device = tuple(p.numel() for p in parameters), parameters[0].device
    numel, given = sum(sizes), [g for g in gradients if g is not None]
    if not numel:
        return
    _check(parameters[0], (given or parameters)[0])
    at_random = seed is not None and parameters[0].dtype == torch.bfloat16
    options = launch(settings.m_bits if settings else 0, at_random)
    starts, first = _layout(sizes, options["E"] * options["M"], str(device))
    places = tuple(
        (start, size, p.data_ptr(), 0 if g is None else g.data_ptr())
        for start, size, p, g in zip(starts, sizes, parameters, gradients, strict=True)
    )
    uniform = clock is None and len({*map(tuple, constants)}) == 1
    row: Sequence[float] = constants[0] if uniform else [0.0] * 7
    if clock is None:
        rows = None if uniform else _uploaded([[*each, 0.0] for each in constants], torch.float32, device)
        scalars = when = None
    else:
        assert isinstance(constants, Tensor)
        scalars, rows, when = clock.scalars, constants, clock.step
    assert all(p.dtype == parameters[0].dtype for p in parameters) and all(g.dtype == given[0].dtype for g in given)
    constant: dict[str, Any] = dict(
        STEPPED=clock is not None, UNIFORM=uniform, B=BLOCK, AT_RANDOM=at_random
    )
    if settings is None:
        m, v = moments
        assert isinstance(m, Tensor) and isinstance(v, Tensor)
        tensors: list[Tensor | None] = [m, v, *[None] * 12]
        constant |= dict(M_BITS=0, V_BITS=8, SCALE="paper", STARTED=False, C=32)
        seeds, reach = (0,) * 7, 0
    else:
        before, after = moments
        assert isinstance(after, Coded) and not isinstance(before, Tensor)
        old = before or after
        tensors = [None, None]
        for code in (old, after):
            assert code.rotation[:2] == (BLOCK, 1)
            tensors += [_words(code.payload), code.scales, code.codes, code.ranges]
        assert tensors[6].data_ptr() == after.payload.data_ptr()  # else what is written would be lost
        tensors += [settings.levels_L, settings.thresholds, _cells(settings.thresholds, settings.m_bits)]
        tensors += [gpu._search_table(((1.0,), (), ()), str(device))]
        constant |= dict(
            M_BITS=settings.m_bits, V_BITS=settings.v_bits, SCALE=settings.scale, STARTED=before is not None,
            C=_cell_count(settings.m_bits),
        )  # fmt: skip
        seeds = (*_sign_bits(old.rotation[2]), *_sign_bits(after.rotation[2]), _signed_seed(after.dither))
        reach = settings.octaves * _OCTAVE
    with torch.cuda.device_of(parameters[0]):
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        segments = _written(places, device) if captured else _segments(places, str(device))
        if clock is not None and not captured:
            _compile_write(str(device))
        full, programs = numel // (options["E"] * options["M"]), first.shape[0]
        for tiling, begin, count in (("full", 0, full), ("tail", full, programs - full)):
            if count:
                _adamw_kernel[(count,)](
                    parameters[0], (given or parameters)[0], segments, first, rows, scalars, when, *tensors,
                    (-factor if negated else factor) / divisor, *row, numel, -(-numel // BLOCK), *seeds,
                    _signed_seed(seed or 0), reach, begin, TILING=tiling, **constant, **options,
                )  # fmt: skip


def why_not(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> str | None:
    """Why these tensors are not covered; None if they are."""
    for what, tensors in (("weights", parameters), ("gradients", gradients)):
        found = {str(x.dtype) for x in tensors if x is not None}
        if len(found) > 1:
            return f"it covers {what} of one dtype in a bucket, got {', '.join(sorted(found))}"
    return None


# --- without a GPU --------------------------------------------------------------------------------------------


def compiled(
    target: int, *, state: tuple[int, int] | None = (4, 8), dtype: torch.dtype = torch.float32, stepped: bool = False,
    at_random: bool = False,
) -> tuple[Any, int]:  # fmt: skip
    """The kernel compiled by Triton for compute capability ``target`` (80, 90), and its E; see ``gpu.compiled``."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    m_bits, v_bits = state or (0, 8)
    options = launch(m_bits, at_random)
    constants: dict[str, Any] = dict(
        M_BITS=m_bits, V_BITS=v_bits, SCALE="unbiased", STARTED=True, STEPPED=stepped, UNIFORM=not stepped,
        AT_RANDOM=at_random, TILING="full", C=_cell_count(m_bits) if m_bits else 32, B=BLOCK, E=options.pop("E"),
        M=options.pop("M"),
    )  # fmt: skip
    types = {"p_segments": "i64", "p_first": "i32", "p_step": "i64", "p_cells": "i32" if m_bits <= 4 else "i64"}
    types |= {"p_weights": gpu._DTYPES[dtype], "p_gradients": gpu._DTYPES[dtype]}
    for suffix in ("", "_old"):
        scale = "bf16" if m_bits <= 6 else "fp32"
        types |= {f"p_{name}{suffix}": kind for name, kind in
                  (("payload", "i32"), ("scale", scale), ("codes", "u8"), ("ranges", "i16"))}  # fmt: skip
    scalars = dict.fromkeys(("n", "seed_old", "old_low", "old_high", "seed", "new_low", "new_high"), "i64")
    scalars |= dict.fromkeys(("dither_seed", "weights_seed"), "i64")
    scalars |= dict.fromkeys(("N", "reach", "first_program"), "i32")
    scalars |= dict.fromkeys(("gradient_by", "w", "c", "beta2", "left", "size", "correction", "eps"), "fp32")
    names = _adamw_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else scalars[name] if name in scalars else "*" + types.get(name, "fp32")
        for name in names
    }  # fmt: skip
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.startswith("p_")}
    source = ASTSource(_adamw_kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options), constants["E"]
