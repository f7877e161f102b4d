"""Weights as paths through a trellis: as many bits as plain codes, and a smaller error.

A plain code gives each weight one of 2**bits levels, whatever its neighbours have. Here the bits of a column's weights
are one stream, and a weight's value depends on the last 14 of them: its own and those of the weights before it. So
there are 16,384 values to choose from, and the Viterbi algorithm finds the stream whose values are nearest to the
weights. This is trellis-coded quantization (Marcellin and Fischer 1990); the values are computed as QTIP's "1MAD" does
(Tseng et al. 2024, arXiv:2406.11235): the number of the state times a constant, plus one, and the sum of the four bytes
of what comes out, which is nearly Gaussian. Nothing is looked up, and one instruction of x86 multiplies such a sum.

Rotations, the feedback of errors and fitted scales are those of ``tq.infer.gptq``, but that blocks of columns with the
loudest inputs come first: their errors can be put right in all the others. A path runs through up to 256 rows of one
column, because GPTQ rounds column after column and its rows do not meet: the search over paths costs nothing of its
corrections. A path ends in the state in which it began, so that no state is stored.

Shapes: O rows (outputs), I columns (inputs), P rows padded to 16, C columns padded to the block, N blocks of a row, S
states.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tq.infer.gptq import corrections, prepared, refitted
from tq.infer.layers import QuantizedLinear
from tq.quant.codec import Codec
from tq.quant.rotation import unrotate

BITS = (2, 3, 4, 5)
REACH = 1.12  # scale of a block in parts of its rms: values end at 3.1, and what lies beyond costs most
DAMPING = 0.03  # of the moments; it and REACH were settled on training texts, after trials on others
_FACTOR, _SUMMAND = 34038481, 76625530  # QTIP's
_MEAN, _DEVIATION = 510.0, (4 * (256**2 - 1) / 12) ** 0.5  # of a sum of four bytes that are drawn at random
_HEAD = struct.Struct("<QQ")
_LANES = 16


@cache
def values() -> Tensor:
    """The value of each state, fp32 [S], with a mean of zero and a variance of one but for a thousandth."""
    from tq.kernels.trellis import LENGTH

    word_S = np.arange(1 << LENGTH, dtype=np.uint32) * np.uint32(_FACTOR) + np.uint32(_SUMMAND)
    total_S = word_S.view(np.uint8).reshape(-1, 4).sum(1, dtype=np.int64)
    return torch.from_numpy(((total_S - _MEAN) / _DEVIATION).astype(np.float32))


@dataclass(frozen=True, eq=False)
class TrellisCode:
    """A matrix as paths.

    Args:
        codec: bits, block, seed and rotation, and the type of scales; its levels are not used.
        shape: of the matrix, (O, I).
        payload: uint8 [P * C * bits / 8]: run after run of rows; in each, column after column; in each, the bits of its
            rows, the first in the highest place of the first byte.
        scales: [O * N] of codec.scale_dtype.
    Raises:
        ValueError: a field is not as above.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.trellis import trellis
        >>> code = trellis(torch.randn(32, 128), torch.eye(128).double(), Codec(bits=3, block=64))
        >>> tuple(code.decode().shape), code.nbytes
        ((32, 128), 1792)
    """

    codec: Codec
    shape: tuple[int, int]
    payload: Tensor
    scales: Tensor
    rows: ClassVar[bool] = True  # blocks begin anew in each row, as in a ``Code`` of this kind

    def __post_init__(self) -> None:
        if self.codec.bits not in BITS:
            raise ValueError(f"bits must be one of {BITS}, got {self.codec.bits}")
        rows, columns = (-(-n // part) * part for n, part in zip(self.shape, (_LANES, self.codec.block), strict=True))
        if self.payload.dtype != torch.uint8 or self.payload.shape != (rows * columns * self.codec.bits // 8,):
            raise ValueError(f"payload does not fit {self.shape}, got {self.payload.dtype} {list(self.payload.shape)}")
        if (
            self.scales.shape != (self.shape[0] * columns // self.codec.block,)
            or self.scales.dtype != self.codec.scale_dtype
        ):
            raise ValueError(f"scales do not fit {self.shape}, got {self.scales.dtype} {list(self.scales.shape)}")

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.payload.nbytes + self.scales.nbytes

    def levels(self) -> Tensor:
        """The values of its states, rotated and without scales, fp32 [O, C]."""
        from tq.kernels.trellis import unpack

        rows, block = self.shape[0], self.codec.block
        columns = len(self.scales) // rows * block
        states_CP = unpack(self.payload.cpu().numpy(), self.codec.bits, -(-rows // _LANES) * _LANES, columns)
        levels_PC = values()[torch.from_numpy(states_CP.astype(np.int64))].T
        return levels_PC[:rows].contiguous().to(self.payload.device)

    def decode(self) -> Tensor:
        """The matrix as numbers, fp32 [O, I]."""
        (rows, columns), codec = self.shape, self.codec
        scaled_RB = self.levels().view(-1, codec.block) * self.scales.float()[:, None]
        return unrotate(scaled_RB, codec.rounds, codec.seed, codec.rotation).view(rows, -1)[:, :columns].contiguous()

    def to_bytes(self) -> bytes:
        """Its shape, payload and scales; not its codec."""
        parts = (x.cpu().contiguous().view(torch.uint8).numpy().tobytes() for x in (self.payload, self.scales))
        return _HEAD.pack(*self.shape) + b"".join(parts)

    @classmethod
    def from_bytes(cls, content: bytes, codec: Codec) -> TrellisCode:
        """What ``to_bytes`` gave for a code of this codec.

        Args:
            content: the bytes.
            codec: of the code.
        Raises:
            ValueError: it is not.
        """
        rows, columns = _HEAD.unpack_from(content) if len(content) > _HEAD.size else (0, 0)
        nbytes = -(-columns // codec.block) * rows * codec.scale_dtype.itemsize
        if not 0 < nbytes < len(content) - _HEAD.size:
            raise ValueError(f"{len(content)} bytes are no code of {codec.bits} bits")
        held = torch.frombuffer(bytearray(content[_HEAD.size :]), dtype=torch.uint8)
        payload, scales = held[:-nbytes], held[-nbytes:]
        return cls(codec, (rows, columns), payload.clone(), scales.clone().view(codec.scale_dtype))


def layout() -> dict[str, int]:
    """What the bits of a path depend on beside its shape: files say it, and none of another layout is read."""
    from tq.kernels.trellis import LENGTH, RUN

    return {"run": RUN, "length": LENGTH, "factor": _FACTOR, "summand": _SUMMAND}


def trellis(
    weight_OI: Tensor, moments_II: Tensor, codec: Codec, *, damping: float = DAMPING, reach: float = REACH
) -> TrellisCode:
    """The paths of a weight matrix whose layer sees inputs with given second moments.

    Args:
        weight_OI: fp32 [O, I].
        moments_II: float64 [I, I], sums or means of x x^T over inputs x.
        codec: block size, bits (2 to 5), seed and type of scales.
        damping: added to the moments' diagonal, in parts of its mean.
        reach: the scale of each block at first, in parts of its rms; all are fitted at the end.
    Returns:
        TrellisCode: of shape [O, I].
    Raises:
        ValueError: shapes do not fit, or numbers are not finite.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.gptq import gptq, output_error
        >>> from tq.infer.trellis import trellis
        >>> weight, moments = torch.randn(128, 128), torch.eye(128).double()
        >>> codec = Codec(bits=3, block=64)
        >>> plain = codec.decode(gptq(weight, moments, codec))
        >>> path = trellis(weight, moments, codec).decode()
        >>> output_error(weight, path, moments) < 0.7 * output_error(weight, plain, moments)
        True
    """
    if codec.bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}, got {codec.bits}")
    w_OC, h_CC = prepared(weight_OI, moments_II, codec)
    order_N, order_C = loudest_first(h_CC, codec.block)
    upper_CC = corrections(h_CC[order_C][:, order_C], damping)
    first_CP, first_ON = _rounded(w_OC[:, order_C], upper_CC, codec, reach)
    states_CP, scales_ON = np.empty_like(first_CP), torch.empty_like(first_ON)
    states_CP[order_C.numpy()], scales_ON[:, order_N] = first_CP, first_ON
    levels_OC = values()[torch.from_numpy(states_CP.astype(np.int64))].T[: len(w_OC)].contiguous()
    scales_ON = refitted(w_OC, h_CC, levels_OC, scales_ON, codec)
    from tq.kernels.trellis import pack

    payload = torch.from_numpy(pack(states_CP, codec.bits))
    return TrellisCode(codec, (weight_OI.shape[0], weight_OI.shape[1]), payload, scales_ON.reshape(-1))


def loudest_first(h_CC: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Blocks of columns, int64 [N], and columns, [C], in the order in which they are rounded."""
    order_N = h_CC.diagonal().view(-1, block).mean(1).argsort(descending=True, stable=True)
    return order_N, (order_N[:, None] * block + torch.arange(block)).view(-1)


