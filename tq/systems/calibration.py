"""Fits the constants of `data/efficiency.csv` to published runs, fit rows only.

    python -m tq.systems.calibration --write

Two constants a GPU type (gemm, hbm), two a software generation (compute, communication); compute is 1 by definition for
the generation that anchors a GPU type. It is the most probable set of constants where errors of a row are Laplace with
a scale of 3 % and the constants log-normal around what is plausible beforehand; that keeps those of few rows sound.
Searched on grids that shrink: no random numbers. Held-out rows have no part in the constants.
The 80 % intervals come from errors of rows that the constants were not fitted to: the held-out rows for a GPU type and
a generation that were fitted together; fit rows, their whole generation left out, for a pair that was not; fit rows,
their GPU type left out besides, for a GPU type that no row is of.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tq.systems import tables
from tq.systems.efficiency import CONSTANTS, FITTED, SAME_CHIP, Efficiency, generations
from tq.systems.validation import is_timed, published, run, seconds

Array = NDArray[Any]
Pair = tuple[float, float]
Constants = dict[tuple[str, str], Pair]
ANCHORS = ("megatron-2022", "megatron-core")  # their compute is 1: a GPU's constants are those it shows under them
PRIOR = {"gpu": (0.75, 0.8), "software": (1.0, 1.0)}
BOUNDS = {"gpu": ((0.4, 0.98), (0.3, 0.98)), "software": ((0.6, 1.8), (0.05, 30.0))}
SPREAD = {"gpu": (0.07, 0.2), "software": (0.15, 0.7)}  # standard deviation of the log beforehand
ROW_ERROR = 0.03
REACH = {"gpu": (1.0, 1.0), "software": (1.0, 9.0)}  # of the grids, in their width
ROUNDS, SHRINK = 14, 0.7

Row = dict[str, str]


def fit_rows() -> list[Row]:
    return [row for row in published() if is_timed(row) and row["split"] == "fit"]


def _times(row: Row, gpu: tuple[Any, Any], software: tuple[Any, Any]) -> Any:
    constants = Efficiency(gemm=gpu[0], hbm=gpu[1], compute=software[0], communication=software[1])
    return run(row, constants).iteration_s


def _grid(name: str, kind: str, at: Pair, width: float, points: int) -> tuple[Array, Array]:
    """Pairs [P] around a point: each constant times exp(-width) to exp(width), within its bounds; communication, known
    least beforehand, over nine times the range."""
    axes = []
    for value, (low, high), range_of in zip(at, BOUNDS[kind], REACH[kind], strict=True):
        axes.append(np.clip(value * np.exp(np.linspace(-width, width, points) * range_of), low, high))
    if name in ANCHORS:
        axes[0] = np.ones(1)
    first, second = np.meshgrid(*axes)
    return first.ravel(), second.ravel()


def _prior_loss(kind: str, pair: tuple[Any, Any]) -> Any:
    terms = zip(pair, PRIOR[kind], SPREAD[kind], strict=True)
    return sum(ROW_ERROR / 2 * (np.log(value / prior) / spread) ** 2 for value, prior, spread in terms)


def loss(rows: Sequence[Row], constants: Constants) -> float:
    """What the fit makes small: absolute logs of the errors, and how far the constants are from the prior."""
    return sum(map(abs, errors(rows, constants))) + sum(
        _prior_loss(kind, pair) for (kind, _), pair in constants.items()
    )


def _fit_gpu(rows: Sequence[Row]) -> Constants:
    """Of the rows of one GPU type: for each pair of the GPU [G] the best pair of each generation [S], in ever finer
    grids around the best found so far."""
    gpu_key = "gpu", rows[0]["gpu_type"]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(("software", row["software"]), []).append(row)
    found: Constants = {gpu_key: PRIOR["gpu"]} | {key: PRIOR["software"] for key in groups}
    width = 0.3
    for _ in range(ROUNDS):
        gemm, hbm = _grid("", "gpu", found[gpu_key], width, 7)
        total_G = _prior_loss("gpu", (gemm, hbm))
        best_of: dict[tuple[str, str], tuple[Array, tuple[Array, Array]]] = {}
        for key, group in groups.items():
            pairs = _grid(key[1], "software", found[key], width, 13)
            loss_GS = _prior_loss("software", pairs)[None, :]
            for row in group:
                times = _times(row, (gemm[:, None], hbm[:, None]), (pairs[0][None, :], pairs[1][None, :]))
                loss_GS = loss_GS + np.abs(np.log(times / seconds(row)))
            best_of[key] = loss_GS.argmin(1), pairs
            total_G = total_G + loss_GS.min(1)
        best = int(total_G.argmin())
        found[gpu_key] = float(gemm[best]), float(hbm[best])
        for key, (index_G, pairs) in best_of.items():
            found[key] = float(pairs[0][index_G[best]]), float(pairs[1][index_G[best]])
        width *= SHRINK
    return found


def fit(rows: Sequence[Row]) -> Constants:
    """Constants of every GPU type and generation in these rows. ValueError where a generation ran on two GPU types."""
    types = {row["software"]: row["gpu_type"] for row in rows}
    found: Constants = {}
    for gpu in sorted(set(types.values())):
        mine = [row for row in rows if row["gpu_type"] == gpu]
        foreign = [row["software"] for row in mine if types[row["software"]] != gpu]
        if foreign:
            raise ValueError(f"software={foreign[0]!r}: rows to fit must have one GPU type a generation")
        found |= _fit_gpu(mine)
    return found


def errors(rows: Sequence[Row], constants: Constants) -> list[float]:
    """Log of published over predicted time; a generation or GPU without constants has the prior's."""
    out = []
    for row in rows:
        gpu = constants.get(("gpu", row["gpu_type"]), PRIOR["gpu"])
        software = constants.get(("software", row["software"]), PRIOR["software"])
        out.append(float(np.log(seconds(row) / _times(row, gpu, software))))
    return out


