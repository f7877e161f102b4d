"""What one training step makes, what backward asks for and when, and what each operation takes to run again.

Refused: steps whose tensors are wrapped (DTensor, so FSDP2 and tensor parallelism) and compiled models, whose products
have no operations that could be seen. Parts under ``torch.utils.checkpoint(use_reentrant=False)`` are seen once; what
they keep, their inputs, can be planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tq.systems.rematerialization import KEEP, Graph, Operation, Value, Way
from tq.train.planned import _torch_private
from tq.train.planned.steps import Made, Signature, Steps, name_of, repeatable, replaced, tensors_in

#: Nodes of backward that bear what a codec adds: gradients are linear in what they ask for, or bounded in it.
TOLERANT = frozenset({
    "MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0", "LinearBackward0", "ConvolutionBackward0",
    "ScaledDotProductFlashAttentionForCpuBackward0", "ScaledDotProductFlashAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0", "ScaledDotProductCudnnAttentionBackward0",
    "GeluBackward0", "SiluBackward0", "MishBackward0", "HardswishBackward0", "SoftplusBackward0",
    "MulBackward0", "PowBackward0", "NativeLayerNormBackward0", "FusedRmsNormBackward0", "NativeGroupNormBackward0",
    "_NoopSaveInputsBackward",
})  # fmt: skip
_SAMPLES = 3  # operations of one signature that are timed
_WITH_STATISTICS = ("Norm", "Attention")


class Kind(NamedTuple):
    """dtype of a value, and its elements; tolerant: whether backward bears noise in it."""

    dtype: torch.dtype
    elements: int
    tolerant: bool


@dataclass(frozen=True)
class Trace:
    """A traced step. Holds no tensors, so it can be pickled.

    Attributes:
        graph: every value can be kept, and nothing else; ``tq.train.planned.plan_activations`` adds the other ways.
        signatures: of the operations; kinds: of the values.
        ties: for each operation the one that stands for it where a model has many identical blocks, as
            ``tq.systems.rematerialization.cheapest`` takes them.
        forward_s, backward_s: seconds of the step that keeps all, the median of a few; watched_s: what it takes more to
            follow a plan that does the same.
    """

    graph: Graph
    signatures: tuple[Signature, ...]
    kinds: tuple[Kind, ...]
    ties: tuple[int, ...]
    forward_s: float
    backward_s: float
    watched_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Of a forward and a backward pass that keep all."""
        return self.forward_s + self.backward_s


class _Seen(NamedTuple):
    signature: Signature
    sources: tuple[int, ...]
    repeatable: bool
    block: int


