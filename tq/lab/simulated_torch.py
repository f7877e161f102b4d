"""What stands in the place of PyTorch's functions, its collectives and Triton's kernels while a GPU is simulated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tq.lab import simulated_gpu
from tq.lab.simulated_gpu import (
    DEVICE,
    Event,
    SimulatedGPU,
    SimulatedTensor,
    Stream,
    crossed,
    gpu,
    is_pinned,
    on_gpu,
    plain,
    to_host,
)
from tq.quant import dispatch, memory
from tq.train import _torch_private, activations, fused
from tq.train.comm import channels, pipeline, whole

_MADE = ("empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "linspace", "eye", "empty_strided")
_WRITTEN = {  # by Triton's kernels; all other pointers are read
    "gpu._encode_kernel": ("p_payload", "p_scale"), "gpu._decode_kernel": ("p_out",), "gpu._signs_kernel": ("p_signs",),
    "gpu._cells_kernel": ("p_cells",), "gpu_logscale._encode_kernel": ("p_codes", "p_ranges"),
    "gpu_logscale._decode_kernel": ("p_out",), "gpu_adamw._write_kernel": ("p_out",),
    "gpu_codes._product_kernel": ("p_out",), "gpu_codes._attend_kernel": ("p_sums", "p_stats"),
    "gpu_mean._signs_kernel": ("p_signs",), "gpu_mean._mean_kernel": ("p_payload", "p_scale"),
    "gpu_mean._sum_kernel": ("p_out",),
    "gpu_adamw._adamw_kernel": ("p_m", "p_v", "p_weights", "p_payload", "p_scale", "p_codes", "p_ranges"),
}  # fmt: skip


@contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    before = gpu().current
    gpu()._current.stream = stream or before
    try:
        yield
    finally:
        gpu()._current.stream = before


def _synchronize(device: Any = None) -> None:
    gpu().found("waits", "torch.cuda.synchronize")
    gpu().handler._handle_device_synchronization()


class _Future(torch.futures.Future[Any]):
    """In the place of a future with devices: who waits for it waits for the stream that it was set on."""

    def __new__(cls, *, devices: Any = None) -> Any:
        return super().__new__(cls)

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()
        self._event = Event()

    def set_result(self, result: Any) -> None:
        """Of the current stream."""
        self._event.record()
        super().set_result(result)

    def wait(self) -> Any:
        """The result, for the current stream."""
        found = super().wait()
        self._event.wait()
        return found


def _pinned(x: Tensor) -> Tensor:
    gpu().pinned.add(x.untyped_storage())
    return x


def _here(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _factory(made: Callable[..., Tensor], uploads: bool = False) -> Callable[..., Tensor]:
    """A function of ``torch`` that makes tensors, on the simulated GPU where it is asked to."""

    def make(*args: Any, **kwargs: Any) -> Tensor:
        lock = kwargs.pop("pin_memory", False)
        if not _here(kwargs.get("device")):
            x = made(*args, **kwargs)
            return _pinned(x) if lock else x
        wanted = kwargs.pop("requires_grad", False)
        x = on_gpu(made(*args, **kwargs | {"device": "cpu"}))
        if uploads:
            crossed(torch.empty(0), x, False)
        if not made.__name__.startswith("empty"):
            gpu().launch(made.__name__, [], [x])
        return x.requires_grad_() if wanted else x

    return make


def _to(to: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``Tensor.to``, which would ask PyTorch for a GPU."""

    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        again = kwargs.pop("copy", False)
        device, dtype, queued, _ = torch._C._nn._parse_to(*args, **kwargs)
        if isinstance(self, SimulatedTensor):
            if device is not None and not _here(device):
                return to_host(self, dtype, queued)
            wanted = dtype or self.dtype
            return to(self, wanted, copy=again) if again or wanted != self.dtype else self
        if not _here(device):
            return to(self, *args, **kwargs, copy=again)
        x = on_gpu(to(self.detach(), dtype or self.dtype).clone().requires_grad_(self.requires_grad))
        crossed(self, x, queued)
        gpu().launch("copy_", [], [x])
        return x

    return moved


def _module_to(to: Callable[..., Any]) -> Callable[..., Any]:
    """``Module.to``, with other tensors in the place of weights, but one for two names of one weight."""

    def moved(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _here(torch._C._nn._parse_to(*args, **kwargs)[0]):
            return to(self, *args, **kwargs)
        made: dict[Tensor, Tensor] = {}
        for module in self.modules():
            for held in (module._parameters, module._buffers):
                for name, x in held.items():
                    if x is not None and x not in made:
                        there = x.detach().to(*args, **kwargs)
                        made[x] = torch.nn.Parameter(there, x.requires_grad) if held is module._parameters else there
                    held[name] = None if x is None else made[x]  # type: ignore[assignment]
        return self

    return moved


class _Work:
    """A collective that runs: its ``wait`` makes the current stream wait, not the host."""

    def __init__(self) -> None:
        self._event = gpu().collectives.record_event()

    def wait(self, *_: Any) -> bool:
        """For the current stream."""
        self._event.wait()
        return True


def _collective(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, SimulatedTensor) for x in tree_flatten((args, kwargs))[0]):
            return call(*args, **kwargs)
        begun = call(*args, **kwargs)
        if begun is not None:  # here it runs at once, as all else does
            begun.wait()
        work = _Work()
        if kwargs.get("async_op"):
            return work
        return None if work.wait() else work

    return run


