"""Bytes a parameter of weights, gradients and optimizer states that a rank holds under ZeRO, by stage.

The formula of the paper, for any number of ranks up to infinity; `tq.systems.memory` counts a model's parts and stages.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5 and figure 1.
"""

from __future__ import annotations

import math

from tq.systems.arguments import one_of, positive

WEIGHTS, GRADIENTS, STATES = 2.0, 2.0, 12.0  # 16-bit weights and gradients; fp32 master copy and both moments


def zero_bytes(stage: int, ranks: float) -> float:
    """16 without (stage 0); 4 + 12 / n, 2 + 14 / n, 16 / n for stages 1 to 3. ranks: n >= 1, or inf for the limit."""
    one_of("stage", str(stage), ("0", "1", "2", "3"))
    positive("ranks", ranks)
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    share = 0.0 if ranks == math.inf else 1 / ranks
    parts = ((WEIGHTS, 3), (GRADIENTS, 2), (STATES, 1))
    return sum(width * (share if stage >= split_from else 1.0) for width, split_from in parts)


def zero_factor(stage: int, ranks: float) -> float:
    """How many times fewer bytes than without: up to 4 and 8 for stages 1 and 2, n for stage 3."""
    held = zero_bytes(stage, ranks)
    return math.inf if held == 0 else zero_bytes(0, 1) / held


def zero_traffic(stage: int) -> float:
    """Bytes that a rank sends in a step over those of an all-reduce of 16-bit gradients: 1, and 3 / 2 for stage 3,
    which gathers the weights for both passes and scatters the gradients [section 7]."""
    one_of("stage", str(stage), ("0", "1", "2", "3"))
    gathers, scatters = (2 if stage == 3 else 1), 1
    return (gathers + scatters) / 2
