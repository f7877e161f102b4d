"""Keys and values in few bits, one method beside the other, on one model and its texts.

Shapes: K key/value heads, D head size.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tq.infer.evaluate import Reference, divergence, texts
from tq.infer.kv import Coder, Statistics, calibrate, coders, cores, with_coded_attention
from tq.infer.pages import Pages, attend
from tq.lab import cache_rivals as rivals
from tq.lab.weight_study import MODELS, language, told
from tq.quant.codec import Codec
from tq.train.model.gpt import GPT

SPLIT = 16  # channels of 64 that the paper's split codes with more bits
SEED = 2  # of the held-out texts; the first recording had 0, and shares 3 of 8 windows and 7 of 32 with this
FIRST = ", first"  # after a method's name: its first token is kept exact
OTHER, PLACE = ", other", 100  # after it: the token of this place, as a control


def codec(bits: int, size: int, search: int = 1) -> Codec:
    """Of a head's vector of ``size`` numbers: one scale."""
    return Codec(bits, size, "mse", search=search, scale_dtype=torch.bfloat16 if bits <= 6 else torch.float32)


@dataclass(frozen=True, eq=False)
class Setting:
    """One of ``weight_study.MODELS`` with what calibration knows of its keys.

    Attributes:
        model: the reference.
        reference: what it says of the held-out texts.
        known: statistics of each layer's keys and values.
        calibration_ST: tokens that these are of.
    """

    model: GPT
    reference: Reference
    known: list[Statistics]
    calibration_ST: Tensor

    @property
    def size(self) -> int:
        """Of a head."""
        return self.model.config.head_size


@cache
def of(name: str, domain: str = "stdlib") -> Setting:
    """The setting of a model, on half of the texts that weights are judged on, as more methods are judged here.

    domain: "stdlib", or "prose": what is judged are English texts, not Python's sources.
    """
    _, count, length = MODELS[name]
    count //= 2
    model = language(name).model
    calibration = texts(language(name), 8192 // length, length, "train", seed=1)
    held_out = texts(language(name), count, length, seed=SEED) if domain == "stdlib" else _prose(name, count, length)
    return Setting(model, Reference.of(model, held_out), calibrate(model, calibration), calibration)


def _prose(name: str, count: int, length: int) -> Tensor:
    """Windows of the docstrings of the held-out files, which read as English; others than of the first recording."""
    import ast

    from tq.train.model.text_sources import stdlib

    said = []
    for content in stdlib(6_000_000)[1]:
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError):
            continue
        nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.FunctionDef | ast.ClassDef))
        said += [doc for node in nodes if (doc := ast.get_docstring(node)) and len(doc) > 200]
    ids = language(name).encode("\n\n".join(said))
    if len(ids) < 2 * count * length:
        raise ValueError(f"{len(ids)} tokens of prose, asked for {2 * count * length}")
    return ids[count * length : 2 * count * length].view(count, length)


