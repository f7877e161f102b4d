"""Packed codes times vectors, and attention straight from coded keys and values, on a GPU: each code is read once.

Codes stay in the rotated domain, as in ``matvec`` and ``attention``: vectors are rotated instead, and of attention's
values only the sum is rotated back, by whoever calls. A program works on some rows of a matrix, or on some tokens of
one key/value head; what programs found of a head's tokens is joined at the end.

Shapes: N blocks of a row, B block size, V vectors (1 to 8); K key/value heads, T tokens, D head size = block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gpu
from .gpu import _entries, _lookup
from .gpu_adamw import _uploaded

BITS = (2, 3, 4)
MOST, VECTORS = 4, 8  # queries of one key/value head; vectors of a product
TOKENS = 32  # of a program of attention


@triton.jit
def _plane(p_words, first_R, there_R, W: tl.constexpr, BITS: tl.constexpr, B: tl.constexpr, R: tl.constexpr):
    """The share of the plane of width W in the codes of ``_indices``."""
    FIRST: tl.constexpr = BITS // (2 * W) * (2 * W)
    place_RW = first_R[:, None] + (FIRST * B // 32 + tl.arange(0, B * W // 32))[None, :]
    word_RW = tl.load(p_words + place_RW, mask=there_R[:, None], other=0)
    part = (word_RW[:, :, None] >> (tl.arange(0, 32 // W) * W)[None, None, :]) & (2**W - 1)
    return tl.reshape(part, [R, B]) << FIRST


@triton.jit
def _indices(p_words, first_R, there_R, BITS: tl.constexpr, B: tl.constexpr, R: tl.constexpr):
    """Codes of one block of each of R rows, int32 [R, B], from the words that begin at ``first_R``."""
    if BITS == 4:
        return _plane(p_words, first_R, there_R, 4, BITS, B, R)
    elif BITS == 2:
        return _plane(p_words, first_R, there_R, 2, BITS, B, R)
    else:
        low_RB = _plane(p_words, first_R, there_R, 1, BITS, B, R)
        return low_RB | _plane(p_words, first_R, there_R, 2, BITS, B, R)


@triton.jit
def _product_kernel(
    p_payload, p_scale, p_x, p_levels, p_out, rows, N, BITS: tl.constexpr, B: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """out [V, rows] = matrix times rotated vectors x [V, N B]."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there_R = row_R < rows
    sum_VRB = tl.zeros([V, R, B], tl.float32)  # joined at the end: sums over threads are dear
    for n in range(N):
        block_R = row_R * N + n
        index_RB = _indices(p_payload, block_R * (B * BITS // 32), there_R, BITS, B, R)
        level_RB = _lookup(_entries(p_levels, 2**BITS), index_RB, 2**BITS, R, B)
        scale_R = gpu._float(tl.load(p_scale + block_R, mask=there_R, other=0.0))
        x_VB = tl.load(p_x + (tl.arange(0, V).to(tl.int64) * N + n)[:, None] * B + tl.arange(0, B)[None, :])
        sum_VRB = tl.fma((level_RB * scale_R[:, None])[None, :, :], x_VB[:, None, :], sum_VRB)
    p_own = p_out + tl.arange(0, V)[:, None] * rows + row_R[None, :]
    tl.store(p_own, tl.sum(sum_VRB, 2), mask=there_R[None, :])


@triton.jit
def _attend_kernel(
    p_pages, p_counts, p_x, p_key_levels, p_levels, p_sums, p_stats, heads, page, factor, KEY_BITS: tl.constexpr,
    BITS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, T: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Tokens ``T i ...`` of a page and head: their softmax's largest score and sum [V, 2], and values' sum [V, D].

    p_pages: int64 [items, 4], the addresses of keys, their scales, values, theirs; items: pages times heads.
    """
    item, part = tl.program_id(0), tl.program_id(1)
    head, parts = item % heads, tl.num_programs(1)
    count = tl.load(p_counts + item // heads)
    token_T = part * T + tl.arange(0, T)
    there_T = token_T < count
    p_keys = tl.load(p_pages + item * 4).to(tl.pointer_type(tl.int32))
    p_key_scales = tl.load(p_pages + item * 4 + 1).to(tl.pointer_type(SCALE))
    p_values = tl.load(p_pages + item * 4 + 2).to(tl.pointer_type(tl.int32))
    p_scales = tl.load(p_pages + item * 4 + 3).to(tl.pointer_type(SCALE))

    index_TD = _indices(p_keys, token_T * (D * KEY_BITS // 32), there_T, KEY_BITS, D, T)
    level_TD = _lookup(_entries(p_key_levels, 2**KEY_BITS), index_TD, 2**KEY_BITS, T, D)
    scale_T = gpu._float(tl.load(p_key_scales + token_T, mask=there_T, other=0.0)) * factor
    x_VD = tl.load(p_x + (head * V + tl.arange(0, V))[:, None] * D + tl.arange(0, D)[None, :])
    score_VT = tl.sum(level_TD[None, :, :] * x_VD[:, None, :], 2) * scale_T[None, :]
    score_VT = tl.where(there_T[None, :], score_VT, float("-inf"))
    largest_V = tl.max(score_VT, 1)
    share_VT = tl.where(there_T[None, :], tl.exp(score_VT - largest_V[:, None]), 0.0)

    index_TD = _indices(p_values, token_T * (D * BITS // 32), there_T, BITS, D, T)
    level_TD = _lookup(_entries(p_levels, 2**BITS), index_TD, 2**BITS, T, D)
    scale_T = gpu._float(tl.load(p_scales + token_T, mask=there_T, other=0.0))
    sum_VD = tl.sum((share_VT * scale_T[None, :])[:, :, None] * level_TD[None, :, :], 1)
    first = (item * parts + part) * V + tl.arange(0, V)
    tl.store(p_sums + first[:, None] * D + tl.arange(0, D)[None, :], sum_VD)
    tl.store(p_stats + first * 2, largest_V)
    tl.store(p_stats + first * 2 + 1, tl.sum(share_VT, 1))


# --- host functions -------------------------------------------------------------------------------------------


def _rows(vectors: int, block: int) -> int:
    """Rows of a program of a product, whose one warp holds a sum for each of their numbers."""
    return max(2 if block > 64 else 4, 16 * 64 // (vectors * block))


def _warps(vectors: int) -> int:
    """Warps of a program of attention."""
    return 1 if vectors <= 2 else 4


def _padded(x: Tensor, vectors: int) -> Tensor:
    """A power of two of vectors along the first dimension but one; those that are added are zero."""
    more = triton.next_power_of_2(vectors) - vectors
    return torch.nn.functional.pad(x, (0, 0, 0, more)) if more else x


def multiply(
    payload_NW: Tensor, scale_N: Tensor, rotated_VI: Tensor, block: int, bits: int, levels_L: Tensor
) -> Tensor:
    """Matrix times vectors, fp32 [V, rows], for a matrix whose row r has the blocks from r I / B on.

    payload_NW: uint8; scale_N: fp32 or bf16; rotated_VI, levels_L: fp32. All contiguous, on one GPU.
    """
    gpu._check(rotated_VI, payload_NW)
    vectors, columns = rotated_VI.shape
    count = columns // block
    assert bits in BITS and vectors <= VECTORS and columns % block == 0 and payload_NW.shape[1] == block * bits // 8
    rows = payload_NW.shape[0] // count
    x = _padded(rotated_VI, vectors)
    out, own = torch.empty(len(x), rows, device=x.device), _rows(len(x), block)
    with torch.cuda.device_of(x):
        _product_kernel[(-(-rows // own),)](
            gpu._words(payload_NW), scale_N, x, levels_L, out, rows, count, BITS=bits, B=block, V=len(x), R=own,
            num_warps=1,
        )  # fmt: skip
    return out[:vectors]


def attend(
    q_KVD: Tensor, pages: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], counts: Sequence[int],
    bits: tuple[int, int], levels: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs in the rotated domain, fp32 [K, V, D], and the logarithm of the sum of exp(score), [K, V].

    q_KVD: queries, rotated; pages: of keys the payload [K, page, bytes] and the scales [K, page, 1], of values
    likewise; counts: tokens in each; bits, levels: of keys and values.
    """
    heads, vectors, size = q_KVD.shape
    assert vectors <= MOST and pages and all(b in BITS for b in bits)
    gpu._check(q_KVD, pages[0][0])
    page, device = pages[0][0].shape[1], q_KVD.device
    where = [
        [part.data_ptr() + part.stride(0) * part.element_size() * head for part in each]
        for each in pages for head in range(heads)
    ]  # fmt: skip
    x = _padded(q_KVD, vectors).contiguous()
    width, parts = x.shape[1], -(-page // TOKENS)
    addresses, held = (_uploaded(rows, dtype, device) for rows, dtype in ((where, torch.int64), (counts, torch.int32)))
    sums = torch.empty(len(where), parts, width, size, device=device)
    stats = torch.empty(len(where), parts, width, 2, device=device)
    with torch.cuda.device_of(x):
        _attend_kernel[(len(where), parts)](
            addresses, held, x, *levels, sums, stats, heads, page, 1 / math.sqrt(size), KEY_BITS=bits[0],
            BITS=bits[1], D=size, V=width, T=TOKENS, SCALE=_SCALES[pages[0][1].dtype], num_warps=_warps(width),
        )  # fmt: skip
    largest, total = stats.view(len(pages), heads, parts, width, 2).unbind(4)
    weight = (largest - largest.amax((0, 2), keepdim=True)).exp()
    joined = (sums.view(len(pages), heads, parts, width, size) * weight[..., None]).sum((0, 2))
    total = (total * weight).sum((0, 2))
    return (joined / total[..., None])[:, :vectors], (largest.amax((0, 2)) + total.log())[:, :vectors]


_SCALES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


# --- without a GPU --------------------------------------------------------------------------------------------


def compiled(kind: str, target: int, *, bits: int = 4, block: int = 64, vectors: int = 1) -> Any:
    """The "product" or "attend" kernel compiled by Triton for a compute capability, for scales in bf16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = _product_kernel if kind == "product" else _attend_kernel
    constants: dict[str, Any] = dict(
        BITS=bits, B=block, V=vectors, R=_rows(vectors, block)
    ) if kind == "product" else dict(KEY_BITS=bits, BITS=bits, D=block, V=vectors, T=TOKENS, SCALE=tl.bfloat16)
    types = {"p_payload": "i32", "p_scale": "bf16", "p_pages": "i64", "p_counts": "i32"}
    signature = {
        name: "constexpr" if name in constants else "*" + types.get(name, "fp32") if name.startswith("p_")
        else "fp32" if name == "factor" else "i32"
        for name in kernel.arg_names
    }  # fmt: skip
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name.startswith("p_")}
    source, warps = ASTSource(kernel, signature, constants, aligned), 1 if kind == "product" else _warps(vectors)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": warps})
