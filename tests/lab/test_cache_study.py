"""The study of keys and values, on two short texts of the book's model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tq.infer import trained
from tq.lab import cache_rivals as rivals
from tq.lab import cache_study, weight_study

pytest.importorskip("tokenizers", reason="needs tokenizers")
pytest.importorskip("numba", reason="needs numba")


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Two texts of 128 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(weight_study.MODELS, "book", (trained.path, 4, 128))
        cache_study.of.cache_clear()
        yield
    cache_study.of.cache_clear()


def kl(keys: tuple[str, int] | None, values: tuple[str, int] | None = None, domain: str = "stdlib") -> float:
    found = cache_study.outcome("book", keys, values, domain)
    return sum(found["kl"]) / len(found["kl"])


def test_fewer_bits_are_further_away_and_centring_helps() -> None:
    plain = [kl(("plain", bits)) for bits in (4, 2)]
    assert 0 < plain[0] < plain[1] and kl(("centred", 2)) < plain[1]
    assert kl(None) < 1e-9


@pytest.mark.parametrize(
    "method", ("balanced", "search", "split", "ours", "prod", "int per token", "kivi", "kivi 128", "kvquant", "fp8")
)
def test_each_method_runs(method: str) -> None:
    assert 0 < kl((method, 3)) < 1


@pytest.mark.parametrize("method", ("codec", "int per token", "fp8"))
def test_each_code_of_values_runs(method: str) -> None:
    assert 0 < kl(None, (method, 3)) < 1


def test_stored_bits_and_prose() -> None:
    found = cache_study.outcome("book", ("plain", 4), ("int per token", 4), "prose")
    assert (found["keys"], found["values"]) == (4.25, 4.5) and len(found["kl"]) == 2


def test_errors_are_predicted_from_means_and_variances() -> None:
    rows = cache_study.key_errors("book", 4)
    assert len(rows) == trained.CONFIG.layers
    for row in rows:
        assert 0 < row["centred"] < 1.2 and row["centred, predicted"] <= 1
        assert row["centred"] == pytest.approx(row["centred, predicted"], rel=0.5)


def test_attention_is_timed() -> None:
    found = cache_study.attention_seconds(300, heads=2, queries=4, repeats=2)
    assert set(found) == {"bf16", "4 and 4 bits", "4 and 3 bits"} and min(min(each) for each in found.values()) > 0
    assert cache_study.median_ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == 2


def test_a_bias_of_keys_collapses_plain_codes_and_centring_cures() -> None:
    setting = cache_study.of("book")
    found = {}
    for way in ("plain", "centred"):
        made = []
        for known, code in zip(setting.known, cache_study.keys_of(setting, way, 4), strict=True):
            offset = torch.full_like(known.mean_KD, 40.0)
            made.append(rivals.biased(cache_study.moved(code, offset) if way == "centred" else code, offset))
        found[way] = sum(cache_study.judged(setting, rivals.pairs(made, None, len(made)))["kl"])
    assert found["plain"] > 20 * found["centred"]


def test_bytes_that_are_held() -> None:
    exact, coded = (cache_study.held("book", bits, bits, 512) for bits in (None, 4))
    config = trained.CONFIG
    assert exact["bytes"] == 2 * config.layers * config.groups * 512 * 64 * 2
    assert exact["bytes"] / coded["bytes"] == pytest.approx(16 / 4.25)
    assert cache_study.coded("book", ("plain", 4), None).config == config
