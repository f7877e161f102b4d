"""The one figure module: sizes, type, and one colour, marker and line per method over the whole book.

Figures are made without pyplot, so a notebook shows one only when `Chapter.figure` does, and nothing needs closing.
The first `figure` sets this process's Matplotlib defaults; no other file touches them. Not for interactive windows.

Colours are Okabe and Ito's, told apart also with colour-blind eyes and in grey through marker and line.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

INK, SOFT, GRID, PAPER = "#1b1f24", "#5a6068", "#e3e5e2", "#fbfbf9"
BLACK, ORANGE, SKY, GREEN = "#1b1f24", "#e69f00", "#56b4e9", "#009e73"
YELLOW, BLUE, VERMILION, PURPLE = "#c9b800", "#0072b2", "#d55e00", "#cc79a7"  # yellow darkened: it must show on paper
GREY, BROWN = "#8a8f96", "#8c5a2b"


@dataclass(frozen=True)
class Method:
    """How one method looks in every figure."""

    label: str
    colour: str
    marker: str
    line: str | tuple[int, tuple[int, ...]] = "-"

    def line_style(self) -> dict[str, Any]:
        """For `ax.plot`: colour, marker and line."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line}


_DOTS = (0, (1, 1))
_LONG = (0, (6, 2))
METHODS: Mapping[str, Method] = {
    "tq": Method("TurboQuant", BLUE, "o"),
    "tq-search": Method("TurboQuant, scale search", SKY, "D"),
    "tq-prod": Method("TurboQuant, inner product", BLUE, "P", "--"),
    "paper": Method("paper", PURPLE, "s", "--"),
    "whitepaper": Method("whitepaper", PURPLE, "X", "--"),
    "published": Method("published", PURPLE, "*", "--"),
    "nf4": Method("NF4", ORANGE, "^"),
    "fp4": Method("FP4", YELLOW, "v"),
    "nvfp4": Method("NVFP4", YELLOW, "<", "--"),
    "mxfp4": Method("MXFP4", VERMILION, "v"),
    "mxfp8": Method("MXFP8", VERMILION, ">", "--"),
    "fp8": Method("FP8", GREEN, "p"),
    "int8": Method("INT8", GREEN, "h", "--"),
    "int4": Method("INT4", BROWN, "H"),
    "uniform": Method("uniform", GREY, "x"),
    "onebit": Method("1-bit Adam", BROWN, "+", "--"),
    "powersgd": Method("PowerSGD", GREEN, "1", _LONG),
    "topk": Method("top-k", YELLOW, "2", _LONG),
    "theory": Method("theory", INK, "", "--"),
    "bound": Method("lower bound", INK, "", _DOTS),
    "predicted": Method("predicted", SOFT, "", "--"),
    "measured": Method("measured", BLUE, "o"),
    "fp32": Method("FP32", BLACK, "s"),
    "bf16": Method("BF16", SOFT, "d", _LONG),
    "fp16": Method("FP16", SOFT, "8", _DOTS),
    "adamw": Method("AdamW", BLACK, "s"),
    "reference": Method("PyTorch reference", GREY, "x", "--"),
    "copy": Method("copy", GREY, "", _DOTS),
}

# name -> (width in inches, height of one row in inches, type in points). On the page an inch is 96 pixels; a wide
# figure is shrunk to the column of 720 pixels, so its type is larger and ends at 9.5 points as well.
SIZES = {"half": (3.75, 2.8, 9.5), "full": (7.5, 3.4, 9.5), "wide": (10.0, 4.5, 12.75)}


def _defaults(points: float = 9.5) -> Any:
    """Matplotlib's defaults; Any, because its stubs spell out every key that it knows."""
    from cycler import cycler

    return {
        "figure.facecolor": PAPER,
        "savefig.facecolor": PAPER,
        "axes.facecolor": PAPER,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # comes with Matplotlib: the same figure on every machine
        "font.size": points,
        "axes.titlesize": points,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": points,
        "xtick.labelsize": points,
        "ytick.labelsize": points,
        "legend.fontsize": points,
        "figure.titlesize": points + 1,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.edgecolor": SOFT,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.8,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.8,
        "lines.markersize": 5.0,
        "lines.solid_capstyle": "round",
        "legend.frameon": False,
        "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BROWN, BLACK]),
        "svg.hashsalt": "tq",
    }


def style(points: float = 9.5) -> AbstractContextManager[None]:
    """The book's look for a `with` block, for drawing that `figure` does not start (seaborn's own grids)."""
    import matplotlib

    return matplotlib.rc_context(_defaults(points))