def _grouped(rows: Sequence[Row], *columns: str) -> list[list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return list(groups.values())


def held_out(rows: Sequence[Row]) -> list[float]:
    """The errors of the held-out rows; rows: the fit rows."""
    constants = fit(rows)
    return errors([row for row in published() if is_timed(row) and row["split"] == "held-out"], constants)


def unseen(constants: Constants, rows: Sequence[Row], asked: Sequence[Row]) -> Constants:
    """Constants for rows that may be of a generation or a GPU type that these were not fitted to, as
    ``efficiency.efficiency`` takes them: kernels no faster than those of most rows, nothing hidden. rows: the rows that
    the constants were fitted to."""
    found = dict(constants)
    for row in asked:
        found.setdefault(("software", row["software"]), (max(PRIOR["software"][0], _usual(constants, rows)[0]), 1.0))
        found.setdefault(("gpu", row["gpu_type"]), _mean_gpu(constants))
    return found


def pairs_left_out(rows: Sequence[Row]) -> list[float]:
    """The error of each row without its generation, which is then as fast as most on its GPU type. Not of the anchors:
    without them a GPU type has no constants to speak of."""
    out = []
    for same in _grouped([row for row in rows if row["software"] not in ANCHORS], "gpu_type", "software"):
        others = [row for row in rows if row["gpu_type"] == same[0]["gpu_type"] and row not in same]
        found = fit(others)
        out += errors(same, found | {("software", same[0]["software"]): _usual(found, others)})
    return out


def gpus_left_out(rows: Sequence[Row]) -> list[float]:
    """The error of each row without its GPU type and its generation: constants are the mean of the other GPU types'."""
    out = []
    for same in _grouped(rows, "gpu_type"):
        others = [row for row in rows if row["gpu_type"] != same[0]["gpu_type"]]
        found = fit(others)
        guess: Constants = {("software", row["software"]): _usual(found, others) for row in same}
        out += errors(same, guess | {("gpu", same[0]["gpu_type"]): _mean_gpu(found)})
    return out


def _usual(constants: Constants, rows: Sequence[Row]) -> Pair:
    compute = float(np.median([constants["software", row["software"]][0] for row in rows]))
    return compute, PRIOR["software"][1]


def _mean_gpu(constants: Constants) -> Pair:
    fitted = np.log([pair for (kind, _), pair in constants.items() if kind == "gpu"])
    gemm, hbm = np.exp(fitted.mean(axis=0)).tolist()
    return gemm, hbm


def interval(residuals: Sequence[float], share: float = 0.8) -> tuple[float, float]:
    """(low, high) of measured over predicted: symmetric in the log, wide enough for that share of n + 1 such errors."""
    ordered = np.sort(np.abs(residuals))
    rank = min(len(ordered), int(np.ceil(share * (len(ordered) + 1))))
    reach = float(ordered[rank - 1])
    return float(np.exp(-reach)), float(np.exp(reach))


#: What an interval holds for, and the errors that it comes from.
INTERVALS = (
    ("fitted pairs", held_out, "errors of held-out rows"),
    ("other pairs", pairs_left_out, "errors of software generations left out"),
    ("other GPUs", gpus_left_out, "errors of GPU types and software generations left out"),
)


def intervals(rows: Sequence[Row]) -> dict[str, Pair]:
    """{what it holds for: (low, high)}; a case that is known less well has no narrower one."""
    found: dict[str, Pair] = {}
    low, high = 1.0, 1.0
    for name, errors_of, _ in INTERVALS:  # from the best known to the least
        ends = interval(errors_of(rows))
        low, high = min(low, ends[0]), max(high, ends[1])
        found[name] = low, high
    return found


def as_csv(constants: Constants, ends: dict[str, Pair], rows: Sequence[Row]) -> str:
    """The text of `data/efficiency.csv`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(FITTED)

    def write(kind: str, name: str, values: Sequence[float], count: int, basis: str) -> None:
        for constant, value in zip(CONSTANTS[kind], values, strict=True):
            fixed = constant == "compute" and name in ANCHORS
            writer.writerow([kind, name, constant, f"{value:.4g}", count, "1 by definition" if fixed else basis])

    fitted = {name: pair for (kind, name), pair in constants.items() if kind == "gpu"}
    for name, pair in sorted(fitted.items()):
        write("gpu", name, pair, sum(row["gpu_type"] == name for row in rows), "fitted")
    for name, like in SAME_CHIP.items():
        if like in fitted:
            write("gpu", name, fitted[like], 0, f"same chip as {like}")
    write("gpu", "other", _mean_gpu(constants), 0, "geometric mean of the fitted ones")
    for name in generations():
        count = sum(row["software"] == name for row in rows)
        write(
            "software",
            name,
            constants.get(("software", name), PRIOR["software"]),
            count,
            "fitted" if count else "prior",
        )
    for gpu, name in sorted({(row["gpu_type"], row["software"]) for row in rows}):
        count = sum((row["gpu_type"], row["software"]) == (gpu, name) for row in rows)
        write("pair", f"{gpu} {name}", [count], count, "fitted together")
    for name, _, basis in INTERVALS:
        write("interval", name, ends[name], len(rows), basis)
    return out.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tq.systems.calibration", description="Fit the constants to published runs."
    )
    parser.add_argument("--write", action="store_true", help="write data/efficiency.csv; without it, print it")
    chosen = parser.parse_args(arguments)
    rows = fit_rows()
    text = as_csv(fit(rows), intervals(rows), rows)
    if chosen.write:
        path: Path = tables.folder() / "efficiency.csv"
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: fitted to {len(rows)} rows")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
