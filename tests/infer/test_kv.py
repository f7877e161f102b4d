"""Centring and balancing keys: what is exact, and what they gain."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from tests.infer.helpers import sharp
from tq import Codec
from tq.infer.evaluate import divergence
from tq.infer.kv import DAMPING, Coder, bytes_per_token, calibrate, coders, least_error, with_coded_attention
from tq.infer.weights import quantize
from tq.train.model import GPT, GPTConfig

CONFIG = GPTConfig(layers=2, hidden=128, heads=2, vocab=101, seq=128)


@pytest.fixture(scope="module")
def model() -> GPT:
    return sharp(CONFIG, 4)


def ids(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(101, (rows, 128), generator=torch.Generator().manual_seed(seed))


def test_a_constant_key_changes_nothing_and_neither_does_a_factor(model: GPT) -> None:
    def shifted(k: torch.Tensor) -> torch.Tensor:
        return k + torch.linspace(-2, 2, k.shape[-1])

    exact = deepcopy(model).double()  # of single precision, roundings alone can say 4e-9
    changed = with_coded_attention(exact, [(shifted, None)] * 2)
    assert divergence(exact, changed, ids(2)).kl < 1e-9
    known = calibrate(model, ids(4))[0]
    factor = known.balance_KD
    q, k = torch.randn(1, 2, 5, 64), torch.randn(1, 2, 7, 64)
    scores = (q / factor[:, None]) @ (k * factor[:, None]).transpose(2, 3)
    assert torch.allclose(scores, q @ k.transpose(2, 3), atol=1e-4)
    assert torch.equal(factor[:, :32], factor[:, 32:]), "numbers that one rotary angle turns have one factor"


def test_fewer_bits_are_further_away(model: GPT) -> None:
    known = calibrate(model, ids(8))
    found = []
    for bits in (8, 4, 2):
        codec = Codec(bits, block=64)
        found.append(divergence(model, with_coded_attention(model, coders(codec, codec, known)), ids(3, 1)).kl)
    assert 0 < found[0] < found[1] < found[2]
    exact = with_coded_attention(model, coders(None, None, known))
    assert divergence(model, exact, ids(2)).kl < 1e-12
    with pytest.raises(ValueError, match="one pair for each of 2 layers, got 1"):
        with_coded_attention(model, [(None, None)])


def test_keys_with_a_large_mean_collapse_and_centring_cures_it(model: GPT) -> None:
    offset = torch.randn(2, 64, generator=torch.Generator().manual_seed(2)) * 60

    def biased(coder: Coder) -> object:
        return lambda k: coder(k + offset[:, None]) - offset[:, None]

    known = calibrate(model, ids(8))
    found = {}
    for centred in (False, True):
        made = []
        for key, _ in coders(Codec(4, block=64), None, known, centred=False, balanced=True):
            assert key is not None
            mean = known[0].mean_KD + offset if centred else None
            made.append((biased(Coder(key.codec, mean)), None))
        found[centred] = divergence(model, with_coded_attention(model, made), ids(3, 1)).kl
    assert found[False] > 100 * found[True]


def test_keys_are_centred_and_balanced_and_the_first_token_is_kept_unless_asked(model: GPT) -> None:
    known, codec = calibrate(model, ids(2)), Codec(4, block=64)
    for (key, value), of_layer in zip(coders(codec, codec, known, balanced=True), known, strict=True):
        assert key is not None and key.mean_KD is of_layer.mean_KD and key.factor_KD is of_layer.balance_KD
        assert value is not None and (key.sinks, value.sinks) == (1, 1) and value.mean_KD is None
    for (key, value), of_layer in zip(coders(codec, codec, known), known, strict=True):
        assert key is not None and key.mean_KD is of_layer.mean_KD and key.factor_KD is None
        assert value is not None and value.mean_KD is of_layer.value_mean_KD
        assert key.matrix_KDD is of_layer.key_matrix_KDD and value.matrix_KDD is of_layer.value_matrix_KDD
    for key, _ in coders(codec, None, known, balanced=False, sinks=0):
        assert key is not None and key.factor_KD is None and key.sinks == 0


def tensors(seed: int, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [1, 1, 4000, size] whose channels go together, each in its own way."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0.5, -0.5, size)
    turns = [torch.linalg.qr(torch.randn(size, size, generator=generator))[0] for _ in range(2)]
    return tuple(torch.randn(1, 1, 4000, size, generator=generator) * spread @ turn for turn in turns)  # type: ignore


def moments(x: torch.Tensor) -> torch.Tensor:
    return (x[0].double().mT @ x[0].double()) / x.shape[2]


def test_no_other_matrix_errs_less() -> None:
    c, w = (moments(x)[:, :8, :8] + 0.1 * torch.eye(8) for x in tensors(0))

    def error(a: torch.Tensor) -> torch.Tensor:
        back = torch.linalg.inv(a)
        damped = [x + DAMPING * x.diagonal(dim1=1, dim2=2).mean() * torch.eye(8) for x in (c, w)]
        return torch.trace((a @ damped[0] @ a.mT)[0]) * torch.trace((back.mT @ damped[1] @ back)[0])

    best = least_error(c, w)
    assert torch.linalg.det(best).item() == pytest.approx(1.0)
    generator = torch.Generator().manual_seed(1)
    for step in (1e-3, 1e-2, 0.3):
        for _ in range(20):
            other = best @ torch.linalg.matrix_exp(step * torch.randn(1, 8, 8, generator=generator).double())
            assert error(other) > error(best)
    turned = torch.linalg.qr(torch.randn(8, 8, generator=generator).double())[0]
    assert error(turned @ best).item() == pytest.approx(error(best).item()), "a rotation afterwards changes nothing"


@pytest.mark.parametrize("bits", (3, 4))  # of 2 bits an eighth of the error lies along the key, which no matrix changes
def test_a_matrix_lowers_the_error_of_scores_as_predicted(bits: int) -> None:
    q, k = tensors(2)
    matrix = least_error(moments(k), moments(q)).float()
    codec = Codec(bits, 64, "mse", scale_dtype=torch.float32)
    errors = []
    for coder in (Coder(codec), Coder(codec, matrix_KDD=matrix)):
        wrong = q[0, 0] @ (coder(k) - k)[0, 0].mT
        errors.append(wrong.square().mean().item())
    back = torch.linalg.inv(matrix.double())[0]
    m = matrix.double()[0]
    tr = torch.trace
    left = tr(m @ moments(k)[0] @ m.T) * tr(back.T @ moments(q)[0] @ back) / tr(moments(k)[0]) / tr(moments(q)[0])
    assert left < 0.7 and errors[1] / errors[0] == pytest.approx(left.item(), rel=0.05)


def test_a_matrix_of_few_texts_is_sound_and_bfloat16_passes(model: GPT) -> None:
    known = calibrate(model, ids(1)[:, :8])  # fewer tokens than channels
    (key, value), _ = coders(Codec(8, block=64), Codec(8, block=64), known)
    x = torch.randn(2, 2, 5, 64, generator=torch.Generator().manual_seed(0))
    for coder in (key, value):
        assert coder is not None and coder.matrix_KDD is not None and coder.matrix_KDD.isfinite().all()
        assert torch.allclose(coder(x), x, atol=0.2)
        assert coder(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="texts of two tokens or more"):
        calibrate(model, ids(1)[:, :1])
    with pytest.raises(ValueError, match="balanced must be 'matrix', True or False, got 'channels'"):
        coders(Codec(4, 64), None, known, balanced="channels")
    for more in ({"fine": Codec(4, 64)}, {"centred": False}):
        with pytest.raises(ValueError, match="a matrix is of centred keys, with all channels alike"):
            coders(Codec(4, 64), None, known, **more)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a matrix takes the place of factors"):
        Coder(Codec(4, 64), None, torch.ones(2, 64), matrix_KDD=torch.eye(64).expand(2, 64, 64))


def test_a_quantized_model_and_heads_that_share_keys_are_calibrated() -> None:
    model = sharp(GPTConfig(layers=2, hidden=128, heads=4, kv_heads=2, vocab=101, seq=128), 4)
    known = calibrate(model, ids(4))
    small = quantize(model, Codec(4, 64, "mse", scale_dtype=torch.bfloat16), ids(2))
    for one, other in zip(known, calibrate(small, ids(4)), strict=True):
        for name in ("key_matrix_KDD", "value_matrix_KDD"):
            a, b = getattr(one, name), getattr(other, name)
            assert a.shape == b.shape == (2, 32, 32) and (a - b).norm() < 0.5 * a.norm()
    codec = Codec(3, 64, "mse")
    found = []
    for way in (False, "matrix"):
        coded = with_coded_attention(model, coders(codec, codec, known, balanced=way))
        found.append(divergence(model, coded, ids(3, 1)).kl)
    assert found[1] < found[0]


def test_autocast_changes_no_code_of_a_matrix(model: GPT) -> None:
    (key, _), _ = coders(Codec(4, block=64), None, calibrate(model, ids(2)))
    assert key is not None
    x = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        found = key(x)
    assert torch.equal(found, key(x))


@pytest.mark.parametrize("sinks", (0, 1, 3, 9))
def test_first_tokens_are_exact_and_the_others_as_without(sinks: int) -> None:
    x = torch.randn(2, 2, 5, 64, generator=torch.Generator().manual_seed(0))
    found, plain = Coder(Codec(4, block=64), sinks=sinks)(x), Coder(Codec(4, block=64))(x)
    assert torch.equal(found[:, :, :sinks], x[:, :, :sinks]) and torch.equal(found[:, :, sinks:], plain[:, :, sinks:])


def test_bytes() -> None:
    model, codec = GPT(CONFIG), Codec(4, block=64, scale_dtype=torch.bfloat16)
    assert bytes_per_token(model, None, None) == 2 * 2 * 2 * 64 * 2
    assert bytes_per_token(model, codec, None) == 2 * 2 * (34 + 128)
