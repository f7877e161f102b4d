"""Weights in few bits, one choice at a time: which of a quantizer's parts buys what, on one model and its texts.

Shapes: S sequences, T tokens, O outputs, I inputs.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tq.infer import pretrained, trained
from tq.infer.allocation import allocate_bits
from tq.infer.evaluate import Divergence, Reference, divergence, texts
from tq.infer.gptq import SEARCH, corrections, gptq, refitted, rounded, turned
from tq.infer.layers import QuantizedLinear, layers, plain_linear, rebuild, stored_bits
from tq.infer.weights import decoded, quantize
from tq.lab.engines.catalog import COMPRESSOR
from tq.lab.weight_rivals import Quantizer, integer_gptq, rounding
from tq.quant.codebook import lloyd_max
from tq.quant.codec import Codec
from tq.quant.rotation import unrotate
from tq.train.model.gpt import GPT
from tq.train.model.text_sources import stdlib


@dataclass(frozen=True, eq=False)
class Judged:
    """What came of one quantizer.

    Attributes:
        found: divergence from the reference.
        seconds: to quantize.
    """

    found: Divergence
    seconds: float


def codec(bits: int, block: int = 64, seed: int = 0) -> Codec:
    """Of weights: scales in bf16 as far as they serve."""
    return Codec(bits, block, "mse", seed=seed, scale_dtype=torch.bfloat16 if bits <= 6 else torch.float32)


def ours(settings: Codec, search: int = SEARCH) -> Quantizer:
    """GPTQ in the rotated domain, as ``tq.infer.weights.quantize`` does it; one seed for all layers."""
    return lambda weight, moments: settings.decode(gptq(weight, moments, settings, search=search))


def nearest(settings: Codec) -> Quantizer:
    """Each block by itself, as the codec encodes."""
    return lambda weight, moments: settings.decode(settings.encode(weight, rows=True))


def variant(
    settings: Codec, *, rotated: bool = True, gaussian: bool = True, search: int = SEARCH, feedback: bool = True,
    refit: bool = True,
) -> Quantizer:  # fmt: skip
    """Ours, with parts left out.

    Args:
        settings: bits and block.
        rotated: whether blocks of a row are rotated.
        gaussian: Lloyd and Max's levels; else levels at equal distances, as many.
        search: multipliers of the rms tried.
        feedback: whether a column's error is moved into those after it.
        refit: whether scales are fitted to the outputs at the end.
    """
    levels_L = torch.tensor(lloyd_max(settings.bits)[0], dtype=torch.float32)
    if not gaussian:
        reach = float(levels_L[-1])
        levels_L = torch.linspace(-reach, reach, len(levels_L))

    def quantize(weight_OI: Tensor, moments_II: Tensor) -> Tensor:
        rows, columns = weight_OI.shape
        if columns % settings.block:
            raise ValueError(f"{columns} columns are no multiple of the block of {settings.block}")
        w_OI, h_II = weight_OI.float(), moments_II
        if rotated:
            w_OI, h_II = turned(w_OI, settings), turned(turned(h_II, settings).T, settings)
        seen_II = h_II if feedback else torch.eye(columns, dtype=torch.float64)
        index_OI, scales_ON = rounded(w_OI, corrections(seen_II, 0.01), settings, levels_L, search)
        if refit:
            scales_ON = refitted(w_OI, h_II, levels_L[index_OI], scales_ON, settings)
        found = levels_L[index_OI].view(rows, -1, settings.block) * scales_ON.float()[:, :, None]
        if rotated:
            found = unrotate(found.view(-1, settings.block), settings.rounds, settings.seed, settings.rotation)
        return found.reshape(rows, columns)

    return quantize


class Study:
    """One model with its texts.

    Args:
        model: the reference, fp32.
        calibration_ST: tokens to calibrate on.
        held_out_ST: tokens to judge on.
        progress: called with what is being done, and how far it is, from 0 to 1.
    """

    def __init__(
        self, model: GPT, calibration_ST: Tensor, held_out_ST: Tensor,
        progress: Callable[[str, float], None] = lambda what, share: None,
    ) -> None:  # fmt: skip
        self.model, self.calibration_ST, self.progress = model, calibration_ST, progress
        self.reference = Reference.of(model, held_out_ST, lambda done, total: progress("reference", done / total))
        self._names = [name for name, _ in layers(model)]

    def model_of(
        self, quantizer: Quantizer, only: Collection[str] | None = None, label: str = "", calibrated: bool = True
    ) -> GPT:
        """The model with its layers' weights quantized; only those named, where names are given.

        calibrated: whether the quantizer looks at second moments of a layer's inputs; else it is given none.
        """

        def make(name: str, layer: nn.Linear, moments: Callable[[], Tensor]) -> nn.Module:
            if only is not None and name not in only:
                return layer
            weight = quantizer(layer.weight, moments() if calibrated else torch.empty(0))
            self.progress(label, self._names.index(name) / len(self._names) / 2)
            return plain_linear(weight)

        return rebuild(self.model, self.calibration_ST, make)

    def judge(
        self, quantizer: Quantizer, only: Collection[str] | None = None, label: str = "", calibrated: bool = True
    ) -> Judged:
        """Quantize and compare; arguments as of ``model_of``."""
        begun = time.perf_counter()
        small = self.model_of(quantizer, only, label, calibrated)
        seconds = time.perf_counter() - begun
        return Judged(self.compare(small, label), seconds)

    def compare(self, model: GPT, label: str = "") -> Divergence:
        """The held-out texts seen by another model."""
        return divergence(
            self.reference, model, progress=lambda done, total: self.progress(label, 0.5 + done / total / 2)
        )

    def kinds(self) -> dict[str, list[str]]:
        """{kind of layer: its names}, such as "mlp.down"."""
        found: dict[str, list[str]] = {}
        for name in self._names:
            found.setdefault(name.split(".", 2)[2], []).append(name)
        return found


def integers_per_token(bits: int, group: int | None = None, clip: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Activations as integers: a step and a zero point for each token, or for each group of a token; clip: as below."""

    def coded(x: Tensor) -> Tensor:
        parts = x if group is None else x.unflatten(-1, (-1, group))
        low, high = parts.amin(-1, keepdim=True).clamp(max=0), parts.amax(-1, keepdim=True).clamp(min=0)
        low, high = low * clip, high * clip
        step = ((high - low) / (2**bits - 1)).clamp(min=1e-9)
        zero = (-low / step).round()
        return ((parts / step).round() + zero).clamp(0, 2**bits - 1).sub(zero).mul(step).view_as(x)

    return coded


