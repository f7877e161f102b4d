"""Plans for compiled models: where ``torch.compile`` cuts a step in two, each tensor that backward needs is kept,
coded or computed again, as costs the least time under a budget.

PyTorch's own knapsack (``activation_memory_budget``) does this for keeping and computing again, by FLOPs. Here each
operation was timed, and codes are a third way. No hook runs: encoding and decoding are operations of the two graphs.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tq.quant.codec import Code, Codec
from tq.quant.settings import int_in
from tq.systems.rematerialization import GAP, KEEP, Graph
from tq.train.planned import _torch_partition
from tq.train.planned._torch_partition import Parts
from tq.train.planned.joint import Clock, Joint, read_joint, seen_through
from tq.train.planned.plan import BITS, MIN_ELEMENTS, Plan, Priced, Prices

_CACHES = 64 << 20  # bytes that are written before each timing of a code
_steps: list[Iterator[int]] = []  # forward passes of each graph of this process
_codecs: list[Codec] = []  # by number


# Plain functions: what ``torch.library`` wraps around an operation takes as long as to encode a quarter of a million
# numbers when it comes between products, which leave little of the interpreter in the caches.


def next_step(graph: int) -> Tensor:
    """The number of a graph's forward pass, int64 on the host: no two passes rotate alike."""
    return torch.tensor(next(_steps[graph]))


def encode(x: Tensor, step: Tensor, codec: int, number: int) -> tuple[Tensor, Tensor]:
    """(payload, scales) of a tensor; number: of the tensor in its graph."""
    code = _codecs[codec].at_step(int(step) + (number << 32)).encode(x)
    return code.payload, code.scales


def decode(
    payload: Tensor, scales: Tensor, step: Tensor, codec: int, number: int, *, elements: int, dtype: torch.dtype
) -> Tensor:
    """What ``encode`` was given, near enough, in one dimension."""
    made = _codecs[codec].at_step(int(step) + (number << 32))
    return made.decode(Code._unchecked(made, (elements,), dtype, payload, scales, False))


