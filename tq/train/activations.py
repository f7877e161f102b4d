"""Activations quantized to a few bits until backward: a context for eager models.

What is saved is classified by the operation that saves it: the model needs no change. Kept exact: integers, the results
of softmax, exponentials and losses, powers and divisions, whose derivatives have no bound near zero, statistics of
norms and attention, whatever is not float32, bfloat16 or float16, small tensors. Parameters, buffers, inputs and
low-precision copies of weights are no activations: somebody else holds them. Refused: compilation, whose products have
no operations to be named by; a compiled model runs uncompiled in the context (``tq.train.linear`` has a layer for it).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from tq.quant.bits import pack, unpack
from tq.quant.codec import DTYPES, Codec
from tq.quant.memory import is_dense
from tq.train import _torch_private

_OPERATIONS = {
    "linear": "linear conv1d conv2d conv3d",
    "matmul": "matmul __matmul__ mm bmm addmm baddbmm einsum",
    "attention": "scaled_dot_product_attention",
    "norm": "rms_norm layer_norm group_norm batch_norm",
    "nonlinearity": "gelu silu mish hardswish softplus",
    "product": "mul __mul__ __rmul__ multiply square",
    "mask": "relu relu_ dropout",
}
_KIND_OF = {name: kind for kind, names in _OPERATIONS.items() for name in names.split()}
_ATTENDED = ("query", "key", "value")
_RECOMPUTED = {"norm": ("rms_norm", "layer_norm", "group_norm"), "nonlinearity": ("gelu", "silu", "mish", "hardswish")}
_CASTS = ("to", "type", "type_as", "float", "bfloat16", "half")
_Key = tuple[Any, ...]

# What can be quantized, in as few bits as cost a gradient little (chapter activation-memory). Masks: one bit, exact.
BITS: Mapping[str, int | None] = {
    "linear": 4, "matmul": 4, "query": 4, "key": 4, "value": 3, "attention": 4, "norm": 4, "nonlinearity": 3,
    "product": 4, "checkpoint": 4,
}  # fmt: skip
EXACT: Mapping[str, int | None] = dict.fromkeys(BITS)  # to count what would be kept, and change nothing
RECOMPUTE = tuple(_RECOMPUTED)

# How far what is kept is from what was saved, and how far it may be: a loss may not read the code of a linear layer.
_EXACT, _AGAIN, _CODED = range(3)


class Report:
    """Bytes that autograd keeps for backward, counted while the forward pass ran; each tensor once.

    A tensor kept twice, quantized for one operation and exact or as a mask for another, counts once before and twice
    after. Recomputed tensors count before, not after; the internals of a recomputed norm never exist, so take a whole
    saving against a run with ``bits=EXACT``. There are no arguments; ``compress_activations`` makes it.

    Attributes:
        by_kind (dict): {kind: (bytes before, bytes after)}; ``bytes_before`` and ``bytes_after`` are its sums.
    Example:
        >>> import torch
        >>> from tq.train.activations import compress_activations
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        >>> with compress_activations(bits=4) as report:
        ...     output = model(torch.ones(256, 64))
        >>> report.by_kind
        {'nonlinearity': (65536, 8448), 'linear': (65536, 8448)}
    """

    def __init__(self) -> None:
        self.by_kind: dict[str, tuple[int, int]] = {}

    def count(self, kind: str, before: int, after: int) -> None:
        """Add a tensor of this ``kind``: its bytes ``before`` and ``after``."""
        so_far = self.by_kind.get(kind, (0, 0))
        self.by_kind[kind] = (so_far[0] + before, so_far[1] + after)

    @property
    def bytes_before(self) -> int:
        """Bytes that autograd would keep."""
        return sum(before for before, _ in self.by_kind.values())

    @property
    def bytes_after(self) -> int:
        """Bytes that are kept."""
        return sum(after for _, after in self.by_kind.values())


class compress_activations:
    """Context in which autograd keeps quantized activations; backward may run inside or after it.

    ``with`` gives the ``Report``, complete when the forward pass is. One object serves a whole training run: it counts
    the forward passes whose activations it quantized, and each has other rotations, so that errors average out. An
    evaluation that keeps nothing is not counted. Gradients stay unbiased as far as they are linear in what was saved:
    linear layers, convolutions, products of independently quantized tensors. Through the derivative of a norm, a
    nonlinearity or a softmax the noise enters at second order. Composes with autocast, DDP and
    ``torch.utils.checkpoint(use_reentrant=False)``, whose inputs are then quantized. A tensor is kept once, as the
    first operation that saves it requires, but never quantized for one that must have it exact.

    Args:
        codec: quantizer; its bits are ignored, NaN and Inf propagate. None: blocks of 128, unbiased, bfloat16 scales.
        bits: 1-8 for every kind, or {kind: 1-8, or None to keep it exact}; other kinds as in ``BITS``. A kind is the
            operation that saved the tensor, or "query", "key", "value" of an attention, "attention" for its result.
            "checkpoint": inputs, not results, that a checkpoint or another ``autograd.Function`` saves.
        recompute: of "norm" and "nonlinearity": their results are computed again from their quantized inputs, also
            for an operation whose own kind is kept exact.
        min_elements: smaller tensors stay exact.
        step: number of the first forward pass; ``step`` is that of the next. To resume a run, save it and set it.
    Raises:
        TypeError, ValueError: an argument is not as above.
        RuntimeError: entered twice at once. In backward, as without the context: a tensor kept exact, a parameter too,
            was changed in place. Quantized tensors stay as saved.
    References:
        ActNN (Chen et al. 2021) and GACT (Liu et al. 2022): training from quantized activations with unbiased noise.
        Korthikanti et al. 2022: what a transformer keeps and which of it is cheap to compute again.
    Example:
        >>> import torch
        >>> from tq.train.activations import compress_activations
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        >>> compressed = compress_activations()  # one for the whole run
        >>> with compressed as report:
        ...     loss = model(torch.ones(256, 64)).square().sum()
        >>> loss.backward()
        >>> report.bytes_before, report.bytes_after, compressed.step
        (131072, 18944, 1)
    """

    def __init__(
        self,
        codec: Codec | None = None,
        bits: int | Mapping[str, int | None] | None = None,
        *,
        recompute: Collection[str] = (),
        min_elements: int = 1024,
        step: int = 0,
    ):
        codec = Codec(scale_dtype=torch.bfloat16) if codec is None else codec
        if not isinstance(codec, Codec):
            raise TypeError(f"codec must be a tq.Codec or None, got {type(codec).__name__}")
        wanted = dict.fromkeys(BITS, bits) if isinstance(bits, int) else {**BITS, **(bits or {})}
        if unknown := set(wanted) - set(BITS):
            raise ValueError(f"bits must be for kinds among {', '.join(BITS)}, got {sorted(unknown)}")
        if unknown := set(recompute) - set(RECOMPUTE):
            raise ValueError(f"recompute must be among {', '.join(RECOMPUTE)}, got {sorted(unknown)}")
        for name, value, low in (("min_elements", min_elements, 1), ("step", step, 0)):
            if not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be an int of at least {low}, got {value!r}")
        self.step = step
        self._codecs = {kind: _with_bits(codec, b) for kind, b in wanted.items() if b is not None}
        self._recompute, self._min_elements = frozenset(recompute), min_elements
        self._entered: tuple[_Watch, ExitStack] | None = None

    def __enter__(self) -> Report:
        if self._entered is not None:
            raise RuntimeError("this context is entered already; for one inside it make another compress_activations")
        watch = _Watch(self._codecs, self._recompute, self._min_elements, self.step)
        with ExitStack() as stack:
            # This imports the compiler, a second once, which building any optimizer of torch does too; and a model may
            # be compiled inside the context.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(watch)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.pack, _restored))
            self._entered = watch, stack.pop_all()
        return watch.report

    def __exit__(self, *raised: Any) -> None:
        assert self._entered is not None
        (watch, stack), self._entered = self._entered, None
        watch.recipes.clear()
        self.step += watch.coded > 0
        stack.__exit__(*raised)


def _with_bits(codec: Codec, bits: int) -> Codec:
    scale = torch.float32 if bits > 6 else codec.scale_dtype
    return dataclasses.replace(codec, bits=bits, scale_dtype=scale, nonfinite="propagate")


class _Held(NamedTuple):
    """A tensor that is kept as it is, and its version then: hooks take over autograd's own check."""

    tensor: Tensor
    version: int

    def unchanged(self) -> Tensor:
        if (now := _torch_private.version(self.tensor)) != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that backward needs was changed in place after it was "
                f"saved: it is at version {now}, expected version {self.version}"
            )
        return self.tensor


