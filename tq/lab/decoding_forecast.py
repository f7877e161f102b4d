"""Tokens per second of a decoder foretold from its bytes and its layers, by decoders of other models timed beside it.

A token takes the time to read what is stored, and for each layer the time of what is not reading: waits between
threads, norms, rotations, attention. Both rates are fitted on models of random weights and other sizes, in turns with
the model that is foretold, which takes no part in the fit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tq.infer.decoder import Decoder
from tq.infer.weights import quantize
from tq.lab.decoding import quantized
from tq.lab.weight_study import codec
from tq.train.model.gpt import GPT, GPTConfig

#: Models that rates are fitted on: layers, width, hidden width of the MLP.
FITTED = ((8, 512, 1408), (24, 512, 1408), (8, 1024, 2816), (16, 1024, 2816))
_VOCAB, _HEAD = 16_384, 64


def drawn(layers: int, hidden: int, ffn: int, bits: int) -> GPT:
    """A model of random weights in codes, its head too."""
    heads = hidden // _HEAD
    config = GPTConfig(
        layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=max(1, heads // 2), vocab=_VOCAB, seq=256,
        activation="swiglu",
    )  # fmt: skip
    ids = torch.zeros(1, 2, dtype=torch.int64)
    return quantize(GPT(config), codec(bits), ids, method="nearest", head=codec(4))


def task(task: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Seconds of each token of all decoders, in turns.

    task: "name", of ``weight_study.MODELS``, which is foretold; "fitted", as ``FITTED``; "bits"; "tokens" of a turn,
    "rounds".

    Returns:
        dict: "asked" and "fitted" (a list): "layers", "nbytes" that a token reads, "seconds".
    """
    bits = task["bits"]
    models = [quantized(task["name"], bits), *(drawn(n, hidden, ffn, bits) for n, hidden, ffn in task["fitted"])]
    found: list[dict[str, Any]] = []
    decoders = [Decoder(model, task["tokens"]) for model in models]
    for model, decoder in zip(models, decoders, strict=True):
        found.append({"layers": model.config.layers, "nbytes": decoder.nbytes, "seconds": []})
    for _ in range(task["rounds"]):
        for decoder, kept in zip(decoders, found, strict=True):
            decoder.forget()
            for number in range(task["tokens"]):
                began = time.perf_counter()
                decoder.step(number + 1)
                kept["seconds"].append(time.perf_counter() - began)
    return {"asked": found[0], "fitted": found[1:]}


def rates(fitted: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(bytes per second, seconds per layer) with the least squares of relative errors of the median seconds.

    Args:
        fitted: as of ``task``.
    Raises:
        ValueError: no positive rates fit.
    Example:
        >>> from tq.lab.decoding_forecast import rates
        >>> made = ((2, 1e6), (4, 5e6), (9, 2e6))
        >>> fitted = [{"layers": n, "nbytes": b, "seconds": [b / 1e9 + n * 1e-4]} for n, b in made]
        >>> tuple(f"{x:.3g}" for x in rates(fitted))
        ('1e+09', '0.0001')
    """
    seconds = np.array([np.median(one["seconds"]) for one in fitted])
    given = np.array([[one["nbytes"], one["layers"]] for one in fitted], float) / seconds[:, None]
    (per_byte, per_layer), *_ = np.linalg.lstsq(given, np.ones(len(seconds)), rcond=None)
    if not (per_byte > 0 and per_layer >= 0):
        raise ValueError(f"no positive rates fit: {per_byte:.3g} s per byte, {per_layer:.3g} s per layer")
    return float(1 / per_byte), float(per_layer)


def foretold(asked: Mapping[str, Any], bytes_per_s: float, layer_s: float) -> float:
    """Seconds of a token."""
    return float(asked["nbytes"] / bytes_per_s + asked["layers"] * layer_s)
