"""The book's GPT as chunks: what a pipeline stage holds, or the whole model; dense or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tq.train.experts import Experts
from tq.train.model.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in place of every feed-forward layer: E experts, k of them for each token."""

    experts: int = 8
    chosen: int = 2
    width: int = 128


class Chunk(nn.Module):
    """Blocks first ... last - 1 of a GPT, with its embedding and its head where they belong to it.

    Names of parameters are those of the whole model. The embedding is not tied to the head: they lie on different
    stages.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, gpt: GPT, first: int, last: int, places: Tensor | None = None) -> None:
        super().__init__()
        layers = gpt.config.layers
        self.embed = gpt.embed if first == 0 else None
        self.blocks = nn.ModuleDict({str(layer): gpt.blocks[layer] for layer in range(first, last)})
        self.final_norm = gpt.final_norm if last == layers else None
        self.head = gpt.head if last == layers else None
        chosen = slice(None) if places is None else places
        self.register_buffer("cos", gpt.cos[chosen].clone(), persistent=False)
        self.register_buffer("sin", gpt.sin[chosen].clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T] where the chunk has the embedding, hidden states [B, T, C] elsewhere; logits from the last."""
        if self.embed is not None:
            x = self.embed(x)
        length = len(self.cos)
        for block in self.blocks.values():
            x = block(x, self.cos[:length], self.sin[:length])
        if self.head is not None and self.final_norm is not None:
            x = self.head(self.final_norm(x))
        return x


def model(
    config: GPTConfig, seed: int, mixture: Mixture | None = None,
    experts: Callable[[int], dict[str, Any]] | None = None,
) -> GPT:  # fmt: skip
    """A GPT with an untied head; with ``mixture`` every block's feed-forward layer is a mixture of experts.

    Args:
        config: shape; ``seq`` is the length that is trained.
        seed: of the weights, the same however the model is split.
        mixture: None (default) leaves the dense layers.
        experts: options of ``Experts`` for each layer (group, codecs, ...); None holds all experts.
    """
    gpt = GPT(replace(config, tie_embeddings=False), seed)
    if mixture is not None:
        generator = torch.Generator().manual_seed(seed + 1)
        for layer, block in enumerate(gpt.blocks):
            options = experts(layer) if experts is not None else {}
            block.mlp = Experts(
                config.hidden, mixture.width, mixture.experts, mixture.chosen, generator=generator, number=layer,
                **options,
            )  # fmt: skip
    return gpt


def cuts(layers: int, stages: int) -> list[tuple[int, int]]:
    """(first, last) block of each stage, as even as can be."""
    if not 1 <= stages <= layers:
        raise ValueError(f"stages must be 1 to layers={layers}, got {stages}")
    edges = [layers * stage // stages for stage in range(stages + 1)]
    return list(zip(edges, edges[1:], strict=False))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
