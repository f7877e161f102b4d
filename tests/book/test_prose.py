"""How the book is written: the length of its sentences, and the word list."""

from __future__ import annotations

import pytest

from tq.book.site import prose


@pytest.mark.parametrize("page", [name for name, _ in prose.pages()])
def test_a_page_is_written_as_the_house_writes(page: str) -> None:
    (found,) = prose.report([page])
    assert found.phrases == ()
    assert found.median <= prose.MEDIAN and found.high <= prose.NINETY_FIVE, found.longest


def test_what_counts_as_a_sentence() -> None:
    text = (
        "# A heading is none\n\nIt takes {val}`a/b@cpu:full|.2f` s, $a + b$ more. Two words.\n\n"
        "- one item\n- another one: Here\n  it goes on\n\n| a | table |\n|---|---|\n\n```python\ncode is none\n```\n\n"
        "```{note}\nA note is prose.\n```\n"
    )
    assert list(prose.sentences(text)) == [
        "It takes N s, N more.", "Two words.", "one item", "another one:", "Here it goes on", "A note is prose.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "banned"),
    [
        ("It sends 4 kB a step over the link.", "kB a step"),
        ("A step takes {val}`a/b|.2f` of the step's time here.", "N of the step's time"),
        ("The interval holds zero.", "holds zero"),
        ("Both ways are quantized here.", "Both ways"),
        ("It sends 4 kB per step over the link.", ""),
        ("`the exchange` is a name here.", ""),
    ],
)
def test_banned_phrases_are_found(text: str, banned: str) -> None:
    found = prose.measure("page", text).phrases
    assert bool(found) == bool(banned) and (not banned or repr(banned) in found[0])


def test_lengths_are_counted_over_the_whole_page() -> None:
    found = prose.measure("page", "One two three. " * 18 + "One two three four five six. " * 2)
    assert (found.sentences, found.median, found.high) == (20, 3, 6) and found.good
    assert not prose.measure("page", "word " * 33 + ".").good


def test_an_unknown_page_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        prose.pages(["nowhere"])
