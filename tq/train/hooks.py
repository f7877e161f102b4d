"""A state of ``ddp_hook`` that can be made before there is a process group, as launchers want it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from tq.quant.codec import Codec
from tq.train import collectives
from tq.train.collectives import WARMUP, Codecs, ddp_hook
from tq.train.comm.channels import Channel, new_channel

__all__ = ["HookState", "ddp_hook"]


class HookState(collectives.HookState):
    """``tq.train.collectives.HookState`` whose channel is made by the first gradients, on all ranks alike.

    So it can be made, and pickled to workers, before there is a process group: Lightning and other launchers take it
    as an argument.

    Args:
        codec: of both phases, or a pair with one block size.
        group: process group; None is the default group at the first gradients, and can be pickled.
        warmup: first steps with exact means; 50 as in ``TurboQuantAdamW``, where the reason stands.
    Raises:
        ValueError: ``warmup`` is no integer >= 0, or block sizes differ.
    Example:
        >>> from tq import Codec
        >>> from tq.train.hooks import HookState
        >>> HookState(Codec(bits=4), warmup=50).state_dict()
        {'step': 0}
    """

    def __init__(self, codec: Codec | Codecs, group: dist.ProcessGroup | None = None, warmup: int = WARMUP) -> None:
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
            raise ValueError(f"warmup must be an integer >= 0, got {warmup!r}")
        first, second = collectives._pair(codec)
        self.codecs = replace(first, nonfinite="propagate"), replace(second, nonfinite="propagate")
        self.warmup, self.step = warmup, 0
        self._group = group
        self._channel: Channel | None = None

    @property
    def channel(self) -> Channel:  # type: ignore[override]
        """Its own; RuntimeError where there is no process group."""
        self._channel = self._channel or new_channel(self._group)
        return self._channel

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_channel": None}  # a group cannot be pickled, and says so
