"""Text corpora behind one interface: bytes or a small byte-level BPE, two disjoint splits, batches that repeat.

Sources: the standard library's own sources of the running interpreter (always there), Tiny Shakespeare and WikiText-2
(raw) against pinned checksums, any text file. Refused: streaming, state between batches. A batch is a pure function
of (seed, step, split), so a resumed run meets the data that an unbroken one would.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tq.quant.rotation import derive_seed
from tq.train.model.text_sources import DOWNLOADS, cache_dir, cut_text, pinned_text, stdlib, write_whole

NAMES = ("stdlib", *DOWNLOADS)
SPLITS = ("train", "valid")


@dataclass(frozen=True, eq=False)
class Corpus:
    """Two disjoint splits of one text as tokens. ``load`` makes it.

    Attributes:
        name: name of the source.
        tokenizer: "bytes" or "bpe".
        vocab: number of tokens that may occur (256 for bytes).
        train: tokens of the training split, [tokens], in uint8, uint16 or int32 (the smallest that holds ``vocab``).
        valid: tokens of the held-out split, likewise.
        sha256: digest of the raw bytes, training split first, then the held-out one, as hexadecimal digits.
        train_bytes: raw bytes of the training split.
        valid_bytes: raw bytes of the held-out split.
        bpe: the ``tokenizers.Tokenizer``; None (default) for bytes.

    Example:
        >>> from tq.train.model import load
        >>> corpus = load("stdlib", max_bytes=200_000)
        >>> ids, targets = corpus.batch(step=0, batch=2, seq=8, seed=0)
        >>> tuple(ids.shape), bool((ids[:, 1:] == targets[:, :-1]).all())
        ((2, 8), True)
        >>> corpus.decode(corpus.encode("def f"))
        'def f'
    """

    name: str
    tokenizer: str
    vocab: int
    train: Tensor
    valid: Tensor
    sha256: str
    train_bytes: int
    valid_bytes: int
    bpe: Any = field(default=None, repr=False)  # tokenizers.Tokenizer

    def split(self, name: str) -> Tensor:
        """Tokens of the split ``name``, "train" or "valid"; another name raises ``ValueError``."""
        if name not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {name!r}")
        return self.train if name == "train" else self.valid

    @property
    def bytes_per_token(self) -> float:
        """Mean raw bytes behind one token of the held-out split (1.0 for bytes)."""
        return self.valid_bytes / len(self.valid)

    def batch(
        self, step: int, batch: int, seq: int, seed: int, split: str = "train", device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """Windows drawn uniformly, with replacement, by a counter hash of (seed, split, step, row).

        Neither earlier calls nor any generator matter, and row r is the same at every batch size. A window may span
        two documents of its split, never two splits.

        Args:
            step: number of the training step.
            batch: windows to draw.
            seq: tokens per window.
            seed: seed of the data order.
            split: "train" (default) or "valid".
            device: where the tensors go; "cpu" by default.

        Returns:
            ``(ids, targets)``, int64 [batch, seq] on ``device``; targets are ids one position later.

        Raises:
            ValueError: if ``batch`` or ``seq`` is not positive, or the split is shorter than a window.
        """
        tokens = self.split(split)
        if batch < 1 or seq < 1:
            raise ValueError(f"batch and seq must be positive, got batch={batch}, seq={seq}")
        starts = len(tokens) - seq  # the last start has its target inside
        if starts < 1:
            raise ValueError(f"seq={seq} needs more than {len(tokens)} tokens, the whole {split} split of {self.name}")
        rows = []
        for row in range(batch):
            start = derive_seed(seed, "batch", split, step, row) % starts
            rows.append(tokens[start : start + seq + 1].to(torch.int64))
        window = torch.stack(rows).to(device)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def encode(self, text: str) -> Tensor:
        """Tokens of ``text``, in the dtype of the splits; ``decode(encode(text)) == text`` for every text."""
        ids = np.frombuffer(text.encode(), np.uint8) if self.bpe is None else _encode_bpe(self.bpe, [text])
        return torch.from_numpy(ids.astype(_dtype(self.vocab)))

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """Text of the tokens ``ids``; a character cut at either end shows as U+FFFD."""
        numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        if self.bpe is None:
            return bytes(numbers).decode("utf-8", errors="replace")
        return self.bpe.decode(numbers, skip_special_tokens=False)


def bits_per_byte(loss_nats_per_token: float, corpus: Corpus, split: str = "valid") -> float:
    """Converts a loss to bits per raw byte of text, which is comparable between tokenizers.

    It is ``loss / ln 2 * tokens / bytes`` of the split on which the loss was measured.

    Args:
        loss_nats_per_token: mean loss in nats per token.
        corpus: the corpus on which it was measured.
        split: the split on which it was measured: "valid" (default) or "train".

    Returns:
        Bits per byte.

    Raises:
        ValueError: if there is no such split.

    Example:
        >>> from tq.train.model import bits_per_byte, load
        >>> corpus = load("stdlib", max_bytes=200_000)  # one token per byte
        >>> round(bits_per_byte(2.0, corpus), 3)
        2.885
    """
    nbytes = corpus.train_bytes if split == "train" else corpus.valid_bytes
    return loss_nats_per_token / math.log(2) * len(corpus.split(split)) / nbytes


def load(
    name: str = "stdlib",
    tokenizer: str = "bytes",
    vocab: int = 1024,
    max_bytes: int | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    download: bool = False,
    cache: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Loads a corpus by name.

    "stdlib" depends on the Python version (its ``sha256`` tells); the other sources are the same bytes everywhere:
    Tiny Shakespeare (Karpathy 2015) and WikiText-2, raw (Merity et al. 2016).

    Args:
        name: "stdlib" (default, offline: the sources of Python's own library), "tiny-shakespeare" or "wikitext-2".
        tokenizer: "bytes" (default, vocabulary 256) or "bpe" (byte-level, trained on the training split only).
        vocab: vocabulary of the BPE, 256 to 65536; 1024 by default. A short text may yield fewer merges. Ignored for
            bytes.
        max_bytes: largest raw text: whole files of "stdlib", leading lines (of the training split) elsewhere; None
            (default) keeps all.
        path: local copy of the pinned file of "tiny-shakespeare" (input.txt) or "wikitext-2" (the zip archive); None
            by default.
        download: whether a pinned file that is neither given nor cached may be downloaded; False by default.
        cache: folder of downloads and tokenizers; None (default) means the environment's TQ_CACHE, else
            ~/.cache/tq-book.

    Returns:
        A ``Corpus``.

    Raises:
        ValueError: for an unknown name, a bad option, or content whose size or SHA-256 is not the pinned one.
        FileNotFoundError: if the file is neither given nor cached, and ``download`` is False.
        ImportError: if ``tokenizer`` is "bpe" and the package tokenizers is not installed.

    Example:
        >>> from tq.train.model import load
        >>> corpus = load("stdlib", max_bytes=200_000)
        >>> corpus.vocab, corpus.bytes_per_token, corpus.train_bytes > corpus.valid_bytes
        (256, 1.0, True)
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)} (or use text_file(path)), got {name!r}")
    _check(tokenizer, vocab, max_bytes)
    folder = Path(cache) if cache is not None else cache_dir()
    if name == "stdlib":
        if path is not None:
            raise ValueError(f"path belongs to a pinned file, not to 'stdlib'; got {path!r}")
        train, valid = stdlib(max_bytes)
    else:
        train, valid = pinned_text(name, path, download, folder, max_bytes)
    return _build(name, train, valid, tokenizer, vocab, folder)


def text_file(
    path: str | os.PathLike[str],
    tokenizer: str = "bytes",
    vocab: int = 1024,
    held_out: float = 0.1,
    sha256: str | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Corpus:
    """A corpus from one UTF-8 file: the last ``held_out`` share of its bytes, from the next line on, is held out.

    ``sha256`` (hex) refuses other content. The other arguments are those of ``load``.
    """
    _check(tokenizer, vocab, None)
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be a share between 0 and 1, got {held_out!r}")
    content = Path(path).read_bytes()
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256.lower():
        raise ValueError(f"{Path(path).name} has SHA-256 {hashlib.sha256(content).hexdigest()}, expected {sha256}")
    train, valid = cut_text(content, held_out)
    folder = Path(cache) if cache is not None else cache_dir()
    return _build(Path(path).name, [train], [valid], tokenizer, vocab, folder)


def _check(tokenizer: str, vocab: int, max_bytes: int | None) -> None:
    if tokenizer not in ("bytes", "bpe"):
        raise ValueError(f"tokenizer must be 'bytes' or 'bpe', got {tokenizer!r}")
    if tokenizer == "bpe" and not 256 <= vocab <= 65536:
        raise ValueError(f"vocab of a byte-level BPE must be between 256 and 65536, got {vocab!r}")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be positive or None, got {max_bytes!r}")


def _dtype(vocab: int) -> type[np.generic]:
    return np.uint8 if vocab <= 256 else np.uint16 if vocab <= 65536 else np.int32


def _build(name: str, train: list[bytes], valid: list[bytes], tokenizer: str, vocab: int, folder: Path) -> Corpus:
    digest = hashlib.sha256()
    for part in (*train, *valid):
        digest.update(part)
    sizes = [sum(map(len, part)) for part in (train, valid)]
    if tokenizer == "bytes":
        ids = [np.frombuffer(b"".join(part), np.uint8).copy() for part in (train, valid)]
        bpe = None
        vocab = 256
    else:
        bpe, ids = _bpe(train, valid, vocab, digest.hexdigest(), folder)
        vocab = bpe.get_vocab_size()
    tokens = [torch.from_numpy(part) for part in ids]
    return Corpus(name, tokenizer, vocab, tokens[0], tokens[1], digest.hexdigest(), sizes[0], sizes[1], bpe)


def _bpe(
    train: list[bytes], valid: list[bytes], vocab: int, content_sha256: str, folder: Path
) -> tuple[Any, list[np.ndarray]]:
    """Byte-level BPE of the training split and the tokens of both splits; cached by everything they depend on."""
    try:
        import tokenizers
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError('tokenizer="bpe" needs the package tokenizers: pip install "tq-book[lab]"') from error
    key = f"1|{content_sha256}|{sum(map(len, train))}|{vocab}|tokenizers {tokenizers.__version__}"
    stem = f"bpe-{vocab}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    model_file, ids_file = folder / f"{stem}.json", folder / f"{stem}.npz"
    if model_file.exists() and ids_file.exists():
        try:
            with np.load(io.BytesIO(ids_file.read_bytes()), allow_pickle=False) as arrays:
                return Tokenizer.from_file(str(model_file)), [arrays["train"], arrays["valid"]]
        except Exception as error:  # both libraries raise their own, undocumented kinds for damaged files
            raise ValueError(f"damaged tokenizer cache: delete {model_file} and {ids_file}") from error
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # the whole byte alphabet: every text can be encoded
        vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    texts = [[part.decode() for part in split] for split in (train, valid)]
    bpe.train_from_iterator((piece for text in texts[0] for piece in _pieces(text)), trainer)
    ids = [_encode_bpe(bpe, split) for split in texts]
    write_whole(model_file, bpe.to_str().encode())
    buffer = io.BytesIO()
    np.savez(buffer, train=ids[0], valid=ids[1])
    write_whole(ids_file, buffer.getvalue())
    return bpe, ids


def _pieces(text: str, size: int = 1 << 16) -> Iterator[str]:
    """Consecutive pieces of about ``size`` characters that end with a line: the encoder's cost per piece is bounded."""
    start = 0
    while start < len(text):
        stop = text.find("\n", start + size) + 1 or len(text)
        yield text[start:stop]
        start = stop


def _encode_bpe(bpe: Any, texts: list[str]) -> np.ndarray:
    pieces = [piece for text in texts for piece in _pieces(text)]
    dtype = _dtype(bpe.get_vocab_size())
    parts = [np.asarray(code.ids, dtype) for code in bpe.encode_batch_fast(pieces, add_special_tokens=False)]
    return np.concatenate(parts) if parts else np.empty(0, dtype)
