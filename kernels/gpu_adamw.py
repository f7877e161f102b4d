"""Triton kernel of AdamW on a GPU: one pass that reads gradient, weight and moments, and writes weight and moments.

A program works on a few blocks of a bucket. It decodes their moments, updates every parameter that has numbers among
them, and codes the moments anew, all in registers: one pass over memory, with two small launches before it for the
signs of the rotations. Numbers that kernels on a CPU take from the host (bias corrections, a clipping factor, whether
to do the step at all, the number of the step) lie in tensors on the device, so that a CUDA graph can hold the step;
what the host has to say goes there from page-locked memory, and nothing waits for it. Same results as the unfused path
up to rounding: products and sums may be contracted.

Shapes: n numbers of a bucket, one flat vector; N = ceil(n / B) blocks, B = 128; S segments (parameters); in a program
[E, M]: E numbers of a block in a thread, M threads, T = B / E to a block.
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
from .gpu import _cell_count, _cells, _check, _decode_tile, _encode_tile, _float, _halves, _signed_seed, _tile, _words
from .gpu_logscale import _DITHER, _INFINITY, _OCTAVE, _chances, _dither, _grid, _index, _number, _range
from .moments import Coded, Settings

BLOCK = 128
_THREADS = 32
_WEIGHTS = tl.constexpr(4)  # what Philox's numbers are for
_STEP = gpu._STEP
_ROW = tl.constexpr(8)  # fp32 numbers of a row of constants
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _seed_of(seed, p_step, AHEAD: tl.constexpr, STEPPED: tl.constexpr):
    """The seed; STEPPED: that of the step number AHEAD after the one at ``p_step``, under it."""
    if STEPPED:
        step = tl.load(p_step) + AHEAD
        low, high, _, _ = tl.philox(seed, step.to(tl.int32), (step >> 32).to(tl.int32), 0, _STEP)
        seed = (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64)
    return seed


@triton.jit
def _dither_tile(seed, i_G, USE: tl.constexpr, G: tl.constexpr, E: tl.constexpr, M: tl.constexpr):
    """The numbers of ``_dither`` for the blocks of a program, in its arrangement [E, M]."""
    return tl.permute(tl.reshape(_dither(seed, i_G.to(tl.int64) * G, USE, G), [M, E]), (1, 0))


@triton.jit
def _whole_range(place_EM, G: tl.constexpr, T: tl.constexpr):
    """Of the bits of each block's numbers, the same in all of its threads: the least but 0, and the greatest [M]."""
    low_G = tl.min(tl.reshape(tl.min(tl.where(place_EM == 0, _INFINITY, place_EM), 0), [G, T]), 1)
    high_G = tl.max(tl.reshape(tl.max(place_EM, 0), [G, T]), 1)
    low_M = tl.reshape(tl.broadcast_to(low_G[:, None], [G, T]), [G * T])
    return low_M, tl.reshape(tl.broadcast_to(high_G[:, None], [G, T]), [G * T])


