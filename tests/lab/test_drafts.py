"""Guessed tokens, on models that are functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tq.infer import trained
from tq.lab import drafts

PROMPT = torch.tensor([3, 1, 4])


def rule(ids: Tensor, count: int) -> Tensor:
    """The next token is a function of the last two."""
    return (3 * ids[-count:] + ids[-count - 1 : -1] + 1) % 11


def wrong_at(*places: int) -> drafts.Likeliest:
    """A draft that errs where the text is so long."""
    return lambda ids, count: rule(ids, count) + int(len(ids) in places)


@pytest.mark.parametrize("ahead", (1, 3, 8))
@pytest.mark.parametrize("places", ((), (3,), (4, 7), tuple(range(30))))
def test_tokens_are_those_of_the_large_model_whatever_the_draft_says(ahead: int, places: tuple[int, ...]) -> None:
    found = drafts.drafted(rule, wrong_at(*places), PROMPT, 12, ahead)
    assert found.tokens == drafts.alone(rule, PROMPT, 12)
    assert all(0 <= k <= p <= ahead for k, p in zip(found.kept, found.proposed, strict=True))


def test_what_is_right_is_kept_and_what_follows_a_wrong_guess_is_not() -> None:
    assert drafts.drafted(rule, rule, PROMPT, 12, 3).kept == [3, 3, 3]
    assert drafts.drafted(rule, wrong_at(4), PROMPT, 8, 3).kept[0] == 1
    assert set(drafts.drafted(rule, wrong_at(*range(30)), PROMPT, 8, 3).kept) == {0}


def test_a_large_model_whose_choice_depends_on_what_is_asked_with_it_is_seen() -> None:
    def fickle(ids: Tensor, count: int) -> Tensor:
        return rule(ids, count) + (count > 1)

    assert drafts.drafted(fickle, rule, PROMPT, 8, 3).tokens != drafts.alone(fickle, PROMPT, 8)


def test_tokens_of_a_pass() -> None:
    assert drafts.per_pass(0.0, 4) == 1 and drafts.per_pass(1.0, 4) == 5
    assert drafts.per_pass(0.5, 2) == 1.75


def test_a_trained_model_with_a_draft_of_its_own_weights() -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    if why := trained.obstacle():
        pytest.skip(why)
    found = drafts.outcome("book", 3, prompts=2, count=10, ahead=3, length=32)
    assert len(found["same"]) == len(found["kept"]) == 2 and 0 < found["agree"] <= 1
