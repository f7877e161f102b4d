"""Decoding straight from codes, beside the model whose weights are decoded first."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.infer.helpers import sharp
from tq import Codec
from tq.infer.weights import decoded, quantize
from tq.train.model import GPT, GPTConfig

matvec = pytest.importorskip("tq.kernels.matvec", reason="needs numba")
from tq.infer.decoder import Decoder  # noqa: E402

CONFIG = GPTConfig(
    layers=2, hidden=128, heads=4, vocab=97, seq=48, kv_heads=2, ffn=192, activation="swiglu", rope_theta=100.0
)
IDS = torch.randint(97, (8, 48), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=((4, 1), (3, 2), (2, 2)), ids=str)
def small(request: pytest.FixtureRequest) -> GPT:
    bits, rounds = request.param
    codec = Codec(bits=bits, block=64, rounds=rounds, scale_dtype=torch.bfloat16)
    return quantize(sharp(CONFIG, 4), codec, IDS, head=codec).requires_grad_(False)


def test_logits_are_those_of_the_decoded_model(small: GPT) -> None:
    wanted = decoded(small)(IDS[:1])[0][0]
    decoder = Decoder(small, integers=False)
    for at, number in enumerate(IDS[0].tolist()):
        found = torch.from_numpy(decoder.step(number))
        assert torch.allclose(found, wanted[at], rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
    with pytest.raises(ValueError, match="room for 48 tokens"):
        decoder.step(0)
    decoder.forget(3)
    again = torch.from_numpy(decoder.step(int(IDS[0, 3])))
    assert torch.allclose(again, wanted[3], rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


def test_in_integers(small: GPT) -> None:
    if not matvec.integers_run():
        pytest.skip("needs AVX-512 VNNI")
    wanted = decoded(small)(IDS[:1])[0][0]
    decoder = Decoder(small, integers=True)
    found = torch.stack([torch.from_numpy(decoder.step(number).copy()) for number in IDS[0].tolist()])
    assert (found - wanted).norm() / wanted.norm() < 0.05


def test_generates_what_the_model_would(small: GPT) -> None:
    model, ids = decoded(small), IDS[:1, :5]
    for _ in range(12):
        ids = torch.cat([ids, model(ids)[0][:, -1:].argmax(-1)], 1)
    decoder = Decoder(small, integers=False)
    assert list(decoder.generate(IDS[0, :5].tolist(), 12)) == ids[0, 5:].tolist()
    decoder.forget()
    end = int(ids[0, 8])
    stopped = list(decoder.generate(IDS[0, :5].tolist(), 12, end))
    assert stopped == ids[0, 5 : 5 + ids[0, 5:].tolist().index(end)].tolist()
    assert decoder.nbytes == sum(b.nbytes for n, b in small.named_buffers() if n.endswith(("payload", "scales")))


def test_a_head_of_numbers() -> None:
    exact = quantize(sharp(CONFIG, 4), Codec(bits=4, block=64), IDS).requires_grad_(False)
    wanted, decoder = decoded(exact)(IDS[:1, :9])[0][0], Decoder(exact, integers=False)
    for number in IDS[0, :9].tolist():
        found = torch.from_numpy(decoder.step(number))
    assert torch.allclose(found, wanted[-1], rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
    assert decoder.nbytes > exact.head.weight.nbytes


def test_models_that_it_cannot_decode(small: GPT) -> None:
    codec = Codec(bits=8, block=64)
    with pytest.raises(ValueError, match="not quantized to one of"):
        Decoder(sharp(CONFIG, 1))
    with pytest.raises(ValueError, match="not quantized to one of"):
        Decoder(quantize(sharp(CONFIG, 1), codec, IDS, method="nearest", head=codec))
    with pytest.raises(ValueError, match="known is swiglu"):
        Decoder(GPT(dataclasses.replace(CONFIG, activation="gelu")))
    for other in ({"rotation": "haar"}, {"codebook": "sphere"}):
        codec = Codec(bits=4, block=64, **other)
        with pytest.raises(ValueError, match="by the default codebook"):
            Decoder(quantize(sharp(CONFIG, 1), codec, IDS, method="nearest", head=codec))
    narrow = sharp(dataclasses.replace(CONFIG, ffn=160), 1)
    with pytest.raises(ValueError, match="must divide 160"):
        Decoder(quantize(narrow, Codec(bits=4, block=64), IDS, method="nearest", head=Codec(bits=4, block=64)))
