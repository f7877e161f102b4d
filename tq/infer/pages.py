"""Codes of keys and values in pages of tokens: what is full stays where it is, and attention reads it there.

Shapes: B batch, H heads of queries, K key/value heads, T tokens, D head size.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tq.infer.kv import Coder
from tq.infer.product import plain
from tq.kernels import attention
from tq.quant.codec import Codec
from tq.quant.dispatch import codebook
from tq.quant.rotation import rotate

PAGE = 256  # tokens


class Pages:
    """Codes of one layer's keys or values, in pages of tokens: what is full stays where it is.

    Args:
        coder: of all of them but the first tokens that it keeps exact; None keeps the numbers as they are.
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
        self._first: Tensor | None = None  # tokens kept exact, [B, K, at most coder.sinks, D]
        self._of_one: list[tuple[Tensor, ...]] = []  # of those pages the only sequence, as far as it was asked for
        self._version = 0  # grows when a page or an exact token comes or goes
        self._reader: tuple[Any, ...] | None = None  # of keys: what ``attend``'s ``Reader`` is for, values too; and it

    @property
    def nbytes(self) -> int:
        """Held in memory, without what ``attend`` keeps beside it: two matrices a layer, or two a head."""
        first = 0 if self._first is None else self._first.nbytes
        return first + sum(part.nbytes for page in self._pages for part in page)

    @property
    def sinks(self) -> int:
        """First tokens that are kept exact, as far as there are any."""
        return min(self.length, self.coder.sinks if self.coder else 0)

    def append(self, x_BKTD: Tensor) -> None:
        """More tokens: x_BKTD of the same batch, heads and head size."""
        exact = (self.coder.sinks if self.coder else 0) - self.sinks
        if exact or self._first is None:
            first, x_BKTD = x_BKTD.tensor_split([exact], 2)
            self._first = first.clone() if self._first is None else torch.cat([self._first, first], 2)
            self.length, self._version = self.length + first.shape[2], self._version + 1
        if not x_BKTD.shape[2]:
            return
        parts = (x_BKTD,) if self.coder is None else self.coder.parts(x_BKTD)
        done, count = 0, x_BKTD.shape[2]
        while done < count:
            page, at = divmod(self.length - self.sinks, PAGE)
            if page == len(self._pages):  # to be written to later, in an inference mode or not
                shapes = [(*part.shape[:2], PAGE, part.shape[3]) for part in parts]
                with torch.inference_mode(False):
                    made = tuple(
                        torch.empty(shape, dtype=part.dtype, device=part.device)
                        for part, shape in zip(parts, shapes, strict=True)
                    )
                self._pages.append(made)
                self._version += 1
            more = min(count - done, PAGE - at)
            for kept, part in zip(self._pages[page], parts, strict=True):
                kept[:, :, at : at + more] = part[:, :, done : done + more]
            self.length, done = self.length + more, done + more

    def counts(self) -> list[int]:
        """Tokens in each page."""
        return [min(PAGE, self.length - self.sinks - PAGE * number) for number in range(len(self._pages))]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows of the batch, key/value heads); zeros while nothing is held."""
        return (0, 0) if self._first is None else (self._first.shape[0], self._first.shape[1])

    def __getstate__(self) -> dict[str, Any]:
        # views, which a pickle would take apart from what they show, and addresses
        return {**self.__dict__, "_of_one": [], "_reader": None}

    def of_one(self) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """The tokens kept exact of the only sequence of the batch, [K, sinks, D], and its pages: parts [K, PAGE, ...].

        Raises:
            ValueError: there are more sequences, or no token.
        """
        if self._first is None or len(self._first) != 1 or not self.length:
            raise ValueError("known is one sequence, with at least one token")
        new = [tuple(part[0] for part in page) for page in self._pages[len(self._of_one) :]]
        self._of_one = self._of_one + new  # at once, as another thread may do the same
        return self._first[0], self._of_one

    def decoded(self) -> Tensor:
        """All tokens, [B, K, T, D]."""
        assert self._first is not None
        if not self._pages:
            return self._first
        counts = self.counts()
        parts = tuple(
            torch.cat([part[:, :, :count] for part, count in zip(each, counts, strict=True)], 2)
            for each in zip(*self._pages, strict=True)
        )
        rest = self.coder.whole(parts, self._first.shape[3], self._first.dtype) if self.coder else parts[0]
        return torch.cat([self._first, rest], 2)

    def to(self, device: torch.device | str) -> None:
        """Move all of it to ``device``, what ``coder`` takes off included."""
        self._become([tuple(part.to(device) for part in page) for page in self._pages])
        self._first = None if self._first is None else self._first.to(device)
        if self.coder is not None:
            names = ("mean_KD", "factor_KD", "order_KD", "matrix_KDD")
            moved = {name: x.to(device) for name in names if (x := getattr(self.coder, name)) is not None}
            self.coder = dataclasses.replace(self.coder, **moved)

    def _become(self, pages: list[tuple[Tensor, ...]]) -> None:
        self._pages, self._of_one, self._reader, self._version = pages, [], None, self._version + 1

    def select(self, index: Tensor) -> None:
        """Rows of the batch, by ``index``: in a new order or more than once."""
        self._become([tuple(part.index_select(0, index) for part in page) for page in self._pages])
        self._first = None if self._first is None else self._first.index_select(0, index)

    def crop(self, length: int) -> None:
        """Forget the tokens from ``length`` on; a negative one forgets all."""
        self.length = min(self.length, max(length, 0))
        pages = -(-(self.length - self.sinks) // PAGE)
        if self._first is None or (pages == len(self._pages) and self.sinks == self._first.shape[2]):
            return  # the same pages, the last one with fewer tokens
        self._of_one, self._first = self._of_one[:pages], self._first[:, :, : self.sinks]
        del self._pages[pages:]
        self._version, self._reader = self._version + 1, None


def _on_a_gpu(device: torch.device, impl: str) -> bool:
    """Whether the Triton kernel attends."""
    if impl not in ("auto", "cpu", "triton"):
        raise ValueError(f"impl must be 'auto', 'cpu' or 'triton', got {impl!r}")
    return impl == "triton" or (impl == "auto" and device.type != "cpu")


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
    rows, size = q_HD.shape
    if _on_a_gpu(q_HD.device, impl):
        _check(keys, values, size)
        with torch.autocast(q_HD.device.type, enabled=False):
            return _by_triton(q_HD.float().view(keys.shape[1], -1, size), keys, values).reshape(rows, size)
    reader = _reader(keys, values, size)
    q_KVD, left = q_HD.float().view(reader.shape[0], -1, size), keys.length - reader.exact
    if q_KVD.shape[1] <= attention.MOST:
        return reader(q_KVD, left).view(rows, size)
    return torch.cat([reader(some, left) for some in q_KVD.split(attention.MOST, 1)], 1).view(rows, size)


def _reader(keys: Pages, values: Pages, size: int) -> attention.Reader:
    """The kernel's view of both, made anew when a page or an exact token has come or gone."""
    parts, numbers = (values, keys.coder, values.coder), (size, keys._version, values._version)
    if keys._reader is not None and keys.length == values.length:
        (one, other, third), same, reader = keys._reader
        if same == numbers and one is values and other is keys.coder and third is values.coder:
            return reader
    _check(keys, values, size)
    assert keys.coder is not None and values.coder is not None
    key, value = keys.coder, values.coder
    (key_KSD, key_pages), (value_KSD, value_pages) = keys.of_one(), values.of_one()
    pages = [(*k, *v) for k, v in zip(key_pages, value_pages, strict=True)]
    levels, turns = zip(*(_tables(one.codec, "cpu") for one in (key, value)), strict=True)
    turn_KDD, back_KDD = _undone(key) @ turns[0], (_undone(value) @ turns[1]).transpose(1, 2)
    made = attention.Reader(
        pages, (key_KSD, value_KSD), (key.codec.bits, value.codec.bits), levels,
        (attention.in_lanes(turn_KDD, 2), attention.in_lanes(back_KDD, 1)), (key.mean_KD, value.mean_KD),
    )  # fmt: skip
    keys._reader = parts, numbers, made
    return made


