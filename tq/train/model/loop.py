"""Training loop on one device: cosine schedule, AdamW with decay on matrices only, exact stop and resume.

A step whose loss or gradient is not finite raises before anything is updated; under float16 an overflowing gradient
is skipped instead and the loss scale halved, as loss scaling does. Several workers:
``tq.train.experiments.simulated_workers``.
"""

from __future__ import annotations

import hashlib
import io
import math
import operator
import os
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tq.train.model.corpus import Corpus
from tq.train.model.gpt import GPT

FORMAT = 2  # of Trainer.state_dict
AUTOCAST = (None, torch.bfloat16, torch.float16)
EVALUATION_SEED = 0  # the same held-out windows for every run: losses of different seeds are comparable


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run.

    Attributes:
        steps: length of the run and of the learning rate schedule, in steps.
        batch: sequences per step; 16 by default.
        seq: tokens per sequence; None (default) means the model's longest.
        lr: peak learning rate, 1e-3 by default; it rises linearly, then falls as a cosine to ``final_lr * lr``.
        warmup: steps of linear rise; None (default) means a tenth of ``steps``.
        final_lr: last learning rate as a share of ``lr``; 0.1 by default.
        betas: decay rates of AdamW's moments; (0.9, 0.95) by default.
        eps: epsilon of AdamW; 1e-8 by default.
        weight_decay: decay of AdamW, on matrices only; 0.1 by default.
        grad_clip: largest global norm of the gradient, 1 by default; None does not clip.
        seed: seed of the data order, 0 by default (the model has its own).
        autocast: torch.bfloat16, torch.float16 (with a loss scale that adapts), or None (default) for float32.
        accumulate: micro-batches per step, whose gradients are added up; a divisor of ``batch``, 1 by default.
        compile: whether the model runs through ``torch.compile``; False by default.

    Raises:
        ValueError: if a field is out of range or of the wrong type.

    Example:
        >>> from tq.train.model import TrainConfig
        >>> TrainConfig(steps=100, batch=8).warmup_steps
        10
    """

    steps: int
    batch: int = 16
    seq: int | None = None
    lr: float = 1e-3
    warmup: int | None = None
    final_lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float | None = 1.0
    seed: int = 0
    autocast: torch.dtype | None = None
    accumulate: int = 1
    compile: bool = False

    def __post_init__(self) -> None:
        plain: dict[str, Callable[[Any], Any]] = {"lr": float, "final_lr": float, "eps": float, "weight_decay": float}
        plain |= {"grad_clip": float, "seed": operator.index, "betas": lambda pair: tuple(map(float, pair))}
        for name, kind in plain.items():  # a number of NumPy's would be saved as one, and could not be loaded safely
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, None if name == "grad_clip" and value is None else kind(value))
            except (TypeError, ValueError):
                wanted = {"seed": "an integer", "betas": "two numbers in [0, 1)"}.get(name, "a number")
                raise ValueError(f"{name} must be {wanted}, got {value!r}") from None
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile must be True or False, got {self.compile!r}")
        for name in ("steps", "batch", "seq", "accumulate"):
            value = getattr(self, name)
            if not (name == "seq" and value is None) and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate must divide batch={self.batch}, got {self.accumulate}")
        if self.warmup is not None and (not isinstance(self.warmup, int) or not 0 <= self.warmup <= self.steps):
            raise ValueError(f"warmup must be between 0 and steps={self.steps}, got {self.warmup!r}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be positive and finite, got {self.lr!r}")
        if not 0 <= self.final_lr <= 1:
            raise ValueError(f"final_lr is a share of lr between 0 and 1, got {self.final_lr!r}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas!r}")
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ValueError(f"eps must be positive and finite, got {self.eps!r}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay!r}")
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise ValueError(f"grad_clip must be positive or None, got {self.grad_clip!r}")
        if self.autocast not in AUTOCAST:
            raise ValueError(f"autocast must be torch.bfloat16, torch.float16 or None, got {self.autocast!r}")

    @property
    def warmup_steps(self) -> int:
        """Warm-up actually used."""
        return self.steps // 10 if self.warmup is None else self.warmup


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of the step with 0-based number ``step``: linear warm-up, then half a cosine."""
    warmup = config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, config.steps - warmup))
    low = config.final_lr * config.lr
    return low + 0.5 * (config.lr - low) * (1 + math.cos(math.pi * done))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: matrices (embeddings too) with weight decay, vectors such as norm gains without.

    Args:
        model: the model; parameters that need no gradient are left out.
        weight_decay: decay of the first group.

    Returns:
        Two dicts with "params" and "weight_decay", as ``torch.optim.AdamW`` takes them.

    Example:
        >>> from tq.train.model import GPT, PRESETS, parameter_groups
        >>> [(len(group["params"]), group["weight_decay"]) for group in parameter_groups(GPT(PRESETS["tiny"]), 0.1)]
        [(13, 0.1), (5, 0.0)]
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