def _rounded(w_OC: Tensor, u_CC: Tensor, codec: Codec, reach: float) -> tuple[np.ndarray, Tensor]:
    """(states uint16 [C, P], scales [O, N]): block by block, errors moved into the blocks to come."""
    try:
        from tq.kernels.trellis import round_block
    except ImportError as error:
        raise ImportError(f"{error.name} is not installed (pip install 'tq-book[infer]')") from error
    (rows, columns), block = w_OC.shape, codec.block
    u_CC, w_PC = u_CC.float(), F.pad(w_OC, (0, 0, 0, -rows % _LANES))
    states_CP = np.empty((columns, len(w_PC)), np.uint16)
    scales_PN = torch.empty(len(w_PC), columns // block, dtype=codec.scale_dtype)
    for first in range(0, columns, block):
        inside, after = slice(first, first + block), slice(first + block, columns)
        w_BP, taken_BB = w_PC[:, inside].T.contiguous(), u_CC[inside, inside].T.contiguous()
        scales_PN[:, first // block] = scale_P = (w_BP.norm(dim=0) * (reach * block**-0.5)).to(codec.scale_dtype)
        given = (x.numpy() for x in (w_BP, scale_P.float().clamp(min=1e-30), taken_BB, values()))
        states_CP[inside], error_BP = round_block(*given, codec.bits)
        w_PC[:, after] -= torch.from_numpy(error_BP).T @ u_CC[inside, after]
    return states_CP, scales_PN[:rows]


class TrellisLinear(QuantizedLinear):
    """A linear layer without bias whose weight is paths through a trellis.

    Args:
        code: of shape [O, I].
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.trellis import TrellisLinear, trellis
        >>> code = trellis(torch.randn(32, 128), torch.eye(128).double(), Codec(bits=3, block=64))
        >>> TrellisLinear(code)(torch.ones(2, 128)).shape
        torch.Size([2, 32])
    """

    def __init__(self, code: TrellisCode) -> None:
        super().__init__(code)  # type: ignore[arg-type]  # which asks for a shape and for rows alone

    @property
    def code(self) -> TrellisCode:  # type: ignore[override]
        """Its weight."""
        return TrellisCode(self.codec, (self.shape[0], self.shape[1]), self.payload, self.scales)

    def decoded(self) -> Tensor:
        """Its weight as numbers, fp32 [O, I]."""
        return self.code.decode()