class _Kept:
    """What is kept of one stretch of memory. ``restore`` gives it back: flat in storage order, or as it was shaped.

    ``level``: _EXACT, _AGAIN (computed again from a code) or _CODED. The weak reference keeps the address of the
    storage from being given to another one, not its memory.
    """

    def __init__(self, tensor: Tensor, restore: Callable[[], Tensor], level: int = _EXACT):
        self.storage, self.restore, self.level = StorageWeakRef(tensor.untyped_storage()), restore, level


class _Saved(NamedTuple):
    """One saved tensor: its own view of what is kept."""

    kept: _Kept
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    dense: bool


class _Call(NamedTuple):
    """The operation that runs."""

    kind: str
    tensors: list[Tensor]  # its arguments


class _Watch(TorchFunctionMode):
    """Sees every operation go by, and what it saves."""

    def __init__(self, codecs: Mapping[str, Codec], recompute: frozenset[str], min_elements: int, step: int):
        super().__init__()
        self.codecs, self.recompute, self.min_elements, self.step = codecs, recompute, min_elements, step
        self.report = Report()
        self.call: _Call | None = None
        self.coded = 0
        self.kept: WeakValueDictionary[_Key, _Kept] = WeakValueDictionary()  # by key and level
        self.recipes: dict[_Key, _Kept] = {}  # of results that are alive and were not saved yet

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), (*args, *(kwargs or {}).values())
        inside = _transparent(func, given) if name == "multi_head_attention_forward" else None
        call = partial(inside or func, **(kwargs or {}))
        kind = _KIND_OF.get(name, "other")
        again = name in _RECOMPUTED.get(kind, ()) and kind in self.recompute and torch.is_grad_enabled()
        tensors = [x for x in given if _ordinary(x)]
        before, self.call = self.call, _Call(kind, tensors)
        try:
            if again and kind == "norm" and self._on_top():
                result = checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False)
            elif inside is not None:
                with self:
                    result = call(*args)
            else:
                result = call(*args)
        finally:
            self.call = before
        if again and args and tensors and args[0] is tensors[0]:
            self._remember(result, call, args, tensors[1:], kind)
        elif self.recipes and name in _CASTS and _ordinary(result) and result is not args[0]:
            self._remember_cast(result, args[0])
        return result

    def _on_top(self) -> bool:
        """Whether what is saved now comes here; inside a checkpoint it does not, and must be saved as in its rerun."""
        hooks = _torch_private.saved_tensors_hooks()
        return hooks is not None and hooks[0] == self.pack

    def _remember(
        self, result: Tensor, call: Callable[..., Tensor], args: tuple[Any, ...], weights: list[Tensor], kind: str
    ) -> None:
        """``result`` can be computed again from what is kept of the first argument."""
        source = self._find(_key(args[0]), self._tolerated(kind))
        if source is None or not all(x.is_leaf for x in weights) or not is_dense(result):
            return
        saved, rest, held = _Saved(source, *_view(args[0])), args[1:], [_hold(x) for x in weights]
        device, shape, stride = result.device.type, result.shape, result.stride()
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

        def restore() -> Tensor:
            for weight in held:
                weight.unchanged()
            with torch.no_grad(), torch.autocast(device, dtype, enabled):
                y = call(_restored(saved), *rest)
            if y.stride() != stride:
                y = torch.empty_strided(shape, stride, dtype=y.dtype, device=y.device).copy_(y)
            return y.as_strided((y.numel(),), (1,))

        self._put_down(result, restore, min(source.level, _AGAIN))

    def _remember_cast(self, result: Tensor, source: Tensor) -> None:
        recipe, dtype = self.recipes.get(_key(source)), result.dtype
        if recipe is not None and is_dense(result) and result.stride() == source.stride():
            again = recipe.restore
            self._put_down(result, lambda: again().to(dtype), recipe.level)

    def _put_down(self, result: Tensor, restore: Callable[[], Tensor], level: int) -> None:
        self.recipes = {key: kept for key, kept in self.recipes.items() if not kept.storage.expired()}
        self.recipes[_key(result)] = _Kept(result, restore, level)

    def _tolerated(self, kind: str) -> int:
        """The highest level that an operation of this kind can live with."""
        return _CODED if kind in self.codecs else _AGAIN if kind in BITS else _EXACT

    def _find(self, key: _Key, tolerated: int) -> _Kept | None:
        found = (self.kept.get((key, level)) for level in range(tolerated, -1, -1))
        return next((kept for kept in found if kept is not None), None)

    def pack(self, tensor: Tensor) -> _Held | _Saved:
        """Hook of autograd: what to keep of ``tensor``, which the running operation saves."""
        kind = self._kind(tensor)
        if kind is None:
            return _hold(tensor)
        source = self._uncast(tensor, kind)
        key = _key(source, kind == "mask")  # a relu keeps one bit of what the next layer keeps whole
        tolerated, after = self._tolerated(kind), 0
        kept = self._find(key, tolerated)
        if kept is not None:
            return _Saved(kept, *_view(tensor))
        counted = self._find(key, _CODED) or self._find(_key(source, kind != "mask"), _CODED)
        before = 0 if counted else _nbytes(tensor)
        if key in self.recipes and self.recipes[key].level <= tolerated:
            kept = self.recipes.pop(key)
        else:
            kept, after = self._keep(source.detach(), kind)
        self.kept[key, kept.level] = kept
        self.report.count(kind, before, after)
        return _Saved(kept, *_view(tensor))

    def _uncast(self, tensor: Tensor, kind: str) -> Tensor:
        """The input of a linear layer that autocast cast into ``tensor``: layers that share it share its code."""
        if kind != "linear" or self.call is None or not self.call.tensors:
            return tensor
        given = self.call.tensors[0]
        if given.dtype == tensor.dtype or not is_dense(given) or not is_dense(tensor) or not _same_order(tensor, given):
            return tensor
        key = _key(given)
        # An exact cast is a tensor of its own: whoever changes the original later does not change it.
        found = kind in self.codecs and self._find(key, _CODED) is not None
        return given if found or self._codable(given, kind) or key in self.recipes else tensor

    def _kind(self, tensor: Tensor) -> str | None:
        """Kind of an activation; None for what somebody else holds."""
        if not _ordinary(tensor) or tensor.requires_grad and tensor.is_leaf:
            return None
        call = self.call
        here = tensor.untyped_storage().data_ptr()
        given = call is not None and any(x.untyped_storage().data_ptr() == here for x in call.tensors)
        if not tensor.requires_grad:
            if call is not None and call.kind == "linear" and not given:
                return None  # a frozen weight, as autocast casts it
            if call is not None and call.kind == "mask" and not given and tensor.is_floating_point():
                return "mask"  # dropout on a CPU saves it scaled
            if tensor.is_floating_point():
                return "statistics" if call is not None and not given else None
            return "integer" if tensor.dtype != torch.bool else "mask"
        node: Any = tensor.grad_fn
        while node is not None and type(node).__name__ in _torch_private.VIEWS:
            node = node.next_functions[0][0]
        if type(node).__name__ == _torch_private.LEAF:  # a weight, transposed or as autocast casts it
            return None
        if call is None:
            return "other" if _torch_private.is_youngest(tensor.grad_fn) else "checkpoint"
        if call.kind == "norm" and tensor.numel() < max((x.numel() for x in call.tensors), default=0):
            return "statistics"  # they scale whole rows
        if call.kind == "mask":
            return "mask" if type(node).__name__ == _torch_private.RELU else "other"
        if call.kind == "attention":
            if type(node).__name__ in _torch_private.SOFTMAX:  # without a fused kernel
                return "other"
            places = {x.data_ptr(): name for x, name in zip(call.tensors[:3][::-1], _ATTENDED[::-1], strict=False)}
            return places.get(tensor.data_ptr(), "attention")
        return call.kind

    def _keep(self, tensor: Tensor, kind: str) -> tuple[_Kept, int]:
        """What is kept of ``tensor``, and its bytes."""
        flat = tensor.as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else tensor
        if kind == "mask" and 0 not in tensor.stride():
            return _keep_mask(flat)
        if not self._codable(tensor, kind):
            held = _hold(flat)
            return _Kept(tensor, held.unchanged), _nbytes(tensor)
        self.coded += 1
        encoded = (chosen := self.codecs[kind].derive("activation", self.coded).at_step(self.step)).encode(flat)
        return _Kept(tensor, lambda: chosen.decode(encoded), _CODED), encoded.nbytes

    def _codable(self, tensor: Tensor, kind: str) -> bool:
        large = tensor.numel() >= self.min_elements
        return kind in self.codecs and tensor.dtype in DTYPES and large and 0 not in tensor.stride()


