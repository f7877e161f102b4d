"""Parts of a quantizer left out one by one, and activations coded on their way into layers."""

from __future__ import annotations

import pytest
import torch

from tests.infer.helpers import sharp
from tq.infer.evaluate import divergence
from tq.lab import weight_study as lab
from tq.lab.weight_rivals import integer_gptq, rounding
from tq.train.model import GPTConfig

CONFIG = GPTConfig(layers=2, hidden=64, heads=2, vocab=97, seq=48, ffn=128, activation="swiglu")


def ids(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(97, (rows, 48), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def study() -> lab.Study:
    return lab.Study(sharp(CONFIG, 4).requires_grad_(False), ids(32), ids(8, 1))


def test_the_whole_is_what_quantize_gives(study: lab.Study) -> None:
    codec = lab.codec(3)
    whole = study.judge(lab.variant(codec)).found.kl
    assert whole == pytest.approx(study.judge(lab.ours(codec)).found.kl, rel=1e-3)


@pytest.mark.parametrize("left_out", ("gaussian", "feedback"))
def test_what_is_left_out_is_missed(study: lab.Study, left_out: str) -> None:
    codec = lab.codec(3)
    assert study.judge(lab.variant(codec, **{left_out: False})).found.kl > study.judge(lab.variant(codec)).found.kl


def test_ours_beside_others(study: lab.Study) -> None:
    found = {
        name: study.judge(quantizer).found.kl
        for name, quantizer in {
            "ours": lab.ours(lab.codec(4)), "integers": integer_gptq(4, 64), "rounding": rounding(4, 64),
            "nearest": lab.nearest(lab.codec(4)),
        }.items()
    }  # fmt: skip
    assert found["ours"] < found["integers"] < found["rounding"] and found["ours"] < found["nearest"]


def test_one_kind_of_layer(study: lab.Study) -> None:
    kinds = study.kinds()
    assert set(kinds) == {"attention.query", "attention.key", "attention.value", "attention.out"} | {
        "mlp.gate", "mlp.up", "mlp.down"
    }  # fmt: skip
    one = study.judge(lab.ours(lab.codec(2)), only=kinds["attention.key"]).found.kl
    assert 0 < one < study.judge(lab.ours(lab.codec(2))).found.kl


def test_coded_inputs(study: lab.Study) -> None:
    model = study.model
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    for coded in (lab.integers_per_token(8), lab.turned_integers(8, lab.codec(4)), lab.codes(lab.codec(8))):
        assert coded(x).shape == x.shape and (coded(x) - x).norm() < 0.02 * x.norm()
    loud = x.clone()
    loud[..., 3] *= 100
    plain = (lab.integers_per_token(4)(loud) - loud).norm()
    assert (lab.turned_integers(4, lab.codec(4))(loud) - loud).norm() < plain
    with lab.coded_inputs(model, lab.integers_per_token(4)):
        assert study.compare(model).kl > 1e-3
    assert divergence(study.reference, model).kl < 1e-9


def test_widths_that_are_no_multiple_of_a_block() -> None:
    with pytest.raises(ValueError, match="no multiple of the block"):
        lab.variant(lab.codec(3))(torch.randn(4, 100), torch.eye(100).double())
