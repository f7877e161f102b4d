"""Weights of a GPT in few bits: linear layers that keep codes, and how a model gets them.

``quantize`` works through a model block by block: each linear layer sees the inputs that the layers before it, already
quantized, give on calibration texts. Embeddings, norms and the head stay as they are. ``save`` and ``load`` keep the
codes in safetensors: what is loaded needs neither calibration data nor the code that quantized.

Shapes: S sequences, T tokens, C hidden, O outputs, I inputs.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tq.infer.gptq import gptq
from tq.infer.pretrained import of_state
from tq.quant.codec import Code, Codec
from tq.train.model.gpt import GPT, GPTConfig
from tq.train.model.text_sources import write_whole

METHODS = ("gptq", "nearest")
#: Linear layers of a block, in groups that see the same input, in the order of the forward pass.
GROUPS = (
    ("attention.query", "attention.key", "attention.value"),
    ("attention.out",),
    ("mlp.gate", "mlp.up"),
    ("mlp.down",),
)
_AT_ONCE = 4  # sequences that go through a block together
_FORMAT = "tq-weights-1"
_PARTS = ("payload", "scales")


class QuantizedLinear(nn.Module):
    """A linear layer without bias whose weight is a code.

    Args:
        code: of shape [O, I], with ``rows=True``.
    Raises:
        ValueError: it is of another shape.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.weights import QuantizedLinear
        >>> layer = QuantizedLinear(Codec(bits=4, block=64).encode(torch.randn(8, 128), rows=True))
        >>> layer(torch.ones(2, 128)).shape
        torch.Size([2, 8])
    """

    payload: Tensor
    scales: Tensor

    def __init__(self, code: Code) -> None:
        super().__init__()
        if len(code.shape) != 2 or not code.rows:
            raise ValueError(f"code must be of a matrix, with rows=True, got shape {code.shape}, rows={code.rows}")
        self.codec, self.shape = code.codec, code.shape
        self.register_buffer("payload", code.payload)
        self.register_buffer("scales", code.scales)

    @property
    def code(self) -> Code:
        """Its weight."""
        return Code(self.codec, self.shape, torch.float32, self.payload, self.scales, True)

    @property
    def nbytes(self) -> int:
        """Stored bytes of its weight."""
        return self.payload.nbytes + self.scales.nbytes

    def weight(self) -> Tensor:
        """Its weight, decoded: fp32 [O, I]."""
        return self.codec.decode(self.code)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight().to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.shape[1]}, {self.shape[0]}, {self.codec.bits_per_element:g} bits"


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
    search: int = 9,
    damping: float = 0.01,
    keep: Path | None = None,
    progress: Callable[[Told], None] = lambda told: None,
) -> GPT:
    """A model whose linear layers keep codes; the given one stays as it is, and shares what is not quantized.

    Args:
        model: a GPT in fp32.
        codec: of all layers; those that see one input share a seed.
        calibration_ST: tokens, int64 [S, T]; with method="nearest" unused.
        method: "gptq", or "nearest": each block by itself, as ``codec`` encodes.
        search, damping: as in ``gptq``.
        keep: folder for finished blocks, so that a run that was ended goes on; None (default) keeps nothing.
        progress: called after each layer.
    Returns:
        GPT: its linear layers are ``QuantizedLinear``.
    Raises:
        ValueError: the method is unknown, or weights are not finite.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.weights import quantize, stored_bits
        >>> from tq.train.model import GPT, GPTConfig
        >>> model = GPT(GPTConfig(layers=1, hidden=64, heads=2, vocab=64, seq=32))
        >>> small = quantize(model, Codec(bits=4, block=64), torch.randint(64, (4, 32)))
        >>> stored_bits(small)
        4.5
    """
    _check(model, method)
    small = shared(model)
    names = [name for name, _ in layers(small)]
    folder = _Folder(keep, model, codec, calibration_ST, (method, search, damping))
    hidden = None if method == "nearest" else [model.embed(ids) for ids in calibration_ST.split(_AT_ONCE)]
    done = 0
    for number, block in enumerate(small.blocks):
        kept = folder.read(number)
        for group in GROUPS:
            inside = [name for name in group if _get(block, name) is not None]
            moments = None if hidden is None or kept else _moments(block, _get(block, inside[0]), hidden, small)
            for name in inside:
                weight, seeded = _get(block, name).weight, codec.derive(f"blocks.{number}.{group[0]}")  # of one input
                if moments is None:
                    code = kept[name] if kept else seeded.encode(weight, rows=True)
                else:
                    code = gptq(weight, moments, seeded, damping=damping, search=search)
                _set(block, name, QuantizedLinear(code))
                done += 1
                progress(Told(f"blocks.{number}.{name}", done, len(names)))
        folder.write(number, block)
        if hidden is not None:
            hidden = [_through(block, x, small) for x in hidden]
    return small


def _check(model: GPT, method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are not finite")


def layers(model: GPT) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of all linear layers in the blocks, quantized or not."""
    for number, block in enumerate(model.blocks):
        for group in GROUPS:
            for name in group:
                if (layer := _get(block, name)) is not None:
                    yield f"blocks.{number}.{name}", layer