def _new_group(call: Callable[..., Any]) -> Callable[..., Any]:
    """Groups of NCCL are such of gloo."""

    def make(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return call(ranks, timeout, "gloo" if backend == "nccl" else backend, *args, **kwargs)

    return make


class _Kernel:
    """A kernel of Triton, whose launches are noted and interpreted."""

    def __init__(self, name: str, kernel: Any) -> None:
        self.name, self.kernel = name, kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            given = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
            tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
            for name, x in tensors.items():
                if not isinstance(x, SimulatedTensor):
                    gpu().found("place", f"{self.name} with a tensor of the host as {name}")
            written = [x for name, x in tensors.items() if name in _WRITTEN[self.name]]
            read = [x for name, x in tensors.items() if name not in _WRITTEN[self.name]]
            if "p_segments" in tensors:
                places = plain(tensors["p_segments"])
                written += gpu().holders(places[:, 2].tolist())
                read += gpu().holders(places[:, 3].tolist())
            gpu().launch(self.name, read, written)
            self.kernel[grid](*map(plain, args), **{name: plain(x) for name, x in kwargs.items()})

        return run


def _patches() -> list[Any]:
    """What stands in the place of PyTorch's and of the kernels."""
    from tq.kernels import gpu as kernels
    from tq.kernels import gpu_adamw, gpu_codes, gpu_logscale, gpu_mean

    modules = {"gpu": kernels, "gpu_logscale": gpu_logscale, "gpu_adamw": gpu_adamw, "gpu_codes": gpu_codes}
    modules["gpu_mean"] = gpu_mean
    put: list[Any] = [patch.object(torch, name, _factory(getattr(torch, name))) for name in _MADE]
    put += [patch.object(torch, name, _factory(getattr(torch, name), True)) for name in ("tensor", "as_tensor")]
    put += [
        patch.object(torch.Tensor, "to", _to(torch.Tensor.to)),
        patch.object(torch.nn.Module, "to", _module_to(torch.nn.Module.to)),
        patch.object(torch.Tensor, "cuda", lambda self, *_, **named: self.to(DEVICE, **named)),
        patch.object(torch.Tensor, "pin_memory", lambda self, *_: _pinned(self.clone())),
        patch.object(torch.Tensor, "is_pinned", lambda self, *_: is_pinned(self)),
        patch.object(torch.futures, "Future", _Future),
        patch.multiple(
            torch.cuda, Stream=Stream, Event=Event, stream=_on, synchronize=_synchronize,
            current_stream=lambda device=None: gpu().current, default_stream=lambda device=None: gpu().default,
            device_of=lambda x: nullcontext(), device=lambda x: nullcontext(), current_device=lambda: 0,
            is_current_stream_capturing=lambda: False,
        ),
    ]  # fmt: skip
    plains = (*memory.PLAIN, SimulatedTensor)
    put += [patch.object(module, "PLAIN", plains) for module in (memory, dispatch)]
    put += [patch.object(module, "Tensor", SimulatedTensor) for module in (activations, fused)]  # they ask for a type
    for name in _WRITTEN:
        module, kernel = name.split(".")
        put.append(patch.object(modules[module], kernel, _Kernel(name, getattr(modules[module], kernel))))
    both = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
    names = (*both, "all_to_all_single", "all_reduce", "broadcast", "reduce_scatter_tensor")
    made = {name: _collective(getattr(dist, name)) for name in names}
    made |= {"get_backend": lambda group=None: "nccl", "new_group": _new_group(dist.new_group)}
    put += [patch.object(dist, name, function) for name, function in made.items()]
    put.append(patch.object(_torch_private, "timeout", lambda group, device: None))
    put += [patch.object(module, "all_gather", made[both[0]]) for module in (channels, pipeline, whole)]
    return put


@contextmanager
def simulate() -> Iterator[SimulatedGPU]:
    """Inside it ``device="cuda"`` is simulated, in all threads.

    Yields:
        SimulatedGPU: what is asked of it.
    Raises:
        RuntimeError: Triton does not interpret, or a GPU is simulated already.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton has to interpret: set TRITON_INTERPRET=1 before Python starts")
    if simulated_gpu.current_gpu is not None:
        raise RuntimeError("a GPU is simulated already")
    found = simulated_gpu.current_gpu = SimulatedGPU()
    try:
        with ExitStack() as stack:
            for each in _patches():
                stack.enter_context(each)
            yield found
    finally:
        simulated_gpu.current_gpu = None
