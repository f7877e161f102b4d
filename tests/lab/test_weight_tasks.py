"""Tasks of the study of weights: what they give is what the functions behind them give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tq.infer import trained
from tq.lab import weight_study, weight_tasks

pytest.importorskip("tokenizers", reason="needs tokenizers")
pytest.importorskip("numba", reason="needs numba")


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Two texts of 64 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(weight_study.MODELS, "book", (trained.path, 2, 64))
        patch.setattr(weight_study, "TOKENS", 1024)
        weight_study.of.cache_clear()
        yield
    weight_study.of.cache_clear()


def task(method: str, bits: int, domain: str = "stdlib") -> dict[str, Any]:
    return {"name": "book", "method": method, "bits": bits, "draw": 0, "domain": domain, "tokens": None}


def test_judgements() -> None:
    found = {method: weight_tasks.judge(task(method, 3)) for method in ("trellis", "ours", "round to nearest")}
    assert all("seconds" not in one and len(one["kl"]) == 2 for one in found.values())
    kl = {method: sum(one["kl"]) for method, one in found.items()}
    assert kl["trellis"] < kl["ours"] < kl["round to nearest"]
    assert kl["trellis"] == sum(weight_study.outcome("book", "trellis", 3)["kl"])
    more = weight_tasks.judge(task("ours", 3) | {"tokens": 4096})
    assert more["kl"] != found["ours"]["kl"] and more["reference"] == found["ours"]["reference"]
    assert weight_study.stored("trellis", 3) == weight_study.stored("ours", 3) == 3.25


def test_texts_come_from_as_many_documents_as_there_are() -> None:
    language, count = weight_study.language("book"), len(weight_study.documents("prose"))
    found, of = weight_study.windows(language, 40, 64, "prose")
    held = [language.encode(document) for document in weight_study.documents("prose")]
    assert found.shape == (40, 64) and all(_within(held[k], one) for k, one in zip(of, found, strict=True))
    assert len(set(of)) == 40 <= count, "no document gives a second text before each gave one"
    _, of = weight_study.windows(language, count + 40, 64, "prose")
    assert len(set(of)) == sum(len(ids) >= 64 for ids in held)
    with pytest.raises(ValueError, match="asked for 1000000"):
        weight_study.windows(language, 1_000_000, 64, "prose")
    with pytest.raises(ValueError, match="domain must be"):
        weight_study.documents("verse")


def _within(ids: torch.Tensor, text: torch.Tensor) -> bool:
    return any(torch.equal(ids[at : at + 64], text) for at in range(0, len(ids) - 63, 64))


def test_prose_is_another_text() -> None:
    sources, prose = (weight_study.of("book", domain=domain).reference.ids_ST for domain in ("stdlib", "prose"))
    assert sources.shape == prose.shape and not torch.equal(sources, prose)
    found = weight_tasks.judge(task("round to nearest", 4, "prose"))
    assert found["reference"] != weight_tasks.judge(task("round to nearest", 4))["reference"]


def test_parts_and_kinds() -> None:
    whole = weight_tasks.without({"name": "book", "bits": 3, "draw": 0, "parts": {}})
    less = weight_tasks.without({"name": "book", "bits": 3, "draw": 0, "parts": {"feedback": False}})
    one = weight_tasks.kind({"name": "book", "kind": "mlp.up", "bits": 3})
    assert sum(one["kl"]) < sum(whole["kl"]) < sum(less["kl"])


def test_inputs() -> None:
    found = weight_tasks.inputs({"name": "book"})
    assert set(found) == set(weight_tasks.INPUTS)
    kl = {name: sum(one["kl"]) for name, one in found.items()}
    assert kl["integers per token, all rotated, clipped"] < kl["integers per token"]


def test_rotations_of_the_whole_width_turn_back() -> None:
    x = torch.randn(3, 5, 192, generator=torch.Generator().manual_seed(0))
    x[..., 7] *= 50
    fine = weight_study.wide_integers(12, weight_study.codec(4))(x)
    assert torch.allclose(fine, x, atol=0.05) and fine.shape == x.shape
    ways = weight_study.wide_integers, weight_study.turned_integers
    coarse, blocks = (made(4, weight_study.codec(4))(x) for made in ways)
    assert float((coarse - x).norm()) < float((blocks - x).norm())


def test_intervals_over_documents() -> None:
    values = [[1.0, 1.0, 3.0, 3.0, 5.0, 5.0]]
    texts, documents = (weight_study.mean_interval(values, of=of) for of in (None, [0, 0, 1, 1, 2, 2]))
    assert texts[0] == documents[0] == 3.0
    assert documents[2] - documents[1] > 1.2 * (texts[2] - texts[1]), "texts of one document say less"
    alone = weight_study.mean_interval(values, of=range(6))
    assert alone == texts
    ratio = weight_study.ratio_interval(values, [[2 * v for v in values[0]]], of=[0, 0, 1, 1, 2, 2])
    assert ratio == (0.5, 0.5, 0.5)
