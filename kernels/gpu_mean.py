"""The middle of a compressed mean over ranks on a GPU: codes of all ranks in, the code of their mean out, one launch.

Nothing in between is written to memory: a program decodes its blocks of one rank after another, adds them up in fp32 in
the order of the ranks, and encodes the sum. The signs of all ranks' rotations are made by one launch as well, from
seeds that lie on the device and the number of the step.

Shapes: S ranks, N blocks of a chunk, W packed bytes a block, R rounds, B block size; the rest as in ``gpu``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gpu
from .gpu import _SIGNS, _STEP, Search, _decode_tile, _encode_tile, _in_range, _out_of_range, _rotated, _tile


@triton.jit(do_not_specialize=["step"])
def _signs_kernel(p_seeds, p_signs, step, SIZE: tl.constexpr, B: tl.constexpr):
    """128 random signs a program for each of the seeds, of the seed that it has in this step; see ``gpu``'s."""
    row, i, o = tl.program_id(0), tl.program_id(1), tl.arange(0, 128)
    number = step.to(tl.int64)
    low, high, _, _ = tl.philox(tl.load(p_seeds + row), number.to(tl.int32), (number >> 32).to(tl.int32), 0, _STEP)
    seed = (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64)
    a, b, c, d = tl.philox(seed, i, B, 0, _SIGNS)
    word = tl.where(o < 32, a, tl.where(o < 64, b, tl.where(o < 96, c, d)))
    bit = ((word.to(tl.uint32) >> (o % 32).to(tl.uint32)) & 1).to(tl.float32)
    tl.store(p_signs + row * SIZE + i * 128 + o, 1.0 - 2.0 * bit, mask=i * 128 + o < SIZE)


