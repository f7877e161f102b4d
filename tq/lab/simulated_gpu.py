"""A GPU without one: tensors in memory of the host that say they are on ``cuda:0``, and a record of what is asked.

Each operation on such a tensor is a launch on the stream that is current, and runs at once on the CPU, so that results
are true. Triton's kernels run in its interpreter, which is chosen before Triton is imported (TRITON_INTERPRET=1).
Streams and events are simulated; whether two accesses to a memory are in order is judged by PyTorch's own CUDA
sanitizer, from what its streams waited for. Found are

- *waits*: the host asks for a number (``item``, ``nonzero``), copies to or from memory that is not page-locked, or
  waits for a stream;
- *order*: two streams touch a memory, one of them writes, and neither waited for the other;
- *freed*: memory was given back while another stream than its own may still use it;
- *place*: a tensor of the host in an operation of the GPU.

Collectives run on a stream of their own, as NCCL's do; what their ``wait`` orders is the caller's stream.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.cuda._sanitizer as sanitizer
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
KINDS = ("waits", "order", "freed", "place")
_aten = torch.ops.aten
_ASKED = {  # operations whose result, or its size, the host has to see
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount",
    "repeat_interleave.Tensor",
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """kind: of ``KINDS``. what: in words. where: the line that asked for it. thread: of the host."""

    kind: str
    what: str
    where: str
    thread: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} ({self.where}, in {self.thread})"


@dataclass
class _Memory:
    """A storage: whether it still exists, the stream that it was made on, and the last use by each other stream."""

    alive: StorageWeakRef
    nbytes: int
    stream: int
    foreign: dict[int, int] = field(default_factory=dict)


class SimulatedGPU:
    """What was asked of it, since it was made or since ``reset``.

    Attributes:
        launches: of each operation and kernel.
        problems: what was found, in order.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.problems: list[Problem] = []
        self.handler, self.lock = sanitizer.EventHandler(), threading.RLock()
        self.memory: dict[int, _Memory] = {}
        self.foreign: set[int] = set()
        self.pinned: WeakSet[Any] = WeakSet()
        self.default, self.collectives = Stream._numbered(0), Stream._numbered(1)
        self.numbers = itertools.count(2)
        self._current = threading.local()
        self._host = threading.current_thread()

    def reset(self) -> None:
        """Forget what was found so far, not who waited for whom."""
        self.launches.clear()
        self.problems.clear()

    def of_kind(self, kind: str, everywhere: bool = False) -> list[Problem]:
        """Problems of a kind; waits of the thread that began the simulation alone, unless ``everywhere``."""
        ours = self._host.name
        return [p for p in self.problems if p.kind == kind and (everywhere or kind != "waits" or p.thread == ours)]

    @property
    def current(self) -> Stream:
        """The stream of this thread."""
        found: Stream = getattr(self._current, "stream", self.default)
        return found

    def found(self, kind: str, what: str) -> None:
        """One more problem, at the innermost line of a file that is neither PyTorch's nor this one."""
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
        inner = frames[-1]
        where = f"{'/'.join(inner.filename.split('/')[-2:])}:{inner.lineno}"
        self.problems.append(Problem(kind, what, where, threading.current_thread().name))

    def launch(
        self, name: str, read: Sequence[Tensor], written: Sequence[Tensor], stream: Stream | None = None
    ) -> None:
        """One kernel on a stream."""
        on = (stream or self.current).number
        with self.lock:
            self.launches[name] += 1
            outputs = {self._base(x, on) for x in written if x.numel()}
            inputs = {self._base(x, on) for x in read if x.numel()} - outputs
            names: dict[int, list[str]] = {base: [] for base in inputs | outputs}
            for error in self.handler._handle_kernel_launch(on, inputs, outputs, set(), name, names):
                assert isinstance(error, sanitizer.UnsynchronizedAccessError)
                before = error.previous_access
                self.found("order", f"{name} on stream {on}, {before.operator} on stream {before.stream} before")
            for base in inputs | outputs:
                memory = self.memory[base]
                if on not in (memory.stream, self.collectives.number):  # collectives hold what they work on
                    memory.foreign[on] = self.handler.seq_num
                    self.foreign.add(base)
            self._look_for_freed()

    def saw(self, x: Tensor) -> None:
        """A tensor that was made on the current stream, if its memory is new."""
        with self.lock:
            self._base(x, self.current.number)

    def _base(self, x: Tensor, stream: int) -> int:
        """Address of the storage, which is made known where it is new."""
        storage = x.untyped_storage()
        base = storage.data_ptr()
        known = self.memory.get(base)
        if known is None or known.alive.expired():
            self.handler._handle_memory_allocation(base)
            self.memory[base] = _Memory(StorageWeakRef(storage), storage.nbytes(), stream)
            self.foreign.discard(base)
        return base

    def _look_for_freed(self) -> None:
        for base in [b for b in self.foreign if self.memory[b].alive.expired()]:
            memory = self.memory[base]
            self.foreign.discard(base)
            for stream, number in memory.foreign.items():
                if not self.handler.syncs.is_ordered_after(memory.stream, number, stream):
                    self.found("freed", f"{memory.nbytes} bytes of stream {memory.stream}, used on stream {stream}")

    def recorded(self, x: Tensor, stream: Stream) -> None:
        """``record_stream``: the allocator will wait for that stream."""
        with self.lock:
            self.memory[self._base(x, self.current.number)].foreign.pop(stream.number, None)

    def holders(self, addresses: list[int]) -> list[Tensor]:
        """Tensors over the storages that hold these addresses: as kernels are given them in a table."""
        bases = sorted(base for base, known in self.memory.items() if not known.alive.expired())
        found = {max((b for b in bases if b <= address), default=0) for address in addresses if address}
        return [_over(base, self.memory[base].nbytes) for base in found if base]


