"""Raw text of the corpora: the standard library's own sources, pinned downloads, and how a text is cut in two.

Refused: a download that was not asked for, content whose size or SHA-256 is not the pinned one, half files.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import sysconfig
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = {"stdlib": 0.05, "tiny-shakespeare": 0.1}  # share of the bytes; a tenth as in nanoGPT

# Tests and their data, third-party packages, generated tables and topic texts; none of it is the library's code.
# _sysconfigdata* holds paths of the machine that built Python: the hash must not depend on it.
STDLIB_EXCLUDED = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "pydoc_data",
                   "turtledemo", "__phello__", "ensurepip", "__pycache__")  # fmt: skip
STDLIB_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Download:
    """A pinned file: address with a fixed revision, size and SHA-256."""

    url: str
    nbytes: int
    sha256: str


DOWNLOADS = {
    # Karpathy's char-rnn.
    "tiny-shakespeare": Download(
        "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/"
        "tinyshakespeare/input.txt",
        1_115_394,
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    # Merity et al. 2016, the original raw archive (CC BY-SA); the file that llama.cpp's get-wikitext-2.sh fetches.
    "wikitext-2": Download(
        "https://huggingface.co/datasets/ggml-org/ci/resolve/927b3642933080f1b0e811e2f916e14c292992f9/"
        "wikitext-2-raw-v1.zip",
        4_721_645,
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    ),
}


def cache_dir() -> Path:
    """Folder of downloads and tokenizers: TQ_CACHE of the environment, else ~/.cache/tq-book."""
    return Path(os.environ["TQ_CACHE"]) if os.environ.get("TQ_CACHE") else Path.home() / ".cache" / "tq-book"


def stdlib_files() -> list[Path]:
    """The standard library's ``.py`` files that belong to the corpus, in path order."""
    found = []
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = filter(_belongs, folders)  # pruned here: site-packages may hold many thousand files
        found += [Path(folder, file) for file in files if file.endswith(".py") and _belongs(file)]
    return sorted(found)


def _belongs(name: str) -> bool:
    return name not in STDLIB_EXCLUDED and not name.startswith(STDLIB_EXCLUDED_PREFIXES)


def stdlib(max_bytes: int | None) -> tuple[list[bytes], list[bytes]]:
    """Training and held-out files of the standard library.

    The sorted files are put into the fixed order of the SHA-256 of their relative paths, so that a capped corpus is a
    sample of the whole library and a prefix of any larger one. Whole files are taken until the next one would pass
    ``max_bytes``. A file is held out whenever the held-out bytes are below their share of the bytes before it: the
    splits share no file, and files of equal content count once.
    """
    root = Path(sysconfig.get_path("stdlib"))
    splits: tuple[list[bytes], list[bytes]] = ([], [])
    sizes = [0, 0]
    seen = set()
    for path in sorted(stdlib_files(), key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest()):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest = hashlib.sha256(content).digest()
        if not content.strip() or digest in seen or not _is_utf8(content):
            continue
        if max_bytes is not None and sum(sizes) + len(content) > max_bytes:
            break
        seen.add(digest)
        held = int(sizes[1] < HELD_OUT["stdlib"] * sum(sizes))
        splits[held].append(content)
        sizes[held] += len(content)
    if not splits[0] or not splits[1]:
        version = ".".join(map(str, sys.version_info[:3]))
        raise ValueError(f"max_bytes={max_bytes} leaves an empty split of the standard library of Python {version}")
    return splits


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def cut_text(content: bytes, held_out: float) -> tuple[bytes, bytes]:
    """Two splits of one text, cut after the first line end at or behind the wanted place."""
    content.decode()  # not UTF-8: UnicodeDecodeError, a ValueError that names the byte
    cut = content.find(b"\n", int(len(content) * (1 - held_out))) + 1
    if cut == 0 or cut == len(content):
        raise ValueError(f"text of {len(content)} bytes has no line end to cut at near its last {held_out:.0%}")
    return content[:cut], content[cut:]


def _leading_lines(content: bytes, max_bytes: int | None) -> bytes:
    if max_bytes is None or len(content) <= max_bytes:
        return content
    kept = content[: content.rfind(b"\n", 0, max_bytes) + 1]
    if not kept:
        raise ValueError(f"max_bytes={max_bytes} is shorter than the first line")
    return kept


def pinned_text(
    name: str, path: str | os.PathLike[str] | None, download: bool, folder: Path, max_bytes: int | None
) -> tuple[list[bytes], list[bytes]]:
    """Training and held-out text of a pinned file: WikiText-2's own splits, or the last tenth held out."""
    content = _pinned(name, path, download, folder)
    if name == "wikitext-2":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            train, valid = (archive.read(f"wikitext-2-raw/wiki.{split}.raw") for split in ("train", "valid"))
    else:
        train, valid = cut_text(content, HELD_OUT[name])
    return [_leading_lines(train, max_bytes)], [valid]


def _pinned(name: str, path: str | os.PathLike[str] | None, download: bool, folder: Path) -> bytes:
    """Content of a pinned file: given, cached or (if allowed) downloaded, with its checksum compared each time."""
    source = DOWNLOADS[name]
    local = Path(path) if path is not None else folder / f"{source.sha256[:16]}-{source.url.rsplit('/', 1)[1]}"
    if path is not None or local.exists():
        return _verified(local.read_bytes(), source, str(local))
    if not download:
        raise FileNotFoundError(
            f"{name} is not in the cache: call load({name!r}, download=True) where there is a network, or give "
            f"path= of a copy of {source.url}"
        )
    with urllib.request.urlopen(source.url, timeout=60) as response:
        content = _verified(response.read(source.nbytes + 1), source, source.url)
    write_whole(local, content)
    return content


def _verified(content: bytes, source: Download, origin: str) -> bytes:
    digest = hashlib.sha256(content).hexdigest()
    if len(content) != source.nbytes or digest != source.sha256:
        raise ValueError(
            f"{origin} is not the pinned file: {len(content)} bytes, SHA-256 {digest}; expected {source.nbytes} bytes, "
            f"{source.sha256}"
        )
    return content


def write_whole(path: Path, content: bytes) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)
