"""DiLoCo: replicas that train alone for H steps and then agree, for links that are too slow to agree in every step.

Each replica takes H steps of its own optimizer. How far it came, the *pseudo-gradient* (weights agreed upon minus its
own), is averaged over the replicas, and an outer step of SGD with Nesterov momentum moves the weights agreed upon along
it; every replica goes on from there. With a codec the pseudo-gradients travel in a few bits: b/8/H bytes per parameter
and step and direction, where gradients in fp32 take 4.

In fragments (Streaming DiLoCo) parts of the model agree in turn, each every H steps, so the link is used evenly; with a
``delay`` the exchange goes on behind that many further steps, and the replica then meets the new weights half way.

Source: Douillard et al., arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tq.quant.codec import Codec
from tq.train.collectives import (
    Averaged,
    Codecs,
    Mean,
    Residuals,
    Work,
    background,
    chunk_numel,
    mean_in_process,
    over_group,
)
from tq.train.comm.agreement import Request, check_consistent
from tq.train.comm.channels import channel_of
from tq.train.shards import local, rank_and_size

VERSION = 1


class _Fragment:
    """Parameters that agree together, with the weights agreed upon, the outer momentum and the residuals."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.agreed = self.local()
        self.momentum = torch.zeros_like(self.agreed)
        self.residuals: Residuals | None = None
        self.due = -1
        self.pending: Averaged | Work[Averaged] | None = None  # of the exchange that ends with step ``due``

    def local(self) -> Tensor:
        """The replica's own weights, flat, in fp32: a copy."""
        return torch.cat([local(p).reshape(-1).float() for p in self.parameters])

    def write(self, flat: Tensor) -> None:
        for p, part in zip(self.parameters, flat.split([local(p).numel() for p in self.parameters]), strict=True):
            local(p).copy_(part.view(local(p).shape))


