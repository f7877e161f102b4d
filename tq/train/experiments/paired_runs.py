"""One training run from a few numbers, for loss gaps between runs that share their seed.

Two runs with one seed see the same weights at first and the same batches, so the difference of their losses holds
much less noise than the losses. What remains is chaos: a run against itself with weights disturbed by 1e-3
(``noise``) shows how large a difference means nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tq.quant.codec import Codec
from tq.quant.factors import Factors
from tq.train.experiments.simulated_workers import Workers
from tq.train.model.corpus import Corpus, load
from tq.train.model.gpt import GPT, PRESETS
from tq.train.model.loop import TrainConfig, Trainer
from tq.train.optim import TurboQuantAdamW
from tq.train.schemes import SCHEMES, Scheme, published, rival

AUTOCAST = {"": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Run:
    """What decides a run; plain values, so that it can be a key.

    Arguments:
        preset: of ``tq.train.model.gpt.PRESETS``; hidden: another width, with heads of 32.
        steps, batch, lr, seed: of ``TrainConfig``; the seed is the model's too. batch: sequences of all workers.
        workers: simulated replicas.
        variant: a name in ``SCHEMES``, or of ``rival`` with its ``amount``; factors: for "factors", the codec taken
            apart: rounds, levels, scale and rounding of ``tq.quant.factors.Factors``; rule: for "published", the
            arguments of ``tq.train.schemes.published``.
        bits: of the two phases; block: of the codec.
        state: bits of (m, v) between steps, or None.
        correct_v, warmup, v_every: of ``TurboQuantAdamW``.
        noise: relative disturbance of the initial weights.
        code_seed: of the codec, whose runs then differ by the signs and by what is rounded at random alone; None: the
            run's own.
        autocast: "", "bfloat16" or "float16" (with one worker).
        max_bytes: of the corpus. evaluated: batches of the held-out loss at the end.
    """

    preset: str = "1m"
    steps: int = 500
    lr: float = 2e-3
    seed: int = 0
    variant: str = "exact"
    bits: tuple[int, int] = (4, 4)
    workers: int = 4
    batch: int = 8
    block: int = 128
    amount: float = 0.0
    factors: tuple[int, str, str, str] | None = None
    rule: tuple[str, str, bool, float] | None = None
    state: tuple[int, int] | None = None
    correct_v: bool = False
    warmup: int = 0
    v_every: int = 50
    noise: float = 0.0
    code_seed: int | None = None
    autocast: str = ""
    hidden: int | None = None
    max_bytes: int = 4_000_000
    evaluated: int = 32


def trainer(run: Run, device: torch.device | str = "cpu", corpus: Corpus | None = None) -> Trainer:
    """The trainer of a run, before its first step."""
    config = PRESETS[run.preset]
    if run.hidden is not None:
        config = replace(config, hidden=run.hidden, heads=run.hidden // 32)
    model = GPT(config, run.seed)
    if run.noise:
        generator = torch.Generator().manual_seed(run.seed)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + run.noise * torch.randn(p.shape, generator=generator))
    corpus = load("stdlib", max_bytes=run.max_bytes) if corpus is None else corpus
    scheme = _scheme(run)
    scale = SCHEMES[scheme].scale if isinstance(scheme, str) else scheme.scale
    seed = run.seed if run.code_seed is None else run.code_seed
    first, second = (Codec(bits, run.block, scale, seed=seed) for bits in run.bits)
    settings = TrainConfig(
        run.steps, run.batch, lr=run.lr, grad_clip=None, seed=run.seed, autocast=AUTOCAST[run.autocast]
    )

    def optimizer(groups: list[dict[str, Any]]) -> TurboQuantAdamW:
        return TurboQuantAdamW(
            groups, run.lr, settings.betas, settings.eps, codec=(first, second), variant=scheme, state=run.state,
            warmup=run.warmup, max_norm=1.0, v_every=run.v_every, correct_v=run.correct_v,
        )  # fmt: skip

    if run.workers == 1:
        return Trainer(model, corpus, settings, device, optimizer)
    return Workers(model, corpus, settings, run.workers, optimizer, device)


def _scheme(run: Run) -> str | Scheme:
    if run.variant in SCHEMES:
        return run.variant
    if run.variant == "published":
        return published(*(run.rule or ()))
    return rival(run.variant, run.amount, None if run.factors is None else Factors(*run.factors))


def train(run: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """A whole run, given by the fields of ``Run`` that are not the default.

    Returns:
        losses (float32 [steps done]) and valid in nats a token; bits sent an element and step, relative to an
        all-reduce that sends each element twice; drift between replicas; steps skipped; state bytes a parameter;
        diverged: step at which a loss or gradient was not finite, or None.
    """
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in run.items()}
    chosen = Run(**given)
    trained, diverged = trainer(chosen, device), None
    try:
        trained.train(progress=False)
    except FloatingPointError:
        diverged = trained.steps_done
    optimizer, elements = trained.optimizer, sum(p.numel() for p in trained.model.parameters())
    assert isinstance(optimizer, TurboQuantAdamW)
    share = 2 * (chosen.workers - 1) / chosen.workers or 1.0
    return {
        "losses": torch.tensor(trained.losses),
        "valid": math.nan if diverged is not None else trained.evaluate(chosen.evaluated),
        "bits": 8 * optimizer.bytes_sent / max(1, trained.steps_done) / elements / share,
        "drift": trained.drift() if isinstance(trained, Workers) else 0.0,
        "skipped": trained.skipped,
        "state_bytes": optimizer.state_nbytes / elements,
        "diverged": diverged,
    }


def fields(run: Run) -> dict[str, Any]:
    """The fields that differ from the defaults of the run's own kind, as plain values."""
    default = asdict(type(run)())
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(run).items() if v != default[k]}