def keys_of(setting: Setting, method: str, bits: int) -> list[Any]:
    """A code of keys for each layer.

    Args:
        setting: model and statistics.
        method: "plain", "centred", "balanced" (centred too), "search" (all three), "matrix" (centred and searched, a
            matrix in the place of factors), "split" (the paper's channels apart, plain), "ours" (split, centred,
            balanced, searched), "prod", "int per token", "kivi" (integers per channel, groups of 32), "kivi 128",
            "kivi searched" (of 128, with a search of ranges), "kivi 32 searched", "kvquant", "fp8", "fp8 scaled"; each
            with ``FIRST`` after it to keep the first token exact, or with ``OTHER`` for another one.
        bits: of most numbers.
    """
    if method == "kvquant" + FIRST:
        made = rivals.before_rotary(setting.model, setting.calibration_ST, bits, skipped=1)
        return [rivals.first_exact(code) for code in made]
    if method.endswith(FIRST):
        return [rivals.first_exact(code) for code in keys_of(setting, method.removesuffix(FIRST), bits)]
    if method.endswith(OTHER):
        return [rivals.ExactAt(code, PLACE) for code in keys_of(setting, method.removesuffix(OTHER), bits)]
    size, known, layers = setting.size, setting.known, len(setting.known)
    others: dict[str, Callable[[], Any]] = {
        "prod": lambda: [rivals.Product(bits)] * layers, "int per token": lambda: [rivals.PerToken(bits)] * layers,
        "kivi": lambda: [rivals.PerChannel(bits, 32)] * layers, "fp8": lambda: [rivals.Fp8()] * layers,
        "kivi 128": lambda: [rivals.PerChannel(bits, 128)] * layers,
        "kivi searched": lambda: [rivals.PerChannel(bits, 128, rivals.RANGES)] * layers,
        "kivi 32 searched": lambda: [rivals.PerChannel(bits, 32, rivals.RANGES)] * layers,
        "fp8 scaled": lambda: [rivals.Fp8(scaled=True)] * layers,
        "kvquant": lambda: rivals.before_rotary(setting.model, setting.calibration_ST, bits),
    }  # fmt: skip
    if method in others:
        return others[method]()
    search = {2: 17, 3: 17}.get(bits, 5) if method in ("search", "matrix") else 1
    if method in ("split", "ours"):
        extra, whole = (1 if bits > 2 else 2), method == "ours"
        coarse, fine = rivals.split_codecs(bits, extra, SPLIT, size, search=5 if whole else 1)
        return [k for k, _ in coders(coarse, None, known, centred=whole, balanced=whole, fine=fine, sinks=0)]
    balanced = "matrix" if method == "matrix" else method in ("balanced", "search")
    pairs = coders(codec(bits, size, search), None, known, centred=method != "plain", balanced=balanced, sinks=0)
    return [k for k, _ in pairs]


def values_of(setting: Setting, method: str, bits: int) -> list[Any]:
    """A code of values for each layer; method: "codec", "matrix" (centred, after a matrix), "int per token", "fp8" or
    "fp8 scaled", each with ``FIRST`` or without."""
    layers = len(setting.known)
    if method.endswith(FIRST):
        return [rivals.first_exact(code) for code in values_of(setting, method.removesuffix(FIRST), bits)]
    if method in ("codec", "matrix"):
        balanced: bool | str = "matrix" if method == "matrix" else False
        return [v for _, v in coders(None, codec(bits, setting.size), setting.known, balanced=balanced, sinks=0)]
    made = rivals.PerToken(bits) if method == "int per token" else rivals.Fp8(scaled=method == "fp8 scaled")
    return [made] * layers


def moved(code: Coder, offset_KD: Tensor) -> Coder:
    """A code that centres keys which all have a constant more."""
    assert code.mean_KD is not None
    return dataclasses.replace(code, mean_KD=code.mean_KD + offset_KD)


def judged(setting: Setting, pairs: Sequence[tuple[Any | None, Any | None]]) -> dict[str, Any]:
    """What comes of (keys, values) of each layer."""
    return told(divergence(setting.reference, with_coded_attention(setting.model, pairs)))


def coded(name: str, keys: tuple[str, int] | None, values: tuple[str, int] | None) -> GPT:
    """One of ``MODELS`` with (method, bits) of keys and of values; None for exact ones."""
    setting = of(name)
    made = [keys_of(setting, *keys) if keys else None, values_of(setting, *values) if values else None]
    return with_coded_attention(setting.model, rivals.pairs(made[0], made[1], len(setting.known)))


def held(name: str, keys: int | None, values: int | None, tokens: int) -> dict[str, float]:
    """Bytes of a cache of so many tokens: as its pages say, and by how much the process grew; bits of keys and values,
    None for bf16."""
    import gc

    import psutil

    setting = of(name)
    shape = (1, setting.model.config.groups, 256, setting.size)
    x, process = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16(), psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    coded = [Coder(codec(bits, setting.size), sinks=1) if bits else None for bits in (keys, values)]
    pages = [Pages(one) for _ in setting.known for one in coded]
    for page in pages:
        for at in range(0, tokens, 256):
            page.append(x[:, :, : min(256, tokens - at)])
    grown = process.memory_info().rss - before
    return {"bytes": float(sum(page.nbytes for page in pages)), "grown": float(grown)}


