"""GPTQ in the rotated domain, with the codec's levels and searched scales: a matrix becomes a ``Code``.

A linear layer's inputs x have second moments H = E[x x^T]. Its output error for weights W' is
tr((W - W') H (W - W')^T), which rounding each number by itself does not minimise. Column by column, GPTQ (Frantar et
al. 2022, arXiv:2210.17323) rounds, and moves the error into the columns still to come. Here W and H are first rotated
as the codec rotates blocks of a row (QuaRot, arXiv:2404.00456, rotates for the same reason): columns of a block then
have nearly equal moments and Gaussian weights, for which the levels of Lloyd and Max are made. The scale of a block of
a row is searched with the rounding and its corrections inside the search; at the end all scales of a row are fitted to
H at once.

What comes out decodes like any other code: no calibration data, no permutation and no second matrix are kept.

Shapes: O rows (outputs), I columns (inputs), B block size, K multipliers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tq.quant.bits import pack
from tq.quant.codebook import lloyd_max
from tq.quant.codec import Code, Codec
from tq.quant.rotation import rotate

SEARCH = 24  # multipliers; more than these bring little


def multipliers(count: int, bits: int) -> list[float]:
    """Multiples of the rms that a search tries, about where the least squares lie: at few bits levels reach further."""
    if count == 1:
        return [1.0]
    low, high = {1: (0.7, 1.3), 2: (0.7, 1.25), 3: (0.7, 1.2)}.get(bits, (0.75, 1.2))
    return [low + (high - low) * k / (count - 1) for k in range(count)]


def gptq(weight_OI: Tensor, moments_II: Tensor, codec: Codec, *, damping: float = 0.01, search: int = SEARCH) -> Code:
    """The code of a weight matrix whose layer sees inputs with given second moments.

    Args:
        weight_OI: fp32 [O, I].
        moments_II: float64 [I, I], sums or means of x x^T over inputs x.
        codec: block size, bits, seed and type of scales; its ``scale`` and ``search`` are not used.
        damping: added to the moments' diagonal, in parts of its mean.
        search: multipliers of the rms tried for each block of a row.
    Returns:
        Code: of shape [O, I], with ``rows=True``, as ``codec.encode`` gives.
    Raises:
        ValueError: shapes do not fit, or numbers are not finite.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.gptq import gptq
        >>> weight, inputs = torch.randn(8, 128), torch.randn(500, 128).double()
        >>> gptq(weight, inputs.T @ inputs, Codec(bits=4, block=64)).nbytes
        576
    """
    w_OI, h_II = prepared(weight_OI, moments_II, codec)
    levels, _ = lloyd_max(codec.bits, codec.block if codec.codebook == "sphere" else None)
    levels_L = torch.tensor(levels, dtype=torch.float32)
    index_OI, scales_ON = rounded(w_OI, corrections(h_II, damping), codec, levels_L, search)
    scales_ON = refitted(w_OI, h_II, levels_L[index_OI], scales_ON, codec)
    payload = pack(index_OI.view(-1, codec.block), codec.bits)
    return Code(codec, tuple(weight_OI.shape), torch.float32, payload, scales_ON.reshape(-1), True)


def prepared(weight_OI: Tensor, moments_II: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Weights, fp32, and moments, float64, padded to whole blocks and rotated; ValueError where they do not fit."""
    columns = weight_OI.shape[1]
    if moments_II.shape != (columns, columns):
        raise ValueError(f"moments must be [{columns}, {columns}], got {list(moments_II.shape)}")
    if not (weight_OI.isfinite().all() and moments_II.isfinite().all()):
        raise ValueError("weights and moments must be finite")
    padded = -columns % codec.block
    w_OI = F.pad(weight_OI.detach().float(), (0, padded))
    h_II = F.pad(moments_II.double(), (0, padded, 0, padded))
    return turned(w_OI, codec), turned(turned(h_II, codec).T, codec)


def turned(x_RI: Tensor, codec: Codec) -> Tensor:
    """Each block of each row rotated as the codec does."""
    return rotate(x_RI.reshape(-1, codec.block), codec.rounds, codec.seed, codec.rotation).view(x_RI.shape)


