"""Runs a step as a plan says: each value is kept, coded, offloaded or computed again when backward asks for it.

What runs again is what PyTorch ran, operation by operation below autograd, on the same inputs: the same bits come out.
It runs once, and is held until its last use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tq.quant.codec import Code
from tq.train._torch_private import storage, version
from tq.train.planned._torch_private import in_backward, running_node, sequence_number
from tq.train.planned.offloading import Away, Place
from tq.train.planned.steps import Made, Steps, flat, name_of, replaced, tensors_in

if TYPE_CHECKING:
    from tq.train.planned.plan import Plan


class Usage:
    """Bytes that one forward pass keeps for backward, and what of it is there.

    Attributes:
        stored: bytes stored in the forward pass, codes and offloaded tensors at their size there.
        held: bytes there now, what was computed again or decoded among them; most: the most at once in backward.
        ran_again: operations that ran again.
    """

    def __init__(self) -> None:
        self.stored = self.held = self.most = self.ran_again = 0

    def add(self, nbytes: int) -> None:
        self.held += nbytes

    def seen(self) -> None:
        self.most = max(self.most, self.held)


class _Held(NamedTuple):
    """A tensor kept as it is, and its version then: hooks take over autograd's own check."""

    tensor: Tensor
    version: int

    def get(self) -> Tensor:
        if (now := version(self.tensor)) != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that backward needs was changed in place after it was "
                f"saved: it is at version {now}, expected version {self.version}"
            )
        return self.tensor


