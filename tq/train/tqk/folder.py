"""A folder of checkpoints: one file for each rank, all of them or none, the last ones kept.

    <folder>/0000000100-0/rank-0.tqk ... rank-3.tqk   written by every rank, forced to the disk
    <folder>/0000000100-0/whole.json                  written by rank 0 after that: step, sizes and digests

With ``share``, a rank's file names pieces beside it, and those that an earlier checkpoint has are linked.

Only what has its ``whole.json`` is a checkpoint. The name ends with a number that counts savings of the same step, so
nothing that is whole is ever written over.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tq.train.tqk.disk import DISK, Disk, SaveFailed, durable, durable_folder
from tq.train.tqk.file import DamagedFile, File, save
from tq.train.tqk.pieces import ENDING, load_pieces, save_pieces

_WHOLE, _NAME = "whole.json", re.compile(r"(\d{10,})-(\d+)")


@dataclass(frozen=True)
class _Saved:
    """A folder with a ``whole.json``."""

    path: Path
    step: int
    again: int
    files: tuple[tuple[str, int, str], ...]  # name, size, digest of the footer


class Checkpoints:
    """Saves and loads the states of all ranks, in a folder that need not be there yet.

    Args:
        folder: the same for all ranks, on a file system that they share.
        keep: how many checkpoints stay. At least 2: one that turns out to be damaged has another behind it.
        group: of the ranks that save together, able to send CPU tensors; None: this process alone.
        share: link what did not change since an earlier checkpoint and write only the rest: for frozen weights,
            adapters and rows that no token touched. A step of full training changes nearly
            everything, and pieces are coded without the help of other tensors, so it does not pay there.
        threads: that encode at the same time; None: as many as PyTorch uses.
        disk: what writes.

    Raises:
        ValueError: for fewer than two to keep.

    Example:
        >>> import tempfile, torch
        >>> from tq.train.tqk import Checkpoints
        >>> checkpoints = Checkpoints(tempfile.mkdtemp())
        >>> for step in (100, 200, 300):
        ...     size = checkpoints.save(step, {"weight": torch.full((4,), float(step))})
        >>> checkpoints.steps(), checkpoints.load()["weight"]
        ([200, 300], tensor([300., 300., 300., 300.]))
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        group: dist.ProcessGroup | None = None,
        share: bool = False,
        threads: int | None = None,
        disk: Disk = DISK,
    ) -> None:
        if keep < 2:
            raise ValueError(f"keep must be at least 2, got {keep}")
        self.folder, self.keep, self.share, self.threads = Path(folder), keep, share, threads
        self._group, self._disk = group, disk
        self._rank = 0 if group is None else dist.get_rank(group)
        self._ranks = 1 if group is None else dist.get_world_size(group)

    def steps(self) -> list[int]:
        """Of the checkpoints that are whole, the oldest first."""
        return sorted({saved.step for saved in self._whole()})

    def save(self, step: int, state: Any) -> int:
        """Write the states of all ranks, durable when this returns; then remove what is not kept.

        Args:
            step: that the state is of.
            state: of this rank, as ``tqk.save`` takes it.

        Returns:
            Bytes that this rank wrote.

        Raises:
            SaveFailed: on all ranks, if one of them could not write. What was saved before is untouched.
            TypeError: for a state that a file cannot hold.
            ValueError: for a negative step.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        again = max([saved.again for saved in self._numbered() if saved.step == step], default=-1) + 1
        again = int(self._agree(torch.tensor([again]))[0])
        target = self.folder / f"{step:010d}-{again}"
        name, failure, written, size, digest = f"rank-{{}}{ENDING if self.share else '.tqk'}", None, 0, 0, bytes(16)
        path = target / name.format(self._rank)
        try:
            written = self._write(path, state)
            with File(path) as file:
                size, digest = path.stat().st_size, file.digest
        except (OSError, TypeError, DamagedFile) as error:
            failure = error
        said = torch.tensor([failure is None, size, *digest])
        every = self._gather(said)
        self._or_fail(failure, [rank for rank, one in enumerate(every) if not one[0]], target)
        files = [[name.format(rank), int(one[1]), bytes(one[2:].tolist()).hex()] for rank, one in enumerate(every)]
        if self._rank == 0:
            whole = json.dumps({"step": step, "files": files}).encode()
            try:
                durable(target / _WHOLE, [whole], self._disk)
            except SaveFailed as error:
                failure = error
        self._or_fail(failure, [] if self._agree(torch.tensor([failure is None]))[0] else [0], target)
        if self._rank == 0:
            self._remove_old()
        return written

    def load(self, step: int | None = None) -> Any:
        """The state of this rank, from the newest checkpoint, or of one step.

        Where the newest is damaged, the one before is loaded, with a warning. A step that is asked for has no
        substitute.

        Args:
            step: of the checkpoint; None: the newest.

        Raises:
            FileNotFoundError: where there is no checkpoint, or none of this step.
            DamagedFile: where all that are left are damaged.
            ValueError: where the checkpoint was saved by another number of ranks; ``tqk.dcp`` reads those.
        """
        found = [saved for saved in self._whole() if step is None or saved.step == step]
        if not found:
            asked = "" if step is None else f" of step {step}"
            raise FileNotFoundError(f"no whole checkpoint{asked} in {self.folder.name}")
        for saved in reversed(found):
            if len(saved.files) != self._ranks:
                raise ValueError(f"step {saved.step} was saved by {len(saved.files)} ranks, here are {self._ranks}")
            try:
                return self._read(saved)
            except DamagedFile as error:
                damaged = error
                if step is None and saved is not found[0]:
                    warnings.warn(f"{error}; the checkpoint before it is loaded", RuntimeWarning, stacklevel=2)
        raise damaged

    # --- pieces ---

    def _write(self, path: Path, state: Any) -> int:
        if not self.share:
            return save(path, state, threads=self.threads, disk=self._disk)
        durable_folder(path.parent, self._disk)
        earlier = [saved.path for saved in self._whole()]
        return save_pieces(path, state, earlier, threads=self.threads, disk=self._disk)

    def _read(self, saved: _Saved) -> Any:
        name, size, digest = saved.files[self._rank]
        path = saved.path / name
        if not path.exists() or path.stat().st_size != size:
            raise DamagedFile(f"{name} of step {saved.step} is damaged: it is missing, or not of its size")
        with File(path) as file:
            if file.digest.hex() != digest:
                raise DamagedFile(f"{name} of step {saved.step} is damaged: it is of another saving")
            return load_pieces(file, threads=self.threads) if name.endswith(ENDING) else file.load(threads=self.threads)

    def _numbered(self) -> list[_Saved]:
        """All folders of checkpoints, whole or not."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        matches = [match for name in names if (match := _NAME.fullmatch(name))]
        return [_Saved(self.folder / match[0], int(match[1]), int(match[2]), ()) for match in matches]

    def _whole(self) -> list[_Saved]:
        found = []
        for saved in sorted(self._numbered(), key=lambda saved: (saved.step, saved.again)):
            with suppress(OSError, ValueError, KeyError, TypeError):
                said = json.loads((saved.path / _WHOLE).read_bytes())
                files = tuple((str(name), int(size), str(digest)) for name, size, digest in said["files"])
                if files and said["step"] == saved.step:
                    found.append(_Saved(saved.path, saved.step, saved.again, files))
        return found

    def _remove_old(self) -> None:
        """All but the last whole ones; first their ``whole.json``, so that no half of one is ever taken for one."""
        kept = [saved.path for saved in self._whole()[-self.keep :]]
        newest = max(path.name for path in kept)
        for saved in self._numbered():
            if saved.path in kept or saved.path.name > newest:
                continue
            with suppress(OSError):
                if (saved.path / _WHOLE).exists():
                    self._disk.remove(saved.path / _WHOLE)
                    self._disk.sync_folder(saved.path)
                for name in os.listdir(saved.path):
                    self._disk.remove(saved.path / name)
                self._disk.remove_folder(saved.path)

    def _gather(self, said: torch.Tensor) -> list[torch.Tensor]:
        if self._group is None:
            return [said]
        every = [torch.zeros_like(said) for _ in range(self._ranks)]
        dist.all_gather(every, said, group=self._group)
        return every

    def _agree(self, said: torch.Tensor) -> torch.Tensor:
        """What rank 0 says."""
        return self._gather(said)[0]

    def _or_fail(self, failure: BaseException | None, ranks: list[int], target: Path) -> None:
        """Raise on all ranks what one of them met."""
        if failure is not None:
            raise failure
        if ranks:
            who = ", ".join(map(str, ranks))
            raise SaveFailed(f"rank {who} could not write {target.name}; what was saved before it is untouched")
