"""Training under any split of a model, on PyTorch's own parts: a plan, what it builds, and a step.

    job = Job(Plan(dp=2, tp=2, pp=2, zero=2), config)
    loss = job.step(tokens, targets)

Axes: pipeline stages (pp), data parallel (dp), context parallel (cp), tensor parallel (tp); experts lie on the
data-parallel ranks (ep). Data parallelism is ``DistributedDataParallel``, ``ZeroRedundancyOptimizer`` (ZeRO-1) or
FSDP2 (ZeRO-2, 3, HSDP), tensor parallelism DTensor, pipelines ``torch.distributed.pipelining``. Ours are the context
ring, the experts' all-to-all and what is quantized.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from tq.quant.codec import Codec
from tq.train import chunks, pipeline, ring, tensor
from tq.train.gathers import AllGather
from tq.train.hooks import HookState, ReduceScatter, ddp_hook
from tq.train.model.gpt import GPTConfig

Order = list[list[tuple[str, int, int]]]
PLACES = ("gradients", "weights", "tensor", "forward", "backward", "experts")


@dataclass(frozen=True)
class Plan:
    """How a model is split.

    Attributes:
        dp, tp, pp, cp: ranks of each axis; their product is the number of ranks. ep: 1, or dp: experts split over it.
        zero: 0 to 3; 2 and 3 are FSDP2. replicas: of the shards (HSDP), a divisor of dp * cp.
        sequence, losses: sequence parallelism, and logits split over the vocabulary; both with tp.
        schedule: of the pipeline; "own" runs the order that ``Job`` is given. chunks: stages per rank. micro:
            micro-batches.
        balanced: whether the context ring gives each rank a part of the head and one of the tail.
        bits: {place: bits} for the places of ``PLACES`` that are quantized; nothing by default.

    Raises:
        ValueError: if the parts contradict each other.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    replicas: int = 1
    sequence: bool = False
    losses: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    micro: int = 1
    balanced: bool = False
    bits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        data = self.dp * self.cp
        problems = {
            "every axis needs at least one rank": min(self.dp, self.tp, self.pp, self.cp, self.micro, self.chunks) < 1,
            "zero must be 0, 1, 2 or 3": self.zero not in (0, 1, 2, 3),
            "ep must be 1 or dp": self.ep not in (1, self.dp),
            "replicas must divide dp * cp and need zero 2 or 3": self.replicas > 1
            and (self.zero < 2 or data % self.replicas > 0),
            "sequence and losses need tp > 1": (self.sequence or self.losses) and self.tp == 1,
            "with tp, pp or experts, data parallelism needs zero 0, 2 or 3": self.zero == 1
            and (self.tp > 1 or self.pp > 1 or self.ep > 1),
            "experts on several ranks go with zero 0": self.ep > 1 and self.zero > 0,
            "a codec of gradients or weights needs data parallelism of its kind": bool(
                ("weights" in self.bits and self.zero < 2) or ({"gradients"} & set(self.bits) and data == 1)
            ),
            f"bits must name some of {', '.join(PLACES)}": not set(self.bits) <= set(PLACES),
        }
        for what, wrong in problems.items():
            if wrong:
                raise ValueError(f"{what}; got {self}")

    @property
    def ranks(self) -> int:
        """Ranks that the plan needs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def wrapped(self) -> bool:
        """Whether DDP wraps the model; elsewhere, without FSDP2, gradients are averaged after the backward pass."""
        return self.zero < 2 and self.pp == self.tp == self.ep == 1

    def codec(self, place: str) -> Codec | None:
        """The codec of a place, None where it is not quantized."""
        return Codec(bits=self.bits[place], seed=PLACES.index(place)) if place in self.bits else None


class Job:
    """A model split as a plan says, on the ranks of the default group, with AdamW.

    Args:
        plan: its ranks must be those of the group.
        config: shape of the GPT; ``seq`` positions are trained.
        mixture: experts in place of the feed-forward layers; None is dense.
        seed: of the weights.
        lr: of AdamW.
        order: of the pipeline where the plan's schedule is "own".
        start: weights of the whole model by name, in place of those of the seed.
    """

    def __init__(
        self, plan: Plan, config: GPTConfig, mixture: chunks.Mixture | None = None, seed: int = 0, lr: float = 1e-3,
        order: Order | None = None, *, start: dict[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        if plan.ranks != dist.get_world_size():
            raise ValueError(f"the plan needs {plan.ranks} ranks, there are {dist.get_world_size()}")
        self.plan, self.config, self.step_number = plan, config, [0]
        self.mesh = _mesh(plan)
        self.axis = {name: self.mesh[name] for name in ("pp", "dp", "cp", "tp")}
        self.data = self.mesh["dp", "cp"]._flatten("data") if plan.dp * plan.cp > 1 else None
        own = {name: mesh.get_local_rank() for name, mesh in self.axis.items()}
        self.own = own
        self.places = ring.places(config.seq, own["cp"], plan.cp, plan.balanced)
        gpt = chunks.model(config, seed, mixture, self._experts if plan.ep > 1 else None)
        if start is not None:
            gpt.load_state_dict({name: self._own_experts(name, weight) for name, weight in start.items()})
        if plan.cp > 1:
            for block in gpt.blocks:
                block.attention.core = ring.RingAttention(  # type: ignore[union-attr]
                    config.seq, self.axis["cp"].get_group(), plan.balanced
                )
        held = pipeline.placement(plan.schedule, plan.pp, plan.chunks) if plan.pp > 1 else [[0]]
        spans = chunks.cuts(config.layers, plan.pp * plan.chunks if plan.pp > 1 else 1)
        self.stages = held[own["pp"]]
        self.parts = [chunks.Chunk(gpt, *spans[stage], self.places) for stage in self.stages]
        for part in self.parts:
            if plan.tp > 1:
                tensor.split(part, self.axis["tp"], sequence=plan.sequence, loss_parallel=plan.losses,
                             codec=plan.codec("tensor"), step=self.step_number)  # fmt: skip
        self.modules = [self._shared(part) for part in self.parts]
        self.run = self._pipeline(len(spans), order) if plan.pp > 1 else None
        self.optimizer = self._optimizer(lr)

    def _experts(self, layer: int) -> dict[str, Any]:
        codec = self.plan.codec("experts")
        return {"group": self.axis["dp"].get_group(), "codecs": (codec, codec), "step": self.step_number}

    def _own_experts(self, name: str, weight: Tensor) -> Tensor:
        """Of the weights of all experts those of this rank; other weights as they are."""
        split = self.plan.ep > 1 and name.endswith(("mlp.up", "mlp.down"))
        return weight.chunk(self.plan.ep)[self.own["dp"]] if split else weight

    def _shared(self, part: chunks.Chunk) -> nn.Module:
        """The chunk under DDP or FSDP2, as the plan says."""
        plan = self.plan
        if self.data is None:
            return part
        if plan.wrapped:
            wrapped = DistributedDataParallel(part, process_group=self.data.get_group(), broadcast_buffers=False)
            codec = plan.codec("gradients")
            if codec is None:  # from Python, where it is counted
                wrapped.register_comm_hook(self.data.get_group(), default_hooks.allreduce_hook)
            else:
                wrapped.register_comm_hook(HookState(codec, self.data.get_group(), warmup=0), ddp_hook)
            return wrapped
        if plan.zero < 2:
            return part
        mesh = self.data
        if plan.replicas > 1:
            shape = (plan.replicas, plan.dp * plan.cp // plan.replicas)
            mesh = self.data._unflatten(0, shape, ("replica", "shard"))
        # a pipeline keeps the weights from the first micro-batch on, as all its passes need them
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": plan.zero == 3 and plan.pp == 1}
        for block in part.blocks.values():
            fully_shard(block, **options)
        fully_shard(part, **options)  # in place
        for module in part.modules():
            if isinstance(module, FSDPModule):
                sharded: Any = module  # its protocols name more keywords than it gives
                if (codec := plan.codec("gradients")) is not None:
                    sharded.set_custom_reduce_scatter(ReduceScatter(codec, warmup=0))
                if (codec := plan.codec("weights")) is not None:
                    sharded.set_custom_all_gather(AllGather(codec, self.step_number))
        return part

    def _pipeline(self, stages: int, order: Order | None) -> Any:
        plan, group = self.plan, self.axis["pp"].get_group()
        made = [
            pipeline.CodedStage(module, stage, stages, group, forward=plan.codec("forward"),
                                backward=plan.codec("backward"), step=self.step_number)
            for module, stage in zip(self.modules, self.stages, strict=True)
        ]  # fmt: skip
        return pipeline.schedule(plan.schedule, made, plan.micro, chunks.loss_of, order)

    def _optimizer(self, lr: float) -> torch.optim.Optimizer:
        parameters = [p for module in self.modules for p in module.parameters()]
        if self.plan.zero == 1 and self.data is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # importing it compiles scripts that PyTorch calls deprecated
                from torch.distributed.optim import ZeroRedundancyOptimizer
            return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, self.data.get_group(), lr=lr)
        return torch.optim.AdamW(parameters, lr=lr)

    def own_part(self, batch: Tensor) -> Tensor:
        """Of a global batch [sequences, positions] what this rank's axes give it."""
        return batch.chunk(self.plan.dp)[self.own["dp"]][:, self.places].contiguous()

    def backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward pass over a global batch [sequences, seq]; this rank's loss in nats, 0 without one."""
        self.optimizer.zero_grad()
        x, y = self.own_part(tokens), self.own_part(targets)
        with loss_parallel() if self.plan.losses else contextlib.nullcontext():
            if self.run is not None:
                losses: list[Tensor] = []
                arguments = {"target": y, "losses": losses} if self._has_loss() else {}
                self.run.step(*((x,) if 0 in self.stages else ()), **arguments)
                loss = torch.stack([_plain(each) for each in losses]).mean() if losses else torch.zeros(())
            else:
                loss = self._accumulated(x, y)
        self._average()
        return loss

    def _accumulated(self, x: Tensor, y: Tensor) -> Tensor:
        """Micro-batches without a pipeline: gradients are synchronised with each."""
        total, module = torch.zeros(()), self.modules[0]
        for number, (a, b) in enumerate(zip(x.chunk(self.plan.micro), y.chunk(self.plan.micro), strict=True)):
            last = number == self.plan.micro - 1
            quiet = isinstance(module, DistributedDataParallel) and not last
            with module.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
                loss = chunks.loss_of(module(a), b) / self.plan.micro
                loss.backward()
                total += _plain(loss)
        return total

    def _average(self) -> None:
        """Means of gradients over the data-parallel ranks where neither DDP nor FSDP2 forms them."""
        if self.data is None or self.plan.zero >= 2 or self.plan.wrapped:
            return
        experts = [p for name, p in self.named() if self.plan.ep > 1 and name.endswith(("mlp.up", "mlp.down"))]
        for parameter in experts:
            if parameter.grad is not None:  # tokens of all ranks are in it already
                parameter.grad /= self.plan.dp
        mine = {id(p) for p in experts}
        found = [_local(p.grad) for _, p in self.named() if p.grad is not None and id(p) not in mine]
        flat = torch.cat([each.flatten() for each in found])
        dist.all_reduce(flat, group=self.data.get_group())
        flat /= self.plan.dp * self.plan.cp
        for each, mean in zip(found, flat.split([each.numel() for each in found]), strict=True):
            each.copy_(mean.view_as(each))

    def mean_loss(self, loss: Tensor) -> float:
        """Of the losses of all ranks that have one."""
        share = torch.stack([loss.detach().double(), torch.tensor(float(self._has_loss()), dtype=torch.float64)])
        dist.all_reduce(share)
        return float(share[0] / share[1])

    def _has_loss(self) -> bool:
        return any(part.head is not None for part in self.parts)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """One training step; the mean loss over all ranks before it."""
        loss = self.backward(tokens, targets)
        self.update()
        return self.mean_loss(loss)

    def update(self) -> None:
        """The optimizer's part of a step."""
        self.optimizer.step()
        self.step_number[0] += 1

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank under their names in the whole model."""
        for part in self.parts:
            yield from part.named_parameters()

    def held_bytes(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer states that this rank holds between steps."""
        weights = [p for _, p in self.named()]
        states = [s for each in self._states() for s in each.values() if torch.is_tensor(s) and s.ndim]
        gradients = [p.grad for p in weights if p.grad is not None]
        return {
            name: sum(_local(x).numel() * x.element_size() for x in found)
            for name, found in (("weights", weights), ("gradients", gradients), ("states", states))
        }

    def _states(self) -> list[dict[str, Any]]:
        optimizer: Any = getattr(self.optimizer, "optim", self.optimizer)  # ZeRO-1 holds its share inside
        return list(optimizer.state.values())


def _mesh(plan: Plan) -> DeviceMesh:
    return init_device_mesh("cpu", (plan.pp, plan.dp, plan.cp, plan.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))


def _local(x: Any) -> Tensor:
    found: Tensor = x.to_local() if isinstance(x, DTensor) else x
    return found


def _plain(x: Tensor) -> Tensor:
    return x.full_tensor().detach() if isinstance(x, DTensor) else x.detach()
