"""A key-value cache of codes for ``transformers``: what is appended is coded once, and no code ever changes.

Keys and values come back decoded, so every model and every way to generate works as it is: ``generate(...,
past_key_values=cache)``, beams, batches, assisted decoding that takes tokens back. A model whose attention is
``"coded"`` need not decode them: one token of one sequence attends straight to the codes of a cache with ``direct``.

Shapes: B batch, H heads of queries, K key/value heads, T tokens, D head size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tq.infer.kv import Coder, Statistics, coders
from tq.infer.pages import Pages, attend
from tq.infer.product import plain
from tq.quant.codec import Codec


class _InCodes(Tensor):
    """In the place of all keys or values: what ``attention`` finds them by. Nothing else may take it for numbers."""

    pages: tuple[Pages, Pages]

    @classmethod
    def __torch_function__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            "these keys are codes: a cache with direct=True is for a model whose attention is 'coded' (call "
            "model.set_attn_implementation('coded') before), and which does not read keys on the way there; else "
            "take direct=False"
        )


class CodedLayer(DynamicLayer):
    """One layer's cache.

    Args:
        keys, values: coders; None keeps them as they are.
        centred: take the mean of the first tokens' keys off all keys, where the coder of keys has no mean.
        direct: leave codes of one sequence to the attention ``"coded"``, where its kernels can read them.
    """

    def __init__(
        self, keys: Coder | None, values: Coder | None, centred: bool = True, *, direct: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        self._centred, self._direct, self._coders = centred, direct, (keys, values)
        self.coded = Pages(keys), Pages(values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        for pages in self.coded:
            pages.to(key_states.device)
        coder = self.coded[0].coder
        if self._centred and coder is not None and coder.mean_KD is None:
            mean_KD = key_states.float().mean((0, 2))
            self.coded[0].coder = dataclasses.replace(coder, mean_KD=mean_KD)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append, and give back all of both: decoded, or for one more token of one sequence as codes, if ``direct``."""
        with torch.inference_mode(False), torch.no_grad():  # or what is held could not be written to outside of it
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            for pages, states in zip(self.coded, (key_states, value_states), strict=True):
                pages.append(states)
        if self._direct and key_states.shape[::2] == (1, 1) and self._readable(key_states, value_states):
            found = key_states.detach().as_subclass(_InCodes)
            found.pages = self.coded
            return found, found
        keys, values = (pages.decoded() for pages in self.coded)
        return keys.to(key_states.dtype), values.to(value_states.dtype)

    def _readable(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Whether kernels attend to codes of such keys and values."""
        keys, values = (pages.coder for pages in self.coded)
        size, device = key_states.shape[3], key_states.device.type
        if device != "cpu" and not (device == "cuda" and find_spec("triton")):
            return False
        if keys is None or values is None or keys.fine or values.fine or torch.is_grad_enabled() or size % 64:
            return False
        fit = (codec.block == size and codec.bits in (2, 3, 4) and plain(codec) for codec in (keys.codec, values.codec))
        alike = keys.sinks == values.sinks and keys.codec.scale_dtype == values.codec.scale_dtype
        return alike and value_states.shape[3] == size and all(fit)

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.coded[0].length

    def reset(self) -> None:
        """Forget all tokens, and the mean that was taken off them."""
        keys, values = self._coders
        self.coded, self.is_initialized = (Pages(keys), Pages(values)), False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; their number is given as a negative one."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens to remove are given as a negative number, got {tokens_to_remove}")
        for pages in self.coded:
            pages.crop(max(0, pages.length + tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams in a new order."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch so many times."""
        if self.get_seq_length():
            self.batch_select_indices(torch.arange(self.coded[0].shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows of the batch."""
        with torch.inference_mode(False), torch.no_grad():
            for pages in self.coded:
                pages.select(indices.to(self.device) if self.is_initialized else indices)

    def offload(self) -> None:
        """Codes stay where they are."""

    def prefetch(self) -> None:
        """Codes stay where they are."""

    @property
    def nbytes(self) -> int:
        """Held in memory."""
        return sum(pages.nbytes for pages in self.coded)


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The attention ``"coded"`` of ``transformers``: of one token straight to codes, else as its "sdpa".

    query: [B, H, T, D]; returns [B, T, H, D]. Where tokens are masked, codes are decoded.

    Raises:
        ValueError: the model adds something of its own to attention, which "sdpa" would leave out.
    """
    if named := [name for name in _UNKNOWN if options.get(name) is not None]:
        raise ValueError(f"the attention 'coded' knows no {named}: take the model's own, and direct=False")
    if not isinstance(key, _InCodes):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    masked = attention_mask is not None and not bool(
        (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0).all()
    )
    if masked or options.get("dropout") or any(options.get(name) is not None for name in _OTHERS):
        key, value = (pages.decoded().to(query.dtype) for pages in key.pages)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    q_HD, scaling = query[0, :, 0].float(), options.get("scaling")
    if scaling is not None:
        q_HD = q_HD * (scaling * math.sqrt(q_HD.shape[1]))
    return attend(q_HD, *key.pages).to(query.dtype)[None, None], None


_OTHERS = ("softcap", "position_bias")  # what some models add to scores
_UNKNOWN = ("s_aux", "sinks", "indices", "block_indices")  # learned sinks, and choices of tokens


def _mask(*arguments: Any, **options: Any) -> Tensor | None:
    """That of "sdpa"; made wherever a model with shared keys might leave queries out, which it does not for "sdpa"."""
    shared = getattr(options.get("config"), "num_kv_shared_layers", 0)
    if shared and options.get("q_length", 0) != 1:
        options["allow_is_causal_skip"] = False
    return sdpa_mask(*arguments, **options)


AttentionInterface.register("coded", attention)
AttentionMaskInterface.register("coded", _mask)


def coded_cache(
    layers: int, keys: Codec | None, values: Codec | None, statistics: Sequence[Statistics] | None = None, *,
    centred: bool = True, balanced: bool | str = "matrix", sinks: int = 1, direct: bool = False,
) -> Cache:  # fmt: skip
    """A cache for ``generate(..., past_key_values=...)`` of ``transformers``.

    Args:
        layers: of the model.
        keys, values: codecs, whose block is at least the head size; None keeps them as they are.
        statistics: from ``tq.infer.kv.calibrate``; None centres keys by the mean of the prompt's, and cannot balance.
        centred, balanced: what is done to keys and values, see ``tq.infer.kv.coders``.
        sinks: first tokens of each row that are kept exact; where rows are padded at their left, what is kept is the
            padding.
        direct: for a model after ``model.set_attn_implementation("coded")``: a token of a single sequence attends
            straight to codes of 2 to 4 bits in blocks of the head size, a multiple of 64, and nothing is decoded.
            Where it cannot, and in prompts, batches and beams, codes are decoded as without.
    """
    if statistics is None:
        unknown = Statistics(*7 * (torch.empty(0),))
        pairs = coders(keys, values, [unknown] * layers, centred=False, balanced=False, sinks=sinks)
    elif len(statistics) != layers:
        raise ValueError(f"statistics of {len(statistics)} layers for a model of {layers}")
    else:
        pairs = coders(keys, values, statistics, centred=centred, balanced=balanced, sinks=sinks)
    return Cache(layers=[CodedLayer(*pair, centred=centred, direct=direct) for pair in pairs])