def _restored(saved: _Held | _Saved) -> Tensor:
    """Hook of autograd, the inverse of ``_Watch.pack``: same shape, strides, dtype and device."""
    if isinstance(saved, _Held):
        return saved.unchanged()
    base = saved.kept.restore()
    base = base.as_strided(saved.shape, saved.stride) if saved.dense else base.view(saved.shape)
    return base.to(saved.dtype)


def _keep_mask(flat: Tensor) -> tuple[_Kept, int]:
    """A tensor of two values, zero and another, at one bit an element."""
    code, shape = pack((flat != 0).reshape(1, -1), 1), flat.shape
    other = flat.amax() if flat.dtype != torch.bool and flat.numel() else None

    def restore() -> Tensor:
        mask = unpack(code, 1, math.prod(shape)).view(shape)
        return mask.bool() if other is None else torch.where(mask.bool(), other, other.new_zeros(()))

    return _Kept(flat, restore), code.nbytes

def _transparent(func: Any, given: tuple[Any, ...]) -> Callable[..., Any] | None:
    """A function of Python that would show itself to a mode, and nothing inside it, as one that shows its inside.

    None where it cannot be had: then what is inside stays exact.
    """
    ordinary = all(_ordinary(x) for x in given if isinstance(x, Tensor))
    return _torch_private.transparent(func) if ordinary else None