class DiLoCo:
    """Outer optimizer of DiLoCo: call ``step`` after every step of the inner optimizer, on every replica.

    Args:
        parameters: of the model, the same on all replicas; or this rank's shards of them, where ``group`` is the ranks
            that hold the same shards at other sites. Those that require no gradient are left out.
        every: H, inner steps between two agreements of a parameter; a multiple of ``fragments``.
        codec: of the pseudo-gradients, or a pair for the phases of the all-reduce; None sends fp32.
        lr: of the outer Nesterov step, positive and finite.
        momentum: of the outer Nesterov step, in [0, 1).
        fragments: parts of the model that agree in turn, at most one per parameter.
        delay: inner steps that an exchange overlaps; less than every / fragments.
        mix: share of the replica's own weights, in [0, 1], when the new ones arrive; None: 0 without delay, else 1/2.
        feedback: add the quantization error to the next pseudo-gradient (of a fragment); needs a codec.
        group: of the replicas; None: all ranks, or none where there is no process group.
        inside: of the ranks that hold the same weights as this one, a replica together: the first of them exchanges for
            all, so that a link between sites carries everything once.

    Attributes:
        steps_done (int): inner steps counted.
        bytes_sent (float): bytes that this rank has sent so far, mean over the ranks.

    Raises:
        ValueError: an argument is out of its range.
        GroupError: in ``step``, on every rank: the replicas started from different weights, or an exchange failed.
        FloatingPointError: in ``step``: weights are not finite and the codec has nonfinite="raise". In one process that
            is a ValueError.
        RuntimeError: in ``state_dict``, while an exchange is under way.

    References:
        DiLoCo (Douillard et al., arXiv:2311.08105); Streaming DiLoCo (arXiv:2501.18512) for fragments and delay.

    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.train.diloco import DiLoCo
        >>> model = torch.nn.Linear(64, 64)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> outer = DiLoCo(model.parameters(), every=8, codec=Codec(bits=4))
        >>> for _ in range(16):
        ...     inner.zero_grad(); model(torch.ones(1, 64)).sum().backward(); inner.step(); outer.step()
        >>> outer.steps_done, outer.bytes_sent  # one process sends nothing
        (16, 0.0)
    """

    def __init__(
        self, parameters: Iterable[Tensor], every: int = 32, codec: Codec | Codecs | None = None, *, lr: float = 0.7,
        momentum: float = 0.9, fragments: int = 1, delay: int = 0, mix: float | None = None, feedback: bool = False,
        group: dist.ProcessGroup | None = None, inside: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        chosen = [p for p in parameters if p.requires_grad]
        if not 1 <= fragments <= len(chosen):
            raise ValueError(f"fragments must be 1 to the number of parameters ({len(chosen)}), got {fragments}")
        if not isinstance(every, int) or every < 1 or every % fragments:
            raise ValueError(f"every must be a positive multiple of fragments={fragments}, got {every}")
        if not 0 <= delay < every // fragments:
            raise ValueError(f"delay must be 0 to every / fragments - 1 = {every // fragments - 1}, got {delay}")
        if feedback and codec is None:
            raise ValueError("feedback=True needs a codec: without one nothing is lost")
        if not (lr > 0 and math.isfinite(lr)) or not 0 <= momentum < 1:
            raise ValueError(f"lr must be positive and finite and momentum in [0, 1), got {lr} and {momentum}")
        if mix is not None and not 0 <= mix <= 1:
            raise ValueError(f"mix must be in [0, 1] or None, got {mix}")
        self.every, self.delay, self.lr, self.momentum = every, delay, lr, momentum
        self.codecs = (codec, codec) if isinstance(codec, Codec) else codec
        self.mix = (0.5 if delay else 0.0) if mix is None else mix
        self.feedback, self.group, self.inside = feedback, group, inside
        self.fragments = [_Fragment(part) for part in _split(chosen, fragments)]
        self.simulated: tuple[int, int] | None = None  # (rank, ranks) among replicas of one process
        self.steps_done, self.bytes_sent = 0, 0.0
        self.compared = False  # whether the replicas have been seen to hold the same weights

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """(rank, ranks) among the replicas."""
        return rank_and_size(self.group, self.simulated)

    @torch.no_grad()
    def step(self) -> None:
        """Count an inner step; start the exchange of the fragment whose turn it is, end the one that is due.

        Raises:
            GroupError: in the first step, where the replicas did not start from the same weights.
        """
        together = self.simulated is None and self.rank_and_size[1] > 1
        if together and not self.compared:
            weights = hashlib.blake2b(digest_size=8)
            for fragment in self.fragments:
                weights.update(fragment.agreed.cpu().numpy().tobytes())
            start = Request(f"replicas with the weights {weights.hexdigest()}")
            check_consistent(start, self.fragments[0].agreed.device, channel_of(self.group), "each")
            self.compared = True
        started = self.ask()
        for (fragment, _), answer in zip(started, self._answers([asked for _, asked in started]), strict=True):
            fragment.pending = answer
        self.finish()

    def _answers(self, asked: list[Mean]) -> Sequence[Averaged | Work[Averaged]]:
        if self.simulated is not None or self.rank_and_size[1] == 1:
            return [mean_in_process([each])[0] for each in asked]
        if self.inside is not None and dist.get_rank(self.inside):  # the first rank of the site asks the others
            return [Averaged(each.x, each.residuals) for each in asked]
        if self.delay:
            return [background(each, self.group) for each in asked]
        return over_group(asked, self.group)

    @torch.no_grad()
    def ask(self) -> list[tuple[_Fragment, Mean]]:
        """Counts an inner step; the means that must be formed now."""
        self.steps_done += 1
        started, (rank, ranks) = [], self.rank_and_size
        for number, fragment in enumerate(self.fragments):
            turn = (number + 1) * (self.every // len(self.fragments)) % self.every
            if self.steps_done % self.every == turn:
                x = fragment.agreed - fragment.local()
                if self.feedback and fragment.residuals is None:
                    assert self.codecs is not None
                    mine = chunk_numel(x.numel(), self.codecs[0].block, rank, ranks)
                    fragment.residuals = torch.zeros_like(x), torch.zeros(mine, dtype=x.dtype, device=x.device)
                asked = Mean(x, self.codecs, (self.steps_done, number), fragment.residuals)
                fragment.due = self.steps_done + self.delay
                self.bytes_sent += asked.sent_bytes(ranks)
                started.append((fragment, asked))
        return started

    @torch.no_grad()
    def finish(self) -> None:
        """The outer step of the fragments whose mean is due now."""
        for fragment in self.fragments:
            if fragment.due == self.steps_done and fragment.pending is not None:
                pending = fragment.pending
                mean, fragment.residuals = pending.wait() if isinstance(pending, Work) else pending
                if self.inside is not None:
                    dist.broadcast(mean, group=self.inside, group_src=0)
                fragment.momentum.mul_(self.momentum).add_(mean)
                fragment.agreed.sub_(mean.add(fragment.momentum, alpha=self.momentum), alpha=self.lr)
                new = fragment.agreed
                fragment.write(new if not self.mix else torch.lerp(new, fragment.local(), self.mix))
                fragment.pending, fragment.due = None, -1

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and texts only. RuntimeError while an exchange overlaps inner steps."""
        if any(fragment.pending is not None for fragment in self.fragments):
            raise RuntimeError(
                f"an exchange is under way until step {max(f.due for f in self.fragments)}, this is {self.steps_done}; "
                "save between exchanges"
            )
        keys = ("agreed", "momentum")
        return {
            "version": VERSION, "every": self.every, "steps_done": self.steps_done, "bytes_sent": self.bytes_sent,
            "fragments": [
                {**{key: getattr(f, key) for key in keys}, "errors": None if f.residuals is None else list(f.residuals)}
                for f in self.fragments
            ],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; ValueError for a state of something else, which leaves this one as it is."""
        needed = {"version", "every", "steps_done", "bytes_sent", "fragments"}
        parts = state.get("fragments", ())
        if missing := (needed - set(state)) or {k for p in parts for k in {"agreed", "momentum", "errors"} - set(p)}:
            raise ValueError(f"not a state of DiLoCo: it lacks {sorted(missing)}")
        if state.get("version") != VERSION or state.get("every") != self.every:
            raise ValueError(
                f"not a state of DiLoCo with every={self.every}: version {state.get('version')}, "
                f"every={state.get('every')}"
            )
        sizes = [part["agreed"].numel() for part in state["fragments"]]
        if sizes != (mine := [f.agreed.numel() for f in self.fragments]):
            raise ValueError(f"the state has fragments of {sizes} parameters, this model of {mine}")
        self.steps_done, self.bytes_sent = state["steps_done"], state["bytes_sent"]
        for fragment, part in zip(self.fragments, state["fragments"], strict=True):
            fragment.agreed.copy_(part["agreed"])
            fragment.momentum.copy_(part["momentum"])
            errors = part["errors"]
            fragment.residuals = None if errors is None else (errors[0].clone(), errors[1].clone())
            fragment.pending, fragment.due = None, -1
        self.compared = False


def _split(parameters: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Runs of parameters in their order, of about the same number of elements, none empty."""
    parts: list[list[Tensor]] = [[]]
    total, done = sum(p.numel() for p in parameters), 0
    for index, p in enumerate(parameters):
        missing = count - len(parts)
        full = done * count >= len(parts) * total
        if parts[-1] and missing and (full or len(parameters) - index <= missing):
            parts.append([])
        parts[-1].append(p)
        done += p.numel()
    return parts


def agree_together(replicas: Sequence[DiLoCo]) -> None:
    """``step`` of the replicas of one process."""
    for rank, replica in enumerate(replicas):
        replica.simulated = rank, len(replicas)
    with torch.no_grad():
        for started in zip(*(replica.ask() for replica in replicas), strict=True):
            answers = mean_in_process([asked for _, asked in started])
            for (fragment, _), answer in zip(started, answers, strict=True):
                fragment.pending = answer
        for replica in replicas:
            replica.finish()
