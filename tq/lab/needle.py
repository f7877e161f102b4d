"""A pass key in a long text: whether a model still finds it when its keys and values are coded.

The answer is given to the model, and each of its tokens must be the likeliest after those before it: as generating it
would, in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tq.infer.pretrained import Language
from tq.train.model.gpt import GPT

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
TASK = "There is a pass key hidden in a long text. Find it and remember it. "
ASKED = "What is the pass key? The pass key is "


@dataclass(frozen=True, eq=False)
class Needle:
    """One prompt with its answer.

    Attributes:
        ids: tokens [T], the answer at their end.
        answer: how many of them are the answer.
        length: tokens asked for.
        depth: where the pass key is, as a share of the text.
    """

    ids: Tensor
    answer: int
    length: int
    depth: float


def needle(language: Language, length: int, depth: float, seed: int) -> Needle:
    """A prompt of nearly ``length`` tokens with a pass key of five digits, drawn by ``seed``.

    Raises:
        ValueError: the length leaves no room for a text.
    """
    key = str(np.random.default_rng(seed).integers(10_000, 100_000))
    told = f"The pass key is {key}. Remember it. {key} is the pass key. "
    parts = {name: language.encode(text) for name, text in {"told": told, "filler": FILLER}.items()}
    outer = [language.encode(text) for text in (TASK, ASKED, key)]
    room = length - len(parts["told"]) - sum(map(len, outer))
    count = room // len(parts["filler"])
    if count < 1:
        raise ValueError(f"{length} tokens leave no room for a text around the pass key")
    before = round(depth * count)
    text = [outer[0], *[parts["filler"]] * before, parts["told"], *[parts["filler"]] * (count - before), *outer[1:]]
    return Needle(torch.cat(text), len(outer[2]), length, depth)


@torch.no_grad()
def last_logits(model: GPT, ids: Tensor, count: int) -> Tensor:
    """Logits after each of the last ``count`` tokens of ids [T], [count, V]; those of other places are not computed."""
    x = model.embed(ids[None])
    for block in model.blocks:
        x = block(x, model.cos[: len(ids)], model.sin[: len(ids)])
    return model.head(model.final_norm(x[0, -count:]))


def found(model: GPT, one: Needle) -> tuple[bool, float]:
    """(whether each token of the answer is the likeliest, mean log-likelihood of them in nats)."""
    logits = last_logits(model, one.ids[:-1], one.answer)
    wanted = one.ids[-one.answer :]
    likely = torch.log_softmax(logits.float(), -1).gather(1, wanted[:, None])
    return bool((logits.argmax(-1) == wanted).all()), float(likely.mean())


def sign_test(ours: Sequence[bool], theirs: Sequence[bool]) -> float:
    """Two-sided p of McNemar's exact test: of the prompts that one alone finds, each is as likely to find more."""
    from scipy.stats import binomtest

    only = [sum(a and not b for a, b in zip(*pair, strict=True)) for pair in ((ours, theirs), (theirs, ours))]
    return 1.0 if sum(only) == 0 else float(binomtest(only[0], sum(only)).pvalue)


def grid(language: Language, lengths: Sequence[int], depths: Sequence[float], seed: int = 0) -> list[Needle]:
    """A prompt for each length and depth, each with a key of its own."""
    return [
        needle(language, length, depth, seed + 1000 * i + j)
        for i, length in enumerate(lengths)
        for j, depth in enumerate(depths)
    ]


def rows(found_by: dict[str, list[tuple[bool, float]]], needles: Sequence[Needle]) -> list[dict[str, Any]]:
    """Found of all and by length, for each method."""
    told = []
    for name, each in found_by.items():
        row: dict[str, Any] = {"method": name, "found": sum(hit for hit, _ in each), "of": len(each)}
        for length in sorted({one.length for one in needles}):
            hits = [hit for (hit, _), one in zip(each, needles, strict=True) if one.length == length]
            row[f"{length:,} tokens"] = f"{sum(hits)}/{len(hits)}"
        told.append(row)
    return told
