"""Sites in one process: gradients averaged first, then replicas alone that agree every H steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tq.train.experiments.paired_runs import fields
from tq.train.experiments.simulated_sites import SiteRun, Sites, train

SHORT = SiteRun("tiny", hidden=32, steps=8, batch=4, warmup=2, every=3, max_bytes=300_000, evaluated=1)


def _trained(**changes: Any) -> dict[str, Any]:
    return train(fields(replace(SHORT, **changes)))


def _apart(sites: Sites) -> bool:
    return not all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in sites.replicas), strict=True))


@pytest.mark.parametrize("coded", [None, (2, 2)])
def test_replicas_part_after_the_start_and_are_equal_after_each_agreement(coded: tuple[int, int] | None) -> None:
    sites = Sites(replace(SHORT, coded=coded))
    apart = []
    for _ in range(SHORT.steps):
        sites.step()
        apart.append(_apart(sites))
    assert apart == [False, False, True, True, False, True, True, False]


def test_averaging_to_the_end_is_one_trainer_on_the_whole_batch() -> None:
    averaged = _trained(every=0)
    one = Sites(replace(SHORT, every=0))
    alone = Sites.__mro__[1](one.model, one.corpus, one.config)  # a Trainer from the same weights
    losses = alone.train(progress=False)
    torch.testing.assert_close(averaged["losses"], torch.tensor(losses), rtol=1e-4, atol=1e-4)
    assert averaged["fewer_bytes"] == 1


def test_bytes_are_those_of_the_codes_every_h_steps() -> None:
    plain, one_bit = _trained(), _trained(coded=(1, 1), feedback=True)
    assert plain["fewer_bytes"] == pytest.approx(3)
    assert one_bit["fewer_bytes"] == pytest.approx(3 * 32 / 1.25, rel=0.02)
    assert torch.equal(plain["losses"][:5], one_bit["losses"][:5])  # until the first agreement has been made
    assert plain["valid"] != one_bit["valid"] == _trained(coded=(1, 1), feedback=True)["valid"]


def test_wrong_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="every must divide steps - warmup = 6, got 4"):
        _trained(every=4)
    with pytest.raises(ValueError, match="workers must be 2 at least and divide batch=4, got 3"):
        _trained(workers=3)
