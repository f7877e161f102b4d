"""Bytes that a layout must send in a step, and must hold, by formula: from shapes, placements and the plan.

Of n ranks, a tensor of S bytes: all-reduce 2 (n - 1) / n S; all-gather, reduce-scatter (n - 1) / n S; a message S.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.distributed.tensor import DTensor, Shard

from tq.train.split import Job, Plan

FP32 = 4


def _parameters(job: Job, tensor_parallel: bool = True) -> int:
    """Parameters of this rank's chunks before data-parallel sharding; of DTensors a rank's share of tp."""
    total = 0
    for _, parameter in job.named():
        numel = parameter.numel()
        if isinstance(parameter, DTensor) and tensor_parallel:
            names = parameter.device_mesh.mesh_dim_names or ()
            for name, placement in zip(names, parameter.placements, strict=False):
                if name == "tp" and isinstance(placement, Shard):
                    numel //= job.plan.tp
        total += numel
    return total


def sent(job: Job, sequences: int) -> dict[str, float]:
    """{"operation ranks": bytes a rank sends in a step} for layouts of one axis, FSDP with and without a ring, and
    pipelines; {} for those of which no formula stands here (tensor parallelism beside others)."""
    plan = job.plan
    if plan.tp > 1 and plan.ranks > plan.tp:
        return {}
    found: dict[str, float] = defaultdict(float)
    local = sequences // plan.dp
    tokens = local * job.config.seq // plan.cp
    _data(found, job)
    if plan.pp > 1:
        edges = _edges(job)
        found[f"send {plan.pp}"] += edges * tokens * job.config.hidden * FP32
    if plan.cp > 1:
        # keys and values forward; keys, values and both gradients backward, the gradients once more
        passes = 2 * (plan.cp - 1) + 2 * (plan.cp - 1) + 2 * plan.cp
        width = job.config.heads * job.config.head_size  # keys of shared heads would be repeated
        found[f"send {plan.cp}"] += job.config.layers * passes * tokens * width * FP32
    if plan.ep > 1:
        rows = sum(getattr(b.mlp, "off_rank", 0) for part in job.parts for b in part.blocks.values())
        micro = plan.micro if plan.pp > 1 else 1
        if micro > 1:
            return {}
        counts = job.config.layers * (plan.ep - 1) / plan.ep * 8 * _experts(job)
        back = _returned(job)
        found[f"all-to-all {plan.ep}"] += 2 * (rows + back) * job.config.hidden * FP32 + counts
    if plan.tp > 1:
        _tensor(found, job, tokens)
    return dict(found)


def _experts(job: Job) -> int:
    return next(int(b.mlp.count) for part in job.parts for b in part.blocks.values())  # type: ignore[union-attr, arg-type]


def _returned(job: Job) -> int:
    """Rows of other ranks that this one sent back in the last pass."""
    return sum(int(getattr(b.mlp, "returned", 0)) for part in job.parts for b in part.blocks.values())


def _data(found: dict[str, float], job: Job) -> None:
    plan: Plan = job.plan
    n = plan.dp * plan.cp
    if n == 1:
        return
    size, share = FP32 * _parameters(job), (n - 1) / n
    if plan.zero < 2:
        own = sum(p.numel() for name, p in job.named() if plan.ep > 1 and name.endswith(("mlp.up", "mlp.down")))
        found[f"all-reduce {n}"] += 2 * share * (size - FP32 * own)
        if plan.zero == 1:
            found[f"broadcast {n}"] += share * size  # of the new weights, by their owners
        return
    shards = n // plan.replicas
    part = (shards - 1) / shards
    # a pipeline and ZeRO-2 gather once, ZeRO-3 for each pass
    found[f"all-gather {shards}"] += (2 if plan.zero == 3 and plan.pp == 1 else 1) * part * size
    found[f"reduce-scatter {shards}"] += part * size
    if plan.replicas > 1:
        found[f"all-reduce {plan.replicas}"] += 2 * (plan.replicas - 1) / plan.replicas * size / shards


def _edges(job: Job) -> int:
    """Forward and backward edges from this rank's stages to other ranks."""
    plan, stages = job.plan, set(job.stages)
    last = plan.pp * plan.chunks - 1
    forward = sum(stage < last and stage + 1 not in stages for stage in stages)
    backward = sum(stage > 0 and stage - 1 not in stages for stage in stages)
    return forward + backward


def _tensor(found: dict[str, float], job: Job, tokens: int) -> None:
    """One axis of tensor parallelism: two sums a layer and pass, one at each end of the model."""
    plan, config = job.plan, job.config
    n, share = plan.tp, (plan.tp - 1) / plan.tp
    hidden, logits = tokens * config.hidden * FP32, tokens * config.vocab * FP32
    if plan.sequence:
        norms = (2 * config.layers + 1) * config.hidden * FP32
        found[f"all-gather {n}"] += (4 * config.layers + 2) * share * hidden + share * logits
        found[f"reduce-scatter {n}"] += (4 * config.layers + 2) * share * hidden
        found[f"all-reduce {n}"] += 3 * 2 * share * norms  # AdamW reads a gradient thrice, DTensor sums it each time
        return
    found[f"all-reduce {n}"] += (4 * config.layers + 2) * 2 * share * hidden
    if plan.losses:  # of each token its largest logit, its sum of exponentials and the logit of its target
        found[f"all-reduce {n}"] += 3 * 2 * share * tokens * FP32
    else:
        found[f"all-gather {n}"] += share * logits


def held(job: Job) -> dict[str, int]:
    """Bytes of weights, gradients and AdamW's two moments at rest, by the ZeRO formula in fp32; shapes that a group
    does not divide would be padded.

    Two things are PyTorch's and not the formula's. ZeRO-1 deals out whole tensors. And where tensor parallelism splits
    the embedding, DTensor leaves its gradient whole on every rank, unless FSDP2 shards it.
    """
    plan, size = job.plan, FP32 * _parameters(job)
    shards = plan.dp * plan.cp // plan.replicas if plan.zero >= 2 else 1
    whole = FP32 * job.config.vocab * job.config.hidden if 0 in job.stages and plan.zero < 2 else 0
    return {
        "weights": size // shards,
        "gradients": size // shards + whole * (plan.tp - 1) // plan.tp,
        "states": 2 * (FP32 * _dealt(job) if plan.zero == 1 else size // shards),
    }


def _dealt(job: Job) -> int:
    """Parameters whose moments this rank of ZeRO-1 holds: the largest tensor first, each goes to the rank that has
    least so far."""
    loads = [0] * (job.plan.dp * job.plan.cp)
    for numel in sorted((parameter.numel() for _, parameter in job.named()), reverse=True):
        loads[loads.index(min(loads))] += numel
    assert job.data is not None  # ZeRO-1 has a group
    return loads[job.data.get_local_rank()]


def agree(found: dict[str, Any]) -> bool:
    """Whether counted bytes by operation are the formula's, to the byte."""
    return bool(found["formula"]) and all(
        abs(found["sent"].get(key, 0.0) - found["formula"].get(key, 0.0)) < 0.5
        for key in {*found["sent"], *found["formula"]}
    )
