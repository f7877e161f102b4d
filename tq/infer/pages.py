"""Codes of keys and values in pages of tokens: what is full stays where it is, and attention reads it there.

Shapes: B batch, H heads of queries, K key/value heads, T tokens, D head size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tq.infer.kv import Coder
from tq.infer.product import plain
from tq.kernels import attention
from tq.quant.dispatch import codebook
from tq.quant.rotation import rotate, unrotate

PAGE = 256  # tokens


class Pages:
    """Codes of one layer's keys or values, in pages of tokens: what is full stays where it is.

    Args:
        coder: of all of them; None keeps the numbers as they are.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.kv import Coder
        >>> from tq.infer.pages import Pages
        >>> keys = Pages(Coder(Codec(bits=4, block=64)))
        >>> keys.append(torch.randn(1, 2, 300, 64))
        >>> keys.counts(), keys.decoded().shape
        ([256, 44], torch.Size([1, 2, 300, 64]))
    """

    def __init__(self, coder: Coder | None) -> None:
        self.coder, self.length = coder, 0
        self._pages: list[tuple[Tensor, ...]] = []  # (payload [B, K, PAGE, W], scales [B, K, PAGE, P]) or (x,)
        self._last: tuple[int, torch.dtype] | None = None  # D and dtype

    @property
    def nbytes(self) -> int:
        """Held in memory."""
        return sum(part.nbytes for page in self._pages for part in page)

    def append(self, x_BKTD: Tensor) -> None:
        """More tokens: x_BKTD of the same batch, heads and head size."""
        self._last = x_BKTD.shape[-1], x_BKTD.dtype
        parts = (x_BKTD,) if self.coder is None else self.coder.parts(x_BKTD)
        done, count = 0, x_BKTD.shape[2]
        while done < count:
            page, at = divmod(self.length, PAGE)
            if page == len(self._pages):
                shapes = [(*part.shape[:2], PAGE, part.shape[3]) for part in parts]
                made = (part.new_empty(shape) for part, shape in zip(parts, shapes, strict=True))
                self._pages.append(tuple(made))
            more = min(count - done, PAGE - at)
            for kept, part in zip(self._pages[page], parts, strict=True):
                kept[:, :, at : at + more] = part[:, :, done : done + more]
            self.length, done = self.length + more, done + more

    def counts(self) -> list[int]:
        """Tokens in each page."""
        return [min(PAGE, self.length - PAGE * number) for number in range(len(self._pages))]

    @property
    def heads(self) -> int:
        """Key/value heads; 0 while nothing is held."""
        return self._pages[0][0].shape[1] if self._pages else 0

    def of_one(self) -> list[tuple[Tensor, ...]]:
        """The pages of the only sequence of the batch: parts [K, PAGE, ...]."""
        if not self._pages or self._pages[0][0].shape[0] != 1:
            raise ValueError("known is one sequence, with at least one token")
        return [tuple(part[0] for part in page) for page in self._pages]

    def decoded(self) -> Tensor:
        """All tokens, [B, K, T, D]."""
        assert self._last is not None
        size, dtype = self._last
        counts = self.counts()
        parts = [
            torch.cat([part[:, :, :count] for part, count in zip(each, counts, strict=True)], 2)
            for each in zip(*self._pages, strict=True)
        ]
        return parts[0] if self.coder is None else self.coder.whole(tuple(parts), size, dtype)

    def to(self, device: torch.device | str) -> None:
        """Move all of it to ``device``, what ``coder`` takes off included."""
        self._pages = [tuple(part.to(device) for part in page) for page in self._pages]
        if self.coder is not None:
            names = ("mean_KD", "factor_KD", "order_KD")
            moved = {name: x.to(device) for name in names if (x := getattr(self.coder, name)) is not None}
            self.coder = dataclasses.replace(self.coder, **moved)

    def select(self, index: Tensor) -> None:
        """Rows of the batch, by ``index``: in a new order or more than once."""
        self._pages = [tuple(part.index_select(0, index) for part in page) for page in self._pages]

    def crop(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        self.length = min(self.length, length)
        del self._pages[-(-self.length // PAGE) :]


def _kernels(impl: str, device: torch.device) -> Any:
    """Modules that attend."""
    if impl not in ("auto", "cpu", "triton"):
        raise ValueError(f"impl must be 'auto', 'cpu' or 'triton', got {impl!r}")
    if impl == "cpu" or (impl == "auto" and device.type == "cpu"):
        return attention
    from tq.kernels import gpu_codes

    return gpu_codes


def attend(q_HD: Tensor, keys: Pages, values: Pages, *, impl: str = "auto") -> Tensor:
    """Attention of one token to all that lie in a cache, straight from their codes: fp32 [H, D].

    Args:
        q_HD: queries, fp32, H a multiple of the heads of keys; where the cache is.
        keys, values: of one sequence, both coded in 2, 3 or 4 bits with blocks of D.
        impl: "cpu", "triton", or "auto": by where the queries are.
    Raises:
        ValueError: the cache is another one, or there is no such ``impl``.
    Example:
        >>> import torch
        >>> from tq import Codec
        >>> from tq.infer.kv import Coder
        >>> from tq.infer.pages import Pages, attend
        >>> keys, values = (Pages(Coder(Codec(bits=4, block=64))) for _ in range(2))
        >>> for pages in (keys, values):
        ...     pages.append(torch.randn(1, 2, 300, 64))
        >>> attend(torch.randn(4, 64), keys, values).shape
        torch.Size([4, 64])
    """
    if keys.coder is None or values.coder is None or keys.coder.fine or values.coder.fine:
        raise ValueError("both keys and values must be coded, with all channels alike")
    key, value = keys.coder.codec, values.coder.codec
    heads, (rows, size) = keys.heads, q_HD.shape
    if not (plain(key) and plain(value)):
        raise ValueError(f"known are Hadamard rotations and the Gaussian codebook, got {key} and {value}")
    if key.block != size or value.block != size or key.scale_dtype != value.scale_dtype:
        raise ValueError(f"blocks must be the heads' size {size}, with scales of one type, got {key} and {value}")
    q_KVD = q_HD.view(heads, rows // heads, size)
    if keys.coder.factor_KD is not None:
        q_KVD = q_KVD / keys.coder.factor_KD[:, None]
    kernels = _kernels(impl, q_HD.device)
    turned = rotate(q_KVD.reshape(-1, size), key.rounds, key.seed, key.rotation).view(q_KVD.shape)
    pages = [(*k, *v) for k, v in zip(keys.of_one(), values.of_one(), strict=True)]
    levels = tuple(codebook(codec.bits, str(q_HD.device))[0] for codec in (key, value))
    parts = [
        kernels.attend(some, pages, keys.counts(), (key.bits, value.bits), levels)
        for some in turned.split(kernels.MOST, 1)
    ]
    found = torch.cat(parts, 1).view(rows, size)
    return unrotate(found, value.rounds, value.seed, value.rotation)
