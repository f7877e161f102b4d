"""Figures look the same everywhere, can be told apart and read."""

from __future__ import annotations

import io
import itertools
import re
import subprocess
import sys

import matplotlib
import pandas as pd
import pytest

from tests.book import helpers as h
from tq.book.record import figures

COLUMN_INCHES = 720 / 96  # what a page shows at most


@pytest.mark.parametrize("size", figures.SIZES)
def test_type_is_at_least_9_points_on_the_page(size: str) -> None:
    width, _, points = figures.SIZES[size]
    assert points * min(1.0, COLUMN_INCHES / width) >= 9
    fig, ax = figures.figure(size)
    ax.set(title="t", xlabel="x [s]")
    ax.legend(handles=[ax.plot([1, 2], [1, 2], label="a")[0]])
    texts = [ax.title, ax.xaxis.label, *ax.get_xticklabels(), *ax.get_legend().get_texts()]
    assert {text.get_fontsize() for text in texts} == {points}


def test_no_two_methods_look_alike() -> None:
    looks = {name: (m.colour, m.marker, m.line) for name, m in figures.METHODS.items()}
    alike = [(a, b) for a, b in itertools.combinations(looks, 2) if looks[a] == looks[b]]
    # The measured curve of a chapter is the method's own; AdamW is the fp32 baseline.
    assert alike == [("tq", "measured"), ("fp32", "adamw")] or alike == [("tq", "measured"), ("adamw", "fp32")]
    labels = [m.label for m in figures.METHODS.values()]
    assert len(set(labels)) == len(labels)


def test_lines_show_on_paper_and_labels_can_be_read() -> None:
    for name in figures.METHODS:
        assert figures.contrast(figures.colour(name)) >= 1.9, name
    fig, ax = figures.figure("half")
    for name in figures.METHODS:
        text = figures.label_line(ax, 1, 1, name, figures.colour(name))
        assert figures.contrast(text.get_color()) >= 4.5, name
    assert figures.contrast("#000000", "#ffffff") == pytest.approx(21)


def test_grids_of_axes_and_refusals() -> None:
    assert figures.figure("full", rows=2, cols=3)[1].shape == (2, 3)
    assert figures.figure("full", cols=2)[1].shape == (2,)
    for bad in ({"size": "huge"}, {"rows": 0}, {"height": -1.0}):
        with pytest.raises(ValueError, match=re.escape(str(next(iter(bad.values()))))):
            figures.figure(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'magic'.*tq-search"):
        figures.colour("magic")


def test_a_figure_is_opaque_and_repeats_bit_for_bit() -> None:
    pictures = []
    for _ in range(2):
        fig, ax = figures.figure("half")
        figures.heatmap(ax, pd.DataFrame([[1.0, 2.0], [3.0, 4.0]]), "ms", centre=2.0)
        buffer = io.BytesIO()
        fig.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
        pictures.append(buffer.getvalue())
        buffer.seek(0)
        corner = matplotlib.image.imread(buffer)[0, 0]
        assert corner[3] == 1.0 and min(corner[:3]) > 0.95
    assert pictures[0] == pictures[1]


def test_style_leaves_nothing_behind() -> None:
    matplotlib.rcParams["font.size"] = 7.0
    with figures.style():
        assert matplotlib.rcParams["font.size"] == 9.5
    assert matplotlib.rcParams["font.size"] == 7.0


def test_making_a_figure_needs_no_pyplot_and_importing_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.modules) ; from tq.book.record import figures; "
        "new = set(sys.modules) - before; "
        "assert not any(m.startswith(('matplotlib', 'seaborn', 'pandas')) for m in new); "
        "figures.figure('half'); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=h.environment(h.ROOT), cwd=h.ROOT)


def test_no_other_file_sets_matplotlibs_defaults() -> None:
    for path in [*(h.ROOT / "tq").rglob("*.py"), *(h.ROOT / "notebooks").glob("*.ipynb")]:
        if path.name != "figures.py":
            assert "rcParams" not in path.read_text(encoding="utf-8"), path.name


def test_what_cannot_be_read_is_named() -> None:
    fig, ax = figures.figure("full")
    ax.plot([1, 2], [3, 4])
    ax.set_title("A message")
    assert figures.problems(fig) == []
    ax.text(1.5, 3.5, "one label")
    ax.text(1.51, 3.5, "another", fontsize=6)
    assert figures.problems(fig) == ["'another' has 6.0 points", "'one label' overlaps 'another'"]
    wide, axes = figures.figure("wide")
    axes.text(0.5, 0.5, "small", fontsize=10)
    assert figures.problems(wide) == ["'small' has 7.5 points"]


def test_labels_of_lines_are_moved_apart() -> None:
    fig, ax = figures.figure("half")
    ax.plot([0, 1], [0, 1])
    labels = [figures.label_line(ax, 0.5, 0.5 + 0.001 * k, f"method {k}") for k in range(4)]
    away = figures.label_line(ax, 0.0, 0.0, "alone", dx=3.0, dy=2.0)
    assert len(figures.problems(fig)) == 6
    figures.apart(fig)
    assert figures.problems(fig) == [] and away.xyann == (3.0, 2.0)
    heights = [label.xyann[1] for label in labels]
    assert heights == sorted(heights) and max(map(abs, heights)) < 40


def test_a_column_of_labels_is_spread_and_joined_to_the_ends_of_the_lines() -> None:
    fig, ax = figures.figure("half")
    ax.set(yscale="log", xlim=(0, 4), ylim=(1e-3, 1), title="A message")
    ends = [(2.0, 0.9 - 0.02 * k, f"line {k}", figures.BLUE) for k in range(5)] + [(1.0, 0.01, "alone", figures.INK)]
    for x, y, _, colour in ends:
        ax.plot([0, x], [0.5, y], color=colour)
    texts = figures.label_column(ax, ends, 2.4)
    assert [text.get_text() for text in texts] == ["alone", *(f"line {k}" for k in (4, 3, 2, 1, 0))]
    assert figures.problems(fig) == []
    heights = [text.get_position()[1] for text in texts]
    assert heights == sorted(heights) and 0 < heights[0] and heights[-1] < 1
    assert heights[0] == pytest.approx(1 / 3)  # one decade of three: no neighbour moves it
    leaders = [note for note in ax.texts if isinstance(note, matplotlib.text.Annotation)]
    assert [leader.xy for leader in leaders] == [(x, y) for x, y, *_ in sorted(ends, key=lambda end: end[1])]
    assert [leader.xyann for leader in leaders] == [text.get_position() for text in texts]
    assert figures.label_column(ax, [], 2.4) == []


@pytest.mark.parametrize("wanted", ([0.5, 0.5, 0.5], [0.0, 0.01, 0.02], [0.1, 0.95, 1.0], [0.2, 0.4, 0.8]))
def test_spread_heights_keep_their_distance_and_stay_inside(wanted: list[float]) -> None:
    found = figures._spread(wanted, 0.1)
    assert min(b - a for a, b in itertools.pairwise(found)) > 0.1 - 1e-9
    assert found[0] >= 0.05 - 1e-9 and found[-1] <= 0.95 + 1e-9
    if wanted == [0.2, 0.4, 0.8]:
        assert found == pytest.approx(wanted)
    if wanted[0] == wanted[-1]:
        assert sum(found) == pytest.approx(sum(wanted))  # nearest: half of them up, half of them down
