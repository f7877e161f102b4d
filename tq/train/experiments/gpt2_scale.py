"""Runs at GPT-2's sizes, on text that every machine with PyTorch has: the Python sources of both.

The standard library alone is too short for such a model, which would learn it by heart; with PyTorch's own sources
there are tens of megabytes. They are tokenised by a byte-level BPE of their own, and losses are told in bits a byte.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tq.train.experiments import paired_runs
from tq.train.experiments.paired_runs import Run
from tq.train.experiments.simulated_workers import Workers
from tq.train.model.corpus import Corpus, bits_per_byte, text_file
from tq.train.model.text_sources import cache_dir, stdlib, write_whole

HELD_OUT = 0.05


def python_sources(vocab: int, max_bytes: int) -> Corpus:
    """The sources of the standard library and of the installed PyTorch, at most ``max_bytes``, as BPE tokens.

    Files of equal content count once; their order is that of their SHA-256, so the held-out end is a sample of both.
    """
    package = Path(torch.__file__).parent
    files = {part for split in stdlib(None) for part in split}
    files |= {path.read_bytes() for path in package.rglob("*.py")}
    text: list[bytes] = []
    room = max_bytes
    for content in sorted(files, key=lambda content: hashlib.sha256(content).digest()):
        size = len(content) + bool(text)  # with the line end before it
        if size <= room and _is_text(content):
            text.append(content)
            room -= size
    whole = b"\n".join(text)
    path = cache_dir() / f"python-sources-{hashlib.sha256(whole).hexdigest()[:16]}.txt"
    if not path.exists():
        write_whole(path, whole)
    return text_file(path, "bpe", vocab, HELD_OUT)


def _is_text(content: bytes) -> bool:
    try:
        return bool(content.decode().strip())
    except UnicodeDecodeError:
        return False


def unigram_bits_per_byte(corpus: Corpus) -> float:
    """Bits a byte of a model that knows how often each training token occurs, and nothing else, on that split."""
    counts = torch.bincount(corpus.train.long()).double()
    share = counts[counts > 0] / counts.sum()
    nats = -(share * share.log()).sum().item()
    return bits_per_byte(nats, corpus, "train")


def train(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """A whole run: the fields of ``paired_runs.Run`` that are not the default, and "vocab", that of the BPE.

    Returns:
        losses (float32 [steps done]) and valid in nats a token, valid NaN if the run diverged; bits_per_byte: valid
        in bits a byte; unigram: that of single tokens; step_s: mean seconds a step of all workers, one after the
        other; drift between replicas; corpus: its SHA-256; corpus_bytes.
    """
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in task.items() if k != "vocab"}
    run = Run(**given)
    corpus = python_sources(task["vocab"], run.max_bytes)
    trained = paired_runs.trainer(run, device, corpus)
    valid, start = math.nan, time.perf_counter()
    try:
        trained.train(progress=False)
        seconds = time.perf_counter() - start  # every step reads its loss, so nothing is still queued
        valid = trained.evaluate(run.evaluated)
    except FloatingPointError:
        seconds = time.perf_counter() - start
    return {
        "losses": torch.tensor(trained.losses),
        "valid": valid,
        "bits_per_byte": bits_per_byte(valid, corpus),
        "unigram": unigram_bits_per_byte(corpus),
        "step_s": seconds / max(1, trained.steps_done),
        "drift": trained.drift() if isinstance(trained, Workers) else 0.0,
        "corpus": corpus.sha256,
        "corpus_bytes": corpus.train_bytes + corpus.valid_bytes,
    }


def campaign(long: Run, sizes: dict[str, tuple[float, int]], others: dict[str, dict[str, Any]]) -> dict[Any, Run]:
    """Runs by (preset, rule, seed): pairs of fp32 and four bits in the order of the seeds, smallest first.

    Arguments:
        long: what all have in common.
        sizes: learning rate and number of pairs of each preset, the first of which also runs the ``others`` once.
        others: fields of further rules by name.
    """
    code: dict[str, Any] = {"variant": "gradient", "warmup": long.steps // 5}
    runs = {}
    for preset, (rate, pairs) in sizes.items():
        size = replace(long, preset=preset, lr=rate)
        for seed in range(long.seed, long.seed + pairs):
            runs[preset, "fp32", seed] = replace(size, seed=seed)
            runs[preset, "4 bits", seed] = replace(size, seed=seed, **code)
    if sizes:
        first, (rate, _) = next(iter(sizes.items()))
        for name, fields in others.items():
            runs[first, name, long.seed] = replace(long, preset=first, lr=rate, **code | fields)
    return runs