class ColdPrices(Prices):
    """What codes cost between the operations of a step: with caches that hold other things."""

    def _timed(self, call: Callable[[], Any]) -> float:
        other = torch.zeros(_CACHES // 4, device=self.device)
        taken = []
        for _ in range(2 * self.repeats + 1):
            other.add_(1.0)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return median(taken[1:])


class PlannedBackend:
    """A backend of ``torch.compile`` whose steps hold no more for backward than a budget.

    Graphs run operation by operation, as eager code does: no code is generated. Without codes gradients are those of a
    compiled step that keeps all, bit for bit. Every operation of the model is timed when it is compiled, some seconds.

    Args:
        budget: share of what backward asks for, a float up to 1, or bytes (int); of each graph, where a model has many.
            Inputs of a graph are not counted: neither weights nor what one graph of a broken model hands the next.
        bits: widths, 1-8, that tensors may be coded in; empty codes nothing.
        noise: most that the relative squared errors of all coded tensors may add up to; None is no limit.
        codec: quantizer; its bits are ignored. None: blocks of 128, unbiased, bfloat16 scales.
        min_elements: smaller tensors are not coded.
        repeats: of every timing.
        progress: whether a bar shows the timing.
        clock: of another backend, whose timings serve here too; then ``repeats`` and ``progress`` are its own.

    Attributes:
        plans: a ``Plan`` for each graph that was compiled, in their order; ``print(plan)`` says in a line what it does.

    Raises:
        RuntimeError: this version of PyTorch cuts graphs in other ways.
        ValueError: while compiling: nothing fits the budget (the message says the least that would), or sizes are not
            known (pass ``dynamic=False`` to ``torch.compile``).

    References:
        Jain et al. 2020 (Checkmate); the partitioners of functorch, in PyTorch.
    Example:
        >>> import torch
        >>> from tq.train.planned.partition import PlannedBackend
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        >>> backend = PlannedBackend(0.5, bits=(), progress=False)
        >>> torch.compile(model, backend=backend)(torch.ones(256, 64)).sum().backward()
        >>> [(plan.bytes_before, plan.bytes_after) for plan in backend.plans]
        [(131072, 65536)]
    """

    def __init__(
        self,
        budget: int | float,
        *,
        bits: Collection[int] = BITS,
        noise: float | None = None,
        codec: Codec | None = None,
        min_elements: int = MIN_ELEMENTS,
        repeats: int = 5,
        progress: bool = True,
        clock: Clock | None = None,
    ) -> None:
        if (why := _torch_partition.missing()) is not None:
            raise RuntimeError(why)
        if isinstance(budget, bool) or not isinstance(budget, int | float):
            raise TypeError(f"budget must be a number of bytes or a share of them, got {budget!r}")
        if budget < 0 or isinstance(budget, float) and budget > 1:
            raise ValueError(f"budget must be an int of bytes, or a float between 0 and 1, got {budget!r}")
        if codec is not None and not isinstance(codec, Codec):
            raise TypeError(f"codec must be a tq.Codec or None, got {type(codec).__name__}")
        for width in bits:
            int_in("bits", width, 1, 8)
        int_in("min_elements", min_elements, 1, 2**63)
        self.codec = Codec(scale_dtype=torch.bfloat16) if codec is None else codec
        self.budget, self.noise = budget, noise
        self.bits, self.min_elements = tuple(sorted(set(bits))), min_elements
        int_in("repeats", repeats, 1, 1000)
        self.repeats, self.clock = repeats, Clock(repeats, progress) if clock is None else clock
        self.plans: list[Plan] = []
        self._backend = _torch_partition.plain_backend(self._partition)

    def __call__(self, graph: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        """What ``torch.compile`` calls with each graph."""
        run: Callable[..., Any] = self._backend(graph, inputs, **options)
        return run

    def _partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, static_lifetime_input_indices: Any = None,
        **options: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:  # fmt: skip
        parts = _torch_partition.joint_parts(joint, static_lifetime_input_indices, num_fwd_outputs)
        if any(map(_torch_partition.is_symbolic, joint.graph.nodes)):
            raise ValueError("sizes are not known while the model is compiled: pass dynamic=False to torch.compile")
        with _torch_partition.without_modes():
            read = read_joint(joint, parts, self.clock)
            plan = self._chosen(joint, read, self._priced(read), num_fwd_outputs)
        self.plans.append(plan)
        return _Divided(joint, parts, read, plan, num_fwd_outputs).graphs()

    def _chosen(self, joint: fx.GraphModule, read: Joint, priced: Priced, outputs: int) -> Plan:
        return priced.replanned(self.budget, noise=self.noise, gap=GAP)

    def _priced(self, read: Joint) -> Priced:
        trace, graph = read.trace, read.trace.graph
        device = next((node.meta["val"].device for node in read.nodes), torch.device("cpu"))
        prices = ColdPrices(self.codec, self.bits, self.min_elements, None, device, self.repeats)
        pairs = zip(graph.values, trace.kinds, strict=True)
        values = tuple(value._replace(ways=prices.ways(value.nbytes, kind)) for value, kind in pairs)
        return Priced(replace(trace, graph=Graph(values, graph.operations, graph.asks)), self.codec, None)


class _Saved(NamedTuple):
    """A value that is stored in codes. codec: its place in ``_codecs``; number: among those of its graph."""

    node: fx.Node
    codec: int
    number: int

    @property
    def like(self) -> Tensor:
        """Shape, strides and type, without memory."""
        like: Tensor = self.node.meta["val"]
        return like

    @property
    def code(self) -> tuple[Tensor, Tensor]:
        """Payload and scales, without memory."""
        codec, x = _codecs[self.codec], self.like
        blocks = codec.blocks((x.numel(),))
        payload = x.new_empty(blocks, codec.packed_bytes, dtype=torch.uint8)
        return payload, x.new_empty(blocks, dtype=codec.scale_dtype)


class _Divided:
    """The two graphs of a plan."""

    def __init__(self, joint: fx.GraphModule, parts: Parts, read: Joint, plan: Plan, outputs: int) -> None:
        stored = [read.nodes[value] for value in plan.choice.stored]
        self.cut = _torch_partition.cut(joint, [*parts.inputs, *stored], outputs)
        _check(self.cut.backward, parts, {read.operations[number].name for number in plan.choice.again})
        self.outputs, self.graph, self.coded = outputs, len(_steps), list[_Saved]()
        _steps.append(itertools.count())
        ways = {read.nodes[v].name: plan.trace.graph.values[v].ways[way].name for v, way in plan.choice.stored.items()}
        numbers: dict[Codec, int] = {}
        for node in self.cut.saved:
            if (codec := plan.codec_of(ways.get(node.name, KEEP))) is not None:
                if codec not in numbers:
                    numbers[codec] = len(_codecs)
                    _codecs.append(codec)
                self.coded.append(_Saved(node, numbers[codec], len(self.coded)))

    def graphs(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward, with encoding and decoding in them."""
        forward, backward, _ = self.cut
        if self.coded:
            self._encode(forward.graph)
            self._decode(backward.graph)
            for module in (forward, backward):
                module.graph.lint()
                module.recompile()
        return _torch_partition.in_order(forward, backward)

    def _encode(self, graph: fx.Graph) -> None:
        """The step, all scales, and in the place of each value its payload are what the forward graph saves."""
        nodes = {node.name: node for node in graph.nodes}
        output = graph.find_nodes(op="output")[0]
        results, scales = list(output.args[0]), []
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            step = graph.call_function(next_step, (self.graph,))
            step.meta["val"] = torch.empty((), dtype=torch.int64)
        for saved in self.coded:
            node = nodes[saved.node.name]
            with graph.inserting_before(node.next):
                turned = _called(graph, _ATEN.permute.default, node, _order(saved.like))
                flat = _called(graph, _ATEN.reshape.default, turned, [-1])
                code = graph.call_function(encode, (flat, step, saved.codec, saved.number))
                code.meta["val"] = saved.code
                payload, scale = (_called(graph, operator.getitem, code, place) for place in (0, 1))
            scales.append(scale)
            results[next(n for n in range(self.outputs, len(results)) if results[n] is node)] = payload
        results[self.outputs : self.outputs] = [step, *scales]
        output.args = (tuple(results),)
        names = output.meta["desc"]
        while len(names) < len(results):
            names.append(_torch_partition.described(len(names) - self.outputs))

    def _decode(self, graph: fx.Graph) -> None:
        """Takes what the forward graph saves, in the same order."""
        places = {node.name: node for node in graph.find_nodes(op="placeholder")}
        body = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(next(iter(places.values()))):
            step = _placed(graph, "activation_step", torch.empty((), dtype=torch.int64))
            scales = [_placed(graph, f"{saved.node.name}_scales", saved.code[1]) for saved in self.coded]
        for saved, scale in zip(self.coded, scales, strict=True):
            old, like = places[saved.node.name], saved.like
            with graph.inserting_before(old):
                codes = _placed(graph, f"{old.name}_codes", saved.code[0])
            with graph.inserting_before(body):
                given = codes, scale, step, saved.codec, saved.number
                flat = graph.call_function(decode, given, {"elements": like.numel(), "dtype": like.dtype})
                flat.meta["val"], order = like.new_empty(like.numel()), _order(like)
                x = _called(graph, _ATEN.view.default, flat, [like.shape[d] for d in order])
                x = _called(graph, _ATEN.permute.default, x, [order.index(d) for d in range(like.dim())])
            old.replace_all_uses_with(x)
            graph.erase_node(old)


_ATEN = torch.ops.aten


def _check(backward: fx.GraphModule, parts: Parts, again: set[str]) -> None:
    """What runs again is what the plan says, no more and no less."""
    forward = {node.name for node in parts.forward if node.target is not operator.getitem}
    runs = [n for n in backward.graph.nodes if n.op == "call_function" and seen_through(n) is None]
    found = {node.name for node in runs if node.name in forward}
    if found != again:
        raise RuntimeError(
            f"the graph of backward runs {sorted(found - again)} again, which the plan does not, and lacks "
            f"{sorted(again - found)}: please report this model"
        )


def _order(x: Tensor) -> list[int]:
    """Dimensions by how far apart their elements lie in memory, the farthest first."""
    stride, shape = x.stride(), x.shape
    return sorted(range(x.dim()), key=lambda d: (-stride[d], -shape[d]))


def _placed(graph: fx.Graph, name: str, like: Tensor) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = like
    return node


def _called(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    return node