def _undone(coder: Coder) -> Tensor:
    """What takes back a coder's matrix or factors, fp64 [K or 1, D, D]: from the left of numbers that are coded."""
    if coder.inverse_KDD is not None:
        return coder.inverse_KDD.double()
    if coder.factor_KD is not None:
        return torch.diag_embed(1 / coder.factor_KD.double())
    return torch.eye(coder.codec.block, dtype=torch.float64, device="cpu")[None]


def _check(keys: Pages, values: Pages, size: int) -> None:
    if keys.sinks != values.sinks or keys.length != values.length:
        told = (f"{one.sinks} of {one.length}" for one in (keys, values))
        raise ValueError("keys keep {} tokens exact, values {}".format(*told))
    if keys.coder is None or values.coder is None or keys.coder.fine or values.coder.fine:
        raise ValueError("both keys and values must be coded, with all channels alike")
    key, value = keys.coder.codec, values.coder.codec
    if not (plain(key) and plain(value)):
        raise ValueError(f"known are Hadamard rotations and the Gaussian codebook, got {key} and {value}")
    if key.block != size or value.block != size or key.scale_dtype != value.scale_dtype:
        raise ValueError(f"blocks must be the heads' size {size}, with scales of one type, got {key} and {value}")
    firsts = [pages.of_one()[0] for pages in (keys, values)]
    if firsts[0].shape != firsts[1].shape or firsts[0].shape[2] != size:
        raise ValueError(f"keys and values must have as many heads, of {size}, got {[tuple(x.shape) for x in firsts]}")