@triton.jit
def _summed(
    i_G, ranks, room, n, N, p_parts, p_scales, p_signs, p_levels, SIZE: tl.constexpr, TILING: tl.constexpr,
    B: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Numbers [G, B] of a program's blocks, decoded and added up in fp32 over the ranks; zero beyond the end."""
    G: tl.constexpr = M * E // B
    largest = 3.4028234663852886e38
    sum_GB = tl.zeros([G, B], tl.float32)
    for r in range(ranks):
        at = r * room  # of fewer than 2**31 words in all
        y_GB, s_G = _decode_tile(
            i_G, N, p_parts + at * (B * BITS // 32), p_scales + at, p_signs + r * SIZE, p_levels, TILING, B, BITS,
            ROUNDS, E, M,
        )  # fmt: skip
        y_GB = y_GB * tl.load(p_signs + r * SIZE + tl.arange(0, B))[None, :] * s_G[:, None]
        bound_G = tl.abs(s_G) * (1.001 * B**0.5) * tl.load(p_levels + 2**BITS - 1)
        if tl.max((bound_G >= largest).to(tl.int32), 0) > 0:  # as a decoder into fp32 does
            y_GB = tl.clamp(y_GB, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
        sum_GB += y_GB
    if TILING != "full":
        _first, _o_GB, m_GB = _tile(n, n, N, N, i_G, TILING, B, G)
        sum_GB = tl.where(m_GB, sum_GB, 0.0)
    return sum_GB


@triton.jit(do_not_specialize=["ranks", "room", "N", "first_program"])
def _mean_kernel(
    p_parts, p_part_scales, p_signs, p_part_levels, p_payload, p_scale, p_levels, p_thresholds, p_cells, p_search,
    n, ranks, room, N, first_program, factor, SIZE: tl.constexpr, PART_BITS: tl.constexpr, PART_ROUNDS: tl.constexpr,
    TILING: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr, SCALE: tl.constexpr,
    K: tl.constexpr, C: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """room: blocks from one rank's code to the next. The signs of the second phase lie behind those of the ranks."""
    T: tl.constexpr = B // E
    G: tl.constexpr = M // T
    i_G = tl.program_id(0) + first_program
    sum_GB = _summed(
        i_G, ranks, room, n, N, p_parts, p_part_scales, p_signs, p_part_levels, SIZE, TILING, B, PART_BITS, PART_ROUNDS,
        E, M,
    )  # fmt: skip
    p_own, o_1B = p_signs + ranks * SIZE, tl.arange(0, B)[None, :]
    z_EM, norm2_M = _rotated(sum_GB * tl.load(p_own + o_1B), p_own, ROUNDS, E, G, T)
    inverse_M = tl.full([M], 1.0, tl.float32)
    if _out_of_range(norm2_M):
        x_GB, inverse_M = _in_range(sum_GB, G, T)
        z_EM, norm2_M = _rotated(x_GB * tl.load(p_own + o_1B), p_own, ROUNDS, E, G, T)
    _encode_tile(
        z_EM, norm2_M, inverse_M, i_G, N, p_payload, p_scale, p_levels, p_thresholds, p_cells, p_search, factor,
        TILING, B, BITS, ROUNDS, SCALE, K, C, E, M,
    )  # fmt: skip


@triton.jit(do_not_specialize=["ranks", "room", "N", "first_program"])
def _sum_kernel(
    p_parts, p_scale, p_signs, p_levels, p_out, n, ranks, room, N, first_program, divisor, SIZE: tl.constexpr,
    TILING: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr, ROUNDS: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    i_G = tl.program_id(0) + first_program
    sum_GB = _summed(
        i_G, ranks, room, n, N, p_parts, p_scale, p_signs, p_levels, SIZE, TILING, B, BITS, ROUNDS, E, M
    )
    first, o_GB, m_GB = _tile(n, n, N, N, i_G, TILING, B, M * E // B)
    y_GB = tl.div_rn(sum_GB, tl.zeros_like(sum_GB) + divisor).to(p_out.dtype.element_ty)
    if TILING == "full":
        tl.store(p_out + first + o_GB, y_GB)
    else:
        tl.store(p_out + first + o_GB, y_GB, mask=m_GB)


def signs(seeds: Tensor, step: int, block: int, rounds: int) -> Tensor:
    """Random signs [seeds, rounds, block] in fp32 of step number ``step``; seeds: int64, on the device."""
    out = torch.empty(len(seeds), rounds, block, dtype=torch.float32, device=seeds.device)
    with torch.cuda.device_of(out):
        _signs_kernel[(len(seeds), -(-rounds * block // 128))](
            seeds, out, gpu._signed_seed(step), SIZE=rounds * block, B=block
        )
    return out


def _launch(block: int, bits: int, trials: int, rounds: int) -> dict[str, int]:
    """That of an encoder of fp32, so that sums have its order; with all registers, as a sum stays in them beside what
    is decoded."""
    launch = gpu._launch(block, bits, trials, rounds, torch.float32)
    return {key: launch[key] for key in ("E", "M", "num_warps")}


def mean(
    parts_SNW: Tensor, part_scales_SN: Tensor, payload_NW: Tensor, scale_N: Tensor, numel: int, *, signs_SRB: Tensor,
    part_levels_L: Tensor, part_bits: int, part_rounds: int, levels_L: Tensor, thresholds: Tensor, search: Search,
    bits: int, rounds: int, scale: str,
) -> None:  # fmt: skip
    """Writes the code of the mean of S codes of ``numel`` elements: the same bits as to decode each, add and encode.

    parts_SNW: uint8, the ranks' payloads one after the other, of which each has room for N blocks; part_scales_SN,
    scale_N: fp32 or bf16. signs_SRB: fp32 [S + 1, R, B], the last of the code that is written; R: at least both
    numbers of rounds. Levels and thresholds: fp32. RuntimeError for CPU tensors, unless Triton interprets.
    """
    gpu._check(part_scales_SN, parts_SNW)
    (ranks, _), (more, size, block) = part_scales_SN.shape, signs_SRB.shape
    assert more == ranks + 1 and size >= max(rounds, part_rounds) and parts_SNW.is_contiguous()
    launch = _launch(block, bits, len(search[0]), rounds)
    tables = (levels_L, thresholds, gpu._cells(thresholds, bits), gpu._search_table(search, str(scale_N.device)))
    codes = (gpu._words(parts_SNW), part_scales_SN, signs_SRB, part_levels_L, gpu._words(payload_NW), scale_N)
    constants: dict[str, Any] = dict(
        SIZE=size * block, PART_BITS=part_bits, PART_ROUNDS=part_rounds, B=block, BITS=bits, ROUNDS=rounds, SCALE=scale,
        K=len(search[0]), C=gpu._cell_count(bits), **launch,
    )  # fmt: skip
    _run(_mean_kernel, (*codes, *tables), part_scales_SN, numel, 1 / ranks, constants)


def total(
    parts_SNW: Tensor, scales_SN: Tensor, out: Tensor, *, signs_SRB: Tensor, levels_L: Tensor, bits: int, rounds: int,
    divisor: float = 1.0,
) -> None:  # fmt: skip
    """Writes the sum of S codes, added up in fp32 in their order, over ``divisor`` into flat out; else as ``mean``."""
    gpu._check(out, parts_SNW)
    _, size, block = signs_SRB.shape
    launch = gpu._launch(block, bits, 0, rounds, torch.float32)
    launch = {key: launch[key] for key in ("E", "M", "num_warps")}
    tensors = (gpu._words(parts_SNW), scales_SN, signs_SRB, levels_L, out)
    constants = dict(SIZE=size * block, B=block, BITS=bits, ROUNDS=rounds, **launch)
    _run(_sum_kernel, tensors, scales_SN, out.numel(), divisor, constants)


def _run(
    kernel: Any, tensors: tuple[Tensor, ...], scales_SN: Tensor, numel: int, last: float, constants: dict[str, Any]
) -> None:
    """Launches over all blocks; twice where the end needs a mask that all others can go without."""
    (ranks, room), block = scales_SN.shape, constants["B"]
    blocks, tile = -(-numel // block), constants["M"] * constants["E"]
    programs, full = -(-blocks * block // tile), numel // tile
    with torch.cuda.device_of(scales_SN):
        for tiling, first, count in (("full", 0, full), ("tail", full, programs - full)):
            if count:
                kernel[(count,)](*tensors, numel, ranks, room, blocks, first, float(last), TILING=tiling, **constants)


# --- without a GPU --------------------------------------------------------------------------------------------


def compiled(
    target: int, *, bits: int = 4, block: int = 128, rounds: int = 2, scale: str = "unbiased", search: int = 1,
    tiling: str = "full",
) -> tuple[Any, int]:  # fmt: skip
    """The kernel of a mean compiled by Triton for a compute capability, both phases alike, and its E."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = _launch(block, bits, search, rounds)
    constants: dict[str, Any] = dict(
        SIZE=rounds * block, PART_BITS=bits, PART_ROUNDS=rounds, TILING=tiling, B=block, BITS=bits, ROUNDS=rounds,
        SCALE=scale, K=search, C=gpu._cell_count(bits), E=options["E"], M=options["M"],
    )  # fmt: skip
    types = dict(p_parts="i32", p_payload="i32", p_cells="i32" if gpu._cell_count(bits) <= 32 else "i64")
    signature = {
        name: "constexpr" if name in constants else "*" + types.get(name, "fp32") if name.startswith("p_")
        else {"n": "i64", "factor": "fp32"}.get(name, "i32")
        for name in _mean_kernel.arg_names
    }  # fmt: skip
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(_mean_kernel.arg_names)
        if name.startswith("p_") or name == "n"
    }  # fmt: skip
    source = ASTSource(_mean_kernel, signature, constants, aligned)
    options = {key: value for key, value in options.items() if key not in "EM"}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options), constants["E"]
