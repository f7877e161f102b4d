"""Selective checkpointing whose kept results are quantized: products are kept, everything else is computed again.

A checkpoint keeps the input of a part of the model and runs the part again in backward; a selective one also keeps
results that are expensive to compute [Korthikanti et al. 2022]. Here those are kept in a few bits: in the second run a
product is not computed, but decoded. So a part costs no more time than its cheap operations and the codec, and no more
bytes than its input and the quantized products. The forward pass is exact. Refused: compilation, which has no such
hook; there ``tq.train.linear`` serves.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tq.quant.codec import DTYPES, Code, Codec
from tq.quant.memory import is_dense
from tq.train._torch_private import DispatchMode

_aten = torch.ops.aten
PRODUCTS = frozenset(
    (
        _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    )
)  # fmt: skip


class _Call(NamedTuple):
    """A call whose results are kept: each a (code, shape, stride), or as it is."""

    func: Any
    shapes: list[tuple[int, ...]]
    parts: list[Any]


class CodedResults:
    """``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``; one serves a whole run.

    What is computed again from a decoded product has the codec's noise: gradients stay unbiased as far as they are
    linear in it; through a nonlinearity, a norm or a softmax it enters at second order.

    Args:
        codec: quantizer of the kept results; NaN and Inf propagate. None: 4 bits, blocks of 128, an unbiased scale and
            bfloat16 scales.
        operations: of ``torch.ops.aten`` whose results are kept, by default products, convolutions and attention;
            those that draw random numbers (dropout) are computed again.
        min_elements: smaller results are kept as they are.
        step: number of the first checkpointed part.

    Attributes:
        step: number of the next checkpointed part, which selects its rotations. To resume a run, save it and set it.
        kept_bytes (int): bytes kept of the parts so far, without their inputs.

    Raises:
        TypeError: ``codec`` is no ``Codec``.
        ValueError: ``min_elements`` or ``step`` is no integer in its range.
        RuntimeError: in backward, where the second run of a part makes other calls than the first.

    References:
        Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models" (arXiv:2205.05198),
        for selective recomputation.

    Example:
        >>> import torch
        >>> from torch.utils.checkpoint import checkpoint
        >>> from tq.train.recompute import CodedResults
        >>> part, results = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), CodedResults()
        >>> output = checkpoint(part, torch.ones(256, 64), use_reentrant=False, context_fn=results)
        >>> output.sum().backward()
        >>> results.kept_bytes, output.nbytes, results.step
        (8448, 65536, 1)
    """

    def __init__(
        self,
        codec: Codec | None = None,
        *,
        operations: frozenset[Any] = PRODUCTS,
        min_elements: int = 1024,
        step: int = 0,
    ):
        codec = Codec(scale_dtype=torch.bfloat16) if codec is None else codec
        if not isinstance(codec, Codec):
            raise TypeError(f"codec must be a tq.Codec or None, got {type(codec).__name__}")
        for name, value, low in (("min_elements", min_elements, 1), ("step", step, 0)):
            if not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be an int of at least {low}, got {value!r}")
        self.codec = dataclasses.replace(codec, nonfinite="propagate")
        self.operations, self.min_elements, self.step, self.kept_bytes = operations, min_elements, step, 0

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Make the contexts of the first and of the second run of one part; called by ``checkpoint``."""
        kept: list[_Call] = []
        codec = self.codec.derive("result").at_step(self.step)
        self.step += 1
        return _First(self, codec, kept), _Second(self, kept)

    def keeps(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the result of the call ``func(*args, **kwargs)`` is kept."""
        if func not in self.operations:
            return False
        arguments = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        return not arguments.get("dropout_p")


class _First(DispatchMode):
    """Codes results as they come."""

    def __init__(self, of: CodedResults, codec: Codec, kept: list[_Call]):
        super().__init__()
        self.of, self.codec, self.kept = of, codec, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.of.keeps(func, args, kwargs or {}):
            # what comes after the result itself are statistics of an attention, which scale whole rows
            parts = [self._keep(part, number == 0) for number, part in enumerate(_parts(result))]
            self.kept.append(_Call(func, _shapes(args), parts))
        return result

    def _keep(self, part: Any, codable: bool) -> Any:
        if not isinstance(part, Tensor):
            return part
        large = part.dtype in DTYPES and part.numel() >= self.of.min_elements
        if not (codable and large and is_dense(part)):
            self.of.kept_bytes += part.nbytes
            return part
        flat = part.as_strided((part.numel(),), (1,), part.storage_offset())
        code = self.codec.derive(len(self.kept)).encode(flat)
        self.of.kept_bytes += code.nbytes
        return code, tuple(part.shape), part.stride()


class _Second(DispatchMode):
    """Gives back what was kept, in the order of the calls."""

    def __init__(self, of: CodedResults, kept: list[_Call]):
        super().__init__()
        self.of, self.kept, self.next = of, kept, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.of.keeps(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        call = self.kept[self.next] if self.next < len(self.kept) else None
        if call is None or (call.func, call.shapes) != (func, _shapes(args)):
            raise RuntimeError(f"the second run of a checkpointed part made other calls than the first: {func}")
        self.next += 1
        parts = [_restored(part) for part in call.parts]
        return parts[0] if len(func._schema.returns) == 1 else tuple(parts)

    def __enter__(self) -> _Second:
        self.next = 0  # a graph that is retained is gone through again
        super().__enter__()
        return self


def _parts(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _restored(part: Any) -> Any:
    if isinstance(part, tuple) and part and isinstance(part[0], Code):
        code, shape, stride = part
        return code.codec.decode(code).as_strided(shape, stride)
    return part


def _shapes(args: tuple[Any, ...]) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in args if isinstance(x, Tensor)]
