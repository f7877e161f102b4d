"""Training with quantized weights in the loop, beside quantizing afterwards, on the book's small model.

Each product sees the decoded weight; gradients go to the exact one as if nothing had been rounded (straight through).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tq.infer.evaluate import divergence
from tq.infer.layers import plain_linear, rebuild
from tq.infer.trained import CONFIG
from tq.infer.weights import decoded, quantize
from tq.lab.weight_study import Study, codec, nearest, of, told
from tq.quant.codec import Codec
from tq.train.model import GPT, TrainConfig, Trainer, load

RATE, BATCH = 5e-4, 8


class Rounded(nn.Module):
    """What a code makes of a weight, with the gradient of the weight itself.

    Args:
        settings: of the code; its rows are coded apart.
    """

    def __init__(self, settings: Codec) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, weight_OI: Tensor) -> Tensor:
        with torch.no_grad():
            found = self.settings.decode(self.settings.encode(weight_OI.detach().contiguous(), rows=True))
        return weight_OI + (found - weight_OI).detach()


def trained_on(model: GPT, steps: int, settings: Codec | None, seed: int) -> GPT:
    """A copy of a model after some more steps; settings: of the code in the loop, None for none."""
    copied = copy.deepcopy(model).requires_grad_(True)
    inside = [layer for block in copied.blocks for layer in block.modules() if isinstance(layer, nn.Linear)]
    if settings is not None:
        for layer in inside:
            parametrize.register_parametrization(layer, "weight", Rounded(settings))
    corpus = load("stdlib", "bpe", CONFIG.vocab)
    Trainer(copied, corpus, TrainConfig(steps=steps, batch=BATCH, lr=RATE, seed=seed)).train(progress=False)
    if settings is not None:
        for layer in inside:  # the exact weights are left; they lie where rounding costs little
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    return copied.requires_grad_(False)


def compare(bits: int, steps: int, seed: int = 0) -> dict[str, Any]:
    """Losses of the book's model after the same further steps: exact; rounded at the end, plainly and by ours, on the
    model that was trained exactly; and rounded plainly with the rounding in the loop."""
    study, settings = of("book"), codec(bits)
    exact, loop = (trained_on(study.model, steps, one, 100 + seed) for one in (None, settings))
    plain: Callable[[Tensor, Tensor], Tensor] = nearest(settings)
    made = {"exact": exact, "rounded afterwards": _with(study, exact, plain), "in the loop": _with(study, loop, plain)}
    made["ours afterwards"] = _ours(study, exact, bits)
    return {name: told(divergence(study.reference, model)) for name, model in made.items()}


def _with(study: Study, model: GPT, quantizer: Callable[[Tensor, Tensor], Tensor]) -> GPT:
    nothing = torch.empty(0)
    return rebuild(
        model, study.calibration_ST, lambda name, layer, moments: plain_linear(quantizer(layer.weight, nothing))
    )


def _ours(study: Study, model: GPT, bits: int) -> GPT:
    return decoded(quantize(model, codec(bits), study.calibration_ST))