def _over(base: int, nbytes: int) -> Tensor:
    """A tensor whose storage lies there, for its address alone."""
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(base), dtype=torch.uint8)


current_gpu: SimulatedGPU | None = None


def gpu() -> SimulatedGPU:
    """The one that is simulated; RuntimeError where none is."""
    if current_gpu is None:
        raise RuntimeError("no GPU is simulated: work inside simulate()")
    return current_gpu


# --- streams --------------------------------------------------------------------------------------------------


class Stream:
    """In the place of ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.number = next(gpu().numbers)
        gpu().handler._handle_stream_creation(self.number)

    @classmethod
    def _numbered(cls, number: int) -> Stream:
        made = cls.__new__(cls)
        made.number = number
        return made

    device = DEVICE

    @property
    def cuda_stream(self) -> int:
        """Its number."""
        return self.number

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind all that is on it."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What comes next on it comes after the event."""
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """What comes next on it comes after all that is on the other."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """The host waits."""
        gpu().found("waits", "Stream.synchronize")
        gpu().handler._handle_stream_synchronization(self.number)


class Event:
    """In the place of ``torch.cuda.Event``."""

    _numbers = itertools.count(1)

    def __init__(self, **_: Any) -> None:
        self.number = next(Event._numbers)
        gpu().handler._handle_event_creation(self.number)

    def record(self, stream: Stream | None = None) -> None:
        """It comes after all that is on the stream so far."""
        gpu().handler._handle_event_record(self.number, (stream or gpu().current).number)

    def wait(self, stream: Stream | None = None) -> None:
        """What comes next on the stream comes after it."""
        gpu().handler._handle_event_wait(self.number, (stream or gpu().current).number)

    def synchronize(self) -> None:
        """The host waits."""
        gpu().found("waits", "Event.synchronize")
        gpu().handler._handle_event_synchronization(self.number)


# --- tensors --------------------------------------------------------------------------------------------------


class SimulatedTensor(Tensor):
    """Memory of the host that says it is the GPU's."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SimulatedTensor({plain(self)!r})"

    def cpu(self, memory_format: Any = None) -> Tensor:
        """A copy in memory of the host, which waits for it."""
        return to_host(self, None, False)

    def tolist(self) -> Any:
        """Numbers, for which the host waits."""
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        """Refused, as on a GPU."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def record_stream(self, s: Any) -> None:
        """The memory is used on that stream too."""
        gpu().recorded(self, s)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (_aten._to_copy.default, _aten.copy_.default):
            return _copied(func, args, kwargs)
        if func.namespace == "tq":  # what the operation itself launches
            return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        collective = func.namespace == "c10d"
        stream = gpu().collectives if collective else None
        if collective:
            stream.wait_stream(gpu().current)  # type: ignore[union-attr]
        _check(func, args, kwargs)
        with torch._C._DisableTorchDispatch():
            out = func(*args, **kwargs)
        _note(func, args, kwargs, out, stream)
        return out if collective else tree_map(on_gpu, out)


def on_gpu(x: Any) -> Any:
    """The same memory as a tensor of the simulated GPU; other things as they are."""
    if not isinstance(x, Tensor) or isinstance(x, SimulatedTensor):
        return x
    found: Tensor = Tensor._make_subclass(SimulatedTensor, x, x.requires_grad)
    gpu().saw(found)
    return found


def plain(x: Any) -> Any:
    """The same memory as a tensor of the host; other things as they are."""
    if not isinstance(x, SimulatedTensor):
        return x
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return x.detach()


def _check(func: Any, args: Any, kwargs: Any) -> None:
    """Finds tensors of the host, and operations that the host waits for."""
    if func.namespace == "c10d":
        return
    host = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and not isinstance(x, SimulatedTensor)]
    name = func.__name__.removesuffix(".default")
    if any(x.dim() for x in host):
        gpu().found("place", f"{name} with a tensor of the host, shape {tuple(next(x for x in host if x.dim()).shape)}")
    masks = func is _aten.index.Tensor and any(x is not None and x.dtype == torch.bool for x in args[1])
    if name in _ASKED or name.split(".")[0] in _ASKED or masks:
        gpu().found("waits", name)
        gpu().handler._handle_stream_synchronization(gpu().current.number)


def _note(func: Any, args: Any, kwargs: Any, out: Any, stream: Stream | None) -> None:
    """One launch, if the operation reads or writes anything."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    schema, views = func._schema, False
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    for argument in schema.arguments:
        tensors = [x for x in tree_flatten(given.get(argument.name))[0] if isinstance(x, SimulatedTensor)]
        alias = argument.alias_info
        if alias is None or alias.is_write:
            (read if alias is None else written).extend(tensors)
        views |= alias is not None and not alias.is_write
    made = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
    if func.namespace == "c10d":  # its schemas do not say so
        written = [x for x in tree_flatten(args[0])[0] if isinstance(x, SimulatedTensor)]
        read = [x for x in read if not any(x is y for y in written)]
    name = func.__name__.removesuffix(".default")
    if (views and not written) or name.startswith(("empty", "new_empty")) or func.namespace == "prim":
        return
    if any(x.numel() for x in [*made, *written]):
        gpu().launch(name, read, written + [x for x in made if not any(x is y for y in written)], stream)


