"""Rules over serving: the cache of keys and values, guessed tokens."""

from __future__ import annotations

from tq.book.claims.formulas import TIGHT, Formula, RangeFormula
from tq.book.claims.ledger import Rule
from tq.systems import Transformer, kv_cache, speculative


def _cache(tokens: float, kv_heads: int = 8) -> float:
    """GB of the keys and values of one request of a 70B model."""
    return float(kv_cache.kv_cache_bytes(Transformer.preset("llama2-70b", kv_heads=kv_heads), tokens)) / 1e9


RULES: dict[str, Rule] = {
    "S3-068": RangeFormula(
        "(1 - a^(g+1)) / ((1 - a) (1 + g c)): g tokens guessed, accepted with a, a guess costs c [Leviathan 2023]",
        lambda: {f"for a = {a}, g = 5, c = 0.05": speculative.speedup(a, 5, 0.05) for a in (0.6, 0.8, 0.9)}, "x", 0.05,
        confidence="medium",
    ),
    "S4-064": RangeFormula(
        "2 * layers * KV heads * 128 * 2 bytes * tokens, of 141 GB",
        lambda: {
            "for 70B with 8 KV heads at 128K": _cache(131072), "at 1M": _cache(1048576),
            "with 64 KV heads at 128K": _cache(131072, 64),
        }, "GB", 0.0, claimed=(0.0, 141.0), note="The cache of one request beside no weights.", confidence="medium",
    ),
    "S4-087": RangeFormula(
        "2 * layers * KV heads * 128 * 2 bytes * tokens",
        lambda: {
            "for 70B with 8 KV heads at 8K": _cache(8192), "with 64": _cache(8192, 64), "with 8 at 1K": _cache(1024),
        }, "GB", claimed=(1.0, 99.0), note="A 70B shape; that of a 100B model is not given.", confidence="medium",
    ),
    "S4-090": Formula(
        "64 / 8 heads",
        lambda: {"for 64 query heads on 8": kv_cache.grouping_factor(Transformer.preset("llama2-70b"))}, "x", TIGHT,
    ),
}  # fmt: skip
