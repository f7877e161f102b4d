"""Bits by layer: the division is the best one, it divides by what errors cost, and layers keep what they got."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from tq.infer.allocation import allocate_bits, divided, squared_gradients
from tq.infer.decoder import Decoder
from tq.infer.evaluate import Reference, divergence
from tq.infer.layers import layers, plain_linear, put, shared, stored_bits
from tq.infer.weights import decoded, load, quantize, save
from tq.quant.codec import Codec
from tq.train.model.gpt import GPT, GPTConfig

CODEC = Codec(bits=3, block=64)


def model(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    made = GPT(GPTConfig(layers=2, hidden=128, heads=2, kv_heads=1, vocab=96, seq=64, ffn=192, activation="swiglu"))
    for parameter in made.parameters():  # far from a start, where all gradients are alike
        if parameter.dim() == 2:
            parameter.data.mul_(3)
    return made


def ids(count: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(96, (count, 48), generator=torch.Generator().manual_seed(seed))


def test_the_division_is_the_best_of_all_where_layers_are_of_one_size() -> None:
    draw = random.Random(0)
    for _ in range(50):
        costs = {str(k): 10 ** draw.uniform(-3, 3) for k in range(5)}
        found = divided(costs, dict.fromkeys(costs, 7), 3, 2, 5)
        assert sum(found.values()) == 15
        every = (dict(zip(costs, bits, strict=True)) for bits in itertools.product(range(2, 6), repeat=5))
        fitting = [bits for bits in every if sum(bits.values()) <= 15]

        def loss(bits: dict[str, int], costs: dict[str, float] = costs) -> float:
            return sum(costs[name] * 4.0 ** -bits[name] for name in costs)

        assert loss(found) == pytest.approx(min(map(loss, fitting)))


def test_the_mean_is_kept_where_sizes_differ() -> None:
    draw = random.Random(1)
    for _ in range(50):
        costs = {str(k): 10 ** draw.uniform(-3, 3) for k in range(20)}
        sizes = {name: draw.choice((1, 3, 8)) for name in costs}
        found = divided(costs, sizes, 3, 2, 5)
        mean = sum(found[name] * sizes[name] for name in costs) / sum(sizes.values())
        assert 3 - 8 / sum(sizes.values()) < mean <= 3 and set(found.values()) <= {2, 3, 4, 5}


def test_an_error_of_weights_costs_what_their_gradient_says() -> None:
    """Noise on one layer's weights: the divergence is half its square times the squared gradients, about."""
    plain, texts = model(), ids(64)
    reference, gradient = Reference.of(plain, texts), squared_gradients(plain, texts)
    generator = torch.Generator().manual_seed(3)
    for name, layer in layers(plain):
        weight, found = layer.get_parameter("weight"), []
        size = (2e-4 / gradient[name] / weight.numel()) ** 0.5
        for _ in range(4):
            noisy = shared(plain)
            put(noisy, name, plain_linear(weight.detach() + size * torch.randn(weight.shape, generator=generator)))
            found.append(divergence(reference, noisy).kl)
        assert sum(found) / 4 == pytest.approx(1e-4, rel=0.3), name


def test_layers_whose_errors_cost_more_get_more_bits() -> None:
    plain = model()
    found = allocate_bits(plain, CODEC, ids())
    assert set(found) == {name for name, _ in layers(plain)} and len(set(found.values())) > 1
    weights = {name: layer.weight.numel() for name, layer in layers(plain)}  # type: ignore[union-attr]
    assert sum(found[name] * weights[name] for name in found) <= 3 * sum(weights.values())
    assert found == allocate_bits(plain, CODEC, ids())
    small = quantize(plain, CODEC, ids(), method="trellis", widths=found)
    assert {name: layer.codec.bits for name, layer in layers(small)} == found  # type: ignore[union-attr]
    assert stored_bits(small) <= stored_bits(quantize(plain, CODEC, ids(), method="trellis"))


def test_a_mean_between_two_numbers_is_used_up() -> None:
    plain = model()
    weights = {name: layer.get_parameter("weight").numel() for name, layer in layers(plain)}
    found = allocate_bits(plain, CODEC, ids(), mean=3.3)
    mean = sum(found[name] * weights[name] for name in found) / sum(weights.values())
    assert 3.3 - max(weights.values()) / sum(weights.values()) < mean <= 3.3


def test_a_block_whose_inputs_are_zeros_costs_nothing() -> None:
    plain = model()
    nn.init.zeros_(plain.blocks[0].attention_norm.weight)
    found = allocate_bits(plain, CODEC, ids())
    assert {found[f"blocks.0.attention.{name}"] for name in ("query", "key", "value", "out")} == {2}


def test_padding_counts() -> None:
    plain, wide = model(), Codec(bits=3, block=256)  # 128 and 192 columns take 256
    found = allocate_bits(plain, wide, ids())
    small = quantize(plain, wide, ids(), method="trellis", widths=found)
    assert stored_bits(small) <= stored_bits(quantize(plain, wide, ids(), method="trellis"))


def test_progress_counts_texts_and_layers() -> None:
    seen: list[tuple[int, int]] = []
    allocate_bits(model(), CODEC, ids(3), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(k, 17) for k in range(1, 18)]


def test_a_layer_that_nobody_hears_gets_the_fewest() -> None:
    plain = model()
    for block in plain.blocks:
        nn.init.zeros_(block.mlp.down.weight)
    found = allocate_bits(plain, CODEC, ids())
    assert {found[f"blocks.{k}.mlp.{name}"] for k in range(2) for name in ("gate", "up", "down")} == {2}


def test_mixed_bits_are_nearer_to_a_model_whose_layers_matter_unequally() -> None:
    plain = model()
    for name in ("gate", "up"):
        plain.blocks[1].get_submodule(f"mlp.{name}").weight.data.mul_(0.05)
    reference = Reference.of(plain, ids(32, 2))
    kl = []
    for widths in (None, allocate_bits(plain, CODEC, ids())):
        small = quantize(plain, CODEC, ids(), method="trellis", widths=widths)
        kl.append(divergence(reference, decoded(small)).kl)
    assert kl[1] < 0.9 * kl[0]


@pytest.mark.parametrize("integers", [False, True])
def test_files_and_the_decoder_read_layers_of_different_bits(integers: bool, tmp_path: Path) -> None:
    plain = model()
    names = [name for name, _ in layers(plain)]
    widths = {name: 2 + k % 4 for k, name in enumerate(names)}  # within one stacked product too
    small = quantize(plain, CODEC, ids(), method="trellis", widths=widths)
    save(small, tmp_path / "small.safetensors")
    read = load(tmp_path / "small.safetensors")
    assert {name: layer.codec.bits for name, layer in layers(read)} == widths  # type: ignore[union-attr]
    decoder, tokens = Decoder(read, integers=integers), ids(1)[0, :12]
    logits = torch.stack([torch.from_numpy(decoder.step(int(token)).copy()) for token in tokens])
    wanted = decoded(small)(tokens[None])[0][0]
    assert (logits - wanted).norm() < (0.03 if integers else 1e-4) * wanted.norm()


def test_a_run_that_was_ended_goes_on_only_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model()
    one, other = ({name: bits for name, _ in layers(plain)} for bits in (2, 4))
    for widths in (one, other):
        small = quantize(plain, CODEC, ids(), widths=widths, keep=tmp_path)
        assert {layer.codec.bits for _, layer in layers(small)} == set(widths.values())  # type: ignore[union-attr]
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr("tq.infer.weights.gptq", None)  # nothing is quantized anew
    again = quantize(plain, CODEC, ids(), widths=one, keep=tmp_path)
    assert {layer.codec.bits for _, layer in layers(again)} == {2}  # type: ignore[union-attr]


@pytest.mark.parametrize("widths", [(), (2, 4), (4, 5), (2,), (3, 4, 5), (2, 3)])
def test_widths_that_cannot_be_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="widths must be numbers that follow each other, with 3 between them"):
        allocate_bits(model(), CODEC, ids(), widths=widths)


def test_bits_for_other_layers_are_refused() -> None:
    plain = model()
    with pytest.raises(ValueError, match="widths must name all 14 layers"):
        quantize(plain, CODEC, ids(), widths={"blocks.0.mlp.up": 3})
    widths = dict.fromkeys((name for name, _ in layers(plain)), 6)
    with pytest.raises(ValueError, match="a trellis has 2, 3, 4, 5 bits a weight, got 6"):
        quantize(plain, CODEC, ids(), widths=widths, method="trellis")


def test_the_model_stays_as_it_was() -> None:
    plain = model()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    logits = plain(ids(1))[0]
    allocate_bits(plain, CODEC, ids(2))
    assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())
    assert torch.equal(plain(ids(1))[0], logits) and all(p.grad is None for p in plain.parameters())
