"""Rules over serving: the cache of keys and values, guessed tokens."""

from __future__ import annotations

from tq.book.claims.formulas import Figure, Formula, RangeFormula
from tq.book.claims.ledger import Claim, Finding, Results, Rule, found
from tq.book.claims.words import compare, in_part
from tq.systems import Transformer, hardware, kv_cache


def _cache(tokens: float, kv_heads: int = 8) -> float:
    """GB of the keys and values of one request of a 70B model."""
    return float(kv_cache.kv_cache_bytes(Transformer.preset("llama2-70b", kv_heads=kv_heads), tokens)) / 1e9


CHAPTER = "kv-cache"
HALF = 2.0  # times fewer bytes than bf16 that count as a saving
MINIMAL = 0.05  # nats of KL that count as a small loss


def saves_memory(claim: Claim, results: Results) -> Finding:
    """Reproduced if keys in 4 and values in 3 bits take at most half of the memory of bf16 and cost SmolLM2 at most
    0.05 nats of KL. A part holds if memory is saved."""
    fewer = results(CHAPTER, "held/bf16") / results(CHAPTER, "held/4-and-3-bits")
    cost = results(CHAPTER, "both/smollm2/k4v3")
    checks = (
        in_part(compare("times fewer bytes than bf16", fewer, HALF)),
        compare("nats of KL that it costs", cost, most=MINIMAL),
    )
    text = (
        f"With keys in 4 and values in 3 bits the cache of 8,000 tokens of SmolLM2 takes {fewer:.1f} times fewer bytes "
        f"than in bf16, and the model's predictions move by {cost:.3f} nats of KL per token (measured)."
    )
    return found(claim, checks, text, "A model whose keys or values bear fewer bits badly.", "medium")


DRAFTS = (4, 3, 2)  # bits of the drafts' weights


def keeps_what_matches(claim: Claim, results: Results) -> Finding:
    """Reproduced if with every draft all prompts get the tokens of the large model alone, and the draft of 3 bits has
    guesses that are kept and guesses that are not. A part holds if one of both is so."""
    prompts, kept = results(CHAPTER, "drafts/3/prompts"), results(CHAPTER, "drafts/3/kept")
    same = min(results(CHAPTER, f"drafts/{bits}/same") for bits in DRAFTS)
    shares = [results(CHAPTER, f"drafts/{bits}/kept") for bits in DRAFTS]
    checks = (
        compare("prompts with the tokens of the model alone, with the worst draft", same, prompts),
        compare("share of the 3-bit draft's guesses that are kept", kept, 0.01, 0.99),
    )
    text = (
        f"SmolLM2 checked four guesses a pass and kept {min(shares):.0%} to {max(shares):.0%} of them, by the bits of "
        f"the draft. {same:.0f} of {prompts:.0f} prompts got the tokens that it chooses alone, with every draft."
    )
    return found(claim, checks, text, "A token that the large model would not have chosen.", "medium")


def _saved(batch: int) -> float:
    """Per cent that Mixtral 8x7B takes less than a dense model of its size for a token of each of so many requests: the
    longer of reading the weights that are visited and computing, on H100."""
    shape, gpu = Transformer.preset("mixtral-8x7b"), hardware.gpu("h100-80gb")
    assert shape.moe is not None
    experts = shape.moe_layers * shape.moe.count * shape.expert_parameters
    visited = 1 - (1 - shape.moe.active / shape.moe.count) ** batch

    def seconds(read: float, used: float) -> float:
        return max(2 * read / gpu.hbm_bytes_per_s, 2 * used * batch / gpu.peak_flops)

    dense = seconds(shape.parameters, shape.parameters)
    return 100 * (1 - seconds(shape.parameters - experts * (1 - visited), shape.active_parameters) / dense)


def _saved_by_batch() -> dict[str, Figure]:
    return {f"with {batch:,} request{'s' * (batch > 1)} at a time": _saved(batch) for batch in (1, 32, 1024)}


RULES: dict[str, Rule] = {
    "S3-072": Formula(
        "1 - max(bytes of the visited experts / memory rate, operations / peak) over the same of a dense 46.7B model",
        _saved_by_batch,
        "Mixtral is computed to save {0:.0f}% against a dense model of its size for one request and {2:.0f}% for "
        "1,024. For 32, which visit all experts and wait for memory, it saves {1:.0f}%.",
        "The batch that is meant, or tokens per second of both models.", "%", confidence="medium",
    ),
    "S4-087": RangeFormula(
        "2 * layers * KV heads * 128 * 2 bytes * tokens, two GB or more",
        lambda: {"70B with 8 KV heads at 8K": _cache(8192), "at 128K": _cache(131072)},
        "The KV cache of a 70B model with eight KV heads takes {0:.1f} GB per request at 8K tokens, {1:.0f} GB at 128K "
        "(computed). The document does not give the shape of its 100B model.",
        "A KV cache with fewer bits or heads.", "GB", claimed=(2.0, 1e9), within=0.0, confidence="medium",
    ),
    "S4-090": RangeFormula(
        "query heads / KV heads, at least 2",
        lambda: {
            "GQA, 64 on 8": kv_cache.grouping_factor(Transformer.preset("llama2-70b")),
            "MQA, 64 on 1": kv_cache.grouping_factor(Transformer.preset("llama2-70b", kv_heads=1)),
        },
        "With eight KV heads for 64 query heads, a 70B model is computed to keep {0:.0f} times less, with one {1:.0f} "
        "times less. The loss of quality was not measured.",
        "A definition of substantial above eight times.", "x", claimed=(2.0, 1e9), within=0.0,
    ),
    "S4-141": saves_memory,
    "S4-155": keeps_what_matches,
}  # fmt: skip
