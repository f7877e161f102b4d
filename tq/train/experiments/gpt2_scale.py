"""Runs at GPT-2's sizes, on text that every machine with PyTorch has: the Python sources of both.

The standard library alone is too short for such a model, which would learn it by heart; with PyTorch's own sources
there are tens of megabytes. They are tokenised by a byte-level BPE of their own, and losses are told in bits a byte.
"""

from __future__ import annotations

import hashlib
import json
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
KEEP_S = 300.0  # between two checkpoints of a long run


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


def train(
    task: dict[str, Any], device: str = "cpu", checkpoint: Path | None = None, progress: bool = False
) -> dict[str, Any]:
    """A whole run.

    Arguments:
        task: the fields of ``paired_runs.Run`` that are not the default; "vocab", that of the BPE; and, where wanted,
            "seq", tokens of a sequence if not as many as the model takes, and "looks", steps after which the held-out
            loss is taken as well.
        checkpoint: file that the run is kept in every ``KEEP_S`` seconds and goes on from; gone at its end.
        progress: draws a bar.

    Returns:
        losses (float32 [steps done]) and valid in nats a token, valid NaN if the run diverged; bits_per_byte: valid
        in bits a byte; looks: {step: held-out loss}; unigram: bits a byte of single tokens; step_s: mean seconds a step
        of all workers, one after the other; drift between replicas; corpus: its SHA-256; corpus_bytes.
    """
    own = {key: value for key, value in task.items() if key not in ("vocab", "seq", "looks")}
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in own.items()}
    run = Run(**given)
    corpus = python_sources(task["vocab"], run.max_bytes)
    trained = paired_runs.trainer(run, device, corpus)
    trained.seq = min(trained.seq, task.get("seq") or trained.seq)
    beside: dict[str, Any] = {"seconds": 0.0, "looks": {}}
    notes = None if checkpoint is None else checkpoint.with_suffix(".json")
    if checkpoint is not None and notes is not None and checkpoint.exists() and notes.exists():
        trained.load(checkpoint)
        beside = json.loads(notes.read_text())
    valid, kept_at = math.nan, time.perf_counter()
    goals = sorted({*(step for step in task.get("looks", ()) if step < run.steps), run.steps})
    try:
        while trained.steps_done < run.steps:
            goal, start = next(step for step in goals if step > trained.steps_done), time.perf_counter()
            trained.train(goal if checkpoint is None else min(goal, trained.steps_done + 10), progress=progress)
            beside["seconds"] += time.perf_counter() - start  # every step reads its loss, so nothing is still queued
            if trained.steps_done in goals[:-1]:
                beside["looks"][str(trained.steps_done)] = trained.evaluate(run.evaluated)
            if checkpoint is not None and notes is not None and time.perf_counter() - kept_at > KEEP_S:
                notes.parent.mkdir(parents=True, exist_ok=True)
                notes.unlink(missing_ok=True)  # so that no notes lie beside another checkpoint
                trained.save(checkpoint)
                notes.write_text(json.dumps(beside))
                kept_at = time.perf_counter()
        valid = trained.evaluate(run.evaluated)
    except FloatingPointError:
        pass
    for path in (checkpoint, notes):
        if path is not None:
            path.unlink(missing_ok=True)
    return {
        "losses": torch.tensor(trained.losses),
        "valid": valid,
        "looks": {int(step): loss for step, loss in beside["looks"].items()},
        "bits_per_byte": bits_per_byte(valid, corpus),
        "unigram": unigram_bits_per_byte(corpus),
        "step_s": beside["seconds"] / max(1, trained.steps_done),
        "drift": trained.drift() if isinstance(trained, Workers) else 0.0,
        "corpus": corpus.sha256,
        "corpus_bytes": corpus.train_bytes + corpus.valid_bytes,
    }


def on_a_cpu(autocast: str) -> dict[str, dict[str, Any]]:
    """Tasks of ``train`` by name, for machines without a GPU, in the order of their worth.

    Two workers with a sequence of 512 tokens each, 1,500 steps, of which the first 50 send fp32, as is shipped. A pair
    "null" differs from its run at four bits by the codes' seed alone. autocast: "bfloat16" where the cores multiply
    that faster, else "".
    """
    long = Run(steps=1500, batch=2, workers=2, autocast=autocast, max_bytes=24_000_000)
    sizes = {"124m": replace(long, preset="gpt2-124m", lr=6e-4), "355m": replace(long, preset="gpt2-355m", lr=3e-4)}
    four: dict[str, Any] = {"variant": "gradient", "warmup": 50}
    published = four | {"variant": "published-v3"}
    order: list[tuple[str, str, int, dict[str, Any]]] = [
        ("124m", "fp32", 0, {}), ("124m", "4-bits", 0, four), ("124m", "null", 0, four | {"code_seed": 1000}),
        ("124m", "published", 0, published), ("124m", "fp32", 1, {}), ("124m", "4-bits", 1, four),
        ("124m", "2-bits-corrected", 0, four | {"bits": (2, 2), "correct_v": True}), ("355m", "fp32", 0, {}),
        ("355m", "4-bits", 0, four), ("124m", "fp32", 2, {}), ("124m", "4-bits", 2, four),
        ("124m", "frozen-v", 0, four | {"variant": "frozen-v"}),
    ]  # fmt: skip
    extra = {"vocab": 4096, "seq": 512, "looks": [500, 1000]}
    return {
        f"{size}-{rule}-{seed}": paired_runs.fields(replace(sizes[size], seed=seed, **what)) | extra
        for size, rule, seed, what in order
    }