def outcome(
    name: str, keys: tuple[str, int] | None, values: tuple[str, int] | None, domain: str = "stdlib"
) -> dict[str, Any]:
    """What comes of (method, bits) of keys and of values; None for exact ones. "stored": bits per number of both."""
    setting = of(name, domain)
    made = [keys_of(setting, *keys) if keys else None, values_of(setting, *values) if values else None]
    pairs, begun = rivals.pairs(made[0], made[1], len(setting.known)), time.perf_counter()
    found = judged(setting, pairs)
    each = [rivals.stored_bits(one, one, setting.size) if one else 16.0 for one in pairs[0]]
    return found | {"keys": each[0], "values": each[1], "seconds": time.perf_counter() - begun}


def key_errors(name: str, bits: int) -> list[dict[str, float]]:
    """Of each layer: errors of scores with centred and with balanced keys, and after a matrix, over those with plain
    ones, as predicted from statistics alone, and as found."""
    setting = of(name)
    methods = {way: keys_of(setting, way, bits) for way in ("plain", "centred", "balanced", "matrix")}
    rows = []
    for layer, (q, k) in enumerate(_seen(setting)):
        found = {way: _score_error(q, k, made[layer]) for way, made in methods.items()}
        known = setting.known[layer]
        q2_KD = q.square().mean((0, 2)).view(k.shape[1], -1, k.shape[3]).mean(1)
        left_KD = k.var((0, 2), correction=0)
        plain = (k.square().mean((0, 2)).sum(1) * q2_KD.sum(1)).sum()
        centred = (left_KD.sum(1) * q2_KD.sum(1)).sum()
        t2_KD = known.balance_KD.square()
        balanced = ((left_KD * t2_KD).sum(1) * (q2_KD / t2_KD).sum(1)).sum()
        found = {way: error / found["plain"] for way, error in found.items() if way != "plain"}
        predicted = {"centred": centred, "balanced": balanced, "matrix": _after_a_matrix(q, k, known.key_matrix_KDD)}
        rows.append(found | {f"{way}, predicted": float(error / plain) for way, error in predicted.items()})
    return rows


def _after_a_matrix(q_BHTD: Tensor, k_BKTD: Tensor, matrix_KDD: Tensor) -> Tensor:
    """tr(A C A^T) tr(A^-T W A^-1), over all heads: what the error of scores is in proportion to."""
    q_KND = q_BHTD[0].reshape(k_BKTD.shape[1], -1, k_BKTD.shape[3])
    left_KTD = k_BKTD[0] - k_BKTD[0].mean(1, keepdim=True)
    coded = (left_KTD @ matrix_KDD.transpose(1, 2)).square().sum(2).mean(1)
    asked = (q_KND @ torch.linalg.inv(matrix_KDD)).square().sum(2).mean(1)
    return (coded * asked).sum()


def first_tokens(name: str, bits: int) -> list[dict[str, float]]:
    """Of each layer: "attention", the mean share of a query's attention that the first token has, and with "plain",
    "centred" and "balanced" keys the squared error of its scores over the mean of those of all others."""
    setting = of(name)
    methods = {way: keys_of(setting, way, bits) for way in ("plain", "centred", "balanced")}
    rows = []
    for layer, (q, k) in enumerate(_seen(setting)):
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) / q.shape[3] ** 0.5
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        row = {"attention": float(scores.masked_fill(hidden, -torch.inf).softmax(3)[:, :, 1:, 0].mean())}
        for way, made in methods.items():
            error = _score_errors(q, k, made[layer])
            row[way] = float(error[..., 0].mean() / error[..., 1:].mean())
        rows.append(row)
    return rows