class Trainer:
    """Trains one model on one corpus on one device.

    Args:
        model: the model; it is moved to ``device``.
        corpus: the corpus; its vocabulary must fit the model's.
        config: settings of the run.
        device: "cpu" (default), "cuda", ...
        optimizer: makes the optimizer from parameter groups; None (default) means PyTorch's fused AdamW. The schedule
            sets the groups' "lr" before every step.

    Attributes:
        losses: training loss of every finished step, in nats per token.
        skipped: number of steps whose float16 gradient overflowed, which changed nothing but the loss scale.

    Raises:
        ValueError: if the corpus has more tokens than the model, or sequences are longer than the model's.

    Example:
        >>> from tq.train.model import GPT, GPTConfig, TrainConfig, Trainer, load
        >>> model = GPT(GPTConfig(layers=1, hidden=16, heads=2, vocab=256, seq=16))
        >>> trainer = Trainer(model, load("stdlib", max_bytes=200_000), TrainConfig(steps=3, batch=2))
        >>> losses = trainer.train(progress=False)
        >>> len(losses), trainer.steps_done, trainer.tokens_per_step
        (3, 3, 32)
    """

    def __init__(
        self,
        model: GPT,
        corpus: Corpus,
        config: TrainConfig,
        device: torch.device | str = "cpu",
        optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
    ):
        if corpus.vocab > model.config.vocab:
            raise ValueError(f"corpus has {corpus.vocab} tokens, the model's vocab is only {model.config.vocab}")
        self.seq = model.config.seq if config.seq is None else config.seq
        if self.seq > model.config.seq:
            raise ValueError(f"seq={self.seq} is longer than the model's {model.config.seq}")
        self.device = torch.device(device)
        self.model, self.corpus, self.config = model.to(self.device), corpus, config
        groups = parameter_groups(model, config.weight_decay)
        if optimizer is None:
            self.optimizer: Optimizer = torch.optim.AdamW(
                groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
            )
        else:
            self.optimizer = optimizer(groups)
        self.forward: Callable[..., Any] = torch.compile(self.model) if config.compile else self.model
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.autocast == torch.float16)
        self.losses: list[float] = []
        self.skipped = 0

    @property
    def steps_done(self) -> int:
        """Finished steps."""
        return len(self.losses)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step."""
        return self.config.batch * self.seq

    def loss(self, step: int, split: str = "train", seed: int | None = None) -> Tensor:
        """Mean loss with its graph, under the run's autocast.

        Args:
            step: number of the batch.
            split: "train" (default) or "valid".
            seed: seed of the data order; None (default) means the run's.

        Returns:
            The loss in nats per token, as a scalar tensor.
        """
        return self._loss_of(self.forward, *self._batch(step, split, seed))

    def _batch(self, step: int, split: str = "train", seed: int | None = None) -> tuple[Tensor, Tensor]:
        chosen = self.config.seed if seed is None else seed
        return self.corpus.batch(step, self.config.batch, self.seq, chosen, split, self.device)

    def _loss_of(self, forward: Callable[..., Any], ids: Tensor, targets: Tensor) -> Tensor:
        autocast = self.config.autocast
        with torch.autocast(self.device.type, dtype=autocast, enabled=autocast is not None):
            return forward(ids, targets)[1]

    def _backward(self, forward: Callable[..., Any], ids: Tensor, targets: Tensor) -> float:
        """Adds the gradient of the mean loss, times the loss scale, to the parameters'; returns that loss."""
        parts = self.config.accumulate
        total = torch.zeros((), device=self.device)
        for number, (share, wanted) in enumerate(zip(ids.chunk(parts), targets.chunk(parts), strict=True), 1):
            with self._micro(number == parts):
                loss = self._loss_of(forward, share, wanted) / parts
                self.scaler.scale(loss).backward()
            total += loss.detach()
        return total.item()

    def _micro(self, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch, for trainers that exchange gradients after the last one only."""
        return nullcontext()

    def _finite_norm(self, model: nn.Module, loss: float) -> bool:
        """Clips; False where a float16 gradient overflowed. Anything else that is not finite raises."""
        limit = math.inf if self.config.grad_clip is None else self.config.grad_clip
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit).item()
        if math.isfinite(loss) and (math.isfinite(norm) or self.scaler.is_enabled()):
            return math.isfinite(norm)
        raise FloatingPointError(f"step {self.steps_done}: loss {loss}, gradient norm {norm}")

    def _schedule(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(self.steps_done, self.config)

    def step(self) -> float:
        """Makes one update and returns the loss before it, in nats per token.

        A loss or gradient that is not finite raises ``FloatingPointError``, with no state changed.
        """
        self.optimizer.zero_grad(set_to_none=True)
        value = self._backward(self.forward, *self._batch(self.steps_done))
        self.scaler.unscale_(self.optimizer)
        self.skipped += not self._finite_norm(self.model, value)
        self._schedule(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.losses.append(value)
        return value

    def train(self, until: int | None = None, progress: bool = True) -> list[float]:
        """Trains until a number of steps is done.

        Args:
            until: that number, at most ``config.steps``, which None (default) means.
            progress: whether to draw a plain tqdm bar with the loss and tokens per second; True by default.

        Returns:
            The losses of the new steps, in nats per token.
        """
        goal = self.config.steps if until is None else until
        if not 0 <= goal <= self.config.steps:
            raise ValueError(f"until must be between 0 and steps={self.config.steps}, got {until!r}")
        start = self.steps_done
        if not progress:
            while self.steps_done < goal:
                self.step()
            return self.losses[start:]
        try:
            from tqdm import tqdm  # not tqdm.auto: a widget does not survive in a committed notebook
        except ImportError as error:
            raise ImportError('progress=True needs the package tqdm: pip install "tq-book[lab]"') from error
        with tqdm(total=goal, initial=start, unit="step", dynamic_ncols=True) as bar:
            while self.steps_done < goal:
                loss = self.step()
                elapsed_s = bar.format_dict["elapsed"]
                tokens_per_s = (self.steps_done - start) * self.tokens_per_step / max(elapsed_s, 1e-9)
                bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
                bar.update()
        return self.losses[start:]

    @torch.no_grad()
    def evaluate(self, batches: int = 8, split: str = "valid") -> float:
        """Mean loss over fixed batches of a split, the same for every seed.

        Args:
            batches: number of batches; 8 by default.
            split: "valid" (default) or "train".

        Returns:
            The loss in nats per token.
        """
        if batches < 1:
            raise ValueError(f"batches must be positive, got {batches!r}")
        training = self.model.training
        self.model.eval()
        try:
            return sum(self.loss(index, split, EVALUATION_SEED).item() for index in range(batches)) / batches
        finally:
            self.model.train(training)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the remaining steps depend on; tensors are shared with the trainer, as in torch.

        Holds tensors, numbers and strings only: loads with ``weights_only=True``.
        """
        return {
            "format": FORMAT,
            "run": self._run(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "skipped": self.skipped,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues another trainer's run from its ``state``.

        Another configuration, model shape or corpus raises ``ValueError``.
        """
        if not isinstance(state, dict):
            raise ValueError(f"not a trainer state but {type(state).__name__}")
        missing = {"format", "run", "model", "optimizer", "scaler", "skipped", "losses"} - set(state)
        if missing or state["format"] != FORMAT:
            found = f"missing {sorted(missing)}" if missing else f"format {state['format']!r}"
            raise ValueError(f"not a trainer state of format {FORMAT}: {found}")
        here, there = self._run(), state["run"]
        if not isinstance(there, dict):
            raise ValueError(f"not a trainer state: run is {there!r}")
        differing = [key for key in {**here, **there} if here.get(key) != there.get(key)]
        if differing:
            detail = ", ".join(f"{key}: {there.get(key)!r}, here {here.get(key)!r}" for key in differing)
            raise ValueError(f"state of another run ({detail})")
        ours, theirs = (
            {name: getattr(value, "shape", None) for name, value in tensors.items()}
            for tensors in (self.model.state_dict(), state["model"])
        )
        if ours != theirs:
            name = next(n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n))
            raise ValueError(f"state of another model ({name}: {theirs.get(name)}, here {ours.get(name)})")
        self.optimizer.load_state_dict(state["optimizer"])  # first: it may refuse, and nothing has changed yet
        self.model.load_state_dict(state["model"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.skipped = state["skipped"]
        self.losses = state["losses"].tolist()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``state_dict`` to the file ``path`` as ``tq.train.tqk.save`` does: without loss, whole or not at all.

        Where that fails, with ``SaveFailed``, an ``OSError``, the old file stays.
        """
        from tq.train import tqk
        from tq.train.tqk import shards

        state, layouts = shards.taken_apart(self.state_dict())
        tqk.save(path, {**state, "shards": layouts} if layouts else state)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads the state from the file ``path``; nothing in it is executed. A damaged one raises ``ValueError``.

        Files of ``torch.save``, which earlier versions wrote, are read too.
        """
        from tq.train import tqk
        from tq.train.tqk import shards
        from tq.train.tqk.file import MAGIC

        with open(path, "rb") as file:
            coded = file.read(len(MAGIC)) == MAGIC
        try:
            if coded:
                state = tqk.load(path)
            else:
                state = torch.load(io.BytesIO(Path(path).read_bytes()), map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError, tqk.DamagedFile) as error:
            raise ValueError(f"{path} is no whole checkpoint ({Path(path).stat().st_size} bytes): {error}") from error
        given = state.pop("digest", None) if isinstance(state, dict) else None
        if given is not None and given != digest(state):
            raise ValueError(f"{path} is no whole checkpoint ({Path(path).stat().st_size} bytes): its digest differs")
        if layouts := isinstance(state, dict) and state.pop("shards", None):
            meshes = (p.device_mesh for p in self.model.parameters() if hasattr(p, "device_mesh"))
            state = shards.put_together(state, layouts, next(meshes, None))
        self.load_state_dict(state)

    def _run(self) -> dict[str, Any]:
        """What must agree for a state to continue here, as numbers and strings."""
        config = {f"config.{key}": value for key, value in asdict(self.config).items()}
        model = {f"model.{key}": value for key, value in asdict(self.model.config).items()}
        config["config.betas"] = list(self.config.betas)
        config["config.autocast"] = str(self.config.autocast)
        optimizer = type(self.optimizer).__name__
        return {**config, **model, "corpus.sha256": self.corpus.sha256, "corpus.vocab": self.corpus.vocab,
                "optimizer": optimizer}  # fmt: skip


def digest(value: Any) -> str:
    """BLAKE2b, as hexadecimal digits, over tensors, numbers, texts and lists, tuples and dicts of these."""
    found = hashlib.blake2b(digest_size=32)

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            local = part.to_local() if hasattr(part, "to_local") else part
            found.update(f"{local.dtype} {tuple(local.shape)};".encode())
            raw: Any = local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            found.update(raw)
        elif isinstance(part, dict):
            found.update(f"dict {len(part)};".encode())
            for key, inner in part.items():
                add(key)
                add(inner)
        elif isinstance(part, (list, tuple)):
            found.update(f"{type(part).__name__} {len(part)};".encode())
            for inner in part:
                add(inner)
        else:
            found.update(f"{type(part).__name__} {part!r};".encode())

    add(value)
    return found.hexdigest()
