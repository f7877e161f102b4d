"""What a Matplotlib figure plots, as rows for a CSV file: lines, points, bars, areas, intervals and heat maps.

Read off the finished figure, in the order in which it was drawn. Texts, arrows and images with colours of their own
are left out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

HEADER = ("panel", "kind", "series", "x", "y", "x_end", "y_end", "value")


def _line(line: Any, ax: Any) -> Iterator[tuple[Any, ...]]:
    """Points of a line; of one that spans the panel (a limit, a mean) only the coordinate that is data."""
    in_x, in_y = line.get_transform().contains_branch_seperately(ax.transData)
    points = list(line.get_xydata())
    if not (in_x and in_y):
        points = points[:1]
    for x, y in points:
        yield (x if in_x else None, y if in_y else None)


def _panel(ax: Any) -> Iterator[tuple[Any, ...]]:
    """(kind, series, x, y, x_end, y_end, value) of everything in one panel."""
    for line in ax.lines:
        for point in _line(line, ax):
            yield ("line", line.get_label(), *point)
    for patch in ax.patches:
        if hasattr(patch, "get_bbox"):  # a rectangle: a bar or a span
            box = patch.get_bbox()
            yield ("bar", patch.get_label(), box.x0, box.y0, box.x1, box.y1)
        elif hasattr(patch, "get_data"):  # stairs
            values, edges, _ = patch.get_data()
            for value, left, right in zip(values, edges, edges[1:], strict=False):
                yield ("step", patch.get_label(), left, value, right, value)
    for collection in ax.collections:
        label, grid = collection.get_label(), getattr(collection, "get_coordinates", None)
        if grid is not None:  # a heat map: corners of each cell and its value
            corners = grid()
            for (i, j), value in _cells(collection.get_array(), corners.shape):
                yield ("cell", label, *corners[i, j], *corners[i + 1, j + 1], value)
        elif hasattr(collection, "get_segments"):
            for segment in collection.get_segments():
                if len(segment) == 2:
                    yield ("interval", label, *segment[0], *segment[1])
        elif type(collection).__name__ == "PathCollection":
            for x, y in collection.get_offsets():
                yield ("point", label, x, y)
        else:
            for path in collection.get_paths():
                for x, y in path.vertices:
                    yield ("area", label, x, y)


def _cells(values: Any, corners: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], Any]]:
    """((row, column), value) of a grid that has these many corners."""
    for i, row in enumerate(values.reshape(corners[0] - 1, corners[1] - 1)):
        for j, value in enumerate(row):
            yield (i, j), value


def _text(value: Any) -> str:
    """Six digits, nothing for what is not there."""
    if value is None or bool(getattr(value, "mask", False)):
        return ""
    if isinstance(value, str):
        return "" if value.startswith("_") else value.replace("\n", " ")  # Matplotlib's own names begin with _
    text = f"{float(value):.6g}"
    return "" if text == "nan" else text


def rows(fig: Any) -> list[tuple[str, ...]]:
    """The rows under `HEADER`, as texts."""
    found = []
    for number, ax in enumerate(fig.axes, 1):
        titles = (ax.get_title(where) for where in ("left", "center", "right"))
        panel = next(filter(None, titles), str(number) if len(fig.axes) > 1 else "")
        for row in _panel(ax):
            full = (panel, *row, *[None] * (len(HEADER) - 1 - len(row)))
            found.append(tuple(_text(value) for value in full))
    return found


def as_csv(found: list[tuple[str, ...]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([HEADER, *found])
    return buffer.getvalue()
