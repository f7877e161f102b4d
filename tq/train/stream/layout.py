"""How the layers of a GPT lie in records of pages: a head, the weights, then both moments as they are kept.

A record is what comes and goes at once: a block, a run of rows of an embedding, or the gain of the last norm. Weights
stand first, so that a forward pass reads them and nothing else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tq.train.coded import MomentCodecs
from tq.train.model.gpt import Block, GPTConfig, RMSNorm
from tq.train.offload import ALIGN, PAGE
from tq.train.state import MOMENTS, Store

_HEAD = struct.Struct("<8sQQ")  # of a record: what it is, its number, steps done
_MAGIC = b"tqstream"


class Entry(NamedTuple):
    """A parameter's place in its record: bytes from ``start`` on; decayed: whether weight decay holds for it."""

    name: str
    shape: torch.Size
    start: int
    decayed: bool


class MomentStore(Store):
    """A ``Store`` whose tensors lie in a record's buffer, before the first step too, and stay there."""

    def room(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors themselves: a step changes them in place."""
        return dict(self.tensors)

    def place(self, new: dict[str, Tensor], views: dict[str, Tensor]) -> None:
        """Puts what a step made elsewhere into the buffer."""
        for name, view in views.items():
            if new[name].data_ptr() != view.data_ptr():
                view.copy_(new[name])
        self.tensors = views


class Record:
    """Layout of one record.

    nbytes: whole pages; weights_end: end of head and weights, likewise; runs: numbers of the parameters that share
    weight decay, whose moments lie in one store.
    """

    def __init__(self, shapes: dict[str, torch.Size], bits: tuple[int, int] | None, decayed: bool | None = None):
        self.bits = bits
        at = PAGE
        self.entries: list[Entry] = []
        for name, shape in shapes.items():
            self.entries.append(Entry(name, shape, at, len(shape) >= 2 if decayed is None else decayed))
            at += -(-4 * shape.numel() // ALIGN) * ALIGN
        self.numel = sum(e.shape.numel() for e in self.entries)
        self.weights_end = at = -(-at // PAGE) * PAGE
        kinds = ([i for i, e in enumerate(self.entries) if e.decayed is kind] for kind in (True, False))
        self.runs = [run for run in kinds if run]
        self._moments: list[dict[str, tuple[torch.dtype, torch.Size, int, int]]] = []
        for run in self.runs:
            parts = {}
            for name, x in self._like(sum(self.entries[i].shape.numel() for i in run)).items():
                parts[name] = (x.dtype, x.shape, at, at + x.nbytes)
                at += -(-x.nbytes // ALIGN) * ALIGN
            self._moments.append(parts)
        self.nbytes = -(-at // PAGE) * PAGE

    def _like(self, numel: int) -> dict[str, Tensor]:
        if self.bits is None:
            return {name: torch.empty(numel, device="meta") for name in MOMENTS}
        return MomentCodecs(self.bits).empty(numel, torch.device("cpu"))  # never touched, so no page is taken

    def weights(self, buffer: Tensor) -> list[Tensor]:
        """fp32 views of the parameters, in order."""
        return [buffer[e.start : e.start + 4 * e.shape.numel()].view(torch.float32).view(e.shape) for e in self.entries]

    def moments(self, buffer: Tensor, number: int) -> dict[str, Tensor]:
        """Views of what is kept of a run's moments."""
        parts = self._moments[number]
        return {name: buffer[start:end].view(dtype).view(shape) for name, (dtype, shape, start, end) in parts.items()}

    def stores(self, buffer: Tensor, done: int) -> Iterator[tuple[list[int], MomentStore, dict[str, Tensor]]]:
        """For each run its parameters, its moments after so many steps, and the views that they lie in."""
        for number, run in enumerate(self.runs):
            store, views = MomentStore([self.entries[i].shape for i in run], self.bits), self.moments(buffer, number)
            store.done, store.steps = done, [done] * len(run)
            store.tensors = dict(views)
            yield run, store, views

    @staticmethod
    def stamp(buffer: Tensor, number: int, done: int) -> None:
        """Writes into the head whose record this is, and after how many steps."""
        buffer[: _HEAD.size] = torch.frombuffer(bytearray(_HEAD.pack(_MAGIC, number, done)), dtype=torch.uint8)

    @staticmethod
    def check(buffer: Tensor, number: int, done: int) -> None:
        """ValueError unless the head says so."""
        magic, found, steps = _HEAD.unpack(bytes(buffer[: _HEAD.size].tolist()))
        if magic != _MAGIC or (found, steps) != (number, done):
            what = f"record {found} after step {steps}" if magic == _MAGIC else "something else"
            raise ValueError(f"the file of layers holds {what} where record {number} after step {done} should lie")


class Piece(NamedTuple):
    """Rows ``first`` to ``last`` of a resident parameter, with a record of their own."""

    name: str
    first: int
    last: int


class Model:
    """A GPT as records: ``blocks`` of one layout each, then ``pieces`` of what stays in memory during a step.

    names: of all parameters in the order of ``GPT.named_parameters``; resident: shapes of those outside the blocks.
    """

    def __init__(self, config: GPTConfig, bits: tuple[int, int] | None) -> None:
        self.config = config
        with torch.device("meta"):
            self.template, self.norm = Block(config), RMSNorm(config.hidden, config.norm_eps)
        self.shapes = {name: p.shape for name, p in self.template.named_parameters()}
        self.block = Record(self.shapes, bits)
        table = torch.Size((config.vocab, config.hidden))
        self.resident = {"embed.weight": table, "final_norm.weight": torch.Size((config.hidden,))}
        if not config.tie_embeddings:
            self.resident["head.weight"] = table
        rows = max(1, self.block.numel // config.hidden)
        self.pieces: list[tuple[Piece, Record]] = []
        for name, shape in self.resident.items():
            for first in range(0, shape[0], rows if len(shape) > 1 else shape[0]):
                last = min(shape[0], first + (rows if len(shape) > 1 else shape[0]))
                part = torch.Size((last - first, *shape[1:]))
                self.pieces.append((Piece(name, first, last), Record({name: part}, bits, len(shape) > 1)))
        self.records = [self.block] * config.layers + [record for _, record in self.pieces]

    @property
    def names(self) -> list[str]:
        blocks = [f"blocks.{layer}.{name}" for layer in range(self.config.layers) for name in self.shapes]
        ends = [name for name in ("final_norm.weight", "head.weight") if name in self.resident]
        return ["embed.weight", *blocks, *ends]

    def named_shapes(self) -> Iterator[tuple[str, torch.Size]]:
        """Name and shape of every parameter, in that order."""
        for name in self.names:
            inner = name.startswith("blocks.")
            yield name, self.shapes[name.split(".", 2)[2]] if inner else self.resident[name]

    @property
    def largest(self) -> int:
        """Bytes of the largest record."""
        return max(record.nbytes for record in self.records)

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(record.nbytes for record in self.records)

    def initial(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """The parameters as ``GPT(config, seed)`` has them, bit for bit, one after the other."""
        generator = torch.Generator("cpu").manual_seed(seed)
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, shape in self.named_shapes():
            x = torch.empty(shape)
            if x.ndim < 2:
                yield name, x.fill_(1.0)
            else:
                deep = name.endswith(("attention.out.weight", "mlp.down.weight"))
                yield name, x.normal_(0.0, residual if deep else 0.02, generator=generator)
