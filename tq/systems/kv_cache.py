"""Keys and values that a request keeps while a model answers it: 2 layers * KV heads * head width * tokens numbers.

Grouped-query attention shares a pair of them among the query heads of a group: the cache shrinks by heads / KV heads.
Not counted: the waste of pages and reservations, sliding windows, codes.

Sources: Kwon et al. 2023 (arXiv:2309.06180), section 3; Ainslie et al. 2023 (arXiv:2305.13245).
"""

from __future__ import annotations

from tq.systems.arguments import Real, instance, positive
from tq.systems.shape import Transformer


def kv_cache_bytes(model: Transformer, tokens: Real, number_bytes: Real = 2.0) -> Real:
    """Bytes of so many tokens, of one request or of several together."""
    instance("model", model, Transformer)
    positive("tokens", tokens, zero=True, finite=True)
    positive("number_bytes", number_bytes, finite=True)
    return 2.0 * model.layers * model.kv_width * number_bytes * tokens


def grouping_factor(model: Transformer) -> float:
    """How many times smaller the cache is than with keys and values of its own for every query head."""
    instance("model", model, Transformer)
    return model.heads / model.kv