def _by_triton(q_KVD: Tensor, keys: Pages, values: Pages) -> Tensor:
    """The same on a GPU, or in Triton's interpreter, of one step after the other."""
    from tq.kernels import gpu_codes

    assert keys.coder is not None and values.coder is not None
    (key_KSD, key_pages), (value_KSD, value_pages) = keys.of_one(), values.of_one()
    if keys.sinks:
        exact_KVD, exact_KV = _attend_exactly(q_KVD, key_KSD, value_KSD, keys.coder)
        if not key_pages:
            return exact_KVD
    if keys.coder.factor_KD is not None:
        q_KVD = q_KVD / keys.coder.factor_KD[:, None]
    if keys.coder.inverse_KDD is not None:
        q_KVD = (q_KVD.double() @ keys.coder.inverse_KDD.double()).float()
    pages = [(*k, *v) for k, v in zip(key_pages, value_pages, strict=True)]
    coders = keys.coder.codec, values.coder.codec
    levels, (turn, back) = zip(*(_tables(codec, str(q_KVD.device)) for codec in coders), strict=True)
    bits, q_KVD = (coders[0].bits, coders[1].bits), (q_KVD.double() @ turn).float()
    parts = [gpu_codes.attend(some, pages, keys.counts(), bits, levels) for some in q_KVD.split(gpu_codes.MOST, 1)]
    found_KVD, found_KV = parts[0] if len(parts) == 1 else (torch.cat(part, 1) for part in zip(*parts, strict=True))
    found_KVD = _as_values((found_KVD.double() @ back.T).float(), values.coder)
    if keys.sinks:
        share_KV = torch.sigmoid(exact_KV - found_KV)  # of the exact tokens in all attention
        found_KVD = torch.lerp(found_KVD, exact_KVD, share_KV[..., None])
    return found_KVD


@lru_cache(maxsize=256)
def _tables(codec: Codec, device: str) -> tuple[Tensor, Tensor]:
    """Levels, and the rotation as a matrix, fp64 [D, D]: of a few queries a product is faster than many small steps,
    and in fp64 no setting for the precision of products changes it."""
    with torch.inference_mode(False), torch.no_grad():
        one = torch.eye(codec.block, device=device, dtype=torch.float32)
        turned = rotate(one, codec.rounds, codec.seed, codec.rotation).double()
    return codebook(codec.bits, device)[0], turned


def _as_values(found_KVD: Tensor, coder: Coder) -> Tensor:
    """A mean of what codes hold, as a mean of values: weights sum to one."""
    if coder.inverse_KDD is not None:
        found_KVD = (found_KVD.double() @ coder.inverse_KDD.double().transpose(1, 2)).float()
    if coder.factor_KD is not None:
        found_KVD = found_KVD / coder.factor_KD[:, None]
    return found_KVD if coder.mean_KD is None else found_KVD + coder.mean_KD[:, None]


def _attend_exactly(q_KVD: Tensor, key_KSD: Tensor, value_KSD: Tensor, coder: Coder) -> tuple[Tensor, Tensor]:
    """Attention to tokens kept exact, fp32 [K, V, D], and the logarithm of their softmax's sum [K, V]."""
    key_KSD = key_KSD.float()
    if coder.mean_KD is not None:  # as it is taken off all the others
        key_KSD = key_KSD - coder.mean_KD[:, None]
    score_KVS = q_KVD @ key_KSD.transpose(1, 2) / math.sqrt(q_KVD.shape[-1])
    largest_KV1 = score_KVS.amax(-1, keepdim=True)
    share_KVS = (score_KVS - largest_KV1).exp()
    total_KV1 = share_KVS.sum(-1, keepdim=True)  # of torch, logsumexp takes as long as all this
    return share_KVS @ value_KSD.float() / total_KV1, (largest_KV1 + total_KV1.log())[..., 0]
