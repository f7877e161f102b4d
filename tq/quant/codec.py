"""The block codec: rotate, scale, Lloyd-Max, pack. One stored scale a block; 1-8 bits an element.

Sources: TurboQuant (Zandieh et al., arXiv:2504.19874), EDEN (Vargaftik et al. 2022) for the unbiased scale; the search
over scale multipliers is this project's. Refused: float64 and integer tensors, entropy coding, learned rotations,
stochastic rounding (the randomness is all in the rotation, and it comes from the seed).

Shapes: N blocks, B block size, W packed bytes a block.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from tq.quant import dispatch
from tq.quant.bits import packed_bytes
from tq.quant.codebook import MIN_DIM
from tq.quant.rotation import derive_seed, is_power_of_two

SCALES = ("paper", "mse", "unbiased", "norm")
ROTATIONS = ("hadamard", "haar")
CODEBOOKS = ("gaussian", "sphere")
NONFINITE = ("raise", "propagate")
SCALE_DTYPES = (torch.float32, torch.bfloat16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HAAR_DIM = 4096  # a dense float64 matrix of 128 MiB

_MAGIC, _VERSION = b"TQCD", 1
_PREFIX = struct.Struct("<4sHH16s")  # magic, version, header bytes, BLAKE2b of everything else
_FIELDS = struct.Struct("<BBHBBBBBHBBQ")  # bits, rounds, block, scale, rotation, codebook, scale dtype, nonfinite, ...


def _int_in(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int from {low} to {high}, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {value}")


def _one_of(name: str, value: object, accepted: tuple[object, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}; got {value!r}")


def _matrix(shape: tuple[int, ...], rows: bool) -> tuple[int, int]:
    """Shape [rows, dim] as the kernels see it: one row for the whole tensor, or the rows of its last dimension."""
    if not rows:
        return 1, math.prod(shape)
    if not shape:
        raise ValueError("rows=True needs at least one dimension, got a scalar")
    return math.prod(shape[:-1]), shape[-1]


@dataclass(frozen=True)
class Codec:
    """Settings of the codec; immutable, hashable, cheap to make. A bad argument raises here.

    bits: 1-8 an element. block: elements that share a scale (a power of two, 64-1024; any length 3-4096 with
    rotation="haar"). scale: how the stored scale is chosen: "paper" (rms), "mse" (least squares), "unbiased"
    (E[decode] = x over seeds), "norm" (keeps the norm). rounds: Hadamard rounds 1-3 (2 for unbiased use on structured
    input). search: number K of scale multipliers tried, 1-64. seed: int in [0, 2**64). rotation: "hadamard" or "haar".
    codebook: "gaussian" or "sphere" (exact for finite block). scale_dtype: torch.float32, or torch.bfloat16 for
    bits <= 6 (fp16 would underflow on small gradients; above 6 bits bf16's own rounding is seen in the error).
    nonfinite: "raise", or "propagate": a block with NaN or Inf decodes to NaN and nothing synchronises.
    """

    bits: int = 4
    block: int = 128
    scale: str = "unbiased"
    rounds: int = 2
    search: int = 1
    seed: int = 0
    rotation: str = "hadamard"
    codebook: str = "gaussian"
    scale_dtype: torch.dtype = torch.float32
    nonfinite: str = "raise"

    def __post_init__(self) -> None:
        _int_in("bits", self.bits, 1, 8)
        _one_of("rotation", self.rotation, ROTATIONS)
        if self.rotation == "haar":
            _int_in("block", self.block, MIN_DIM, MAX_HAAR_DIM)
        else:
            _int_in("block", self.block, 64, 1024)
            if not is_power_of_two(self.block):
                raise ValueError(f"block must be a power of two with rotation='hadamard', got {self.block}")
        _one_of("scale", self.scale, SCALES)
        _int_in("rounds", self.rounds, 1, 3)
        _int_in("search", self.search, 1, 64)
        _int_in("seed", self.seed, 0, 2**64 - 1)
        _one_of("codebook", self.codebook, CODEBOOKS)
        _one_of("scale_dtype", self.scale_dtype, SCALE_DTYPES)
        if self.scale_dtype == torch.bfloat16 and self.bits > 6:
            raise ValueError(f"scale_dtype=torch.bfloat16 is accepted for bits <= 6, got bits={self.bits}")
        _one_of("nonfinite", self.nonfinite, NONFINITE)

    @property
    def sphere_dim(self) -> int | None:
        """Dimension of the sphere codebook, None for the Gaussian one."""
        return self.block if self.codebook == "sphere" else None

    @property
    def packed_bytes(self) -> int:
        """Payload bytes W of one block, without its scale."""
        return packed_bytes(self.bits, self.block)

    @property
    def bits_per_element(self) -> float:
        """Stored bits an element, scale included: bits + 8 * scale bytes / block (full blocks)."""
        return 8.0 * (self.packed_bytes + self.scale_dtype.itemsize) / self.block

    def derive(self, *keys: int | str) -> Codec:
        """The same codec with the seed of the stream named by ``keys`` (step, tensor, rank, ...)."""
        return dataclasses.replace(self, seed=derive_seed(self.seed, *keys))

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", rows: bool = False
    ) -> Code:
        """An uninitialised ``Code`` for tensors of this shape: what ``encode(out=)`` reuses."""
        shape = tuple(shape)
        count, dim = _matrix(shape, rows)
        blocks = count * -(-dim // self.block)
        payload = torch.empty(blocks, self.packed_bytes, dtype=torch.uint8, device=device)
        scales = torch.empty(blocks, dtype=self.scale_dtype, device=device)
        return Code(self, shape, dtype, payload, scales, rows)

    def encode(
        self, x: Tensor, out: Code | None = None, impl: str = "auto", *, factor: float = 1.0, rows: bool = False
    ) -> Code:
        """Encode ``factor * x`` (any shape; fp32, bf16 or fp16; CPU or CUDA) block by block in row-major order.

        out: a ``Code`` of the same codec, shape, dtype, device and ``rows`` to write into. impl: "auto", "reference",
        "cpu" or "triton". factor: a finite positive number; it goes into the scales, so the mean of a sum over ranks
        is encoded in the same pass. rows: every row of the last dimension starts a new block, padded on its own, so
        that rows (tokens, heads, channels) can be cut out of ``payload`` and ``scales``. A tensor that is not
        contiguous is copied first. Raises TypeError for other inputs, ValueError where ``out`` does not fit or, with
        nonfinite="raise", where a block holds NaN or Inf or its scale overflows.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
        if x.layout != torch.strided:
            raise TypeError(f"x must be a dense tensor, got layout {x.layout}")
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise TypeError(f"factor must be a finite positive number, got {factor!r}")
        if not 0.0 < factor < math.inf:
            raise ValueError(f"factor must be a finite positive number, got {factor}")
        if out is None:
            out = self.empty(tuple(x.shape), x.dtype, x.device, rows)
        elif (out.codec, out.shape, out.dtype, out.device, out.rows) != (
            wanted := (self, tuple(x.shape), x.dtype, x.device, rows)
        ):
            raise ValueError(
                "out must be a Code of {}, shape {}, {}, {}, rows={}; ".format(*wanted)
                + f"got {out.codec}, {out.shape}, {out.dtype}, {out.device}, rows={out.rows}"
            )
        x_RD = (x.detach() if x.requires_grad else x).reshape(_matrix(out.shape, rows)).contiguous()
        finite = dispatch.encode(self, x_RD, out.payload, out.scales, impl, float(factor))
        if self.nonfinite == "raise" and not (out.scales.isfinite().all() if finite is None else finite):
            raise ValueError(self._explain(x_RD, out.scales))
        return out

    def _explain(self, x_RD: Tensor, scales: Tensor) -> str:
        index = int((~scales.isfinite()).nonzero()[0, 0])
        row, column = divmod(index, -(-x_RD.shape[1] // self.block))
        values = x_RD[row, column * self.block : (column + 1) * self.block]
        bad = (~values.isfinite()).nonzero()
        if bad.numel():
            at = int(bad[0, 0])
            flat = row * x_RD.shape[1] + column * self.block + at
            return (
                f"block {index} holds {values[at].item()} at flat index {flat}; "
                "nonfinite='propagate' decodes such blocks to NaN"
            )
        return (
            f"block {index} has a scale beyond the range of {self.scale_dtype} "
            f"(largest magnitude {values.abs().max().item():.3g})"
        )

    def decode(self, code: Code, out: Tensor | None = None, impl: str = "auto", *, accumulate: bool = False) -> Tensor:
        """Decode to the shape, dtype and device that was encoded. Raises ValueError for a code of another codec.

        out: tensor of that shape, dtype and device to write into (one that is not contiguous costs a copy).
        accumulate: add to ``out``, which must then be given and be float32 whatever was encoded.
        """
        if not isinstance(code, Code):
            raise TypeError(f"code must be a tq.Code, got {type(code).__name__}")
        if code.codec is not self and code.codec != self:
            raise ValueError(f"code was made by another codec: {code.codec}, this is {self}")
        dtype = torch.float32 if accumulate else code.dtype
        if out is None:
            if accumulate:
                raise ValueError("accumulate=True adds to out, which must be given; got None")
            out = torch.empty(code.shape, dtype=dtype, device=code.device)
        elif (tuple(out.shape), out.dtype, out.device) != (code.shape, dtype, code.device):
            raise ValueError(
                f"out must have shape {code.shape}, {dtype}, {code.device}; "
                f"got {tuple(out.shape)}, {out.dtype}, {out.device}"
            )
        written = out.detach()
        dense = written if written.is_contiguous() else written.contiguous()
        out_RD = dense.view(_matrix(code.shape, code.rows))
        dispatch.decode(self, code.payload, code.scales, out_RD, impl, accumulate)
        if dense is not written:
            written.copy_(dense)
        return out


@dataclass(frozen=True, eq=False)
class Code:
    """An encoded tensor. payload: uint8 [N, W]; scales: [N] of codec.scale_dtype; shape, dtype: of the original.

    rows: every row of the last dimension starts a new block; row r then has the P = ceil(shape[-1] / codec.block)
    blocks from r * P on.
    """

    codec: Codec
    shape: tuple[int, ...]
    dtype: torch.dtype
    payload: Tensor
    scales: Tensor
    rows: bool = False

    @property
    def device(self) -> torch.device:
        return self.payload.device

    @property
    def nbytes(self) -> int:
        """Stored bytes: packed indices and scales, padding of the tail included."""
        return self.payload.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> Code:
        return dataclasses.replace(self, payload=self.payload.to(device), scales=self.scales.to(device))

    def to_bytes(self) -> bytes:
        """Self-describing bytes (magic, version, checksum, codec, shape), at most 256 more than ``nbytes``.

        Deterministic: equal codes give equal bytes. Raises ValueError for shapes whose description does not fit.
        """
        c = self.codec
        header = _FIELDS.pack(
            c.bits, c.rounds, c.block, SCALES.index(c.scale), ROTATIONS.index(c.rotation),
            CODEBOOKS.index(c.codebook), SCALE_DTYPES.index(c.scale_dtype), NONFINITE.index(c.nonfinite),
            c.search, DTYPES.index(self.dtype), self.rows, c.seed,
        )  # fmt: skip
        header += b"".join(_varint(n) for n in (len(self.shape), *self.shape))
        if _PREFIX.size + len(header) > 256:
            raise ValueError(f"shape with {len(self.shape)} dimensions does not fit the header: {self.shape}")
        body = header + _raw(self.payload) + _raw(self.scales)
        start = _PREFIX.pack(_MAGIC, _VERSION, len(header), b"")[:8]
        return start + _digest(start, body) + body

    @classmethod
    def from_bytes(cls, data: bytes, device: torch.device | str = "cpu") -> Code:
        """Inverse of ``to_bytes``. Anything truncated, altered, lengthened or of a later version: ValueError."""
        data = bytes(data)
        if len(data) < _PREFIX.size or data[:4] != _MAGIC:
            raise ValueError(f"not a tq code: {len(data)} bytes that start with {data[:4]!r}, expected {_MAGIC!r}")
        _, version, header_bytes, digest = _PREFIX.unpack_from(data)
        if version != _VERSION:
            raise ValueError(f"tq code of format version {version}; this release reads version {_VERSION}")
        body = data[_PREFIX.size :]
        if _digest(data[:8], body) != digest:
            raise ValueError(f"damaged tq code: the checksum over {len(data)} bytes does not match")
        return cls._parse(body[:header_bytes], body[header_bytes:], device)

    @classmethod
    def _parse(cls, header: bytes, content: bytes, device: torch.device | str) -> Code:
        try:
            (bits, rounds, block, scale, rotation, codebook, scale_dtype, nonfinite, search, dtype, rows, seed) = (
                _FIELDS.unpack_from(header)
            )
            codec = Codec(
                bits, block, SCALES[scale], rounds, search, seed, ROTATIONS[rotation], CODEBOOKS[codebook],
                SCALE_DTYPES[scale_dtype], NONFINITE[nonfinite],
            )  # fmt: skip
            ndim, at = _read_varint(header, _FIELDS.size)
            shape = []
            for _ in range(ndim):
                size, at = _read_varint(header, at)
                shape.append(size)
            code = codec.empty(tuple(shape), DTYPES[dtype], rows=bool(rows))
        except (IndexError, struct.error, RuntimeError) as error:
            raise ValueError(f"damaged tq code: {error}") from error
        split = code.payload.nbytes
        if at != len(header) or len(content) != code.nbytes:
            raise ValueError(f"damaged tq code: {len(content)} bytes of content, the header says {code.nbytes}")
        if content:
            raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            code.payload.view(-1).copy_(raw[:split])
            code.scales.view(torch.uint8).copy_(raw[split:])
        return code.to(device)


def _digest(start: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, key=start).digest()


def _raw(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _varint(n: int) -> bytes:
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