def figure(
    size: str = "full",
    rows: int = 1,
    cols: int = 1,
    *,
    height: float | None = None,
    sharex: bool = False,
    sharey: bool = False,
    width_ratios: Sequence[float] | None = None,
    height_ratios: Sequence[float] | None = None,
) -> tuple[Figure, Any]:
    """A figure and its axes: one Axes, or an array of them of shape (cols,), (rows,) or (rows, cols).

    size: "half", "full" or "wide", the width on the page. height: of all rows together, in inches.
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r}: accepted are {', '.join(SIZES)}")
    if rows < 1 or cols < 1:
        raise ValueError(f"rows={rows!r}, cols={cols!r}: both at least 1")
    if height is not None and not (math.isfinite(height) and height > 0):
        raise ValueError(f"height={height!r}: inches above 0")
    import matplotlib
    from matplotlib.figure import Figure

    width, row_height, points = SIZES[size]
    # Matplotlib reads defaults also after the figure is made (titles, legends), so a `with` block would not reach them.
    matplotlib.rcParams.update(_defaults(points))
    fig = Figure(figsize=(width, height or row_height * rows), layout="constrained")
    axes = fig.subplots(
        rows, cols, sharex=sharex, sharey=sharey, width_ratios=width_ratios, height_ratios=height_ratios
    )
    return fig, axes


def method(name: str) -> Method:
    """The look of a method; an unknown name raises, so that no figure invents a second colour."""
    if name not in METHODS:
        raise ValueError(f"method={name!r}: accepted are {', '.join(METHODS)}")
    return METHODS[name]


def colour(name: str) -> str:
    """The colour of a method."""
    return method(name).colour


def line_style(name: str) -> dict[str, Any]:
    """Colour, marker and line of a method: `ax.plot(x, y, **figures.line_style("tq"))`."""
    return method(name).line_style()


def label_line(
    ax: Axes, x: float, y: float, text: str, colour: str = INK, *, dx: float = 5.0, dy: float = 0.0, align: str = "left"
) -> Text:
    """Writes a label beside the point (x, y) of a line, in its colour, instead of a legend; dx, dy in points.

    x, y: data coordinates. align: "left", "center" or "right", the side of the text that touches the point.
    """
    if align not in ("left", "center", "right"):
        raise ValueError(f"align={align!r}: accepted are left, center, right")
    label = ax.annotate(
        text, (x, y), xytext=(dx, dy), textcoords="offset points", color=_readable(colour), ha=align, va="center",
        annotation_clip=False,
    )  # fmt: skip
    label.set_gid(_LABEL)
    return label


def label_column(ax: Axes, ends: Sequence[tuple[float, float, str, str]], x: float, spacing: float = 1.3) -> list[Text]:
    """Writes labels of lines in one column, spread where ends lie close, each joined to its line's end by a thin line.

    Limits and scales of the axes, and the figure's titles, must be set before.

    ends: (x, y, text, colour) of each line's end, x and y in data coordinates. x: of the column's left edge, in data
    coordinates. spacing: least distance of two labels, in heights of a letter.
    """
    if not ends:
        return []
    fig = ax.get_figure(root=True)
    assert fig is not None  # axes that were removed have none
    _drawn(fig)  # a constrained layout gives axes their height here
    to_axes = ax.transData + ax.transAxes.inverted()
    order = sorted(ends, key=lambda end: float(to_axes.transform((end[0], end[1]))[1]))
    wanted = [float(to_axes.transform((end[0], end[1]))[1]) for end in order]
    left = float(to_axes.transform((x, order[0][1]))[0])
    points = ax.get_window_extent().height * 72 / fig.dpi
    gap = spacing * float(ax.xaxis.label.get_fontsize()) / points
    made = []
    for (x_end, y_end, text, tone), height in zip(order, _spread(wanted, gap), strict=True):
        ax.annotate(
            "", (x_end, y_end), xytext=(left, height), textcoords="axes fraction", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": tone, "linewidth": 0.6, "shrinkA": 1.0, "shrinkB": 4.0},
        )  # fmt: skip
        made.append(ax.text(left, height, text, transform=ax.transAxes, color=_readable(tone), ha="left", va="center"))
    return made


def _spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights nearest to ``wanted`` (ascending, parts of the axes) by least squares, ``gap`` apart and within the axes.

    Without its share of gaps a height may only not fall: pools of neighbours take their mean.
    """
    pools: list[list[float]] = []  # sum and number
    for i, height in enumerate(wanted):
        pools.append([height - i * gap, 1.0])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] >= pools[-1][0] / pools[-1][1]:
            total, number = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + number]
    flat = [total / number for total, number in pools for _ in range(int(number))]
    low, high = gap / 2, 1 - gap / 2 - (len(flat) - 1) * gap
    return [i * gap + max(low, min(height, high)) for i, height in enumerate(flat)]


