"""A token of `generate` of `transformers` with a long cache: plain, in codes that are decoded, and read as codes.

    python -m tq.lab.generation_step                      8,000 tokens in the shape of SmolLM2, bf16
    python -m tq.lab.generation_step --tokens 1000 --json

The model's weights and the cache's numbers are random: what is timed does not depend on them. The ways take turns in
one process; each step appends one token, which is taken back again. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from tq.quant.codec import Codec

SHAPE = {"hidden": 576, "width": 1536, "heads": 9, "kv_heads": 3, "vocab": 49152}  # SmolLM2-135M, of 30 layers
BITS = ((4, 4), (4, 3))


def model_of(layers: int) -> Any:
    """A Llama of SmolLM2's shape with random weights, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SHAPE["vocab"], hidden_size=SHAPE["hidden"], intermediate_size=SHAPE["width"],
        num_hidden_layers=layers, num_attention_heads=SHAPE["heads"], num_key_value_heads=SHAPE["kv_heads"],
        max_position_embeddings=65536, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def caches(layers: int, tokens: int) -> dict[str, tuple[str, Any]]:
    """{way: (attention of the model, a cache that holds ``tokens``)}."""
    from transformers.cache_utils import DynamicCache

    from tq.infer.cache import coded_cache

    made: dict[str, tuple[str, Any]] = {"bf16": ("sdpa", DynamicCache())}
    for keys, values in BITS:
        of_keys, of_values = (
            Codec(bits, block=64, scale="mse", scale_dtype=torch.bfloat16) for bits in (keys, values)
        )
        for direct in (False, True):
            name = f"{keys} and {values} bits, {'read as codes' if direct else 'decoded'}"
            made[name] = "coded" if direct else "sdpa", coded_cache(layers, of_keys, of_values, direct=direct)
    generator = torch.Generator().manual_seed(1)
    for layer in range(layers):
        k, v = (
            torch.randn(1, SHAPE["kv_heads"], tokens, 64, generator=generator, dtype=torch.bfloat16) for _ in range(2)
        )
        for _, cache in made.values():
            cache.update(k, v, layer)
    return made


def measure(layers: int = 30, tokens: int = 8000, repeats: int = 7) -> dict[str, dict[str, Any]]:
    """{way: {"seconds": of each turn, "bytes": that its cache holds}}."""
    from tq.lab.timing import time_calls

    model = model_of(layers)

    def step(attention: str, cache: Any) -> Callable[[], None]:
        def call() -> None:
            model.set_attn_implementation(attention)
            model(torch.ones(1, 1, dtype=torch.int64), cache=cache)
            cache.crop(-1)

        return call

    with torch.inference_mode():
        made = caches(layers, tokens)
        timed = time_calls({way: step(*how) for way, how in made.items()}, repeats, settle=1)
    return {way: {"seconds": timed[way], "bytes": held(cache)} for way, (_, cache) in made.items()}


def held(cache: Any) -> int:
    """Bytes of all keys and values."""
    own = [getattr(layer, "nbytes", None) for layer in cache.layers]
    return sum(
        layer.keys.nbytes + layer.values.nbytes if known is None else known
        for known, layer in zip(own, cache.layers, strict=True)
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tq.lab.generation_step", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=8000, help="in the cache (8000)")
    parser.add_argument("--layers", type=int, default=30, help="of the model (30)")
    parser.add_argument("--repeats", type=int, default=7, help="turns that count (7)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    given = parser.parse_args(arguments)
    if min(given.tokens, given.layers, given.repeats) < 1:
        parser.error("--tokens, --layers and --repeats must be at least 1")
    try:
        found = measure(given.layers, given.tokens, given.repeats)
    except ImportError as error:
        parser.exit(1, f"{error}: pip install transformers\n")
    if given.json:
        print(json.dumps(found))
        return
    plain = found["bf16"]["seconds"]
    for way, row in found.items():
        ratios = [a / b for a, b in zip(plain, row["seconds"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
        print(f"{way:28s} {statistics.median(row['seconds']) * 1e3:8.1f} ms a token, {middle:.2f} times as fast as "
              f"bf16 [{low:.2f}, {high:.2f}], {row['bytes'] / 1e6:.1f} MB")  # fmt: skip


if __name__ == "__main__":
    main()
