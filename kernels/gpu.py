"""Triton encoder and decoder of blocks: one pass over memory, every block in the registers of a few threads.

Same results as the PyTorch reference up to rounding: codes differ only where a coordinate falls on a threshold within
fp32 rounding. Hadamard rotations only, blocks of 64-1024. Imports torch and Triton only; signs and codebooks arrive as
tensors. Nothing here waits for the device, and nothing looks for one at import.

A tile is read and written as [G, B], so that neighbouring threads meet neighbouring bytes, and worked on as [E, M]: E
elements down, in the registers of one thread, and M threads across, T = B/E of them to a block, of which thread t has
every T-th element from t on. The butterflies are then plain additions of registers: those of the lowest log2(T) bits
in the first arrangement, where a thread has a few elements in a row, the others in the second. A further round has to
ask the other threads: a shuffle an element for each of those bits.

Shapes: R rows (R also rounds, for signs), D columns of a row, N blocks, B block size, W packed bytes a block,
L = 2**bits levels, K multipliers, C cells; in a program G blocks, T threads a block, M = G*T threads, E = B/T.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Launch settings, near the best of those that were timed on an H200. One warp a program: exchanges stay inside it, and
# tables of up to 32 entries are looked up by a shuffle. 128 elements a thread need the fewest instructions, but leave
# eight warps a processor, too few to hide what each waits for; 64 leave sixteen to twenty-one, by how many registers
# spill nothing.
NUM_WARPS = 1
LAUNCH = {
    "encode": dict(E=64, maxnreg=104),
    "encode, bf16 or rounds > 1": dict(E=64, maxnreg=120),
    "encode, bits > 5": dict(E=64, maxnreg=168),
    "encode, search": dict(E=64),
    "encode, search in integers": dict(E=32),
    "decode": dict(E=64, maxnreg=96),
    "decode, rounds > 1": dict(E=64, maxnreg=128),
}
_PART = tl.constexpr(32)  # elements worked off together from bucketing to packing
_SHUFFLED = tl.constexpr(32)  # entries of a table that one warp holds, one a lane
_INTEGER_BITS, _STEPS = tl.constexpr(4), tl.constexpr(32.0)  # of the search over scales: see ``tq.quant.scale_search``
_SIGNS, _STEP = tl.constexpr(1), tl.constexpr(2)  # what Philox's numbers are for
_SCALES = ("paper", "mse", "unbiased", "norm")
Search = tuple[tuple[float, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]  # of ``tq.quant.scale_search``
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in _DTYPES}


# --- device functions -----------------------------------------------------------------------------------------


@triton.jit
def _stage(y_EM, H: tl.constexpr, E: tl.constexpr, M: tl.constexpr):
    """Butterflies (a + b, a - b) of elements H apart."""
    y = tl.permute(tl.reshape(y_EM, [E // (2 * H), 2, H, M]), (0, 2, 3, 1))
    a, b = tl.split(y)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 3, 1, 2)), [E, M])


@triton.jit
def _float(v):
    """v in fp32; of bf16 by its bits, as Triton's interpreter loses subnormals."""
    if v.dtype == tl.bfloat16:
        return (v.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return v.to(tl.float32)


@triton.jit
def _rounded(v, TYPE: tl.constexpr):
    """fp32 rounded to the nearest of TYPE, ties to even; NaN where that is infinite. bf16: see ``_float``."""
    bits = v.to(tl.uint32, bitcast=True)
    if TYPE == tl.bfloat16:
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    # v itself too: rounding carries the NaN of a GPU, all ones, to zero
    finite = (tl.abs(v) < float("inf")) & (tl.abs(bits.to(tl.float32, bitcast=True)) < float("inf"))
    bits = tl.where(finite, bits, 0x7FC00000)
    if TYPE == tl.bfloat16:
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _halves(y_EM, E: tl.constexpr, M: tl.constexpr):
    """Elements 0 ... E/2 - 1, and E/2 ... E - 1."""
    return tl.split(tl.permute(tl.reshape(y_EM, [2, E // 2, M]), (1, 2, 0)))


@triton.jit
def _joined(a, b, E: tl.constexpr, M: tl.constexpr):
    """Inverse of ``_halves``."""
    return tl.reshape(tl.permute(tl.join(a, b), (2, 0, 1)), [E, M])


@triton.jit
def _low_stage(y_GB, H: tl.constexpr, G: tl.constexpr, B: tl.constexpr):
    """Butterflies of neighbours H apart in a block."""
    a, b = tl.split(tl.permute(tl.reshape(y_GB, [G, B // (2 * H), 2, H]), (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), [G, B])


@triton.jit
def _low(y_GB, G: tl.constexpr, B: tl.constexpr, T: tl.constexpr):
    """Butterflies of the lowest log2(T) bits of the place in a block."""
    for s in tl.static_range(6):
        if T >> (s + 1) > 0:
            y_GB = _low_stage(y_GB, 1 << s, G, B)
    return y_GB


@triton.jit
def _high(y_EM, E: tl.constexpr, M: tl.constexpr):
    """Butterflies of the bits above those."""
    for s in tl.static_range(7):
        if E >> (s + 1) > 0:
            y_EM = _stage(y_EM, E >> (s + 1), E, M)
    return y_EM


@triton.jit
def _across_stage(y_EM, H: tl.constexpr, E: tl.constexpr, M: tl.constexpr):
    """Butterflies of what threads have that are H apart."""
    own = tl.reshape(y_EM, [E, M // (2 * H), 2, H])
    bits = own.to(tl.int32, bitcast=True)
    # what a and b have is a ^ (a ^ b) = b: a shuffle, whose sum over two threads is the exclusive or
    other = (bits ^ tl.xor_sum(bits, 2, keep_dims=True)).to(tl.float32, bitcast=True)
    turn = tl.broadcast_to((1.0 - 2.0 * tl.arange(0, 2).to(tl.float32))[None, None, :, None], own.shape)
    return tl.reshape(tl.fma(own, turn, other), [E, M])


@triton.jit
def _across(y_EM, E: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """``_low`` of what lies as [E, M]."""
    for s in tl.static_range(6):
        if T >> (s + 1) > 0:
            y_EM = _across_stage(y_EM, 1 << s, E, G * T)
    return y_EM


@triton.jit
def _gathered(y_GB, E: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """[E, M] from [G, B]."""
    return tl.reshape(tl.permute(tl.reshape(y_GB, [G, E, T]), (1, 0, 2)), [E, G * T])


@triton.jit
def _scattered(y_EM, E: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """[G, B] from [E, M]."""
    return tl.reshape(tl.permute(tl.reshape(y_EM, [E, G, T]), (1, 0, 2)), [G, E * T])


@triton.jit
def _signed(y_EM, p_signs, E: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """y times the signs [B] at ``p_signs``."""
    s_ET = tl.reshape(tl.load(p_signs + tl.arange(0, E * T)), [E, T])
    return tl.reshape(tl.reshape(y_EM, [E, G, T]) * s_ET[:, None, :], [E, G * T])


@triton.jit
def _sum(v_EM, E: tl.constexpr, M: tl.constexpr):
    """Sum over the elements of each thread [M]; eight chains, for rounding and for latency."""
    return tl.sum(tl.sum(tl.reshape(v_EM, [E // 8, 8, M]), 0), 0)


@triton.jit
def _tree(v_EM, E: tl.constexpr, M: tl.constexpr):
    """The same pairwise, by splits alone: a reduction here would ask for the tile in a second arrangement."""
    if E > 1:
        a, b = _halves(v_EM, E, M)
        return _tree(a + b, E // 2, M)
    else:
        return tl.reshape(v_EM, [M])


@triton.jit
def _over_block(v_M, G: tl.constexpr, T: tl.constexpr):
    """Sum over the threads of each block, the same in all of them."""
    if T > 1:
        v_G = tl.sum(tl.reshape(v_M, [G, T]), 1)
        v_M = tl.reshape(tl.broadcast_to(v_G[:, None], [G, T]), [G * T])
    return v_M


@triton.jit
def _entries(p_table, SIZE: tl.constexpr):
    """What ``_lookup`` needs of a table: its entries, one a lane, if a warp can hold them; else its address."""
    if SIZE <= _SHUFFLED:
        return tl.load(p_table + tl.arange(0, _SHUFFLED) % SIZE)
    else:
        return p_table


@triton.jit
def _lookup(table, index_EM, SIZE: tl.constexpr, E: tl.constexpr, M: tl.constexpr):
    if SIZE <= _SHUFFLED:
        return tl.reshape(tl.gather(table, tl.reshape(index_EM, [E * M]), 0), [E, M])
    else:
        return tl.load(table + index_EM)


@triton.jit
def _cell(v, slope, C: tl.constexpr):
    """Cell of v: C equal cells from -largest to +largest threshold, where slope v = v / (2 largest).

    A product of C - 1 smallest subnormals rounds to an integer that is the bits of the result: no conversion. The mask
    is for NaN, of which any cell will do.
    """
    w = tl.minimum(tl.maximum(tl.fma(v, slope, 0.5), 0.0), 1.0)
    return (w * ((C - 1) * 2.0**-149)).to(tl.int32, bitcast=True) & (C - 1)


@triton.jit
def _bucket(
    z_EM, unit_M, p_thresholds, reach, cells, BITS: tl.constexpr, C: tl.constexpr, E: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Number of thresholds strictly below u = unit z: the cell's count, and a comparison with the one inside it.

    Near a threshold that is within rounding of a cell's edge the cell may be the neighbour: exact but for such ties.
    """
    if BITS == 1:
        t = tl.load(p_thresholds)
        t_EM, below_EM = tl.where(t == 0.0, 0.0, t), 0
    else:
        entry_EM = _lookup(cells, _cell(z_EM, (unit_M * reach)[None, :], C), C, E, M)
        if C <= _SHUFFLED:
            t_EM, below_EM = entry_EM.to(tl.float32, bitcast=True), entry_EM & (2**BITS - 1)
        else:
            t_EM = entry_EM.to(tl.int32).to(tl.float32, bitcast=True)
            below_EM = (entry_EM >> 32).to(tl.int32)
    left_EM = tl.fma(z_EM, -unit_M[None, :], t_EM)  # its sign is the comparison: t - u < 0
    return below_EM + (left_EM.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)


@triton.jit
def _tile(
    n, D, N, P, i_G, TILING: tl.constexpr, B: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """(int64 first element, offsets [G, B] from it, mask [G, B]) of a program's blocks in x.

    TILING "full": blocks follow each other, all elements are there; "tail": the same with the end of x inside;
    "rows": a row of D elements has P blocks, the last one ragged.
    """
    o_G, o_B = tl.arange(0, G), tl.arange(0, B)
    if TILING == "rows":
        n_G = i_G * G + o_G
        column_G = (n_G % P).to(tl.int64) * B
        offset_GB = ((n_G // P).to(tl.int64) * D + column_G)[:, None] + o_B[None, :]
        return tl.zeros([], tl.int64), offset_GB, (o_B[None, :] < (D - column_G)[:, None]) & (n_G < N)[:, None]
    else:  # offsets are constants of a thread: they cost no arithmetic
        first = i_G.to(tl.int64) * (G * B)
        offset_GB = o_G[:, None] * B + o_B[None, :]
        return first, offset_GB, offset_GB < tl.minimum(n - first, G * B).to(tl.int32)


@triton.jit
def _plane(i_G, W: tl.constexpr, BITS: tl.constexpr, B: tl.constexpr, G: tl.constexpr):
    """Offsets [words, G] in int32 of the plane of width W of a program's blocks."""
    FIRST: tl.constexpr = BITS // (2 * W) * (2 * W)
    first_G = (i_G.to(tl.int64) * G + tl.arange(0, G)) * (B * BITS // 32) + FIRST * B // 32
    return first_G[None, :] + tl.arange(0, B * W // 32)[:, None]


@triton.jit
def _words_of(index_EM, W: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """int32 [rows, M]: the share of each thread in the words of the plane of width W; 0 if BITS has no such plane.

    A row holds the words that a block's threads fill together, one for every 32 / W of them.
    """
    if BITS & W:
        part = index_EM
        if BITS != W:
            part = (index_EM >> (BITS // (2 * W) * (2 * W))) & (2**W - 1)
        OWN: tl.constexpr = 32 // W // T if 32 // W > T else 1  # elements of a thread in a word
        part = tl.reshape(part, [E // OWN, OWN, G * T])
        return tl.sum(part << (tl.arange(0, OWN)[None, :, None] * (W * T)), 1)
    else:
        return 0


@triton.jit
def _join_words(a, b, W: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    if BITS & W:
        return _joined(a, b, E * T * W // 32 if 32 // W > T else E, G * T)
    else:
        return 0


@triton.jit
def _store_plane(
    p_payload, word_RM, coded_M, i_G, N,
    W: tl.constexpr, TILING: tl.constexpr, BITS: tl.constexpr, B: tl.constexpr, G: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    if BITS & W:
        SHARED: tl.constexpr = 32 // W if 32 // W < T else T  # threads that fill a word
        word_RM = tl.where(coded_M[None, :], word_RM << ((tl.arange(0, G * T) % SHARED) * W)[None, :], 0)
        ROWS: tl.constexpr = B * W // 32 * SHARED // T
        word_RGT = tl.sum(tl.reshape(word_RM, [ROWS, G, T // SHARED, SHARED]), 3)
        word_WG = tl.reshape(tl.permute(word_RGT, (0, 2, 1)), [B * W // 32, G])
        if TILING == "full":
            tl.store(p_payload + _plane(i_G, W, BITS, B, G), word_WG)
        else:
            there_G = i_G * G + tl.arange(0, G) < N
            tl.store(p_payload + _plane(i_G, W, BITS, B, G), word_WG, mask=there_G[None, :])


@triton.jit
def _indices_of(word_WG, W: tl.constexpr, BITS: tl.constexpr, E: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    FIRST: tl.constexpr = BITS // (2 * W) * (2 * W)
    SHARED: tl.constexpr = 32 // W if 32 // W < T else T
    OWN: tl.constexpr = 32 // W // T if 32 // W > T else 1
    word_RGT = tl.permute(tl.reshape(word_WG, [E // OWN, T // SHARED, G]), (0, 2, 1))
    word_RGTS = tl.broadcast_to(word_RGT[:, :, :, None], [E // OWN, G, T // SHARED, SHARED])
    word_RM = tl.reshape(word_RGTS, [E // OWN, G * T]) >> ((tl.arange(0, G * T) % SHARED) * W)[None, :]
    part = (word_RM[:, None, :] >> (tl.arange(0, OWN)[None, :, None] * (W * T))) & (2**W - 1)
    return tl.reshape(part, [E, G * T]) << FIRST


@triton.jit
def _code(
    z_EM, coefficient_M, thresholds, reach, cells, levels,
    BITS: tl.constexpr, C: tl.constexpr, PACK: tl.constexpr, E: tl.constexpr, G: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """<z, q>, <q, q> and words of the planes, q the levels of v = coefficient z; without PACK <z, v-q>, |v-q|^2.

    In parts, for want of registers.
    """
    M: tl.constexpr = G * T
    if E > _PART:
        a, b = _halves(z_EM, E, M)
        dot_M, square_M, p0, p1, p2, p3 = _code(
            a, coefficient_M, thresholds, reach, cells, levels, BITS, C, PACK, E // 2, G, T
        )
        dot_2_M, square_2_M, r0, r1, r2, r3 = _code(
            b, coefficient_M, thresholds, reach, cells, levels, BITS, C, PACK, E // 2, G, T
        )
        if PACK:
            p0 = _join_words(p0, r0, 8, BITS, E, G, T)
            p1 = _join_words(p1, r1, 4, BITS, E, G, T)
            p2 = _join_words(p2, r2, 2, BITS, E, G, T)
            p3 = _join_words(p3, r3, 1, BITS, E, G, T)
        return dot_M + dot_2_M, square_M + square_2_M, p0, p1, p2, p3
    else:
        index_EM = _bucket(z_EM, coefficient_M, thresholds, reach, cells, BITS, C, E, M)
        q_EM = _lookup(levels, index_EM, 2**BITS, E, M)
        p0, p1, p2, p3 = 0, 0, 0, 0
        if PACK:
            p0 = _words_of(index_EM, 8, BITS, E, G, T)
            p1 = _words_of(index_EM, 4, BITS, E, G, T)
            p2 = _words_of(index_EM, 2, BITS, E, G, T)
            p3 = _words_of(index_EM, 1, BITS, E, G, T)
            return tl.sum(z_EM * q_EM, 0), tl.sum(q_EM * q_EM, 0), p0, p1, p2, p3
        else:
            r_EM = tl.fma(z_EM, coefficient_M[None, :], -q_EM)
            return tl.sum(z_EM * r_EM, 0), tl.sum(r_EM * r_EM, 0), p0, p1, p2, p3


@triton.jit
def _cells_kernel(p_thresholds, p_cells, L: tl.constexpr, C: tl.constexpr):
    """Of each cell the bits of the threshold inside it (+inf for none), and the number of thresholds below the cell.

    int32 [C, 2]; where a warp holds the table, int32 [C], whose last bits are the number: the nearest such threshold,
    at most 2**(bits - 1) units of the last place off, and 2**97 for none. A program makes 32 of them.
    """
    o_L, o_C = tl.arange(0, L), tl.program_id(0) * 32 + tl.arange(0, 32)
    t_L = tl.load(p_thresholds + o_L, mask=o_L < L - 1, other=0.0)
    cell_L = _cell(t_L, 0.5 / tl.load(p_thresholds + L - 2), C)
    real_L = o_L < L - 1
    inside_CL = (cell_L[None, :] == o_C[:, None]) & real_L[None, :]
    t_C = tl.min(tl.where(inside_CL, t_L[None, :], float("inf")), 1)
    t_C = tl.where(t_C == 0.0, 0.0, t_C)  # no -0.0: the sign of t - u is the comparison
    below_C = tl.sum(((cell_L[None, :] < o_C[:, None]) & real_L[None, :]).to(tl.int32), 1)
    if C <= _SHUFFLED:
        bits_C = tl.where(t_C < 2.0**97, t_C, 2.0**97).to(tl.int32, bitcast=True)
        off_C = (bits_C & (L - 1)) - below_C
        step_C = tl.where(off_C > L // 2, L, tl.where(off_C < -L // 2, -L, 0))
        step_C = tl.where((bits_C & ~(L - 1)) == 0, tl.maximum(step_C, 0), step_C)
        tl.store(p_cells + o_C, ((bits_C & ~(L - 1)) + step_C) | below_C)
    else:
        tl.store(p_cells + 2 * o_C, t_C.to(tl.int32, bitcast=True))
        tl.store(p_cells + 2 * o_C + 1, below_C)


@triton.jit(do_not_specialize=["seed"])
def _signs_kernel(p_step, p_signs, seed, SIZE: tl.constexpr, B: tl.constexpr, STEPPED: tl.constexpr):
    """128 random signs a program, from Philox: see ``tq.quant.rotation.signs``. STEPPED: of the step at ``p_step``."""
    i, o = tl.program_id(0), tl.arange(0, 128)
    if STEPPED:
        step = tl.load(p_step)
        low, high, _, _ = tl.philox(seed, step.to(tl.int32), (step >> 32).to(tl.int32), 0, _STEP)
        seed = (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64)
    a, b, c, d = tl.philox(seed, i, B, 0, _SIGNS)
    word = tl.where(o < 32, a, tl.where(o < 64, b, tl.where(o < 96, c, d)))
    bit = ((word.to(tl.uint32) >> (o % 32).to(tl.uint32)) & 1).to(tl.float32)
    tl.store(p_signs + i * 128 + o, 1.0 - 2.0 * bit, mask=i * 128 + o < SIZE)


@triton.jit
def _rotated(x_GB, p_signs, ROUNDS: tl.constexpr, E: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """(x, which has its first signs, rotated, but for its norm [E, M]; its squared norm over each block [M])."""
    z_EM = _high(_gathered(_low(x_GB, G, E * T, T), E, G, T), E, G * T)
    for r in tl.static_range(1, ROUNDS):
        z_EM = _high(_across(_signed(z_EM, p_signs + r * E * T, E, G, T), E, G, T), E, G * T)
    return z_EM, _over_block(_sum(z_EM * z_EM, E, G * T), G, T)


@triton.jit
def _out_of_range(norm2_M):
    """Whether the squares of any block have left the range of fp32, or may have lost digits at its lower end."""
    return tl.max(((norm2_M > 1e-20) & (norm2_M < 1e37)).to(tl.int32) ^ 1, 0) > 0


@triton.jit
def _in_range(x_GB, G: tl.constexpr, T: tl.constexpr):
    """(x times a power of two per block [G, B], its inverse [M]).

    It keeps squares of 1e38 and 1e-38 in range, and comes from the exponent of the sum of magnitudes, which lands in
    [1/2, 1); above it for subnormals, below it where the sum overflows.
    """
    size_G = tl.sum(tl.abs(x_GB), 1).to(tl.int32, bitcast=True)
    exponent_G = tl.maximum(253 - (size_G >> 23), 1)
    inverse_G = ((254 - exponent_G) << 23).to(tl.float32, bitcast=True)
    inverse_M = tl.reshape(tl.broadcast_to(inverse_G[:, None], [G, T]), [G * T])
    return x_GB * (exponent_G << 23).to(tl.float32, bitcast=True)[:, None], inverse_M


@triton.jit
def _encode_tile(
    z_EM, norm2_M, inverse_M, i_G, N, p_payload, p_scale, p_levels, p_thresholds, p_cells, p_search, factor,
    TILING: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr, SCALE: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Encode a tile of what ``_rotated`` gives; i_G: number of the program, N: blocks there are."""
    T: tl.constexpr = B // E
    G: tl.constexpr = M // T
    L: tl.constexpr = 2**BITS
    o_M = i_G * G + tl.arange(0, M) // T
    unit_M = tl.where(norm2_M > 0, tl.rsqrt(norm2_M * (1.0 / B)), 1.0)
    cells = _entries(p_cells, C)
    levels = _entries(p_levels, L)
    reach = 0.5 / tl.load(p_thresholds + L - 2)
    coefficient_M = unit_M * tl.load(p_search)
    if K > 1 and BITS <= _INTEGER_BITS:
        # |z| in steps: adding 2**23 rounds to the nearest integer, and the sums below are exact
        a_EM = tl.fma(tl.abs(z_EM), (unit_M * _STEPS)[None, :], 8388608.0) - 8388608.0
        a_EM = tl.minimum(a_EM, 127.0)
        p_whole, p_cuts = p_search + K, p_search + K + L // 2
        least_M = tl.full([M], float("inf"), tl.float32)
        for k in range(K):
            q_EM = tl.zeros([E, M], tl.float32) + tl.load(p_whole)
            for j in tl.static_range(L // 2 - 1):
                rise = tl.load(p_whole + j + 1) - tl.load(p_whole + j)
                q_EM += tl.where(a_EM > tl.load(p_cuts + k * (L // 2 - 1) + j), rise, 0.0)
            common_M = _over_block(tl.sum(a_EM * q_EM, 0), G, T)
            sine_M = -tl.div_rn(common_M * common_M, _over_block(tl.sum(q_EM * q_EM, 0), G, T))
            coefficient_M = tl.where(sine_M < least_M, unit_M * tl.load(p_search + k), coefficient_M)
            least_M = tl.where(sine_M < least_M, sine_M, least_M)
    elif K > 1:
        least_M = tl.full([M], float("inf"), tl.float32)
        for k in range(K):
            trial_M = unit_M * tl.load(p_search + k)
            product_M, loss_M, _0, _1, _2, _3 = _code(
                z_EM, trial_M, p_thresholds, reach, cells, levels, BITS, C, False, E, G, T
            )
            product_M, loss_M = trial_M * _over_block(product_M, G, T), _over_block(loss_M, G, T)
            energy_M = trial_M * trial_M * norm2_M
            # squared sine of the angle between v = trial z and q from r = v - q, as in the reference: cosines near 1
            # differ by less than their rounding
            sine_M = (energy_M * loss_M - product_M * product_M) / (energy_M * (energy_M - 2 * product_M + loss_M))
            coefficient_M = tl.where(sine_M < least_M, trial_M, coefficient_M)  # the first wins ties
            least_M = tl.where(sine_M < least_M, sine_M, least_M)
    dot_M, square_M, p0, p1, p2, p3 = _code(
        z_EM, coefficient_M, p_thresholds, reach, cells, levels, BITS, C, True, E, G, T
    )
    dot_M, square_M = _over_block(dot_M, G, T), _over_block(square_M, G, T)

    if SCALE == "paper":
        s_M = tl.sqrt_rn(norm2_M * (1.0 / B))
    elif SCALE == "mse":
        s_M = tl.div_rn(dot_M, square_M)
    elif SCALE == "unbiased":
        s_M = tl.div_rn(norm2_M, dot_M)
    else:
        s_M = tl.sqrt_rn(tl.div_rn(norm2_M, square_M))
    s_M = s_M * (B ** (-0.5 * ROUNDS)) * factor * inverse_M  # the butterflies were not normalised
    s_M = _rounded(tl.where(norm2_M == 0.0, 0.0, s_M), p_scale.dtype.element_ty)
    coded_M = (norm2_M > 0) & (tl.abs(_float(s_M)) < float("inf"))
    once_M = tl.arange(0, M) % T == 0
    tl.store(p_scale + o_M, s_M, mask=once_M if TILING == "full" else once_M & (o_M < N))
    _store_plane(p_payload, p0, coded_M, i_G, N, 8, TILING, BITS, B, G, T)
    _store_plane(p_payload, p1, coded_M, i_G, N, 4, TILING, BITS, B, G, T)
    _store_plane(p_payload, p2, coded_M, i_G, N, 2, TILING, BITS, B, G, T)
    _store_plane(p_payload, p3, coded_M, i_G, N, 1, TILING, BITS, B, G, T)


@triton.jit
def _loaded(p_x, o_GB, m_GB, TILING: tl.constexpr):
    """The numbers at ``o_GB`` in fp32, zero where ``m_GB`` says that there are none."""
    if TILING == "full":
        x_GB = tl.load(p_x + o_GB)
    else:
        x_GB = tl.load(p_x + o_GB, mask=m_GB, other=0.0)
    return _float(x_GB)


@triton.jit(do_not_specialize=["N", "P", "first_program"])
def _encode_kernel(
    p_x, p_payload, p_scale, p_signs, p_levels, p_thresholds, p_cells, p_search, n, D, N, P, first_program, factor,
    TILING: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr, SCALE: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, E: tl.constexpr, M: tl.constexpr, RARE: tl.constexpr = True,
):  # fmt: skip
    """RARE: with what few programs run; without it, for counting what most of them do."""
    T: tl.constexpr = B // E
    G: tl.constexpr = M // T
    i_G = tl.program_id(0) + first_program
    first, o_GB, m_GB = _tile(n, D, N, P, i_G, TILING, B, G)
    o_1B = tl.arange(0, B)[None, :]
    x_GB = _loaded(p_x + first, o_GB, m_GB, TILING) * tl.load(p_signs + o_1B)
    z_EM, norm2_M = _rotated(x_GB, p_signs, ROUNDS, E, G, T)
    inverse_M = tl.full([M], 1.0, tl.float32)
    if RARE and _out_of_range(norm2_M):  # they read and rotate once more
        x_GB, inverse_M = _in_range(_loaded(p_x + first, o_GB, m_GB, TILING), G, T)
        z_EM, norm2_M = _rotated(x_GB * tl.load(p_signs + o_1B), p_signs, ROUNDS, E, G, T)
    _encode_tile(
        z_EM, norm2_M, inverse_M, i_G, N, p_payload, p_scale, p_levels, p_thresholds, p_cells, p_search, factor,
        TILING, B, BITS, ROUNDS, SCALE, K, C, E, M,
    )  # fmt: skip


@triton.jit
def _decode_tile(
    i_G, N, p_payload, p_scale, p_signs, p_levels, TILING: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr,
    ROUNDS: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """(numbers of a program's blocks [G, B] in fp32, but for their first signs and scales; these scales [G])."""
    T: tl.constexpr = B // E
    G: tl.constexpr = M // T
    L: tl.constexpr = 2**BITS
    o_G = i_G * G + tl.arange(0, G)
    if TILING == "full":
        s_G = _float(tl.load(p_scale + o_G))
    else:
        s_G = _float(tl.load(p_scale + o_G, mask=o_G < N, other=0.0))
    index_EM = tl.zeros([E, M], tl.int32)
    for j in tl.static_range(4):
        if BITS & (8 >> j):
            p_words = p_payload + _plane(i_G, 8 >> j, BITS, B, G)
            if TILING == "full":
                word_WG = tl.load(p_words)
            else:
                word_WG = tl.load(p_words, mask=(o_G < N)[None, :], other=0)
            index_EM = index_EM | _indices_of(word_WG, 8 >> j, BITS, E, G, T)

    levels = _entries(p_levels, L)  # 1/sqrt(B) a round here, as times the scale it could leave the range of fp32
    if L <= _SHUFFLED:
        y_EM = _lookup(levels * (B ** (-0.5 * ROUNDS)), index_EM, L, E, M)
    else:
        y_EM = _lookup(levels, index_EM, L, E, M) * (B ** (-0.5 * ROUNDS))
    for i in tl.static_range(ROUNDS - 1):
        y_EM = _signed(_across(_high(y_EM, E, M), E, G, T), p_signs + (ROUNDS - 1 - i) * B, E, G, T)
    return _low(_scattered(_high(y_EM, E, M), E, G, T), G, B, T), s_G


@triton.jit(do_not_specialize=["N", "P", "first_program"])
def _decode_kernel(
    p_payload, p_scale, p_out, p_signs, p_levels, n, D, N, P, first_program, largest,
    TILING: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr, ACCUMULATE: tl.constexpr,
    E: tl.constexpr, M: tl.constexpr, RARE: tl.constexpr = True,
):  # fmt: skip
    """RARE: see ``_encode_kernel``."""
    T: tl.constexpr = B // E
    G: tl.constexpr = M // T
    L: tl.constexpr = 2**BITS
    i_G = tl.program_id(0) + first_program
    y_GB, s_G = _decode_tile(i_G, N, p_payload, p_scale, p_signs, p_levels, TILING, B, BITS, ROUNDS, E, M)
    y_GB = y_GB * tl.load(p_signs + tl.arange(0, B))[None, :] * s_G[:, None]
    # |y| <= scale sqrt(B) (largest level): few programs have anything to clamp. A NaN stays NaN.
    bound_G = tl.abs(s_G) * (1.001 * B**0.5) * tl.load(p_levels + L - 1)
    if RARE and tl.max((bound_G >= largest).to(tl.int32), 0) > 0:
        y_GB = tl.clamp(y_GB, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    y_GB = y_GB.to(p_out.dtype.element_ty)

    first, o_GB, m_GB = _tile(n, D, N, P, i_G, TILING, B, G)
    if TILING == "full":
        if ACCUMULATE:
            y_GB += tl.load(p_out + first + o_GB)
        tl.store(p_out + first + o_GB, y_GB)
    else:
        if ACCUMULATE:
            y_GB += tl.load(p_out + first + o_GB, mask=m_GB)
        tl.store(p_out + first + o_GB, y_GB, mask=m_GB)


# --- host functions -------------------------------------------------------------------------------------------

_cells_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _cell_count(bits: int) -> int:
    """C, so many that no cell holds two thresholds of a Lloyd-Max table of N(0, 1) or of a sphere."""
    return 32 if bits <= 4 else 2 ** (bits + 1) if bits < 8 else 1024


def _cells(thresholds: Tensor, bits: int) -> Tensor:
    """int32 or int64 [C], see ``_cells_kernel``; kept as long as ``thresholds`` lives."""
    found = _cells_of.get(thresholds)
    if found is None:
        dtype = torch.int32 if _cell_count(bits) <= _SHUFFLED.value else torch.int64
        found = torch.empty(_cell_count(bits), dtype=dtype, device=thresholds.device)
        if bits > 1:
            count = _cell_count(bits)
            with torch.cuda.device_of(thresholds):
                _cells_kernel[(count // 32,)](thresholds, found.view(torch.int32), L=2**bits, C=count)
        _cells_of[thresholds] = found
    return found


@cache  # a graph may hold its addresses
def _search_table(search: Search, device: str) -> Tensor:
    """The multipliers, levels and cuts of a search one after the other, fp32."""
    multipliers, cuts, levels = search
    values = [*multipliers, *levels, *(cut for of_trial in cuts for cut in of_trial)]
    return torch.tensor(values, dtype=torch.float32, device=device)


def _check(x_RD: Tensor, payload_NW: Tensor) -> None:
    if not isinstance(_encode_kernel, triton.runtime.JITFunction):
        return  # the interpreter, on CPU tensors
    for tensor in (x_RD, payload_NW):
        if tensor.device.type != "cuda":
            raise RuntimeError(f"the Triton kernels work on CUDA tensors, got one on {tensor.device}")


def _launch(block: int, bits: int, search: int, rounds: int, dtype: torch.dtype) -> dict[str, int]:
    """E, M and launch options; search: K of an encoder, 0 for a decoder."""
    if search == 0:
        row = "decode" if rounds == 1 else "decode, rounds > 1"
    elif search > 1:
        row = "encode, search in integers" if bits <= _INTEGER_BITS.value else "encode, search"
    elif bits > 5:
        row = "encode, bits > 5"
    else:
        row = "encode" if rounds == 1 and dtype == torch.float32 else "encode, bf16 or rounds > 1"
    launch = dict(M=32 * NUM_WARPS, num_warps=NUM_WARPS) | LAUNCH[row]
    return launch | dict(E=min(block, launch["E"]))


def _run(
    kernel: Any, tensors: tuple[Tensor, ...], last: float, x_RD: Tensor, launch: dict[str, int], **constants: Any
) -> None:
    """Launch ``kernel`` over all blocks of x; twice where a tail needs masks that all others can go without."""
    (rows, d), block = x_RD.shape, constants["B"]
    per_row, n, tile = -(-d // block), x_RD.numel(), launch["M"] * launch["E"]
    programs, full = -(-rows * per_row * block // tile), n // tile
    if rows > 1 and d % block:
        pieces = [("rows", 0, programs)]
    else:
        pieces = [("full", 0, full), ("tail", full, programs - full)]
    with torch.cuda.device_of(x_RD):
        for tiling, first, count in pieces:
            if count:
                sizes = (n, d, rows * per_row, per_row, first)
                kernel[(count,)](*tensors, *sizes, last, TILING=tiling, **constants, **launch)


def _words(payload_NW: Tensor) -> Tensor:
    """The payload as int32 words; a copy where the bytes do not start on a word."""
    flat = payload_NW.view(-1)
    return (flat if flat.data_ptr() % 4 == 0 and flat.storage_offset() % 4 == 0 else flat.clone()).view(torch.int32)


def _signed_seed(seed: int) -> int:
    """The int64 with the bits of a seed in [0, 2**64)."""
    return seed - (1 << 64) if seed >> 63 else seed


def signs(block: int, rounds: int, seed: int, device: torch.device | str, step: Tensor | None = None) -> Tensor:
    """Random signs [R, B] in fp32, made where they are used: nothing is uploaded, nothing waits.

    seed: in [0, 2**64). step: int64 of one element on the device; the seed is then that of the step which it holds
    when this runs, as a CUDA graph wants it.
    """
    out = torch.empty(rounds, block, dtype=torch.float32, device=device)
    with torch.cuda.device_of(out):
        programs = -(-out.numel() // 128)
        _signs_kernel[(programs,)](step, out, _signed_seed(seed), SIZE=out.numel(), B=block, STEPPED=step is not None)
    return out


def encode(
    x_RD: Tensor,
    payload_NW: Tensor,
    scale_N: Tensor,
    *,
    signs_RB: Tensor,
    levels_L: Tensor,
    thresholds: Tensor,
    search: Search,
    bits: int,
    scale: str,
    factor: float = 1.0,
) -> None:
    """Encode ``factor`` times x [R, D] (fp32, bf16, fp16; contiguous) into payload uint8 [N, W] and scale [N].

    Every row starts new blocks, N = R * ceil(D / B), the last of a row zero-padded. scale_N: fp32 or bf16. signs_RB,
    levels_L, thresholds: fp32. scale: "paper", "mse", "unbiased" or "norm". Blocks with NaN or Inf, or whose scale
    does not fit ``scale_N.dtype``, get the scale NaN; those and zero blocks (scale 0) get payload 0. Raises
    RuntimeError for CPU tensors, unless Triton interprets.
    """
    _check(x_RD, payload_NW)
    assert scale in _SCALES and x_RD.is_contiguous()
    if x_RD.numel() == 0:
        return
    words = _words(payload_NW)
    tables = (signs_RB, levels_L, thresholds, _cells(thresholds, bits), _search_table(search, str(x_RD.device)))
    (rounds, block), trials = signs_RB.shape, len(search[0])
    constants = dict(B=block, BITS=bits, ROUNDS=rounds, SCALE=scale, K=trials, C=_cell_count(bits))
    launch = _launch(block, bits, trials, rounds, x_RD.dtype)
    _run(_encode_kernel, (x_RD, words, scale_N, *tables), float(factor), x_RD, launch, **constants)
    if words.data_ptr() != payload_NW.data_ptr():
        payload_NW.view(-1).copy_(words.view(torch.uint8))


def decode(
    payload_NW: Tensor,
    scale_N: Tensor,
    out_RD: Tensor,
    *,
    signs_RB: Tensor,
    levels_L: Tensor,
    bits: int,
    accumulate: bool = False,
) -> None:
    """Decode into out [R, D] (fp32, bf16, fp16; contiguous), or add to it (fp32 only); padding is dropped.

    A finite value beyond the range of ``out_RD.dtype`` becomes its largest; a NaN scale gives NaN. Raises
    RuntimeError for CPU tensors, unless Triton interprets.
    """
    _check(out_RD, payload_NW)
    assert out_RD.is_contiguous() and (not accumulate or out_RD.dtype == torch.float32)
    if out_RD.numel() == 0:
        return
    tensors = (_words(payload_NW), scale_N, out_RD, signs_RB, levels_L)
    rounds, block = signs_RB.shape
    constants = dict(B=block, BITS=bits, ROUNDS=rounds, ACCUMULATE=accumulate)
    launch = _launch(block, bits, 0, rounds, out_RD.dtype)
    _run(_decode_kernel, tensors, _LARGEST[out_RD.dtype], out_RD, launch, **constants)


# --- without a GPU --------------------------------------------------------------------------------------------


def compiled(
    kind: str,
    target: int,
    *,
    bits: int = 4,
    block: int = 128,
    rounds: int = 2,
    scale: str = "unbiased",
    search: int = 1,
    dtype: torch.dtype = torch.float32,
    scale_dtype: torch.dtype = torch.float32,
    accumulate: bool = False,
    tiling: str = "full",
    launch: dict[str, int] | None = None,
    rare: bool = True,
) -> tuple[Any, int]:
    """The "encode" or "decode" kernel compiled by Triton for compute capability ``target`` (80, 90), and its E.

    Needs no GPU. launch: E, M and launch options instead of the pinned ones. rare: with the branches that programs with
    numbers of usual sizes leave out. Not under TRITON_INTERPRET.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    encoder = kind == "encode"
    options = launch or _launch(block, bits, search if encoder else 0, rounds, dtype)
    constants = dict(TILING=tiling, B=block, BITS=bits, ROUNDS=rounds, E=options["E"], M=options["M"], RARE=rare)
    constants |= dict(SCALE=scale, K=search, C=_cell_count(bits)) if encoder else dict(ACCUMULATE=accumulate)
    kernel = _encode_kernel if encoder else _decode_kernel
    types = dict(p_payload="i32", p_scale=_DTYPES[scale_dtype], p_x=_DTYPES[dtype], p_out=_DTYPES[dtype])
    types["p_cells"] = "i32" if _cell_count(bits) <= _SHUFFLED.value else "i64"
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.startswith("p_"):
            signature[name] = "*" + types.get(name, "fp32")
        else:
            signature[name] = {"n": "i64", "factor": "fp32", "largest": "fp32"}.get(name, "i32")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n[:2] == "p_" or n in "nD"}
    options = {key: value for key, value in options.items() if key not in "EM"}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options), constants["E"]
