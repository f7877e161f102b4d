"""When each tensor of a training step is first and last used, recorded from a real step by hooks.

Weights and gradients are seen where modules use them, activations where autograd saves and asks for them, moments where
the optimizer comes to their parameter. Time is counted in uses, so that no clock enters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


@dataclass
class Life:
    """kind: "weight", "gradient", "activation" or "moments"; layer: number of its block, -1 outside; uses: times, in
    order; saved bytes count once, whoever saved them."""

    kind: str
    layer: int
    nbytes: int
    uses: list[int]


class Recorder:
    """Hooks on a model whose blocks stand in ``model.blocks``; ``lives`` holds what one step used."""

    def __init__(self, model: nn.Module) -> None:
        self.lives: dict[tuple[str, int], Life] = {}
        self.clock = 0
        self._layer = -1
        self._handles: list[Any] = []
        self._owners: dict[int, int] = {}
        blocks: Any = model.blocks
        for number, block in enumerate(blocks):
            for p in block.parameters():
                self._owners[id(p)] = number
            self._handles.append(block.register_forward_pre_hook(self._enter(number)))
            self._handles.append(block.register_forward_hook(self._leave))
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                self._handles.append(module.register_forward_pre_hook(self._weights))
                if not isinstance(module, nn.Embedding):  # whose backward does not read its weights
                    self._handles.append(module.register_full_backward_pre_hook(self._weights))
        for p in model.parameters():
            self._handles.append(p.register_post_accumulate_grad_hook(self._gradient))

    def _enter(self, number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._layer = number

        return hook

    def _leave(self, *_: Any) -> None:
        self._layer = -1

    def use(self, kind: str, key: int, layer: int, nbytes: int) -> None:
        """Something is used now."""
        life = self.lives.setdefault((kind, key), Life(kind, layer, nbytes, []))
        life.uses.append(self.clock)
        self.clock += 1

    def _weights(self, module: nn.Module, *_: Any) -> None:
        for p in module.parameters(recurse=False):
            self.use("weight", id(p), self._owners.get(id(p), -1), p.nbytes)

    def _gradient(self, p: Tensor) -> None:
        self.use("gradient", id(p), self._owners.get(id(p), -1), p.nbytes)

    def _save(self, x: Tensor) -> tuple[Tensor, int, int]:
        layer, key = self._layer, x.untyped_storage().data_ptr()
        if isinstance(x, nn.Parameter) or ("weight", id(x)) in self.lives:
            return x, -1, layer
        self.use("activation", key, layer, x.untyped_storage().nbytes())
        return x, key, layer

    def _take(self, saved: tuple[Tensor, int, int]) -> Tensor:
        x, key, layer = saved
        if key >= 0:
            self.use("activation", key, layer, x.untyped_storage().nbytes())
        return x

    def step(self, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Records a step: forward, backward, and the update parameter by parameter as the optimizer holds them."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, self._take):
            value = loss()
        value.backward()
        for group in optimizer.param_groups:
            for p in group["params"]:
                layer = self._owners.get(id(p), -1)
                for kind, nbytes in (("weight", p.nbytes), ("gradient", p.nbytes), ("moments", 8 * p.numel())):
                    self.use(kind, id(p), layer, nbytes)
        optimizer.step()

    def close(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def layer_trace(self, kinds: tuple[str, ...]) -> NDArray[np.int64]:
        """The layers in the order in which their tensors of these kinds are used, each turn once."""
        events = sorted((at, life.layer) for life in self.lives.values() if life.kind in kinds for at in life.uses)
        layers = [layer for _, layer in events if layer >= 0]
        return np.array([b for a, b in zip([None, *layers[:-1]], layers, strict=True) if a != b], dtype=np.int64)

    def peak(self, kind: str) -> int:
        """Most bytes of a kind that are alive, from first to last use, at one time."""
        change: dict[int, int] = {}
        for life in self.lives.values():
            if life.kind == kind:
                change[life.uses[0]] = change.get(life.uses[0], 0) + life.nbytes
                change[life.uses[-1] + 1] = change.get(life.uses[-1] + 1, 0) - life.nbytes
        alive = most = 0
        for at in sorted(change):
            alive += change[at]
            most = max(most, alive)
        return most