def stored_bits(model: GPT) -> float:
    """Stored bits per weight of the linear layers in the blocks, scales and padding included."""
    nbytes = numel = 0
    for _, layer in layers(model):
        if isinstance(layer, QuantizedLinear):
            nbytes, numel = nbytes + layer.nbytes, numel + layer.shape[0] * layer.shape[1]
        elif isinstance(layer, nn.Linear):
            nbytes, numel = nbytes + layer.weight.nbytes, numel + layer.weight.numel()
    return 8 * nbytes / numel


def decoded(model: GPT) -> GPT:
    """The same model with its weights decoded once: plain layers, fast where memory does not matter."""
    plain = shared(model)
    for number, block in enumerate(plain.blocks):
        for group in GROUPS:
            for name in group:
                layer = _get(block, name)
                if isinstance(layer, QuantizedLinear):
                    _set(plain.blocks[number], name, _linear(layer.weight()))
    return plain


def save(model: GPT, path: Path) -> None:
    """Write a quantized model as safetensors: codes, and all other weights as they are."""
    from safetensors.torch import save as to_bytes

    coded = {name: layer for name, layer in layers(model) if isinstance(layer, QuantizedLinear)}
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_embeddings:
        del state["head.weight"]
    told = {
        "config": dataclasses.asdict(model.config),
        "codes": {name: {"codec": _said(layer.codec), "shape": layer.shape} for name, layer in coded.items()},
    }
    write_whole(path, to_bytes(state, {"format": _FORMAT, "model": json.dumps(told)}))


def load(path: Path) -> GPT:
    """Read what ``save`` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a file, or damaged.
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
    if said.get("format") != _FORMAT:
        raise ValueError(f"{path} holds no quantized model of format {_FORMAT}, but {said.get('format')!r}")
    try:
        told = json.loads(said["model"])
        return _made(GPTConfig(**told["config"]), told["codes"], state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _made(config: GPTConfig, codes: dict[str, Any], state: dict[str, Tensor]) -> GPT:
    made = {}
    for name, told in codes.items():
        payload, scales = (state.pop(f"{name}.{part}") for part in _PARTS)
        codec = Codec(**{**told["codec"], "scale_dtype": getattr(torch, told["codec"]["scale_dtype"])})
        made[name] = QuantizedLinear(Code(codec, tuple(told["shape"]), torch.float32, payload, scales, True))
    plain = {f"{name}.weight": torch.empty(layer.shape) for name, layer in made.items()}
    model = of_state(config, state | plain)  # strict: a name too many or too few is an error
    for name, layer in made.items():
        _, number, inside = name.split(".", 2)
        _set(model.blocks[int(number)], inside, layer)
    return model


def _said(codec: Codec) -> dict[str, Any]:
    return {**dataclasses.asdict(codec), "scale_dtype": str(codec.scale_dtype).removeprefix("torch.")}


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def shared(model: GPT) -> GPT:
    """A model of modules of its own that hold the same tensors."""
    memo = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def _get(block: nn.Module, name: str) -> Any:
    return block.get_submodule(name) if getattr(block.get_submodule(name.split(".")[0]), name.split(".")[1]) else None


def _set(block: nn.Module, name: str, layer: nn.Module) -> None:
    where, what = name.split(".")
    setattr(block.get_submodule(where), what, layer)


def _through(block: nn.Module, x_BTC: Tensor, model: GPT) -> Tensor:
    with torch.no_grad():
        length = x_BTC.shape[1]
        return block(x_BTC, model.cos[:length], model.sin[:length])


def _moments(block: nn.Module, layer: nn.Module, hidden: Sequence[Tensor], model: GPT) -> Tensor:
    """Mean of x x^T over what a layer of a block sees, float64 [I, I]."""
    total: list[Tensor] = []

    def add(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        x_NI = given[0].detach().flatten(0, -2).float()
        found = (x_NI.T @ x_NI).double()
        total[:] = [total[0] + found] if total else [found]

    hook = layer.register_forward_pre_hook(add)
    for x in hidden:
        _through(block, x, model)
    hook.remove()
    return total[0] / sum(x.shape[0] * x.shape[1] for x in hidden)


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

    def read(self, number: int) -> dict[str, Code]:
        """{layer: code} of a finished block; empty where it is not finished."""
        if self.keep is None or not self._path(number).is_file():
            return {}
        content, at, found = self._path(number).read_bytes(), 0, {}
        for line in content.partition(b"\n\n")[0].decode().splitlines():
            name, length = line.split()
            start = content.index(b"\n\n") + 2 + at
            found[name], at = Code.from_bytes(content[start : start + int(length)]), at + int(length)
        return found

    def write(self, number: int, block: nn.Module) -> None:
        if self.keep is None:
            return
        os.makedirs(self.keep, exist_ok=True)
        codes = {name: _get(block, name).code.to_bytes() for group in GROUPS for name in group if _get(block, name)}
        head = "".join(f"{name} {len(content)}\n" for name, content in codes.items()) + "\n"
        write_whole(self._path(number), head.encode() + b"".join(codes.values()))
