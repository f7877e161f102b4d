"""What is in a checkpoint of a training run, and what every codec at hand makes of it: bytes, seconds, resumed losses.

The run is the book's own: a GPT on the corpus, AdamW, one process. Codecs of others are measured where they are
installed (`pip install 'tq-book[peers]'`), one thread each, on the same tensors in the same run.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tq.quant import lossless
from tq.quant.codec import Codec
from tq.quant.logscale import LogCodec
from tq.train.model import GPT, PRESETS, TrainConfig, Trainer
from tq.train.model.corpus import Corpus

PARTS = ("w", "m", "v", "g")  # weights, first moments, second moments, gradients
Parts = dict[str, list[Tensor]]


def trainer(corpus: Corpus, preset: str, steps: int, seed: int, lr: float = 1e-3) -> Trainer:
    """A run of ``steps``: 8 sequences a step, a twentieth of it warm-up."""
    config = TrainConfig(steps, 8, lr=lr, warmup=max(1, steps // 20), seed=seed)
    return Trainer(GPT(PRESETS[preset], seed), corpus, config)


def parts_of(run: Trainer) -> Parts:
    """Copies of what a checkpoint of the run holds, tensor by tensor in the model's order, gradients too."""
    state = run.optimizer.state
    parts: Parts = {part: [] for part in PARTS}
    for parameter in run.model.parameters():
        own = state[parameter]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for part, tensor in zip(PARTS, (parameter, own["exp_avg"], own["exp_avg_sq"], gradient), strict=True):
            parts[part].append(tensor.detach().clone())
    return parts


def bit_entropies(tensors: Iterable[Tensor]) -> list[float]:
    """Entropy of each bit of fp32 or bf16 numbers by itself, from the sign down; 1 is noise."""
    words = [tensor.contiguous().reshape(-1).view(torch.int32 if tensor.element_size() == 4 else torch.int16)
             for tensor in tensors]  # fmt: skip
    flat = torch.cat(words)
    places = range(8 * flat.element_size() - 1, -1, -1)
    shares = [float((flat >> place & 1).double().mean()) for place in places]
    return [_entropy([p, 1 - p]) for p in shares]


def _entropy(shares: Sequence[float]) -> float:
    return -sum(p * float(np.log2(p)) for p in shares if p > 0) + 0.0


# --- codecs --------------------------------------------------------------------------------------------------------


class Lossless(NamedTuple):
    """A codec: code of a tensor, given its second moment; its bytes; the tensor's bytes from its code."""

    encode: Callable[[Tensor, Tensor | None], Any]
    size: Callable[[Any], int]
    decode: Callable[[Any, Tensor | None], Any]


def _raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _of_bytes(encode: Callable[[bytes | memoryview], Any], decode: Callable[[Any], Any]) -> Lossless:
    return Lossless(lambda tensor, _: encode(_raw(tensor)), len, lambda code, _: decode(code))


def _zstd(level: int) -> Lossless:
    module = import_module("zstandard")
    packer, unpacker = module.ZstdCompressor(level=level), module.ZstdDecompressor()
    return _of_bytes(packer.compress, unpacker.decompress)


def _lz4() -> Lossless:
    frame = import_module("lz4.frame")
    return _of_bytes(frame.compress, frame.decompress)


def _blosc(filter_: str, codec: str, level: int) -> Lossless:
    module = import_module("blosc2")
    options = {"codec": module.Codec[codec], "clevel": level, "nthreads": 1, "filters": [module.Filter[filter_]]}

    def encode(tensor: Tensor, _: Tensor | None) -> bytes:
        return module.compress2(bytes(_raw(tensor)), cparams={**options, "typesize": tensor.element_size()})

    return Lossless(encode, len, lambda code, _: module.decompress2(code, dparams={"nthreads": 1}))


def _pcodec(level: int) -> Lossless:
    standalone = import_module("pcodec").standalone
    config = import_module("pcodec").ChunkConfig(compression_level=level)

    def encode(tensor: Tensor, _: Tensor | None) -> bytes:
        flat = tensor.reshape(-1)
        return standalone.simple_compress(
            flat.numpy() if flat.dtype == torch.float32 else flat.view(torch.int16).numpy().view(np.uint16), config
        )

    return Lossless(encode, len, lambda code, _: standalone.simple_decompress(code))


def _zipnn() -> Lossless:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks PyTorch for what is deprecated
        module = import_module("zipnn")
    by_dtype = {
        torch.float32: module.ZipNN(input_format="byte", bytearray_dtype="float32", threads=1),
        torch.bfloat16: module.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1),
    }

    def encode(tensor: Tensor, _: Tensor | None) -> Any:
        codec = by_dtype[tensor.dtype]
        return codec, codec.compress(bytearray(_raw(tensor)))  # a copy: version 0.5 overwrites what it is given

    return Lossless(encode, lambda code: len(code[1]), lambda code, _: code[0].decompress(code[1]))


def _ours(predicts: bool) -> Lossless:
    def encode(tensor: Tensor, second: Tensor | None) -> Any:
        return lossless.encode(tensor, second_moment=second if predicts else None, threads=1)

    def decode(code: Any, second: Tensor | None) -> Any:
        return _raw(lossless.decode(code, second_moment=second, threads=1))

    return Lossless(encode, lambda code: code.nbytes, decode)


