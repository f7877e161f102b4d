"""How near a figure has to come to one that is claimed: one table, by how a document writes its number.

A document that writes "8x" says less than one that writes "7.53x", and one that writes "about 8x" less still; so each
is held to what it says. The shares came with the order to rewrite the rules, when results were known. A rule has a
tolerance of its own only where it compares with something else than the figure of the table, and shows it.
"""

from __future__ import annotations

import re

ONE_DIGIT, TWO_DIGITS, MORE_DIGITS, ABOUT = 0.10, 0.05, 0.01, 0.20
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
ENGLISH, KOREAN = "about|approximately|roughly|around|nearly|almost|approaches|order of", "약 |대략|정도"
BEFORE = 16  # characters before a number in which a hedge belongs to it
HEDGE = re.compile(rf"~|≈|\b(?:{ENGLISH})\b|{KOREAN}", re.IGNORECASE)


def significant_digits(number: str) -> int:
    """Of a number as it is written: 1 of "800" and "0.003", 2 of "3,200" and "8.0", 4 of "24,576" without its zeros.

    Zeros at the end of a whole number count for nothing, those after a point do. ValueError where there is no number.
    """
    found = NUMBER.search(number)
    if not found:
        raise ValueError(f"number={number!r} holds no digit")
    whole, point, part = found.group().replace(",", "").partition(".")
    digits = (whole + part).lstrip("0") if point else whole.lstrip("0").rstrip("0")
    return max(1, len(digits))


def hedged(number: str, words: str) -> bool:
    """Whether a document hedges this number: a mark or a word of hedging stands right before it."""
    return any(HEDGE.search(words[max(0, at.start() - BEFORE) : at.start()]) for at in _places(number, words))


def _places(number: str, words: str) -> list[re.Match[str]]:
    """Where the number stands in the words, and not within a longer one."""
    return list(re.finditer(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", words))


def tolerance(number: str, words: str = "") -> float:
    """Share of a claimed number that another may be off by and still agree.

    Arguments:
        number: as the document writes it, with the mark "~" if it has one.
        words: of the document; a hedge right before the number counts like the mark.
    """
    found = NUMBER.search(number)
    if HEDGE.search(number) or (found and hedged(found.group(), words)):
        return ABOUT
    return {1: ONE_DIGIT, 2: TWO_DIGITS}.get(significant_digits(number), MORE_DIGITS)


def table() -> tuple[tuple[str, float, str], ...]:
    """(how a number is written, share that it may be off by, an example), as the book prints it."""
    return (
        ("with one digit that counts", ONE_DIGIT, "8×, $200,000, 0.003"),
        ("with two", TWO_DIGITS, "27 %, 3,200 Gbit/s, 8.0×"),
        ("with more", MORE_DIGITS, "1,440, 24,576"),
        ("with “~”, “about” or the like", ABOUT, "~4×, about 100M"),
    )
