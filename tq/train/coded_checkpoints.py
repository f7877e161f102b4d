"""Checkpoints whose inputs are quantized: the fewest bytes at once in backward, at the price of a second forward pass.

A checkpointed block keeps its input alone and runs again in backward [Chen et al. 2016]. Here the input is quantized,
and so is what the second run saves, so that at its peak backward holds the codes of all inputs and one block's codes.
The first run is exact; gradients are those of the decoded input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from tq.quant.codec import DTYPES, Codec
from tq.train.activations import compress_activations


class _FromCode(torch.autograd.Function):
    """A call of which the code of the first argument is kept, and the others as they are. Parameters are arguments too,
    so that their gradients go where autograd sends them."""

    @staticmethod
    def forward(ctx: Any, run: Any, codec: Codec, kept: tuple[Any, ...], x: Tensor, *weights: Tensor) -> Any:
        ctx.run, ctx.kept, ctx.weights, ctx.codec, ctx.code = run, kept, weights, codec, codec.encode(x.detach())
        ctx.kind = x.device.type
        ctx.autocast = torch.is_autocast_enabled(ctx.kind), torch.get_autocast_dtype(ctx.kind)
        ctx.random, ctx.devices = torch.get_rng_state(), get_device_states(x)
        others, named = kept
        return run(x, *others, **named)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, (others, named) = ctx.codec.decode(ctx.code).requires_grad_(), ctx.kept
        (enabled, dtype), (devices, states) = ctx.autocast, ctx.devices
        with torch.random.fork_rng(devices, device_type=ctx.kind if devices else "cuda"):
            torch.set_rng_state(ctx.random)
            if devices:
                set_device_states(devices, states, device_type=ctx.kind)
            with (
                torch.enable_grad(),
                torch.autocast(ctx.kind, dtype=dtype, enabled=enabled),
                compress_activations(ctx.codec, bits=ctx.codec.bits),
            ):
                results = ctx.run(x, *others, **named)
        results = results if isinstance(results, tuple) else (results,)
        pairs = [(y, g) for y, g in zip(results, gradients, strict=True) if g is not None and y.requires_grad]
        asked = [x, *ctx.weights]
        found = torch.autograd.grad([y for y, _ in pairs], asked, [g for _, g in pairs], allow_unused=True)
        return None, None, None, *found


class coded_checkpoints:
    """A context in which calls of these modules keep the codes of their input, and run again in backward.

    Make one for the whole run and enter it for each forward pass; backward may follow outside. ``step`` counts the
    passes, and each has other rotations, so that errors average out. Random numbers and autocast of the second run are
    those of the first.

    Args:
        blocks: modules, as ``model.blocks``. The first argument of each is a tensor of a coded dtype that requires a
            gradient; other arguments are kept as they are and get none. They return a tensor or a tuple of tensors.
        bits: of the inputs and of what a second run saves, 1-8.
        codec: quantizer, of which bits and the dtype of scales are replaced; NaN and Inf propagate. None: blocks of
            128, unbiased.
        step: number of the first forward pass; ``step`` is that of the next. To resume a run, save it and set it.

    Raises:
        TypeError: a block is no module, or the first argument of a call is no tensor.
        ValueError: bits or step are out of range; the forward pass of a block is replaced already, also by this one
            entered twice at once; an input has another dtype or requires no gradient, or another argument does.

    References:
        Chen et al. 2016 (arXiv:1604.06174); Chakrabarti & Moseley 2019 (arXiv:1901.07988).
    Example:
        >>> import torch
        >>> from tq.train.coded_checkpoints import coded_checkpoints
        >>> blocks = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())] * 2)
        >>> x = torch.ones(256, 64, requires_grad=True)
        >>> checkpoints = coded_checkpoints(blocks)
        >>> with checkpoints:
        ...     y = blocks(x)
        >>> y.sum().backward()
        >>> x.grad.shape, blocks[0][0].weight.grad is not None, checkpoints.step
        (torch.Size([256, 64]), True, 1)
    """

    def __init__(
        self, blocks: Iterable[nn.Module], bits: int = 4, *, codec: Codec | None = None, step: int = 0
    ) -> None:
        if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 8:
            raise ValueError(f"bits must be an integer between 1 and 8, got {bits!r}")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be an int of at least 0, got {step!r}")
        self._blocks: list[Any] = list(dict.fromkeys(blocks))
        for block in self._blocks:
            if not isinstance(block, nn.Module):
                raise TypeError(f"blocks must be modules, got {type(block).__name__}")
        scale = torch.float32 if bits > 6 else torch.bfloat16
        self._codec = dataclasses.replace(codec or Codec(), bits=bits, scale_dtype=scale, nonfinite="propagate")
        self.step, self._calls = step, 0

    def __enter__(self) -> None:
        for block in self._blocks:
            if "forward" in vars(block):
                raise ValueError(f"the forward pass of a {type(block).__name__} is already replaced")
        self._calls = 0
        for block in self._blocks:
            block.forward = partial(self._called, block, block.forward)

    def __exit__(self, *raised: object) -> None:
        for block in self._blocks:
            del block.forward
        self.step += self._calls > 0

    def _called(self, block: nn.Module, run: Callable[..., Any], x: Any, *others: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(x, *others, **named)
        _check(x, (*others, *named.values()))
        weights = [p for p in block.parameters() if p.requires_grad]
        own = self._codec.derive("activation", self._calls).at_step(self.step)
        self._calls += 1
        return _FromCode.apply(run, own, (others, named), x, *weights)  # type: ignore[no-untyped-call]


def _check(x: Any, others: tuple[Any, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"the first argument of a block must be a tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise ValueError(f"the input of a block must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
    if not x.requires_grad:
        raise ValueError("the input of a block must require a gradient, or its parameters would get none")
    if any(isinstance(other, Tensor) and other.requires_grad for other in others):
        raise ValueError("only the first argument of a block may require a gradient")