def _copied(func: Any, args: Any, kwargs: Any) -> Any:
    """Copies, within the GPU or between it and the host."""
    if func is _aten.copy_.default:
        into, source = args[:2]
        queued = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        crossed(source, into, queued)
        plain(into).copy_(plain(source))
        read = [source] if isinstance(source, SimulatedTensor) else []
        gpu().launch("copy_", read, [into] if isinstance(into, SimulatedTensor) else [])
        return into
    kwargs = {name: x for name, x in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
    out = on_gpu(func(plain(args[0]), **kwargs))
    gpu().launch("_to_copy", [args[0]], [out])
    return out


def to_host(x: SimulatedTensor, dtype: torch.dtype | None, queued: bool) -> Tensor:
    out: Tensor = plain(x).to(dtype or x.dtype, copy=True)
    crossed(x, out, queued)
    gpu().launch("_to_copy", [x], [])
    return out


def crossed(source: Tensor, into: Tensor, queued: bool) -> None:
    """A copy between host and GPU waits, unless it is queued and the host's memory is page-locked."""
    if isinstance(source, SimulatedTensor) == isinstance(into, SimulatedTensor):
        return
    host = into if isinstance(source, SimulatedTensor) else source
    if not (queued and is_pinned(host)):
        gpu().found("waits", f"a copy {'to' if host is into else 'from'} the host")
        gpu().handler._handle_stream_synchronization(gpu().current.number)


def is_pinned(x: Tensor) -> bool:
    """Whether a tensor of the host was made page-locked."""
    return any(kept.data_ptr() == x.untyped_storage().data_ptr() for kept in gpu().pinned)
