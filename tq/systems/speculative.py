"""Speculative decoding: a small model guesses g tokens, the large one checks them in one pass.

a: chance that a guess is accepted, alike for all; c: time of a guess over that of a pass of the large model.
Not modelled: batches (the pass is taken to be bound by memory), chances that differ along a text.

Source: Leviathan, Kalman, Matias 2023 (arXiv:2211.17192), equation 1 and theorem 3.8.
"""

from __future__ import annotations

from tq.systems.arguments import Real, positive, positive_int


def accepted_tokens(acceptance: Real, guesses: int) -> Real:
    """Expected tokens of a pass, its own included: (1 - a^(g + 1)) / (1 - a), which is 1 + a + ... + a^g."""
    positive("acceptance", acceptance, zero=True, most=1.0)
    positive_int("guesses", guesses, 0)
    return sum((acceptance**k for k in range(1, guesses + 1)), 1.0)


def speedup(acceptance: Real, guesses: int, guess_cost: Real) -> Real:
    """Walltime of plain decoding over that with guesses: accepted tokens / (1 + g c)."""
    positive("guess_cost", guess_cost, zero=True, finite=True)
    return accepted_tokens(acceptance, guesses) / (1 + guesses * guess_cost)
