"""Moments in few bits, and a tensor of them that a checkpoint can cut and move.

``CodedTensor`` looks like fp32 numbers and keeps their codes. Copies, pickles and ``torch.distributed.checkpoint`` move
the codes, so the same layout comes back bit for bit; whatever else looks at the numbers has them decoded. Part of it
may be overwritten, as a checkpoint of another layout does: it then holds fp32 until the optimizer codes it anew.

A file with such tensors loads with ``weights_only=True`` where this module has been imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from tq.quant.codec import Code, Codec
from tq.quant.logscale import LogCodec
from tq.train._torch_private import is_mutable, wrapper

BLOCK, M_SCALE = 128, "unbiased"
_PARTS = {"m": ("m.payload", "m.scales"), "v": ("v.codes", "v.ranges")}  # names in an optimizer's state
NAMES = (*_PARTS["m"], *_PARTS["v"])
_aten = torch.ops.aten


class MomentCodecs:
    """How m and v are kept: ``bits`` of m (2-8) and of v (2, 4 or 8). Every block of 128 numbers has a code of its own.

    The rotation of m and the rounding of v change with ``step``, the number of the step whose moments they are.
    """

    def __init__(self, bits: tuple[int, int]) -> None:
        self.bits = {"m": bits[0], "v": bits[1]}

    def of_m(self, step: int | None) -> Codec:
        """The codec of m in a step; None: that whose seed the steps' are under."""
        return _m_codec(self.bits["m"], step)

    def of_v(self) -> LogCodec:
        """The codec of v."""
        return LogCodec(self.bits["v"], BLOCK)

    def parts(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Payload and scales of m, codes and ranges of v."""
        return [tensors[part] for part in NAMES]

    def empty(self, numel: int, device: torch.device) -> dict[str, Tensor]:
        """Uninitialised tensors for the codes of m and v [n]."""
        m, blocks = self.of_m(0).empty((numel,), torch.float32, device), -(-numel // BLOCK)
        codes = torch.empty(blocks, BLOCK * self.bits["v"] // 8, dtype=torch.uint8, device=device)
        ranges = torch.empty(blocks, 2, dtype=torch.int16, device=device)
        return dict(zip(NAMES, (m.payload, m.scales, codes, ranges), strict=True))

    def encode(self, name: str, x: Tensor, step: int) -> dict[str, Tensor]:
        """The two tensors of the code of flat fp32 numbers [n], ceil(n / 128) rows each."""
        if name == "v":
            parts = self.of_v().encode(x, step)
        else:
            code = self.of_m(step).encode(x)
            parts = code.payload, code.scales
        return dict(zip(_PARTS[name], parts, strict=True))

    def decode(self, name: str, tensors: dict[str, Tensor], numel: int, step: int) -> Tensor:
        """fp32 [numel] of what ``encode`` gave in the same step."""
        codes, scales = (tensors[part] for part in _PARTS[name])
        return _decoded(name, self.bits[name], step, codes, scales)[:numel]

    def piece(self, name: str, tensors: dict[str, Tensor], start: int, shape: torch.Size, step: int) -> CodedTensor:
        """The numbers from ``start`` on as a tensor of that shape: the rows of the code in which they lie."""
        first = start // BLOCK
        end = -(-(start + shape.numel()) // BLOCK) if shape.numel() else first
        codes, scales = (tensors[part][first:end] for part in _PARTS[name])
        cell: Cell = {
            "name": name, "bits": self.bits[name], "step": step if name == "m" else 0,
            "start": start % BLOCK, "codes": codes, "scales": scales, "dense": None,
        }  # fmt: skip
        return CodedTensor(cell, shape)

    def joined(self, name: str, pieces: Sequence[Tensor], step: int) -> dict[str, Tensor] | None:
        """The code of all pieces in a row, if they are codes of just such a row; else None.

        A block that two pieces share must be the same in both.
        """
        columns: tuple[list[Tensor], list[Tensor]] = [], []
        last: list[Tensor] = []
        at = 0
        for piece in pieces:
            if not isinstance(piece, CodedTensor) or piece.cell["dense"] is not None:
                return None
            if piece.numel():
                cell = piece.cell
                found = cell["name"], cell["bits"], cell["step"], cell["start"]
                if found != (name, self.bits[name], step if name == "m" else 0, at % BLOCK):
                    return None
                mine = [cell["codes"], cell["scales"]]
                if at % BLOCK and not all(torch.equal(x[0], y) for x, y in zip(mine, last, strict=True)):
                    return None
                for column, x in zip(columns, mine, strict=True):
                    column.append(x[1:] if at % BLOCK else x)
                last = [x[-1] for x in mine]
                at += piece.numel()
        return {part: torch.cat(c) for part, c in zip(_PARTS[name], columns, strict=True)} if at else None


def _m_codec(bits: int, step: int | None) -> Codec:
    scale_dtype = torch.bfloat16 if bits <= 6 else torch.float32
    codec = Codec(bits, BLOCK, M_SCALE, rounds=1, scale_dtype=scale_dtype, nonfinite="propagate").derive("m")
    return codec if step is None else codec.at_step(step)


def _decoded(name: str, bits: int, step: int, codes: Tensor, scales: Tensor) -> Tensor:
    numel = len(codes) * BLOCK
    if name == "v":
        return LogCodec(bits, BLOCK).decode(codes.contiguous(), scales.contiguous(), numel)
    codec = _m_codec(bits, step)
    return codec.decode(Code(codec, (numel,), torch.float32, codes, scales))


class Cell(TypedDict):
    """What the views of a ``CodedTensor`` share. dense: fp32 numbers that took the place of the codes."""

    name: str
    bits: int
    step: int
    start: int
    codes: Tensor
    scales: Tensor
    dense: Tensor | None


class CodedTensor(Tensor):
    """fp32 numbers of any shape, kept as rows of codes: number i is the one after ``start + i`` in these blocks."""

    cell: Cell

    @staticmethod
    def __new__(cls, cell: Cell, shape: Sequence[int]) -> CodedTensor:
        device = cell["codes"].device
        return wrapper(cls, tuple(shape), torch.float32, device)

    def __init__(self, cell: Cell, shape: Sequence[int]) -> None:
        self.cell = cell

    def decoded(self) -> Tensor:
        """fp32 of its shape; not to be written to."""
        if self.cell["dense"] is not None:
            return self.cell["dense"].view(self.shape)
        cell = self.cell
        numbers = _decoded(cell["name"], cell["bits"], cell["step"], cell["codes"], cell["scales"])
        return numbers[cell["start"] : cell["start"] + self.numel()].view(self.shape)

    def densified(self) -> Tensor:
        """fp32 of its shape that from now on takes the place of the codes: who writes to it writes to this tensor."""
        dense = self.cell["dense"]
        if dense is None:
            dense = self.cell["dense"] = self.decoded().clone()
        return dense.view(self.shape)

    def copied(self, device: torch.device | None = None) -> CodedTensor:
        """The same codes in memory of their own, on another device perhaps."""
        on = self.device if device is None else device
        cell: Any = {k: x.to(on, copy=True) if isinstance(x, Tensor) else x for k, x in self.cell.items()}
        return CodedTensor(cell, self.shape)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CodedTensor({self.cell['name']}, bits={self.cell['bits']}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        x, kwargs = args[0], kwargs or {}
        if isinstance(x, CodedTensor):
            alike = func in _RESHAPES and tuple(args[1]) == tuple(x.shape)
            if func in (_aten.detach.default, _aten.alias.default) or (alike and func is _aten.view.default):
                return CodedTensor(x.cell, x.shape)
            if func is _aten.clone.default or alike:  # new_empty: what stages a checkpoint fills it field by field
                return x.copied(kwargs.get("device"))
            if func is _aten._to_copy.default and kwargs.get("dtype") in (None, torch.float32):
                return x.copied(kwargs.get("device"))
            if func is _aten.copy_.default and isinstance(args[1], CodedTensor) and args[1].shape == x.shape:
                x.cell.update(args[1].copied(x.device).cell)
                return x
            if func is _aten.is_pinned.default:
                return False
        writes = is_mutable(func)
        plain = cls.densified if writes or func in _VIEWS else cls.decoded  # a view may be written to
        out = func(*_each(plain, args), **{key: _each(plain, value) for key, value in kwargs.items()})
        return x if writes and isinstance(x, CodedTensor) else out


def _each(call: Callable[[CodedTensor], Tensor], x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(_each(call, part) for part in x)
    return call(x) if isinstance(x, CodedTensor) else x


_RESHAPES = (_aten.view.default, _aten.new_empty.default)
_VIEWS = (_aten.slice.Tensor, _aten.select.int)  # by which a checkpoint of another layout fills a tensor
torch.serialization.add_safe_globals([CodedTensor])
