"""What AdamW's replicas may exchange instead of the exact gradient, one short generator each.

A rule sees one ``Bucket`` of one rank. Its ``exchange`` asks for means by yielding and returns the state that it
renews; its ``moments`` then gives the direction and the second moment of the update. Neither changes the bucket's
state: the optimizer commits it when everything is finite.

Sources: error feedback (Seide et al. 2014, Karimireddy et al. 2019); unbiased scales (EDEN, Vargaftik et al. 2022);
1-bit Adam (Tang et al. 2021); "published-v3" is TurboQuant-Adam v3 of the technical report AEGIS-TR-2026-004;
PowerSGD (Vogels et al. 2019); deep gradient compression (Lin et al. 2018).

Shapes: n numbers of a bucket; every tensor is flat fp32 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tq.quant.codebook import lloyd_max
from tq.quant.codec import Codec
from tq.quant.rotation import rotate, unrotate
from tq.train.collectives import Codecs, Mean, chunk_numel

SIGMA_MEMORY = 0.9  # of the running scale of "published-v3"; the report does not print it

New = dict[str, Tensor]
Exchange = Generator[Mean, None, New]


@dataclass
class Bucket:
    """Parameters of one group as one flat vector of n numbers, in one step of one rank.

    Attributes:
        shapes: of the parameters, in order.
        gradient: [n]; what the rule leaves here after the exchange is clipped and goes on to ``moments``.
        stored: gives a tensor of the state by name, as the last step left it, or None.
        step: number of this step from 1 on; every: K of "synced-v"; betas: of Adam.
        codecs: of the two legs; key: names the seeds of this step and bucket; rank, ranks: of the group.
        sent: bytes that this rank sent.
    """

    shapes: list[torch.Size]
    gradient: Tensor
    stored: Callable[[str], Tensor | None]
    step: int
    betas: tuple[float, float]
    codecs: Codecs
    key: tuple[int | str, ...] = ()
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

    def mean(
        self, x: Tensor, codecs: Codecs | None = None, feedback: bool = False, nbytes: float | None = None
    ) -> Exchange:
        """x becomes its mean over the ranks; with ``feedback`` the new residuals of both legs are returned."""
        errors = None
        if feedback and codecs is not None:
            mine = chunk_numel(x.numel(), codecs[0].block, self.rank, self.ranks)
            errors = self.kept("error"), self.kept("server_error", mine)
        asked = Mean(x, codecs, self.key, errors, nbytes=nbytes)
        self.sent += asked.sent_bytes(self.ranks)
        yield asked
        return {} if asked.errors is None else {"error": asked.errors[0], "server_error": asked.errors[1]}

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


@dataclass(frozen=True)
class Rule:
    """One way to run AdamW on several ranks.

    Attributes:
        exchange: what is sent; None: nothing. moments: (direction, second moment) from the bucket and the renewed
            state, to which it adds.
        clips_local: clipping acts on this rank's gradient before the exchange; else on what was exchanged.
        fed_back: its codes carry error feedback and are chosen by least squares; the others are unbiased.
        agrees: all ranks end with the same weights.
        frozen: its second moment is that of a warm-up with another rule, which it needs.
        name: tells rules apart that are in no table; a state goes on only under the name it had.
    """

    exchange: Callable[[Bucket], Exchange] | None
    moments: Callable[[Bucket, New], tuple[Tensor, Tensor]]
    clips_local: bool = False
    fed_back: bool = False
    agrees: bool = True
    frozen: bool = False
    name: str = "custom"


def adam(b: Bucket, new: New) -> tuple[Tensor, Tensor]:
    """Adam's moving averages of the exchanged gradient, in place: nothing can fail any more."""
    beta1, beta2 = b.betas
    new["m"] = b.kept("m").lerp_(b.gradient, 1 - beta1)
    new["v"] = b.kept("v").mul_(beta2).addcmul_(b.gradient, b.gradient, value=1 - beta2)
    return new["m"], new["v"]


def send_exact(b: Bucket) -> Exchange:
    return (yield from b.mean(b.gradient))


def send_gradient(b: Bucket, feedback: bool = False) -> Exchange:
    return (yield from b.mean(b.gradient, b.codecs, feedback))


def send_momentum(b: Bucket, feedback: bool = False) -> Exchange:
    b.gradient = b.momentum()
    return (yield from b.mean(b.gradient, b.codecs, feedback))


def implied_v(b: Bucket, new: New) -> tuple[Tensor, Tensor]:
    """v from the mean gradient that the exchanged momentum implies: (m - beta1 m_old) / (1 - beta1)."""
    beta1 = b.betas[0]
    new["m"] = b.gradient
    new["v"] = b.second_moment(torch.sub(b.gradient, b.kept("m"), alpha=beta1).div_(1 - beta1))
    return new["m"], new["v"]


