"""Linear layers of a GPT: those that keep codes, and a walk through a model that rebuilds one after the other.

Shapes: S sequences, T tokens, C hidden, O outputs, I inputs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tq.quant.codec import Code
from tq.train.model.gpt import GPT

#: Linear layers of a block, in groups that see the same input, in the order of the forward pass.
GROUPS = (
    ("attention.query", "attention.key", "attention.value"),
    ("attention.out",),
    ("mlp.gate", "mlp.up"),
    ("mlp.down",),
)
#: The first layer of each one's group.
FIRST = {name: group[0] for group in GROUPS for name in group}
HEAD = "head"
_AT_ONCE = 4  # sequences that go through a block together


class QuantizedLinear(nn.Module):
    """A linear layer without bias whose weight is a code.

    Args:
        code: of shape [O, I], with ``rows=True``.
    Raises:
        ValueError: it is of another shape.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.layers import QuantizedLinear
        >>> layer = QuantizedLinear(Codec(bits=4, block=64).encode(torch.randn(8, 128), rows=True))
        >>> layer(torch.ones(2, 128)).shape
        torch.Size([2, 8])
    """

    payload: Tensor
    scales: Tensor

    def __init__(self, code: Code) -> None:
        super().__init__()
        if len(code.shape) != 2 or not code.rows:
            raise ValueError(f"code must be of a matrix, with rows=True, got shape {code.shape}, rows={code.rows}")
        self.codec, self.shape = code.codec, code.shape
        self.register_buffer("payload", code.payload)
        self.register_buffer("scales", code.scales)

    @property
    def code(self) -> Code:
        """Its weight."""
        return Code(self.codec, self.shape, torch.float32, self.payload, self.scales, True)

    @property
    def nbytes(self) -> int:
        """Stored bytes of its weight."""
        return self.payload.nbytes + self.scales.nbytes

    def decoded(self) -> Tensor:
        """Its weight as numbers, fp32 [O, I]."""
        return self.codec.decode(self.code)

    def rescaled(self, scales: Tensor) -> QuantizedLinear:
        """A layer with the same indices and other scales, of the type and shape of its own."""
        return type(self)(dataclasses.replace(self.code, scales=scales))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.decoded().to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.shape[1]}, {self.shape[0]}, {self.codec.bits_per_element:g} bits"


def layers(model: GPT, head: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of all linear layers in the blocks, quantized or not; of the head too where asked for."""
    for number, block in enumerate(model.blocks):
        for group in GROUPS:
            for name in group:
                if (layer := part(block, name)) is not None:
                    yield f"blocks.{number}.{name}", layer
    if head:
        yield HEAD, model.head


def stored_bits(model: GPT) -> float:
    """Stored bits per weight of the linear layers in the blocks, scales and padding included.

    Args:
        model: a GPT.
    Example:
        >>> from tq.infer.layers import stored_bits
        >>> from tq.train.model import GPT, GPTConfig
        >>> stored_bits(GPT(GPTConfig(layers=1, hidden=64, heads=2, vocab=64, seq=32)))
        32.0
    """
    nbytes = numel = 0
    for _, layer in layers(model):
        if isinstance(layer, QuantizedLinear):
            nbytes, numel = nbytes + layer.nbytes, numel + layer.shape[0] * layer.shape[1]
        elif isinstance(layer, nn.Linear):
            nbytes, numel = nbytes + layer.weight.nbytes, numel + layer.weight.numel()
    return 8 * nbytes / numel


def plain_linear(weight_OI: Tensor) -> nn.Linear:
    """A linear layer that holds this very tensor."""
    made = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight_OI, requires_grad=False)
    return made


def shared(model: GPT) -> GPT:
    """A model of modules of its own that hold the same tensors."""
    memo = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def part(block: nn.Module, name: str) -> Any:
    """A layer of a block; None where this kind of block has none of the name."""
    return block.get_submodule(name) if getattr(block.get_submodule(name.split(".")[0]), name.split(".")[1]) else None


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Replace a layer."""
    where, _, what = name.rpartition(".")
    setattr(model.get_submodule(where), what, layer)


Moments = Callable[[], Tensor]
Make = Callable[[str, nn.Linear, Moments], nn.Module]


@torch.no_grad()
def rebuild(
    model: GPT,
    calibration_ST: Tensor,
    make: Make,
    *,
    head: bool = False,
    done: Callable[[int, nn.Module], None] = lambda number, block: None,
) -> GPT:
    """A model of new linear layers, each made from what the new ones before it give on calibration texts.

    Args:
        model: stays as it is; what is not replaced is shared.
        calibration_ST: tokens, int64 [S, T].
        make: called with a layer's name, the layer, and a function for the second moments of its inputs, float64
            [I, I], which runs the texts through the block when it is first called for a group of layers.
        head: whether the head too is made anew.
        done: called with each block's number and the block.
    """
    new = shared(model)
    calibration = _Calibration(new, calibration_ST)
    for number, block in enumerate(new.blocks):
        for group in GROUPS:
            inside = [name for name in group if part(block, name) is not None]
            moments = cache(partial(calibration.moments, number, part(block, inside[0])))
            for name in inside:
                put(block, name, make(f"blocks.{number}.{name}", part(block, name), moments))
        done(number, block)
    if head:
        put(new, HEAD, make(HEAD, new.head, cache(calibration.of_head)))
    return new


class _Calibration:
    """Texts on their way through a model: blocks that nobody asked about are gone through when one after them is."""

    def __init__(self, model: GPT, ids_ST: Tensor) -> None:
        self.model, self.ids_ST, self.reached = model, ids_ST, 0
        self.hidden: list[Tensor] | None = None

    def at(self, number: int) -> list[Tensor]:
        """What enters a block."""
        if self.hidden is None:
            self.hidden = [self.model.embed(ids) for ids in self.ids_ST.split(_AT_ONCE)]
        for block in list(self.model.blocks)[self.reached : number]:
            self.hidden = [_through(block, x, self.model) for x in self.hidden]
        self.reached = max(self.reached, number)
        return self.hidden

    def moments(self, number: int, layer: nn.Module) -> Tensor:
        """Of what a layer of a block sees, float64 [I, I]."""
        return _moments(self.model.blocks[number], layer, self.at(number), self.model)

    def of_head(self) -> Tensor:
        """Of what the head sees."""
        return _mean_square([self.model.final_norm(x) for x in self.at(len(self.model.blocks))])


def _through(block: nn.Module, x_BTC: Tensor, model: GPT) -> Tensor:
    length = x_BTC.shape[1]
    return block(x_BTC, model.cos[:length], model.sin[:length])


class _Seen(Exception):
    """What a layer is given, which ends the pass that leads to it."""


def _moments(block: nn.Module, layer: nn.Module, hidden: list[Tensor], model: GPT) -> Tensor:
    """Mean of x x^T over what a layer of a block sees, float64 [I, I]."""

    def stop(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        raise _Seen(given[0])

    hook, seen = layer.register_forward_pre_hook(stop), []
    for x in hidden:
        try:
            _through(block, x, model)
        except _Seen as found:
            seen.append(found.args[0])
    hook.remove()
    return _mean_square(seen)


def _mean_square(given: list[Tensor]) -> Tensor:
    """Mean of x x^T, float64 [I, I]."""
    flat = [x.flatten(0, -2).float() for x in given]
    return torch.stack([(x.T @ x).double() for x in flat]).sum(0) / sum(len(x) for x in flat)
