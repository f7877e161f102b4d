"""The block codec: rotate, scale, Lloyd-Max, pack. One stored scale per block; 1-8 bits per element.

Refused: float64 and integer tensors, entropy coding, learned rotations, stochastic rounding (all randomness is in the
rotation, which comes from the seed). Shapes: N blocks, B block size, W packed bytes per block."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from tq.quant import dispatch
from tq.quant.memory import apart, memory_range
from tq.quant.rotation import derive_seed, step_seed
from tq.quant.settings import (
    CODEBOOKS,
    DTYPES,
    NONFINITE,
    ROTATIONS,
    SCALE_DTYPES,
    SCALES,
    Settings,
    as_matrix,
    check_shape,
    int_in,
)

_MAGIC, _VERSION = b"TQCD", 2  # in version 1 a seed gave other signs
_PREFIX = struct.Struct("<4sHH16s")  # magic, version, header bytes, BLAKE2b of everything else
_FIELDS = struct.Struct("<BBHBBBBBHBBQ")  # bits, rounds, block, scale, rotation, codebook, scale dtype, nonfinite, ...
_MAX_HEADER = 256 - _PREFIX.size
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _outside_graph(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """A graph of ``torch.compile`` breaks at the method, as it has no addresses; fullgraph=True then raises."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():
            eager: Callable[_P, _R] = torch.compiler.disable(method, reason="tq.Codec works on addresses of memory")
            return eager(*args, **kwargs)
        return method(*args, **kwargs)

    return call


