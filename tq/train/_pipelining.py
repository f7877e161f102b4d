"""Names of ``torch.distributed`` that PyTorch keeps to itself and that splits of a model need; written against 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

__all__ = ["from_actions", "group_named", "overlapped", "runtime"]


def runtime(stages: list[Any], micro_batches: int, loss: Any, order: Sequence[Sequence[tuple[str, int, int]]]) -> Any:
    """PyTorch's own runtime, running an order (kind, stage, micro-batch) of every rank."""
    schedule = _PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss, defer_pp_recv=True)
    actions: dict[int, list[_Action | None]] = {
        rank: [_Action(stage, _ComputationType(kind), micro) for kind, stage, micro in each]
        for rank, each in enumerate(order)
    }
    schedule._prepare_schedule_with_comms(actions)
    return schedule


def from_actions(order: dict[int, list[Any]]) -> list[list[tuple[str, int, int]]]:
    """The order of a schedule of PyTorch (``pipeline_order``); two overlapped passes are one after the other."""
    found = []
    for rank in sorted(order):
        actions: list[tuple[str, int, int]] = []
        for action in order[rank]:
            for each in () if action is None else (action.sub_actions or (action,)):
                actions.append((each.computation_type.value, each.stage_index, each.microbatch_index))
        found.append(actions)
    return found


def overlapped(order: dict[int, list[Any]]) -> list[tuple[str, int, int]]:
    """First passes of those pairs that a schedule of PyTorch overlaps: the runtime sends after both are done."""
    pairs = [action.sub_actions for rank in sorted(order) for action in order[rank] if action and action.sub_actions]
    return [(a.computation_type.value, a.stage_index, a.microbatch_index) for a, *_ in pairs]


def group_named(name: str) -> dist.ProcessGroup:
    """The group that a functional collective names."""
    found: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]
    return found
