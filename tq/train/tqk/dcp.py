"""Lossless files under ``torch.distributed.checkpoint``: its planners and resharding, our bytes on the disk.

    import torch.distributed.checkpoint as dcp
    from tq.train.tqk.dcp import Reader, Writer

    dcp.save(state_dict, storage_writer=Writer(folder))
    dcp.load(state_dict, storage_reader=Reader(folder))       on any number of ranks

Every rank writes one file under a name of this saving; what makes it a checkpoint is ``metadata.tqk``, which is renamed
into its place when all files are on the disk, and only then are the files of the saving before removed. So the same
folder can be saved to again and again, and whatever moment a machine stops at, one of the two can be loaded. The
metadata is no pickle. Objects that are no tensors must be ones that a file can hold (``tqk.save``).
"""

from __future__ import annotations

import dataclasses
import io
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tq.train.tqk.disk import DISK, Disk, durable_folder
from tq.train.tqk.file import DamagedFile, File, load, save

_METADATA, _ENDING = "metadata.tqk", ".tqk"


class Writer(StorageWriter):
    """Writes a checkpoint into a folder; for ``torch.distributed.checkpoint.save``.

    Args:
        folder: the same for all ranks, on a file system that they share. It is made if it is missing.
        threads: that encode at the same time; None: as many as PyTorch uses.
        disk: what writes.

    Example:
        >>> import tempfile, torch, warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> from tq.train.tqk.dcp import Reader, Writer
        >>> folder = tempfile.mkdtemp()
        >>> state = {"weight": torch.zeros(3), "step": 0}
        >>> with warnings.catch_warnings(action="ignore"):  # that there is one process
        ...     saved = dcp.save({"weight": torch.ones(3), "step": 7}, storage_writer=Writer(folder), no_dist=True)
        ...     dcp.load(state, storage_reader=Reader(folder), no_dist=True)
        >>> state
        {'weight': tensor([1., 1., 1.]), 'step': 7}
    """

    def __init__(self, folder: str | os.PathLike[str], *, threads: int | None = None, disk: Disk = DISK) -> None:
        self.folder, self.threads, self._disk = Path(folder), threads, disk

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a saving. checkpoint_id: another folder."""
        self.folder = Path(checkpoint_id) if checkpoint_id else self.folder

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed before the plan. is_coordinator: whether this rank makes it."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is; makes the folder. plan: what this rank writes."""
        durable_folder(self.folder, self._disk)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans with the names of the files. plans: of all ranks."""
        token = secrets.token_hex(8)
        names = [f"{token}-{rank}{_ENDING}" for rank in range(len(plans))]
        return [dataclasses.replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, durable when the future is there. plan, planner: of PyTorch."""
        name, tensors, objects, keys = plan.storage_data, {}, {}, []
        for item in plan.items:
            keys.append(_key(item.index))
            if item.type == WriteItemType.BYTE_IO:  # the planner would pickle it
                objects[keys[-1]] = cast(Any, planner).lookup_object(item.index)
            else:
                tensors[keys[-1]] = cast(Tensor, planner.resolve_data(item)).detach()
        size = save(self.folder / name, {"": tensors, "objects": objects}, threads=self.threads, disk=self._disk)
        shares = [size if number == 0 else 0 for number in range(len(keys))]
        done: Future[list[WriteResult]] = Future()
        items = zip(plan.items, keys, shares, strict=True)
        done.set_result([WriteResult(item.index, share, (name, key)) for item, key, share in items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make it a checkpoint, then remove the one before. metadata: of PyTorch; results: of all ranks."""
        stored = [(result.index, *result.storage_data) for of_rank in results for result in of_rank]
        save(self.folder / _METADATA, _said(metadata, stored), disk=self._disk)
        kept = {_METADATA, *(name for _, name, _ in stored)}
        for name in os.listdir(self.folder):
            if name not in kept and _ENDING in name:
                with suppress(OSError):
                    self._disk.remove(self.folder / name)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can be a folder. checkpoint_id: its path."""
        return isinstance(checkpoint_id, (str, os.PathLike)) and "://" not in str(checkpoint_id)


class Reader(StorageReader):
    """Reads what ``Writer`` wrote; for ``torch.distributed.checkpoint.load``, on any number of ranks.

    Only the frames with rows that this rank needs are read and decoded.

    Args:
        folder: that ``Writer`` wrote to.
        threads: that decode at the same time; None: as many as PyTorch uses.

    Example:
        >>> import tempfile, torch, warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> from tq.train.tqk.dcp import Reader, Writer
        >>> folder = tempfile.mkdtemp()
        >>> with warnings.catch_warnings(action="ignore"):  # that there is one process
        ...     saved = dcp.save({"rows": torch.arange(4)}, storage_writer=Writer(folder), no_dist=True)
        >>> Reader(folder).read_metadata().state_dict_metadata["rows"].size
        torch.Size([4])
    """

    def __init__(self, folder: str | os.PathLike[str], *, threads: int | None = None) -> None:
        self.folder, self.threads = Path(folder), threads
        self._places: dict[MetadataIndex, tuple[str, str]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a loading. checkpoint_id: another folder."""
        self.folder, self._places = Path(checkpoint_id) if checkpoint_id else self.folder, {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds.

        Raises:
            FileNotFoundError: where there is none.
            DamagedFile: where it is not as it was written.
        """
        said = load(self.folder / _METADATA)
        try:
            return _metadata(said)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(f"{_METADATA} in {self.folder.name} is no metadata of a checkpoint") from error

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember where everything lies. metadata: of ``read_metadata``; is_coordinator: is not needed."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is. plan: what this rank reads."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are. plans: of all ranks."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for. plan, planner: of PyTorch."""
        by_file: dict[str, list[tuple[Any, str]]] = {}
        for item in plan.items:
            name, key = self._places[item.storage_index]
            by_file.setdefault(name, []).append((item, key))
        for name, items in by_file.items():
            with File(self.folder / name) as file:
                objects = file.load_objects()["objects"]
                for item, key in items:
                    if item.type == LoadItemType.BYTE_IO:
                        content = io.BytesIO()
                        torch.save(objects[key], content)  # ours; the planner unpickles nothing from the disk
                        content.seek(0)
                        planner.load_bytes(item, content)
                        continue
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_cut(file, key, item.storage_offsets, item.lengths, self.threads))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can be a folder. checkpoint_id: its path."""
        return Writer.validate_checkpoint_id(checkpoint_id)


def _cut(file: File, key: str, offsets: Sequence[int], lengths: Sequence[int], threads: int | None) -> Tensor:
    """A box of a stored tensor, from the frames with its rows."""
    if not len(offsets):
        return file.read(key, threads=threads)
    found = file.read(key, rows=(offsets[0], offsets[0] + lengths[0]), threads=threads)
    for dim in range(1, len(offsets)):
        found = found.narrow(dim, offsets[dim], lengths[dim])
    return found


def _key(index: MetadataIndex) -> str:
    return index.fqn if index.offset is None else f"{index.fqn}@{','.join(map(str, index.offset))}"


def _said(metadata: Metadata, stored: list[tuple[MetadataIndex, str, str]]) -> dict[str, Any]:
    """PyTorch's metadata in words that a file can hold."""
    described: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        described[name] = None
        if isinstance(entry, TensorStorageMetadata):
            chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks]
            described[name] = {"dtype": entry.properties.dtype, "size": list(entry.size), "chunks": chunks}
    places = [[index.fqn, None if index.offset is None else list(index.offset), *at] for index, *at in stored]
    return {"tensors": described, "planner": metadata.planner_data, "places": places}


def _metadata(said: dict[str, Any]) -> Metadata:
    described: dict[str, Any] = {}
    for name, entry in said["tensors"].items():
        described[name] = BytesStorageMetadata()
        if entry is not None:
            chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in entry["chunks"]]
            properties = TensorProperties(dtype=entry["dtype"])
            described[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    places = {MetadataIndex(fqn, offset): (name, key) for fqn, offset, name, key in said["places"]}
    return Metadata(described, said["planner"], places, StorageMeta())