class _View(NamedTuple):
    """How a tensor lies in its value."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> _View:
        return cls(x.shape, x.stride(), int(x.storage_offset()), x.dtype)

    def on(self, memory: Tensor) -> Tensor:
        memory = memory if memory.dtype == self.dtype else memory.view(self.dtype)
        return memory.as_strided(self.shape, self.stride, memory.storage_offset() + self.offset)


class _Value:
    """What is known of one value of this pass: where it is stored, or how it is made again."""

    __slots__ = ("__weakref__", "again", "cached", "left", "nbytes", "stored", "usage", "uses", "watched")

    def __init__(self, usage: Usage, uses: int) -> None:
        self.usage, self.uses, self.left = usage, uses, uses
        self.stored: _Held | Code | Away | None = None
        self.watched: _Held | None = None
        self.again: _Again | None = None
        self.cached: Tensor | None = None
        self.nbytes = 0  # stored

    def put(self, stored: _Held | Code | Away, nbytes: int) -> None:
        self.stored, self.nbytes = stored, nbytes
        self.usage.stored += nbytes
        self.usage.add(nbytes)

    def take(self) -> Tensor:
        """The memory of the value, flat. Whoever took it calls ``release`` when it is done."""
        if isinstance(self.stored, _Held):
            if self.watched is not None:
                self.watched.get()
            return self.stored.tensor
        if self.left <= 0:  # another pass over a graph that was retained
            self.left = self.uses
        if self.cached is None:
            self._make()
        assert self.cached is not None
        self.left -= 1
        return self.cached

    def release(self) -> None:
        """Let go what nobody will ask for again."""
        if self.left <= 0:
            self._forget()

    def _make(self) -> None:
        if isinstance(self.stored, Code):
            self.hold(self.stored.codec.decode(self.stored))
        elif isinstance(self.stored, Away):
            self.hold(self.stored.read())
        elif self.again is not None:
            self.again.run()
        else:
            raise RuntimeError("backward asks for a tensor that it did not ask for when the step was traced")

    def hold(self, memory: Tensor) -> None:
        self.cached = memory
        self.usage.add(memory.nbytes)

    def _forget(self) -> None:
        if self.cached is not None:
            self.usage.add(-self.cached.nbytes)
            self.cached = None

    def __del__(self) -> None:
        self._forget()
        self.usage.add(-self.nbytes)


class _Input(NamedTuple):
    """An argument of an operation that runs again: a view of a value, or what somebody else holds."""

    value: _Value | None
    view: _View | None
    held: _Held | None


class _Again:
    """An operation that runs again, and the values that it makes."""

    def __init__(self, func: Any, args: Any, kwargs: Any, usage: Usage) -> None:
        self.func, self.args, self.kwargs, self.usage = func, args, kwargs, usage
        self.made: list[tuple[Callable[[], _Value | None], int]] = []  # weak references

    def run(self) -> None:
        """Makes all values that are asked for and are not there."""
        memories: dict[int, Tensor] = {}
        sources = list({id(x.value): x.value for x in _inputs((self.args, self.kwargs)) if x.value}.values())
        for source in sources:
            memories[id(source)] = source.take()
        changed = {-1 - place for _, place in self.made if place < 0}
        given: list[Tensor] = []

        def tensor(x: _Input) -> Tensor:
            if x.value is None:
                assert x.held is not None
                found = x.held.get()
            else:
                assert x.view is not None
                memory = memories[id(x.value)]
                found = x.view.on(memory.clone() if len(given) in changed else memory)
            given.append(found)
            return found

        args, kwargs = _filled(self.args, tensor), _filled(self.kwargs, tensor)
        device = given[0].device.type if given else "cpu"
        cast_off = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
        with torch.no_grad(), cast_off:
            results = list(tensors_in(self.func(*args, **kwargs)))
        self.usage.ran_again += 1
        for reference, place in self.made:
            value = reference()
            if value is not None and value.stored is None and value.cached is None and value.left > 0:
                value.hold(flat(results[place] if place >= 0 else given[-1 - place]))
        self.usage.seen()
        for source in sources:
            source.release()


def _inputs(tree: Any) -> list[_Input]:
    if isinstance(tree, _Input):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [x for part in tree for x in _inputs(part)]


def _filled(tree: Any, by: Callable[[_Input], Tensor]) -> Any:
    if isinstance(tree, _Input):
        return by(tree)
    if isinstance(tree, list | tuple):
        return type(tree)([_filled(part, by) for part in tree])
    if isinstance(tree, dict):
        return {key: _filled(part, by) for key, part in tree.items()}
    return tree


class _Saved(NamedTuple):
    """What autograd holds in the place of a tensor."""

    value: _Value
    view: _View


class Planned(Steps):
    """Follows a forward pass, and stores what the plan says at the moment that it is made."""

    def __init__(self, plan: Plan, step: int, place: Place | None) -> None:
        super().__init__()
        self.plan, self.step, self.place, self.usage = plan, step, place, Usage()
        self.planned: dict[int, _Value] = {}
        self.kept: list[tuple[_Value, Tensor]] = []
        self.given: list[_Value] = []  # to the node of backward that runs
        self.node, self.beyond = -1, False

    def on_values(
        self, number: int, func: Any, args: Any, kwargs: Any, sources: tuple[int, ...], made: list[Made]
    ) -> None:
        signatures = self.plan.trace.signatures
        if number >= len(signatures):  # backward begins, or a step that is longer, as ``pack`` will see
            self.beyond = True
            return
        name, shapes = signatures[number]
        if name != name_of(func) or shapes[-len(made) :] != tuple(tuple(m.tensor.shape) for m in made):
            raise RuntimeError(
                f"operation {number} of this step is {name_of(func)}, the traced step had {name}"
                f"{' with other shapes' if name == name_of(func) else ''}: a plan serves steps that make what the "
                "traced one made, on batches of its shape"
            )
        again: _Again | None = None
        if number in self.plan.choice.again:
            again = _Again(func, *self._inputs(args, kwargs, made), self.usage)
        if again is None and not any(self.plan.uses[m.value] for m in made):
            return
        for value, place, tensor, _ in made:
            if uses := self.plan.uses[value]:
                found = self.planned[value] = _Value(self.usage, uses)
                if value in self.plan.choice.stored:
                    self._store(value, found, tensor)
                elif again is not None:
                    found.again = again
                    again.made.append((weakref.ref(found), place))
            elif again is not None and place < 0:
                again.made.append((_nothing, place))

    def _inputs(self, args: Any, kwargs: Any, made: list[Made]) -> tuple[Any, Any]:
        """The arguments as they can be had again. One that was written to is the value that was there before."""
        before = {storage(m.tensor): m.before for m in made if m.place < 0}

        def remembered(x: Tensor) -> Any:
            value = before.get(storage(x), self.value_of(x))
            if value is None:
                return _Input(None, None, _Held(x, version(x)))
            return _Input(self.planned[value], _View.of(x), None)

        return replaced(args, remembered), replaced(kwargs, remembered)

    def _store(self, number: int, value: _Value, tensor: Tensor) -> None:
        way = self.plan.trace.graph.values[number].ways[self.plan.choice.stored[number]]
        memory = flat(tensor)
        codec = self.plan.codec_of(way.name)
        if codec is not None:
            code = codec.derive("activation", number).at_step(self.step).encode(memory)
            value.put(code, code.nbytes)
        elif self.place is not None and way.name == self.place.name:
            value.put(self.place.write(memory), 0)
        else:
            value.put(_Held(memory, version(memory)), memory.nbytes)
            self.kept.append((value, tensor))

    def pack(self, tensor: Tensor) -> _Saved | _Held:
        """Hook of autograd."""
        if self.beyond and not in_backward():
            raise RuntimeError(
                f"this step saves tensors after the {len(self.plan.trace.signatures)} operations of the traced one: "
                "a plan serves one forward pass; enter the context anew for each"
            )
        number = self.value_of(tensor)
        if number is None or type(tensor) not in (Tensor, torch.nn.Parameter):
            return _Held(tensor, version(tensor))
        value = self.planned.get(number)
        return _Saved(value or _Value(self.usage, 1), _View.of(tensor))

    def unpack(self, saved: _Saved | _Held) -> Tensor:
        """Hook of autograd, the inverse of ``pack``."""
        self.end()
        if isinstance(saved, _Held):
            return saved.get()
        node = running_node()
        number = -1 if node is None else sequence_number(node)
        if number != self.node:
            while self.given:
                self.given.pop().release()
            self.node = number
        memory = saved.value.take()
        self.usage.seen()
        self.given += [saved.value] if saved.value.left <= 0 and saved.value.cached is not None else []
        return saved.view.on(memory)

    def end(self) -> None:
        """The forward pass is over: what is planned belongs to the graph alone.

        Below autograd an alias does not share the version of its tensor, so what is kept is only watched from here on;
        what the pass itself writes over is another value.
        """
        for value, tensor in self.kept:
            value.watched = _Held(tensor.detach(), version(tensor))
        self.kept.clear()
        self.planned.clear()
        self.known.clear()


def _nothing() -> None:
    return None


class PlannedActivations:
    """Context in which the forward pass keeps what a plan says; ``compress_activations(plan=...)`` makes it.

    ``with`` gives the ``Usage`` of the forward pass. One object serves a whole run, one forward pass at a time;
    backward may run inside or after it, and more than once with ``retain_graph``. Each forward pass has other
    rotations.
    """

    def __init__(self, plan: Plan, step: int = 0) -> None:
        self.plan, self.step = plan, step
        self.place = None if plan.offload is None else Place(plan.offload)
        self._entered: tuple[Planned, ExitStack] | None = None

    def __enter__(self) -> Usage:
        if self._entered is not None:
            raise RuntimeError("this context is entered already; leave it after each forward pass")
        planned = Planned(self.plan, self.step, self.place)
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(planned)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(planned.pack, planned.unpack))
            self._entered = planned, stack.pop_all()
        return planned.usage

    def __exit__(self, *raised: Any) -> None:
        assert self._entered is not None
        (planned, stack), self._entered = self._entered, None
        done = planned.operations
        planned.end()
        self.step += 1
        stack.__exit__(*raised)
        expected = len(self.plan.trace.signatures)
        if raised[:1] == (None,) and 0 < done < expected and torch.is_grad_enabled():
            raise RuntimeError(
                f"the context was left after {done} of {expected} traced operations: the loss that was traced belongs "
                "into it as well"
            )


