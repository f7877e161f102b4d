"""The step of a compiled model as a graph with costs: of the joint graph that AOTAutograd cuts in two.

What backward asks for, and what each operation takes to run again, stand in that graph before a step has run. Each kind
of operation is timed on this machine, with inputs of its shapes: PyTorch's own partitioner goes by FLOPs, for which an
elementwise operation is free.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tq.systems.rematerialization import KEEP, Graph, Operation, Value, Way
from tq.train.planned.steps import Signature
from tq.train.planned.trace import Kind, Trace, ties_of

#: Operations of backward that bear what a codec adds: gradients are linear in what they read, or bounded in it.
TOLERANT = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "convolution_backward", "gelu_backward", "silu_backward", "mish_backward",
    "hardswish_backward", "softplus_backward", "mul", "native_layer_norm_backward", "_fused_rms_norm_backward",
    "native_group_norm_backward", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
})  # fmt: skip
_SQUARED = (1, 2)  # exponents under which an error stays in proportion
_BLOCK = re.compile(r"\.(\d+)(?:\.|$)")


class Joint(NamedTuple):
    """A step that was never run.

    trace: as ``tq.train.planned.trace.trace_step`` makes one; nodes: of the graph, one for each value.
    """

    trace: Trace
    nodes: tuple[fx.Node, ...]


class _Seen(NamedTuple):
    signature: Signature
    sources: tuple[int, ...]
    repeatable: bool
    block: int


def name_of(node: fx.Node) -> str:
    """Of an operation: "mm" of ``aten.mm.default``."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name).rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def seen_through(node: fx.Node) -> fx.Node | None:
    """The node whose memory a view shows; None for what has memory of its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return seen_through(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    returns = node.target._schema.returns
    view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    return node.args[0] if view or name_of(node) == "_unsafe_view" else None  # type: ignore[return-value]


def memory_of(node: fx.Node) -> fx.Node:
    """The node that made the memory in which a node's result lies."""
    while (before := seen_through(node)) is not None:
        node = before
    return node


def tensors(node: fx.Node) -> list[Tensor]:
    """What a node makes, without memory behind it."""
    made = node.meta.get("val")
    return [x for x in (made if isinstance(made, tuple | list) else (made,)) if isinstance(x, Tensor)]


def repeatable(node: fx.Node) -> bool:
    """Whether an operation gives the same again, and changes nothing."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if node.meta.get("recompute") is torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE:
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return True
    names = [argument.name for argument in target._schema.arguments]
    named = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" in names and bool(named.get("dropout_p", 0.0) == 0.0)


def is_dense(x: Tensor) -> bool:
    """Whether a tensor fills its memory, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and int(stride) != expected:
            return False
        expected *= size
    return True


class Clock:
    """Times operations once for each kind and shapes of inputs, which it makes itself.

    Args:
        repeats: of each timing, of which the median counts; the first call, before them, warms up.
        progress: whether a bar counts the kinds.
    """

    def __init__(self, repeats: int, progress: bool) -> None:
        from tqdm import tqdm

        self.repeats = repeats
        self.known: dict[Any, float] = {}
        self.bar = tqdm(unit="operation", desc="timing", disable=not progress, dynamic_ncols=True)

    def __call__(self, node: fx.Node) -> float:
        """Seconds that a node's operation takes."""
        key = node.target, _described(node.args), _described(node.kwargs)
        if key not in self.known:
            self.known[key] = self._timed(node)
            self.bar.update()
        return self.known[key]

    def _timed(self, node: fx.Node) -> float:
        call: Callable[..., Any] = node.target  # type: ignore[assignment]
        taken = []
        for turn in range(self.repeats + 1):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _made_up(n.meta["val"]))
            _wait()
            start = time.perf_counter()
            call(*args, **kwargs)
            _wait()
            if turn:
                taken.append(time.perf_counter() - start)
        return median(taken)


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _described(argument: Any) -> Any:
    """A key of an argument: a tensor by its shape, another by what it says."""
    if isinstance(argument, fx.Node):
        return tuple((tuple(x.shape), x.stride(), x.dtype, str(x.device)) for x in tensors(argument))
    if isinstance(argument, list | tuple):
        return tuple(map(_described, argument))
    if isinstance(argument, dict):
        return tuple((key, _described(value)) for key, value in argument.items())
    return repr(argument)


def _made_up(like: Any) -> Any:
    """Memory of the same shape, normal numbers or zeros in it; views that repeat elements do so too."""
    if isinstance(like, tuple | list):
        return type(like)(map(_made_up, like))
    if not isinstance(like, Tensor):
        return like
    span = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True)) if like.numel() else 0
    memory = torch.zeros(span, dtype=like.dtype, device=like.device)
    if like.dtype.is_floating_point:
        memory.normal_(generator=torch.Generator(like.device).manual_seed(0))
    return memory.as_strided(like.shape, like.stride())


