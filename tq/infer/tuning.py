"""Scales and norms of a quantized model, fitted to what the model in full precision predicts; codes stay as they are.

Quantizing works layer by layer, and what one layer gets wrong the next ones do not all put right. Here the divergence
of the whole model's predictions is brought down by Adam over all scales at once, and over the weights of the norms,
which are stored in full precision anyway. The bits stored stay the same. QuIP# (Tseng et al. 2024, arXiv:2402.04396)
and AQLM (Egiazarian et al. 2024, arXiv:2401.06118) tune what is not rounded in the same way.

It needs more text than quantizing does: a few hundred thousand tokens, or the scales learn the texts by heart.

Shapes: S sequences, T tokens, O rows (outputs), I columns (inputs), N blocks of a row, B block size.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tq.infer.layers import QuantizedLinear, layers, put, shared
from tq.train import tqk
from tq.train.model.gpt import GPT, RMSNorm

STEPS, BATCH, RATE = 300, 4, 1e-3
_BETAS = (0.9, 0.99)
_WARMUP = 10  # steps
_EVERY = 20  # steps, after which what was learned is kept


@dataclass(frozen=True)
class Tuned:
    """What ``tune`` tells after each step: steps done, of how many, and the divergence in nats per token."""

    done: int
    total: int
    kl: float


class _Scaled(nn.Module):
    """A quantized layer whose scales can be learned: W = levels * scale, block by block, in the weight's own axes."""

    levels_ONB: Tensor
    scales_ON: Tensor

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        (rows, columns), block = layer.shape, layer.codec.block
        levels_OI = layer.rescaled(torch.ones_like(layer.scales)).decoded()
        self.layer, self.columns = layer, columns
        self.register_buffer("levels_ONB", F.pad(levels_OI, (0, -columns % block)).view(rows, -1, block))
        self.register_buffer("scales_ON", layer.scales.float().view(rows, -1))
        self.logs_ON = nn.Parameter(torch.zeros_like(self.scales_ON))

    def forward(self, x: Tensor) -> Tensor:
        weight_ONB = self.levels_ONB * (self.scales_ON * self.logs_ON.exp())[:, :, None]
        return F.linear(x, weight_ONB.flatten(1)[:, : self.columns])

    def learned(self) -> QuantizedLinear:
        """The layer with the scales that were learned, in the type that they are stored in."""
        scales = (self.scales_ON * self.logs_ON.detach().exp()).reshape(-1).to(self.layer.scales.dtype)
        return self.layer.rescaled(scales)


