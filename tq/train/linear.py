"""A linear layer that keeps its input quantized for backward, also under ``torch.compile``.

Saved-tensor hooks do not see inside a compiled model. Here the input is quantized by an operation that is opaque to the
compiler: it can neither fold it nor compute it again, so what it hands from forward to backward is the payload and the
scales. Refused: layers other than ``torch.nn.Linear``, gradients of gradients; nonlinearities and norms keep
what the compiler decides.

Shapes: x [..., I] inputs, y [..., O] outputs, N blocks, W packed bytes per block.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tq.quant.codec import Code, Codec


def _spell(codec: Codec) -> str:
    """The codec as text, which an operation can take as an argument."""
    return json.dumps(dataclasses.asdict(codec) | {"scale_dtype": str(codec.scale_dtype).removeprefix("torch.")})


@lru_cache(maxsize=256)
def _read(text: str) -> Codec:
    fields = json.loads(text)
    return Codec(**fields | {"scale_dtype": getattr(torch, fields["scale_dtype"])})


@torch.library.custom_op("tq::encode", mutates_args=())
def encode(x: Tensor, codec: str, step: Tensor) -> tuple[Tensor, Tensor]:
    """(payload [N, W], scales [N]) of x; ``step``, int64 of one element, names the rotation."""
    code = _read(codec).derive("linear").at_step(int(step)).encode(x)
    return code.payload, code.scales


@encode.register_fake
def _(x: Tensor, codec: str, step: Tensor) -> tuple[Tensor, Tensor]:
    chosen = _read(codec)
    blocks = (x.numel() + chosen.block - 1) // chosen.block
    payload = x.new_empty((blocks, chosen.packed_bytes), dtype=torch.uint8)
    return payload, x.new_empty((blocks,), dtype=chosen.scale_dtype)


@torch.library.custom_op("tq::decode", mutates_args=())
def decode(payload: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype, codec: str, step: Tensor) -> Tensor:
    """The tensor of this shape and dtype that ``tq::encode`` quantized."""
    chosen = _read(codec).derive("linear").at_step(int(step))
    return chosen.decode(Code(chosen, tuple(shape), dtype, payload, scales))


@decode.register_fake
def _(payload: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype, codec: str, step: Tensor) -> Tensor:
    return payload.new_empty(shape, dtype=dtype)


@torch.library.custom_op("tq::linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, payload: Tensor, scales: Tensor, codec: str, step: Tensor
) -> Tensor:
    """Compute x @ weight.T + bias exactly; for backward keep the quantized x, the weight and nothing else.

    Registered as ``torch.ops.tq.linear``, which ``torch.compile`` does not look into. ``CompressedLinear`` calls it.

    Args:
        x: [..., I]; fp32, bf16 or fp16.
        weight: [O, I], of the dtype of x.
        bias: [O], or None.
        payload: uint8 [N, W], first result of ``torch.ops.tq.encode(x, codec, step)``.
        scales: [N], its second result.
        codec: the settings as text, such as ``CompressedLinear.codec``.
        step: int64 of one element, on the host; selects the rotation.

    Returns:
        Tensor: [..., O], of the dtype and device of x.

    Raises:
        RuntimeError: in backward with create_graph=True, as there is no second derivative.

    Example:
        >>> import torch
        >>> from tq.train.linear import CompressedLinear
        >>> x, layer, step = torch.ones(8, 64), CompressedLinear(torch.nn.Linear(64, 32)), torch.tensor(0)
        >>> payload, scales = torch.ops.tq.encode(x, layer.codec, step)
        >>> y = torch.ops.tq.linear(x, layer.weight, layer.bias, payload, scales, layer.codec, step)
        >>> y.shape, payload.nbytes + scales.nbytes, x.nbytes
        (torch.Size([8, 32]), 264, 2048)
    """
    return F.linear(x, weight, bias)


@linear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, payload: Tensor, scales: Tensor, codec: str, step: Tensor
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, payload, scales, ctx.codec, step = inputs
    ctx.save_for_backward(weight, payload, scales, step)
    ctx.shape, ctx.dtype, ctx.bias = list(x.shape), x.dtype, bias is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("CompressedLinear keeps a code of its input, and no second derivative: create_graph=True")
    weight, payload, scales, step = ctx.saved_tensors
    rows = gradient.reshape(-1, gradient.shape[-1])  # [rows, O]
    for_x = gradient @ weight if ctx.needs_input_grad[0] else None
    for_weight = None
    if ctx.needs_input_grad[1]:
        x = torch.ops.tq.decode(payload, scales, ctx.shape, ctx.dtype, ctx.codec, step)
        for_weight = rows.T @ x.reshape(-1, x.shape[-1])
    for_bias = rows.sum(0) if ctx.bias and ctx.needs_input_grad[2] else None
    return for_x, for_weight, for_bias, None, None, None, None


linear.register_autograd(_backward, setup_context=_setup)


class _Clock:
    """Names the rotation of a forward pass; ``step`` lies on the host, where it is read."""

    def __init__(self) -> None:
        self.step = torch.zeros((), dtype=torch.int64)

    def tick(self, *called: Any) -> None:
        if torch.is_grad_enabled():  # an evaluation between two steps of a training run changes nothing in it
            self.step = self.step + 1  # a new tensor: backward still needs the old one


class CompressedLinear(nn.Linear):
    """``torch.nn.Linear`` that shares the parameters of ``layer`` and keeps its input quantized for backward.

    The output and the gradient of x are exact; the gradient of the weight is computed from the dequantized input.
    Layers that read the same tensor with the same codec and clock quantize it alike: a compiler, which merges equal
    operations, keeps it once. A ``state_dict`` holds the clock besides, int64 of one element, so that a training run
    that is resumed takes the rotations it would have taken; that of a ``torch.nn.Linear`` loads and leaves the clock.

    Args:
        layer: the layer to stand in for; its parameters are shared, not copied.
        codec: quantizer of the input; NaN and Inf propagate. None: 4 bits, blocks of 128, an unbiased scale and
            bfloat16 scales.
        clock: of ``replace_linears``; None: one of its own, which every forward pass with gradients advances.

    Raises:
        TypeError: ``layer`` is not a ``torch.nn.Linear`` itself, or ``codec`` no ``Codec``.
        RuntimeError: in backward with create_graph=True, as there is no second derivative.

    References:
        ActNN (Chen et al. 2021) and GACT (Liu et al. 2022) for training from quantized activations.

    Example:
        >>> import torch
        >>> from tq.train.linear import CompressedLinear
        >>> layer = CompressedLinear(torch.nn.Linear(64, 32))
        >>> layer(torch.ones(8, 64)).sum().backward()
        >>> layer.weight.grad.shape, int(layer.clock.step)
        (torch.Size([32, 64]), 1)
    """

    def __init__(self, layer: nn.Linear, codec: Codec | None = None, clock: _Clock | None = None):
        if type(layer) is not nn.Linear:
            raise TypeError(f"layer must be a torch.nn.Linear, got {type(layer).__name__}")
        codec = Codec(scale_dtype=torch.bfloat16) if codec is None else codec
        if not isinstance(codec, Codec):
            raise TypeError(f"codec must be a tq.Codec or None, got {type(codec).__name__}")
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.codec = _spell(dataclasses.replace(codec, nonfinite="propagate"))
        self.clock = clock or _Clock()
        if clock is None:
            self.register_forward_pre_hook(self.clock.tick)

    def get_extra_state(self) -> Tensor:
        """Number of the forward pass, int64 of one element: what a ``state_dict`` holds beside the parameters."""
        return self.clock.step.clone()

    def set_extra_state(self, state: Tensor | int) -> None:
        """Continue with ``state``, the number of the forward pass; ValueError unless it is one integer."""
        step = torch.as_tensor(state)
        if step.numel() != 1 or step.is_floating_point():
            raise ValueError(f"extra state must be an integer, the number of the forward pass, got {state!r}")
        self.clock.step = step.detach().reshape(()).to("cpu", torch.int64, copy=True)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        missing = rest[2]  # after local_metadata and strict
        if (key := f"{prefix}_extra_state") in missing:
            missing.remove(key)  # a state_dict of before

    def forward(self, x: Tensor) -> Tensor:
        """``x`` @ weight.T + bias, in the dtype of autocast where it is enabled. Without gradients nothing is kept."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return F.linear(x, weight, bias)
        payload, scales = torch.ops.tq.encode(x.detach(), self.codec, self.clock.step)
        return torch.ops.tq.linear(x, weight, bias, payload, scales, self.codec, self.clock.step)