def send_momentum_and_v(b: Bucket) -> Exchange:
    """Momentum with feedback; each rank's own v is averaged at steps 1, 2, 4, ... and then every K steps."""
    new = {"local_v": b.second_moment(b.gradient, "local_v")}
    if b.step % b.every == 0 or (b.step < b.every and b.step & (b.step - 1) == 0):
        yield from b.mean(new["local_v"])
        new["v"] = new["local_v"].clone()
    b.gradient = b.momentum()
    return {**new, **(yield from b.mean(b.gradient, b.codecs, feedback=True))}


def agreed_v(b: Bucket, new: New) -> tuple[Tensor, Tensor]:
    """The v that was last agreed upon."""
    new["m"] = b.gradient
    if "v" not in new:
        new["v"] = b.old_v()
    return new["m"], new["v"]


def by_running_scale(x: Tensor, sizes: Sequence[int], sigma: Tensor, codec: Codec, seed: int) -> tuple[Tensor, Tensor]:
    """(x decoded, sigma renewed): every tensor rotated in blocks, its levels times a moving average of its rms."""
    levels, thresholds = (torch.tensor(t, dtype=torch.float32, device=x.device) for t in lloyd_max(codec.bits))
    decoded, renewed = [], []
    for part, old in zip(x.split(list(sizes)), sigma, strict=True):
        now = part.square().mean().sqrt()
        scale = torch.where(old > 0, SIGMA_MEMORY * old + (1 - SIGMA_MEMORY) * now, now)
        blocks = F.pad(part, (0, -part.numel() % codec.block)).view(-1, codec.block)
        z = rotate(blocks, 1, seed) / scale.clamp_min(torch.finfo(torch.float32).tiny)
        decoded.append(unrotate(levels[torch.bucketize(z, thresholds)] * scale, 1, seed).view(-1)[: part.numel()])
        renewed.append(scale)
    return torch.cat(decoded), torch.stack(renewed)


def _send_by_running_scale(b: Bucket, x: Tensor, feedback: bool) -> Exchange:
    owed = x + b.kept("error") if feedback else x
    seed = b.codecs[0].derive(*b.key, b.rank).seed
    b.gradient, sigma = by_running_scale(owed, b.sizes, b.kept("sigma", len(b.sizes)), b.codecs[0], seed)
    new = {"sigma": sigma} | ({"error": owed - b.gradient} if feedback else {})
    # the report's all-gather: everybody's codes to everybody
    yield from b.mean(b.gradient, nbytes=(b.ranks - 1) * (b.gradient.numel() * b.codecs[0].bits / 8 + 4 * len(b.sizes)))
    return new


def send_scaled_gradient(b: Bucket, feedback: bool) -> Exchange:
    """The gradient as the report quantizes: its setting for the failures of gradient quantization."""
    return (yield from _send_by_running_scale(b, b.gradient, feedback))


def send_published(b: Bucket) -> Exchange:
    """v3: m and v of this rank's gradients; m plus residual goes to all."""
    new = {"m": b.momentum(), "v": b.second_moment(b.gradient)}
    return new | (yield from _send_by_running_scale(b, new["m"], feedback=True))


def own_v(b: Bucket, new: New) -> tuple[Tensor, Tensor]:
    """v3's update: the mean of what was sent over this rank's own v. The replicas drift apart."""
    return b.gradient, new["v"]