def _same_order(tensor: Tensor, source: Tensor) -> bool:
    """Whether ``tensor`` was made of ``source`` by casts and views alone, which keep the order of the elements."""
    node: Any = tensor.grad_fn
    while node is not None and type(node).__name__ in _torch_private.KEEP_ORDER:
        node, output = node.next_functions[0]
        if node is not None and node is source.grad_fn and output == source.output_nr:
            return True
    return False

def _hold(tensor: Tensor) -> _Held:
    return _Held(tensor, _torch_private.version(tensor))

def _ordinary(x: Any) -> bool:
    """Whether x is a tensor with memory of its own; sparse and distributed ones are left alone."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided

def _view(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, bool]:
    return tensor.shape, tensor.stride(), tensor.dtype, is_dense(tensor)

def _nbytes(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())  # the first is larger for an expanded tensor

def _key(tensor: Tensor, mask: bool = False) -> _Key:
    """Equal for views of the same elements in the same state; unique while the storage is known to a ``_Kept``."""
    place = (tensor.numel(),) if is_dense(tensor) else (tensor.shape, tensor.stride())
    lazy = tensor.is_conj(), tensor.is_neg()
    state = tensor.dtype, _torch_private.version(tensor), lazy
    return _torch_private.storage(tensor), tensor.storage_offset(), *state, mask, *place
