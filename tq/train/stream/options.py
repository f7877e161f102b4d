"""What a streamed run can do, what it is given, and what a step of it has cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tq.train.model.corpus import Corpus
from tq.train.model.gpt import GPTConfig
from tq.train.model.loop import TrainConfig
from tq.train.stream.layout import Model
from tq.train.stream.update import IMPLS

CLIPS = ("global", "previous")
KEPT = ("memory", "place")


@dataclass(frozen=True)
class Work:
    """Of the last step: its seconds, those that it waited for the disk, and the bytes that moved."""

    seconds: float
    waited_s: float
    bytes_read: int
    bytes_written: int

    @property
    def binds(self) -> str:
        """What the step was bound by: the disk where it waited for it more than a tenth of its time."""
        return "disk" if self.waited_s > 0.1 * self.seconds else "compute"


def check(
    model: GPTConfig, corpus: Corpus, config: TrainConfig, *, inputs: str | int, clip: str, resident: int,
    loss_tokens: int | None, impl: str, state: tuple[int, int] | None, place: object,
) -> None:  # fmt: skip
    """ValueError, in one sentence, for what a streamed run cannot do."""
    seq = model.seq if config.seq is None else config.seq
    bits = isinstance(inputs, int) and not isinstance(inputs, bool) and 2 <= inputs <= 8
    state_ok = state is None or (
        isinstance(state, tuple) and len(state) == 2 and state[0] in range(2, 9) and state[1] in (2, 4, 8)
    )
    wrong = {
        f"corpus has {corpus.vocab} tokens, the model's vocab is only {model.vocab}": corpus.vocab > model.vocab,
        f"seq={seq} is longer than the model's {model.seq}": seq > model.seq,
        "a streamed run cannot be compiled: its weights change place; set compile=False": config.compile,
        "a streamed run takes float32 or torch.bfloat16: float16 would need a second pass to skip a step":
            config.autocast == torch.float16,
        f"inputs must be 'memory', 'place' or 2 to 8 bits, got {inputs!r}": not (inputs in KEPT or bits),
        f"inputs='place' needs a folder to lie in, got place={place!r}": inputs == "place" and place is None,
        f"clip must be one of {', '.join(CLIPS)}; got {clip!r}": clip not in CLIPS,
        f"resident must be a number of blocks, 0 or more, got {resident!r}":
            isinstance(resident, bool) or not isinstance(resident, int) or resident < 0,
        f"loss_tokens must be a positive integer or None, got {loss_tokens!r}":
            loss_tokens is not None and not (isinstance(loss_tokens, int) and loss_tokens > 0),
        f"impl must be one of {', '.join(IMPLS)}; got {impl!r}": impl not in IMPLS,
        f"state must be None or (2 to 8, one of 2, 4, 8) bits of (m, v), got {state!r}": not state_ok,
    }  # fmt: skip
    for sentence, holds in wrong.items():
        if holds:
            raise ValueError(sentence)


def given(model: Model, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights that somebody gave, in the model's order; ValueError names the first that does not fit."""
    for name, shape in model.named_shapes():
        if name not in weights:
            raise ValueError(f"weights lack {name}")
        x = weights[name]
        if x.shape != shape:
            raise ValueError(f"weights: {name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
        yield name, x.detach().float()


def describe(work: Work | None, tokens: int) -> str:
    """A progress line's part on speed: tokens per second, and what binds."""
    if work is None:
        return "no step yet"
    moved = (work.bytes_read + work.bytes_written) / work.seconds / 1e6
    waited = f"waited {work.waited_s / work.seconds:.0%}"
    return f"{tokens / work.seconds:,.0f} tokens/s, {work.binds} binds ({moved:,.0f} MB/s, {waited})"
