"""The first steps of a run, whose sums go as they are: counted by rank 0, known to all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook


class Warmup:
    """Whether a group's sums are still those of the first steps.

    A step is one of any ``torch.optim`` optimizer after a sum of the group. Only rank 0 counts, and says so before each
    sum of these steps: ranks that step at other times would else code at other times, and wait for each other.

    Args:
        plain: the group that carries what rank 0 says, of CPU tensors.
        rank: of this process in it.
        steps: so many are exact.
    """

    def __init__(self, plain: Any, rank: int, steps: int) -> None:
        self._plain, self.steps, self.over = plain, steps, steps == 0
        self.done, self._summed = 0, False
        self._hook: Any = None
        if rank == 0 and not self.over:
            self._hook = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.done += self._summed
        self._summed = False

    def exact(self) -> bool:
        """To be asked before each sum, by all ranks in the same order."""
        if self.over:
            return False
        self._summed = True
        said = torch.tensor([self.done])
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._plain.broadcast([said], options).wait()
        self.done = int(said)
        if self.done >= self.steps:
            self.end()
        return not self.over

    def end(self) -> None:
        """No more of it, as where a run goes on that is past it."""
        self.over = True
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
