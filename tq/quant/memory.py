"""Where a tensor lies: kernels work on addresses, so what has none is refused before it comes near them."""

from __future__ import annotations

import torch
from torch import Tensor

PLAIN = (torch.Tensor, torch.nn.Parameter)


def _advice(x: Tensor) -> str:
    """What to pass instead of a tensor that stands for others."""
    if hasattr(x, "to_local"):
        return "pass the local shard: to_local()"
    if hasattr(x, "wait"):
        return "pass what its wait() returns"
    return "pass a plain tensor; code that is traced calls the codec in a custom operation, as tq.train.linear does"


def memory_range(name: str, x: Tensor) -> tuple[int, int]:
    """(first address, address after the last byte) of a strided tensor; equal where it has no elements.

    Raises TypeError for what is not a plain tensor in memory of its own (DTensor and other subclasses, meta and fake
    tensors, those inside a transform of torch.func, sparse and nested ones), ValueError where its storage was freed.
    """
    if type(x) not in PLAIN:
        what = f"{type(x).__module__}.{type(x).__qualname__}"
        advice = _advice(x) if isinstance(x, Tensor) else "pass a tensor"
        raise TypeError(f"{name} must be a torch.Tensor or Parameter itself, got {what}: {advice}")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got {'a nested one' if x.is_nested else f'layout {x.layout}'}")
    try:
        stored, address = x.untyped_storage().nbytes(), x.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise TypeError(f"{name} must lie in memory, got a tensor without: {_advice(x)} ({error})") from error
    if x.is_meta:
        raise TypeError(f"{name} must lie in memory, got a tensor on the device meta, which has shapes alone")
    if not x.numel():
        return address, address
    if x.is_contiguous():
        size = x.nbytes
    else:
        size = (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))) * x.element_size()
    if stored < x.storage_offset() * x.element_size() + size:
        raise ValueError(
            f"{name} must lie in memory, got shape {tuple(x.shape)} on a storage of {stored} bytes: it was freed or "
            "resized (FSDP does so with parameters between their uses)"
        )
    if address == 0:
        raise TypeError(f"{name} must lie in memory, got a tensor at address 0: {_advice(x)}")
    return address, address + size


def apart(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two ranges of memory have no byte in common."""
    return one[1] <= other[0] or other[1] <= one[0]


def is_dense(x: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
