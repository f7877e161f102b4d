"""What an optimizer keeps of a bucket of parameters between steps.

Numbers of a bucket lie in one flat vector, its parameters (or this rank's shards of them) one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tq.train.coded import NAMES, MomentCodecs

MOMENTS = ("m", "v")


class Store:
    """State of a bucket; m and v may lie there in few bits.

    done: steps of the bucket; steps: of each of its parameters, which may have joined later; tensors: flat, by name.
    lent: somebody may hold the codes, which mean nothing in another step: the next ones get memory of their own.
    fixed: the tensors stay where they are, as a graph wants it; what is lent are copies.
    """

    lent = fixed = False
    copies: dict[str, Tensor] | None = None  # what is lent of a fixed store while ``lent_once`` lasts

    def __init__(self, shapes: list[torch.Size], bits: tuple[int, int] | None) -> None:
        self.shapes, self.done, self.steps = shapes, 0, [0] * len(shapes)
        self.tensors: dict[str, Tensor] = {}
        self.sizes = [shape.numel() for shape in shapes]
        self.starts = starts_of(self.sizes)
        self.numel = sum(self.sizes)
        self.codecs = None if bits is None else MomentCodecs(bits)

    def get(self, name: str) -> Tensor | None:
        """A tensor of the state: the stored one itself if it is fp32, else decoded."""
        if name not in MOMENTS or self.codecs is None or not self.done:
            return self.tensors.get(name)
        return self.codecs.decode(name, self.tensors, self.numel, self.done)

    def commit(self, new: dict[str, Tensor]) -> None:
        """The state after a step, which ``new`` holds as far as it has changed."""
        if self.codecs is not None:
            for name in MOMENTS:
                new |= self.codecs.encode(name, new.pop(name), self.done + 1)
        self.renew(new)

    def room(self, device: torch.device) -> dict[str, Tensor]:
        """Tensors for m and v after the next step as they are kept: the present ones unless these are lent."""
        if self.codecs is None:
            zeros = (torch.zeros(self.numel, dtype=torch.float32, device=device) for _ in MOMENTS)
            return (
                {name: self.tensors[name] for name in MOMENTS} if self.done else dict(zip(MOMENTS, zeros, strict=True))
            )
        if self.lent or not self.done:
            return self.codecs.empty(self.numel, device)
        return {name: self.tensors[name] for name in NAMES}

    def fix(self, device: torch.device) -> None:
        """Lets the tensors stay where they are from now on, whose numbers are zero before the first step."""
        if not self.fixed:
            if self.lent:
                self.tensors = {name: x.clone() for name, x in self.tensors.items()}
            self.lent, self.fixed = False, True
            if not self.tensors:
                new = dict.fromkeys(MOMENTS) if self.codecs is None else self.codecs.empty(self.numel, device)
                zeros = torch.zeros(self.numel, dtype=torch.float32, device=device)
                self.tensors = {k: zeros.clone() if x is None else x.zero_() for k, x in new.items()}

    def take(self, done: int, steps: list[int], tensors: dict[str, Tensor]) -> None:
        """Takes over what another store of these shapes holds; what is fixed is written over."""
        self.done, self.steps = done, steps
        if not self.fixed:
            self.tensors = tensors
            return
        for name, x in self.tensors.items():
            x.copy_(tensors[name]) if tensors else x.zero_()

    def renew(self, new: dict[str, Tensor]) -> None:
        """A step was done; ``new``: what has changed, as it is kept."""
        self.done += 1
        self.tensors |= new
        self.lent = False

    def lend(self) -> dict[str, Tensor]:
        """The tensors, for somebody who keeps them."""
        if self.copies is not None:
            return self.copies
        if self.fixed:
            return {name: x.clone() for name, x in self.tensors.items()}
        self.lent = True
        return self.tensors

    def piece(self, name: str, number: int) -> Tensor:
        """m or v of one parameter, of its shape: a view, of codes where it lies in few bits (``CodedTensor``)."""
        start, shape = self.starts[number], self.shapes[number]
        if self.codecs is not None:
            return self.codecs.piece(name, self.lend(), start, shape, self.done)
        return self.lend()[name][start : start + self.sizes[number]].view(shape)

    def load(self, done: int, steps: list[int], tensors: dict[str, Tensor], device: torch.device) -> None:
        """Takes over a state of such a bucket; ValueError if it is not one."""
        self.done, self.steps = int(done), [int(step) for step in steps]
        self.tensors = {name: t.to(device, copy=True) for name, t in tensors.items()}
        try:
            found = {name: self.get(name) for name in MOMENTS} if done else {}
        except (KeyError, RuntimeError, ValueError) as error:
            raise ValueError(f"state of another optimizer: m and v cannot be decoded ({error})") from error
        numbers = {name: 0 if x is None else x.numel() for name, x in found.items()}
        if len(steps) != len(self.shapes) or any(count != self.numel for count in numbers.values()):
            raise ValueError(f"state of another optimizer: {numbers} in a bucket of {self.numel} numbers")

    def join(self, done: int, steps: list[int], pieces: dict[str, list[Tensor]], device: torch.device) -> None:
        """Takes over m and v of each parameter, of its shape. Codes of this very layout are kept to the bit, other
        numbers are coded anew where moments lie in few bits."""
        self.done, self.steps = done, steps
        if self.codecs is not None:
            joined = {name: self.codecs.joined(name, pieces[name], done) for name in MOMENTS}
            if joined["m"] is not None and joined["v"] is not None:
                self.tensors = {name: x.to(device) for name, x in {**joined["m"], **joined["v"]}.items()}
                return
        self.done = done - 1
        self.commit({name: torch.cat([x.to(device).float().reshape(-1) for x in pieces[name]]) for name in MOMENTS})

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


@contextmanager
def lent_once(stores: Sequence[Store]) -> Iterator[None]:
    """Meanwhile everybody is lent the same tensors, so that a store which lends copies makes one of each."""
    before = [store.copies for store in stores]
    for store in stores:
        store.copies = store.lend()
    try:
        yield
    finally:
        for store, copies in zip(stores, before, strict=True):
            store.copies = copies


class Run(NamedTuple):
    """A bucket: parameters of a group that go through together, and what is kept of them."""

    group: dict[str, Any]
    parameters: list[Tensor]
    store: Store


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Where each of them begins when they lie one after the other."""
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts
