"""Laws of the model: rotary positions, causality, initialisation, counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tq.train.model.gpt import ACTIVATIONS, GPT, PRESETS, Attention, GPTConfig, apply_rope, rope_tables

SMALL = GPTConfig(layers=2, hidden=32, heads=4, vocab=61, seq=24)
VARIANTS = [
    SMALL,
    replace(SMALL, activation="relu2", kv_heads=2),
    replace(SMALL, activation="swiglu", kv_heads=1, qk_norm=True),
    replace(SMALL, tie_embeddings=False, ffn=50),
]


def tokens(config: GPTConfig, batch: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(0, config.vocab, (2, batch, config.seq), generator=generator)
    return both[0], both[1]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rope_is_the_complex_rotation():
    seq, size, theta = 50, 8, 100.0
    cos, sin = rope_tables(seq, size, theta)
    x = randn(1, seq, 3, size)
    turned = apply_rope(x, cos, sin)
    position = torch.arange(seq, dtype=torch.float64)[:, None, None]
    frequency = theta ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    expected = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * position * frequency)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), -1), atol=1e-6, rtol=0)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-6, rtol=0)
    torch.testing.assert_close(apply_rope(turned, cos, -sin), x, atol=1e-6, rtol=0)
    assert torch.equal(turned[:, 0], x[:, 0])


def test_rope_scores_depend_on_the_distance_only():
    cos, sin = rope_tables(64, 16, 10000.0)
    q, k = randn(16, seed=1), randn(16, seed=2)
    q, k = (apply_rope(x.expand(1, 64, 1, 16), cos, sin)[0, :, 0] for x in (q, k))
    scores = q @ k.T  # [m, n]
    for distance in (-40, -7, 0, 1, 30):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert scores[0].std() > 0.01  # and they do depend on it


@pytest.mark.parametrize("config", VARIANTS, ids=["gelu", "relu2-gqa", "swiglu-mqa-qknorm", "untied"])
def test_a_later_token_does_not_change_earlier_logits(config: GPTConfig):
    model = GPT(config)
    ids, _ = tokens(config)
    changed = ids.clone()
    changed[:, 11] = (changed[:, 11] + 1) % config.vocab
    before, after = model(ids)[0], model(changed)[0]
    assert torch.equal(before[:, :11], after[:, :11])
    assert not torch.equal(before[:, 11:], after[:, 11:])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_the_masked_softmax(kv_heads: int):
    config = replace(SMALL, kv_heads=kv_heads)
    layer = Attention(config).double()
    x = randn(2, 24, 32)
    cos, sin = rope_tables(24, config.head_size, config.rope_theta)
    q, k, v = (getattr(layer, name)(x).view(2, 24, -1, 8) for name in ("query", "key", "value"))
    q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    k, v = (t.repeat_interleave(4 // kv_heads, dim=2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(8)
    weights = scores.masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    expected = layer.out(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))
    torch.testing.assert_close(layer(x, cos, sin), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("config", [*VARIANTS, PRESETS["tiny"], PRESETS["1m"]])
def test_initial_loss_is_that_of_a_uniform_guess(config: GPTConfig):
    ids, targets = tokens(config, batch=8)
    assert abs(GPT(config)(ids, targets)[1].item() - math.log(config.vocab)) < 0.15


def test_loss_is_the_mean_negative_log_probability():
    model = GPT(SMALL)
    ids, targets = tokens(SMALL)
    targets[0, 3:] = -100  # does not count
    logits, loss = model(ids, targets)
    log_p = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(loss, -log_p[targets >= 0].mean())
    assert model(ids)[1] is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_overfits_one_batch(activation: str):
    config = replace(SMALL, activation=activation)
    model = GPT(config)
    ids, targets = tokens(config, batch=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        model(ids, targets)[1].backward()
        optimizer.step()
    assert model(ids, targets)[1].item() < 0.05


def test_seed_fixes_the_bits_and_no_global_generator_is_drawn_from():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = GPT(SMALL, seed=1)
    torch.manual_seed(6)
    second, other = GPT(SMALL, seed=1), GPT(SMALL, seed=2)
    torch.manual_seed(5)
    assert torch.equal(state, torch.get_rng_state())
    GPT(SMALL)
    assert torch.equal(state, torch.get_rng_state())
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.ndim < 2 or not torch.equal(a, c), name


def test_initial_spread():
    config = replace(PRESETS["tiny"], tie_embeddings=False)
    for name, parameter in GPT(config).named_parameters():
        if parameter.ndim < 2:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        expected = 0.02 / (2 if name.endswith(("out.weight", "down.weight")) else 1)  # sqrt(2 * 2 layers) = 2
        error = expected / math.sqrt(2 * parameter.numel())
        assert abs(parameter.std().item() - expected) < 4 * error, name


@pytest.mark.parametrize("config", VARIANTS)
def test_counts_agree_with_the_model(config: GPTConfig):
    model = GPT(config)
    assert model.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (model.head.weight is model.embed.weight) == config.tie_embeddings
    ids, targets = tokens(config, batch=1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # counts matrix products only
        model(ids, targets)[1].backward()
    gains = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim < 2)
    assert counter.get_total_flops() == (model.flops_per_token() - 6 * gains) * config.seq


def test_presets_have_the_size_that_they_are_named_by():
    sizes = {name: config.num_parameters / 1e6 for name, config in PRESETS.items()}
    expected = {
        "tiny": 0.43,
        "1m": 1.02,
        "5m": 4.79,
        "8m": 7.94,
        "gpt2-124m": 123.55,
        "gpt2-355m": 353.5,
        "gpt3-1.3b": 1311,
    }
    assert sizes == pytest.approx(expected, rel=0.01)


def test_autocast_and_compile_compute_the_same():
    model = GPT(replace(SMALL, kv_heads=2))
    ids, targets = tokens(SMALL)
    loss = model(ids, targets)[1]
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        logits, low = model(ids, targets)
    assert logits.dtype == torch.bfloat16 and low.dtype == torch.float32
    assert low.item() == pytest.approx(loss.item(), abs=0.02)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, targets)[1]
    assert compiled.item() == pytest.approx(loss.item(), abs=1e-5)
    for a, b in zip(gradient, torch.autograd.grad(compiled, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be a positive integer, got 0"),
        ({"vocab": 2.0}, "vocab must be a positive integer, got 2.0"),
        ({"hidden": 30}, "hidden=30, heads=4"),
        ({"hidden": 20}, "even head size"),
        ({"kv_heads": 3}, "kv_heads must divide heads=4, got 3"),
        ({"activation": "tanh"}, "gelu, relu2, swiglu, got 'tanh'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a positive finite number"),
        ({"norm_eps": 0}, "norm_eps must be"),
    ],
)
def test_a_bad_shape_is_refused(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_a_sequence_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="positions <= 24"):
        GPT(SMALL)(torch.zeros(1, 25, dtype=torch.int64))
