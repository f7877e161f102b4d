"""A small language model that the book trains itself: its weights never lay on a grid, as those of GGUF files do.

3 million parameters, byte-level BPE of 2,048 tokens, sources of Python's standard library. The trained one is part of a
checkout, ``data/models``; ``python -m tq.infer train`` makes it anew.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tq.infer.pretrained import Language, keep
from tq.train.model import GPT, GPTConfig, TrainConfig, Trainer
from tq.train.model import load as load_corpus

NAME = "book-3m"
CONFIG = GPTConfig(layers=6, hidden=192, heads=3, vocab=2048, seq=256, ffn=512, activation="swiglu")
STEPS, BATCH, RATE = 1500, 8, 3e-3
_BETWEEN = 100  # steps between saves


def path() -> Path:
    """Where a checkout keeps it."""
    return Path(__file__).parents[2] / "data" / "models" / f"{NAME}.safetensors"


def obstacle() -> str | None:
    """Why it cannot be had, in a sentence; None where it can."""
    if not path().is_file():
        return "the book's model lies in a checkout of the book (data/models), or `python -m tq.infer train` makes it"
    try:
        import safetensors  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed (pip install 'tq-book[infer]')"
    return None


def train(
    file: Path, steps: int = STEPS, progress: Callable[[Trainer], None] = lambda trainer: None
) -> dict[str, Any]:
    """Train it and keep it in bf16; a run that was ended goes on. Returns what the file says of the training.

    Args:
        file: to write.
        steps: of training.
        progress: called after each step.
    """
    corpus = load_corpus("stdlib", "bpe", CONFIG.vocab)
    settings = TrainConfig(steps=steps, batch=BATCH, lr=RATE)
    trainer = Trainer(GPT(CONFIG), corpus, settings)
    unfinished = file.with_suffix(".unfinished")
    if unfinished.is_file():
        trainer.load(unfinished)
    while trainer.steps_done < steps:
        trainer.step()
        progress(trainer)
        if trainer.steps_done % _BETWEEN == 0:
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            trainer.save(unfinished)
    told = {
        "steps": steps, "tokens": steps * trainer.tokens_per_step, "loss": round(trainer.evaluate(32), 4),
        "text": f"stdlib, sha256 {corpus.sha256[:16]}", "python": platform.python_version(),
        "torch": torch.__version__,
    }  # fmt: skip
    language = Language(trainer.model, corpus.bpe, NAME, corpus.sha256)
    keep(language, file, torch.bfloat16, told)
    unfinished.unlink(missing_ok=True)
    return told
