"""Finished runs of long chapters as files that travel, so that hours of training need not be spent twice.

An outcome counts only for the code, the versions and the device that it was made with (``tq.book.record.tasks``), so
unpacking changes no result: it saves the runs that would come out the same. Promotion packs the runs that a recording
rests on beside it; ``tq.book.run.revalidate`` draws its sample from them.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Collection
from pathlib import Path

import torch

from tq.book import paths

_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.pt")


def place(chapter: str, device: str, profile: str) -> Path:
    """Where the finished runs of a chapter are kept with the repository."""
    return paths.place("outcomes", device, profile, f"{chapter}.tar.xz", paths.root() / "data")


def pack(chapter: str, device: str, profile: str, names: Collection[str] | None = None) -> int:
    """Writes them there, the same bytes for the same runs; returns their number. ValueError where there are none.

    names: of the runs; None: all that are kept.
    """
    folder = paths.tasks(chapter, device, profile)
    files = sorted(path for path in folder.glob("*") if _NAME.fullmatch(path.name))
    files = [path for path in files if names is None or path.name in names]
    if not files:
        raise ValueError(f"no finished runs in {folder}")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as packed:
        for path in files:
            entry = tarfile.TarInfo(path.name)
            entry.size = path.stat().st_size
            packed.addfile(entry, io.BytesIO(path.read_bytes()))
    paths.write_bytes(place(chapter, device, profile), content.getvalue())
    return len(files)


def unpack(chapter: str, device: str, profile: str) -> tuple[int, int]:
    """(runs that are kept, those among them that were new here). ValueError for what is no archive of runs."""
    source, folder = place(chapter, device, profile), paths.tasks(chapter, device, profile)
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(source, mode="r:xz") as packed:
            for entry in packed:
                content = packed.extractfile(entry)
                if content is None or not _NAME.fullmatch(entry.name):
                    raise ValueError(f"{source} holds {entry.name!r}, which is no finished run")
                found[entry.name] = content.read()
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{source} is no archive of finished runs: {error}") from error
    new = [name for name in found if not (folder / name).exists()]
    for name in new:
        torch.load(io.BytesIO(found[name]), weights_only=True)
        paths.write_bytes(folder / name, found[name])
    return len(found), len(new)
