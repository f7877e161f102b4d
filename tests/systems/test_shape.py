"""Shapes: published parameter counts, the closed forms of the papers, mixtures of experts, refused shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq.systems import Experts, Transformer
from tq.systems.shape import PRESETS

PUBLISHED = {  # billions, as papers and model cards print them
    "gpt2-124m": 0.124, "gpt2-355m": 0.355, "gpt2-1.5b": 1.558, "gpt3-175b": 174.6, "megatron-22b": 22.0,
    "megatron-530b": 529.6, "megatron-1t": 1008.0, "bloom-176b": 176.247, "palm-540b": 540.35, "pythia-70m": 0.0704,
    "pythia-160m": 0.1623, "pythia-410m": 0.4053, "pythia-1b": 1.0118, "pythia-2.8b": 2.7752, "pythia-12b": 11.8421,
    "llama-7b": 6.7, "llama-13b": 13.0, "llama-33b": 32.5, "llama-65b": 65.2, "llama2-70b": 68.977, "llama3-8b": 8.03,
    "llama3-70b": 70.554, "llama3-405b": 405.853, "smollm3-3b": 3.075, "mixtral-8x7b": 46.7, "mixtral-8x22b": 141.0,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_counts(name: str) -> None:
    assert Transformer.preset(name).parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


@given(st.integers(1, 150), st.integers(1, 200), st.integers(1, 64), st.integers(1, 8), st.integers(1, 3000))
def test_flops_are_the_closed_form_of_narayanan(layers: int, dim: int, heads: int, seqs: int, batch: int) -> None:
    h, s, v = dim * heads, 512 * seqs, 51200
    model = Transformer(layers, h, heads, v, s)
    closed = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    again = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert model.model_flops(batch) == pytest.approx(closed, rel=1e-9)
    assert model.hardware_flops(batch, "full") == pytest.approx(again, rel=1e-9)
    assert model.hardware_flops(batch, "none") == model.model_flops(batch)


def test_active_parameters_of_a_mixture() -> None:
    mixtral = Transformer.preset("mixtral-8x7b")
    assert mixtral.active_parameters / 1e9 == pytest.approx(12.9, rel=0.01)
    dense = Transformer.preset("llama2-7b")
    assert dense.active_parameters == dense.parameters


def test_all_experts_visited_are_as_many_flops_as_one_wide_mlp() -> None:
    wide = Transformer(4, 1024, 8, 1000, 512, ffn=4 * 2048, gated=True)
    mixture = Transformer(4, 1024, 8, 1000, 512, ffn=2048, gated=True, experts=(4, 4))
    router = 2 * 1024 * 4
    assert mixture.layer_flops == pytest.approx(wide.layer_flops + router)


def test_deepseek_style_mixture_counts_shared_and_dense_layers() -> None:
    experts = Experts(count=64, active=6, ffn=1408, shared=2, dense_layers=1)
    model = Transformer(28, 2048, 16, 102400, 4096, ffn=10944, gated=True, experts=experts)
    assert model.parameters / 1e9 == pytest.approx(16.4, rel=0.01)  # DeepSeekMoE 16B


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 0}, "layers must be an int of at least 1, got 0"),
        ({"hidden": -768}, "hidden must be an int of at least 1, got -768"),
        ({"hidden": 100, "heads": 12}, "heads must divide hidden=100, got 12"),
        ({"kv_heads": 5}, "kv_heads must divide heads=12, got 5"),
        ({"experts": (8, 9)}, "experts.active must be at most experts.count=8, got 9"),
        ({"experts": Experts(8, 2, dense_layers=12)}, "experts.dense_layers must be below layers=12, got 12"),
    ],
)
def test_bad_shapes_raise_one_clear_message(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Transformer.preset("gpt2-124m", **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [1.5, True, "12", None])
def test_a_size_that_is_no_int_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="layers must be an int"):
        Transformer.preset("gpt2-124m", layers=value)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="gpt2-124m.*got 'gpt5'"):
        Transformer.preset("gpt5")
    assert all(Transformer.preset(name).parameters > 0 for name in PRESETS)
