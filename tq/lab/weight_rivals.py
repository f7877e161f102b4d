"""Other quantizers of weights, on the same layers and calibration texts: what the codec's are measured beside.

Integers with a scale and a zero point for each group of a row, by rounding or by GPTQ, with columns in the order of
their activations' energy where asked for (static groups: as llm-compressor's "static" act-order). Each gives the
weights that a layer then uses, and the bits that it stores.

Shapes: O rows (outputs), I columns (inputs).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tq.infer.gptq import corrections

Quantizer = Callable[[Tensor, Tensor], Tensor]  # (weights [O, I], second moments of inputs [I, I]) to weights
SCALE_BITS = 16


def stored_bits(bits: int, group: int) -> float:
    """Per weight: an integer, and for each group a scale of 16 bits and a zero point of as many bits as a weight."""
    return bits + (SCALE_BITS + bits) / group


def _grid(w_OG: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(step, zero) of each row of a group, from its least and largest weight."""
    low_O, high_O = w_OG.amin(1).clamp(max=0), w_OG.amax(1).clamp(min=0)
    step_O = ((high_O - low_O) / (2**bits - 1)).clamp(min=1e-12).to(torch.float16).float().clamp(min=1e-7)
    return step_O, (-low_O / step_O).round()


def _on_grid(w: Tensor, step_O: Tensor, zero_O: Tensor, bits: int) -> Tensor:
    step, zero = (x if w.ndim == 1 else x[:, None] for x in (step_O, zero_O))
    return ((w / step).round() + zero).clamp(0, 2**bits - 1).sub(zero).mul(step)


def rounding(bits: int, group: int) -> Quantizer:
    """Each weight to the nearest point of its group's grid."""

    def quantize(weight_OI: Tensor, moments_II: Tensor) -> Tensor:
        parts = weight_OI.split(group, 1)
        return torch.cat([_on_grid(part, *_grid(part, bits), bits) for part in parts], 1)

    return quantize


def integer_gptq(bits: int, group: int, *, ordered: bool = True, damping: float = 0.01) -> Quantizer:
    """GPTQ on the grids of unrotated groups, which are fixed before the first column is rounded.

    Args:
        bits, group: of the integers, and weights with one grid.
        ordered: columns of the largest inputs first.
        damping: added to the moments' diagonal, in parts of its mean.
    """

    def quantize(weight_OI: Tensor, moments_II: Tensor) -> Tensor:
        columns = weight_OI.shape[1]
        order_I = moments_II.diagonal().argsort(descending=True) if ordered else torch.arange(columns)
        grids = [_grid(part, bits) for part in weight_OI.split(group, 1)]
        upper_II = corrections(moments_II[order_I][:, order_I], damping).float()
        work_IO, out_OI = weight_OI.T[order_I].contiguous(), torch.empty_like(weight_OI)
        for at in range(0, columns, 128):
            end = min(at + 128, columns)
            errors_BO = torch.empty(end - at, len(weight_OI))
            for j in range(at, end):
                column = int(order_I[j])
                rounded_O = _on_grid(work_IO[j], *grids[column // group], bits)
                out_OI[:, column] = rounded_O
                errors_BO[j - at] = (work_IO[j] - rounded_O) / upper_II[j, j]
                work_IO[j + 1 : end] -= upper_II[j, j + 1 : end, None] * errors_BO[j - at]
            work_IO[end:] -= upper_II[at:end, end:].T @ errors_BO
        return out_OI

    return quantize
