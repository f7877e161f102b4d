"""What AdamW's replicas may exchange instead of the exact gradient, one short generator each.

A scheme sees one ``Bucket`` of one rank. Its ``exchange`` asks for means by yielding a ``Mean``, for which it is given
an ``Averaged``, and returns ``Exchanged``; its ``moments`` then gives the direction and the second moment of the
update. The state is what they return: the optimizer commits it when everything is finite.

Shapes: n numbers of a bucket; every tensor is flat fp32 unless said otherwise.
"""

from __future__ import annotations

from functools import partial

from tq.train.schemes.bucket import Bucket, Exchange, Exchanged, Moments, New, Scheme, side_by_side
from tq.train.schemes.ours import (
    adam,
    agreed_v,
    frozen_v,
    implied_v,
    send_exact,
    send_gradient,
    send_momentum,
    send_momentum_and_v,
)
from tq.train.schemes.published import (
    by_running_scale,
    own_v,
    published,
    send_published,
    send_scaled_gradient,
    send_signs,
)
from tq.train.schemes.rivals import FORMATS, rival, send_low_rank

__all__ = [
    "FORMATS", "SCHEMES", "Bucket", "Exchange", "Exchanged", "Moments", "New", "Scheme", "adam", "by_running_scale",
    "published", "rival", "send_low_rank", "side_by_side",
]  # fmt: skip

_per_rank = partial(Scheme, scale="mse", per_rank=True)

SCHEMES: dict[str, Scheme] = {
    "local": Scheme(None, adam),  # for gradients that DDP or FSDP has averaged already
    "exact": Scheme(send_exact, adam),
    "gradient": Scheme(send_gradient, adam),
    "gradient-ef": _per_rank(partial(send_gradient, feedback=True), adam),
    "momentum": Scheme(send_momentum, implied_v, sends="momentum"),
    "momentum-ef": _per_rank(partial(send_momentum, feedback=True), implied_v, sends="momentum"),
    "synced-v": _per_rank(send_momentum_and_v, agreed_v, sends="momentum"),
    "published-v3": _per_rank(send_published, own_v, sends="momentum", agrees=False),
    "published-gradient": _per_rank(partial(send_scaled_gradient, feedback=False), adam),
    "published-gradient-ef": _per_rank(partial(send_scaled_gradient, feedback=True), adam),
    "frozen-v": _per_rank(partial(send_momentum, feedback=True), frozen_v, sends="momentum", needs_warmup=True),
    "one-bit-adam": _per_rank(send_signs, frozen_v, sends="momentum", needs_warmup=True),
}
