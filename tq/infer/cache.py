"""A key-value cache of codes for ``transformers``: what is appended is coded once, and no code ever changes.

Keys and values come back decoded, so every model and every way to generate works as it is: ``generate(...,
past_key_values=cache)``, beams, batches, assisted decoding that takes tokens back.

Shapes: B batch, K key/value heads, T tokens, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from tq.infer.kv import Coder, Statistics, coders
from tq.infer.pages import Pages
from tq.quant.codec import Codec


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
                pages.select(torch.arange(pages.shape[0]).repeat_interleave(repeats))

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
    centred: bool = True, balanced: bool | str = "matrix", sinks: int = 1,
) -> Cache:  # fmt: skip
    """A cache for ``generate(..., past_key_values=...)`` of ``transformers``.

    Args:
        layers: of the model.
        keys, values: codecs, whose block is at least the head size; None keeps them as they are.
        statistics: from ``tq.infer.kv.calibrate``; None centres keys by the mean of the prompt's, and cannot balance.
        centred, balanced: what is done to keys and values, see ``tq.infer.kv.coders``.
        sinks: first tokens of each row that are kept exact; where rows are padded at their left, what is kept is the
            padding.
    """
    if statistics is None:
        unknown = Statistics(*7 * (torch.empty(0),))
        pairs = coders(keys, values, [unknown] * layers, centred=False, balanced=False, sinks=sinks)
    elif len(statistics) != layers:
        raise ValueError(f"statistics of {len(statistics)} layers for a model of {layers}")
    else:
        pairs = coders(keys, values, statistics, centred=centred, balanced=balanced, sinks=sinks)
    return Cache(layers=[CodedLayer(*pair, centred=centred) for pair in pairs])
