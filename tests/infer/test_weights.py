"""Models with coded weights: how they come about, go on after a kill, and are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.infer.helpers import sharp
from tq import Codec
from tq.infer.evaluate import divergence
from tq.infer.layers import QuantizedLinear, layers, stored_bits
from tq.infer.weights import Told, decoded, load, quantize, save
from tq.train.model import GPT, GPTConfig

CODEC = Codec(bits=4, block=64, scale_dtype=torch.bfloat16)


@pytest.fixture(scope="module", params=("gelu", "swiglu"))
def model(request: pytest.FixtureRequest) -> GPT:
    config = GPTConfig(layers=2, hidden=64, heads=2, vocab=97, seq=48, kv_heads=1, activation=request.param)
    return sharp(config, 4)


def ids(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(97, (rows, 48), generator=torch.Generator().manual_seed(seed))


def test_gptq_is_nearer_than_rounding(model: GPT) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = {}
    for method in ("nearest", "gptq"):
        small = quantize(model, CODEC, ids(8), method=method)
        found[method] = divergence(model, small, ids(4, seed=1)).kl
        assert stored_bits(small) == 4.25 and all(isinstance(layer, QuantizedLinear) for _, layer in layers(small))
        assert divergence(small, decoded(small), ids(2)).kl < 1e-9
    assert 0 < found["gptq"] < found["nearest"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert stored_bits(model) == 32 and all(parameter.requires_grad for parameter in model.parameters())


class Killed(Exception):
    pass


def test_it_goes_on_where_it_was_ended(model: GPT, tmp_path: Path) -> None:
    told: list[Told] = []

    def ends(each: Told) -> None:
        told.append(each)
        if each.name == "blocks.1.attention.out":
            raise Killed

    with pytest.raises(Killed):
        quantize(model, CODEC, ids(8), keep=tmp_path, progress=ends)
    assert told[0].total == len(list(layers(model))) and [each.done for each in told] == list(range(1, len(told) + 1))
    assert len(list(tmp_path.iterdir())) == 1
    again, whole = quantize(model, CODEC, ids(8), keep=tmp_path), quantize(model, CODEC, ids(8))
    for (_, one), (_, other) in zip(layers(again), layers(whole), strict=True):
        assert torch.equal(one.payload, other.payload) and torch.equal(one.scales, other.scales)
    quantize(model, CODEC, ids(8, seed=5), keep=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4, "what was made from other texts is not taken"


def test_save_and_load(model: GPT, tmp_path: Path) -> None:
    small = quantize(model, CODEC, ids(4))
    save(small, tmp_path / "small.safetensors")
    again = load(tmp_path / "small.safetensors")
    assert torch.equal(again(ids(2))[0], small(ids(2))[0]) and again.config == model.config
    assert again.head.weight is again.embed.weight
    held = (tmp_path / "small.safetensors").stat().st_size
    assert held < 0.6 * sum(value.nbytes for value in model.state_dict().values())


def test_files_that_are_not_whole(model: GPT, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    with pytest.raises(FileNotFoundError):
        load(path)
    save(quantize(model, CODEC, ids(4), method="nearest"), path)
    content = path.read_bytes()
    for bad in (b"", content[:100], content[:-1000], b"x" * 1000):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"no whole safetensors|no quantized model"):
            load(path)
    from safetensors.torch import save as to_bytes

    path.write_bytes(to_bytes({"x": torch.ones(3)}))
    with pytest.raises(ValueError, match="holds no quantized model"):
        load(path)
    told = {"config": {"layers": 1}, "codes": {}}
    path.write_bytes(to_bytes({"x": torch.ones(3)}, {"format": "tq-weights-1", "model": json.dumps(told)}))
    with pytest.raises(ValueError, match="is damaged"):
        load(path)


def test_what_cannot_be_quantized(model: GPT) -> None:
    with pytest.raises(ValueError, match="method must be one of"):
        quantize(model, CODEC, ids(1), method="awq")
    broken = GPT(model.config)
    with torch.no_grad():
        broken.blocks[1].mlp.up.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"blocks.1.mlp.up.weight holds numbers that are not finite"):
        quantize(broken, CODEC, ids(1))
    with pytest.raises(ValueError, match="rows=True"):
        QuantizedLinear(CODEC.encode(torch.ones(4, 64)))
