"""Other people's quantizers that can be measured beside the codec, each with its error and its bits.

One that is not measured is named, with the reason. Their packages are the extra `[peers]`.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any
from unittest import mock

from tq.lab.timing import (
    MOST_BYTES,
    Rate,
    Spread,
    calls_of,
    inputs_of,
    outputs_of,
    rate_of,
    rotating,
    standard,
    watched,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tq.quant.codec import Code

PEER_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 24}
INSTALL = "not installed (pip install 'tq-book[peers]')"


@dataclass(frozen=True)
class Peer:
    """A quantizer to compare with. `encode` takes a flat fp32 tensor; `decode` gives one from what that returned.

    family: the name in `figures.METHODS`. bits: ours with as many bits is what it is compared with. bits_per_element:
    what it stores, scales included. allocates: whether a call has to allocate its result; ours never does.
    """

    name: str
    family: str
    bits: int
    bits_per_element: float
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    allocates: bool
    note: str = ""


@dataclass(frozen=True)
class Missing:
    """What was not measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """A peer and ours with as many bits, on the same data in one run."""

    peer: Peer
    rate: Rate
    nmse: float
    ours: Rate
    ours_nmse: float

    @property
    def encode_over(self) -> Spread:
        """How many times as fast ours encodes."""
        return self.ours.encode.over(self.rate.encode)

    @property
    def decode_over(self) -> Spread:
        """How many times as fast ours decodes."""
        return self.ours.decode.over(self.rate.decode)


def _reference(device: str, inputs: Sequence[Tensor], outputs: Iterator[Tensor]) -> list[Peer]:
    codec = standard()
    codes = itertools.cycle([codec.empty(tuple(x.shape), x.dtype, device) for x in inputs])
    encode = lambda x: codec.encode(x, out=next(codes), impl="reference")  # noqa: E731
    decode = lambda code: codec.decode(code, out=next(outputs), impl="reference")  # noqa: E731
    return [Peer("PyTorch reference", "reference", 4, codec.bits_per_element, encode, decode, False, "eager")]


