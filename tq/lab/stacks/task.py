"""What every stack trains: the same model on the same batches, so that what they reach and send can be compared.

A program of a stack makes a ``Task``, trains ``task.model(seed)`` on ``task.dataset(seed)`` for every seed, tells each
step and each end, and closes it; what it told lies in a file for every rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset

import tq.backend
from tq.lab.net.workloads import _sent_bytes as sent_bytes
from tq.lab.stacks.uncoded import Uncoded
from tq.quant.codec import Codec
from tq.train.model.corpus import Corpus, load
from tq.train.model.gpt import GPT, PRESETS
from tq.train.shards import local

TASK, OUT = "TQ_STACK_TASK", "TQ_STACK_OUT"  # environment: JSON of the fields of a Task; folder of what ranks tell
WAYS = ("plain", "forward", "bf16", "backend", "hook", "optimizer")
HELD_OUT = 8  # batches


Counted = dict[str, tuple[float, float]]  # bytes by kind of collective: as they would be sent plain, as they were sent


def counted() -> Counted:
    """What the backend's groups of this rank have counted so far."""
    found: Counted = {}
    for group in tq.backend.groups().values():
        for kind, count in group.counts.kinds.items():
            plain, sent = found.get(kind, (0.0, 0.0))
            found[kind] = plain + count.plain, sent + count.sent
    return found


def _between(before: Counted, after: Counted) -> dict[str, list[float]]:
    """What was counted from one moment to a later one."""
    return {
        kind: [new - old for new, old in zip(both, before.get(kind, (0.0, 0.0)), strict=True)]
        for kind, both in after.items()
    }


