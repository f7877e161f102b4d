"""Pictures of how busy the links of a fabric are, as text and as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from tq.systems.fabrics import Fabric, Floats

SHADES = " .:-=+*#%@"
_MOST = (24, 72)  # rows and columns of a text; more are joined, each cell the busiest of those that it stands for


@dataclass(frozen=True, eq=False)
class Grid:
    """Load of links in rows: [rows, columns], NaN where there is none; what rows and columns are."""

    load: Floats
    rows: str
    columns: str


def grid(fabric: Fabric, load: Floats) -> Grid:
    """The uplinks of each switch of the first level; in a tree of one switch the links to hosts; in a torus, which has
    no switches, the links out of each host."""
    up = fabric.uplinks()
    if not len(up):
        level = 1 if fabric.switches else 0
        up = np.flatnonzero(fabric.levels[fabric.tails] == level)
    tails = fabric.tails[up]
    order = np.argsort(tails, kind="stable")
    nodes, first, count = np.unique(tails[order], return_index=True, return_counts=True)
    table = np.full((len(nodes), int(count.max())), np.nan)
    place = np.arange(len(up)) - np.repeat(first, count)
    table[np.repeat(np.arange(len(nodes)), count), place] = load[up[order]]
    names = ("rack switch", "uplink") if len(fabric.uplinks()) else ("switch" if fabric.switches else "host", "link")
    return Grid(table, *names)


def _joined(table: Floats, most: tuple[int, int]) -> tuple[Floats, int, int]:
    """At most so many rows and columns, each the largest of its part."""
    rows, columns = (-(-n // m) for n, m in zip(table.shape, most, strict=True))
    high, wide = -(-table.shape[0] // rows), -(-table.shape[1] // columns)
    padded = np.full((high * rows, wide * columns), -1.0)
    padded[: table.shape[0], : table.shape[1]] = np.nan_to_num(table, nan=-1.0)
    return padded.reshape(high, rows, wide, columns).max((1, 3)), rows, columns


def _plural(word: str) -> str:
    return word + ("es" if word.endswith("ch") else "s")


def text(cells: Grid, title: str) -> str:
    """Rows of characters, from blank for idle to @ for the busiest."""
    top = float(np.nanmax(cells.load))
    table, rows, columns = _joined(cells.load, _MOST)
    lines = [f"\nload of the {cells.columns}s, {title}; 1 is a host's link that is always busy, the most is {top:.2f}"]
    joined = [f"{n} {_plural(what)}" for n, what in ((rows, cells.rows), (columns, cells.columns)) if n > 1]
    if joined:
        lines.append(f"each character: the busiest of {' x '.join(joined)}")
    for number, row in enumerate(table):
        shown = "".join(" " if v < 0 else SHADES[min(9, int(10 * v / top))] if top else " " for v in row)
        lines.append(f"  {cells.rows} {number * rows:>4} |{shown}|")
    lines.append(f"  scale: {SHADES[1]} is a tenth of the most, {SHADES[9]} nine tenths and more")
    return "\n".join(lines)


def _colour(part: float) -> str:
    """From paper to vermilion."""
    ends: NDArray[np.float64] = np.array([[251, 251, 249], [213, 94, 0]], float)
    return "#" + "".join(f"{round(v):02x}" for v in ends[0] + (ends[1] - ends[0]) * min(1.0, max(0.0, part)))


def svg(cells: Grid, title: str) -> str:
    """The same as an SVG of its own, without scripts or fonts."""
    table, rows, columns = _joined(cells.load, (64, 96))
    top = float(np.nanmax(cells.load)) or 1.0
    side = max(4.0, min(22.0, 640 / table.shape[1]))
    width, height = max(560.0, 70 + side * table.shape[1] + 20), 70 + side * table.shape[0] + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" font-family="sans-serif" font-size="12" fill="#1b1f24">',
        f"<title>{escape(title)}</title>", f'<rect width="{width:g}" height="{height:g}" fill="#fbfbf9"/>',
        f'<text x="12" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="42">One cell per {cells.columns}'
        + (f", the busiest of {rows} x {columns}" if rows * columns > 1 else "")
        + f"; the darkest is {top:.2f} times as busy as a host's link</text>",
    ]  # fmt: skip
    for i, row in enumerate(table):
        if i % max(1, len(table) // 8) == 0:
            parts.append(f'<text x="62" y="{60 + side * (i + 0.75):g}" text-anchor="end">{i * rows}</text>')
        for j, v in enumerate(row):
            if v >= 0:
                parts.append(
                    f'<rect x="{70 + side * j:g}" y="{60 + side * i:g}" width="{side - 1:g}" height="{side - 1:g}" '
                    f'fill="{_colour(v / top)}" stroke="#e3e5e2" stroke-width="0.5"/>'
                )
    parts.append(f'<text x="70" y="{height - 14:g}">{cells.columns}s of each {cells.rows}, which are the rows</text>')
    return "\n".join([*parts, "</svg>\n"])
