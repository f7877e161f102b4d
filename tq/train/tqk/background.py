"""Saving beside training: the state is copied while training waits, and is encoded and written while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tq.train.tqk.tree import put_together, take_apart


class Background:
    """Saves one state at a time in a thread of its own; a context manager that waits for the last.

    The copy is whole when ``save`` returns, so the next step of an optimizer cannot get into it. It is made into the
    same memory every time: the first takes as long as the system needs to give it.

    Args:
        save: writes a state; is called in the thread, with the copy. Over several ranks, on all of them in the same
            order, with a process group that nothing else uses.

    Attributes:
        stalled_s: seconds that the last ``save`` took, waiting included.

    Example:
        >>> import tempfile, torch
        >>> from tq.train import tqk
        >>> path = tempfile.mkdtemp() + "/model.tqk"
        >>> weight = torch.zeros(4)
        >>> with tqk.Background(lambda state: tqk.save(path, state, threads=1)) as saving:
        ...     done = saving.save({"weight": weight})
        ...     _ = weight.add_(1)
        >>> tqk.load(path)["weight"], done.result() > 0
        (tensor([0., 0., 0., 0.]), True)
    """

    def __init__(self, save: Callable[[Any], Any]) -> None:
        self._save, self._memory = save, dict[str, Tensor]()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[Any] | None = None
        self.stalled_s = 0.0

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that copies are made into."""
        return sum(tensor.nbytes for tensor in self._memory.values())

    def save(self, state: Any) -> Future[Any]:
        """Copy a state and begin to write it, after the one before is written.

        Args:
            state: as ``tqk.save`` takes it.

        Returns:
            Of what the function given returns; ``result()`` waits and raises what it raised.

        Raises:
            Exception: what the saving before this one raised, if nobody asked for its result.
            TypeError: for a state that a file cannot hold.
        """
        began = time.perf_counter()
        self.wait()
        said, tensors = take_apart(state)
        copies: dict[int, Tensor] = {}  # a tensor that occurs twice stays one
        self._memory = {name: self._memory[name] for name in tensors if name in self._memory}
        for name, tensor in tensors.items():
            if id(tensor) not in copies:
                copies[id(tensor)] = self._copied(name, tensor)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        copy = put_together(said, {name: copies[id(tensor)] for name, tensor in tensors.items()})
        self._last = self._thread.submit(self._save, copy)
        self.stalled_s = time.perf_counter() - began
        return self._last

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            Exception: what the last saving raised, once.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait, and give the memory back.

        Raises:
            Exception: what the last saving raised, if nobody asked for it.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._memory = {}

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        held = self._memory.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[name] = held
        return held.copy_(tensor, non_blocking=tensor.is_cuda)
