"""Tokens per second of decoding one sequence: straight from codes, and by llama.cpp with the same threads."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import torch

from tq.infer import pretrained
from tq.infer.decoder import Decoder
from tq.infer.layers import QuantizedLinear, layers, put, shared
from tq.infer.pretrained import Language
from tq.infer.trellis import TrellisCode, TrellisLinear
from tq.infer.weights import quantize
from tq.lab import matvec_speed
from tq.lab.engines.catalog import LLAMA
from tq.lab.weight_study import codec, language, of, widths_of
from tq.train.model.gpt import GPT

PROMPT = "The capital of France is"
TOKENS = 64


def quantized(name: str, bits: int, head_bits: int = 4) -> GPT:
    """One of ``weight_study.MODELS`` with codes in all linear layers, and in its head."""
    study = of(name)
    return quantize(study.model, codec(bits), study.calibration_ST, head=codec(head_bits))


def seconds(decoder: Decoder, language: Language, tokens: int = TOKENS) -> list[float]:
    """Of each token after the first, greedy."""
    decoder.forget()
    last, found = None, []
    for _ in decoder.generate(language.encode(PROMPT).tolist(), tokens + 1):
        now = time.perf_counter()
        if last is not None:
            found.append(now - last)
        last = now
    return found


def llama(tokens: int = TOKENS) -> list[float]:
    """Likewise, by llama.cpp from the GGUF file, on as many threads as PyTorch uses."""
    out = LLAMA.run(
        "llama.mjs", str(pretrained.find()), str(tokens), str(torch.get_num_threads()), "1", PROMPT, timeout_s=300
    )
    return list(json.loads(out.splitlines()[-1])["seconds"])


def rounds(decoders: dict[str, Decoder], language: Language, count: int, beside: bool) -> dict[str, list[float]]:
    """Seconds of tokens of each decoder, and of llama.cpp where ``beside``, in turn, so many rounds."""
    found: dict[str, list[float]] = {name: [] for name in (*decoders, *(["llama.cpp"] if beside else []))}
    for _ in range(count):
        for name, decoder in decoders.items():
            found[name] += seconds(decoder, language)
        if beside:
            time.sleep(0.1)  # threads of PyTorch's pool spin a while
            found["llama.cpp"] += llama()
    return found


def widths(model: GPT) -> dict[tuple[int, int], int]:
    """{(bits, columns): rows} of all quantized layers of a model, its head among them."""
    found: dict[tuple[int, int], int] = {}
    for _, layer in layers(model, head=True):
        if isinstance(layer, QuantizedLinear):
            key = layer.codec.bits, layer.shape[1]
            found[key] = found.get(key, 0) + layer.shape[0]
    return found


def of_paths(model: GPT, widths: Mapping[str, int]) -> GPT:
    """A quantized model with paths, drawn at random, in the layers of its blocks, as fast as any: {layer: bits}."""
    made = shared(model)
    for name, layer in list(layers(made)):
        assert isinstance(layer, QuantizedLinear)
        (rows, columns), bits = layer.shape, widths[name]
        payload = torch.randint(256, (rows * columns * bits // 8,), dtype=torch.uint8)
        scales = torch.full((rows * columns // 64,), 0.01, dtype=torch.bfloat16)
        put(made, name, TrellisLinear(TrellisCode(codec(bits), (rows, columns), payload, scales)))
    return made


def task(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``rounds`` as a task: "name", "bits" (those of the decoders), "rounds", "repeats", "beside".

    Returns:
        dict: "seconds" of each token of each decoder, of codes and of paths; for each decoder "nbytes" that a token
            reads, and for those of codes "parts": for each kind of its products the seconds of each repeat of one
            product with as many rows.
    """
    models = {f"{bits} bits": quantized(task["name"], bits) for bits in task["bits"]}
    decoders = {name: Decoder(model, 512) for name, model in models.items()}
    for bits in task["bits"]:
        model, study = models[f"{bits} bits"], of(task["name"])
        alike = dict.fromkeys((name for name, _ in layers(model)), bits)
        decoders[f"{bits} bits, paths"] = Decoder(of_paths(model, alike), 512)
        decoders[f"{bits} bits, paths, mixed"] = Decoder(of_paths(model, widths_of(study, bits)), 512)
    timed = {name: matvec_speed.of_widths(widths(model), task["repeats"]) for name, model in models.items()}
    parts = {name: list(each.values()) for name, each in timed.items()}
    beside = task["beside"] and LLAMA.obstacle() is None
    seconds_ = rounds(decoders, language(task["name"]), task["rounds"], beside)
    return {"nbytes": {name: each.nbytes for name, each in decoders.items()}, "parts": parts, "seconds": seconds_}
