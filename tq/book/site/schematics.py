"""The schematic of the codec on one block, as SVG: its numbers are computed here, by the package's own functions.

`python -m tq.book.site.schematics` rewrites the committed file; a test can hold the file to `codec_on_a_block()`. Eight
numbers fit on a page, so one Hadamard round turns them; the codec itself has blocks of 64 to 1024. The other schematics
beside the file are drawn by hand.

Colours are custom properties of the page (light or dark) with the light ones as fallbacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
import torch

from tq.book import paths
from tq.quant.bits import pack
from tq.quant.codebook import lloyd_max
from tq.quant.rotation import rotate, signs, unrotate

NAME = "rotate-scale-codebook-pack"
BITS, SEED = 4, 0
# A gradient of a training run, in units of 1e-5: blocks.2.mlp.down.weight[0, 216:224] of the "1m" model after 60 steps
# on the standard library's sources (chapter training-tensors, quick). These eight because one is far above the others.
GRADIENT = (-4.6, 44.1, 1.9, 15.0, 0.9, 0.6, -3.3, 16.3)

COLOURS = {
    "ink": "#222", "muted": "#5a6068", "panel": "#eef2f7", "ours": "#0072b2", "published": "#b3457f", "fp32": "#8a8f96",
    "warn": "#c25400",
}  # fmt: skip
LEFT, CELL, END, SIDE = 152, 60, 632, 692  # start of the cells, their width, their end; middle of the right column
BAR = 0.8  # height of a bar of 1


class Block(NamedTuple):
    """A block on its way through the codec. x, z, u, levels, decoded: [B]; rms and scale: what divides z, what is
    stored; error: squared, over the squared norm of x."""

    x: np.ndarray
    signs: np.ndarray
    z: np.ndarray
    rms: float
    u: np.ndarray
    indices: np.ndarray
    levels: np.ndarray
    scale: float
    packed: bytes
    decoded: np.ndarray
    error: float


def through_the_codec(numbers: Sequence[float] = GRADIENT, bits: int = BITS, seed: int = SEED) -> Block:
    """One block coded with one Hadamard round and the unbiased scale, every step kept; float64."""
    x = torch.tensor(numbers, dtype=torch.float64)
    levels, thresholds = lloyd_max(bits)
    z = rotate(x[None], rounds=1, seed=seed)[0].numpy()
    rms = float(np.sqrt(np.mean(z * z)))
    indices = np.searchsorted(thresholds, z / rms)
    q = levels[indices]
    scale = float(z @ z / (z @ q))
    packed = pack(torch.from_numpy(indices)[None], bits)[0].numpy().tobytes()
    decoded = unrotate(torch.from_numpy(scale * q)[None], rounds=1, seed=seed)[0].numpy()
    error = float(np.sum((decoded - x.numpy()) ** 2) / np.sum(x.numpy() ** 2))
    turned = signs(len(numbers), 1, seed)[0].numpy()
    return Block(x.numpy(), turned, z, rms, z / rms, indices, q, scale, packed, decoded, error)


def _paint(colour: str) -> str:
    return f"var(--tq-{colour},{COLOURS[colour]})"


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")


def _text(
    x: float, y: float, words: str, size: int = 14, colour: str = "ink", anchor: str = "middle", *,
    bold: bool = False,
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight} '
        f'style="fill:{_paint(colour)}">{escape(words)}</text>'
    )


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str = "muted", width: float = 1.5, *, end: str = ""
) -> str:
    marker = f' marker-end="url(#{NAME}-{end})"' if end else ""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke-width="{width:g}"{marker} '
        f'style="stroke:{_paint(colour)}"/>'
    )


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" stroke-width="1.5" '
        f'style="fill:none;stroke:{_paint(colour)}"/>'
    )


def _middle(cell: int) -> float:
    return LEFT + CELL * (cell + 0.5)


def _step(y: float, number: str, name: str) -> list[str]:
    """A step's number and name in the left column."""
    return [_text(16, y, number, 15, "ours", "start", bold=True), _text(34, y, name, 15, "ink", "start", bold=True)]


def _note(y: float, words: str) -> str:
    return _text(16, y, words, 13, "muted", "start")


def _beside(y: float, words: str) -> str:
    return _text(SIDE, y, words, 13, "muted")


def _band(y: float, height: float) -> str:
    return f'<rect x="4" y="{y:g}" width="752" height="{height:g}" rx="8" style="fill:{_paint("panel")}"/>'


def _bars(values: Iterable[float], y: float, colours: Sequence[str]) -> list[str]:
    """Signed bars around the height y, all on one scale."""
    parts = [_line(LEFT, y, END, y, "muted", 1)]
    for cell, (value, colour) in enumerate(zip(values, colours, strict=True)):
        height = max(1.0, round(abs(value) * BAR, 1))
        parts.append(
            f'<rect x="{_middle(cell) - 13:g}" y="{y - height if value > 0 else y:g}" width="26" height="{height:g}" '
            f'rx="2" style="fill:{_paint(colour)}"/>'
        )
    return parts


def _numbers(values: Iterable[float], y: float, digits: int) -> list[str]:
    return [_text(_middle(cell), y, _number(value, digits)) for cell, value in enumerate(values)]