def turned_integers(bits: int, settings: Codec) -> Callable[[Tensor], Tensor]:
    """Likewise for tokens whose blocks are rotated."""
    inner = integers_per_token(bits)

    def coded(x: Tensor) -> Tensor:
        flat = x.reshape(-1, settings.block)
        rotated = turned(x.reshape(-1, x.shape[-1]).contiguous(), settings).view_as(x)
        found = inner(rotated).reshape(flat.shape)
        return unrotate(found, settings.rounds, settings.seed, settings.rotation).view_as(x)

    return coded


def wide_integers(bits: int, settings: Codec, clip: float = 1.0) -> Callable[[Tensor], Tensor]:
    """Integers per token whose whole width is rotated: blocks as the codec does, then one orthogonal matrix over them.

    clip: what part of a token's range the integers span; numbers beyond are clipped (QuaRot takes 0.9).
    """
    inner = integers_per_token(bits, clip=clip)

    @cache
    def across(blocks: int) -> Tensor:
        drawn = torch.randn(blocks, blocks, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return torch.linalg.qr(drawn)[0].float()

    def coded(x: Tensor) -> Tensor:
        width, mix = x.shape[-1], across(x.shape[-1] // settings.block)
        parts = turned(x.reshape(-1, width).contiguous(), settings).view(-1, len(mix), settings.block)
        found = mix.T @ inner((mix @ parts).view(-1, width)).view_as(parts)
        return unrotate(found.view(-1, settings.block), settings.rounds, settings.seed, settings.rotation).view_as(x)

    return coded


def codes(settings: Codec) -> Callable[[Tensor], Tensor]:
    """Activations as codes: each block of a token rotated, with a scale of its own."""
    return lambda x: settings.decode(settings.encode(x.contiguous(), rows=True))


@contextmanager
def coded_inputs(model: GPT, coded: Callable[[Tensor], Tensor]) -> Iterator[GPT]:
    """The model with what enters each linear layer of its blocks coded first, within the context."""
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: (coded(given[0]),))
        for _, layer in layers(model)
        if isinstance(layer, nn.Linear | QuantizedLinear)
    ]
    try:
        yield model
    finally:
        for hook in hooks:
            hook.remove()