@dataclass(frozen=True)
class Codec(Settings):
    """Settings of the block codec: immutable, hashable, cheap to make.

    Each block is rotated, scaled and quantized to Lloyd-Max levels. ``bits_per_element`` (float) gives the stored bits
    per element of full blocks, bits + 8 * scale bytes / block.

    Args:
        bits: bits per element, 1-8.
        block: elements that share a scale: a power of two, 64-1024; any length 3-4096 with rotation="haar".
        scale: "paper" (rms), "mse" (least squares), "unbiased" (E[decode] = x over seeds) or "norm" (keeps the norm).
        rounds: Hadamard rounds, 1-3; 2 for unbiased use on structured input.
        search: scale multipliers tried per block, 1-64; at 4 bits, 13 reduce the error by a seventh. The search is this
            project's. Keep 1 with scale="paper": its rms scale ignores the multiplier, so a search adds error.
        seed: of the rotation, int in [0, 2**64).
        rotation: "hadamard" or "haar".
        codebook: "gaussian" or "sphere" (exact for a finite block).
        scale_dtype: torch.float32, or torch.bfloat16 for bits <= 6: above, its rounding adds error. fp16 is refused, as
            it would underflow on small gradients.
        nonfinite: "raise", or "propagate": a block with NaN or Inf decodes to NaN and nothing synchronises.
    Raises:
        TypeError, ValueError: an argument has the wrong type, is out of range or does not go with another.
    References:
        TurboQuant (Zandieh et al., arXiv:2504.19874); EDEN (Vargaftik et al. 2022) for the unbiased scale.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> codec = Codec(bits=4, block=128)
        >>> code = codec.encode(torch.ones(2, 300))
        >>> code.nbytes, codec.bits_per_element, codec.decode(code).shape
        (340, 4.25, torch.Size([2, 300]))
    """

    def derive(self, *keys: int | str) -> Codec:
        """The same codec with the seed of the stream named by ``keys`` (step, tensor, rank, ...)."""
        return self._reseeded(derive_seed(self.seed, *keys))

    def at_step(self, step: int) -> Codec:
        """The same codec with the seed of step number ``step``, an int in [0, 2**64)."""
        int_in("step", step, 0, 2**64 - 1)
        return self._reseeded(step_seed(self.seed, step))

    def _reseeded(self, seed: int) -> Codec:
        """What ``dataclasses.replace`` gives, without checking again what was checked: thousands are made a step."""
        codec = object.__new__(type(self))
        codec.__dict__.update(self.__dict__, seed=seed)
        return codec

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", rows: bool = False
    ) -> Code:
        """An uninitialised ``Code`` on ``device`` for tensors of this ``shape`` and ``dtype``, which ``encode(out=)``
        reuses; ``rows`` as there."""
        shape = tuple(shape)
        check_shape(shape)
        return Code(self, shape, dtype, *self._storage(shape, device, rows), rows)

    def _storage(self, shape: tuple[int, ...], device: torch.device | str, rows: bool) -> tuple[Tensor, Tensor]:
        """(payload, scales), uninitialised."""
        blocks = self.blocks(shape, rows)
        payload = torch.empty(blocks, self.packed_bytes, dtype=torch.uint8, device=device)
        return payload, torch.empty(blocks, dtype=self.scale_dtype, device=device)

    @_outside_graph
    def encode(
        self, x: Tensor, out: Code | None = None, impl: str = "auto", *, factor: float = 1.0, rows: bool = False
    ) -> Code:
        """Encode ``factor * x`` block by block in row-major order.

        Args:
            x: any shape; fp32, bf16 or fp16; CPU or CUDA. If not contiguous, it is copied first.
            out: ``Code`` of equal codec, shape, dtype, device and ``rows`` to write into, apart from ``x`` in memory.
            impl: "auto", "reference", "cpu" or "triton".
            factor: finite and positive; enters the scales, so a sum over ranks is encoded as a mean in the same pass.
            rows: each row of the last dimension starts a new block and is padded on its own. Rows (tokens, heads,
                channels) can then be sliced out of ``payload`` and ``scales``.
        Returns:
            Code: on the device of ``x``; ``out`` itself where given.
        Raises:
            TypeError: other inputs, such as DTensor and other subclasses, or tensors without memory.
            ValueError: bad argument, unfit ``out``; with nonfinite="raise", a block with NaN, Inf or scale overflow.
            RuntimeError: ``impl`` cannot run here.
        """
        read = _check_input(x)
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise TypeError(f"factor must be a finite positive number, got {factor!r}")
        if not 0.0 < factor < math.inf:
            raise ValueError(f"factor must be a finite positive number, got {factor}")
        if not isinstance(rows, bool):
            raise TypeError(f"rows must be True or False, got {rows!r}")
        if out is None:
            shape = tuple(x.shape)
            out = Code._unchecked(self, shape, x.dtype, *self._storage(shape, x.device, rows), rows)
        else:
            self._check_code_out(out, x, rows)
            if not all(apart(read, written) for written in out.check()):
                raise ValueError("out must not share memory with x")
            torch.autograd.graph.increment_version((out.payload, out.scales))
        values = x.detach() if x.requires_grad else x
        values = values.resolve_neg() if values.is_neg() else values
        x_RD = values.reshape(as_matrix(out.shape, rows)).contiguous()
        finite = dispatch.encode(self, x_RD, out.payload, out.scales, impl, float(factor))
        if self.nonfinite == "raise" and not (out.scales.isfinite().all() if finite is None else finite):
            raise ValueError(self._explain(x_RD, out.scales))
        return out

    def _check_code_out(self, out: Code, x: Tensor, rows: bool) -> None:
        if not isinstance(out, Code):
            raise TypeError(f"out must be a tq.Code, got {type(out).__name__}")
        wanted = (self, tuple(x.shape), x.dtype, x.device, rows)
        if (out.codec, out.shape, out.dtype, out.device, out.rows) != wanted:
            raise ValueError(
                "out must be a Code of {}, shape {}, {}, {}, rows={}; ".format(*wanted)
                + f"got {out.codec}, {out.shape}, {out.dtype}, {out.device}, rows={out.rows}"
            )

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

    @_outside_graph
    def decode(self, code: Code, out: Tensor | None = None, impl: str = "auto", *, accumulate: bool = False) -> Tensor:
        """Decode to the shape, dtype and device of the tensor that was encoded.

        Args:
            code: made by this codec.
            out: written to; same shape, dtype and device, no overlap with ``code`` or itself; copied if not contiguous.
            impl: as in ``encode``.
            accumulate: add to ``out``, which is then required and is float32 whatever was encoded.
        Returns:
            Tensor: the decoded values; ``out`` itself where given.
        Raises:
            TypeError: ``code`` is not a ``Code``, or ``out`` is a subclass or has no memory.
            ValueError: ``code`` is of another codec, or ``out`` does not fit or is missing.
        """
        if not isinstance(code, Code):
            raise TypeError(f"code must be a tq.Code, got {type(code).__name__}")
        if code.codec is not self and code.codec != self:
            raise ValueError(f"code was made by another codec: {code.codec}, this is {self}")
        read = code.check()
        dtype = torch.float32 if accumulate else code.dtype
        if out is None:
            if accumulate:
                raise ValueError("accumulate=True adds to out, which must be given; got None")
            out = torch.empty(code.shape, dtype=dtype, device=code.device)
        else:
            written = _check_out(out, code, dtype)
            if not all(apart(written, each) for each in read):
                raise ValueError("out must not share memory with the code that is decoded")
            torch.autograd.graph.increment_version(out)
        target = out.detach()
        direct = target.is_contiguous() and not target.is_neg()
        dense = target if direct else target.resolve_neg().contiguous()
        out_RD = dense.view(as_matrix(code.shape, code.rows))
        dispatch.decode(self, code.payload, code.scales, out_RD, impl, accumulate)
        if not direct:
            target.copy_(dense)
        return out

