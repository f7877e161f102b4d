"""Weights of a GPT in few bits: linear layers that keep codes, and how a model gets them.

``quantize`` works through a model block by block: each linear layer sees the inputs that the layers before it, already
quantized, give on calibration texts. Embeddings and norms stay as they are, the head too unless asked for. ``save`` and
``load`` keep the codes in safetensors: what is loaded needs neither calibration data nor the code that quantized.

Shapes: S sequences, T tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tq.infer.gptq import SEARCH, gptq
from tq.infer.layers import (
    FIRST,
    GROUPS,
    HEAD,
    Moments,
    QuantizedLinear,
    layers,
    part,
    plain_linear,
    put,
    rebuild,
    shared,
)
from tq.infer.pretrained import of_state
from tq.infer.trellis import BITS, DAMPING, REACH, TrellisCode, TrellisLinear, layout, trellis
from tq.quant.codec import Code, Codec
from tq.train.model.gpt import GPT, GPTConfig
from tq.train.model.text_sources import write_whole

METHODS = ("gptq", "nearest", "trellis")
_FORMAT, _FORMAT_OF_PATHS = "tq-weights-1", "tq-weights-2"  # the second where a layer keeps paths through a trellis
_PARTS = ("payload", "scales")


@dataclass(frozen=True)
class Told:
    """What ``quantize`` tells after each layer.

    Attributes:
        name: of the layer.
        done, total: layers.
    """

    name: str
    done: int
    total: int


def quantize(
    model: GPT,
    codec: Codec,
    calibration_ST: Tensor,
    *,
    method: str = "gptq",
    search: int = SEARCH,
    damping: float | None = None,
    head: Codec | None = None,
    widths: Mapping[str, int] | None = None,
    keep: Path | None = None,
    progress: Callable[[Told], None] = lambda told: None,
) -> GPT:
    """A model whose linear layers keep codes; the given one stays as it is, and shares what is not quantized.

    Args:
        model, codec: a GPT in fp32; of all layers in its blocks.
        calibration_ST: tokens, int64 [S, T]; with method="nearest" unused.
        method: "gptq"; "nearest", as ``codec`` encodes; or "trellis", slower and closer, with 2 to 5 bits.
        search, damping: scales that "gptq" tries; on the moments' diagonal, None: 0.01 of its mean, "trellis" 0.03.
        head: codec of the head, which is never a trellis; None (default) leaves it as it is.
        widths: bits of each layer, in place of the codec's; see ``tq.infer.allocation``.
        keep, progress: folder for finished blocks, so that a run that was ended goes on; called after each layer.
    Returns:
        GPT: its linear layers are ``QuantizedLinear``.
    Raises:
        ValueError: the method is unknown or not for so many bits, layers are not those of the model, or weights are
            not finite.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.weights import quantize
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=1, hidden=64, heads=2, vocab=64, seq=32))
        >>> small = quantize(model, Codec(bits=4, block=64), torch.randint(64, (4, 32)))
    """
    names = [name for name, _ in layers(model, head is not None)]
    codecs = _codecs(codec, widths, names)
    _check(model, method, codecs.values())
    damped = {} if damping is None else {"damping": damping}
    how = (method, search, damping, *((DAMPING, REACH, layout()) if method == "trellis" else ()))
    how += () if widths is None else (sorted(widths.items()),)
    folder = _Folder(keep, model, codec, calibration_ST, how)
    kept: dict[str, dict[str, bytes]] = {}
    def make(name: str, layer: nn.Linear, moments: Moments) -> QuantizedLinear:
        if head is not None and name == HEAD:
            own, found, way = head.derive(HEAD), None, "gptq" if method == "trellis" else method
        else:  # layers that see one input share a seed
            _, number, inside = name.split(".", 2)
            if number not in kept:
                kept.clear()
                kept[number] = folder.read(int(number))
            own, found, way = codecs[name].derive(f"blocks.{number}.{FIRST[inside]}"), kept[number].get(inside), method
        made = _made_anew(way, layer, moments, own, search, damped) if found is None else _made_of(way, found, own)
        progress(Told(name, names.index(name) + 1, len(names)))
        return made

    return rebuild(model, calibration_ST, make, head=head is not None, done=folder.write)


def _made_anew(
    way: str, layer: nn.Linear, moments: Moments, codec: Codec, search: int, damped: dict[str, float]
) -> QuantizedLinear:
    if way == "trellis":
        return TrellisLinear(trellis(layer.weight, moments(), codec, **damped))
    if way == "nearest":
        return QuantizedLinear(codec.encode(layer.weight, rows=True))
    return QuantizedLinear(gptq(layer.weight, moments(), codec, search=search, **damped))


def _made_of(way: str, content: bytes, codec: Codec) -> QuantizedLinear:
    if way == "trellis":
        return TrellisLinear(TrellisCode.from_bytes(content, codec))
    return QuantizedLinear(Code.from_bytes(content))


def _codecs(codec: Codec, widths: Mapping[str, int] | None, names: Sequence[str]) -> dict[str, Codec]:
    """{layer of a block: its codec}."""
    inside = [name for name in names if name != HEAD]
    if widths is None:
        return dict.fromkeys(inside, codec)
    if set(widths) != set(inside):
        raise ValueError(f"widths must name all {len(inside)} layers of the blocks and no other, got {len(widths)}")
    return {name: dataclasses.replace(codec, bits=widths[name]) for name in inside}


def _check(model: GPT, method: str, codecs: Collection[Codec]) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    for bits in sorted({codec.bits for codec in codecs}) if method == "trellis" else ():
        if bits not in BITS:
            raise ValueError(f"a trellis has {', '.join(map(str, BITS))} bits a weight, got {bits}")
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are not finite")


def decoded(model: GPT) -> GPT:
    """The same model with its weights decoded once: plain layers, fast where memory does not matter.

    Args:
        model: a GPT with quantized layers.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.weights import decoded, quantize
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=1, hidden=64, heads=2, vocab=64, seq=32))
        >>> small = quantize(model, Codec(bits=4, block=64), torch.randint(64, (4, 32)))
        >>> type(decoded(small).blocks[0].mlp.up).__name__
        'Linear'
    """
    plain = shared(model)
    for name, layer in list(layers(plain, head=True)):
        if isinstance(layer, QuantizedLinear):
            put(plain, name, plain_linear(layer.decoded()))
    return plain


def save(model: GPT, path: Path) -> None:
    """Write a quantized model as safetensors: codes, and all other weights as they are.

    Args:
        model: a GPT with quantized layers.
        path: of the file.
    Example:
        >>> import torch
        >>> from pathlib import Path
        >>> from tq import Codec
        >>> from tq.infer.weights import load, quantize, save
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=1, hidden=64, heads=2, vocab=64, seq=32))
        >>> save(quantize(model, Codec(bits=4, block=64), torch.randint(64, (4, 32))), Path("small.safetensors"))
        >>> load(Path("small.safetensors")).blocks[0].mlp.up.codec.bits
        4
    """
    from safetensors.torch import save as to_bytes

    coded = {name: layer for name, layer in layers(model, head=True) if isinstance(layer, QuantizedLinear)}
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_embeddings:
        state.pop("head.weight", None)  # a head of codes is there beside the embeddings
    told = {
        "config": dataclasses.asdict(model.config),
        "codes": {name: _told_of(layer) for name, layer in coded.items()},
    }
    paths = any(isinstance(layer, TrellisLinear) for layer in coded.values())
    form = _FORMAT_OF_PATHS if paths else _FORMAT
    write_whole(path, to_bytes(state, {"format": form, "model": json.dumps(told)}))


def load(path: Path) -> GPT:
    """Read what ``save`` wrote.

    Args:
        path: of the file.
    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a file, or damaged.
    Example:
        >>> from pathlib import Path
        >>> from tq.infer.weights import load
        >>> model = load(Path("small.safetensors"))                      # doctest: +SKIP
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        with safe_open(path, "pt") as opened:
            said = opened.metadata() or {}
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error
    if said.get("format") not in (_FORMAT, _FORMAT_OF_PATHS):
        raise ValueError(f"{path} holds no quantized model of format {_FORMAT}, but {said.get('format')!r}")
    try:
        told = json.loads(said["model"])
        return _made(GPTConfig(**told["config"]), told["codes"], state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _made(config: GPTConfig, codes: dict[str, Any], state: dict[str, Tensor]) -> GPT:
    made: dict[str, QuantizedLinear] = {}
    for name, told in codes.items():
        payload, scales = (state.pop(f"{name}.{part}") for part in _PARTS)
        codec = Codec(**{**told["codec"], "scale_dtype": getattr(torch, told["codec"]["scale_dtype"])})
        shape = tuple(told["shape"])
        if "paths" in told:
            if told["paths"] != layout():
                raise ValueError(f"{name} has paths of {told['paths']}, read are those of {layout()}")
            made[name] = TrellisLinear(TrellisCode(codec, shape, payload, scales))
        else:
            made[name] = QuantizedLinear(Code(codec, shape, torch.float32, payload, scales, True))
    plain = {f"{name}.weight": torch.empty(layer.shape) for name, layer in made.items()}
    model = of_state(config, state | plain)  # strict: a name too many or too few is an error
    for name, layer in made.items():
        put(model, name, layer)
    return model


def _told_of(layer: QuantizedLinear) -> dict[str, Any]:
    told = {"codec": _said(layer.codec), "shape": layer.shape}
    return told | ({"paths": layout()} if isinstance(layer, TrellisLinear) else {})


def _said(codec: Codec) -> dict[str, Any]:
    return {**dataclasses.asdict(codec), "scale_dtype": str(codec.scale_dtype).removeprefix("torch.")}


class _Folder:
    """Blocks that are finished, in files that name what they were made from."""

    def __init__(self, keep: Path | None, model: GPT, codec: Codec, calibration: Tensor, how: tuple[Any, ...]) -> None:
        self.keep = keep
        if keep is not None:
            digest = hashlib.sha256(repr((model.config, codec, how)).encode())
            for tensor in (*model.parameters(), calibration):
                digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
            self.name = digest.hexdigest()[:16]

    def _path(self, number: int) -> Path:
        assert self.keep is not None
        return self.keep / f"{self.name}-block-{number}.bin"

    def read(self, number: int) -> dict[str, bytes]:
        """{layer: its code} of a finished block; empty where it is not finished."""
        if self.keep is None or not self._path(number).is_file():
            return {}
        content, at, found = self._path(number).read_bytes(), 0, {}
        for line in content.partition(b"\n\n")[0].decode().splitlines():
            name, length = line.split()
            start = content.index(b"\n\n") + 2 + at
            found[name], at = content[start : start + int(length)], at + int(length)
        return found

    def write(self, number: int, block: nn.Module) -> None:
        if self.keep is None:
            return
        os.makedirs(self.keep, exist_ok=True)
        codes = {name: part(block, name).code.to_bytes() for group in GROUPS for name in group if part(block, name)}
        head = "".join(f"{name} {len(content)}\n" for name, content in codes.items()) + "\n"
        write_whole(self._path(number), head.encode() + b"".join(codes.values()))
