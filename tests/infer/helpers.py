"""Models for tests: small, and sharp enough that their logits say something."""

from __future__ import annotations

import torch

from tq.train.model import GPT, GPTConfig


def sharp(config: GPTConfig, factor: float) -> GPT:
    """A GPT whose matrices are so many times larger than at the start of a training."""
    made = GPT(config, seed=1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(factor if parameter.ndim > 1 else 1)
    return made
