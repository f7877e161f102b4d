"""How far a quantized model is from its reference: KL divergence per token, and losses, on held-out texts.

The mean of KL(reference || quantized) is the measure to rest on: it is 0 for equal models and never below, whereas a
difference of losses also moves up and down with what the reference happens to guess.

Shapes: S sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tq.infer.pretrained import Language
from tq.train.model.gpt import GPT
from tq.train.model.text_sources import stdlib

_TOKENS_AT_ONCE = 128  # rows of logits that are compared together


@dataclass(frozen=True, eq=False)
class Divergence:
    """A quantized model beside its reference.

    Attributes:
        kl_ST: KL(reference || quantized) in nats, float64 [S, T - 1].
        loss_ST: of the quantized model, nats, likewise.
        reference_ST: loss of the reference, likewise.
        agree: share of tokens where both find the same one likeliest.
    """

    kl_ST: np.ndarray
    loss_ST: np.ndarray
    reference_ST: np.ndarray
    agree: float

    @property
    def kl(self) -> float:
        """Mean KL per token, nats."""
        return float(self.kl_ST.mean())

    @property
    def rise(self) -> float:
        """Mean loss over that of the reference, nats."""
        return float((self.loss_ST - self.reference_ST).mean())

    def interval(self, level: float = 0.95, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
        """Bootstrap interval of the mean KL over sequences, whose tokens are not independent."""
        means_S = self.kl_ST.mean(1)
        drawn = np.random.default_rng(seed).integers(len(means_S), size=(draws, len(means_S)))
        low, high = np.quantile(means_S[drawn].mean(1), [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


def texts(language: Language, sequences: int, length: int, split: str = "valid", seed: int = 0) -> Tensor:
    """Windows of the standard library's sources as tokens, int64 [S, T]: "train" to calibrate, "valid" to judge.

    Raises:
        ValueError: the split is unknown, or too short for as many windows that do not overlap.
    """
    if split not in ("train", "valid"):
        raise ValueError(f"split must be train or valid, got {split!r}")
    files = stdlib(max_bytes=1_000_000 + 80 * sequences * length)[split == "valid"]
    ids = language.encode(b"\n".join(files).decode())
    count = len(ids) // length
    if count < sequences:
        raise ValueError(f"{count} windows of {length} tokens, asked for {sequences}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:sequences]
    return torch.stack([ids[int(at) * length : (int(at) + 1) * length] for at in order])


class Reference:
    """What a model says of some texts, to be compared with many others: kept as what enters its head.

    Args:
        head: the model's.
        ids_ST: tokens, int64 [S, T].
        hidden_STC: what enters the head for them, fp32 [S, T, C].
    """

    def __init__(self, head: nn.Module, ids_ST: Tensor, hidden_STC: Tensor) -> None:
        self.head, self.ids_ST, self.hidden_STC = head, ids_ST, hidden_STC

    @classmethod
    @torch.no_grad()
    def of(
        cls, model: GPT, ids_ST: Tensor, progress: Callable[[int, int], object] = lambda done, total: None
    ) -> Reference:
        """Of a model, which goes through the texts; progress: called with sequences done and asked for."""
        hidden: list[Tensor] = []
        hook = model.head.register_forward_pre_hook(lambda _, given: hidden.append(given[0][0].detach()))
        for number, ids in enumerate(ids_ST):
            model(ids[None])
            progress(number + 1, len(ids_ST))
        hook.remove()
        return cls(model.head, ids_ST, torch.stack(hidden))

    def logits(self, sequence: int) -> Tensor:
        """Of one text, [T, V]."""
        return self.head(self.hidden_STC[sequence])


@torch.no_grad()
def divergence(
    reference: GPT | Reference, model: Callable[[Tensor], tuple[Tensor, Any]], ids_ST: Tensor | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Divergence:  # fmt: skip
    """Compare two models of one vocabulary on the same tokens.

    Args:
        reference: a model, or what one says of the texts.
        model: gives (logits [B, T, V], ...) for tokens [B, T].
        ids_ST: tokens, int64 [S, T]; None where the reference holds them.
        progress: called with sequences done and asked for.
    Example:
        >>> import torch
        >>> from tq.infer.evaluate import divergence
        >>> from tq.train.model import GPT, GPTConfig
        >>> config = GPTConfig(layers=1, hidden=64, heads=2, vocab=64, seq=32)
        >>> ids = torch.randint(64, (2, 32))
        >>> divergence(GPT(config), GPT(config), ids).kl, divergence(GPT(config), GPT(config, seed=1), ids).kl > 0
        (0.0, True)
    """
    if isinstance(reference, GPT):
        assert ids_ST is not None
        reference = Reference.of(reference, ids_ST)
    kl, loss, before, agree = [], [], [], 0
    for number, ids in enumerate(reference.ids_ST):
        ours, theirs = model(ids[None])[0][0, :-1], reference.logits(number)[:-1]
        for q, p, targets in zip(*(x.split(_TOKENS_AT_ONCE) for x in (ours, theirs, ids[1:])), strict=True):
            q, p = F.log_softmax(q.float(), -1), F.log_softmax(p.float(), -1)
            kl.append((p.exp() * (p - q)).sum(-1))
            loss.append(F.nll_loss(q, targets, reduction="none"))
            before.append(F.nll_loss(p, targets, reduction="none"))
            agree += int((q.argmax(-1) == p.argmax(-1)).sum())
        progress(number + 1, len(reference.ids_ST))
    shape = len(reference.ids_ST), reference.ids_ST.shape[1] - 1
    kl_ST, loss_ST, before_ST = (torch.cat(each).double().numpy().reshape(shape) for each in (kl, loss, before))
    return Divergence(kl_ST, loss_ST, before_ST, agree / kl_ST.size)