def _head(height: int, title: str, description: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" width="760" height="{height}" role="img" '
        f'aria-labelledby="{NAME}-title {NAME}-desc" font-family="inherit">',
        f'<title id="{NAME}-title">{escape(title)}</title>',
        f'<desc id="{NAME}-desc">{escape(description)}</desc>',
        f'<defs><marker id="{NAME}-tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 1 10 5 0 9z" style="fill:{_paint("muted")}"/>'
        "</marker></defs>",
    ]


def _rotation(b: Block, spike: list[str]) -> list[str]:
    parts = [_text(16, 44, "Gradient x", 15, "ink", "start", bold=True), *_bars(b.x, 44, spike), *_numbers(b.x, 68, 1)]
    parts += [_beside(68, "unit: 10⁻⁵"), _band(78, 140), *_step(101, "1", "Rotate")]
    for cell, sign in enumerate(b.signs):
        x = _middle(cell)
        parts += [
            f'<circle cx="{x:g}" cy="96" r="9" stroke-width="1.5" style="fill:none;stroke:{_paint("muted")}"/>',
            _text(x, 101, "+" if sign > 0 else "\N{MINUS SIGN}", bold=True),
            _line(x, 105, x, 115, end="tip"),
            _line(x, 139, x, 147, end="tip"),
        ]
    parts += [_beside(101, "random signs D"), _box(LEFT, 115, END - LEFT, 24, "ours")]
    parts.append(_text((LEFT + END) / 2, 132, "Hadamard matrix H: sums and differences of all eight", 13))
    parts += [*_bars(b.z, 171, ["ours"] * len(b.z)), *_numbers(b.z, 210, 1), _note(210, "z = H D x / √8")]
    return parts


def _codebook(b: Block) -> list[str]:
    levels, _ = lloyd_max(BITS)
    parts = [_band(222, 28), *_step(240, "2", "Scale"), *_numbers(b.u, 240, 2)]
    parts += [_text(88, 240, "u = z / ρ", 13, "muted", "start"), _beside(240, f"rms ρ = {_number(b.rms, 1)}")]
    parts += [_band(254, 74), *_step(276, "3", "Codebook"), _line(LEFT, 272, END, 272, "muted", 1)]
    centre, unit = (LEFT + END) / 2, 86.0
    for level in levels:
        x = round(centre + unit * float(level), 1)
        parts.append(_line(x, 264, x, 280))
    for u in b.u:
        parts.append(f'<circle cx="{centre + unit * u:.1f}" cy="272" r="4.5" style="fill:{_paint("ours")}"/>')
    parts += [_beside(276, f"u on {len(levels)} levels"), _note(300, "nearest level q"), *_numbers(b.levels, 300, 2)]
    parts.append(_note(320, "its index"))
    parts += [_text(_middle(cell), 320, str(index), bold=True) for cell, index in enumerate(b.indices)]
    return parts


def _packing(b: Block) -> list[str]:
    parts = [_band(333, 38), *_step(357, "4", "Pack")]
    for place, byte in enumerate(b.packed):
        x = LEFT + 2 * CELL * place
        parts += [_box(x + 6, 339, 2 * CELL - 12, 26, "ours"), _text(x + CELL, 357, f"0x{byte:02X}", bold=True)]
    return [*parts, _box(SIDE - 50, 339, 100, 26, "ours"), _text(SIDE, 357, f"s = {_number(b.scale, 1)}", bold=True)]


def codec_on_a_block() -> str:
    """The SVG's text."""
    b = through_the_codec()
    largest = int(np.argmax(np.abs(b.x)))
    title = "The codec on one block of eight gradients"
    description = (
        f"Eight gradients, one of them far above the others ({b.x[largest]:.1f}), are turned by random signs and a "
        f"Hadamard matrix, divided by their rms {b.rms:.1f}, rounded to the nearest of {2**BITS} Lloyd-Max levels and "
        f"packed into {len(b.packed)} bytes beside one scale, {b.scale:.1f}. Decoding gives them back with a squared "
        f"error of {b.error:.2%} of their squared norm."
    )
    stored = f"Stored: {len(b.packed)} bytes, first index in the low bits; s = ‖z‖² / ⟨z, q⟩"
    shown = f"d = {len(b.x)} to fit the page; the codec has 128"
    before, after = (["warn" if cell == largest else colour for cell in range(len(b.x))] for colour in ("fp32", "ours"))
    parts = [*_head(460, title, description), *_rotation(b, before), *_codebook(b), *_packing(b)]
    parts += [_text(16, 398, "Decoded", 15, "ink", "start", bold=True), *_bars(b.decoded, 412, after)]
    parts += [_note(434, "s D Hᵀ q / √8"), *_numbers(b.decoded, 434, 1)]
    parts += [_beside(416, "squared error"), _beside(434, f"{100 * b.error:.2f} % of ‖x‖²")]
    parts += [_note(456, stored), _text(744, 456, shown, 13, "muted", "end"), "</svg>"]
    return "\n".join(parts) + "\n"


def main() -> None:
    paths.write_text(paths.root() / "book" / "_static" / "schematics" / f"{NAME}.svg", codec_on_a_block())


if __name__ == "__main__":
    main()
