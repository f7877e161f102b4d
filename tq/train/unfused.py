"""AdamW's step of a bucket, one operation of PyTorch after the other: the reference of ``tq.train.fused``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tq.quant.rotation import WEIGHTS, dither
from tq.train.adamw import adamw_update, exact_root, subtract_codec_noise
from tq.train.collectives import Codecs
from tq.train.schemes import Bucket, Exchanged, Scheme
from tq.train.shards import local
from tq.train.state import MOMENTS, Store


def step(
    scheme: Scheme, bucket: Bucket, found: Exchanged, store: Store, parameters: Sequence[Tensor],
    group: dict[str, Any], *, unused: Sequence[int], noisy: Codecs | None = None, seed: int | None = None,
) -> None:  # fmt: skip
    """The parameters of a bucket move, but for those with the numbers ``unused``, and its state is committed.

    noisy: the codecs whose noise is subtracted from v; seed: as of ``fused.step``.
    """
    starts = store.starts
    slices = [slice(starts[i], starts[i] + store.sizes[i]) for i in unused]
    before = {name: [bucket.kept(name)[s].clone() for s in slices] for name in MOMENTS} if unused else {}
    moments = scheme.moments(bucket, found)
    new, v = {**found.renewed, **moments.renewed}, moments.v
    if noisy is not None:
        v = subtract_codec_noise(v, noisy)
    used = [i for i in range(len(parameters)) if i not in unused]
    for i in used:
        store.steps[i] += 1
    root = exact_root(v)
    dithers = None if seed is None else dither(seed, store.numel, v.device, WEIGHTS)
    for done in sorted({store.steps[i] for i in used}):  # one, unless parameters joined later than others
        chosen = [i for i in used if store.steps[i] == done]
        directions, roots, chances = (
            [x[starts[i] : starts[i] + store.sizes[i]].view(store.shapes[i]) for i in chosen]
            for x in (moments.direction, root, root if dithers is None else dithers)
        )
        given = None if dithers is None else chances
        adamw_update([local(parameters[i]) for i in chosen], directions, roots, group, done, given)
    for name, kept in before.items():  # as if the unused parameters had not been there
        for s, old in zip(slices, kept, strict=True):
            if name in new:
                new[name][s] = old
    store.commit(new)