def _check_input(x: Tensor) -> tuple[int, int]:
    """The memory range of a tensor that can be encoded."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    memory = memory_range("x", x)
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    return memory

def _check_out(out: Tensor, code: Code, dtype: torch.dtype) -> tuple[int, int]:
    """The memory range of a tensor that ``code`` can be decoded into."""
    memory = memory_range("out", out)
    if out.shape != code.shape or out.dtype is not dtype or out.device != code.device:
        raise ValueError(
            f"out must have shape {code.shape}, {dtype}, {code.device}; "
            f"got {tuple(out.shape)}, {out.dtype}, {out.device}"
        )
    if out.is_contiguous():
        return memory
    reach = 1  # elements from the first to the last of the dimensions that were looked at
    for step, n in sorted((step, n) for step, n in zip(out.stride(), out.shape, strict=True) if n > 1):
        if step < reach and out.numel():
            raise ValueError(f"out must not hold an element twice, got shape {code.shape} with strides {out.stride()}")
        reach += step * (n - 1)
    return memory


@dataclass(frozen=True, eq=False)
class Code:
    """An encoded tensor, as ``Codec.encode`` returns it.

    Args:
        codec: the ``Codec`` that made it.
        shape: of the original tensor.
        dtype: of the original: torch.float32, torch.bfloat16 or torch.float16.
        payload: packed indices, uint8 [N, W], contiguous; may be a view of a larger tensor.
        scales: [N] of codec.scale_dtype, likewise; on the device of ``payload``, apart from it in memory.
        rows: each row of the last dimension starts a block; row r has P = ceil(shape[-1] / block) blocks from r * P on.
    Raises:
        TypeError, ValueError: a field is not as above. Checked here and again at each use.
    Example:
        >>> import torch
        >>> from tq import Code, Codec
        >>> code = Codec(bits=4).encode(torch.ones(1000))
        >>> tuple(code.payload.shape), tuple(code.scales.shape), code.nbytes
        ((8, 64), (8,), 544)
        >>> Code.from_bytes(code.to_bytes()).payload.equal(code.payload)
        True
    """

    codec: Codec
    shape: tuple[int, ...]
    dtype: torch.dtype
    payload: Tensor
    scales: Tensor
    rows: bool = False

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def _unchecked(cls, *values: Any) -> Code:
        """A code of parts just made for it: to check them takes as long as to encode 8,000 numbers."""
        code = object.__new__(cls)
        code.__dict__.update(zip(cls.__match_args__, values, strict=True))
        return code

    def check(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The ranges of memory of payload and scales. Raises as the constructor does: tensors can change in place."""
        if not isinstance(self.codec, Codec):
            raise TypeError(f"codec must be a tq.Codec, got {type(self.codec).__name__}")
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}")
        if not isinstance(self.rows, bool):
            raise TypeError(f"rows must be True or False, got {self.rows!r}")
        check_shape(self.shape)
        blocks = self.codec.blocks(self.shape, self.rows)
        payload = _check_part("payload", self.payload, torch.uint8, (blocks, self.codec.packed_bytes))
        scales = _check_part("scales", self.scales, self.codec.scale_dtype, (blocks,))
        if self.payload.device != self.scales.device:
            raise ValueError(f"scales must be on {self.payload.device} as the payload is, got {self.scales.device}")
        if not apart(payload, scales):
            raise ValueError("scales must not share memory with the payload")
        return payload, scales

    @property
    def device(self) -> torch.device:
        """Where payload and scales lie."""
        return self.payload.device

    @property
    def nbytes(self) -> int:
        """Stored bytes (int): packed indices and scales, padding of the last block included."""
        return self.payload.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> Code:
        """The same code on ``device``."""
        return dataclasses.replace(self, payload=self.payload.to(device), scales=self.scales.to(device))

    def to_bytes(self) -> bytes:
        """Serialize with magic, version, checksum, codec and shape: at most 256 bytes more than ``nbytes``.

        Returns:
            bytes: deterministic, equal codes give equal bytes.
        Raises:
            ValueError: the description of the shape does not fit the header.
        """
        self.check()
        header = self._header()
        body = header + _raw(self.payload) + _raw(self.scales)
        start = _PREFIX.pack(_MAGIC, _VERSION, len(header), b"")[:8]
        return start + _digest(start, body) + body

    def _header(self) -> bytes:
        c = self.codec
        header = _FIELDS.pack(
            c.bits, c.rounds, c.block, SCALES.index(c.scale), ROTATIONS.index(c.rotation),
            CODEBOOKS.index(c.codebook), SCALE_DTYPES.index(c.scale_dtype), NONFINITE.index(c.nonfinite),
            c.search, DTYPES.index(self.dtype), self.rows, c.seed,
        )  # fmt: skip
        header += b"".join(_varint(n) for n in (len(self.shape), *self.shape))
        if len(header) > _MAX_HEADER:
            raise ValueError(f"shape with {len(self.shape)} dimensions does not fit the header: {self.shape}")
        return header

    @classmethod
    def from_bytes(cls, data: bytes, device: torch.device | str = "cpu") -> Code:
        """Inverse of ``to_bytes``.

        Args:
            data: bytes, bytearray or memoryview.
            device: of the result.
        Returns:
            Code: in memory of its own.
        Raises:
            TypeError: ``data`` is not bytes.
            ValueError: ``data`` is truncated, altered, lengthened or of another format version.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data must be bytes, got {type(data).__name__}")
        data = bytes(data)
        if len(data) < _PREFIX.size or data[:4] != _MAGIC:
            raise ValueError(f"not a tq code: {len(data)} bytes that start with {data[:4]!r}, expected {_MAGIC!r}")
        _, version, header_bytes, digest = _PREFIX.unpack_from(data)
        if version != _VERSION:
            old = ", in which seeds gave other signs" if version == 1 else ""
            raise ValueError(f"tq code of format version {version}{old}; this release reads version {_VERSION}")
        body = data[_PREFIX.size :]
        if _digest(data[:8], body) != digest:
            raise ValueError(f"damaged tq code: the checksum over {len(data)} bytes does not match")
        return cls._parse(body[:header_bytes], body[header_bytes:], device)

    @classmethod
    def _parse(cls, header: bytes, content: bytes, device: torch.device | str) -> Code:
        try:
            if len(header) > _MAX_HEADER:
                raise ValueError(f"a header of {len(header)} bytes, at most {_MAX_HEADER}")
            codec, shape, dtype, rows = _read_header(header)
            blocks = codec.blocks(shape, rows)
        except (IndexError, struct.error, TypeError, ValueError) as error:
            raise ValueError(f"damaged tq code: {error}") from error
        if len(content) != blocks * codec.block_bytes:  # before anything of the size that the header says is made
            wanted = blocks * codec.block_bytes
            raise ValueError(f"damaged tq code: {len(content)} bytes of content, the header says {wanted}")
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        payload, scales = raw.split([blocks * codec.packed_bytes, blocks * codec.scale_dtype.itemsize])
        stored = scales.clone().view(codec.scale_dtype)  # cloned, as their bytes need not start on a multiple of four
        try:
            code = cls(codec, shape, dtype, payload.clone().view(blocks, codec.packed_bytes), stored, rows)
        except ValueError as error:
            raise ValueError(f"damaged tq code: {error}") from error
        if code._header() != header:
            raise ValueError("damaged tq code: its header is not the one that its fields give")
        return code.to(device)

def _check_part(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int]:
    """The range of memory of a payload or of scales; see ``Code.check``."""
    memory = memory_range(name, x)
    if x.dtype is not dtype or x.shape != shape:
        raise ValueError(f"{name} must be {dtype} of shape {shape}, got {x.dtype} of shape {tuple(x.shape)}")
    if not x.is_contiguous() or x.is_neg():
        how = "a lazy negation" if x.is_neg() else f"strides {x.stride()}"
        raise ValueError(f"{name} must be contiguous, got {how}: pass its contiguous() copy")
    return memory

def _read_header(header: bytes) -> tuple[Codec, tuple[int, ...], torch.dtype, bool]:
    """(codec, shape, dtype, rows) of a code; IndexError, ValueError or struct.error where it is none."""
    (bits, rounds, block, scale, rotation, codebook, scale_dtype, nonfinite, search, dtype, rows, seed) = (
        _FIELDS.unpack_from(header)
    )
    codec = Codec(
        bits, block, SCALES[scale], rounds, search, seed, rotation=ROTATIONS[rotation], codebook=CODEBOOKS[codebook],
        scale_dtype=SCALE_DTYPES[scale_dtype], nonfinite=NONFINITE[nonfinite],
    )  # fmt: skip
    ndim, at = _read_varint(header, _FIELDS.size)
    shape = []
    for _ in range(ndim):
        size, at = _read_varint(header, at)
        shape.append(size)
    return codec, tuple(shape), DTYPES[dtype], bool(rows)

def _digest(start: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, key=start).digest()

def _raw(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().view(-1).view(torch.uint8).numpy().tobytes()

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
