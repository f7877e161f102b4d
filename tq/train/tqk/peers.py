"""Checkpoints in the memory of other hosts: every rank keeps the state of a partner, outside of what trains.

A launcher such as torchrun ends all workers when one fails, so copies live in files of a folder in memory
(``/dev/shm``), which stays while the host does. Ranks form pairs, and a last group of three where their number is odd.
Set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` for torchrun on several hosts: else workers find each other under a number
of restarts that each launcher counts by itself, and a second restart can fail. A host that is lost takes its own copies
along, and its partner has them too; only where both are lost the checkpoint on the disk is needed (Wang et al., SOSP
2023: Gemini).
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tq.train.tqk.disk import PART, attempt
from tq.train.tqk.file import DamagedFile, content, load

_NAME = re.compile(r"(\d+)-of-(\d+)-step-(\d+)\.tqk")
_KEPT = 2  # steps: one that is whole everywhere, and the one that is being written
_MOST = 64  # copies that a host may tell of


def holder_of(rank: int, ranks: int) -> int:
    """The rank that keeps a copy of what ``rank`` has.

    Args:
        rank: whose state it is.
        ranks: how many there are.

    Example:
        >>> [holder_of(rank, 5) for rank in range(5)]
        [1, 0, 3, 4, 2]
    """
    if ranks % 2 and rank >= ranks - 3:
        return ranks - 3 + (rank - ranks + 4) % 3 if ranks > 1 else 0
    return rank ^ 1


class PeerMemory:
    """Keeps states of ranks in the memory of their own host and of a partner's.

    Args:
        folder: of this host, in memory; of this job alone. It is made if it is missing.
        group: of all ranks, able to send CPU tensors; None: the default group.
        threads: that encode at the same time; None: as many as PyTorch uses.

    Example:
        >>> import tempfile, torch
        >>> import torch.distributed as dist
        >>> from tq.train.tqk.peers import PeerMemory
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> memory = PeerMemory(tempfile.mkdtemp())
        >>> for step in (7, 8, 9):
        ...     size = memory.save(step, {"w": torch.full((3,), float(step))})
        >>> memory.load()
        (9, {'w': tensor([9., 9., 9.])})
        >>> dist.destroy_process_group()
    """

    def __init__(
        self, folder: str | os.PathLike[str], group: dist.ProcessGroup | None = None, *, threads: int | None = None
    ) -> None:
        self.folder, self.threads = Path(folder), threads
        self._group = group if group is not None else dist.group.WORLD
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._holder = holder_of(self._rank, self._ranks)
        self._held = [rank for rank in range(self._ranks) if holder_of(rank, self._ranks) == self._rank]

    def save(self, step: int, state: Any) -> int:
        """Keep a state here and at the partner; on all ranks together.

        Args:
            step: that the state is of.
            state: of this rank, as ``tqk.save`` takes it.

        Returns:
            Bytes of its code, as they were sent.

        Raises:
            SaveFailed: where the memory of the folder is full.
            TypeError: for a state that a file cannot hold.
        """
        attempt("make the folder", self.folder, lambda: self.folder.mkdir(parents=True, exist_ok=True))
        code = torch.frombuffer(bytearray().join(content(state, self.threads)), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([code.numel()]))
        theirs = {rank: torch.empty(int(sizes[rank]), dtype=torch.uint8) for rank in self._held if rank != self._rank}
        self._exchange({} if self._holder == self._rank else {self._holder: code}, theirs)
        for rank, copy in {self._rank: code, **theirs}.items():
            self._write(rank, step, copy)
        self._gather(torch.zeros(1))  # nobody forgets an older step before all have this one
        for rank, saved in self._copies():
            if saved <= step - _KEPT or saved > step:
                with suppress(OSError):
                    self._path(rank, saved).unlink()
        return code.numel()

    def load(self) -> tuple[int, Any] | None:
        """The newest step that is kept of every rank, and this rank's state; on all ranks together.

        Returns:
            None, on all ranks, where there is no such step: then the disk is needed.
        """
        copies = [copy for copy in self._copies() if self._whole(*copy)][-_MOST:]
        told = torch.full((_MOST, 2), -1)
        for line, copy in enumerate(copies):
            told[line] = torch.tensor(copy)
        found = [{(int(rank), int(step)) for rank, step in each} for each in self._gather(told)]
        everywhere = set.intersection(*({step for kept in found for r, step in kept if r == rank}
                                        for rank in range(self._ranks)))  # fmt: skip
        if not everywhere - {-1}:
            return None
        step = max(everywhere)
        sources = {rank: self._source(found, rank, step) for rank in range(self._ranks)}
        for rank, source in sources.items():
            self._hand_over(rank, source, step)
        return step, load(self._path(self._rank, step), threads=self.threads)

    def forget(self) -> None:
        """Remove everything that this host keeps."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- pieces ---

    def _path(self, rank: int, step: int) -> Path:
        return self.folder / f"{rank}-of-{self._ranks}-step-{step}.tqk"

    def _copies(self) -> list[tuple[int, int]]:
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        matches = [match for name in names if (match := _NAME.fullmatch(name)) and int(match[2]) == self._ranks]
        return sorted(((int(match[1]), int(match[3])) for match in matches), key=lambda copy: copy[1])

    def _whole(self, rank: int, step: int) -> bool:
        try:
            load(self._path(rank, step), threads=self.threads)
        except (DamagedFile, OSError):
            return False
        return True

    def _write(self, rank: int, step: int, code: Tensor) -> None:
        """Whole under its name or not there; memory needs no fsync."""
        path = self._path(rank, step)
        part = path.with_name(path.name + PART)
        try:
            attempt("keep", path, lambda: part.write_bytes(code.numpy().tobytes()))
            attempt("keep", path, lambda: part.replace(path))
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _source(self, found: list[set[tuple[int, int]]], rank: int, step: int) -> int:
        """Who has it: the rank itself, if it can."""
        having = [host for host, kept in enumerate(found) if (rank, step) in kept]
        return rank if rank in having else having[0]

    def _hand_over(self, rank: int, source: int, step: int) -> None:
        """One rank's state from where it is to where it is needed; all take part in telling its size."""
        if source == rank:
            return
        code = torch.empty(0, dtype=torch.uint8)
        if self._rank == source:
            code = torch.frombuffer(bytearray(self._path(rank, step).read_bytes()), dtype=torch.uint8)
        size = int(self._gather(torch.tensor([code.numel()]))[source])
        if self._rank == source:
            self._exchange({rank: code}, {})
        elif self._rank == rank:
            self.folder.mkdir(parents=True, exist_ok=True)
            into = torch.empty(size, dtype=torch.uint8)
            self._exchange({}, {source: into})
            self._write(rank, step, into)

    def _gather(self, said: Tensor) -> list[Tensor]:
        every = [torch.zeros_like(said) for _ in range(self._ranks)]
        dist.all_gather(every, said, group=self._group)
        return every

    def _exchange(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> None:
        works = [dist.isend(tensor, group=self._group, group_dst=rank) for rank, tensor in sent.items()]
        works += [dist.irecv(tensor, group=self._group, group_src=rank) for rank, tensor in received.items()]
        for work in works:
            if work is not None:
                work.wait()
