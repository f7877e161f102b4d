"""AdamW's step of one record whose weights and moments lie in a buffer: the same bits as ``TurboQuantAdamW``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tq.train.state import MOMENTS
from tq.train.stream.layout import MomentStore, Record

IMPLS = ("auto", "cpu", "reference")


@torch.no_grad()
def step_record(
    record: Record, buffer: Tensor, weights: Sequence[Tensor], gradients: Sequence[Tensor],
    settings: dict[str, Any], *, done: int, impl: str,
) -> None:  # fmt: skip
    """The weights, and the moments in the buffer, make the step after ``done`` steps.

    settings: lr, betas, eps and weight_decay, the last for what has it; impl: one of ``IMPLS``.
    """
    for run, store, views in record.stores(buffer, done):
        decayed = record.entries[run[0]].decayed
        group = {**settings, "weight_decay": settings["weight_decay"] if decayed else 0.0}
        chosen, theirs = [weights[i] for i in run], [gradients[i] for i in run]
        if not (impl != "reference" and _fused(store, chosen, theirs, group, impl)):
            _unfused(store, chosen, theirs, group)
        store.place(store.tensors, views)


def _fused(
    store: MomentStore, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any], impl: str
) -> bool:
    from tq.train import fused  # its compiler takes 100 MB, which "reference" does without

    module = fused.kernels(impl, weights, gradients)
    if module is None:
        return False
    fused.step(module, store, weights, gradients, group)
    return True


def _unfused(store: MomentStore, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
    from tq.train import unfused
    from tq.train.schemes import SCHEMES, Bucket, Exchanged

    scheme = SCHEMES["local"]
    flat = torch.cat([g.reshape(-1) for g in gradients])
    bucket = Bucket(
        shapes=store.shapes, gradient=flat, stored=store.get, step=store.done + 1, betas=group["betas"],
        codecs=scheme.pair(None),
    )  # fmt: skip
    unfused.step(scheme, bucket, Exchanged(flat, {}), store, weights, group, unused=[])
    for name in MOMENTS:
        if store.codecs is not None:
            store.tensors.pop(name, None)