@torch.no_grad()
def _seen(setting: Setting) -> list[tuple[Tensor, Tensor]]:
    """Queries and keys of each layer in the first held-out text."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        core.register_forward_pre_hook(lambda _, given: seen.append((given[0], given[1])))
        for core in cores(setting.model)
    ]
    setting.model(setting.reference.ids_ST[:1])
    for hook in hooks:
        hook.remove()
    return seen


def _score_error(q_BHTD: Tensor, k_BKTD: Tensor, code: Any) -> float:
    """Mean of ``_score_errors``."""
    return float(_score_errors(q_BHTD, k_BKTD, code).mean())


def _score_errors(q_BHTD: Tensor, k_BKTD: Tensor, code: Any) -> Tensor:
    """Square of what coding keys changes in scores, but for what it changes in all of a query alike, [B, H, T, T]."""
    wrong = (code(k_BKTD) - k_BKTD).repeat_interleave(q_BHTD.shape[1] // k_BKTD.shape[1], 1)
    scores = q_BHTD @ wrong.transpose(2, 3)
    return (scores - scores.mean(3, keepdim=True)).square()


COLD = 512 << 20  # bytes of other copies before the same one comes again: more than lie in a processor's own memory


def attention_seconds(
    tokens: int, heads: int = 8, queries: int = 8, size: int = 64, bits: Sequence[tuple[int, int]] = ((4, 4), (4, 3)),
    *, repeats: int = 15, cold: int = COLD,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of one token's attention to a cache: PyTorch's, and ours straight from codes, in turn.

    PyTorch's: its attention in bf16 and fp32, with the queries of a head as rows, and the two products and the softmax
    written out. "bf16" is its call for grouped queries where a head has several. Each call finds another copy of the
    cache, so that none lies in a processor's own memory from the call before.
    """
    from tq.lab.timing import time_calls

    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, heads, tokens, size, generator=generator) for _ in range(2))
    q = torch.randn(queries, size, generator=generator)
    rows = q.view(1, heads, queries // heads, size)

    def again(made: Callable[[], tuple[Any, Any]], nbytes: int, call: Callable[[Any, Any], Any]) -> Callable[[], Any]:
        copies = cycle([made() for _ in range(-(-cold // nbytes))])
        return lambda: call(*next(copies))

    def products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(2, 3) / math.sqrt(size)).softmax(3) @ v

    attention = F.scaled_dot_product_attention
    calls: dict[str, Callable[[], Any]] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        made = partial(_copied, k, v, dtype)
        one, many, nbytes = q[None, :, None].to(dtype), rows.to(dtype), 2 * k.numel() * dtype.itemsize
        if name == "bf16" or queries == heads:
            calls[name] = again(made, nbytes, partial(attention, one, enable_gqa=queries != heads))
        if queries != heads:
            calls[f"{name}, rows"] = again(made, nbytes, partial(attention, many))
        calls[f"{name}, products"] = again(made, nbytes, partial(products, many))
    matrix_KDD = torch.linalg.qr(torch.randn(heads, size, size, generator=generator))[0]
    for pair, matrix in [*((pair, None) for pair in bits), (bits[0], matrix_KDD)]:
        keys, values = (Pages(Coder(codec(b, size), sinks=1, matrix_KDD=matrix)) for b in pair)
        keys.append(k)
        values.append(v)
        name = f"{pair[0]} and {pair[1]} bits" + (", matrix" if matrix is not None else "")
        calls[name] = again(partial(_deep, keys, values, q), keys.nbytes + values.nbytes, partial(attend, q))
    return time_calls(calls, repeats, settle=1)


def _deep(keys: Pages, values: Pages, q: Tensor) -> tuple[Pages, Pages]:
    both = deepcopy((keys, values))
    attend(q, *both)  # what is worked out once in a page's time is, as in a decoder
    return both


def _copied(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return k.to(dtype, copy=True), v.to(dtype, copy=True)


def median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Of turns, how many times longer the first takes."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))