def _readers(node: fx.Node, forward: set[fx.Node]) -> Iterator[tuple[fx.Node, int]]:
    """Operations of backward that read a value, through any views of it, and the dimensions in which they see it."""
    for user in node.users:
        if user.op == "output":
            continue
        if seen_through(user) is not None:
            yield from _readers(user, forward)
        elif user not in forward:
            yield user, max((x.dim() for x in tensors(node)), default=0)


def _tolerant(x: Tensor, readers: list[tuple[fx.Node, int]]) -> bool:
    """Whether what backward does with a value bears that it comes back changed. Statistics of rows never do."""
    if x.dim() == 0 or x.shape[-1] == 1 or not is_dense(x):
        return False
    for reader, dimensions in readers:
        name = name_of(reader)
        if name not in TOLERANT and not (name == "pow" and reader.args[1] in _SQUARED):
            return False
        widest = max(other.dim() for node in reader.all_input_nodes for other in tensors(node))
        if dimensions < widest and ("norm" in name or "attention" in name):
            return False
    return bool(readers)


def block_of(node: fx.Node) -> int:
    """The first number in the name of the module that a node belongs to; -1 without one."""
    for name, _ in reversed((node.meta.get("nn_module_stack") or {}).values()):
        if found := _BLOCK.search(name):
            return int(found[1])
    return -1


def read_joint(joint: fx.GraphModule, forward: set[fx.Node], clock: Clock) -> Joint:
    """A joint graph as a trace whose values can all be kept, and nothing else.

    Args:
        joint: as AOTAutograd gives it to a partitioner; sizes are numbers.
        forward: its nodes that the results of the forward pass need.
        clock: times the operations.
    """
    found = _Reading(forward, clock)
    for node in joint.graph.nodes:
        if node.op == "call_function":
            found.read(node)
    clock.bar.close()
    asked = {n for _, n in found.asks}
    nodes: dict[fx.Node, int] = {}
    asks = tuple((nodes.setdefault(reader, len(nodes)), value) for reader, value in found.asks)
    values = tuple(
        Value(nbytes, (Way(KEEP, nbytes),), n in asked, by, found.seen[by].block, n in asked and not kind.tolerant)
        for n, (nbytes, by, kind) in enumerate(zip(found.nbytes, found.made_by, found.kinds, strict=True))
    )
    operations = tuple(
        Operation(seconds if seen.repeatable else None, seen.sources)
        for seen, seconds in zip(found.seen, found.seconds, strict=True)
    )
    graph = Graph(values, operations, asks)
    signatures = tuple(seen.signature for seen in found.seen)
    trace = Trace(graph, signatures, tuple(found.kinds), ties_of(found.seen), sum(found.seconds), found.backward_s)
    return Joint(trace, tuple(found.nodes))


class _Reading:
    """What is read of a joint graph, node by node."""

    def __init__(self, forward: set[fx.Node], clock: Clock) -> None:
        self.forward, self.clock = forward, clock
        self.number_of: dict[fx.Node, int] = {}  # of an operation
        self.value_of: dict[fx.Node, int] = {}
        self.nodes: list[fx.Node] = []
        self.seen: list[_Seen] = []
        self.seconds: list[float] = []
        self.made_by: list[int] = []
        self.nbytes: list[int] = []
        self.kinds: list[Kind] = []
        self.asks: list[tuple[fx.Node, int]] = []
        self.backward_s = 0.0

    def read(self, node: fx.Node) -> None:
        """A view has no memory and no number; a part of a result has that of its operation."""
        timed = isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable
        if seen_through(node) is not None:
            return
        if node not in self.forward:
            self._asked(node)
            self.backward_s += self.clock(node) if timed else 0.0
        elif node.target is operator.getitem:
            if node.args[0] in self.number_of:
                self._value(node, self.number_of[node.args[0]])  # type: ignore[index]
        else:
            number = self.number_of[node] = len(self.seen)
            shapes = tuple(tuple(x.shape) for n in (*node.all_input_nodes, node) for x in tensors(n))
            read = dict.fromkeys(map(memory_of, node.all_input_nodes))
            sources = tuple(self.value_of[m] for m in read if m in self.value_of)
            self.seen.append(_Seen(Signature(str(node.target), shapes), sources, repeatable(node), block_of(node)))
            self.seconds.append(self.clock(node) if timed else 0.0)
            if isinstance(node.meta.get("val"), Tensor):
                self._value(node, number)

    def _value(self, node: fx.Node, number: int) -> None:
        (x,) = tensors(node)
        self.value_of[node] = len(self.nodes)
        self.nodes.append(node)
        self.made_by.append(number)
        self.nbytes.append(x.numel() * x.element_size())
        self.kinds.append(Kind(x.dtype, x.numel(), _tolerant(x, [*_readers(node, self.forward)])))

    def _asked(self, reader: fx.Node) -> None:
        for node in map(memory_of, reader.all_input_nodes):
            if node in self.value_of:
                self.asks.append((reader, self.value_of[node]))