class _Traced(Steps):
    """Writes down a forward pass, and times its operations."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats, self.block = repeats, -1
        self.seen: list[_Seen] = []
        self.made_by: list[int] = []
        self.nbytes: list[int] = []
        self.kinds: list[tuple[torch.dtype, int]] = []
        self.gone: set[int] = set()  # written over in this pass
        self.powers: set[int] = set()  # raised to something else than 2
        self.seconds: dict[Signature, list[float]] = {}

    def on_values(
        self, number: int, func: Any, args: Any, kwargs: Any, sources: tuple[int, ...], made: list[Made]
    ) -> None:
        given = list(tensors_in((args, kwargs)))
        signature = Signature(name_of(func), tuple(tuple(x.shape) for x in (*given, *(m.tensor for m in made))))
        again = repeatable(func, args, kwargs, lambda x: self.value_of(x))
        if again and len(self.seconds.setdefault(signature, [])) < _SAMPLES:
            self.seconds[signature].append(self._timed(func, args, kwargs, any(m.place < 0 for m in made)))
        self.seen.append(_Seen(signature, sources, again, self.block))
        if signature.name == "aten.pow.Tensor_Scalar" and args[1] != 2:
            self.powers.update(sources)
        for _, _, tensor, before in made:
            self.made_by.append(number)
            self.nbytes.append(tensor.untyped_storage().nbytes())
            self.kinds.append((tensor.dtype, tensor.numel()))
            if before is not None:
                self.gone.add(before)

    def _timed(self, func: Any, args: Any, kwargs: Any, changes: bool) -> float:
        taken = []
        with torch.no_grad():
            for _ in range(self.repeats):
                inputs = replaced(args, torch.clone) if changes else args
                _wait()
                start = time.perf_counter()
                func(*inputs, **kwargs)
                _wait()
                taken.append(time.perf_counter() - start)
        return min(taken) if self.repeats < 3 else median(taken)


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class _Ask(NamedTuple):
    node: int
    name: str
    value: int
    shape: torch.Size


@contextmanager
def _blocks(model: nn.Module, traced: _Traced) -> Iterator[None]:
    """Tells which block of the model runs: a child of its outermost lists of modules."""
    with ExitStack() as stack:
        number = 0
        for parts in _lists(model):
            for part in parts:
                for handle in _watched(part, number, traced):
                    stack.callback(handle.remove)
                number += 1
        yield


def _watched(part: nn.Module, number: int, traced: _Traced) -> tuple[Any, Any]:
    def enter(*_: Any) -> None:
        traced.block = number

    def leave(*_: Any) -> None:
        traced.block = number + 1

    return part.register_forward_pre_hook(enter), part.register_forward_hook(leave)


def _lists(module: nn.Module) -> Iterator[nn.ModuleList | nn.Sequential]:
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
        yield module
        return
    for child in module.children():
        yield from _lists(child)


def run_model(model: Callable[..., Any], batch: Any) -> Any:
    """``model`` called with a tensor, a tuple of arguments, or a mapping of them by name."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def default_loss(result: Any) -> Tensor:
    """The last tensor of a result that has one element; else the sum of the first that has a gradient."""
    found = [x for x in tensors_in(result) if x.requires_grad]
    if not found:
        raise ValueError("nothing that the model returned has a gradient; pass loss=, which makes a number of it")
    scalars = [x for x in found if x.numel() == 1]
    return scalars[-1] if scalars else found[0].float().sum()