MAKERS: dict[str, tuple[str, Callable[[], Lossless]]] = {  # name: package, codec
    "ours": ("", lambda: _ours(True)),
    "ours, each tensor alone": ("", lambda: _ours(False)),
    "ZipNN": ("zipnn", _zipnn),
    "pcodec, level 8": ("pcodec", lambda: _pcodec(8)),
    "pcodec, level 12": ("pcodec", lambda: _pcodec(12)),
    "zstd, level 3": ("zstandard", lambda: _zstd(3)),
    "blosc2, shuffle and zstd": ("blosc2", lambda: _blosc("SHUFFLE", "ZSTD", 1)),
    "blosc2, bitshuffle and lz4": ("blosc2", lambda: _blosc("BITSHUFFLE", "LZ4", 5)),
    "lz4": ("lz4", _lz4),
}


def codecs() -> dict[str, Lossless]:
    """Those that can be measured here, ours first."""
    return {name: make() for name, (package, make) in MAKERS.items() if not package or find_spec(package)}


def missing() -> list[str]:
    """Names of those that are not installed."""
    return [name for name, (package, _) in MAKERS.items() if package and not find_spec(package)]


@dataclass(frozen=True)
class Compressed:
    """What a codec makes of some tensors. MB/s: of numbers, by the fastest of the repeats."""

    ratio: float
    encode_mb_s: float
    decode_mb_s: float


def compress(codec: Lossless, tensors: Sequence[Tensor], seconds: Sequence[Tensor | None], repeats: int) -> Compressed:
    """Encode and decode all tensors so many times; AssertionError unless they come back to the bit."""
    size, stored, best = sum(tensor.nbytes for tensor in tensors), 0, [0.0, 0.0]
    for tensor, second in zip(tensors, seconds, strict=True):
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats):
            began = time.perf_counter()
            code = codec.encode(tensor, second)
            coded = time.perf_counter()
            back = codec.decode(code, second)
            times[0].append(coded - began)
            times[1].append(time.perf_counter() - coded)
        stored += codec.size(code)
        best = [total + min(each) for total, each in zip(best, times, strict=True)]
        assert np.ascontiguousarray(back).tobytes() == bytes(_raw(tensor)), "not lossless"
    return Compressed(size / stored, size / best[0] / 1e6, size / best[1] / 1e6)


def kinds(parts: Mapping[str, list[Tensor]]) -> dict[str, tuple[list[Tensor], list[Tensor | None]]]:
    """The tensors by kind, each with the second moments that may predict it."""
    none: list[Tensor | None] = [None] * len(parts["w"])
    found: dict[str, tuple[list[Tensor], list[Tensor | None]]] = {
        "w": (parts["w"], none), "m": (parts["m"], list(parts["v"])), "v": (parts["v"], none),
    }  # fmt: skip
    half = {part: [tensor.bfloat16() for tensor in parts[part]] for part in ("w", "g", "v")}
    found["w bf16"] = (half["w"], none)
    found["g bf16"] = (half["g"], list(half["v"]))
    return found


def delta(new: Sequence[Tensor], old: Sequence[Tensor]) -> float:
    """How many times smaller the code of what changed is (XOR of the bits), byte plane by byte plane."""
    changed = [a.view(torch.int32) ^ b.view(torch.int32) for a, b in zip(new, old, strict=True)]
    return sum(each.nbytes for each in changed) / sum(lossless.encode(each).nbytes for each in changed)


# --- resuming ------------------------------------------------------------------------------------------------------


def _coded(tensor: Tensor, bits: int, second: bool) -> Tensor:
    flat = tensor.reshape(-1)
    if second:
        log = LogCodec(bits)
        return log.decode(*log.encode(flat), flat.numel()).view_as(tensor)
    codec = Codec(bits)
    return codec.decode(codec.encode(flat)).view_as(tensor)


LADDER: dict[str, tuple[int | None, int | None, bool]] = {  # bits of m and of v (None: exact), weights in bf16
    "exact": (None, None, False),
    "m in 8 bits, v in 8": (8, 8, False),
    "m in 4 bits, v in 8": (4, 8, False),
    "m in 2 bits, v in 4": (2, 4, False),
    "m in 4 bits, v in 8, weights bf16": (4, 8, True),
    "no m": (0, None, False),
    "no moments": (0, 0, False),
}


def restore(run: Trainer, rung: str) -> None:
    """What a lossy checkpoint would have given back, written into a run."""
    first, second, half = LADDER[rung]
    for parameter in run.model.parameters():
        own = run.optimizer.state[parameter]
        for name, bits in (("exp_avg", first), ("exp_avg_sq", second)):
            if bits == 0:
                own[name].zero_()
            elif bits is not None:
                own[name].copy_(_coded(own[name], bits, name == "exp_avg_sq"))
        if half:
            parameter.data.copy_(parameter.data.bfloat16().float())


def resume_gaps(run: Trainer, rungs: Iterable[str], steps: int) -> dict[str, float]:
    """Held-out loss after ``steps`` more from every rung, less that of the unbroken run; ``run`` is left as it was."""
    before, losses = copy.deepcopy(run.state_dict()), {}
    for rung in rungs:
        run.load_state_dict(copy.deepcopy(before))
        restore(run, rung)
        for _ in range(steps):
            run.step()
        losses[rung] = float(run.evaluate())
    run.load_state_dict(before)
    return {rung: loss - losses["exact"] for rung, loss in losses.items()}
