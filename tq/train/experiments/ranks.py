"""Training on the ranks of a process group: DDP, FSDP2 or DiLoCo around the same loop, with a codec or without.

Every rank runs the same code and takes its share of each batch, the one that a simulated worker of that rank takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tq.quant.codec import Codec
from tq.train.collectives import HookState, ReduceScatter, ddp_hook
from tq.train.comm.agreement import Request, check_consistent
from tq.train.comm.channels import channel_of
from tq.train.diloco import DiLoCo
from tq.train.model.corpus import Corpus
from tq.train.model.gpt import GPT
from tq.train.model.loop import TrainConfig, Trainer

HOWS = ("ddp", "fsdp", "diloco")


class PairwiseReduceScatter:
    """For FSDP2's ``set_custom_reduce_scatter``: gradients in fp32 from every rank to every other, (n - 1)/n of the
    tensor a rank, as a ring sends and as ``tq.train.collectives.ReduceScatter`` sends codes.

    gloo's own reduce-scatter sends as much as an all-reduce, twice that, which is no fair baseline for its bytes.
    """

    allocate = ReduceScatter.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        combined = torch.mean if op == dist.ReduceOp.AVG else torch.sum  # FSDP2 asks for no other
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.view(-1).copy_(combined(received.view(dist.get_world_size(group), -1), 0))


class ParallelTrainer(Trainer):
    """A trainer of one rank; made by all ranks of the group together.

    Arguments:
        model: the same on every rank.
        config: as of one trainer; ``batch`` is that of all ranks, which must divide it.
        how: "ddp", "fsdp" (every block a unit of its own) or "diloco".
        codec: of gradients or pseudo-gradients, from the first step on; None sends fp32.
        hook: (state, function) for DDP in place of the codec's: another communication hook.
        pairwise: with "fsdp" and without a codec, ``PairwiseReduceScatter`` in the place of the backend's.
        diloco: further arguments of ``DiLoCo``.
        sites: number of the site of each rank, for "diloco": replicas are the sites. All sites have as many ranks.
            None: every rank is a site.
        inside: how ranks of a site train, in fp32: "ddp", or "fsdp", where ranks of the same place at their sites
            exchange the pseudo-gradients of their shards.

    ``losses`` holds this rank's losses; ``mean_losses`` those of all ranks. Every rank saves and loads its own state,
    with that of the exchange: FSDP2 and DiLoCo go on bit for bit, DDP, which cuts its buckets anew, to within the
    codec's error.
    """

    def __init__(
        self, model: GPT, corpus: Corpus, config: TrainConfig, how: str = "ddp", codec: Codec | None = None, *,
        device: torch.device | str = "cpu", optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
        hook: tuple[Any, Callable[..., Any]] | None = None, diloco: dict[str, Any] | None = None,
        bucket_mb: float = 25.0, sites: Sequence[int] | None = None, inside: str = "ddp", pairwise: bool = False,
    ):  # fmt: skip
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        if how not in HOWS:
            raise ValueError(f"how must be one of {', '.join(HOWS)}, got {how!r}")
        if config.batch % (self.ranks * config.accumulate):
            raise ValueError(f"{self.ranks} ranks times accumulate={config.accumulate} must divide {config.batch}")
        sharded = how == "fsdp" or (how == "diloco" and inside == "fsdp")
        if sharded and config.autocast == torch.float16:
            raise ValueError("config.autocast must be torch.bfloat16 or None with FSDP2: its ranks would scale apart")
        if pairwise and (how != "fsdp" or codec is not None):
            raise ValueError("pairwise=True goes with how='fsdp' and no codec, which has a reduce-scatter of its own")
        if inside not in HOWS[:2]:
            raise ValueError(f"inside must be one of {', '.join(HOWS[:2])}, got {inside!r}")
        model = model.to(device)
        site, across = None, None
        if how == "diloco":
            site, across = self._site_groups(list(range(self.ranks)) if sites is None else list(sites))
        if how == "fsdp" or (site is not None and inside == "fsdp"):
            mesh = None if site is None else DeviceMesh.from_group(site, torch.device(device).type)
            for unit in (*model.blocks, model):
                fully_shard(unit, mesh=mesh)
                if codec is not None and site is None:
                    unit.set_custom_reduce_scatter(self._reduce_scatter(codec))
                elif pairwise and site is None:
                    unit.set_custom_reduce_scatter(PairwiseReduceScatter())
        super().__init__(model, corpus, config, device, optimizer)
        self.how, self.codec, self.outer = how, repr(codec), None
        self.exchange: HookState | ReduceScatter | DiLoCo | None = getattr(self, "_scatter", None)
        if how == "ddp":
            wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
            if hook is None and codec is not None:
                self.exchange = HookState(codec, warmup=0)
                hook = self.exchange, ddp_hook
            if hook is not None:
                wrapped.register_comm_hook(*hook)
            self.forward = wrapped
        elif site is not None:
            together = inside == "ddp" and dist.get_world_size(site) > 1
            if together:
                self.forward = DistributedDataParallel(model, process_group=site, gradient_as_bucket_view=True)
            self.exchange = self.outer = DiLoCo(
                model.parameters(), codec=codec, group=across, inside=site if together else None, **(diloco or {})
            )

    def _site_groups(self, sites: list[int]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """(this rank's site, the ranks of its place at all sites)."""
        members = [[r for r, at in enumerate(sites) if at == site] for site in sorted(set(sites))]
        if len(sites) != self.ranks or len({len(site) for site in members}) != 1:
            raise ValueError(f"sites must put the {self.ranks} ranks at sites of one size, got {sites}")
        mine: dict[bool, dist.ProcessGroup] = {}
        for inside, chosen in ((True, members), (False, [list(place) for place in zip(*members, strict=True)])):
            for ranks in chosen:
                group = dist.new_group(ranks)
                if self.rank in ranks:
                    mine[inside] = group
        return mine[True], mine[False]

    def _reduce_scatter(self, codec: Codec) -> ReduceScatter:
        if not hasattr(self, "_scatter"):
            self._scatter = ReduceScatter(codec)
        return self._scatter

    def _batch(self, step: int, split: str = "train", seed: int | None = None) -> tuple[Tensor, Tensor]:
        ids, targets = super()._batch(step, split, seed)
        if split != "train":
            return ids, targets
        return ids.chunk(self.ranks)[self.rank], targets.chunk(self.ranks)[self.rank]

    def _finite_norm(self, model: nn.Module, loss: float) -> bool:
        """As of one trainer; with shards, the norm is that of all of them."""
        limit = float("inf") if self.config.grad_clip is None else self.config.grad_clip
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        value = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        if math.isfinite(loss) and (math.isfinite(value) or self.scaler.is_enabled()):
            return math.isfinite(value)
        raise FloatingPointError(f"step {self.steps_done}: loss {loss}, gradient norm {value}")

    @contextmanager
    def _micro(self, last: bool) -> Iterator[None]:
        """Only the last micro-batch of a step is followed by an exchange."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
            yield
        elif isinstance(self.forward, DistributedDataParallel) and not last:
            with self.forward.no_sync():
                yield
        else:
            yield

    def step(self) -> float:
        """One update of this rank; all ranks must take it."""
        loss = super().step()
        if self.outer is not None:
            self.outer.step()
        return loss

    def evaluate(self, batches: int = 8, split: str = "valid") -> float:
        """As of one trainer; all ranks must ask, and replicas that agree get the same answer."""
        wrapped, self.forward = self.forward, self.model
        try:
            return super().evaluate(batches, split)
        finally:
            self.forward = wrapped

    def state_dict(self) -> dict[str, Any]:
        """As of one trainer, with the state of the exchange."""
        return {**super().state_dict(), "exchange": None if self.exchange is None else self.exchange.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As of one trainer; the state must be of this rank, of as many ranks, trained in this way.

        Called by all ranks together; GroupError where they would go on from different steps.
        """
        if "exchange" not in state:
            raise ValueError("a state of one trainer, not of a rank: it has no 'exchange'")
        super().load_state_dict(state)
        if self.exchange is not None:
            self.exchange.load_state_dict(state["exchange"])
        check_consistent(Request(f"a start after step {self.steps_done}"), self.device, channel_of(None), "each")

    def _run(self) -> dict[str, Any]:
        return {**super()._run(), "how": self.how, "codec": self.codec, "ranks": self.ranks, "rank": self.rank}

    def mean_losses(self) -> Tensor:
        """float64 [steps done]: mean over the ranks, which must all ask."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        dist.all_reduce(losses)
        return losses / self.ranks
