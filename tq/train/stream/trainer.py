"""A trainer whose model is larger than its memory: layer by layer from files, the update inside the backward pass.

Forward, each block's weights come from the disk, and only its input is kept. Backward, weights and moments come, the
block is computed again, its gradient moves them at once, and the record goes back. So memory holds three records, the
gradient of one block and what one block saves, however deep the model is.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from tq.train.model.corpus import Corpus
from tq.train.model.gpt import GPT, GPTConfig, rope_tables
from tq.train.model.loop import EVALUATION_SEED, TrainConfig, learning_rate
from tq.train.stream.files import Spill
from tq.train.stream.layout import Model
from tq.train.stream.options import Work, check, describe, given
from tq.train.stream.records import Progress, Records, decoded
from tq.train.stream.update import step_record


def layer_groups(model: GPT, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of a model in memory whose optimizer then keeps moments in the very blocks of 128 numbers that
    a ``StreamedTrainer`` keeps them in: a group per layer and kind, which ``bucket_elements`` must not cut.

    It matters where moments lie in few bits; in fp32 any groups give the same numbers.
    """
    layers: list[list[Any]] = [list(block.parameters()) for block in model.blocks.children()]
    ends = [[p] for p in (model.embed.weight, model.final_norm.weight)]
    ends += [] if model.config.tie_embeddings else [[model.head.weight]]
    groups = []
    for parameters in [*layers, *ends]:
        for kind, decay in ((True, weight_decay), (False, 0.0)):
            chosen = [p for p in parameters if (p.ndim >= 2) is kind]
            groups += [{"params": chosen, "weight_decay": decay}] if chosen else []
    return groups


