"""Tasks of the study of keys and values: what they give is what the functions behind them give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tq.infer import trained
from tq.lab import cache_study, cache_tasks, weight_study

pytest.importorskip("tokenizers", reason="needs tokenizers")
pytest.importorskip("numba", reason="needs numba")


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Two texts of 128 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(weight_study.MODELS, "book", (trained.path, 4, 128))
        cache_study.of.cache_clear()
        yield
    cache_study.of.cache_clear()


def test_a_judgement() -> None:
    wanted = cache_study.outcome("book", ("search, first", 4), None)
    found = cache_tasks.judge({"name": "book", "keys": ["search, first", 4], "values": None, "domain": "stdlib"})
    assert found["kl"] == wanted["kl"] and "seconds" not in found


def test_pass_keys() -> None:
    task = {"name": "book", "keys": None, "values": ["codec", 8], "lengths": [120], "depths": [0.5], "seed": 0}
    (hit, likelihood), = cache_tasks.pass_keys(task)
    assert isinstance(hit, bool) and likelihood < 0
