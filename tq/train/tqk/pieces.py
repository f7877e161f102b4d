"""A state in pieces that are named by what is in them, so that what did not change is linked and not written again.

    <name>.pieces.tqk   the state, with the digests of the pieces of each tensor instead of its numbers
    <digest>.tqk        some rows of a tensor

A piece that an earlier checkpoint has gets a second name (a hard link): a checkpoint is whole by itself, and removing
an earlier one needs no count of who uses what. Before a piece is shared it is read and compared, so damage does not
spread; damage that comes later meets every checkpoint that shares the piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tq.train.tqk.disk import DISK, Disk, attempt
from tq.train.tqk.file import DamagedFile, File, load, save
from tq.train.tqk.tree import DTYPES, put_together, take_apart

ENDING = ".pieces.tqk"
PIECE = 1 << 18  # elements of a piece, about


def save_pieces(
    path: Path, state: Any, earlier: Iterable[Path] = (), *, piece: int = PIECE, threads: int | None = None,
    disk: Disk = DISK,
) -> int:  # fmt: skip
    """Write a state, linking the pieces that are already there.

    Args:
        path: of the manifest; pieces lie beside it. Its name ends with ``.pieces.tqk``.
        state: as ``tqk.save`` takes it.
        earlier: folders that may hold pieces, on the same file system.
        piece: elements of a piece, about: whole rows.
        threads: that encode at the same time; None: as many as PyTorch uses.
        disk: what writes.

    Returns:
        Bytes that were written.

    Raises:
        SaveFailed: where the disk is full, gone or read-only.
        TypeError: for a state with anything but tensors, numbers, texts, None and dtypes in it.
    """
    said, tensors = take_apart(state)
    known = {each.name: each for folder in earlier for each in folder.glob("*.tqk") if not each.name.endswith(ENDING)}
    described, written = {}, 0
    for name, tensor in tensors.items():
        digests = []
        for rows in _split(tensor, piece):
            digests.append(digest := _digest(rows))
            written += _put(path.with_name(f"{digest}.tqk"), rows, digest, known, threads, disk)
        dtype = str(tensor.dtype).removeprefix("torch.")
        described[name] = {"dtype": dtype, "shape": list(tensor.shape), "pieces": digests}
    if tensors:
        # Every name of a piece is on the disk before that of what needs it.
        attempt("write", path, lambda: disk.sync_folder(path.parent))
    return written + save(path, {"state": said, "tensors": described}, threads=threads, disk=disk)


def load_pieces(file: File, *, threads: int | None = None) -> Any:
    """The state that ``save_pieces`` wrote, every digest compared.

    Args:
        file: the manifest, open.
        threads: that decode at the same time; None: as many as PyTorch uses.

    Raises:
        DamagedFile: where a piece is missing or not as it was written.
    """
    said = file.load()
    try:
        tensors = {name: _gathered(file.path, each, threads) for name, each in said["tensors"].items()}
        return put_together(said["state"], tensors)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, DamagedFile):
            raise
        raise DamagedFile(f"{file.path.name} is damaged: it does not describe pieces") from error


def _split(tensor: Tensor, piece: int) -> list[Tensor]:
    """Whole rows; a tensor without rows is one piece, and one without numbers none."""
    if tensor.numel() == 0:
        return []
    if tensor.dim() == 0:
        return [tensor]
    return list(tensor.split(max(1, piece * tensor.shape[0] // tensor.numel())))


def _digest(rows: Tensor) -> str:
    """Of dtype, shape and numbers."""
    head = f"{rows.dtype} {tuple(rows.shape)}".encode()
    numbers = rows.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    return blake2b(numbers.data, digest_size=20, key=blake2b(head, digest_size=32).digest()).hexdigest()


def _read(path: Path, digest: str, threads: int | None) -> Tensor:
    rows = load(path, threads=threads)
    if not isinstance(rows, Tensor) or _digest(rows) != digest:
        raise DamagedFile(f"{path.name} is damaged: it does not hold what its name says")
    return rows


def _put(path: Path, rows: Tensor, digest: str, known: dict[str, Path], threads: int | None, disk: Disk) -> int:
    """Link or write a piece; bytes that were written."""
    if known.get(path.name) == path:
        return 0
    if (there := known.get(path.name)) is not None:
        with suppress(OSError, DamagedFile):  # gone, damaged, or a file system without links: it is written
            _read(there, digest, threads)
            disk.link(there, path)
            known[path.name] = path
            return 0
    size = save(path, rows, threads=threads, disk=disk)
    known[path.name] = path
    return size


def _gathered(manifest: Path, entry: dict[str, Any], threads: int | None) -> Tensor:
    whole = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
    at = 0
    for digest in entry["pieces"]:
        path = manifest.with_name(f"{digest}.tqk")
        try:
            rows = _read(path, digest, threads)
        except FileNotFoundError as error:
            raise DamagedFile(f"{manifest.name} is damaged: piece {path.name} is missing") from error
        if whole.dim() == 0:
            whole.copy_(rows)
        else:
            whole[at : at + len(rows)] = rows
            at += len(rows)
    if whole.dim() and whole.numel() and at != len(whole):
        raise DamagedFile(f"{manifest.name} is damaged: pieces are missing")
    return whole
