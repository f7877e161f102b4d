"""Published runs against the model: `data/published_runs.csv`, row by row, fit and held-out rows apart.

    python -m tq.systems.validation      # the table, the medians, and what other tools print of themselves
    for row in table(): print(row.id, row.split, row.published, row.predicted, row.error)

What is compared: time of an iteration or throughput, memory of a GPU. The split stands in the file: within a software
generation the rows are ordered by the SHA-256 of their id and the second of every three is held out, so that nobody
chose and every generation keeps rows to be fitted to. Nothing is fitted to memory; most of its rows come from a figure
that is drawn from the very formula of the model ("same formula"), and only the others test it. Whole runs are in
`tq.systems.whole_runs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from tq.systems import tables
from tq.systems.arguments import Real, one_of
from tq.systems.efficiency import Efficiency, software_facts
from tq.systems.hardware import GIB, Cluster, gbit
from tq.systems.iteration import Prediction, predict
from tq.systems.layout import Layout
from tq.systems.memory import memory
from tq.systems.shape import Transformer

COLUMNS = (
    "id", "source", "model", "params_B", "layers", "hidden", "heads", "seq", "global_batch_seqs", "tokens", "gpus",
    "gpu_type", "software", "vocab", "recompute", "flops_kind", "TP", "PP", "DP", "other_parallel", "metric",
    "published_value", "unit", "formula_value", "formula", "tier", "note", "kv_heads", "ffn", "gated", "tied",
    "experts", "ep", "micro_batch", "interleave", "sequence_parallel", "zero", "cp", "nic_gbit",
    "parallel_block", "not_stated", "split", "checked",
)  # fmt: skip
#: "hardware" counts recomputation, "model" does not, "model-causal" counts half of the attention scores besides.
FLOPS_KINDS = ("hardware", "model", "model-causal")
#: "test": of sources added after constants had been fitted; nothing is ever fitted to them, but the model was changed
#: once after their errors had been seen. "outside":
#: mixtures of experts, for which the time of a step is a lower bound; no bar counts them.
SPLITS = ("fit", "held-out", "test", "outside")
#: Errors that other tools print of themselves, on rows of their own choice.
PEERS = (
    ("Calculon", "iteration time, 8 rows", "mean 3.65 %, largest 8.87 %"),
    ("vTrain", "iteration time", "mean 8.4 % on one node, 14.7 % on many"),
    ("llm-analysis", "iteration time and hours, efficiency set by hand", "from -5.6 % to +9.5 %"),
)


@dataclass(frozen=True)
class Row:
    """One published figure and its prediction, in the published unit. error: predicted time (or memory) over the
    published one, less 1, whatever the unit. low, high: the 80 % interval in that unit. same_formula: the figure comes
    from the formula that predicts it."""

    id: str
    source: str
    kind: str
    software: str
    gpu: str
    split: str
    unit: str
    published: float
    predicted: float
    error: float
    low: float
    high: float
    not_stated: str
    same_formula: bool = False

    @property
    def covered(self) -> bool:
        return self.low <= self.published <= self.high


@functools.cache
def published() -> tuple[dict[str, str], ...]:
    """The rows of `data/published_runs.csv` as text."""
    return tuple(tables.read(tables.folder() / "published_runs.csv", COLUMNS))


def shape(row: dict[str, str]) -> Transformer:
    """The model of a row."""
    layers, hidden, heads, vocab, seq = (int(row[name]) for name in ("layers", "hidden", "heads", "vocab", "seq"))
    count, _, active = row["experts"].partition("/")
    experts = (int(count), int(active)) if row["experts"] else None
    return Transformer(
        layers, hidden, heads, vocab, seq,
        kv_heads=int(row["kv_heads"]) if row["kv_heads"] else None, ffn=int(row["ffn"]) if row["ffn"] else None,
        gated=row["gated"] == "yes", tied=False if row["tied"] == "no" else None, experts=experts,
        parallel_block=row["parallel_block"] == "yes",
    )  # fmt: skip


def layout(row: dict[str, str]) -> Layout:
    """The layout of a row, with what its source does not state as the file assumes it."""
    counts = {"tp": "TP", "pp": "PP", "dp": "DP", "global_batch": "global_batch_seqs"}
    counts |= {name: name for name in ("micro_batch", "interleave", "zero", "cp")}
    return Layout(
        **{name: int(row[column]) for name, column in counts.items()},
        recompute=row["recompute"], sequence_parallel=row["sequence_parallel"] == "yes", ep=int(row["ep"] or 1),
    )  # fmt: skip


def seconds(row: dict[str, str], value: Real = None) -> Real:
    """Time of an iteration from a row's figure (or another value in its unit); its own inverse for rates."""
    value = float(row["published_value"]) if value is None else value
    model, batch = shape(row), int(row["global_batch_seqs"])
    if row["unit"] == "s":
        return value
    if row["unit"] == "token/s":
        return batch * model.seq / (value * int(row["gpus"]))
    if row["unit"] == "days":
        return value * 86400 / (float(row["tokens"]) / (batch * model.seq))
    one_of(f"{row['id']}: flops_kind", row["flops_kind"], FLOPS_KINDS)
    hardware = row["flops_kind"] == "hardware"
    flops = model.hardware_flops(batch, row["recompute"]) if hardware else model.model_flops(batch)
    if row["flops_kind"] == "model-causal":
        flops -= 1.5 * batch * model.seq * model.layers * model.score_flops
    flops /= int(row["gpus"])
    if row["unit"] == "TFLOP/s":
        return flops / (value * 1e12)
    if row["unit"] == "%":
        return flops / (value / 100 * Cluster(row["gpu_type"]).spec.peak_flops)
    raise ValueError(f"{row['id']}: unit must be s, days, token/s, TFLOP/s or %, got {row['unit']!r}")


