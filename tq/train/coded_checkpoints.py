"""Checkpoints whose inputs are quantized: the fewest bytes at once in backward, at the price of a second forward pass.

A checkpointed block keeps its input alone and runs again in backward [Chen et al. 2016]. Here the input is quantized,
and so is what the second run saves: at its peak backward holds the codes of all inputs, one input as it was, and the
codes of one block. The first run is exact. Gradients are those of the decoded input, with the noise of what the second
run saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from tq.quant.codec import DTYPES, Code, Codec
from tq.train.activations import compress_activations


class _Call(nn.Module):
    """A call of a block that can run again with other tensors in place of its parameters."""

    def __init__(self, block: nn.Module, run: Callable[..., Any], codec: Codec) -> None:
        super().__init__()
        self.block, self.run, self.codec = block, run, codec
        self.names = [name for name, p in block.named_parameters(prefix="block") if p.requires_grad]
        self.given: tuple[Any, ...] = ()  # arguments but the first, tensors by their place among those saved
        self.named: dict[str, Any] = {}

    def forward(self, x: Tensor, others: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return self.run(x, *others, **named)


class _FromCode(torch.autograd.Function):
    """A call of which the code of the first argument is kept. Parameters are arguments too, so that their gradients go
    where autograd sends them; what is kept is saved, so that autograd lets go of it and sees changes in place."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, count: int, *tensors: Tensor) -> Any:
        code = call.codec.encode(x.detach())
        ctx.call, ctx.count, ctx.kind = call, count, x.device.type
        ctx.code = code.codec, code.shape, code.dtype, code.rows
        ctx.save_for_backward(code.payload, code.scales, *tensors)
        ctx.set_materialize_grads(False)
        ctx.autocast = torch.is_autocast_enabled(ctx.kind), torch.get_autocast_dtype(ctx.kind)
        ctx.random, ctx.devices = torch.get_rng_state(), get_device_states(x)
        results = call.run(x, *_filled(call.given, tensors), **_filled(call.named, tensors))
        flat = results if isinstance(results, tuple) else (results,)
        if not all(each is None or isinstance(each, Tensor) for each in flat):
            raise TypeError(f"a block must return a tensor or a flat tuple of tensors, got {type(results).__name__}")
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("no gradients of gradients: a block that ran again has its own graph")
        payload, scales, *tensors = ctx.saved_tensors
        codec, shape, dtype, rows = ctx.code
        x = codec.decode(Code(codec, shape, dtype, payload, scales, rows)).requires_grad_(ctx.needs_input_grad[1])
        weights = [w.detach().requires_grad_() for w in tensors[: ctx.count]]  # hooks of parameters must run once
        call: _Call = ctx.call
        (enabled, kind), (devices, states) = ctx.autocast, ctx.devices
        with torch.random.fork_rng(devices, device_type=ctx.kind if devices else "cuda"):
            torch.set_rng_state(ctx.random)
            if devices:
                set_device_states(devices, states, device_type=ctx.kind)
            with (
                torch.enable_grad(),
                torch.autocast(ctx.kind, dtype=kind, enabled=enabled),
                compress_activations(codec, bits=codec.bits),
            ):
                others = _filled(call.given, tensors), _filled(call.named, tensors)
                replaced = dict(zip(call.names, weights, strict=True))
                results = torch.func.functional_call(call, replaced, (x, *others))
        results = results if isinstance(results, tuple) else (results,)
        pairs = [(y, g) for y, g in zip(results, gradients, strict=True) if g is not None and y.requires_grad]
        asked = [x, *weights] if x.requires_grad else weights
        found = torch.autograd.grad([y for y, _ in pairs], asked, [g for _, g in pairs], allow_unused=True)
        of_x, of_weights = (found[0], found[1:]) if x.requires_grad else (None, found)
        return None, of_x, None, *of_weights, *(None for _ in tensors[ctx.count :])


class _Place(int):
    """Of a tensor among those that a call saves."""


def _taken(given: Any, tensors: list[Tensor]) -> Any:
    """Arguments with their tensors, which are added to ``tensors``, replaced by places."""
    if isinstance(given, Tensor):
        tensors.append(given)
        return _Place(len(tensors) - 1)
    if type(given) in (tuple, list):
        return type(given)(_taken(each, tensors) for each in given)
    return {name: _taken(each, tensors) for name, each in given.items()} if type(given) is dict else given


def _filled(given: Any, tensors: Any) -> Any:
    """Arguments with tensors in their places again."""
    if isinstance(given, _Place):
        return tensors[given]
    if type(given) in (tuple, list):
        return type(given)(_filled(each, tensors) for each in given)
    return {name: _filled(each, tensors) for name, each in given.items()} if type(given) is dict else given


class coded_checkpoints:
    """A context in which calls of these modules keep the codes of their input, and run again in backward.

    Make one for the whole run and enter it for each forward pass; backward may follow outside. ``step`` counts the
    passes, and each has other rotations, so that errors average out. Random numbers and autocast of the second run are
    those of the first. As under ``torch.utils.checkpoint``, whatever else a call changes, such as the statistics of a
    batch norm, it changes twice.

    Args:
        blocks: modules, as ``model.blocks``. The first argument of each is a tensor of a coded dtype; others are kept
            as they are and get no gradient. They return a tensor or a flat tuple of tensors.
        bits: of the inputs and of what a second run saves, 1-8.
        codec: quantizer, of which bits and the dtype of scales are replaced; NaN and Inf propagate. None: blocks of
            128, unbiased.
        step: number of the first forward pass; ``step`` is that of the next. To resume a run, save it and set it.

    Raises:
        TypeError: a block is no module or has sharded parameters; the first argument of a call is no tensor, or what
            it returns is something else.
        ValueError: bits or step are out of range; the forward pass of a block is replaced already, also by this one
            entered twice at once; an input has another dtype, or an argument but the first requires a gradient.
        RuntimeError: in backward: gradients of gradients are asked for, or what is kept was changed in place.

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
            if any(hasattr(p, "to_local") for p in block.parameters()):
                raise TypeError("a block has DTensors: FSDP2 and tensor parallelism move them between both runs")
        self._calls = 0
        for block in self._blocks:
            block.forward = partial(self._called, block, block.forward)

    def __exit__(self, *raised: object) -> None:
        for block in self._blocks:
            del block.forward
        self.step += self._calls > 0

    def _called(self, block: nn.Module, run: Callable[..., Any], x: Any, *others: Any, **named: Any) -> Any:
        if not isinstance(x, Tensor):
            raise TypeError(f"the first argument of a block must be a tensor, got {type(x).__name__}")
        call = _Call(block, run, self._codec.derive("activation", self._calls).at_step(self.step))
        weights = [p for p in block.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not (weights or x.requires_grad):
            return run(x, *others, **named)
        if x.dtype not in DTYPES:
            raise ValueError(f"the input of a block must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
        tensors: list[Tensor] = list(weights)
        call.given, call.named = _taken(others, tensors), _taken(named, tensors)
        if any(each.requires_grad for each in tensors[len(weights) :]):
            raise ValueError("only the first argument of a block may require a gradient")
        self._calls += 1
        return _FromCode.apply(call, x, len(weights), *tensors)