def _compiled(device: str, inputs: Sequence[Tensor], outputs: Iterator[Tensor]) -> list[Peer]:
    import torch

    from tq.quant import reference, rotation
    from tq.quant.codebook import lloyd_max

    codec = standard()
    codes = itertools.cycle([codec.empty(tuple(x.shape), x.dtype, device) for x in inputs])
    levels, thresholds = (torch.tensor(t, dtype=torch.float32, device=device) for t in lloyd_max(codec.bits))
    # The compiler looks through caches, and would compute the signs anew from their seed in every call.
    torch.compiler.assume_constant_result(rotation.signs.__wrapped__)
    same: dict[str, Any] = {k: getattr(codec, k) for k in ("bits", "block", "rounds", "rotation", "seed")}
    tables: dict[str, Any] = {"levels_L": levels, "thresholds": thresholds}
    encoder = torch.compile(
        partial(reference.encode, scale=codec.scale, **tables, **same), fullgraph=True, dynamic=False
    )
    decoder = torch.compile(partial(reference.decode, levels_L=levels, **same), fullgraph=True, dynamic=False)
    # On a CPU temporaries have to fit the caches. The reference's own chunks would be unrolled into one large graph.
    piece = inputs[0].numel() if device == "cuda" else min(inputs[0].numel(), 1 << 19)
    whole = partial(mock.patch.object, reference, "_CHUNK_ELEMENTS", piece)

    def pieces(x: Tensor, code: Code) -> Iterator[tuple[Tensor, ...]]:
        blocks = -(-piece // codec.block)
        return zip(x.view(1, -1).split(piece, 1), code.payload.split(blocks), code.scales.split(blocks), strict=True)

    def encode(x: Tensor) -> Code:
        code = next(codes)
        with whole():
            for x_1D, payload_NW, scale_N in pieces(x, code):
                encoder(x_1D, payload_NW, scale_N)
        return code

    def decode(code: Code) -> Tensor:
        y = next(outputs)
        with whole():
            for y_1D, payload_NW, scale_N in pieces(y, code):
                decoder(payload_NW, scale_N, y_1D)
        return y

    return [Peer(COMPILED, "reference", 4, codec.bits_per_element, encode, decode, False, "compiled")]


def _bitsandbytes(device: str, inputs: Sequence[Tensor], outputs: Iterator[Tensor]) -> list[Peer]:
    import bitsandbytes.functional as bnb

    def into() -> dict[str, Tensor]:
        return {"out": next(outputs)} if device == "cuda" else {}  # its CPU operators take none

    note = "encode allocates" if device == "cuda" else "allocates"
    nf4 = partial(bnb.quantize_4bit, blocksize=64, quant_type="nf4")
    int8 = partial(bnb.quantize_blockwise, blocksize=256)
    return [
        Peer("bitsandbytes NF4", "nf4", 4, 4.5, nf4, lambda c: bnb.dequantize_4bit(*c, **into()), True, note),
        Peer(
            "bitsandbytes 8-bit", "int8", 8, 8.125, int8, lambda c: bnb.dequantize_blockwise(*c, **into()), True, note
        ),
    ]


def _torchao(device: str, inputs: Sequence[Tensor], outputs: Iterator[Tensor]) -> list[Peer]:
    import torch
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    def peer(name: str, family: str, bits: int, block: int, kind: Any) -> Peer:
        states = itertools.cycle([kind.zeros(x.shape, block_size=block, device=device) for x in inputs])
        # Both widths share this code: without dynamic=False the second would get slower, general shapes.
        encoder = torch.compile(lambda state, x: state.copy_(x), fullgraph=True, dynamic=False)
        decoder = torch.compile(lambda state, y: y.copy_(state.dequantize()), fullgraph=True, dynamic=False)
        encode, decode = lambda x: encoder(next(states), x), lambda state: decoder(state, next(outputs))
        return Peer(name, family, bits, bits + 32 / block, encode, decode, False, "compiled, as in its optimizers")

    return [
        peer("torchao 4-bit state", "int4", 4, 128, OptimState4bit),
        peer("torchao 8-bit state", "int8", 8, 256, OptimState8bit),
    ]


def _turboquant(device: str, inputs: Sequence[Tensor], outputs: Iterator[Tensor]) -> list[Peer]:
    import torch

    metadata.version("turboquant-torch")  # other distributions may bring a module of the same name
    from turboquant import TurboQuantMSE

    theirs = TurboQuantMSE(dim=128, bit_width=4).to(torch.device(device))
    encode, decode = lambda x: theirs.quantize(x.view(-1, 128)), lambda code: theirs.dequantize(code).view(-1)
    return [Peer("turboquant-torch, mse", "paper", 4, 64.25, encode, decode, True, "allocates; keeps 4 bits as int64")]


def _fast_hadamard(device: str, inputs: Sequence[Tensor], outputs: Iterator[Tensor]) -> list[Peer]:
    from fast_hadamard_transform import hadamard_transform

    if device == "cpu":
        raise RuntimeError("works on a GPU only")

    def rotate(x: Tensor) -> Tensor:
        return hadamard_transform(x.view(-1, 128), scale=128**-0.5).view(-1)

    note = "allocates; one rotation, nothing is quantized"
    return [Peer("fast-hadamard-transform", "fp32", 4, 32.0, rotate, rotate, True, note)]


Builder = Callable[[str, Sequence["Tensor"], Iterator["Tensor"]], list[Peer]]
OWN = ("PyTorch", "torch.compile")  # these are not other distributions
COMPILED = "torch.compile of it"
PEERS: dict[str, Builder] = {
    "PyTorch reference": _reference,
    COMPILED: _compiled,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    "turboquant-torch": _turboquant,
    "fast-hadamard-transform": _fast_hadamard,
}


def hush() -> None:
    """From here on packages say nothing of themselves: no warnings, no logs below errors."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what peers and compilers say of themselves at their start; exceptions pass."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def peers(device: str, elements: int | None = None) -> tuple[list[Peer], list[Missing]]:
    """What there is to compare with, each tried once on tensors of `elements`; and what cannot be measured here.

    elements: a multiple of 1024; default: `PEER_ELEMENTS`. Peers work on tensors of this size only.
    """
    inputs = inputs_of(device, elements or PEER_ELEMENTS[device])
    return _built(device, inputs, itertools.cycle(outputs_of(inputs)), {})


def _built(
    device: str, inputs: Sequence[Tensor], outputs: Iterator[Tensor], without: Mapping[str, str]
) -> tuple[list[Peer], list[Missing]]:
    found: list[Peer] = []
    missing = [Missing(name, reason) for name, reason in without.items()]
    for name, build in PEERS.items():
        if name in without:
            continue
        try:
            with _quiet():
                built = build(device, inputs, outputs)
                for peer in built:
                    peer.decode(peer.encode(inputs[0]))
            found += built
        except ModuleNotFoundError as error:
            itself = name.startswith(str(error.name).partition(".")[0].replace("_", "-"))
            missing.append(Missing(name, INSTALL if itself else f"needs {error.name}, which is not installed"))
        except Exception as error:  # whatever a peer or a compiler raises: it is said, and the others are measured
            missing.append(Missing(name, said(error)))
    return found, missing


def said(error: Exception) -> str:
    """The first line of what a peer raised, with its type."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first[:150]}"


def compare_peers(
    device: str,
    elements: int | None = None,
    repeats: int = 7,
    *,
    most_bytes: int = MOST_BYTES,
    without: Mapping[str, str] | None = None,
) -> tuple[list[Comparison], list[Missing]]:
    """Each peer beside ours with as many bits, on the same fp32 tensors, in one run; and what was not measured.

    most_bytes: of the inputs that rotate, see `timing.buffer_count`. without: {a name of `PEERS`: why it is left out}.
    """
    elements = elements or PEER_ELEMENTS[device]
    inputs = inputs_of(device, elements, most_bytes=most_bytes)
    outputs, turns = outputs_of(inputs), itertools.count()
    each = (outputs[turn % len(outputs)] for turn in turns)
    found, missing = _built(device, inputs, each, without or {})

    def nmse(decoded: Tensor) -> float:
        return float((decoded - inputs[0]).square().sum() / inputs[0].square().sum())

    calls = {"copy": rotating(lambda x, y: y.copy_(x), inputs, outputs, turns=turns)}
    errors: dict[str, float] = {}
    for bits in sorted({peer.bits for peer in found}):
        codec = standard(bits)
        calls[f"encode ours {bits}"], calls[f"decode ours {bits}"] = calls_of(codec, inputs, outputs, turns)
        errors[f"ours {bits}"] = nmse(codec.decode(codec.encode(inputs[0])))
    for peer in found:
        codes = [peer.encode(x) for x in inputs]
        errors[peer.name] = nmse(peer.decode(codes[0]))
        calls[f"encode {peer.name}"] = rotating(peer.encode, inputs, turns=turns)
        calls[f"decode {peer.name}"] = rotating(peer.decode, codes, turns=turns)
    samples, others = watched(calls, repeats, settle=1)
    rows = []
    for peer in found:
        theirs = rate_of(peer.name, peer.bits_per_element, 4, elements, samples, others)
        ours = rate_of(f"ours {peer.bits}", standard(peer.bits).bits_per_element, 4, elements, samples, others)
        rows.append(Comparison(peer, theirs, errors[peer.name], ours, errors[ours.label]))
    return rows, missing
