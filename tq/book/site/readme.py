"""The measured table on the README's first screen, written from recorded results so that it cannot drift from them.

`python -m tq.book readme` rewrites what stands between the two markers; a test fails when it is out of step.
"""

from __future__ import annotations

import re
from pathlib import Path

from tq.book import paths
from tq.book.record.results import load, show

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
    ("Optimizer state, 4 and 8 bits: bytes a parameter (fp32: 8)", "optimizer-state", "bytes/4-8", ".2f"),
    ("16 MiB averaged at 100 Mbit/s: times faster than fp32", "compressed-allreduce", "faster/ours/100/2/16mib", ".1f"),
    ("To a fixed loss at 100 Mbit/s: times sooner than fp32", "data-parallel-training", "sooner/ddp-4/100", ".1f"),
    ("the same between two sites at 10 Mbit/s", "data-parallel-training", "sites/sooner/ddp-4", ".1f"),
    ("and with DiLoCo of 32 steps, 4 bits", "data-parallel-training", "sites/sooner/diloco-32-4", ".1f"),
    ("70B, 256 H100, 400 Gbit/s, modelled: saved by codes", "impact-training-cost", "job/400g/saving", ".1%"),
    ("chance that it saves anything", "impact-training-cost", "job/400g/chance", ".0%"),
    ("the same job on 25 Gbit/s: saved", "impact-training-cost", "job/25g/saving", ".0%"),
    ("Time of a dense step, papers left out: median error", "cost-structure", "error/paper-left-out/median", ".1%"),
    ("the same, four of five rows within", "cost-structure", "error/paper-left-out/p80", ".0%"),
    ("Hours of a whole run to come: median error", "cost-structure", "hours/held-out/off", ".0%"),
)


def table() -> str:
    """Markdown table of the committed full results; "not measured" where there is none.

    A column for the CPU and one for the GPU. Each row names its machine, as chapters are recorded one at a time and
    not all on the same one.
    """
    lines = ["| full profile | CPU | GPU | measured on |", "|---|---:|---:|---|"]
    for label, chapter, key, form in _ROWS:
        cells, machines = [], []
        for device in paths.DEVICES:
            view = load(chapter, device) or {"results": {}, "device_name": ""}
            value = view["results"].get(key, {"value": None})["value"]
            cells.append(show(value, form if value is not None else ""))
            if value is not None:
                machines.append(view["device_name"])
        lines.append(f"| {label} | {' | '.join(cells)} | {'; '.join(machines)} |")
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