def replace_linears(model: nn.Module, codec: Codec | None = None) -> list[str]:
    """Put a ``CompressedLinear`` in the place of every ``torch.nn.Linear`` inside ``model``; before it is compiled.

    Every forward pass of ``model`` with gradients takes other rotations than the one before; a ``state_dict`` has its
    number with each layer. Parameters stay the same objects, so an optimizer that holds them continues; a
    ``state_dict`` saved before still loads.

    Args:
        model: changed in place; subclasses of ``torch.nn.Linear``, and ``model`` itself, are left alone.
        codec: of all layers, as in ``CompressedLinear``. None: 4 bits, blocks of 128, unbiased, bfloat16 scales.

    Returns:
        list[str]: names of the replaced layers.

    Raises:
        ValueError: ``model`` holds no such layer.
        TypeError: ``codec`` is no ``Codec``.

    Example:
        >>> import torch
        >>> from tq.train.linear import replace_linears
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
        >>> replace_linears(model)
        ['0', '2']
        >>> model(torch.ones(8, 64)).sum().backward()
    """
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and name]
    if not names:
        raise ValueError(f"model must hold torch.nn.Linear layers, got {type(model).__name__} without any")
    clock = _Clock()
    for name in names:
        parent, _, own = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, own, CompressedLinear(getattr(holder, own), codec, clock))
    model.register_forward_pre_hook(clock.tick)
    return names