GROUP = 64  # weights with one scale, of every method
MODELS = {"book": (trained.path, 64, 256), "smollm2": (pretrained.find, 16, 1024)}  # held-out texts and their tokens
METHODS: dict[str, Callable[[int], Quantizer]] = {
    "round to nearest": lambda bits: rounding(bits, GROUP),
    "integer GPTQ": lambda bits: integer_gptq(bits, GROUP),
    "codec": lambda bits: nearest(codec(bits)),
    "codec, search": lambda bits: nearest(dataclasses.replace(codec(bits), search=17)),
}
SHIPPED = {"ours": "gptq", "trellis": "trellis"}  # as ``tq.infer.weights.quantize`` does it
CALIBRATED = ("integer GPTQ", *SHIPPED)
TOKENS = 4096  # of calibration


def stored(method: str, bits: int) -> float:
    """Bits per weight that a method stores, scales and zero points included."""
    coded = method.startswith(("codec", "ours", "trellis"))
    return codec(bits).bits_per_element if coded else bits + (16 + bits) / GROUP


@cache
def language(name: str) -> pretrained.Language:
    """One of ``MODELS``."""
    return pretrained.load(MODELS[name][0]())


def documents(domain: str) -> list[str]:
    """What texts to judge on are cut from: "stdlib", the held-out files of Python's library, as many as there are; or
    "prose", the topics of Python's reference, which are no part of any corpus of the book."""
    if domain == "stdlib":
        return [content.decode() for content in stdlib(None)[1]]
    if domain == "prose":
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    raise ValueError(f"domain must be stdlib or prose, got {domain!r}")


