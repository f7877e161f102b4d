"""One file: tensors in lossless frames, each with two checksums, and a footer that says where they lie.

    begin   8 bytes   MAGIC
    frames            of every tensor, one after the other, and the steps that its rows and columns are expected at
    footer            JSON: version, where it begins, state (nested), tensors (name, dtype, shape, where its frames are)
    end    32 bytes   BLAKE2b of the footer (16), its size (8), MAGIC

The footer is written last, so a file that was cut has none. Of a frame, CRC-32 of the code finds what the disk did to
it, and CRC-32 of the numbers finds what a decoder does wrong. Nothing is unpickled, nothing in a file is executed. A
tensor, or some of its rows, is read with its own frames only.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tq.quant import lossless
from tq.quant.lossless import FRAME, CorruptCode, Encoded
from tq.train.tqk.disk import DISK, Disk, durable
from tq.train.tqk.tree import DTYPES, put_together, take_apart

MAGIC, VERSION = b"\x89TQK\r\n\x1a\n", 1
_END = struct.Struct("<16sQ8s")
_FIRST = re.compile(r"(^|[./])exp_avg(?=@|$)")  # as PyTorch's Adam calls a first moment; after @ stands a shard's place
_LEAST_BYTES = 12  # of a frame
_LARGE = 2 * FRAME  # elements a thread, from which on a tensor is worth all threads
Given = TypeVar("Given")
Made = TypeVar("Made")


class DamagedFile(ValueError):
    """A file that is not whole, or not as it was written."""


# --- writing -------------------------------------------------------------------------------------------------------


def save(path: str | os.PathLike[str], state: Any, *, threads: int | None = None, disk: Disk = DISK) -> int:
    """Write a state to a file, losslessly coded, so that ``path`` is always the old file or the new one, whole.

    Args:
        path: of the file; ``.tqk`` by custom. Its folder is made.
        state: tensors, numbers, texts, None and dtypes in dicts, lists and tuples. A tensor that occurs twice is stored
            once. ``exp_avg`` beside ``exp_avg_sq`` of its shape is predicted from it.
        threads: that encode at the same time; None: as many as PyTorch uses. The file does not depend on it.
        disk: what writes.

    Returns:
        Bytes of the file.

    Raises:
        SaveFailed: where the disk is full, gone or read-only. What was at ``path`` is untouched.
        TypeError: for a state with anything else in it.

    Example:
        >>> import tempfile, torch
        >>> from tq.train import tqk
        >>> path = tempfile.mkdtemp() + "/model.tqk"
        >>> size = tqk.save(path, {"weight": torch.ones(100, 100), "step": 7})
        >>> tqk.load(path)["step"]
        7
    """
    parts = content(state, threads)
    written = 0

    def counted() -> Iterator[bytes | memoryview]:
        nonlocal written
        for part in parts:
            written += len(part)
            yield part

    durable(Path(path), counted(), disk)
    return written


def content(state: Any, threads: int | None = None) -> Iterator[bytes | memoryview]:
    """The bytes of a file, part after part; a tensor is encoded when its turn comes."""
    said, tensors = take_apart(state)
    yield MAGIC
    at = len(MAGIC)
    described: list[dict[str, Any]] = []
    first_of: dict[tuple[Any, ...], str] = {}
    order = sorted(tensors, key=lambda name: bool(_FIRST.search(name)))  # what predicts comes before
    firsts = [name for name in order if first_of.setdefault(_place(tensors[name]), name) == name]
    pairs = [(tensors[name], None if (v := _second_moment(name, tensors)) is None else tensors[v]) for name in firsts]
    codes = _side_by_side(_encoded, pairs, [tensor.numel() for tensor, _ in pairs], threads)
    for name in order:
        same = first_of[_place(tensors[name])]
        if same != name:
            described.append({"name": name, "same": same})
            continue
        code, checks = next(codes)
        entry: dict[str, Any] = {"name": name, "dtype": str(code.dtype).removeprefix("torch.")}
        entry |= {"shape": list(code.shape), "base": code.base, "signed": code.signed}
        second = _second_moment(name, tensors) if code.given else None
        entry["given"] = None if second is None else first_of[_place(tensors[second])]
        entry["steps"], entry["frames"] = [at, len(code.steps), zlib.crc32(code.steps)], []
        yield code.steps
        at += len(code.steps)
        for frame, (of_code, of_numbers) in zip(code.frames, checks, strict=True):
            entry["frames"].append([at, len(frame), of_code, of_numbers])
            yield frame
            at += len(frame)
        described.append(entry)
    said = {"version": VERSION, "begins": at, "state": said, "tensors": described}
    footer = json.dumps(said, separators=(",", ":")).encode()
    yield footer
    yield _END.pack(blake2b(footer, digest_size=16).digest(), len(footer), MAGIC)


def _encoded(pair: tuple[Tensor, Tensor | None], threads: int | None) -> tuple[Encoded, list[tuple[int, int]]]:
    """The code of a tensor and the checksums of its frames: of the code, and of the numbers."""
    tensor, second = pair
    code = lossless.encode(tensor, second_moment=second, threads=threads)
    numbers, size = _bytes(tensor), FRAME * tensor.element_size()
    parts = (numbers[number * size : (number + 1) * size] for number in range(len(code.frames)))
    return code, [(zlib.crc32(frame), zlib.crc32(part)) for frame, part in zip(code.frames, parts, strict=True)]


def _side_by_side(
    work: Callable[[Given, int | None], Made], given: Sequence[Given], sizes: Sequence[int], threads: int | None
) -> Iterator[Made]:
    """What ``work`` makes, in order. Large ones have all threads, one after the other; of the others as many are under
    way as there are threads, so that small tensors keep all cores busy and memory for a few is enough."""
    count = threads or torch.get_num_threads()
    if count == 1 or len(given) < 2:
        yield from (work(each, threads) for each in given)
        return
    ahead: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(count) as pool:
        for each, size in zip(given, sizes, strict=True):
            if size >= _LARGE * count:
                yield from (ahead.popleft().result() for _ in range(len(ahead)))
                yield work(each, threads)
                continue
            ahead.append(pool.submit(work, each, 1))
            if len(ahead) > count:
                yield ahead.popleft().result()
        yield from (ahead.popleft().result() for _ in range(len(ahead)))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same numbers in the same memory."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _second_moment(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    other = _FIRST.sub(r"\1exp_avg_sq", name)
    if other == name or other not in tensors:
        return None
    fits = tensors[other].shape == tensors[name].shape and tensors[other].dtype == tensors[name].dtype
    return other if fits else None


def _frames_of(shape: tuple[int, ...], rows: tuple[int, int]) -> range:
    if not shape or not 0 <= rows[0] <= rows[1] <= shape[0]:
        raise ValueError(f"rows {rows} of a tensor of shape {shape}")
    of_row = int(np.prod(shape[1:], dtype=np.int64))
    return range(rows[0] * of_row // FRAME, -(-rows[1] * of_row // FRAME))


def _of_whole_frames(shape: tuple[int, ...], rows: tuple[int, int]) -> tuple[int, int]:
    """All rows of which something lies in the frames of ``rows``."""
    frames, of_row = _frames_of(shape, rows), max(1, int(np.prod(shape[1:], dtype=np.int64)))
    return frames.start * FRAME // of_row, min(shape[0], -(-frames.stop * FRAME // of_row))


# --- reading -------------------------------------------------------------------------------------------------------


class File:
    """A checkpoint that is open for reading; a context manager.

    Args:
        path: of a file that ``save`` wrote.

    Raises:
        DamagedFile: where the footer is not whole.
        OSError: where there is no such file, or it cannot be read.

    Attributes:
        path: of the file.
        bytes_read: so far.
        digest: BLAKE2b of the footer (16 bytes), which holds the checksums of everything else.

    Example:
        >>> import tempfile, torch
        >>> from tq.train import tqk
        >>> path = tempfile.mkdtemp() + "/model.tqk"
        >>> size = tqk.save(path, {"a": torch.arange(12).reshape(4, 3), "b": torch.zeros(5)})
        >>> with tqk.File(path) as file:
        ...     print(file.names(), file.read("a", rows=(1, 2)))
        ['a', 'b'] tensor([[3, 4, 5]])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.bytes_read, self.digest = Path(path), 0, b""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._size = os.fstat(self._file).st_size
            footer = self._footer()
            self._state = footer["state"]
            self._tensors: dict[str, dict[str, Any]] = {}
            for entry in footer["tensors"]:
                self._check(entry)
                self._tensors[entry["name"]] = entry
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            self.close()
            raise self._damaged("its footer does not describe tensors") from error
        except BaseException:
            self.close()
            raise

    def names(self) -> list[str]:
        """Of all tensors: their paths in the state."""
        return sorted(self._tensors)

    def describe(self, name: str) -> dict[str, Any]:
        """Of a tensor: ``dtype``, ``shape``, ``nbytes`` of its numbers, ``stored`` bytes of its code, and ``given``,
        the tensor that it is predicted from, or ``same``, the one that it shares its numbers with; else None.

        Args:
            name: of the tensor.

        Raises:
            KeyError: if there is no tensor of this name.
        """
        entry = self._entry(name)
        own = self._tensors[name]
        shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
        stored = 0 if "same" in own else entry["steps"][1] + sum(frame[1] for frame in entry["frames"])
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        found = {"dtype": dtype, "shape": shape, "nbytes": nbytes, "stored": stored, "given": entry["given"]}
        return found | {"same": own.get("same")}

    def read(self, name: str, *, rows: tuple[int, int] | None = None, threads: int | None = None) -> Tensor:
        """A tensor, or some of its rows, from the frames that hold them.

        Args:
            name: of the tensor.
            rows: first and last (exclusive) index along the first dimension; None: all.
            threads: that decode at the same time; None: as many as PyTorch uses.

        Raises:
            KeyError: if there is no tensor of this name.
            DamagedFile: where a checksum of what is read is wrong.
            ValueError: where rows are out of range.
        """
        entry = self._entry(name)
        code, given = self._code(entry, rows), None
        if entry["given"] is not None and rows is None:
            given = self.read(entry["given"], threads=threads)
        elif entry["given"] is not None and rows is not None:
            given, wider = torch.empty(code.shape, dtype=code.dtype), _of_whole_frames(code.shape, rows)
            given[slice(*wider)] = self.read(entry["given"], rows=wider, threads=threads)
        return self._decoded(code, name, given, rows, threads)

    def load(self, *, threads: int | None = None) -> Any:
        """The whole state, on the CPU.

        Args:
            threads: that decode at the same time; None: as many as PyTorch uses.

        Raises:
            DamagedFile: where a checksum is wrong.
        """
        tensors: dict[str, Tensor] = {}
        ready: dict[str, Future[None]] = {name: Future() for name in self._tensors}
        own = [name for name, entry in self._tensors.items() if "same" not in entry]

        def get(name: str, threads: int | None) -> None:
            entry = self._tensors[name]
            try:
                given = None
                if entry["given"] is not None:  # was begun before: what predicts was written before
                    ready[entry["given"]].result()
                    given = tensors[entry["given"]]
                tensors[name] = self._decoded(self._code(entry, None), name, given, None, threads)
            except BaseException as error:
                ready[name].set_exception(error)
                raise
            ready[name].set_result(None)

        for _ in _side_by_side(get, own, [int(np.prod(self._tensors[name]["shape"])) for name in own], threads):
            pass
        for name, entry in self._tensors.items():
            if "same" in entry:
                tensors[name] = tensors[entry["same"]]
        return self._together(tensors)

    def load_objects(self) -> Any:
        """The state with None where its tensors are: nothing more is read.

        Raises:
            DamagedFile: where the footer does not describe a state.
        """
        return self._together(dict.fromkeys(self._tensors))

    def close(self) -> None:
        """Close the file; more than once is no error."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- pieces ---

    def _damaged(self, how: str) -> DamagedFile:
        return DamagedFile(f"{self.path.name} is damaged: {how}")

    def _together(self, tensors: Mapping[str, Any]) -> Any:
        try:
            return put_together(self._state, tensors)
        except (ValueError, TypeError, RecursionError) as error:
            raise self._damaged("its footer does not describe a state") from error

    def _read(self, at: int, size: int) -> bytes:
        found = os.pread(self._file, size, at)
        while found and len(found) < size and (more := os.pread(self._file, size - len(found), at + len(found))):
            found += more
        self.bytes_read += len(found)
        return found

    def _footer(self) -> Any:
        end = self._read(max(0, self._size - _END.size), _END.size)
        if len(end) < _END.size or end[-len(MAGIC) :] != MAGIC or self._read(0, len(MAGIC)) != MAGIC:
            raise self._damaged("it has no end, so it was cut or is no checkpoint")
        digest, size, _ = _END.unpack(end)
        if size > self._size - _END.size - len(MAGIC):
            raise self._damaged("its end is not that of a checkpoint")
        said = self._read(self._size - _END.size - size, size)
        if blake2b(said, digest_size=16).digest() != digest:
            raise self._damaged("its footer is not as it was written")
        self.digest = digest
        footer = json.loads(said)
        if footer["version"] != VERSION:
            raise ValueError(f"{self.path.name} has format {footer['version']}; this reads format {VERSION}")
        if footer["begins"] != self._size - _END.size - size:
            raise self._damaged("something was put in before its footer, or left out")
        return footer

    def _check(self, entry: dict[str, Any]) -> None:
        """KeyError or TypeError for an entry that cannot be read: what it refers to must come before it."""
        if "same" in entry:
            if "same" in self._tensors[entry["same"]]:
                raise KeyError(entry["same"])
            return
        shape, places = entry["shape"], [entry["steps"], *entry["frames"]]
        numel = int(np.prod([int(size) for size in shape], dtype=np.int64))
        right = all(isinstance(size, int) and size >= 0 for size in shape) and entry["dtype"] in DTYPES
        right = right and -(-numel // FRAME) == len(entry["frames"]) and isinstance(entry["base"], int)
        right = right and all(0 <= place[0] and 0 <= place[1] <= self._size - place[0] for place in places)
        right = right and all(place[1] >= min(_LEAST_BYTES, numel) for place in entry["frames"])
        if not right or entry["given"] is not None and self._tensors[entry["given"]]["shape"] != shape:
            raise KeyError(entry["name"])

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._tensors:
            raise KeyError(f"{self.path.name} has no tensor {name!r}; it has {', '.join(self.names()[:8])} ...")
        entry = self._tensors[name]
        return self._tensors[entry["same"]] if "same" in entry else entry

    def _piece(self, place: list[int], name: str) -> bytes:
        found = self._read(place[0], place[1])
        if len(found) != place[1] or zlib.crc32(found) != place[2]:
            raise self._damaged(f"{name} is not as it was written, at byte {place[0]:,}")
        return found

    def _code(self, entry: dict[str, Any], rows: tuple[int, int] | None) -> Encoded:
        """The code of a tensor, without the frames that hold none of the rows."""
        name, shape, places = entry["name"], tuple(entry["shape"]), entry["frames"]
        wanted = range(len(places)) if rows is None else _frames_of(shape, rows)
        frames = tuple(self._piece(place, name) if k in wanted else b"" for k, place in enumerate(places))
        steps, given = self._piece(entry["steps"], name), entry["given"] is not None
        return Encoded(DTYPES[entry["dtype"]], shape, frames, entry["base"], entry["signed"], steps, given)

    def _decoded(
        self, code: Encoded, name: str, given: Tensor | None, rows: tuple[int, int] | None, threads: int | None
    ) -> Tensor:
        check = partial(self._right, name)
        try:
            return lossless.decode(code, second_moment=given, rows=rows, threads=threads, check=check)
        except CorruptCode as error:
            raise self._damaged(f"{name}: {error}") from error

    def _right(self, name: str, number: int, numbers: memoryview) -> bool:
        return zlib.crc32(numbers) == self._entry(name)["frames"][number][3]


def load(path: str | os.PathLike[str], *, threads: int | None = None) -> Any:
    """The state that ``save`` wrote, on the CPU, every checksum compared.

    Args:
        path: of the file.
        threads: that decode at the same time; None: as many as PyTorch uses.

    Raises:
        DamagedFile: where the file is cut or not as it was written.
        OSError: where there is no such file, or it cannot be read.

    Example:
        >>> import tempfile, torch
        >>> from tq.train import tqk
        >>> path = tempfile.mkdtemp() + "/model.tqk"
        >>> size = tqk.save(path, [torch.ones(2), {"lr": 0.1}])
        >>> tqk.load(path)
        [tensor([1., 1.]), {'lr': 0.1}]
    """
    with File(path) as file:
        return file.load(threads=threads)