class StreamedTrainer:
    """Trains a GPT whose weights and moments lie in files, with the same bits as ``Trainer`` in memory.

    The twin in memory is a ``Trainer`` with ``TurboQuantAdamW(groups, variant="local", state=state)`` over its groups,
    or over ``layer_groups`` where moments lie in few bits. Losses and weights are equal bit for bit, but for inputs
    kept in few bits, ``clip="previous"``, ``loss_tokens``, and a tied embedding with ``accumulate`` above 1 (rounding).

    Args:
        model: shape of the model.
        corpus: the corpus.
        config: settings of the run, without compilation and float16. ``accumulate`` splits a step into micro-batches
            that go through each layer while it is there.
        place: a folder for the files; None keeps everything in memory.
        state: bits of (m, v) between steps, as of ``TurboQuantAdamW``; None keeps fp32.
        seed: of the first weights, those of ``GPT(model, seed)``.
        weights: first weights by name instead, read one at a time (an open safetensors file does).
        inputs: where the inputs of blocks wait for the backward pass: "memory", "place", or bits in memory (2 to 8).
        clip: "global": gradients wait in the place until their norm is known, 8 bytes a parameter more, as
            ``config.grad_clip`` means it. "previous": the norm of the step before clips.
        resumable: the folder keeps each step whole, in twice the space; False: scratch, lost with the process.
        resident: first blocks that stay in memory between steps.
        loss_tokens: positions whose logits are computed at once; None: all of a micro-batch.
        impl: of the update: "auto", "cpu" or "reference".
    Raises:
        ValueError: what cannot work, in one sentence; OSError where the disk has no room.
    References:
        ZeRO-Infinity (Rajbhandari et al. 2021); LOMO (Lv et al. 2023) updates inside the backward pass.
    Example:
        >>> from tq.train.model import GPTConfig, TrainConfig, load
        >>> from tq.train.stream import StreamedTrainer
        >>> shape = GPTConfig(layers=2, hidden=16, heads=2, vocab=256, seq=16)
        >>> corpus = load("stdlib", max_bytes=200_000)
        >>> with StreamedTrainer(shape, corpus, TrainConfig(steps=3, batch=2)) as trainer:
        ...     losses = trainer.train(progress=False)
        >>> len(losses)
        3
    """

    def __init__(
        self, model: GPTConfig, corpus: Corpus, config: TrainConfig, place: str | os.PathLike[str] | None = None, *,
        state: tuple[int, int] | None = None, seed: int = 0, weights: Mapping[str, Tensor] | None = None,
        inputs: str | int = "memory", clip: str = "global", resumable: bool = True, resident: int = 0,
        loss_tokens: int | None = None, impl: str = "auto",
    ) -> None:  # fmt: skip
        check(model, corpus, config, inputs=inputs, clip=clip, resident=resident, loss_tokens=loss_tokens, impl=impl,
              state=state, place=place)  # fmt: skip
        self.config, self.corpus, self.impl, self.clip = config, corpus, impl, clip
        self.loss_tokens, self.seq = loss_tokens, model.seq if config.seq is None else config.seq
        folder = None if place is None else Path(place)
        self.model = Model(model, state)
        self.layers = model.layers
        settings = {
            "model": asdict(model), "run": {**asdict(config), "autocast": str(config.autocast)}, "clip": clip,
            "corpus": corpus.sha256, "state": list(state or ()), "inputs": inputs, "loss_tokens": loss_tokens,
        }  # fmt: skip
        self.records = Records(self.model, folder, resumable, range(min(resident, model.layers)), settings)
        self.losses: list[float] = []
        self.norm: float | None = None
        self.work: Work | None = None
        self._lost: str | None = None
        try:
            self._begin(seed, weights)
            self._make_room(inputs, folder)
        except BaseException:
            self.close()
            raise
        self._cos, self._sin = rope_tables(model.seq, model.head_size, model.rope_theta)

    def _begin(self, seed: int, weights: Mapping[str, Tensor] | None) -> None:
        found = self.records.resume()
        if found is not None:
            self.losses, self.norm = found.losses, found.norm
        else:
            self.records.begin(self.model.initial(seed) if weights is None else given(self.model, weights))
        done = len(self.losses)
        self.resident = {name: torch.empty(shape) for name, shape in self.model.resident.items()}
        for number, (piece, record) in enumerate(self.model.pieces, self.layers):
            buffer = self.records.fetch(number, "weights", done)
            self.resident[piece.name][piece.first : piece.last] = record.weights(buffer)[0]
            self.records.free(number, buffer)

    def _make_room(self, inputs: str | int, folder: Path | None) -> None:
        parts = self.config.accumulate
        shape = self.config.batch // parts * self.seq * self.model.config.hidden
        self.inputs = Spill(inputs, folder, self.records.threads, 4 * shape, self.layers * parts)
        self.gradients: Spill | None = None
        if self.clip == "global" and self.config.grad_clip is not None:
            where = "memory" if folder is None else "place"
            self.gradients = Spill(where, folder, self.records.threads, 4 * self.model.block.numel, self.layers)

    @property
    def steps_done(self) -> int:
        """Finished steps."""
        return len(self.losses)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step."""
        return self.config.batch * self.seq

    # --- the walk over the layers ---
    def _walk(
        self, numbers: Sequence[int], part: str, then: tuple[int, str] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """(number, buffer) of one record after the other, while the next is on its way; then: what comes after."""
        done = self.steps_done
        for place, number in enumerate(numbers):
            buffer = self.records.fetch(number, part, done)
            if place + 1 < len(numbers):
                self.records.ask(numbers[place + 1], part, done)
            elif then is not None:
                self.records.ask(*then, done)
            yield number, buffer

    def _autocast(self) -> AbstractContextManager[Any]:
        kind = self.config.autocast
        return torch.autocast("cpu", dtype=kind, enabled=kind is not None)

    def _block(self, weights: Iterable[Tensor], x: Tensor) -> Tensor:
        length = x.shape[1]
        with self._autocast():
            return functional_call(
                self.model.template, dict(zip(self.model.shapes, weights, strict=True)),
                (x, self._cos[:length], self._sin[:length]),
            )  # fmt: skip

    @torch.no_grad()
    def _forward(self, ids: Sequence[Tensor], keep: bool, then: tuple[int, str] | None = None) -> list[Tensor]:
        """What goes into the last norm, of each micro-batch [B, T, C]."""
        xs = [F.embedding(each, self.resident["embed.weight"]) for each in ids]
        for layer, buffer in self._walk(range(self.layers), "weights", then):
            weights = self.model.block.weights(buffer)
            for number, x in enumerate(xs):
                xs[number] = self._block(weights, x)
                if keep:
                    self.inputs.put(layer * len(xs) + number, x, self.steps_done)
            self.records.free(layer, buffer)
        return xs

    def _loss(self, x: Tensor, targets: Tensor, gradients: dict[str, Tensor] | None) -> tuple[Tensor, Tensor]:
        """(mean loss, its gradient for x), over ``accumulate``; gradients of head and norm are added to those given."""
        head = "head.weight" if "head.weight" in self.resident else "embed.weight"
        names = ("final_norm.weight", head)
        flat, wanted = x.flatten(0, 1), targets.flatten()
        size = len(flat) if self.loss_tokens is None else self.loss_tokens
        counted = (wanted != -100).sum()
        total, pieces = torch.zeros(()), []
        for rows, chosen in zip(flat.split(size), wanted.split(size), strict=True):
            leaves = [rows.detach(), *(self.resident[name].detach() for name in names)]
            with torch.set_grad_enabled(gradients is not None), self._autocast():
                leaves = [leaf.requires_grad_(gradients is not None) for leaf in leaves]
                y = functional_call(self.model.norm, {"weight": leaves[1]}, (leaves[0],))
                logits = F.linear(y, leaves[2]).float()
                if self.loss_tokens is None:
                    loss = F.cross_entropy(logits, chosen)
                else:
                    loss = F.cross_entropy(logits, chosen, reduction="sum") / counted
                loss = loss / self.config.accumulate if gradients is not None else loss
            total += loss.detach()
            if gradients is not None:
                found = torch.autograd.grad(loss, leaves)
                pieces.append(found[0])
                for name, gradient in zip(names, found[1:], strict=True):
                    _add(gradients, name, gradient)
        return total, (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).view_as(x) if pieces else x

    def _block_backward(self, layer: int, buffer: Tensor, upstream: list[Tensor]) -> list[Tensor]:
        """Gradients of the block's weights; ``upstream``, of its outputs, becomes that of its inputs."""
        total: list[Tensor] = []
        leaves = [w.requires_grad_() for w in self.model.block.weights(buffer)]
        for number, gradient in enumerate(upstream):
            x = self.inputs.get(layer * len(upstream) + number).requires_grad_()
            last = number + 1 == len(upstream)  # one ahead: more would take the buffers of what is needed first
            self.inputs.ask((layer - 1) * len(upstream) if last else layer * len(upstream) + number + 1)
            with torch.enable_grad():
                y = self._block(leaves, x)
            found = torch.autograd.grad(y, [x, *leaves], gradient)
            upstream[number] = found[0]
            if total:
                torch._foreach_add_(total, list(found[1:]))
            else:
                total = list(found[1:])
        return total

    # --- a step ---
    def step(self) -> float:
        """One update; returns the loss before it, in nats per token.

        Raises:
            FloatingPointError: loss or gradient is not finite; the text says whether the trainer can go on.
            RuntimeError: a step before this one broke off in the middle.
        """
        if self._lost is not None:
            raise RuntimeError(self._lost)
        began, waited, moved = time.perf_counter(), self.records.threads.waited_s, self._moved()
        step, parts = self.steps_done, self.config.accumulate
        ids, targets = self.corpus.batch(step, self.config.batch, self.seq, self.config.seed, "train")
        shares = ids.chunk(parts)
        deferred = self.gradients is not None
        xs = self._forward(shares, True, (self.layers - 1, "weights" if deferred else "all"))
        self.inputs.ask((self.layers - 1) * parts)
        ends: dict[str, Tensor] = {}
        losses = [self._loss(x, wanted, ends) for x, wanted in zip(xs, targets.chunk(parts), strict=True)]
        xs.clear()
        value = torch.stack([loss for loss, _ in losses]).sum().item() if parts > 1 else losses[0][0].item()
        if not math.isfinite(value):
            self._give_up()
            raise FloatingPointError(f"step {step}: loss {value}; nothing was changed")
        self._backward(shares, [gradient for _, gradient in losses], ends)
        self.losses.append(value)
        self.records.commit(self.steps_done, Progress(self.losses, self.norm))
        self._lost = None
        seconds, after = time.perf_counter() - began, self._moved()
        waited = self.records.threads.waited_s - waited
        self.work = Work(seconds, waited, after[0] - moved[0], after[1] - moved[1])
        return value

    def _give_up(self) -> None:
        self.inputs.clear()
        if self.gradients is not None:
            self.gradients.clear()
        self.records.drain()

    def _backward(self, ids: Sequence[Tensor], upstream: list[Tensor], ends: dict[str, Tensor]) -> None:
        """All that comes after the loss: gradients, their norm, and the update."""
        each = len(self.model.shapes)
        norms = torch.zeros(len(self.model.names))  # one piece of memory: small ones would cut up what is freed
        limit, factor = self.config.grad_clip, None
        if self.clip == "previous" and limit is not None and self.norm is not None:
            factor = torch.tensor(min(1.0, limit / (self.norm + 1e-6)))
        deferred = self.gradients is not None
        after = 0 if deferred else self.layers
        order = range(self.layers - 1, -1, -1)
        then = (after, "all" if deferred else "moments")
        for layer, buffer in self._walk(order, "weights" if deferred else "all", then):
            gradients = self._block_backward(layer, buffer, upstream)
            mine = norms[1 + layer * each : 1 + (layer + 1) * each]
            mine.copy_(torch.stack(torch._foreach_norm(gradients)))
            if self.gradients is not None:
                self.records.free(layer, buffer)
                self.gradients.put(layer, torch.cat([g.reshape(-1) for g in gradients]))
                continue
            self._check(mine, f"the gradient of blocks.{layer}", changed=bool(self._lost))
            self._update(layer, buffer, gradients, factor)
        for some, gradient in zip(ids, upstream, strict=True):
            _add_rows(ends, some, gradient, self.resident["embed.weight"])
        for name, norm in zip(ends, torch._foreach_norm(list(ends.values())), strict=True):
            norms[self.model.names.index(name)] = norm
        total = torch.linalg.vector_norm(norms)
        self._check(total, "the gradient", changed=bool(self._lost))
        self.norm = total.item()
        if self.gradients is not None and limit is not None:
            factor = torch.clamp(limit / (total + 1e-6), max=1.0)
            self._sweep(factor)
        self._update_ends(ends, factor)

    def _check(self, norms: Tensor, what: str, changed: bool) -> None:
        if bool(norms.isfinite().all()):
            return
        if not changed:
            self._give_up()
            raise FloatingPointError(f"step {self.steps_done}: {what} is not finite; nothing was changed")
        raise FloatingPointError(f"step {self.steps_done}: {what} is not finite; {self._lost}")

    def _sweep(self, factor: Tensor) -> None:
        """The update of all blocks, whose gradients waited for their norm."""
        assert self.gradients is not None
        self.gradients.ask(0)
        for layer, buffer in self._walk(range(self.layers), "all", (self.layers, "moments")):
            self.gradients.ask(layer + 1)
            flat = self.gradients.get(layer)
            sizes = [shape.numel() for shape in self.model.shapes.values()]
            gradients = [x.view(s) for x, s in zip(flat.split(sizes), self.model.shapes.values(), strict=True)]
            self._update(layer, buffer, gradients, factor)

    def _settings(self) -> dict[str, Any]:
        config = self.config
        return {"lr": learning_rate(self.steps_done, config), "betas": config.betas, "eps": config.eps,
                "weight_decay": config.weight_decay}  # fmt: skip

    def _update(self, number: int, buffer: Tensor, gradients: list[Tensor], factor: Tensor | None) -> None:
        """A record makes its step, and goes back."""
        self._lost = (
            "the step broke off in the middle; " + ("the folder holds the last whole step: open it again"
            if self.records.resumable else "a scratch run cannot go on")
        )  # fmt: skip
        record, done = self.model.records[number], self.steps_done
        if factor is not None:
            torch._foreach_mul_(gradients, factor)
        weights = record.weights(buffer)
        if number >= self.layers:
            piece = self.model.pieces[number - self.layers][0]
            kept = [self.resident[piece.name][piece.first : piece.last]]
            step_record(record, buffer, kept, gradients, self._settings(), done=done, impl=self.impl)
            weights[0].copy_(kept[0])
        else:
            step_record(record, buffer, weights, gradients, self._settings(), done=done, impl=self.impl)
        self.records.store(number, buffer, done + 1)

    def _update_ends(self, gradients: dict[str, Tensor], factor: Tensor | None) -> None:
        numbers = range(self.layers, self.layers + len(self.model.pieces))
        for number, buffer in self._walk(numbers, "moments"):
            piece = self.model.pieces[number - self.layers][0]
            self._update(number, buffer, [gradients[piece.name][piece.first : piece.last]], factor)

    def _moved(self) -> tuple[int, int]:
        lanes = [self.records.lane, self.inputs.lane, None if self.gradients is None else self.gradients.lane]
        pages = [lane.pages for lane in lanes if lane is not None]
        return sum(p.bytes_read for p in pages), sum(p.bytes_written for p in pages)

    # --- around ---
    def train(self, until: int | None = None, progress: bool = True) -> list[float]:
        """Trains until a number of steps is done, ``config.steps`` by default; returns the losses of the new ones.

        progress: a tqdm bar with loss, tokens per second, and what binds: the disk or the computation.
        """
        goal = self.config.steps if until is None else until
        if not 0 <= goal <= self.config.steps:
            raise ValueError(f"until must be between 0 and steps={self.config.steps}, got {until!r}")
        start = self.steps_done
        if not progress:
            while self.steps_done < goal:
                self.step()
            return self.losses[start:]
        from tqdm import tqdm

        with tqdm(total=goal, initial=start, unit="step", dynamic_ncols=True) as bar:
            while self.steps_done < goal:
                loss = self.step()
                bar.set_postfix_str(f"loss {loss:.3f}, {describe(self.work, self.tokens_per_step)}", refresh=False)
                bar.update()
        return self.losses[start:]

    @torch.no_grad()
    def evaluate(self, batches: int = 8, split: str = "valid") -> float:
        """Mean loss over fixed batches of a split, as ``Trainer.evaluate``; each layer is read once for all of them."""
        if batches < 1:
            raise ValueError(f"batches must be positive, got {batches!r}")
        given = [self.corpus.batch(i, self.config.batch, self.seq, EVALUATION_SEED, split) for i in range(batches)]
        xs = self._forward([ids for ids, _ in given], False)
        return sum(self._loss(x, wanted, None)[0].item() for x, (_, wanted) in zip(xs, given, strict=True)) / batches

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, copy) of every parameter, in the order of ``GPT.named_parameters``, a layer in memory at a time."""
        yield "embed.weight", self.resident["embed.weight"].clone()
        for layer, buffer in self._walk(range(self.layers), "weights"):
            copies = [w.clone() for w in self.model.block.weights(buffer)]
            self.records.free(layer, buffer)
            yield from ((f"blocks.{layer}.{name}", w) for name, w in zip(self.model.shapes, copies, strict=True))
        for name in self.model.names:
            if not name.startswith(("blocks.", "embed.")):
                yield name, self.resident[name].clone()

    def moments(self) -> Iterator[tuple[str, int, Tensor, Tensor]]:
        """(name, first row, m, v) in fp32 of every record's parameters; large tables come in runs of rows."""
        for number, buffer in self._walk(range(len(self.model.records)), "all"):
            for name, m, v in decoded(self.model, number, buffer, self.steps_done):
                inner = number >= self.layers
                piece = self.model.pieces[number - self.layers][0] if inner else None
                whole = name if piece is not None else f"blocks.{number}.{name}"
                yield whole, 0 if piece is None else piece.first, m, v
            self.records.free(number, buffer)

    def close(self) -> None:
        """Waits for what is under way, and lets go of the files."""
        self.records.close()

    def __enter__(self) -> StreamedTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _add(gradients: dict[str, Tensor], name: str, more: Tensor) -> None:
    if name in gradients:
        gradients[name].add_(more)
    else:
        gradients[name] = more


def _add_rows(gradients: dict[str, Tensor], ids: Tensor, upstream: Tensor, table: Tensor) -> None:
    """Adds the gradient of a look-up, of whose rows only those that occur are ever held."""
    unique, inverse = ids.flatten().unique(return_inverse=True)
    flat = upstream.reshape(-1, table.shape[1])
    rows = torch.ops.aten.embedding_dense_backward(flat, inverse, len(unique), -1, False)
    if "embed.weight" not in gradients:
        gradients["embed.weight"] = torch.zeros_like(table)
    gradients["embed.weight"].index_add_(0, unique, rows)
