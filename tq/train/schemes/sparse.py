"""Deep gradient compression (DGC): the largest entries of sums that wait, sent to everybody as values and indices.

As its authors describe it, for SGD with momentum. Each rank clips its gradient at the threshold over sqrt(n), adds it
to a *velocity* u = beta u + g, and the velocity to what it has not sent yet, v = v + u (momentum correction). Of every
matrix the largest entries of v are sent, in fp16 with int32 indices, and cleared in v and in u (factor masking).
The share that is sent falls from 25 % to 0.1 % in a warm-up. Vectors, as norms, are averaged whole.

The authors do not say what Adam should do. Here Adam's moments take the mean of what was sent, of sums without
momentum: Adam brings its own. What fp16 rounds away is lost, as in the authors' repository.

Source: Lin, Han, Mao, Wang, Dally 2018 (Deep Gradient Compression, arXiv:1712.01887), section 3; their repository
synxlin/deep-gradient-compression for what stays dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tq.train.schemes.bucket import Bucket, Exchange, Exchanged, Moments, Scheme
from tq.train.schemes.ours import adam, send_exact

WARMUP_SHARES = (0.25, 0.0625, 0.015625, 0.004)  # sparsity 75 to 99.6 %, section 3.3
SHARE = 0.001
VALUE_BYTES, INDEX_BYTES = 2, 4


def share_of_step(step: int, warmup: int, share: float = SHARE) -> float:
    """Share of the entries that is sent in a step, from 1 on: four shares that fall, then ``share``.

    Example:
        >>> [share_of_step(step, 8) for step in (1, 2, 3, 8, 9)]
        [0.25, 0.25, 0.0625, 0.004, 0.001]
    """
    if step < 1 or warmup < 0 or not 0 < share <= 1:
        raise ValueError(f"step >= 1, warmup >= 0 and 0 < share <= 1 are needed, got {step}, {warmup}, {share}")
    if step > warmup:
        return share
    return max(share, WARMUP_SHARES[(step - 1) * len(WARMUP_SHARES) // warmup])


def chosen(x: Tensor, shapes: Sequence[torch.Size], share: float) -> Tensor:
    """Indices, int64 and rising, of what is sent of flat tensors x [n]: of every matrix its largest, vectors whole."""
    found, start = [], 0
    for shape in shapes:
        numel = shape.numel()
        if len(shape) > 1:
            count = max(1, round(share * numel))
            found.append(x[start : start + numel].abs().topk(count, sorted=False).indices.sort().values + start)
        else:
            found.append(torch.arange(start, start + numel, device=x.device))
        start += numel
    return torch.cat(found)


def pack(x: Tensor, indices: Tensor) -> Tensor:
    """The message: fp16 values, then int32 indices, as uint8 [6 k].

    Raises:
        ValueError: where x has more elements than int32 counts.

    Example:
        >>> x = torch.tensor([0.0, 3.0, 0.0, -0.5])
        >>> message = pack(x, torch.tensor([1, 3]))
        >>> message.numel(), unpack(message, 4).tolist()
        (12, [0.0, 3.0, 0.0, -0.5])
    """
    if x.numel() > 1 << 31:
        raise ValueError(f"x has {x.numel()} elements, int32 indices reach {1 << 31}")
    values = x[indices].to(torch.float16).view(torch.uint8)
    return torch.cat([values, indices.to(torch.int32).view(torch.uint8)])


def unpack(message: Tensor, numel: int) -> Tensor:
    """The dense fp32 tensor [numel] of a message; ValueError for one that is not whole or points outside."""
    count, rest = divmod(message.numel(), VALUE_BYTES + INDEX_BYTES)
    if rest or message.dtype != torch.uint8:
        raise ValueError(f"a message is uint8 [6 k], got {message.dtype} [{message.numel()}]")
    values = message[: VALUE_BYTES * count].view(torch.float16).float()
    indices = message[VALUE_BYTES * count :].clone().view(torch.int32).long()
    if count and (int(indices.min()) < 0 or int(indices.max()) >= numel):
        raise ValueError(f"the message points outside of {numel} elements")
    return torch.zeros(numel, device=message.device).index_copy_(0, indices, values)


def send_largest_sums(b: Bucket, share: float, warmup: int, momentum: bool) -> Exchange:
    """What DGC sends of a bucket. Its bytes are those of an all-gather of ``pack``: (n - 1) * 6 per entry."""
    if all(len(shape) < 2 for shape in b.shapes):
        return (yield from send_exact(b))
    velocity = b.kept("dgc_velocity").mul(b.betas[0]).add_(b.gradient) if momentum else b.gradient
    waiting = b.kept("dgc_waiting") + velocity
    indices = chosen(waiting, b.shapes, share_of_step(b.step, warmup, share))
    sent = torch.zeros_like(waiting)
    sent[indices] = waiting[indices].to(torch.float16).float()
    waiting[indices] = 0.0
    new = {"dgc_waiting": waiting}
    if momentum:
        new["dgc_velocity"] = velocity.index_fill_(0, indices, 0.0)
    nbytes = (b.ranks - 1) * indices.numel() * float(VALUE_BYTES + INDEX_BYTES)
    return Exchanged((yield b.ask(sent, nbytes=nbytes)).mean, new)


def sgd(b: Bucket, found: Exchanged) -> Moments:
    """SGD with momentum through AdamW's update: a direction without its corrections over a root of 1. Of what DGC sent
    the momentum is in it already; of exact means it is formed here."""
    beta1, beta2 = b.betas
    m, renewed = found.gradient, {}
    if "dgc_waiting" not in found.renewed:
        m = b.kept("m") * beta1 + found.gradient
        renewed = {"m": m}
    ones = torch.full_like(m, 1 - beta2**b.step)
    return Moments(m * (1 - beta1**b.step), ones, renewed)


SGD = Scheme(send_exact, sgd, name="sgd")  # with momentum: what DGC is compared with


def dgc(share: float = SHARE, warmup: int = 0, optimizer: str = "sgd") -> Scheme:
    """DGC as a scheme of ``TurboQuantAdamW``; its ``max_norm`` is the threshold over sqrt(n).

    Args:
        share: of a matrix's entries that are sent after the warm-up.
        warmup: steps of it.
        optimizer: "sgd" as the authors have it, momentum corrected by the first beta and no decay of v; or "adamw".

    Raises:
        ValueError: for a share outside (0, 1], a negative warm-up or another optimizer.
    """
    share_of_step(1, warmup, share)
    if optimizer not in ("sgd", "adamw"):
        raise ValueError(f"optimizer must be 'sgd' or 'adamw', got {optimizer!r}")
    corrected = optimizer == "sgd"
    exchange = partial(send_largest_sums, share=share, warmup=warmup, momentum=corrected)
    name = f"dgc {share:g} {warmup} {optimizer}"
    return Scheme(exchange, sgd if corrected else adam, "momentum", per_rank=True, name=name)