def in_unit(row: dict[str, str], iteration_s: Real) -> Real:
    """Time of an iteration in the unit of a row's figure."""
    per_unit = seconds(row, 1.0)
    return iteration_s / per_unit if row["unit"] in ("s", "days") else per_unit / iteration_s


def is_timed(row: dict[str, str]) -> bool:
    """Whether the row has a layout and a time or throughput that this model predicts."""
    return bool(row["split"]) and bool(row["micro_batch"]) and row["unit"] != "GiB"


def run(row: dict[str, str], efficiency: Efficiency | None = None) -> Prediction:
    """The prediction of a timed row."""
    network = gbit(float(row["nic_gbit"])) if row["nic_gbit"] else None
    cluster = Cluster(row["gpu_type"], int(row["gpus"]), inter_bytes_per_s=network)
    return predict(shape(row), layout(row), cluster, row["software"], efficiency=efficiency)


def _timed(row: dict[str, str]) -> Row:
    found = run(row)
    ends = sorted(float(in_unit(row, t)) for t in found.interval)
    return Row(
        row["id"], row["source"], "time", row["software"], row["gpu_type"], row["split"], row["unit"],
        float(row["published_value"]), float(in_unit(row, found.iteration_s)),
        float(found.iteration_s / seconds(row)) - 1, ends[0], ends[1], row["not_stated"],
    )  # fmt: skip


def _memory(row: dict[str, str]) -> Row:
    facts = software_facts(row["software"])
    # The figure's states are those of a stage without embedding, its activations those of the first one.
    states, total = "optimizer" in row["metric"], "total" in row["metric"]
    stage = "middle" if states else "worst" if total else "first"
    held = memory(shape(row), layout(row), stage=stage, **facts.memory)
    value = held.weights + held.gradients + held.states if states else held.total if total else held.activations
    value /= GIB
    return Row(
        row["id"], row["source"], "memory", row["software"], row["gpu_type"], row["split"], row["unit"],
        float(row["published_value"]), value, value / float(row["published_value"]) - 1, value, value,
        row["not_stated"], "same formula" in row["note"],
    )  # fmt: skip


def table() -> list[Row]:
    """Every published time, throughput and memory that has a layout, with its prediction."""
    found = []
    for row in published():
        if is_timed(row):
            found.append(_timed(row))
        elif row["unit"] == "GiB" and row["micro_batch"]:
            found.append(_memory(row))
    return found


def median_error(rows: Iterable[Row], keep: Callable[[Row], bool] = lambda row: True) -> float:
    """Median of the absolute errors of the rows to keep. ValueError where none is left."""
    errors = [abs(row.error) for row in rows if keep(row)]
    if not errors:
        raise ValueError("no row is left to take the median of")
    return float(np.median(errors))


def report() -> str:
    """The table as text, its medians, and what other tools print of themselves."""
    rows = table()
    lines = [f"{'run':27} {'split':9} {'published':>10} {'predicted':>10} {'unit':8} error of time or memory"]
    for row in rows:
        inside = "" if row.covered or row.kind == "memory" else "  outside its interval"
        inside += "  same formula" if row.same_formula else ""
        figures = f"{row.published:10.4g} {row.predicted:10.4g} {row.unit:8}"
        lines.append(f"{row.id:27} {row.split:9} {figures} {row.error:+7.1%}{inside}")
    groups = {f"time, {split}": [row for row in rows if row.kind == "time" and row.split == split] for split in SPLITS}
    memory_rows = [row for row in rows if row.kind == "memory"]
    groups["memory, measured"] = [row for row in memory_rows if not row.same_formula]
    groups["memory, same formula"] = [row for row in memory_rows if row.same_formula]
    for name, kept in groups.items():
        if kept:
            largest = max(abs(row.error) for row in kept)
            text = f"{name}: median {median_error(kept):.1%}, largest {largest:.1%}, {len(kept)} rows"
            if name in ("time, fit", "time, held-out"):
                text += f", {sum(row.covered for row in kept) / len(kept):.0%} within their interval"
            lines.append(text)
    return "\n".join(lines + [f"{tool}, as it prints: {what}: {error}" for tool, what, error in PEERS])


if __name__ == "__main__":
    print(report())
