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
    "method",
    (
        "balanced", "search", "matrix", "split", "ours", "prod", "int per token", "kivi", "kivi 128", "kivi searched",
        "kvquant", "fp8", "fp8 scaled", "kivi 32 searched",
    ),
)  # fmt: skip
def test_each_method_runs_with_all_tokens_coded_and_with_the_first_exact(method: str) -> None:
    found = kl((method, 3)), kl((method + cache_study.FIRST, 3))
    assert all(0 < one < 1 for one in found) and found[0] != found[1]


@pytest.mark.parametrize("method", ("codec", "matrix", "int per token", "fp8", "fp8 scaled"))
def test_each_code_of_values_runs(method: str) -> None:
    assert 0 < kl(None, (method, 3)) < 1


def test_the_first_token_alone_makes_the_difference() -> None:
    setting = cache_study.of("book")
    for method in ("search", "kivi 128"):
        plain, exempt = (cache_study.keys_of(setting, method + what, 4)[0] for what in ("", cache_study.FIRST))
        k = torch.randn(1, setting.model.config.groups, 150, 64, generator=torch.Generator().manual_seed(0))
        other = cache_study.keys_of(setting, method + cache_study.OTHER, 4)[0](k)
        same = (other == k).flatten(3).all(3).all(1)[0]
        assert same.nonzero().flatten().tolist() == [cache_study.PLACE]
        assert torch.equal(exempt(k)[:, :, :1], k[:, :, :1]) and not torch.equal(plain(k)[:, :, :1], k[:, :, :1])
        assert exempt(k).shape == k.shape
    far = torch.cat([100 * torch.ones(1, 1, 1, 64), torch.randn(1, 1, 20, 64)], 2)
    wrong = cache_study.rivals.first_exact(cache_study.rivals.PerChannel(4))(far) - far
    assert wrong.abs().max() < 0.5, "a first token that is far away widens no range"


def test_what_the_first_token_weighs() -> None:
    rows = cache_study.first_tokens("book", 4)
    assert len(rows) == trained.CONFIG.layers
    for row in rows:
        assert 0 < row["attention"] < 1 and min(row["plain"], row["centred"], row["balanced"]) > 0


def test_stored_bits_and_prose() -> None:
    found = cache_study.outcome("book", ("plain", 4), ("int per token", 4), "prose")
    assert (found["keys"], found["values"]) == (4.25, 4.5) and len(found["kl"]) == 2


def test_errors_are_predicted_from_means_and_variances() -> None:
    rows = cache_study.key_errors("book", 4)
    assert len(rows) == trained.CONFIG.layers
    for row in rows:
        assert 0 < row["centred"] < 1.2 and row["centred, predicted"] <= 1
        assert row["centred"] == pytest.approx(row["centred, predicted"], rel=0.5)
        assert row["matrix"] == pytest.approx(row["matrix, predicted"], rel=0.5) and row["matrix"] < row["balanced"]


@pytest.mark.parametrize(("queries", "rivals"), [
    (2, {"bf16", "fp32", "bf16, products", "fp32, products"}),
    (4, {"bf16", "bf16, rows", "fp32, rows", "bf16, products", "fp32, products"}),
])  # fmt: skip
def test_attention_is_timed(queries: int, rivals: set[str]) -> None:
    found = cache_study.attention_seconds(300, heads=2, queries=queries, repeats=2, cold=1 << 20)
    assert set(found) == {*rivals, "4 and 4 bits", "4 and 3 bits", "4 and 4 bits, matrix"}
    assert min(min(each) for each in found.values()) > 0
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
    exact, coded = (cache_study.held("book", bits, bits, 513) for bits in (None, 4))
    config = trained.CONFIG
    of_one = 2 * config.layers * config.groups * 64 * 2
    assert exact["bytes"] == 768 * of_one, "three pages of 256 tokens"
    assert coded["bytes"] == pytest.approx((512 * 4.25 / 16 + 1) * of_one), "two pages of codes, and the first token"
    assert cache_study.coded("book", ("plain", 4), None).config == config