class Learner(nn.Module):
    """The book's GPT, whose answer is its loss: ``learner(ids, targets)``, int64 [B, T] both."""

    def __init__(self, preset: str, seed: int) -> None:
        super().__init__()
        self.gpt = GPT(PRESETS[preset], seed)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss = self.gpt(ids, targets)[1]
        assert isinstance(loss, Tensor)
        return loss


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Sample ``i`` is row ``i % batch`` of the batch of step ``i // batch``.

    In order, and dealt out to ranks one by one or batch by batch, every step has the same samples.
    """

    def __init__(self, corpus: Corpus, seed: int, steps: int, batch: int, seq: int) -> None:
        self.corpus, self.seed, self.steps, self.batch, self.seq = corpus, seed, steps, batch, seq
        self._kept: tuple[int, tuple[Tensor, Tensor]] | None = None

    def __len__(self) -> int:
        return self.steps * self.batch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        step, row = divmod(index, self.batch)
        if self._kept is None or self._kept[0] != step:
            self._kept = step, self.corpus.batch(step, self.batch, self.seq, self.seed)
        ids, targets = self._kept[1]
        return ids[row], targets[row]


@dataclass
class Task:
    """What is asked of a program of a stack, and what it tells.

    Attributes:
        way: how gradients are coded: "plain" (not at all), by a "backend", a "hook" or an "optimizer". "forward" is the
            backend that hands everything to gloo; so is "bf16", with the engine's own gradients in 16 bits.
        bits: of the codec.
        codes: False: backend, hook and optimizer do all that they do, and send fp32 (``Uncoded``).
        warmup: first steps with exact gradients.
        seeds: of the models and of the order of their batches; one training run each.
        steps: of each run.
        batch: sequences of a step on all ranks.
        preset: shape of the model, of ``tq.train.model.gpt.PRESETS``.
        lr: learning rate of AdamW.
        max_bytes: of the text.
        options: of the stack, such as the stage of ZeRO.
    """

    way: str = "plain"
    bits: int = 4
    codes: bool = True
    warmup: int = 0
    seeds: list[int] = field(default_factory=lambda: [0])
    steps: int = 20
    batch: int = 8
    preset: str = "tiny"
    lr: float = 2e-3
    max_bytes: int = 1_000_000
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"way must be one of {', '.join(WAYS)}, got {self.way!r}")
        if not self.codes and self.way not in ("backend", "hook", "optimizer"):
            raise ValueError(f"codes=False goes with a backend, a hook or an optimizer, got way={self.way!r}")
        self.told: list[dict[str, Any]] = []
        self._steps: list[tuple[float, int, Counted]] = []
        self._optimizer: torch.optim.Optimizer | None = None

    @classmethod
    def asked(cls) -> Task:
        """As the environment says, the defaults where it says nothing; and so are the settings of the backend."""
        task = cls(**json.loads(os.environ.get(TASK, "{}")))
        codes = {"TQ_CODES": ""} if task.way in ("forward", "bf16") else {}
        os.environ.update({"TQ_BITS": str(task.bits), "TQ_WARMUP": str(task.warmup), **codes})
        if not task.codes:  # which no variable can say
            tq.backend.configure(tq.backend.Config(task.codec, warmup=task.warmup))
        return task

    @property
    def backend(self) -> str:
        """Name for ``init_process_group``, and what stands for it in other engines."""
        return "tq" if self.way in ("backend", "forward", "bf16") else "gloo"

    @property
    def codec(self) -> Codec:
        return Codec(bits=self.bits) if self.codes else Uncoded(bits=self.bits)

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def ranks(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def share(self) -> int:
        """Sequences of a step on one rank."""
        return self.batch // self.ranks

    @cached_property
    def corpus(self) -> Corpus:
        return load("stdlib", max_bytes=self.max_bytes)

    def model(self, seed: int) -> Learner:
        """``model(ids, targets)`` is the loss in nats per token."""
        return Learner(self.preset, seed)

    def dataset(self, seed: int) -> Windows:
        """(ids, targets), int64 [T] both, in the order of the steps."""
        return Windows(self.corpus, seed, self.steps, self.batch, PRESETS[self.preset].seq)

    def batches(self, seed: int, first: int = 0) -> DataLoader[tuple[Tensor, Tensor]]:
        """This rank's part of every step from ``first`` on, for stacks that leave that to their user."""
        dataset = Subset(self.dataset(seed), range(first * self.batch, self.steps * self.batch))
        dealt: Sampler[int] = DistributedSampler(dataset, self.ranks, self.rank, shuffle=False)
        return DataLoader(dataset, self.share, sampler=dealt)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        self._optimizer = torch.optim.AdamW(parameters, lr=self.lr)
        return self._optimizer

    def stepped(self) -> None:
        """To be called after each step of the optimizer."""
        self._steps.append((time.perf_counter(), sent_bytes(), counted()))

    @staticmethod
    def digest(parameters: Iterable[Tensor]) -> str:
        """Of the bits of tensors, in hexadecimal."""
        found = hashlib.blake2b(digest_size=8)
        for each in parameters:
            found.update(each.detach().float().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def held(self, parameters: Iterable[Tensor]) -> tuple[int, int]:
        """Bytes that this rank keeps between steps: (weights, AdamW's moments), of sharded ones its shards."""
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        kept = [each for state in states for each in state.values() if isinstance(each, Tensor) and each.numel() > 1]
        shards = [getattr(each, "ds_tensor", each) for each in parameters]  # DeepSpeed's ZeRO-3; FSDP2's are DTensors
        weights, moments = (sum(local(each).nbytes for each in part) for part in (shards, kept))
        return weights, moments

    @torch.no_grad()
    def ended(
        self, seed: int, loss: Callable[[Tensor, Tensor], Tensor], parameters: Iterable[Tensor],
        shards: Iterable[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """To be called after each run, by all ranks together.

        Args:
            seed: of the run.
            loss: of (ids, targets), int64 [B, T] both.
            parameters: whole ones, of this rank's replica.
            shards: the engine's own, where it keeps a part of them on each rank.
        """
        whole = list(parameters)
        digest, held = self.digest(whole), self.held(whole if shards is None else shards)
        seq, losses = PRESETS[self.preset].seq, []
        for number in range(HELD_OUT):
            ids, targets = self.corpus.batch(number, self.batch, seq, 0, "valid")
            losses.append(float(loss(ids, targets)))
        times, sent, totals = zip(*self._steps, strict=True)
        self.told.append({
            "seed": seed, "valid": sum(losses) / len(losses), "digest": digest, "held": held,
            "seconds": [after - before for before, after in zip(times, times[1:], strict=False)],
            "sent": [after - before for before, after in zip(sent, sent[1:], strict=False)],
            "counted": [_between(before, after) for before, after in zip(totals, totals[1:], strict=False)],
        })  # fmt: skip
        self._steps.clear()
        tq.backend.load_state_dict(dict.fromkeys(tq.backend.groups(), 0))  # the next run has first steps of its own

    def close(self, **more: Any) -> None:
        """Write what was told, with ``more`` of it, where the environment says; else print it.

        To be called while the process groups are there: what their backend counted is told too.
        """
        counts: dict[str, dict[str, float]] = {}
        for group in tq.backend.groups().values():
            for kind, count in group.counts.kinds.items():
                of_kind = counts.setdefault(kind, {})
                for name, value in asdict(count).items():
                    of_kind[name] = of_kind.get(name, 0) + value
        text = json.dumps({"task": asdict(self), "rank": self.rank, "runs": self.told, "counts": counts, **more})
        if folder := os.environ.get(OUT):
            waiting = Path(folder) / f"rank-{self.rank}.tmp"
            waiting.write_text(text)
            waiting.rename(waiting.with_suffix(".json"))
        else:
            print(text)