def windows(
    language_: pretrained.Language, count: int, length: int, domain: str, seed: int = 0
) -> tuple[Tensor, list[int]]:
    """(windows of documents, int64 [S, T]; the number of each one's document): one of each document, at a random place,
    before there is a second of any.

    Raises:
        ValueError: there are not so many that do not overlap.
    """
    generator, found = torch.Generator().manual_seed(seed), []
    for number, document in enumerate(documents(domain)):
        ids = language_.encode(document)
        for turn, at in enumerate(torch.randperm(len(ids) // length, generator=generator).tolist()):
            found.append((turn, number, ids[at * length : (at + 1) * length]))
    if len(found) < count:
        raise ValueError(f"{len(found)} windows of {length} tokens in {domain}, asked for {count}")
    order = torch.randperm(len(found), generator=generator).tolist()  # among those of one turn
    chosen = sorted(range(len(found)), key=lambda k: (found[k][0], order[k]))[:count]
    return torch.stack([found[k][2] for k in chosen]), [found[k][1] for k in chosen]


def clusters(name: str, domain: str = "stdlib") -> list[int]:
    """The document of each text that one of ``MODELS`` is judged on: texts of one document are not independent."""
    _, count, length = MODELS[name]
    return windows(language(name), count, length, domain)[1]


@cache
def of(
    name: str, draw: int = 0, held_out: int | None = None, domain: str = "stdlib", tokens: int | None = None
) -> Study:
    """The study of one of ``MODELS``, calibrated on a draw of so many tokens (None: ``TOKENS``) of the training files,
    judged on texts of other files; see ``windows``."""
    _, count, length = MODELS[name]
    long = min(length, 512)
    calibration = texts(language(name), (tokens or TOKENS) // long, long, "train", seed=1 + draw)
    held_out_ST, _ = windows(language(name), held_out or count, length, domain)
    return Study(language(name).model, calibration, held_out_ST)


def told(found: Divergence, seconds: float | None = None) -> dict[str, Any]:
    """What is kept of a comparison: means of each text, and how often both models find one token likeliest."""
    means = {"kl": found.kl_ST.mean(1), "loss": found.loss_ST.mean(1), "reference": found.reference_ST.mean(1)}
    return {name: value.tolist() for name, value in means.items()} | {"agree": found.agree, "seconds": seconds}


def outcome(
    name: str, method: str, bits: int, draw: int = 0, domain: str = "stdlib", tokens: int | None = None
) -> dict[str, Any]:
    """Of one of ``MODELS`` and one of ``METHODS``, or of ``SHIPPED``; further arguments as of ``of``."""
    study = of(name, draw, domain=domain, tokens=tokens)
    if method in SHIPPED:
        begun = time.perf_counter()
        small = decoded(quantize(study.model, codec(bits), study.calibration_ST, method=SHIPPED[method]))
        return told(study.compare(small), time.perf_counter() - begun)
    judged = study.judge(METHODS[method](bits), calibrated=method in CALIBRATED)
    return told(judged.found, judged.seconds)


def mixed(name: str, method: str, bits: int, draw: int = 0) -> dict[str, Any]:
    """Of one of ``MODELS`` and one of ``SHIPPED``, with bits that differ by layer: "stored" bits per weight, and by
    "stdlib" and "prose" what ``told`` keeps of a comparison on these texts."""
    study = of(name, draw)
    widths = widths_of(study, bits)
    small = quantize(study.model, codec(bits), study.calibration_ST, method=SHIPPED[method], widths=widths)
    numbers, found = decoded(small), {"stored": stored_bits(small)}
    return found | {domain: told(of(name, draw, domain=domain).compare(numbers)) for domain in ("stdlib", "prose")}


def widths_of(study: Study, bits: int, zero_points: bool = False) -> dict[str, int]:
    """Bits of each layer by what ``allocate_bits`` measures on the calibration texts.

    zero_points: whether each group stores one, as integers do; else the bits of as many serve the weights.
    """
    mean = bits if zero_points else bits + bits / GROUP
    return allocate_bits(study.model, codec(bits), study.calibration_ST, mean=mean)


def compressed(
    name: str, method: str, bits: int, draw: int = 0, domain: str = "stdlib", tokens: int | None = None,
    *, mixed: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Likewise, by a method of llm-compressor in its own environment; see ``tq.lab.engines.compress``.

    mixed: whether bits differ by layer, as ours do.
    """
    from safetensors.torch import save_file

    study = of(name, draw, domain=domain, tokens=tokens)
    with TemporaryDirectory() as folder:
        model, given, out = (Path(folder, file) for file in ("model.safetensors", "texts.safetensors", "found.npz"))
        pretrained.keep(language(name), model)
        reference = study.reference
        save_file(
            {"calibration": study.calibration_ST.contiguous(), "held_out": reference.ids_ST.contiguous(),
             "hidden": reference.hidden_STC.contiguous()}, given,
        )  # fmt: skip
        begun = time.perf_counter()
        asked = json.dumps(widths_of(study, bits, zero_points=True) if mixed else bits)
        COMPRESSOR.run("compress", str(model), str(given), method, asked, str(GROUP), str(out))
        with np.load(out) as found:
            kept = Divergence(found["kl"], found["loss"], found["reference"], float(found["agree"]))
        return told(kept, time.perf_counter() - begun)


def mean_interval(
    each: Sequence[Sequence[float]], draws: int = 4000, seed: int = 0, of: Sequence[int] | None = None
) -> tuple[float, float, float]:
    """(mean, low, high) over texts, whose values are first averaged over calibration draws; a 95 % bootstrap.

    of: the document of each text; then documents are drawn, with all their texts. None: texts are.
    """
    return _interval(np.mean(each, 0)[None], lambda means: means[0], draws, seed, of)


def ratio_interval(
    ours_: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], draws: int = 4000, seed: int = 0,
    of: Sequence[int] | None = None,
) -> tuple[float, float, float]:  # fmt: skip
    """(ratio of means, low, high), paired over texts; each first averaged over calibration draws; of: as above."""
    pair = np.stack([np.mean(ours_, 0), np.mean(theirs, 0)])
    return _interval(pair, lambda means: means[0] / means[1], draws, seed, of)


def _interval(
    rows: np.ndarray, function: Callable[[np.ndarray], np.ndarray], draws: int, seed: int, of: Sequence[int] | None
) -> tuple[float, float, float]:
    if of is None:
        sums, counts = rows, np.ones(rows.shape[1])
    else:
        member = np.equal.outer(np.unique(of), np.asarray(of)).astype(float)  # [documents, texts]
        sums, counts = rows @ member.T, member.sum(1)
    drawn = np.random.default_rng(seed).integers(len(counts), size=(draws, len(counts)))
    low, high = np.quantile(function(sums[:, drawn].sum(2) / counts[drawn].sum(1)), (0.025, 0.975))
    return float(function(rows.mean(1))), float(low), float(high)
