"""Finished runs of long chapters as files that travel, so that hours of training need not be spent twice.

An outcome counts only for the code, the versions and the device that it was made with (``tq.book.tasks``), so
unpacking changes no result: it saves the runs that would come out the same.
"""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import torch

from tq.book import paths, runs

_NAME = re.compile(r"[0-9a-f]{32}\.(pt|json)")


def archive(chapter: str, device: str, profile: str) -> Path:
    """Where the finished runs of a chapter are kept with the repository."""
    return paths.place("outcomes", device, profile, f"{chapter}.tar.xz", paths.root() / "data")


def pack(chapter: str, device: str, profile: str) -> int:
    """Writes them there, the same bytes for the same runs; returns their number. ValueError where there are none."""
    folder = runs.tasks(chapter, device, profile)
    files = sorted(path for path in folder.glob("*") if _NAME.fullmatch(path.name))
    if not files:
        raise ValueError(f"no finished runs in {folder}")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as packed:
        for path in files:
            entry = tarfile.TarInfo(path.name)
            entry.size = path.stat().st_size
            packed.addfile(entry, io.BytesIO(path.read_bytes()))
    paths.write_bytes(archive(chapter, device, profile), content.getvalue())
    return sum(path.suffix == ".pt" for path in files)


def unpack(chapter: str, device: str, profile: str) -> tuple[int, int]:
    """(runs that are kept, those among them that were new here). ValueError for what is no archive of runs."""
    source, folder = archive(chapter, device, profile), runs.tasks(chapter, device, profile)
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
        if name.endswith(".pt"):
            torch.load(io.BytesIO(found[name]), weights_only=True)
        paths.write_bytes(folder / name, found[name])
    return sum(name.endswith(".pt") for name in found), sum(name.endswith(".pt") for name in new)
