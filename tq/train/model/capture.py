"""The real tensors inside a training step: weights, gradients, AdamW's moments, activations saved for backward.

A snapshot runs forward and backward on the batch that the next step will see and leaves the run exactly as it was.
Activations are not guessed from the model's code: they are what autograd stores (saved-tensor hooks), each once.
Parameters, buffers, low-precision copies of weights, integers, booleans and 0-d tensors are no activations and are
left out. Refused: compiled models (their saved tensors have no modules to be named by).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tq.train.model.loop import Trainer

KINDS = ("weight", "gradient", "momentum", "second_moment", "activation")
_MOMENTS = {"momentum": "exp_avg", "second_moment": "exp_avg_sq"}

# Saved tensors by the module that ran (path inside its block) and their place in it -> what they are. The norms have
# "norm.input" (the residual stream), "norm.statistics" (1/rms) and "norm.normalized" (before the gain).
ROLES = {
    "attention.query.input": "attention.input",  # one tensor, read by the three projections
    "attention.core.input0": "attention.query",  # after RoPE
    "attention.core.input1": "attention.key",
    "attention.core.input2": "attention.value",
    "attention.core.output": "attention.output",  # also what the output projection reads
    "attention.core.saved": "attention.logsumexp",
    "attention.saved": "attention.internal",  # with qk_norm: queries and keys before it
    "mlp.up.input": "mlp.input",
    "mlp.gate.input": "mlp.input",
    "mlp.nonlinearity.input": "mlp.pre",  # before the nonlinearity
    "mlp.nonlinearity.saved": "mlp.internal",  # relu2: relu before the square
    "mlp.saved": "mlp.factor",  # swiglu: the two branches before their product
    "mlp.down.input": "mlp.hidden",  # after the nonlinearity
    "head.input": "head.input",
    "loss.saved": "logits.log_softmax",
}


@dataclass(frozen=True, eq=False)
class Captured:
    """One tensor of a training step.

    Attributes:
        kind: one of ``KINDS``.
        layer: number of the block, or None outside the blocks.
        name: path inside the block ("attention.query.weight", "mlp_norm.input"); unique with kind and layer.
        tensor: detached copy on the trainer's device, shortened to whole rows if a cap was given.
        role: what it is, the same in every layer: a value of ``ROLES`` for activations, "embedding", "attention",
            "mlp", "norm" or "head" for the others.
        shape, nbytes: of the whole tensor, before any cap.
    """

    kind: str
    layer: int | None
    name: str
    tensor: Tensor
    role: str
    shape: tuple[int, ...]
    nbytes: int


def snapshot(
    trainer: Trainer,
    kinds: Collection[str] = KINDS,
    layers: Collection[int | None] | None = None,
    max_elements: int | None = None,
) -> list[Captured]:
    """Tensors of the next step of ``trainer``, which goes on afterwards as if nothing had happened.

    Gradients are those of the loss, before clipping. Moments are those that AdamW holds now, and absent before the
    first step. Everything is copied; nothing else is kept.

    Arguments:
        kinds: which of ``KINDS``.
        layers: block numbers, with None for what stands outside the blocks; None means everything.
        max_elements: keep at most so many elements of a tensor, as its leading whole rows (the last dimension is
            never cut, so at least one row remains); a shortened tensor is [rows, last dimension].
    """
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise ValueError(f"kinds must be among {', '.join(KINDS)}, got {sorted(unknown)}")
    if max_elements is not None and max_elements < 1:
        raise ValueError(f"max_elements must be positive or None, got {max_elements!r}")
    depth = trainer.model.config.layers
    if layers is not None and not set(layers) <= {None, *range(depth)}:
        raise ValueError(f"layers must be None or in 0..{depth - 1}, got {sorted(map(str, layers))}")

    found: list[Captured] = []

    def keep(kind: str, layer: int | None, name: str, role: str, tensor: Tensor) -> None:
        if kind in kinds and (layers is None or layer in layers):
            rows = leading_rows(tensor.detach(), max_elements).clone(memory_format=torch.contiguous_format)
            found.append(Captured(kind, layer, name, rows, role, tuple(tensor.shape), tensor.nbytes))

    parameters = dict(trainer.model.named_parameters())
    for full, parameter in parameters.items():
        layer, name = _place(full)
        keep("weight", layer, name, _part(name), parameter)
        state = trainer.optimizer.state.get(parameter, {})
        for kind, key in _MOMENTS.items():
            if key in state:
                keep(kind, layer, name, _part(name), state[key])
    if "gradient" in kinds or "activation" in kinds:
        with _Recorder(trainer.model, keep) if "activation" in kinds else nullcontext():
            loss = trainer.loss(trainer.steps_done)
        if "gradient" in kinds:  # torch.autograd.grad leaves .grad alone
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            for full, gradient in zip(parameters, gradients, strict=True):
                layer, name = _place(full)
                keep("gradient", layer, name, _part(name), gradient)
    order = {kind: index for index, kind in enumerate(KINDS)}
    return sorted(found, key=lambda c: (order[c.kind], depth if c.layer is None else c.layer))


def leading_rows(tensor: Tensor, max_elements: int | None) -> Tensor:
    """The first whole rows of ``tensor`` that fit into ``max_elements`` (at least one), as [rows, last dimension].

    A tensor that fits, or that has one dimension (cut to its first elements), keeps its shape.
    """
    if max_elements is None or tensor.numel() <= max_elements:
        return tensor
    if tensor.ndim < 2:
        return tensor[:max_elements]
    rows = max(1, max_elements // tensor.shape[-1])
    per_first = tensor[0].numel() // tensor.shape[-1]
    return tensor[: -(-rows // per_first)].reshape(-1, tensor.shape[-1])[:rows]  # cut first: reshape may copy


def _place(full: str) -> tuple[int | None, str]:
    """Path "blocks.3.mlp.up.weight" -> (3, "mlp.up.weight"); any other stays whole, outside the blocks."""
    parts = full.split(".", 2)
    return (int(parts[1]), parts[2]) if parts[0] == "blocks" and len(parts) == 3 else (None, full)


def _part(name: str) -> str:
    """Path "attention.query.weight" -> "attention"; the norms are "norm"."""
    first = name.split(".", 1)[0]
    return "norm" if first.endswith("norm") else "embedding" if first == "embed" else first


class _Recorder:
    """Context in which every tensor that autograd saves is handed on once, named by the module that was running."""

    def __init__(self, model: nn.Module, keep: Callable[[str, int | None, str, str, Tensor], None]):
        self.model, self.keep = model, keep
        self.running: list[tuple[str, nn.Module, list[Tensor]]] = []
        held = [*model.parameters(), *model.buffers()]
        self.held = {tensor.untyped_storage().data_ptr() for tensor in held}
        self.seen: set[tuple[int, int, torch.dtype]] = set()
        self.waiting: list[tuple[str, Tensor]] = []  # saved, but its module has not returned: may be its output
        self.names: Counter[tuple[int | None, str]] = Counter()
        self.handles: list[Any] = []
        self.hooks: Any = None

    def __enter__(self) -> None:
        for name, module in self.model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self._enter(name)))
            self.handles.append(module.register_forward_hook(self._leave, always_call=True))
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)
        for handle in self.handles:
            handle.remove()
        self.handles, self.hooks = [], None  # no cycles: the copies go when the caller drops them

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.running.append((name, module, [x for x in inputs if isinstance(x, Tensor)]))

        return hook

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        name = self.running.pop()[0]
        outputs = {_key(x) for x in (output if isinstance(output, tuple) else (output,)) if isinstance(x, Tensor)}
        for path, tensor in [item for item in self.waiting if item[0] == name]:
            self._hand_on(path, "output" if _key(tensor) in outputs else "saved", tensor)
        self.waiting = [item for item in self.waiting if item[0] != name]

    def _pack(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # an output that held its own graph node through the hook would never be freed
        key = _key(tensor)
        if not tensor.is_floating_point() or tensor.ndim == 0 or key in self.seen or not self.running:
            return tensor
        if tensor.untyped_storage().data_ptr() in self.held:
            return tensor
        path, module, inputs = self.running[-1]
        keys = [_key(x) for x in inputs]
        if key in keys:
            self._hand_on(path, f"input{keys.index(key)}" if len(keys) > 1 else "input", tensor)
        elif isinstance(module, nn.Linear) and tensor.numel() == module.weight.numel():
            return tensor  # the weight as autocast casts it
        else:
            self.waiting.append((path, tensor))
        self.seen.add(key)
        return tensor

    def _hand_on(self, path: str, place: str, tensor: Tensor) -> None:
        layer, inside = _place(path)
        norm = inside.endswith("norm")
        if norm and place != "input":  # the fused kernel of a GPU does not save the second
            place = "statistics" if tensor.shape[-1] == 1 else "normalized"
        name = f"{inside or 'loss'}.{place}"  # the model itself computes nothing but the loss
        role = f"norm.{place}" if norm else ROLES.get(name, name)
        self.names[layer, name] += 1
        count = self.names[layer, name]
        self.keep("activation", layer, name if count == 1 else f"{name}.{count}", role, tensor)


def _key(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    """Equal for views of the same elements. Saved tensors stay alive during forward, so an address means one tensor."""
    return tensor.data_ptr(), tensor.numel(), tensor.dtype