def tune(
    small: GPT,
    reference: GPT,
    ids_ST: Tensor,
    *,
    steps: int = STEPS,
    batch: int = BATCH,
    rate: float = RATE,
    norms: bool = True,
    seed: int = 0,
    keep: Path | None = None,
    progress: Callable[[Tuned], object] = lambda told: None,
) -> GPT:
    """A quantized model with scales, and norms, that bring its predictions closer to those of another one.

    Args:
        small: of ``quantize``; stays as it is.
        reference: the model in full precision, of the same shape.
        ids_ST: tokens to learn on, int64 [S, T]; other texts than those that the result is judged on.
        steps, batch: of Adam, and sequences of one. The rate rises over ten steps, then falls as half a cosine.
        rate: of the logarithm of each scale, and of the norms' weights.
        norms: whether the weights of the norms are learned too.
        seed: of the order of the sequences.
        keep: file for what was learned so far, so that a run that was ended goes on; None (default) keeps nothing.
        progress: called after each step.
    Returns:
        GPT: with the codes of ``small``, and as many stored bits.
    Raises:
        ValueError: nothing is quantized, the models or an argument do not fit, or predictions are not finite.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.tuning import tune
        >>> from tq.infer.weights import quantize
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=1, hidden=64, heads=2, vocab=64, seq=32))
        >>> ids = torch.randint(64, (8, 32))
        >>> small = tune(quantize(model, Codec(bits=2, block=64), ids), model, ids, steps=2)
        >>> small.blocks[0].mlp.up.codec.bits
        2
    """
    if small.config != reference.config:
        raise ValueError(f"reference is of another shape: {reference.config}, not {small.config}")
    if steps < 1 or not 1 <= batch <= len(ids_ST):
        raise ValueError(f"steps must be positive and batch between 1 and {len(ids_ST)}, got {steps} and {batch}")
    model, scaled, kept = _learner(small, norms)
    parameters = [*(layer.logs_ON for layer in scaled.values()), *kept.values()]
    optimizer = torch.optim.Adam(parameters, lr=rate, betas=_BETAS)
    identity = _identity((small, reference), ids_ST, steps, batch, rate, norms, seed)
    for step in range(_resume(keep, identity, parameters, optimizer), steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / _WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        kl = _step(model, reference, _batch(ids_ST, batch, step, seed), parameters, optimizer)
        progress(Tuned(step + 1, steps, kl))
        if keep is not None and ((step + 1) % _EVERY == 0 or step + 1 == steps):
            learned = {"parameters": [p.detach() for p in parameters], "optimizer": optimizer.state_dict()}
            tqk.save(keep, {"identity": identity, "step": step + 1, **learned})
    for name, layer in scaled.items():
        put(model, name, layer.learned())
    return model


def _step(
    model: GPT, reference: GPT, ids_ST: Tensor, parameters: list[nn.Parameter], optimizer: torch.optim.Adam
) -> float:
    """One step; the divergence before it. ValueError, and nothing is changed, where that is not finite."""
    kl = _divergence(model, reference, ids_ST)
    if not math.isfinite(kl.item()):
        raise ValueError("the predictions of a step are not finite")
    # Not backward(): parameters that are shared with the given model must not get gradients.
    for parameter, gradient in zip(parameters, torch.autograd.grad(kl, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()
    return kl.item()


def _learner(small: GPT, norms: bool) -> tuple[GPT, dict[str, _Scaled], dict[str, nn.Parameter]]:
    """A model that shares with ``small`` what is not learned; its quantized layers, and its norms' weights."""
    model = shared(small)
    scaled = {name: _Scaled(layer) for name, layer in layers(small, head=True) if isinstance(layer, QuantizedLinear)}
    if not scaled:
        raise ValueError("the model has no quantized layer")
    for name, layer in scaled.items():
        put(model, name, layer)
    kept: dict[str, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if norms and isinstance(module, RMSNorm):
            put(model, name, own := copy.deepcopy(module).requires_grad_(True))
            kept |= {f"{name}.{inside}": parameter for inside, parameter in own.named_parameters()}
    return model, scaled, kept


def _divergence(model: GPT, reference: GPT, ids_ST: Tensor) -> Tensor:
    """Mean over tokens of KL(reference, model), nats."""
    with torch.no_grad():
        wanted = F.log_softmax(reference(ids_ST)[0], -1)
    return F.kl_div(F.log_softmax(model(ids_ST)[0], -1), wanted, reduction="none", log_target=True).sum(-1).mean()


def _batch(ids_ST: Tensor, batch: int, step: int, seed: int) -> Tensor:
    """Sequences of a step: every one once before any comes again, in another order each time."""
    found = []
    for place in range(step * batch, (step + 1) * batch):
        turn, at = divmod(place, len(ids_ST))
        order = torch.randperm(len(ids_ST), generator=torch.Generator().manual_seed(seed + turn))
        found.append(ids_ST[order[at]])
    return torch.stack(found)


def _identity(models: Sequence[GPT], ids_ST: Tensor, *settings: Any) -> str:
    found = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for tensor in (ids_ST, *(value for model in models for value in model.state_dict().values())):
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


@torch.no_grad()
def _resume(keep: Path | None, identity: str, parameters: list[nn.Parameter], optimizer: torch.optim.Adam) -> int:
    """Steps done in the run that ``keep`` is of; 0 where it is of another run, damaged or not there."""
    if keep is None or not keep.is_file():
        return 0
    try:
        kept = tqk.load(keep)
    except tqk.DamagedFile:
        return 0
    if not isinstance(kept, dict) or kept.get("identity") != identity:
        return 0
    for parameter, learned in zip(parameters, kept["parameters"], strict=True):
        parameter.copy_(learned)
    optimizer.load_state_dict(kept["optimizer"])
    return int(kept["step"])