def apart(fig: Figure) -> None:
    """Moves labels of ``label_line`` that overlap up and down, point by point, until none do or ``_MOVES`` are made."""
    from matplotlib.text import Annotation

    labels = [text for text in fig.findobj(Annotation) if text.get_gid() == _LABEL]
    for _ in range(_MOVES):
        renderer = _drawn(fig)
        boxes = [(label, label.get_window_extent(renderer)) for label in labels]
        pairs = [
            (one, other) if a.y0 + a.y1 >= b.y0 + b.y1 else (other, one)
            for i, (one, a) in enumerate(boxes)
            for other, b in boxes[i + 1 :]
            if _overlap(a, b)
        ]
        if not pairs:
            return
        for upper, lower in pairs:
            for label, up in ((upper, 1.0), (lower, -1.0)):
                x, y = label.xyann
                label.xyann = (x, y + up)


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(colour: str, ground: str = PAPER) -> float:
    """Contrast ratio of WCAG 2 between two colours; text needs 4.5."""
    dark, light = sorted((_luminance(colour), _luminance(ground)))
    return (light + 0.05) / (dark + 0.05)


def _readable(colour: str) -> str:
    """The same hue, darkened until text in it can be read on paper."""
    from matplotlib.colors import to_hex, to_rgb

    shade = to_rgb(colour)
    while contrast(to_hex(shade)) < 4.5:
        shade = (shade[0] * 0.95, shade[1] * 0.95, shade[2] * 0.95)
    return to_hex(shade)


def heatmap(ax: Axes, frame: Any, unit: str, *, fmt: str = ".2g", centre: float | None = None) -> Axes:
    """A labelled heat map of a DataFrame by seaborn; unit names its colour bar; centre: the value without colour."""
    import seaborn

    palette: Any = "cividis" if centre is None else seaborn.diverging_palette(250, 30, s=80, as_cmap=True)
    with warnings.catch_warnings():
        # seaborn 0.13 calls what Matplotlib 3.11 will deprecate one day.
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        seaborn.heatmap(
            frame, ax=ax, annot=True, fmt=fmt, cmap=palette, center=centre, linewidths=0.8, linecolor=PAPER,
            cbar_kws={"label": unit},
        )  # fmt: skip
    ax.grid(False)
    return ax


_LABEL, _MOVES = "line label", 60  # that a label of a line is known by; the most points that one is moved
SHOWN = 7.5  # inches that the column of a page has; a wider figure is shrunk to it
SMALLEST = 9.0  # points, as shown


def _drawn(fig: Figure) -> Any:
    """The renderer that has drawn the figure, whose canvas stays what it was."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kept = fig.canvas
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    fig.set_canvas(kept)
    return canvas.get_renderer()


def _overlap(a: Any, b: Any) -> bool:
    """Whether two boxes share more than a twentieth of the smaller one."""
    wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    shared = wide * high if wide > 0 and high > 0 else 0.0
    return bool(shared > 0.05 * min(a.width * a.height, b.width * b.height))


def problems(fig: Figure) -> list[str]:
    """What a reader could not read in a figure: letters below nine points as shown, and labels that overlap.

    Two labels overlap where they share more than a twentieth of the smaller one's box.
    """
    from matplotlib.text import Text

    renderer = _drawn(fig)
    shrunk = min(1.0, SHOWN / fig.get_figwidth())
    unseen = {  # labels of ticks outside an axis's limits, which Matplotlib does not draw
        label
        for axes in fig.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        for label in (tick.label1, tick.label2)
    }
    boxes: list[tuple[str, float, Any]] = []
    for text in fig.findobj(Text):
        if text in unseen:
            continue
        if not (isinstance(text, Text) and text.get_visible() and text.get_text().strip()) or text.get_alpha() == 0:
            continue
        if text.axes is not None and not text.axes.get_visible():
            continue
        box = text.get_window_extent(renderer)
        if box.width and box.height and fig.bbox.overlaps(box):
            boxes.append((text.get_text().strip().replace("\n", " "), float(text.get_fontsize()) * shrunk, box))
    found = [f"{said!r} has {size:.1f} points" for said, size, _ in boxes if size < SMALLEST - 0.05]
    for i, (one, _, a) in enumerate(boxes):
        found += [f"{one!r} overlaps {other!r}" for other, _, b in boxes[i + 1 :] if _overlap(a, b)]
    return found
