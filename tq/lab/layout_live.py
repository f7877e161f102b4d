"""Bytes that are alive on a rank of a split model: at rest, after the forward and after the backward pass, by formula.

Counted are the storages of all tensors that PyTorch makes, as they come and go; what an allocator keeps for later, and
memory of libraries, are not. Formulas are from shapes: weights, gradients and AdamW's moments, what autograd keeps of
each block, buckets of DDP, gathered weights of FSDP2, and the buffers of a pipeline's stage.
"""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tq.lab import layout_bytes, layouts
from tq.train._torch_private import DispatchMode, storage
from tq.train.crew import crew
from tq.train.split import Job

NAMES = ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "TP", "PP, 1F1B")
MOMENTS = ("rest", "forward", "backward")


class Live(DispatchMode):
    """Sees every storage that is made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):  # comes by here again as plain tensors
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            # shapes are looked up with tensors that have no memory: fake ones, and those of "meta"
            if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu":
                self._see(tensor)
        return found

    def _see(self, tensor: Tensor) -> None:
        key = storage(tensor)
        if key not in self._seen:
            held = tensor.untyped_storage()
            self._seen[key] = weakref.ref(held)
            weakref.finalize(held, self._seen.pop, key, None)

    def bytes(self) -> int:
        """Of all that are alive now; a storage that was resized counts with its new size."""
        return sum(held.nbytes() for ref in list(self._seen.values()) if (held := ref()) is not None)

    def settled(self, pause_s: float = 0.01) -> int:
        """The same once it falls no more: threads of gloo let go of what was sent a moment after it has arrived."""
        found, before = self.bytes(), -1
        while found != before:
            time.sleep(pause_s)
            before, found = found, self.bytes()
        return found


def kept_per_token(job: Job) -> int:
    """Bytes that autograd keeps of a token in one block, in fp32.

    Each norm keeps its input, what it divided by, the quotient and its output; attention keeps queries, keys, values,
    output and a sum per head; the feed-forward layer what its activation function reads and writes. Tensor parallelism
    splits all but the norms.
    """
    config, n = job.config, job.plan.tp
    norms = 2 * (3 * config.hidden + 1)
    return layout_bytes.FP32 * (norms + (4 * config.hidden + config.heads + 2 * config.ffn_width) // n)


def _activations(job: Job, tokens: int) -> int:
    """Bytes that one micro-batch of so many tokens keeps on this rank, its output among them."""
    config, part = job.config, job.parts[0]
    found = len(part.blocks) * kept_per_token(job) * tokens
    if part.head is not None:
        return found + layout_bytes.FP32 * tokens * (3 * config.hidden + 1 + config.vocab)
    return found + layout_bytes.FP32 * tokens * config.hidden


def formula(job: Job, sequences: int) -> dict[str, int]:
    """Bytes alive at each of ``MOMENTS`` by shapes, for the layouts of ``NAMES``.

    Args:
        sequences: of a global batch, which is alive in both passes, and this rank's part of it in the forward pass.
    """
    plan, held = job.plan, layout_bytes.held(job)
    size = layout_bytes.FP32 * layout_bytes._parameters(job)
    buckets = size if plan.wrapped and job.data is not None else 0
    rest = held["weights"] + held["states"] + held["gradients"] + buckets
    tokens, batch = sequences // plan.dp * job.config.seq, 16 * sequences * job.config.seq
    if plan.pp > 1:
        forward, buffers, late = _of_stage(job, tokens)
        rest += buffers
    else:
        forward, late = _activations(job, tokens) + (size if plan.zero == 2 else 0), 0
    start = rest - held["gradients"] + late
    return {"rest": rest, "forward": start + forward + batch + 16 * tokens, "backward": rest + batch}


def _of_stage(job: Job, tokens: int) -> tuple[int, int, int]:
    """Of a stage of 1F1B: bytes of the micro-batches in flight, of buffers that stay, of gradients beside them.

    Stage s of p has p - s micro-batches in flight, and keeps buffers for all that it will receive. The last one keeps
    the logits of all.
    """
    plan, stage = job.plan, job.stages[0]
    each, last = tokens // plan.micro, stage == plan.pp - 1
    hidden, logits = (layout_bytes.FP32 * each * width for width in (job.config.hidden, job.config.vocab))
    buffers = plan.micro * (hidden * ((stage > 0) + (not last)) + logits * last)
    flying = min(plan.micro, plan.pp - stage)
    one = _activations(job, each) - hidden * (stage > 0) - logits * last  # what lies in the buffers
    late = layout_bytes.held(job)["gradients"] if plan.micro > flying else 0
    return flying * one, buffers, late


def _measured(name: str) -> dict[str, dict[str, int]]:
    given = list(layouts.batches(3, layouts.CONFIG.vocab, layouts.CONFIG.seq))
    seen: dict[str, int] = {}
    with Live() as live:
        job = Job(layouts.plans(dist.get_world_size())[name], layouts.CONFIG, lr=layouts.LR)
        for number in range(3):
            if number == 2:
                seen["rest"] = live.settled()
                job.parts[-1].register_forward_hook(
                    lambda *_: seen.update(forward=max(seen.get("forward", 0), live.settled()))
                )
            batch = given.pop(0)
            job.backward(*batch)
            if number == 2:
                seen["backward"] = live.settled()
            job.update()
            del batch
    return {"live": seen, "formula": formula(job, layouts.SEQUENCES)}


def on_rank(folder: Path, names: list[str]) -> dict[str, Any]:
    """On a rank of a crew: {layout: {"live": bytes by moment in the third step, "formula": the same from shapes}}."""
    return {name: _measured(name) for name in names}


def live(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """{layout: {moment: {"live", "formula": bytes, of the rank where they differ most}}}.

    Args:
        task: ranks and names (of ``NAMES``).
        device: "cpu".
    """
    found = crew("tq.lab.layout_live:on_rank", task["ranks"], 300.0, names=task["names"])
    result: dict[str, Any] = {}
    for name in task["names"]:
        result[name] = {}
        for moment in MOMENTS:
            pairs = [(each[name]["live"][moment], each[name]["formula"][moment]) for each in found]
            counted, by_formula = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
            result[name][moment] = {"live": counted, "formula": by_formula}
    return result
