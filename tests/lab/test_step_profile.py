"""A profile counts every operation once, under the kind that its name says."""

from __future__ import annotations

import time

import pytest

from tq.lab import step_profile
from tq.lab.step_profile import KINDS, REST, kind
from tq.lab.training_step import Setting
from tq.train.model import load
from tq.train.model.gpt import GPTConfig

TINY = Setting(GPTConfig(layers=2, hidden=64, heads=2, vocab=256, seq=64), 2)


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        ("aten::mm", "products"), ("aten::addmm", "products"), ("aten::add_", "norms, rotary, sums"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"), ("aten::_log_softmax", "loss"),
        ("aten::_fused_adamw_", "optimizer and clipping"), ("aten::copy_", "casts and copies"),
        ("aten::gelu_backward", "nonlinearity"), ("aten::embedding_dense_backward", "embedding"), ("MmBackward0", REST),
    ],
)  # fmt: skip
def test_an_operation_has_the_kind_that_its_name_says(operation: str, found: str) -> None:
    assert kind(operation) == found


def test_the_parts_are_those_of_a_step() -> None:
    run = TINY.trainer(load("stdlib", max_bytes=100_000))
    run.step()
    started = time.perf_counter()
    parts = step_profile.by_kind(run, steps=3)
    wall = (time.perf_counter() - started) / 3
    assert set(parts) <= {*KINDS, REST} and len(run.losses) == 4
    assert all(parts[name] > 0 for name in ("products", "attention", "loss", "nonlinearity", "optimizer and clipping"))
    assert sum(parts.values()) < wall
    assert list(parts.values()) == sorted(parts.values(), reverse=True)


def test_the_command_prints_the_share_of_the_peak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_profile, "SHAPES", {"25m": TINY.shape})
    step_profile.main(["--precision", "fp32", "--vocab", "300"])
    said = capsys.readouterr().out
    assert "% of the products' peak" in said and "fp32" in said and "attention" in said
    with pytest.raises(SystemExit):
        step_profile.main(["--vocab", "10"])
