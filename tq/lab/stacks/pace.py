"""Steps of DDP in turn, each way in its own replica: what a backend costs beside gloo, and beside the hook.

"off" hands everything to gloo. "hook-fp32" and "backend-fp32" do all that hook and backend do, and code nothing; "bf16"
is PyTorch's own hook. "gloo-again" is gloo in a second group: how far it seems to be from gloo, the measurement errs.

To be called on the ranks of a ``Crew`` whose group is gloo's. All replicas live in the same processes and step one
after the other, in an order that turns, so that what disturbs one disturbs all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tq.backend
from tq.lab.net.workloads import bf16
from tq.lab.stacks.task import Learner, Windows
from tq.lab.stacks.uncoded import Uncoded
from tq.quant.codec import Codec
from tq.train.hooks import HookState, ddp_hook
from tq.train.model.corpus import load
from tq.train.model.gpt import PRESETS

WAYS = ("gloo", "bf16", "off", "hook-fp32", "backend-fp32", "hook", "backend")
PASSTHROUGH = ("gloo", "gloo-again", "off")
_Made = tuple[DistributedDataParallel, torch.optim.Optimizer]
_made: dict[str, dict[str, _Made]] = {}


def _replica(way: str, preset: str, bits: int, bucket_mb: float) -> _Made:
    group, codec = None, Uncoded(bits) if way.endswith("-fp32") else Codec(bits)
    if way in ("off", "backend", "backend-fp32"):
        codes = frozenset() if way == "off" else tq.backend.Config().codes
        tq.backend.configure(tq.backend.Config(codec, warmup=0), codes=codes)
        group = dist.new_group(backend="tq")
    elif way == "gloo-again":
        group = dist.new_group(backend="gloo")
    model = DistributedDataParallel(
        Learner(preset, 0), process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )
    if way == "bf16":
        model.register_comm_hook(None, bf16)
    elif way in ("hook", "hook-fp32"):
        model.register_comm_hook(HookState(codec, warmup=0), ddp_hook)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def in_turn(
    rounds: int, warm: int = 3, preset: str = "1m", batch: int = 4, bits: int = 4, bucket_mb: float = 0.5,
    *, ways: Sequence[str] = WAYS,
) -> dict[str, Any]:  # fmt: skip
    """Seconds of steps, one of each way a round.

    Args:
        rounds: how many are kept.
        warm: rounds before them.
        preset: shape of the model.
        batch: sequences of a rank.
        bits: of hook and backend.
        bucket_mb: size of DDP's buckets.
        ways: of ``WAYS`` or ``PASSTHROUGH``.

    Returns:
        {way: [seconds], one of each round}.

    Raises:
        RuntimeError: the backend is among the ways and coded nothing.
    """
    key = repr((preset, bits, bucket_mb, ways))
    if key not in _made:
        _made.clear()
        _made[key] = {way: _replica(way, preset, bits, bucket_mb) for way in ways}
    seq = PRESETS[preset].seq
    windows = Windows(load("stdlib", max_bytes=1_000_000), dist.get_rank(), warm + rounds, batch, seq)
    seconds: dict[str, Any] = {way: [] for way in ways}
    for turn in range(warm + rounds):
        rows = [windows[turn * batch + row] for row in range(batch)]
        ids, targets = (torch.stack([row[part] for row in rows]) for part in range(2))
        for place in range(len(ways)):
            way = ways[(place + turn) % len(ways)]
            model, optimizer = _made[key][way]
            dist.barrier()
            began = time.perf_counter()
            model(ids, targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if turn >= warm:
                seconds[way].append(time.perf_counter() - began)
    kinds = [count for group in tq.backend.groups().values() for count in group.counts.kinds.values()]
    if "backend" in ways and not any(count.coded for count in kinds):
        raise RuntimeError("the backend coded nothing")
    return seconds
