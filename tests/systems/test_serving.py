"""What serving a model rests on: the cache of keys and values, guessed tokens, caches of loops; and adapters."""

import math
from collections import OrderedDict

import pytest

from tq.systems import Layout, Transformer, caching, kv_cache, lora, memory, sharding, speculative


def test_the_cache_of_opt_13b() -> None:
    # Kwon et al. 2023, section 3: 800 KB a token = 2 * 5120 * 40 layers * 2 bytes
    opt = Transformer(layers=40, hidden=5120, heads=40, vocab=50272, seq=2048)
    assert kv_cache.kv_cache_bytes(opt, 1) == 800 * 1024
    assert kv_cache.kv_cache_bytes(opt, 2048) / 2**30 == pytest.approx(1.6, abs=0.05)  # "up to 1.6 GB" a request
    llama = Transformer.preset("llama2-70b")
    assert kv_cache.kv_cache_bytes(llama, 1) == 327_680 and kv_cache.grouping_factor(llama) == 8
    with pytest.raises(ValueError, match="tokens must be 0 or more and finite, got -1"):
        kv_cache.kv_cache_bytes(llama, -1)


@pytest.mark.parametrize(
    ("acceptance", "guesses", "speed"), [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 5, 3.69), (0.9, 10, 6.86)]
)
def test_the_table_of_speculative_decoding(acceptance: float, guesses: int, speed: float) -> None:
    # Leviathan et al. 2023, table 1: guesses that cost nothing
    assert speculative.speedup(acceptance, guesses, 0.0) == pytest.approx(speed, abs=0.006)
    assert speculative.accepted_tokens(acceptance, guesses) == pytest.approx(
        (1 - acceptance ** (guesses + 1)) / (1 - acceptance)
    )


def test_all_guesses_accepted_and_none() -> None:
    assert speculative.speedup(1.0, 5, 0.05) == 6 / 1.25 and speculative.speedup(0.0, 5, 0.05) == 1 / 1.25


def lru_misses(loop: int, fast: int, rounds: int) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for read in list(range(loop)) * rounds:
        misses += read not in held
        held[read] = None
        held.move_to_end(read)
        if len(held) > fast:
            held.popitem(last=False)
    return misses / (loop * rounds)


def best_misses(loop: int, fast: int, rounds: int) -> float:
    """Belady's: evict what is read last again."""
    held: set[int] = set()
    misses = 0
    for read in list(range(loop)) * rounds:
        if read not in held:
            misses += 1
            if len(held) == fast:
                held.remove(max(held, key=lambda item: (item - read) % loop))
            held.add(read)
    return misses / (loop * rounds)


def test_misses_of_a_loop_are_those_of_the_policies() -> None:
    assert lru_misses(110, 100, 40) == caching.loop_miss_share(110, 100, "lru") == 1
    assert best_misses(110, 100, 400) == pytest.approx(caching.loop_miss_share(110, 100, "best"), rel=0.05)
    assert lru_misses(90, 100, 50) == 1 / 50 and caching.loop_miss_share(90, 100, "lru") == 0
    assert caching.slowdown(1.0, 100) == 100 and caching.slowdown(0.0, 100) == 1
    with pytest.raises(ValueError, match="policy must be one of lru, best"):
        caching.loop_miss_share(1.1, 1.0, "fifo")


def test_adapters_of_gpt_3() -> None:
    # Hu et al. 2021, table 4: 4.7M and 37.7M, of q and v at ranks 1 and 8
    gpt3 = Transformer.preset("gpt3-175b")
    assert lora.lora_parameters(gpt3, 1, "qv") / 1e6 == pytest.approx(4.7, abs=0.05)
    assert lora.lora_parameters(gpt3, 8, "qv") / 1e6 == pytest.approx(37.7, abs=0.06)
    assert lora.adapter_parameters(4096, 4096, 16) == 131_072 and lora.adapter_factor(4096, 4096, 16) == 128
    with pytest.raises(ValueError, match="matrices must be one of q, k, v, o; got 'up'"):
        lora.lora_parameters(gpt3, 8, ["up"])


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_is_that_of_its_paper_and_of_the_memory_model(stage: int, gigabytes: float) -> None:
    # Rajbhandari et al. 2020, figure 1: 7.5B at 64 ranks
    assert 7.5 * sharding.zero_bytes(stage, 64) == pytest.approx(gigabytes, abs=0.05)
    model = Transformer.preset("llama2-7b")
    held = memory(model, Layout(dp=64, global_batch=64, zero=stage), gradient_bytes=2.0)
    counted = (held.weights + held.gradients + held.states) / model.parameters
    assert counted == pytest.approx(sharding.zero_bytes(stage, 64))


def test_limits_and_traffic_of_zero() -> None:
    assert [sharding.zero_factor(stage, math.inf) for stage in (1, 2, 3)] == [4, 8, math.inf]
    assert [sharding.zero_traffic(stage) for stage in (0, 1, 2, 3)] == [1, 1, 1, 1.5]
    with pytest.raises(ValueError, match="stage must be one of 0, 1, 2, 3; got '4'"):
        sharding.zero_bytes(4, 8)