def corrections(h_II: Tensor, damping: float) -> Tensor:
    """U, upper triangular with H^-1 = U^T U: row j says how an error of column j moves into those after it."""
    mean = float(h_II.diagonal().mean())
    eye = torch.eye(len(h_II), dtype=torch.float64)
    damped = h_II + eye * (damping * mean if mean > 0 else 1.0)
    for _ in range(8):  # moments of huge activations can be indefinite in spite of double precision
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(factor)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
        damped = damped + eye * 10 * damping * mean
    raise ValueError("the second moments are not positive definite, even damped")


def rounded(w_OI: Tensor, u_II: Tensor, codec: Codec, levels_L: Tensor, search: int) -> tuple[Tensor, Tensor]:
    """(indices [O, I], scales [O, I / B]): block by block, errors moved into the blocks to come."""
    try:
        from tq.kernels.gptq import LANES, round_block
    except ImportError as error:
        raise ImportError(f"{error.name} is not installed (pip install 'tq-book[infer]')") from error
    (rows, columns), block = w_OI.shape, codec.block
    u_II, w_OI = u_II.float(), F.pad(w_OI, (0, 0, 0, -rows % LANES))
    index_OI = torch.empty(rows, columns, dtype=torch.uint8)
    scales_ON = torch.empty(rows, columns // block, dtype=codec.scale_dtype)
    tries_K = torch.tensor(multipliers(search, codec.bits))
    for first in range(0, columns, block):
        inside, after = slice(first, first + block), slice(first + block, columns)
        w_BO, taken_BB = w_OI[:, inside].T.contiguous(), u_II[inside, inside].T.contiguous()
        rms_O = w_BO.norm(dim=0) * block**-0.5
        scale_KO = (tries_K[:, None] * rms_O).to(codec.scale_dtype)
        given = (x.numpy() for x in (w_BO, scale_KO.float().clamp(min=1e-30), taken_BB, levels_L))
        index_BO, error_BO, best_O = round_block(*given, codec.bits)
        index_OI[:, inside] = torch.from_numpy(index_BO).T[:rows]
        scales_ON[:, first // block] = scale_KO.gather(0, torch.from_numpy(best_O)[None])[0, :rows]
        w_OI[:, after] -= torch.from_numpy(error_BO).T @ u_II[inside, after]
    return index_OI.long(), scales_ON


def refitted(w_OI: Tensor, h_II: Tensor, q_OI: Tensor, scales_ON: Tensor, codec: Codec) -> Tensor:
    """Scales [O, N] that minimise the output error of each row for levels that are now fixed; kept where it is less."""
    rows, block = len(w_OI), codec.block
    count = w_OI.shape[1] // block
    h_II = h_II / h_II.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
    h32_II = h_II.float()
    products_ONN = torch.empty(rows, count, count, dtype=torch.float64)
    for n in range(count):  # q_n^T H q_m
        seen_OI = q_OI[:, n * block : (n + 1) * block] @ h32_II[n * block : (n + 1) * block]
        products_ONN[:, n] = (seen_OI * q_OI).view(rows, count, block).sum(2).double()
    target_ON = ((w_OI @ h32_II) * q_OI).view(rows, count, block).sum(2).double()
    ridge = 1e-6 * products_ONN.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30)
    damped = products_ONN + torch.eye(count, dtype=torch.float64) * ridge[:, None, None]
    fitted_ON = torch.linalg.solve(damped, target_ON).to(codec.scale_dtype)
    fitted_ON = torch.where(fitted_ON.isfinite() & (fitted_ON > 0), fitted_ON, scales_ON)

    def loss(s_ON: Tensor) -> Tensor:
        s_ON = s_ON.double()
        return (s_ON * (products_ONN @ s_ON[:, :, None]).squeeze(2)).sum(1) - 2 * (s_ON * target_ON).sum(1)

    return torch.where((loss(fitted_ON) < loss(scales_ON))[:, None], fitted_ON, scales_ON)


def output_error(weight_OI: Tensor, decoded_OI: Tensor, moments_II: Tensor) -> float:
    """Mean squared error of a layer's outputs over their mean square, for inputs with these second moments."""
    difference = (weight_OI - decoded_OI).double()
    wrong = ((difference @ moments_II) * difference).sum()
    whole = ((weight_OI.double() @ moments_II) * weight_OI.double()).sum()
    return float(wrong / whole) if whole > 0 else math.nan
