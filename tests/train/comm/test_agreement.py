"""What a rank asks for: named by its configuration, and in words where it differs."""

from __future__ import annotations

import pytest
import torch

from tq import Codec
from tq.train.comm.agreement import Request, _in_words

SMALL = ((100, torch.float32),)


def test_a_configuration_is_all_but_the_keys() -> None:
    asked = Request("a mean", (Codec(4), Codec(2)), SMALL, ((1, 0),))
    assert asked.configuration() == Request("a mean", (Codec(4), Codec(2)), SMALL, ((2, 0),)).configuration()
    others = (
        Request("a gathering", (Codec(4), Codec(2)), SMALL), Request("a mean", (Codec(2), Codec(4)), SMALL),
        Request("a mean", (Codec(4), Codec(2, seed=1)), SMALL), Request("a mean", (Codec(4),), SMALL),
        Request("a mean", (Codec(4), Codec(2)), ((100, torch.float16),)), Request("a mean", (Codec(4), Codec(2))),
    )  # fmt: skip
    assert len({asked.configuration(), *(other.configuration() for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("asked", "beside", "words"),
    (
        (Request("a mean in fp32", (), SMALL), Request("a mean"), "a mean in fp32 of 100 x float32"),
        (Request("a mean", (Codec(4),)), Request("a mean"), f"a mean of nothing by {Codec(4)!r}"),
        (Request("a mean", (), SMALL, ((3, "b"),)), Request("a mean"), "a mean of 100 x float32, step 3/b"),
        (Request("a mean", (), SMALL * 9), Request("a mean", (), SMALL * 7), "a mean of 100 x float32 (number 7 of 9)"),
        (Request("a start after step 5"), Request("a start after step 6"), "a start after step 5"),
    ),
)
def test_a_request_in_words(asked: Request, beside: Request, words: str) -> None:
    assert _in_words(asked.fields(), beside.fields()) == words
