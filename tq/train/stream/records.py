"""The records of a model where they lie: in memory, in a scratch file, or in a folder that a killed run resumes from.

A folder holds every record twice. A step reads one copy and writes the other, and the step counts once a small file
names it, which happens after all of them are on the disk. So whatever moment the process stops at, one whole step is
there; it costs disk space and not one written byte more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tq.train.offload import aligned
from tq.train.stream.files import Lane, Pages, Threads
from tq.train.stream.layout import Model

FORMAT = 1
DATA, MANIFEST, LOCK = "layers.bin", "step.json", "lock"
BUFFERS = 3  # one comes, one is worked on, one goes


class Progress(NamedTuple):
    """What is known of a run beside its records: losses of all steps, and the last norm of the gradient."""

    losses: list[float]
    norm: float | None


def first_difference(ours: dict[str, Any], theirs: dict[str, Any], where: str = "") -> str | None:
    """The first setting in which two runs differ, in words; None where they agree."""
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        a, b = ours.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found = first_difference(a, b, f"{where}{key}.")
            if found:
                return found
        elif a != b:
            return f"{where}{key} was {b!r} there and is {a!r} here"
    return None


class Records:
    """The records of a run.

    Args:
        model: their layouts.
        folder: where the file lies; None keeps all of them in memory.
        resumable: whether the folder is to be resumed from.
        resident: numbers of records that stay in memory; a resumable run writes them too.
        settings: plain JSON, which must agree for a run to go on.
    Raises:
        ValueError: the folder holds another run, or a file that is not one, in one sentence.
        OSError: there is no room, or another process works there.
    """

    def __init__(
        self, model: Model, folder: Path | None, resumable: bool, resident: Iterable[int], settings: dict[str, Any]
    ) -> None:
        self.model, self.folder, self.settings = model, folder, json.loads(json.dumps(settings))
        self.resumable = resumable and folder is not None
        self.threads = Threads()
        self.slots = 2 if self.resumable else 1
        self._starts, at = [], 0
        for record in model.records:
            self._starts.append(at)
            at += self.slots * record.nbytes
        self._own: dict[int, Tensor] = {}
        for number in range(len(model.records)) if folder is None else resident:
            self._own[number] = aligned(model.records[number].nbytes)
        self.lock: Any = None
        self.pages: Pages | None = None
        self.lane: Lane | None = None
        if folder is not None:
            try:
                self._open(folder, at)
            except BaseException:
                self.close()
                raise

    def _open(self, folder: Path, nbytes: int) -> None:
        if not folder.is_dir():
            raise ValueError(f"place must be a folder that exists, got {str(folder)!r}")
        if self.resumable:
            self._take_lock(folder)
        elif (folder / DATA).exists() or (folder / MANIFEST).exists():
            raise ValueError(f"{folder.name} holds a run that can be resumed; scratch needs another folder")
        manifest = folder / MANIFEST
        if self.resumable and manifest.exists():
            size = (folder / DATA).stat().st_size if (folder / DATA).exists() else 0
            if size != nbytes:
                raise ValueError(f"{folder.name}: {DATA} has {size:,} bytes, a run with these settings {nbytes:,}")
        self.pages = Pages(folder, nbytes, DATA if self.resumable else None)
        self.lane = Lane(self.pages, self.threads, self.model.largest, BUFFERS)

    def _take_lock(self, folder: Path) -> None:
        try:
            import fcntl
        except ImportError:  # another system
            return
        self.lock = open(folder / LOCK, "w")  # noqa: SIM115  # held while the run lives
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OSError(f"another process works in {folder.name}") from error

    # --- begin and go on ---
    def resume(self) -> Progress | None:
        """What the folder says of the last whole step; None where no run began.

        ValueError: a run with other settings."""
        if not self.resumable or self.folder is None:
            return None
        path = self.folder / MANIFEST
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text())
            known, losses, norm = found["settings"], [float(x) for x in found["losses"]], found["norm"]
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.folder.name}: {MANIFEST} is damaged ({error})") from error
        difference = first_difference(self.settings, known)
        if difference:
            raise ValueError(f"{self.folder.name} holds another run: {difference}")
        for number in self._own:
            self._read_own(number, len(losses))
        return Progress(losses, norm)

    def _read_own(self, number: int, done: int) -> None:
        if self.pages is not None:
            self.pages.read(self._at(number, done), self._own[number])
            self.model.records[number].check(self._own[number], number, done)

    def begin(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Writes the first weights, in the order of ``Model.names``, and moments of zero."""
        kept: dict[str, Tensor] = {}
        for name, x in weights:
            kept[name] = x
            if not name.startswith("blocks."):
                self._begin_pieces(name, kept.pop(name))
            elif len(kept) == len(self.model.shapes):
                layer = int(name.split(".")[1])
                self._begin(layer, [kept[f"blocks.{layer}.{inner}"] for inner in self.model.shapes])
                kept = {}
        self.commit(0, Progress([], None))

    def _begin_pieces(self, name: str, x: Tensor) -> None:
        for number, (piece, _) in enumerate(self.model.pieces, self.model.config.layers):
            if piece.name == name:
                self._begin(number, [x[piece.first : piece.last]])

    def _begin(self, number: int, weights: list[Tensor]) -> None:
        buffer = self._own[number] if number in self._own else self._lane.take()
        buffer.zero_()
        for view, x in zip(self.model.records[number].weights(buffer), weights, strict=True):
            view.copy_(x)
        self.store(number, buffer, 0)

    # --- come and go ---
    @property
    def _lane(self) -> Lane:
        assert self.lane is not None
        return self.lane

    def _at(self, number: int, done: int) -> int:
        return self._starts[number] + done % self.slots * self.model.records[number].nbytes

    def _range(self, number: int, part: str) -> tuple[int, int]:
        record = self.model.records[number]
        ends = {"weights": (0, record.weights_end), "all": (0, record.nbytes)}
        return ends[part] if part in ends else (record.weights_end, record.nbytes)

    def ask(self, number: int, part: str, done: int) -> None:
        """Lets "weights", "moments" or "all" of a record after so many steps come."""
        if number not in self._own:
            self._lane.ask(number, self._at(number, done), *self._range(number, part))

    def fetch(self, number: int, part: str, done: int) -> Tensor:
        """A buffer with them in their places. It is to be given to ``free`` or ``store``."""
        if number in self._own:
            if part != "weights" and self.lane is not None:
                self.lane.written(number)  # before somebody changes it
            return self._own[number]
        buffer = self._lane.fetch(number, self._at(number, done), *self._range(number, part))
        if part != "moments":
            self.model.records[number].check(buffer, number, done)
        return buffer

    def free(self, number: int, buffer: Tensor) -> None:
        """The buffer is not needed any longer, and was not changed."""
        if number not in self._own:
            self._lane.give(buffer)

    def store(self, number: int, buffer: Tensor, done: int) -> None:
        """Lets a record go to its place, as it is after so many steps."""
        record = self.model.records[number]
        record.stamp(buffer, number, done)
        own = number in self._own
        if self.lane is not None and (self.resumable or not own):
            self.lane.write(number, self._at(number, done), buffer, record.nbytes, free=not own)

    def commit(self, done: int, progress: Progress) -> None:
        """The step counts from here on."""
        if self.lane is None:
            return
        self.lane.drain()
        if not self.resumable:
            return
        assert self.pages is not None and self.folder is not None
        self.pages.sync()
        from tq.train.tqk.disk import durable

        note = {"format": FORMAT, "steps": done, "norm": progress.norm, "settings": self.settings}
        durable(self.folder / MANIFEST, [json.dumps({**note, "losses": progress.losses}).encode()])

    def drain(self) -> None:
        """Returns when nothing is under way."""
        if self.lane is not None:
            self.lane.drain()

    def close(self) -> None:
        """Waits for what is under way, and lets go of the file."""
        with suppress(OSError, ValueError):
            self.drain()
        self.threads.close()
        if self.pages is not None:
            self.pages.close()
        if self.lock is not None:
            self.lock.close()

    @property
    def held_nbytes(self) -> int:
        """Bytes of buffers in memory."""
        lane = 0 if self.lane is None else BUFFERS * self.lane.nbytes
        return lane + sum(buffer.nbytes for buffer in self._own.values())


def decoded(model: Model, number: int, buffer: Tensor, done: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name in the record, m, v) in fp32 of each parameter of a record, as copies of its shape."""
    record = model.records[number]
    for run, store, _ in record.stores(buffer, done):
        both = [store.get(name) if done else torch.zeros(store.numel) for name in ("m", "v")]
        for place, i in enumerate(run):
            start, size = store.starts[place], store.sizes[place]
            m, v = (torch.as_tensor(x)[start : start + size].reshape(record.entries[i].shape).clone() for x in both)
            yield record.entries[i].name, m, v
