"""Gradients through other formats and through the codec taken apart: what arrives, what is counted, what is learned."""

from __future__ import annotations

import pytest
import torch

from tq.quant.factors import Factors
from tq.train.experiments.paired_runs import Run, fields, train, trainer
from tq.train.experiments.simulated_workers import Workers
from tq.train.model.corpus import Corpus, load
from tq.train.schemes import FORMATS, published, rival

SHORT = Run("tiny", steps=6, workers=2, batch=4, max_bytes=400_000, evaluated=2)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load(max_bytes=SHORT.max_bytes)


def _run(corpus: Corpus, **chosen: object) -> Workers:
    given = Run(**{**fields(SHORT), **chosen})  # type: ignore[arg-type]
    found = trainer(given, corpus=corpus)
    assert isinstance(found, Workers)
    found.train(progress=False)
    return found


@pytest.mark.parametrize("name", [*FORMATS, "qsgd", "sign"])
def test_a_format_learns_agrees_and_counts_its_bits(corpus: Corpus, name: str) -> None:
    bits = 1 if name == "sign" else 4
    found, exact = _run(corpus, variant=name, bits=(bits, bits)), _run(corpus)
    assert found.drift() == 0 and found.losses[0] == exact.losses[0] and found.losses != exact.losses
    assert abs(found.losses[-1] - exact.losses[-1]) < 0.2
    stored = FORMATS[name].bits_per_element if name in FORMATS else bits + 32 / 128
    elements = sum(p.numel() for p in found.model.parameters())
    assert 8 * found.optimizer.bytes_sent / 6 / elements == pytest.approx(stored, rel=1e-6)


def test_the_mean_of_all_goes_through_the_format_again(corpus: Corpus) -> None:
    """Two ranks with one gradient: what is used has only levels of a block, so at most 15 values for each scale."""
    from tq.train.schemes import Bucket

    gradient = torch.randn(256, generator=torch.Generator().manual_seed(2))
    codecs = rival("int4").pair(None)
    b = Bucket(shapes=[torch.Size([256])], gradient=gradient, stored=lambda _: None, step=1, betas=(0.9, 0.999),
               codecs=codecs, ranks=2)  # fmt: skip
    exchange = rival("int4").exchange(b)  # type: ignore[misc]
    asked = next(exchange)
    other = torch.randn(256, generator=torch.Generator().manual_seed(3))
    with pytest.raises(StopIteration) as ended:
        exchange.send(type("Answer", (), {"mean": (asked.x + other) / 2, "residuals": None})())
    for block in ended.value.value.gradient.view(2, 128):
        steps = block / (block.abs().max() / 7)
        torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)


def test_the_codec_taken_apart_and_whole_learn_alike(corpus: Corpus) -> None:
    """Nothing left out: not the same bits, as other seeds turn it, but the same error."""
    whole = _run(corpus, variant="gradient", bits=(2, 2))
    apart = _run(corpus, variant="factors", bits=(2, 2), factors=(2, "lloyd-max", "unbiased", "nearest"))
    exact = _run(corpus)
    gaps = [abs(found.losses[-1] - exact.losses[-1]) for found in (whole, apart)]
    assert apart.drift() == 0 and 0 < max(gaps) < 0.1
    assert apart.optimizer.bytes_sent == pytest.approx(whole.optimizer.bytes_sent, rel=0.01)


def test_seeds_differ_between_ranks_steps_and_phases() -> None:
    seen: list[int] = []

    class Noted(Factors):
        def roundtrip(self, x: torch.Tensor, bits: int, block: int, seed: int) -> torch.Tensor:
            seen.append(seed)
            return super().roundtrip(x, bits, block, seed)

    from tq.train.optim import TurboQuantAdamW, simulate_ranks, step_together

    layers = [torch.nn.Linear(16, 16) for _ in range(2)]
    scheme = rival("factors", factors=Noted())
    ranks = [TurboQuantAdamW(layer.parameters(), variant=scheme, warmup=0) for layer in layers]
    simulate_ranks(ranks)
    for _ in range(3):
        for layer in layers:
            layer(torch.ones(2, 16)).sum().backward()
        step_together(ranks)
    assert len(seen) == 12 and len(set(seen)) == 9  # a step: two gradients, and one mean on both ranks


def test_the_published_rule_whole_and_taken_apart(corpus: Corpus) -> None:
    steps = {"bits": (2, 2), "warmup": 2}
    whole, same = _run(corpus, variant="published-v3", **steps), _run(corpus, variant="published", **steps)
    assert whole.losses == same.losses and whole.drift() == same.drift() > 0
    apart = {
        rule: _run(corpus, variant="published", rule=rule, **steps)
        for rule in [
            ("tensor", "mean", True, 0.9), ("block", "own", True, 0.9), ("tensor", "own", False, 0.9),
            ("tensor", "own", True, 0.5),
        ]
    }  # fmt: skip
    losses = {tuple(found.losses) for found in apart.values()}
    assert len(losses) == 4 and tuple(whole.losses) not in losses
    assert {rule: found.drift() == 0 for rule, found in apart.items()} == {rule: rule[1] == "mean" for rule in apart}
    assert all(found.losses[:2] == whole.losses[:2] for found in apart.values())  # the warm-up is exact
    elements, scales = sum(p.numel() for p in whole.model.parameters()), len(list(whole.model.parameters()))
    coded = apart["block", "own", True, 0.9].optimizer.bytes_sent - whole.optimizer.bytes_sent
    assert coded == pytest.approx(4 * (elements * 4 / 128 - 4 * scales), rel=0.01)
    for wrong in (("row",), ("tensor", "none"), ("tensor", "own", True, 1.0)):
        with pytest.raises(ValueError, match="scale must be"):
            published(*wrong)


def test_a_run_is_its_plain_fields() -> None:
    run = Run(variant="factors", factors=(0, "uniform", "mse", "random"))
    assert fields(run) == {"variant": "factors", "factors": [0, "uniform", "mse", "random"]}
    short = {**fields(SHORT), **fields(run), "steps": 2}
    first, again = (train(short) for _ in range(2))
    assert torch.equal(first["losses"], again["losses"]) and first["diverged"] is None
    with pytest.raises(ValueError, match="int8"):
        rival("int5")
    with pytest.raises(ValueError, match="rounds"):
        trainer(Run("tiny", variant="factors", factors=(5, "uniform", "mse", "random")))
