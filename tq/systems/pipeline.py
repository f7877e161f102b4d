"""Idle time of a pipeline: what its stages wait while it fills and drains.

p stages, m micro-batches a step, v chunks of layers a stage (1: not interleaved), t seconds of a micro-batch's forward
and backward pass through all layers of a stage. GPipe, which runs all forward passes before the first backward one, and
1F1B wait equally long, (p - 1) t; they differ in the activations that they hold. Interleaved 1F1B waits (p - 1) t / v.
Not modelled: unequal stages, transfers between them (they lengthen t), schedules that split the backward pass.

Sources: Huang et al. 2019 (arXiv:1811.06965), section 2.3; Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.
"""

from __future__ import annotations

from tq.systems.arguments import Real, positive, positive_int


def bubble_s(stages: int, stage_s: Real, chunks: int = 1) -> Real:
    """Seconds of a step that a stage is idle: (p - 1) t / v. stage_s: t, one micro-batch, forward and backward."""
    positive_int("stages", stages)
    positive_int("chunks", chunks)
    positive("stage_s", stage_s, zero=True)
    return (stages - 1) / chunks * stage_s


def bubble_over_work(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time over the time at work, (p - 1) / (v m): the "bubble time fraction" of Narayanan et al."""
    positive_int("micro_batches", micro_batches)
    return float(bubble_s(stages, 1.0, chunks)) / micro_batches


def bubble_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle share of the whole step, (p - 1) / (v m + p - 1): 0 for one stage, below 1 always."""
    idle = bubble_over_work(stages, micro_batches, chunks)
    return idle / (1 + idle)


def micro_batches_for(share: float, stages: int, chunks: int = 1) -> float:
    """Micro-batches at which the bubble is this share of the step, not rounded: (p - 1) (1 / share - 1) / v."""
    positive_int("stages", stages, 2)
    positive_int("chunks", chunks)
    positive("share", share, most=1.0)
    return (stages - 1) * (1 / share - 1) / chunks
