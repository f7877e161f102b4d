"""Numbers the operations of a forward pass that make values, so that two passes can be laid side by side.

A value is a storage: views of it are the same value, and an operation that writes in place makes a new one. Views make
none and have no number. What runs while autograd is in backward, as a checkpointed part does again, has no number
either. Parameters, buffers and inputs are made by nobody here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tq.train._torch_private import DispatchMode, storage
from tq.train.planned import _torch_private

PLAIN = (Tensor, torch.nn.Parameter)


class Made(NamedTuple):
    """A value that an operation made. place: of the tensor among the results, or -1 - its place among the arguments;
    before: the value that was written over there."""

    value: int
    place: int
    tensor: Tensor
    before: int | None


class Signature(NamedTuple):
    """What an operation must have in common with that of the same number in another pass."""

    name: str
    shapes: tuple[tuple[int, ...], ...]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Tensors among arguments or results, in order; lists within them included."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from tensors_in(part)
    elif isinstance(tree, Mapping):
        for part in tree.values():
            yield from tensors_in(part)


def replaced(tree: Any, by: Any) -> Any:
    """The same arguments with ``by(tensor)`` in the place of every tensor."""
    if isinstance(tree, Tensor):
        return by(tree)
    if isinstance(tree, list | tuple):
        return type(tree)([replaced(part, by) for part in tree])
    if isinstance(tree, dict):
        return {key: replaced(part, by) for key, part in tree.items()}
    return tree


@cache
def name_of(operation: Any) -> str:
    return str(operation)


_written = cache(_torch_private.written)


@cache
def _random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


def flat(tensor: Tensor) -> Tensor:
    """All of the memory in which a tensor lies, in the order of the memory; outside of the graph."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0)


class Steps(DispatchMode):
    """Sees every operation below autograd; ``on_values`` is told of those that make values."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.values = 0
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}  # values by their storage, while it is alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _torch_private.in_backward():
            return func(*args, **kwargs)
        if foreign := [kind for kind in types if kind not in PLAIN]:
            raise TypeError(
                f"a planned step takes plain tensors, got {foreign[0].__module__}.{foreign[0].__qualname__} in "
                f"{name_of(func)}: sharded and other wrapped tensors have no memory that a plan could hold"
            )
        result = func(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        sources = tuple(dict.fromkeys(v for v in map(self.value_of, given) if v is not None))
        if made := self._made(func, args, kwargs, given, result):
            number, self.operations = self.operations, self.operations + 1
            self.on_values(number, func, args, kwargs, sources, made)
        return result

    def _made(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], result: Any) -> list[Made]:
        made, seen = [], {storage(x) for x in given}
        for place, x in enumerate(tensors_in(result)):
            if (key := storage(x)) not in seen:
                seen.add(key)
                made.append(self._new(x, place))
        changed: set[int] = set()
        for place, x in self._changed(func, args, kwargs, given):
            if self.value_of(x) is not None and storage(x) not in changed:  # else somebody else holds it
                changed.add(storage(x))
                made.append(self._new(x, -1 - place))
        return made

    @staticmethod
    def _changed(func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> list[tuple[int, Tensor]]:
        if not (names := _written(func)):
            return []
        all_names = _torch_private.argument_names(func)
        named = dict(zip(all_names, args, strict=False)) | kwargs
        changed = {id(x) for name in names for x in tensors_in(named.get(name))}
        return [(place, x) for place, x in enumerate(given) if id(x) in changed]

    def _new(self, tensor: Tensor, place: int) -> Made:
        before = self.value_of(tensor) if place < 0 else None
        number, self.values = self.values, self.values + 1
        self.known[storage(tensor)] = StorageWeakRef(tensor.untyped_storage()), number
        return Made(number, place, tensor, before)

    def value_of(self, tensor: Tensor) -> int | None:
        """The number of the value that lies in a tensor's storage now; None for what no operation here made."""
        found = self.known.get(storage(tensor))
        return None if found is None else found[1]

    def on_values(
        self, number: int, func: Any, args: Any, kwargs: Any, sources: tuple[int, ...], made: list[Made]
    ) -> None:  # fmt: skip
        """Told of every operation that made values."""
        raise NotImplementedError


def repeatable(func: Any, args: Any, kwargs: Any, value_of: Any) -> bool:
    """Whether an operation gives the same again, and changes nothing that others hold."""
    names = _torch_private.argument_names(func)
    named = dict(zip(names, args, strict=False)) | kwargs
    if _random(func) and ("dropout_p" not in names or named.get("dropout_p", 0.0) != 0.0):
        return False
    if any(x.is_conj() or x.is_neg() or x.layout != torch.strided for x in tensors_in((args, kwargs))):
        return False
    changed = [x for name in _written(func) for x in tensors_in(named.get(name))]
    return all(value_of(x) is not None for x in changed)
