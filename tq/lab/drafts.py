"""Guessed tokens: a draft model names the next few, and the large one checks them all in one pass.

Greedy: a guess is kept while it is what the large model finds likeliest, and the first that is not is replaced by that.
(Leviathan et al., arXiv:2211.17192; for greedy decoding Stern et al., arXiv:1811.03115.) Nothing is cached here: each
pass reads the whole text, which costs time and changes no token.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tq.infer.evaluate import texts
from tq.lab import weight_study as weights
from tq.lab.needle import last_logits
from tq.train.model.gpt import GPT

Likeliest = Callable[[Tensor, int], Tensor]  # tokens [T] and a count: the likeliest after each of the last so many


@dataclass(frozen=True)
class Drafted:
    """What came of one prompt.

    Attributes:
        tokens: after the prompt.
        proposed, kept: tokens of the draft that were checked in each pass, and those that were kept.
    """

    tokens: list[int]
    proposed: list[int]
    kept: list[int]


def likeliest(model: GPT) -> Likeliest:
    """Of a model: its choice after each of the last tokens, int64 [count]."""

    def after(ids_T: Tensor, count: int) -> Tensor:
        return last_logits(model, ids_T, count).argmax(-1)

    return after


def alone(large: Likeliest, prompt_T: Tensor, count: int) -> list[int]:
    """``count`` tokens after a prompt, one a pass."""
    ids = prompt_T
    for _ in range(count):
        ids = torch.cat([ids, large(ids, 1)])
    return ids[len(prompt_T) :].tolist()


def drafted(large: Likeliest, draft: Likeliest, prompt_T: Tensor, count: int, ahead: int) -> Drafted:
    """``count`` tokens after a prompt, of which a draft guesses ``ahead`` before each pass.

    Args:
        large, draft: the models.
        prompt_T: tokens, int64 [T], at least one.
        count: tokens wanted.
        ahead: guesses for a pass, at least one; fewer at the end.
    """
    ids, proposed, kept = prompt_T, [], []
    while (left := len(prompt_T) + count - len(ids)) > 0:
        guesses = min(ahead, left - 1)
        text = ids
        for _ in range(guesses):
            text = torch.cat([text, draft(text, 1)])
        right = large(text, guesses + 1)  # after the last sure token, and after each guess
        same = int((text[len(ids) :] == right[:guesses]).long().cumprod(0).sum())
        ids = torch.cat([ids, right[: same + 1]])
        if guesses:
            proposed.append(guesses)
            kept.append(same)
    return Drafted(ids[len(prompt_T) :].tolist(), proposed, kept)


def per_pass(agreed: float, ahead: int) -> float:
    """Tokens of a pass where each guess is right with probability ``agreed``, whatever those before it were."""
    return sum(agreed**k for k in range(ahead + 1))


def outcome(name: str, bits: int, prompts: int, count: int, ahead: int, length: int = 64) -> dict[str, Any]:
    """A model with a draft that is itself with weights in few bits, on the first tokens of held-out texts.

    Args:
        name: one of ``weight_study.MODELS``.
        bits: of the draft's weights, each block rounded to the nearest.
        prompts: texts.
        count: tokens after each.
        ahead: guesses for a pass.
        length: tokens of a prompt.
    Returns:
        "agree": share of all tokens of those texts where both find the same one likeliest; "same": of each prompt,
        whether its tokens are those of the model alone; "first": the first place where they are not, or None;
        "proposed", "kept": of each prompt, of each pass.
    """
    model = weights.language(name).model
    small = weights.nearest(weights.codec(bits))
    held_out = texts(weights.language(name), prompts, 2 * length)
    study = weights.Study(model, held_out[:1], held_out)
    draft = study.model_of(small, calibrated=False)
    agree = study.compare(draft).agree
    large, guess = likeliest(model), likeliest(draft)
    told: dict[str, list[Any]] = {"same": [], "first": [], "proposed": [], "kept": []}
    for ids in study.reference.ids_ST:
        wanted = alone(large, ids[:length], count)
        found = drafted(large, guess, ids[:length], count, ahead)
        places = [t for t, (a, b) in enumerate(zip(wanted, found.tokens, strict=True)) if a != b]
        row = (not places, min(places, default=None), found.proposed, found.kept)
        for what, value in zip(told, row, strict=True):
            told[what].append(value)
    return {"agree": agree, **told}
