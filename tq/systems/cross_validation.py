"""How far predictions are off where nothing of a source had a part in the constants, and how often intervals hold.

    python -m tq.systems.cross_validation      # three errors, and the share of runs within their 80 % interval

Three errors, from the kindest to the strictest. Held-out rows have near relatives that were fitted to: the same model
on twice the GPUs. Test rows come from sources that were read after the constants had been fitted. Leave one paper out:
the constants are fitted anew without any row of a paper, all of whose rows are then predicted; that is what a reader
meets who asks for a run of his own, and the figure to quote.

An interval that is taken from errors holds its share of the same errors by construction. Its coverage is therefore
counted twice: as it stands, and with each row's interval taken from the other rows alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tq.systems.calibration import Row, errors, fit, fit_rows, interval, unseen
from tq.systems.validation import is_timed, median_error, published, table


@dataclass(frozen=True)
class PaperError:
    """error: predicted time over published, less 1, by constants without the row's paper. log_error: of published over
    predicted time, as intervals are taken from. test: of a source that no constants were ever fitted to."""

    id: str
    paper: str
    error: float
    log_error: float
    test: bool


def paper(row_id: str) -> str:
    """The source of a row, tables of one paper taken together: what its id begins with."""
    return row_id.split("-")[0]


def _alone(row: Row) -> Row:
    silent = row["not_stated"]
    chunks, batch = "interleav" in silent or "chunks" in silent, "micro-batch" in silent
    return {**row, **({"interleave": "1"} if chunks else {}), **({"micro_batch": "1"} if batch else {})}


#: Choices that were made once errors had been seen, each taken the other way: they are no constants, so leaving a paper
#: out does not leave them out.
ALTERNATIVES: dict[str, Callable[[Row], Row]] = {
    "as taken": lambda row: row,
    "micro-batch 1 and no interleaving where a source is silent": _alone,
    "MT-NLG among the runs of Megatron-LM in 2021": lambda row: (
        {**row, "software": "megatron-2021"} if row["id"].startswith("MTNLG") else row
    ),
    "FLOPs of Llama 3 with all of the attention": lambda row: (
        {**row, "flops_kind": "model"} if "whether FLOPs" in row["not_stated"] else row
    ),
}


def silent(row: Row) -> bool:
    """Whether what a source does not state bears on the time: micro-batch, interleaving, recomputation, FLOPs."""
    return any(word in row["not_stated"] for word in ("micro-batch", "interleav", "chunks", "recomputation", "FLOPs"))


@functools.cache
def leave_one_paper_out(choice: str = "as taken") -> tuple[PaperError, ...]:
    """Every timed row of a dense model, predicted by constants that no row of its paper was fitted to; choice: one of
    ``ALTERNATIVES``."""
    alter = ALTERNATIVES[choice]
    rows = [alter(row) for row in published() if is_timed(row) and row["split"] != "outside"]
    chosen, found = [alter(row) for row in fit_rows()], []
    for name in sorted({paper(row["id"]) for row in rows}):
        for gpu in sorted({row["gpu_type"] for row in rows if paper(row["id"]) == name}):
            mine = [row for row in rows if (paper(row["id"]), row["gpu_type"]) == (name, gpu)]
            others = [row for row in chosen if paper(row["id"]) != name and row["gpu_type"] == gpu]
            logs = errors(mine, unseen(fit(others), others, mine))
            found += [
                PaperError(row["id"], name, float(np.exp(-log)) - 1, log, row["split"] == "test")
                for row, log in zip(mine, logs, strict=True)
            ]
    return tuple(found)


def by_paper(found: Sequence[PaperError]) -> dict[str, float]:
    """{paper: median of its rows' absolute errors}."""
    names = sorted({row.paper for row in found})
    return {name: float(np.median([abs(row.error) for row in found if row.paper == name])) for name in names}


def coverage(logs: Sequence[float], groups: Sequence[str] | None = None, share: float = 0.8) -> tuple[float, float]:
    """Share of errors within an interval that is made to hold `share` of them: (taken from these errors, each one's
    taken from the errors of other groups). groups: None, each error is one of its own. ValueError: fewer than two."""
    names = list(range(len(logs))) if groups is None else list(groups)
    if len(set(names)) < 2:
        raise ValueError(f"coverage needs errors of at least two groups, got {len(set(names))}")
    reach = np.log(interval(logs, share)[1])
    kept = []
    for log, name in zip(logs, names, strict=True):
        others = [other for other, group in zip(logs, names, strict=True) if group != name]
        kept.append(abs(log) <= np.log(interval(others, share)[1]))
    return float(np.mean(np.abs(logs) <= reach)), float(np.mean(kept))


@functools.cache
def held_out_coverage() -> tuple[float, float]:
    """Of the interval of fitted pairs over the held-out rows: (as it stands, each row left out of its own)."""
    rows = [row for row in table() if row.kind == "time" and row.split == "held-out"]
    return coverage([-float(np.log1p(row.error)) for row in rows])


def report() -> str:
    """The three errors and both coverages as text."""
    rows = [row for row in table() if row.kind == "time"]
    lines = []
    for split, what in (("held-out", "rows held out"), ("test", "sources never fitted to")):
        kept = [row for row in rows if row.split == split]
        largest = max(abs(row.error) for row in kept)
        lines.append(f"{what}: median {median_error(kept):.1%}, largest {largest:.1%}, {len(kept)} rows")
    found = leave_one_paper_out()
    values = [abs(row.error) for row in found]
    papers = by_paper(found)
    lines.append(
        f"leave one paper out: median {np.median(values):.1%} of {len(values)} rows, largest {max(values):.1%}; "
        f"median of {len(papers)} papers {np.median(list(papers.values())):.1%}"
    )
    lines += [f"  {name}: {value:.1%}" for name, value in papers.items()]
    stands, left = held_out_coverage()
    lines.append(f"80 % interval over held-out rows: {stands:.0%} as it stands, {left:.0%} with each row left out")
    for choice in ALTERNATIVES:
        values = [abs(row.error) for row in leave_one_paper_out(choice)]
        lines.append(f"papers left out, {choice}: median {np.median(values):.1%}, mean {np.mean(values):.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
