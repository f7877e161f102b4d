"""The measured table on the README's first screen, written from recorded results so that it cannot drift from them.

`python -m tq.book readme` rewrites what stands between the two markers; a test fails when it is out of step.
"""

from __future__ import annotations

import re
from pathlib import Path

from tq.book import paths
from tq.book.results import load, show

_BETWEEN = re.compile(r"(<!-- measured:begin -->\n).*?(<!-- measured:end -->)", re.DOTALL)
_ROWS = (
    ("Error of 4 bits on gradients (NMSE), `tq` at 4.25 stored bits", "training-tensors", "nmse/gradient/best", ".4f"),
    ("the same, NF4 at 4.5 stored bits", "training-tensors", "nmse/gradient/nf4", ".4f"),
    ("Error on momenta, `tq` / NF4", "training-tensors", "ratio-to-nf4/momentum", ".2f"),
    ("Error on activations, `tq` / NF4", "training-tensors", "ratio-to-nf4/activation", ".2f"),
    ("Gaussian samples, 4 bits: distortion (theory: 0.009501)", "rotation-and-codebook", "distortion/b4", ".6f"),
    ("Inner products at 4 bits, variance × d: TurboQuant prod", "distortion", "products/prod/b4", ".4f"),
    ("the same with the unbiased scale of `tq`", "distortion", "products/eden/b4", ".4f"),
    ("Compression of 4 bits with scales, against fp32", "distortion", "compression/fp32", ".2f"),
    ("the same against bf16", "distortion", "compression/bf16", ".2f"),
    ("Encoding, billion numbers a second", "kernels", "speed/encode/one-round", ".1f"),
    ("Decoding", "kernels", "speed/decode/one-round", ".1f"),
    ("Loss gap of 4-bit gradients, nats, a million parameters", "compressed-adamw", "gap/gradient-4-4", "+.4f"),
    ("the same with 2 bits", "compressed-adamw", "gap/gradient-2-2", "+.4f"),
    ("Saved activations of a small model, 4 bits: times fewer bytes", "activation-memory", "ratio/4-bits", ".2f"),
)


def table() -> str:
    """Markdown table of the committed full results, a column a device; "not measured" where there is none."""
    views = [load("training-tensors", device) for device in paths.DEVICES]
    names = [view["device_name"] if view else word for view, word in zip(views, ("CPU", "GPU"), strict=True)]
    lines = [f"| full profile | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for label, chapter, key, form in _ROWS:
        cells = []
        for device in paths.DEVICES:
            entry = (load(chapter, device) or {"results": {}})["results"].get(key, {"value": None})
            cells.append(show(entry["value"], form if entry["value"] is not None else ""))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rewritten(text: str) -> str:
    """The README's text with today's table between the markers."""
    if not _BETWEEN.search(text):
        raise ValueError("README.md has no lines <!-- measured:begin --> and <!-- measured:end -->")
    return _BETWEEN.sub(lambda m: m[1] + table() + m[2], text)


def update() -> bool:
    """Rewrites README.md; says whether it changed (a tree without one has nothing to change)."""
    readme: Path = paths.root() / "README.md"
    if not readme.is_file():
        return False
    before = readme.read_text(encoding="utf-8")
    after = rewritten(before)
    if after != before:
        paths.write_bytes(readme, after.encode("utf-8"))
    return after != before