def _signs(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.cat([torch.where(t >= 0, 1.0, -1.0) * t.abs().mean() for t in x.split(list(sizes))])


def send_signs(b: Bucket) -> Exchange:
    """1-bit Adam after its warm-up: signs of the momentum, one magnitude a tensor, feedback on both legs."""
    owed = b.momentum() + b.kept("error")
    b.gradient = _signs(owed, b.sizes)
    new = {"error": owed - b.gradient}
    yield from b.mean(b.gradient, nbytes=2 * (b.ranks - 1) / b.ranks * (b.gradient.numel() / 8 + 4 * len(b.sizes)))
    owed = b.gradient + b.kept("server_error")  # kept whole on every rank, where a real one would keep its chunk
    b.gradient = _signs(owed, b.sizes)
    return {**new, "server_error": owed - b.gradient}


def frozen_v(b: Bucket, new: New) -> tuple[Tensor, Tensor]:
    """v stays as the warm-up left it."""
    new["m"], new["v"] = b.gradient, b.old_v()
    return new["m"], new["v"]


def send_bf16(b: Bucket) -> Exchange:
    """PyTorch's bf16_compress_hook: rounded before the sum."""
    b.gradient = b.gradient.bfloat16().float()
    yield from b.mean(b.gradient, nbytes=2 * (b.ranks - 1) / b.ranks * 2 * b.gradient.numel())
    b.gradient = b.gradient.bfloat16().float()
    return {}


def send_low_rank(b: Bucket, rank: int) -> Exchange:
    """PowerSGD: P = M Q and Q = M^T P of every matrix, warm-started Q, feedback; vectors are sent exactly."""
    owed = b.gradient + b.kept("error")
    parts = [t.view(s) for t, s in zip(owed.split(b.sizes), b.shapes, strict=True)]
    low = [t.ndim >= 2 and min(t.flatten(1).shape) > rank for t in parts]
    matrices = [t.flatten(1) for t, is_low in zip(parts, low, strict=True) if is_low]
    if not matrices:
        return (yield from send_exact(b))
    rows, columns = ([m.shape[i] for m in matrices] for i in range(2))

    def unpacked(flat: Tensor, lengths: list[int]) -> list[Tensor]:
        return [t.view(-1, rank) for t in flat.split([n * rank for n in lengths])]

    q = b.stored("powersgd_q")
    if q is None:
        generator = torch.Generator().manual_seed(b.codecs[0].seed)
        q = torch.randn(sum(columns) * rank, generator=generator).to(owed.device)
    p = torch.cat([(m @ q_i).flatten() for m, q_i in zip(matrices, unpacked(q, columns), strict=True)])
    yield from b.mean(p)
    bases = [torch.linalg.qr(t)[0] for t in unpacked(p, rows)]
    q = torch.cat([(m.T @ base).flatten() for m, base in zip(matrices, bases, strict=True)])
    vectors = torch.cat([q.new_zeros(0), *(t.flatten() for t, is_low in zip(parts, low, strict=True) if not is_low)])
    both = torch.cat([q, vectors])
    yield from b.mean(both)
    q, vectors = both.split([q.numel(), vectors.numel()])
    sent = iter([base @ q_i.T for base, q_i in zip(bases, unpacked(q, columns), strict=True)])
    exact = iter(vectors.split([t.numel() for t, is_low in zip(parts, low, strict=True) if not is_low]))
    b.gradient = torch.cat([(next(sent) if is_low else next(exact)).flatten() for is_low in low])
    flags = torch.tensor(low, device=owed.device).repeat_interleave(torch.tensor(b.sizes, device=owed.device))
    return {"error": torch.where(flags, owed - b.gradient, 0.0), "powersgd_q": q.clone()}


def send_largest(b: Bucket, share: float) -> Exchange:
    """Deep gradient compression: the largest entries of momentum-corrected sums; what is sent is cleared."""
    momentum = b.kept("dgc_momentum").mul(b.betas[0]).add_(b.gradient)
    owed = b.kept("error") + momentum
    count = max(1, round(share * owed.numel()))
    chosen = owed.abs().topk(count).indices
    b.gradient = torch.zeros_like(owed).index_copy_(0, chosen, owed[chosen])
    momentum[chosen] = 0.0
    owed[chosen] = 0.0
    yield from b.mean(b.gradient, nbytes=(b.ranks - 1) * count * 8.0)  # fp32 and an int32 index, to everybody
    return {"error": owed, "dgc_momentum": momentum}


RULES: dict[str, Rule] = {
    "local": Rule(None, adam),  # for gradients that DDP or FSDP has averaged already
    "exact": Rule(send_exact, adam),
    "gradient": Rule(send_gradient, adam),
    "gradient-ef": Rule(partial(send_gradient, feedback=True), adam, fed_back=True),
    "momentum": Rule(send_momentum, implied_v, clips_local=True),
    "momentum-ef": Rule(partial(send_momentum, feedback=True), implied_v, clips_local=True, fed_back=True),
    "synced-v": Rule(send_momentum_and_v, agreed_v, clips_local=True, fed_back=True),
    "published-v3": Rule(send_published, own_v, clips_local=True, fed_back=True, agrees=False),
    "published-gradient": Rule(partial(send_scaled_gradient, feedback=False), adam, fed_back=True),
    "published-gradient-ef": Rule(partial(send_scaled_gradient, feedback=True), adam, fed_back=True),
    "frozen-v": Rule(partial(send_momentum, feedback=True), frozen_v, clips_local=True, fed_back=True, frozen=True),
    "one-bit-adam": Rule(send_signs, frozen_v, clips_local=True, fed_back=True, frozen=True),
}


def rival(name: str, amount: float = 0.0) -> Rule:
    """Rules of others for comparison: "bf16"; "powersgd" with a rank; "top-k" with the share of entries sent."""
    known: dict[str, Callable[..., Any]] = {
        "bf16": send_bf16,
        "powersgd": partial(send_low_rank, rank=int(amount)),
        "top-k": partial(send_largest, share=amount),
    }
    if name not in known:
        raise ValueError(f"name must be one of {', '.join(known)}; got {name!r}")
    return Rule(known[name], adam, name=f"{name} {amount:g}")
