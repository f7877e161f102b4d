"""The step of a compiled model as a graph with costs: of the joint graph that AOTAutograd cuts in two.

What backward asks for, and what each operation takes to run again, stand in that graph before a step has run. Each kind
of operation is timed on this machine, with inputs of its shapes: PyTorch's own partitioner goes by FLOPs, for which an
elementwise operation is free.
"""

from __future__ import annotations

import logging
import operator
import re
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tq.systems.rematerialization import KEEP, Graph, Operation, Value, Way
from tq.train.planned._torch_partition import Parts
from tq.train.planned.steps import Signature
from tq.train.planned.trace import Kind, Trace, ties_of

#: Operations into which a gradient goes, and which bear what a codec adds: linear in what they read, or bounded in it.
TOLERANT = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "mul", "convolution_backward", "gelu_backward", "silu_backward", "mish_backward",
    "hardswish_backward", "softplus_backward", "native_layer_norm_backward", "_fused_rms_norm_backward",
    "native_group_norm_backward", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
})  # fmt: skip
_LINEAR = frozenset({"mul", "neg", "pow"})  # operations without a gradient whose readers decide; pow: by 1 or 2
_log = logging.getLogger(__name__)
_BLOCK = re.compile(r"\.(\d+)(?:\.|$)")


class Joint(NamedTuple):
    """A step that was never run.

    trace: as ``tq.train.planned.trace.trace_step`` makes one; nodes: of the graph, one for each value; operations: one
    for each operation.
    """

    trace: Trace
    nodes: tuple[fx.Node, ...]
    operations: tuple[fx.Node, ...]


class _Seen(NamedTuple):
    """As ``ties_of`` takes them. signature: with what may be done to the results."""

    signature: tuple[Signature, tuple[Any, ...]]
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


def repeatable(node: fx.Node, written: set[fx.Node]) -> bool:
    """Whether an operation gives the same again, and changes nothing. written: inputs that the step overwrites."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if target.namespace == "_c10d_functional" or any(memory_of(n) in written for n in node.all_input_nodes):
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
        self.known: dict[Any, float | None] = {}
        self.bar = tqdm(unit="operation", desc="timing", disable=not progress, dynamic_ncols=True)

    def __call__(self, node: fx.Node) -> float | None:
        """Seconds that a node's operation takes; None where it takes no inputs that are made up."""
        key = node.target, _described(node.args), _described(node.kwargs)
        if key not in self.known:
            self.known[key] = self._timed(node)
            self.bar.update()
        return self.known[key]

    def _timed(self, node: fx.Node) -> float | None:
        for index in (1, 0):  # ones divide, and zeros are places in every table
            try:
                return self._seconds(node, index)
            except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
                why = error
        _log.warning("%s could not be timed, so it is not run again: %s", node.target, why)
        return None

    def _seconds(self, node: fx.Node, index: int) -> float:
        call: Callable[..., Any] = node.target  # type: ignore[assignment]
        taken = []
        for turn in range(self.repeats + 1):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _made_up(n.meta.get("val"), index))
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


def _made_up(like: Any, index: int) -> Any:
    """Memory of the same shape, probabilities or an index in it; views that repeat elements do so too."""
    if isinstance(like, tuple | list):
        return type(like)(_made_up(x, index) for x in like)
    if not isinstance(like, Tensor):
        return like
    span = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True)) if like.numel() else 0
    if like.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        memory = torch.empty(span, dtype=like.dtype, device=like.device)
        memory.uniform_(0.1, 0.9, generator=torch.Generator(like.device).manual_seed(0))
    else:
        memory = torch.full((span,), index, device=like.device).to(like.dtype)
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


def _bears(node: fx.Node, parts: Parts) -> bool:
    """Whether whatever backward does with a result bears that it comes back changed."""
    for reader, dimensions in _readers(node, parts.forward):
        name = name_of(reader)
        if reader not in parts.gradients:
            if name not in _LINEAR or name == "pow" and reader.args[1] not in (1, 2) or not _bears(reader, parts):
                return False
            continue
        widest = max(x.dim() for source in reader.all_input_nodes for x in tensors(source))
        if name not in TOLERANT or dimensions < widest and ("norm" in name or "attention" in name):
            return False
    return True


def _tolerant(node: fx.Node, parts: Parts) -> bool:
    """Whether a value may be coded. Statistics of rows never are. What backward does not read itself may be: what is
    computed again from it then bears the noise, or the program may not choose so."""
    (x,) = tensors(node)
    return x.dim() > 0 and x.shape[-1] > 1 and is_dense(x) and _bears(node, parts)


