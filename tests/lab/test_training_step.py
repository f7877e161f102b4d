"""The ways of a training step are what their names say: the same losses where nothing is lost, fewer bytes kept."""

from __future__ import annotations

import json

import pytest
import torch

from tq.lab import training_step
from tq.lab.training_step import BASE, Activations, Setting
from tq.train.model import load
from tq.train.model.gpt import GPTConfig

TINY = Setting(GPTConfig(layers=2, hidden=64, heads=2, vocab=256, seq=64), 2)


@pytest.fixture(scope="module")
def activations() -> Activations:
    return Activations(TINY.trainer(load("stdlib", max_bytes=100_000)))


def test_the_ways_keep_fewer_bytes_in_the_order_of_what_they_save(activations: Activations) -> None:
    kept = {name: activations.kept(name) for name in activations.ways}
    assert kept[BASE] > 4 * kept["activations in 4 bits"] > 4 * kept["4 bits, cheap results again"]
    assert kept["4 bits, cheap results again"] > kept["mixed bits, cheap results again"]
    assert kept[BASE] > 4 * kept["checkpoint of every block"]
    assert kept["checkpoint, products in 4 bits"] > kept["checkpoint, products and inputs in 4 bits"]
    assert kept["checkpoint, products and inputs in 4 bits"] > kept["checkpoint, inputs in 4 bits"]
    assert kept["checkpoint, products in 4 bits"] > kept["checkpoint of every block"]


def test_exact_ways_give_the_plain_losses_and_coded_ones_do_not(activations: Activations) -> None:
    def losses(name: str) -> list[float]:
        other = Activations(TINY.trainer(activations.run.corpus))
        for _ in range(3):
            other.ways[name]()
        return other.run.losses

    assert losses("checkpoint of every block") == losses(BASE)
    products = "checkpoint, products in 4 bits"
    for name in ("activations in 4 bits", products, products.replace("products", "products and inputs")):
        assert losses(name)[0] == losses(BASE)[0] and losses(name)[2] != losses(BASE)[2]
        assert losses(name)[2] == pytest.approx(losses(BASE)[2], abs=0.1)
    assert not any("forward" in block.__dict__ for block in activations.run.model.blocks)


def test_every_way_is_timed_beside_what_it_is_compared_with() -> None:
    rows = training_step.measure(TINY, repeats=2, progress=False)
    assert list(rows) == [row.name for row in rows.values()] == list(training_step.WAYS)
    assert rows[BASE].ratio == (1.0, 1.0, 1.0)
    assert {row.over for row in rows.values()} == {BASE, training_step.DDP}
    assert all(row.seconds.median > 0 and row.ratio.median > 0 for row in rows.values())
    assert rows["DDP, hook of 4 bits"].kept is None and rows[BASE].kept
    text = training_step.table(list(rows.values()), TINY, 1e12)
    assert all(name in text for name in rows) and "tokens per step, fp32" in text


def test_a_way_brings_its_baseline_along() -> None:
    rows = training_step.measure(TINY, ["DDP, hook of 4 bits"], repeats=1, progress=False)
    assert list(rows) == [BASE, training_step.DDP, "DDP, hook of 4 bits"]
    with pytest.raises(ValueError, match="names must be among plain, .* got \\['hook'\\]"):
        training_step.measure(TINY, ["hook"])


def test_the_command_prints_numbers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training_step.SHAPES, "tiny", TINY.shape)
    training_step.main(["--preset", "tiny", "--ways", "4 bits", "--repeats", "1", "--precision", "fp32", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["products_per_s"] > 0 and {row["name"] for row in found["rows"]} >= {BASE, "activations in 4 bits"}
    for wrong in (["--vocab", "9"], ["--repeats", "0"], ["--sequences", "0"]):
        with pytest.raises(SystemExit):
            training_step.main(["--preset", "tiny", *wrong])


def test_bfloat16_is_taken_where_its_products_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for speed, taken in ((3.0, torch.bfloat16), (1.1, None)):
        rates = {torch.bfloat16: speed, torch.float32: 1.0}
        monkeypatch.setattr(training_step, "products_per_s", lambda setting, dtype, repeats, r=rates: r[dtype])
        assert training_step.fitting_autocast(TINY) is taken
