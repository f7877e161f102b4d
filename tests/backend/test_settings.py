"""Settings of the backend: from an object, from the environment, and what is refused."""

from __future__ import annotations

import pytest

from tq.backend import Config, configure, configured
from tq.backend import settings as module
from tq.quant.codec import Codec


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch):
    monkeypatch.setattr(module, "_chosen", [])


def test_the_default_codes_sums_in_four_bits():
    config = configured()
    assert config == Config() and config.codec.bits == 4 and config.codec.nonfinite == "propagate"
    assert config.codes == {"all_reduce", "reduce_scatter"} and config.min_numel == 4096 and config.warmup == 50


def test_the_environment(monkeypatch):
    for name, value in {"BITS": "2", "BLOCK": "256", "SEED": "7", "MIN_NUMEL": "100", "WARMUP": "3"}.items():
        monkeypatch.setenv(f"TQ_{name}", value)
    monkeypatch.setenv("TQ_CODES", "all_reduce, all_gather")
    config = configured()
    assert (config.codec.bits, config.codec.block, config.codec.seed) == (2, 256, 7)
    assert config.codes == {"all_reduce", "all_gather"} and (config.min_numel, config.warmup) == (100, 3)
    monkeypatch.setenv("TQ_CODES", "")
    assert configured().codes == frozenset()


def test_what_is_chosen_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("TQ_BITS", "2")
    assert configure(min_numel=5).codec.bits == 2
    assert configure(Config(Codec(3))).codec.bits == 3 == configured().codec.bits


@pytest.mark.parametrize(
    ("given", "said"),
    (
        ({"codes": {"broadcast"}}, "codes=broadcast: accepted are all_reduce, reduce_scatter, all_gather, all_to_all"),
        ({"min_numel": -1}, "min_numel must be an integer >= 0, got -1"),
        ({"warmup": 1.5}, "warmup must be an integer >= 0, got 1.5"),
    ),
)
def test_errors(given, said):
    with pytest.raises(ValueError, match=said):
        Config(**given)


def test_errors_of_the_environment(monkeypatch):
    monkeypatch.setenv("TQ_BITS", "four")
    with pytest.raises(ValueError, match="TQ_BITS must be an integer, got 'four'"):
        configured()
    monkeypatch.setenv("TQ_BITS", "9")
    with pytest.raises(ValueError, match="bits"):
        configured()


def test_what_ranks_compare_names_every_setting():
    different = [Config(Codec(3)), Config(min_numel=1), Config(codes=frozenset()), Config(warmup=1)]
    different.append(Config(Codec(4, seed=1)))
    assert len({config.said() for config in (Config(), *different)}) == 6