def check_plain(model: nn.Module) -> None:
    """Refuses models that a plan cannot be made for."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise TypeError(
                f"parameter {name} is a DTensor: FSDP2 and tensor parallelism free or move weights between their uses, "
                "so results cannot be computed again from them at any time; plan before sharding, or checkpoint blocks"
            )
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        raise TypeError("the model is compiled: its products have no operations that a plan could name; pass the model")


def trace_step(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    repeats: int = 3,
    progress: bool = True,
) -> Trace:
    """Run a step of a model that keeps all, and write down what it makes and what that costs.

    Gradients, and the global random generators, are left as they were; buffers that the forward pass changes are not.

    Args:
        model: its blocks are the children of its ``ModuleList`` or ``Sequential``.
        batch: a tensor, a tuple of arguments or a mapping of them; must fit in memory with all activations.
        loss: makes a number of what the model returns; None takes a scalar that it returns, else the sum.
        repeats: of every timing.
        progress: whether a bar shows it.

    Raises:
        TypeError: the model is sharded or compiled.
        ValueError: ``repeats`` is not positive, or nothing has a gradient.
    """
    from tqdm import tqdm

    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    check_plain(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    reduce = loss or default_loss
    forward, backward = [], []
    with torch.random.fork_rng(), _forced_eager(), tqdm(
        total=repeats + 2, unit="step", desc="tracing", disable=not progress, dynamic_ncols=True
    ) as bar:  # fmt: skip
        for turn in range(repeats + 1):
            start = now()
            total = reduce(run_model(model, batch))
            middle = now()
            torch.autograd.grad(total, parameters, allow_unused=True)
            if turn:  # the first warms up
                forward.append(middle - start)
                backward.append(now() - middle)
            del total
            bar.update()
        traced, asks = _Traced(repeats), list[_Ask]()
        with torch.autograd.graph.saved_tensors_hooks(*_hooks(traced, asks)):
            with _blocks(model, traced), traced:
                total = reduce(run_model(model, batch))
            torch.autograd.grad(total, parameters, allow_unused=True)
        bar.update()
    return _trace(traced, asks, median(forward), median(backward))


def now() -> float:
    """Seconds on a clock, when all that a GPU was given is done."""
    _wait()
    return time.perf_counter()


def _forced_eager() -> Any:
    return torch.compiler.set_stance("force_eager")


def _hooks(traced: _Traced, asks: list[_Ask]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def pack(tensor: Tensor) -> tuple[int | None, Tensor]:
        return traced.value_of(tensor), tensor

    def unpack(saved: tuple[int | None, Tensor]) -> Tensor:
        value, tensor = saved
        node = _torch_private.running_node()
        if value is not None and node is not None:
            asks.append(_Ask(_torch_private.sequence_number(node), node.name(), value, tensor.shape))
        return tensor

    return pack, unpack


def _trace(traced: _Traced, asks: list[_Ask], forward_s: float, backward_s: float) -> Trace:
    taken = {signature: median(samples) for signature, samples in traced.seconds.items()}
    strict = traced.powers | _strict(asks)
    asked = {ask.value for ask in asks}
    operations = [
        Operation(taken[seen.signature] if seen.repeatable else None, seen.sources) for seen in traced.seen
    ]
    values = []
    for number, (by, nbytes) in enumerate(zip(traced.made_by, traced.nbytes, strict=True)):
        ways = () if number in traced.gone else (Way(KEEP, nbytes),)
        values.append(Value(nbytes, ways, number in asked, by, traced.seen[by].block, number in strict))
    nodes: dict[int, int] = {}
    order = tuple((nodes.setdefault(ask.node, len(nodes)), ask.value) for ask in asks)
    kinds = tuple(
        Kind(dtype, elements, number in asked and number not in strict)
        for number, (dtype, elements) in enumerate(traced.kinds)
    )
    graph = Graph(tuple(values), tuple(operations), order)
    # Blocks are alike if the same may be done to their values: what a last block returns may be asked for by nobody.
    treated = [tuple((bool(values[v].ways), kinds[v].tolerant) for v in made) for made in graph.made]
    alike = [s._replace(signature=(s.signature, t)) for s, t in zip(traced.seen, treated, strict=True)]  # type: ignore[arg-type]
    return Trace(graph, tuple(s.signature for s in traced.seen), kinds, ties_of(alike), forward_s, backward_s)


def _strict(asks: list[_Ask]) -> set[int]:
    """Values that a node asks for which must have them as they were: others than ``TOLERANT``, and statistics."""
    most = dict[int, int]()
    for ask in asks:
        most[ask.node] = max(most.get(ask.node, 0), len(ask.shape))
    found = set()
    for ask in asks:
        name = ask.name.rpartition("::")[2]
        small = ask.shape[-1:] == (1,) or len(ask.shape) < most[ask.node]
        if name not in TOLERANT or small and any(word in name for word in _WITH_STATISTICS):
            found.add(ask.value)
    return found


MANY = 8  # identical blocks, from which on they are tied


def ties_of(seen: list[Any]) -> tuple[int, ...]:
    """Ties blocks that are alike, in groups of 1, 2, 4, ... so that any number of them can take one choice."""
    ties = list(range(len(seen)))
    blocks: dict[int, list[int]] = {}
    for number, each in enumerate(seen):
        blocks.setdefault(each.block, []).append(number)
    runs: list[list[int]] = []
    previous: tuple[int, Any] | None = None
    for block in sorted(b for b in blocks if b >= 0):
        like = tuple((seen[n].signature, seen[n].repeatable) for n in blocks[block])
        if previous is not None and previous == (block - 1, like):
            runs[-1].append(block)
        else:
            runs.append([block])
        previous = block, like
    for run in runs:
        if len(run) < MANY:
            continue
        start, size = 0, 1
        while start < len(run):
            group = run[start : start + size] if len(run) - start >= 2 * size else run[start:]
            for block in group[1:]:
                for number, leader in zip(blocks[block], blocks[group[0]], strict=True):
                    ties[number] = leader
            start, size = start + len(group), 2 * size
    return tuple(ties)




