"""What a scheme sees, one bucket of one rank in one step, and what a scheme is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tq.quant.codec import Codec
from tq.train.collectives import Averaged, Codecs, Mean, chunk_numel

New = dict[str, Tensor]  # tensors of the state, by name


class Exchanged(NamedTuple):
    """What an exchange gives: the gradient, or the momentum, of all [n], and the state that it renews."""

    gradient: Tensor
    renewed: New


class Moments(NamedTuple):
    """Direction and second moment of the update [n], and the state that they renew."""

    direction: Tensor
    v: Tensor
    renewed: New


Exchange = Generator[Mean, Averaged, Exchanged]


@dataclass(kw_only=True)
class Bucket:
    """Parameters of one group as one flat vector of n numbers, in one step of one rank.

    Attributes:
        shapes: of the parameters, in order.
        gradient: [n], of this rank; an exchange may use its memory.
        stored: gives a tensor of the state by name, as the last step left it, or None.
        step: number of this step from 1 on; every: K of "synced-v"; betas: of Adam.
        codecs: of the two phases; key: names the seeds of this step and bucket; rank, ranks: of the group.
        sent: bytes that this rank sent.
    """

    shapes: list[torch.Size]
    gradient: Tensor
    stored: Callable[[str], Tensor | None]
    step: int
    betas: tuple[float, float]
    codecs: Codecs
    key: tuple[int, ...] = (0,)
    rank: int = 0
    ranks: int = 1
    every: int = 1
    sent: float = field(default=0.0, init=False)

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    def kept(self, name: str, numel: int | None = None) -> Tensor:
        """A tensor of the state, zeros [numel] (default n) in the first step."""
        found = self.stored(name)
        return self.gradient.new_zeros(self.gradient.numel() if numel is None else numel) if found is None else found

    def ask(
        self, x: Tensor, codecs: Codecs | None = None, *, feedback: bool = False, nbytes: float | None = None
    ) -> Mean:
        """The request for the mean of x, whose bytes are counted; ``feedback`` adds the residuals of both phases."""
        residuals = None
        if feedback and codecs is not None:
            mine = chunk_numel(x.numel(), codecs[0].block, self.rank, self.ranks)
            residuals = self.kept("error"), self.kept("server_error", mine)
        asked = Mean(x, codecs, self.key, residuals, nbytes=nbytes)
        self.sent += asked.sent_bytes(self.ranks)
        return asked

    def momentum(self) -> Tensor:
        """beta1 m + (1 - beta1) g with this rank's gradient."""
        return self.kept("m").lerp(self.gradient, 1 - self.betas[0])

    def second_moment(self, gradient: Tensor, name: str = "v") -> Tensor:
        """beta2 v + (1 - beta2) gradient^2; the average of a name that is new goes on from v."""
        old = self.kept("v") if self.stored(name) is None else self.kept(name)
        return (old * self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])

    def old_v(self) -> Tensor:
        """v as it was, with the bias that this step will correct: what divides the update stays the same."""
        before, now = (1 - self.betas[1] ** step for step in (self.step - 1, self.step))
        return self.kept("v") * (now / before if before else 1.0)


def exchanged(answer: Averaged) -> Exchanged:
    """What was averaged, with its residuals as state."""
    names = ("error", "server_error")
    return Exchanged(answer.mean, {} if answer.residuals is None else dict(zip(names, answer.residuals, strict=True)))


def side_by_side(exchanges: Sequence[Exchange]) -> Generator[list[Mean], list[Averaged], list[Exchanged]]:
    """The exchanges of all buckets: what each of them asks for next is asked for at once, so that one travels while
    another is encoded."""
    ended: dict[int, Exchanged] = {}
    answers: dict[int, Averaged | None] = dict.fromkeys(range(len(exchanges)))
    while answers:
        asked: dict[int, Mean] = {}
        for number, answer in answers.items():
            try:
                asked[number] = exchanges[number].send(answer)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as end:
                ended[number] = end.value
        answers = dict(zip(asked, (yield list(asked.values())), strict=True)) if asked else {}
    return [ended[number] for number in range(len(exchanges))]


@dataclass(frozen=True)
class Scheme:
    """One way to run AdamW on several ranks.

    Attributes:
        exchange: what is sent; None: nothing.
        moments: of the update, from the bucket and what the exchange gave, clipped; may change both in place.
        sends: what travels. Of "gradient" the sum is clipped and Adam's moments are formed of it; of "momentum" each
            rank clips its own gradient before.
        scale: of the default codec. Error feedback wants least squares ("mse"), the others unbiased codes.
        per_rank: keeps something of this rank alone between steps, residuals say; else the state is that of all ranks.
        agrees: all ranks end with the same weights.
        needs_warmup: its second moment is that of first steps with exact exchange.
        name: tells schemes apart that are in no table; a state goes on only under the name it had.
    """

    exchange: Callable[[Bucket], Exchange] | None
    moments: Callable[[Bucket, Exchanged], Moments]
    sends: Literal["gradient", "momentum"] = "gradient"
    scale: Literal["unbiased", "mse"] = "unbiased"
    per_rank: bool = False
    agrees: bool = True
    needs_warmup: bool = False
    name: str = "custom"

    def pair(self, codec: Codec | Codecs | None) -> Codecs:
        """The codecs of both phases, as an optimizer's argument names them; NaN and infinity pass through them."""
        if codec is None:
            codec = Codec(scale=self.scale)
        phases = codec if isinstance(codec, tuple) else (codec, codec)
        if len(phases) != 2 or not all(isinstance(phase, Codec) for phase in phases):
            raise TypeError(f"codec must be a Codec, a pair of them or None; got {codec!r}")
        if phases[0].block != phases[1].block:
            raise ValueError(f"both phases must have one block size, got {phases[0].block} and {phases[1].block}")
        first, second = (replace(phase, nonfinite="propagate") for phase in phases)
        return first, second