def block_of(node: fx.Node) -> int:
    """The first number in the name of the module that a node belongs to; -1 without one."""
    for name, _ in reversed((node.meta.get("nn_module_stack") or {}).values()):
        if found := _BLOCK.search(name):
            return int(found[1])
    return -1


def read_joint(joint: fx.GraphModule, parts: Parts, clock: Clock) -> Joint:
    """A joint graph as a trace whose values can all be kept, and nothing else.

    Args:
        joint: as AOTAutograd gives it to a partitioner; sizes are numbers.
        parts: of it.
        clock: times the operations.
    """
    found = _Reading(parts, clock)
    for node in joint.graph.nodes:
        if node.op == "call_function" and seen_through(node) is None:  # a view has no memory and no number
            found.read(node)
    clock.bar.refresh()
    asked = {n for _, n in found.asks}
    nodes: dict[fx.Node, int] = {}
    asks = tuple((nodes.setdefault(reader, len(nodes)), value) for reader, value in found.asks)
    blocks = [block_of(node) for node in found.operations]
    values = tuple(
        Value(nbytes, (Way(KEEP, nbytes),), n in asked, by, blocks[by], n in asked and not kind.tolerant)
        for n, (nbytes, by, kind) in enumerate(zip(found.nbytes, found.made_by, found.kinds, strict=True))
    )
    operations = tuple(map(Operation, found.again, found.sources))
    graph = Graph(values, operations, asks)
    uses = [tuple((values[v].asked, found.kinds[v].tolerant) for v in made) for made in graph.made]
    seen = [
        _Seen((signature, use), seconds is not None, block)
        for signature, use, seconds, block in zip(found.signatures, uses, found.again, blocks, strict=True)
    ]
    trace = Trace(
        graph, tuple(found.signatures), tuple(found.kinds), ties_of(seen), found.forward_s, found.backward_s
    )
    return Joint(trace, tuple(found.nodes), tuple(found.operations))


class _Reading:
    """What is read of a joint graph, node by node."""

    def __init__(self, parts: Parts, clock: Clock) -> None:
        self.parts, self.clock = parts, clock
        self.number_of: dict[fx.Node, int] = {}  # of an operation
        self.value_of: dict[fx.Node, int] = {}
        self.nodes: list[fx.Node] = []
        self.operations: list[fx.Node] = []
        self.signatures: list[Signature] = []
        self.sources: list[tuple[int, ...]] = []
        self.again: list[float | None] = []  # seconds to run an operation again
        self.made_by: list[int] = []
        self.nbytes: list[int] = []
        self.kinds: list[Kind] = []
        self.asks: list[tuple[fx.Node, int]] = []
        self.forward_s = self.backward_s = 0.0

    def read(self, node: fx.Node) -> None:
        """A part of a result has the number of its operation."""
        if node not in self.parts.forward:
            self.backward_s += self._seconds(node) or 0.0
            for source in map(memory_of, node.all_input_nodes):
                if source in self.value_of:
                    self.asks.append((node, self.value_of[source]))
        elif node.target is operator.getitem:
            self._value(node, self.number_of[node.args[0]])  # type: ignore[index]
        else:
            self._operation(node)

    def _operation(self, node: fx.Node) -> None:
        number = self.number_of[node] = len(self.operations)
        shapes = tuple(tuple(x.shape) for n in (*node.all_input_nodes, node) for x in tensors(n))
        seconds, read = self._seconds(node), dict.fromkeys(map(memory_of, node.all_input_nodes))
        self.operations.append(node)
        self.signatures.append(Signature(str(node.target), shapes))
        self.sources.append(tuple(self.value_of[m] for m in read if m in self.value_of))
        self.again.append(seconds if repeatable(node, self.parts.written) else None)
        self.forward_s += seconds or 0.0
        self._value(node, number)

    def _seconds(self, node: fx.Node) -> float | None:
        target = node.target
        plain = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
        return self.clock(node) if plain and target.namespace != "_c10d_functional" else None  # type: ignore[union-attr]

    def _value(self, node: fx.Node, number: int) -> None:
        x = node.meta.get("val")
        if isinstance(x, Tensor):
            self.value_of[node] = len(self.nodes)
            self.nodes.append(node)
            self.made_by.append(number)
            self.nbytes.append(x.numel() * x.element_size())
            self.kinds.append(Kind(x.dtype, x.numel(), _tolerant(node, self.parts)))