@triton.jit
def _v_places(o_M, BITS: tl.constexpr, B: tl.constexpr, E: tl.constexpr, M: tl.constexpr):
    """Offsets [M, bytes] of the bytes of each thread's codes of v."""
    WIDTH: tl.constexpr = E * BITS // 8
    first_M = o_M.to(tl.int64) * (B * BITS // 8) + (tl.arange(0, M) % (B // E)) * WIDTH
    return first_M[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _decode_v(o_M, N, p_codes, p_ranges, BITS: tl.constexpr, B: tl.constexpr, E: tl.constexpr, M: tl.constexpr):
    PARTS: tl.constexpr = 8 // BITS
    live_M = o_M < N
    packed_MW = tl.load(p_codes + _v_places(o_M, BITS, B, E, M), mask=live_M[:, None], other=0).to(tl.int32)
    shifts = (tl.arange(0, PARTS) * BITS)[None, :, None]
    index_EM = tl.reshape((tl.permute(packed_MW, (1, 0))[:, None, :] >> shifts) & (2**BITS - 1), [E, M])
    low_M = tl.load(p_ranges + 2 * o_M, mask=live_M, other=0)
    high_M = tl.load(p_ranges + 2 * o_M + 1, mask=live_M, other=0)
    low_M, width_M = _grid(low_M, high_M, BITS)
    return _number(index_EM, low_M[None, :], width_M[None, :], high_M[None, :])


@triton.jit
def _encode_v(
    v_EM, chance_EM, o_M, N, p_codes, p_ranges, reach, BITS: tl.constexpr, B: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    T: tl.constexpr = B // E
    PARTS: tl.constexpr = 8 // BITS
    low_M, high_M = _whole_range(v_EM.to(tl.int32, bitcast=True), M // T, T)
    low_M, high_M = _range(low_M, high_M, reach)
    once_M = (o_M < N) & (tl.arange(0, M) % T == 0)
    tl.store(p_ranges + 2 * o_M, low_M.to(tl.int16), mask=once_M)
    tl.store(p_ranges + 2 * o_M + 1, high_M.to(tl.int16), mask=once_M)
    low_M, width_M = _grid(low_M, high_M, BITS)
    inverse_M = tl.div_rn(tl.full([M], 1.0, tl.float32), width_M)
    code_EM = _index(v_EM, chance_EM, low_M[None, :], width_M[None, :], inverse_M[None, :], BITS)
    packed_WM = tl.sum(tl.reshape(code_EM, [E // PARTS, PARTS, M]) << (tl.arange(0, PARTS) * BITS)[None, :, None], 1)
    places_MW = _v_places(o_M, BITS, B, E, M)
    tl.store(p_codes + places_MW, tl.permute(packed_WM, (1, 0)).to(tl.uint8), mask=(o_M < N)[:, None])


@triton.jit
def _updated(p, g, m, v, p_row):
    """(weights, m, v) after AdamW's step with the constants at ``p_row``, those of ``simd.adamw``."""
    w, c, beta2, left = tl.load(p_row), tl.load(p_row + 1), tl.load(p_row + 2), tl.load(p_row + 3)
    size, correction, eps = tl.load(p_row + 4), tl.load(p_row + 5), tl.load(p_row + 6)
    near = w < 0.5  # ``lerp`` starts from the nearer end
    m = tl.where(near, m, g) + tl.where(near, w, w - 1.0) * (g - m)
    v = v * beta2 + (c * g) * g
    root = tl.div_rn(tl.sqrt_rn(v), tl.full(v.shape, 0.0, tl.float32) + correction) + eps
    return p * left + tl.div_rn(size * m, root), m, v


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


@triton.jit(do_not_specialize=["seed", "weights_seed", "reach", "N"])
def _adamw_kernel(
    p_segments, p_first, p_rows, p_scalars, p_step, p_m, p_v, p_payload_old, p_scale_old, p_codes_old, p_ranges_old,
    p_payload, p_scale, p_codes, p_ranges, p_signs_old, p_signs, p_levels, p_thresholds, p_cells, p_search,
    n, N, seed, weights_seed, reach,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, M_BITS: tl.constexpr, V_BITS: tl.constexpr, SCALE: tl.constexpr,
    STARTED: tl.constexpr, STEPPED: tl.constexpr, AT_RANDOM: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
    E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """See ``step``. M_BITS 0: moments in fp32 at ``p_m`` and ``p_v``."""
    T: tl.constexpr = B // E
    G: tl.constexpr = M // T
    if tl.load(p_scalars + 2) != 0:  # the step is left out
        return
    divisor, factor = tl.load(p_scalars), tl.load(p_scalars + 1)
    i_G = tl.program_id(0)
    o_M = i_G * G + tl.arange(0, M) // T
    first, o_ME, m_ME = _tile(n, n, N, N, i_G, "tail", B, E, M)
    if M_BITS == 0:
        m_EM = tl.permute(tl.load(p_m + first + o_ME, mask=m_ME, other=0.0), (1, 0))
        v_EM = tl.permute(tl.load(p_v + first + o_ME, mask=m_ME, other=0.0), (1, 0))
    elif STARTED:
        m_EM, _0 = _decode_tile(o_M, N, p_payload_old, p_scale_old, p_signs_old, p_levels, B, M_BITS, 1, E, M)
        v_EM = _decode_v(o_M, N, p_codes_old, p_ranges_old, V_BITS, B, E, M)
    else:
        m_EM, v_EM = tl.zeros([E, M], tl.float32), tl.zeros([E, M], tl.float32)
    chance_EM = tl.zeros([E, M], tl.int32)
    if AT_RANDOM:
        chance_EM = _dither_tile(_seed_of(weights_seed, p_step, 0, STEPPED), i_G, _WEIGHTS, G, E, M)
    for k in range(tl.load(p_first + 2 * i_G), tl.load(p_first + 2 * i_G + 1)):
        start, size = tl.load(p_segments + 4 * k), tl.load(p_segments + 4 * k + 1)
        if tl.load(p_segments + 4 * k + 3) != 0:
            p_p = tl.load(p_segments + 4 * k + 2).to(tl.pointer_type(P_TYPE))
            p_g = tl.load(p_segments + 4 * k + 3).to(tl.pointer_type(G_TYPE))
            at_ME = first - start + o_ME
            mine_ME = (at_ME >= 0) & (at_ME < size)
            g_EM = _float(tl.permute(tl.load(p_g + at_ME, mask=mine_ME, other=0.0), (1, 0)))
            p_EM = _float(tl.permute(tl.load(p_p + at_ME, mask=mine_ME, other=0.0), (1, 0)))
            g_EM = tl.div_rn(g_EM, tl.full([E, M], 0.0, tl.float32) + divisor) * factor
            p_EM, new_m_EM, new_v_EM = _updated(p_EM, g_EM, m_EM, v_EM, p_rows + _ROW * k)
            mine_EM = tl.permute(mine_ME, (1, 0))
            m_EM, v_EM = tl.where(mine_EM, new_m_EM, m_EM), tl.where(mine_EM, new_v_EM, v_EM)
            kept_EM = _narrowed(p_EM, chance_EM, P_TYPE, AT_RANDOM)
            tl.store(p_p + at_ME, tl.permute(kept_EM, (1, 0)), mask=mine_ME)
    if M_BITS == 0:
        tl.store(p_m + first + o_ME, tl.permute(m_EM, (1, 0)), mask=m_ME)
        tl.store(p_v + first + o_ME, tl.permute(v_EM, (1, 0)), mask=m_ME)
    else:
        live_EM = tl.permute(m_ME, (1, 0))  # what lies beyond the bucket is zero in its last block
        a, b = _halves(tl.where(live_EM, m_EM, 0.0), E, M)
        _encode_tile(
            a, b, o_M, N, p_payload, p_scale, p_signs, p_levels, p_thresholds, p_cells, p_search, 1.0, B, M_BITS, 1,
            SCALE, 1, C, E, M,
        )  # fmt: skip
        chance_EM = _chances(_dither_tile(_seed_of(seed, p_step, 1, STEPPED), i_G, _DITHER, G, E, M))
        _encode_v(tl.where(live_EM, v_EM, 0.0), chance_EM, o_M, N, p_codes, p_ranges, reach, V_BITS, B, E, M)


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


def launch(m_bits: int) -> dict[str, int]:
    """E, M and launch options: the most numbers a thread that spill none in sm_90 code; not yet tuned by measurement.

    A plane of one bit, which odd ``m_bits`` have, wants 32 of them to a word, and those spill.
    """
    return dict(E=32 if m_bits % 2 else 16, M=_THREADS, num_warps=_THREADS // 32, maxnreg=255)


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
    options = launch(settings.m_bits if settings else 0)
    starts, first = _layout(sizes, options["E"] * options["M"], str(device))
    places = tuple(
        (start, size, p.data_ptr(), 0 if g is None else g.data_ptr())
        for start, size, p, g in zip(starts, sizes, parameters, gradients, strict=True)
    )
    if clock is None:
        scalars = _uploaded([divisor, -factor if negated else factor, 0.0], torch.float32, device)
        rows = _uploaded([[*row, 0.0] for row in constants], torch.float32, device)
        when = scalars
    else:
        assert isinstance(constants, Tensor)
        scalars, rows, when = clock.scalars, constants, clock.step
    assert all(p.dtype == parameters[0].dtype for p in parameters) and all(g.dtype == given[0].dtype for g in given)
    constant: dict[str, Any] = dict(
        P_TYPE=_DTYPES[parameters[0].dtype], G_TYPE=_DTYPES[(given or parameters)[0].dtype], STEPPED=clock is not None,
        AT_RANDOM=seed is not None and parameters[0].dtype == torch.bfloat16, B=BLOCK,
    )  # fmt: skip
    if settings is None:
        m, v = moments
        assert isinstance(m, Tensor) and isinstance(v, Tensor)
        tensors: list[Tensor] = [m, v, *[scalars] * 14]
        constant |= dict(M_BITS=0, V_BITS=8, SCALE="paper", STARTED=False, C=32)
        v_seed, reach = 0, 0
    else:
        before, after = moments
        assert isinstance(after, Coded) and not isinstance(before, Tensor)
        old = before or after
        tensors = [scalars, scalars]
        for code in (old, after):
            tensors += [_words(code.payload), code.scales, code.codes, code.ranges]
        assert tensors[6].data_ptr() == after.payload.data_ptr()  # else what is written would be lost
        tensors += [_signs(old, device, clock, 0), _signs(after, device, clock, 1), settings.levels_L]
        tensors += [settings.thresholds, _cells(settings.thresholds, settings.m_bits)]
        tensors += [gpu._search_table(((1.0,), (), ()), str(device))]
        constant |= dict(
            M_BITS=settings.m_bits, V_BITS=settings.v_bits, SCALE=settings.scale, STARTED=before is not None,
            C=_cell_count(settings.m_bits),
        )  # fmt: skip
        v_seed, reach = _signed_seed(after.dither), settings.octaves * _OCTAVE
    with torch.cuda.device_of(parameters[0]):
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        segments = _written(places, device) if captured else _segments(places, str(device))
        if clock is not None and not captured:
            _compile_write(str(device))
        _adamw_kernel[(first.shape[0],)](
            segments, first, rows, scalars, when, *tensors, numel, -(-numel // BLOCK), v_seed,
            _signed_seed(seed or 0), reach, **constant, **options,
        )  # fmt: skip


def _signs(code: Coded, device: torch.device, clock: Clock | None, ahead: int) -> Tensor:
    """Of the rotation of m, after as many steps as were done before this one, or one more."""
    block, rounds, seed = code.rotation
    assert block == BLOCK and rounds == 1
    when = None if clock is None else clock.step + ahead if ahead else clock.step
    return gpu.signs(block, rounds, seed, device, when)


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
    options = launch(m_bits)
    constants: dict[str, Any] = dict(
        P_TYPE=_DTYPES[dtype], G_TYPE=_DTYPES[dtype], M_BITS=m_bits, V_BITS=v_bits, SCALE="unbiased", STARTED=True,
        STEPPED=stepped, AT_RANDOM=at_random, C=_cell_count(m_bits) if m_bits else 32, B=BLOCK, E=options.pop("E"),
        M=options.pop("M"),
    )  # fmt: skip
    types = {"p_segments": "i64", "p_first": "i32", "p_step": "i64", "p_cells": "i64"}
    for suffix in ("", "_old"):
        scale = "bf16" if m_bits <= 6 else "fp32"
        types |= {f"p_{name}{suffix}": kind for name, kind in
                  (("payload", "i32"), ("scale", scale), ("codes", "u8"), ("ranges", "i16"))}  # fmt: skip
    scalars = {"n": "i64", "N": "i32", "seed": "i64", "weights_seed": "i64", "reach": "i32"}
    names = _adamw_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else scalars[name] if name in scalars else "*" + types.get(name, "fp32")
        for name in names
    }  # fmt: skip
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.startswith("p_")}
    source = ASTSource(_adamw_kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options), constants["E"]
