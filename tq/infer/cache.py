"""A key-value cache of codes for ``transformers``: what is appended is coded once, and no code ever changes.

Keys and values come back decoded, so every model and every way to generate works as it is: ``generate(...,
cache=cache)``, beams, batches, assisted decoding that takes tokens back.

Shapes: B batch, K key/value heads, T tokens, D head size, W bytes of a token's code in a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from tq.infer.kv import Coder, Statistics, coders
from tq.quant.codec import Code, Codec

PAGE = 256  # tokens


class Pages:
    """Codes of one layer's keys or values, in pages of tokens: what is full stays where it is.

    Args:
        coder: of all of them; None keeps the numbers as they are.
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
        """More tokens, of the same batch, heads and head size."""
        self._last = x_BKTD.shape[-1], x_BKTD.dtype
        parts = (x_BKTD,) if self.coder is None else self._parts(self.coder.encode(x_BKTD), x_BKTD.shape)
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

    @staticmethod
    def _parts(code: Code, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of a code, the payload [B, K, T, W] and the scales [B, K, T, P]."""
        return code.payload.view(*shape[:3], -1), code.scales.view(*shape[:3], -1)

    def decoded(self) -> Tensor:
        """All tokens, [B, K, T, D]."""
        assert self._last is not None
        size, dtype = self._last
        counts = [min(PAGE, self.length - PAGE * number) for number in range(len(self._pages))]
        parts = [
            torch.cat([part[:, :, :count] for part, count in zip(each, counts, strict=True)], 2)
            for each in zip(*self._pages, strict=True)
        ]
        if self.coder is None:
            return parts[0]
        payload, scales = parts
        codec = self.coder.codec
        shape = (*payload.shape[:3], size)
        return self.coder.decode(Code(codec, shape, dtype, payload.view(-1, codec.packed_bytes), scales.view(-1), True))

    def select(self, index: Tensor) -> None:
        """Rows of the batch, in a new order or more than once."""
        self._pages = [tuple(part.index_select(0, index) for part in page) for page in self._pages]

    def crop(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        self.length = min(self.length, length)
        del self._pages[-(-self.length // PAGE) :]


class CodedLayer(DynamicLayer):
    """One layer's cache.

    Args:
        keys, values: coders; None keeps them as they are.
        centred: take the mean of the first tokens' keys off all keys, where the coder of keys has no mean.
    """

    def __init__(self, keys: Coder | None, values: Coder | None, centred: bool = True) -> None:
        super().__init__()
        self._centred = centred
        self.coded = Pages(keys), Pages(values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        coder = self.coded[0].coder
        if self._centred and coder is not None and coder.mean_KD is None:
            mean_KD = key_states.float().mean((0, 2))
            self.coded[0].coder = dataclasses.replace(coder, mean_KD=mean_KD)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append, and give back all of both, decoded."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for pages, states in zip(self.coded, (key_states, value_states), strict=True):
            pages.append(states)
        keys, values = (pages.decoded() for pages in self.coded)
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.coded[0].length

    def reset(self) -> None:
        """Forget all tokens."""
        self.crop(-self.get_seq_length())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; their number is given as a negative one."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens to remove are given as a negative number, got {tokens_to_remove}")
        for pages in self.coded:
            pages.crop(pages.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams in a new order."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch so many times."""
        for pages in self.coded:
            if pages.length:
                batch = pages._pages[0][0].shape[0]
                pages.select(torch.arange(batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows of the batch."""
        for pages in self.coded:
            pages.select(indices.cpu())

    def offload(self) -> None:
        """Codes stay where they are."""

    def prefetch(self) -> None:
        """Codes stay where they are."""

    @property
    def nbytes(self) -> int:
        """Held in memory."""
        return sum(pages.nbytes for pages in self.coded)


def coded_cache(
    layers: int, keys: Codec | None, values: Codec | None, statistics: Sequence[Statistics] | None = None, *,
    centred: bool = True, balanced: bool = True,
) -> Cache:  # fmt: skip
    """A cache for ``generate(..., cache=...)``.

    Args:
        layers: of the model.
        keys, values: codecs, whose block is at least the head size; None keeps them as they are.
        statistics: from ``tq.infer.kv.calibrate``; None centres keys by the mean of the prompt's, and does not balance.
        centred, balanced: what is done to keys.
    """
    if statistics is None:
        unknown = Statistics(*3 * (torch.empty(0),))
        pairs = coders(keys, values, [unknown] * layers, centred=False, balanced=False)
    elif len(statistics) != layers:
        raise ValueError(f"statistics of {len(statistics)} layers for a model of {layers}")
    else:
        pairs = coders(keys, values, statistics, centred=centred, balanced=balanced)
    return Cache(layers=[CodedLayer(*pair, centred=centred) for pair in pairs])
