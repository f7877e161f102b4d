"""Schemes of this package: the gradient or the momentum in few bits, with error feedback or without.

Sources: error feedback (Seide et al. 2014, Karimireddy et al. 2019); unbiased scales (EDEN, Vargaftik et al. 2022).
"""

from __future__ import annotations

import torch

from tq.train.schemes.bucket import Bucket, Exchange, Exchanged, Moments, exchanged


def send_exact(b: Bucket) -> Exchange:
    return exchanged((yield b.ask(b.gradient)))


def send_gradient(b: Bucket, feedback: bool = False) -> Exchange:
    return exchanged((yield b.ask(b.gradient, b.codecs, feedback=feedback)))


def send_momentum(b: Bucket, feedback: bool = False) -> Exchange:
    return exchanged((yield b.ask(b.momentum(), b.codecs, feedback=feedback)))


def send_momentum_and_v(b: Bucket) -> Exchange:
    """Momentum with feedback; each rank's own v is averaged at steps 1, 2, 4, ... and then every K steps."""
    new = {"local_v": b.second_moment(b.gradient, "local_v")}
    if b.step % b.every == 0 or (b.step < b.every and b.step & (b.step - 1) == 0):
        v = (yield b.ask(new["local_v"])).mean
        new = {"local_v": v, "v": v.clone()}
    momentum, renewed = yield from send_momentum(b, feedback=True)
    return Exchanged(momentum, {**new, **renewed})


def adam(b: Bucket, found: Exchanged) -> Moments:
    """Adam's moving averages of the exchanged gradient, in place: nothing can fail any more."""
    beta1, beta2 = b.betas
    m = b.kept("m").lerp_(found.gradient, 1 - beta1)
    v = b.kept("v").mul_(beta2).addcmul_(found.gradient, found.gradient, value=1 - beta2)
    return Moments(m, v, {"m": m, "v": v})


def implied_v(b: Bucket, found: Exchanged) -> Moments:
    """v from the mean gradient that the exchanged momentum implies: (m - beta1 m_old) / (1 - beta1)."""
    m, beta1 = found.gradient, b.betas[0]
    v = b.second_moment(torch.sub(m, b.kept("m"), alpha=beta1).div_(1 - beta1))
    return Moments(m, v, {"m": m, "v": v})


def agreed_v(b: Bucket, found: Exchanged) -> Moments:
    """The v that was last agreed upon."""
    v = found.renewed["v"] if "v" in found.renewed else b.old_v()
    return Moments(found.gradient, v, {"m": found.gradient, "v": v})


def frozen_v(b: Bucket, found: Exchanged) -> Moments:
    """v stays as the warm-up left it."""
    v = b.old_v()
    return Moments(found.gradient, v, {"m": found.gradient, "v": v})
