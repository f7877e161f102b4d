"""What was found, on the README's first screen, written from recorded results so that it cannot drift from them.

`python -m tq.book readme` rewrites what stands between the two markers; a test fails when it is out of step.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import wrap

from tq.book import paths
from tq.book.record.results import load, show

_BETWEEN = re.compile(r"(<!-- measured:begin -->\n).*?(<!-- measured:end -->)", re.DOTALL)
_JOB, _FORMATS, _ACTIVATIONS = "impact-training-cost", "gradient-codes", "activation-memory"
# A sentence, and for each of its places the chapter, key and format of the result that fills it.
_FOUND = (
    (
        "**Money (modelled)**: 4-bit gradients save {} of a 70B run on rented H100 with 400 Gbit/s each, {} on "
        "100 Gbit/s and {} on 25 Gbit/s. Use them on slow networks; elsewhere overlap bf16 gradients with backward.",
        ((_JOB, "job/400g/saving", ".1%"), (_JOB, "job/100g/saving", ".1%"), (_JOB, "job/25g/saving", ".0%")),
    ),
    (
        "**Loss (measured)**: 4-bit gradients train like fp32, with a gap of {} nats that is equivalent within ±0.003 "
        "over {} pairs of runs. Without rotation INT4 loses {} and NF4 {} nats.",
        (
            (_FORMATS, "formats/ours-4-bits/gap", "+.4f"),
            (_FORMATS, "pairs", ".0f"),
            (_FORMATS, "formats/int4/gap", ".4f"),
            (_FORMATS, "formats/nf4/gap", ".4f"),
        ),
    ),
    (
        "**Memory (measured)**: AdamW's state shrinks from 8 to {} bytes per parameter at an equivalent loss. 4-bit "
        "activations are {} times smaller, but recomputing whole blocks keeps less and takes {}× the time, not {}×.",
        (
            ("optimizer-state", "bytes/4-8", ".2f"),
            (_ACTIVATIONS, "ratio/4-bits", ".1f"),
            (_ACTIVATIONS, "step/checkpoint-of-every-block", ".2f"),
            (_ACTIVATIONS, "step/activations-in-4-bits", ".2f"),
        ),
    ),
)
_WIDTH = 120
PAGES = ("README.md", "tq/README.md")


def found() -> str:
    """Markdown bullets from the committed full results on the CPU; "not measured" where there is none."""
    lines = []
    for sentence, places in _FOUND:
        texts = []
        for chapter, key, form in places:
            results = (load(chapter) or {"results": {}})["results"]
            value = results.get(key, {"value": None})["value"]
            texts.append(show(value, form if value is not None else ""))
        lines.append("\n  ".join(wrap(f"- {sentence.format(*texts)}", _WIDTH)))
    return "\n".join(lines) + "\n"


def rewritten(text: str) -> str:
    """The README's text with today's findings between the markers."""
    if not _BETWEEN.search(text):
        raise ValueError("a README has no lines <!-- measured:begin --> and <!-- measured:end -->")
    return _BETWEEN.sub(lambda m: m[1] + found() + m[2], text)


def update() -> bool:
    """Rewrites README.md and the page of the package, ``PAGES``; says whether one changed. A tree may lack them."""
    changed = False
    for page in PAGES:
        readme: Path = paths.root() / page
        before = readme.read_text(encoding="utf-8") if readme.is_file() else None
        if before is not None and (after := rewritten(before)) != before:
            paths.write_bytes(readme, after.encode("utf-8"))
            changed = True
    return changed
