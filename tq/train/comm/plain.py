"""A reduce-scatter of floats as they are, with as few bytes as it takes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def scatter_sums(output: Tensor, given: Tensor, op: Any, group: dist.ProcessGroup) -> Tensor:
    """Every part goes to its rank, which adds up in fp32.

    A rank sends (n - 1)/n of the tensor. gloo's own is an all-reduce of which a rank keeps its part: twice the bytes.

    Args:
        output: this rank's part.
        given: contiguous, of as many equal parts as there are ranks.
        op: SUM or AVG.
        group: of the ranks.
    """
    ranks = dist.get_world_size(group)
    dist.all_to_all_single(received := torch.empty_like(given), given, group=group)
    total = received.view(ranks, -1).sum(0, dtype=torch.float32)
    return output.view(-1).copy_(total.div_(ranks) if op == dist.ReduceOp.AVG else total)
