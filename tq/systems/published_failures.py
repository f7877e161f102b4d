"""Published failures, sizes and times of checkpoints beside what the models here said of them beforehand.

Three tables, committed in this order: what was published of each system (`data/published_failures.csv`), what the
models predict from it with nothing fitted, with a tolerance (`..._predicted.csv`), and what came out
(`..._outcomes.csv`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tq.systems import tables

_PREDICTED = ("id", "quantity", "predicted", "unit", "rule", "tolerance")
_OUTCOMES = ("id", "value", "low", "high", "unit", "quote")
_PUBLISHED = (
    "id", "system", "year", "quantity", "parameters", "gpus", "gpu_type", "days", "checkpoint_interval_s",
    "checkpoint_bytes_input", "bandwidth_bytes_per_s", "restart_s_input", "mtbf_h_input", "other_inputs",
    "source_title", "source_address", "where_in_source", "read",
)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """One prediction with what came out; ``low`` and ``high`` bound what was printed."""

    id: str
    system: str
    quantity: str
    unit: str
    predicted: float
    tolerance: str
    value: float
    low: float
    high: float

    @property
    def hit(self) -> bool:
        """Whether something that was printed lies within the tolerance: a factor, per cent, or an absolute distance."""
        if self.tolerance.startswith("factor "):
            factor = float(self.tolerance.removeprefix("factor "))
            least, most = self.predicted / factor, self.predicted * factor
        elif self.tolerance.endswith(" %"):
            part = float(self.tolerance.removesuffix(" %")) / 100
            least, most = self.predicted * (1 - part), self.predicted * (1 + part)
        else:
            least, most = self.predicted - float(self.tolerance), self.predicted + float(self.tolerance)
        return self.low <= most and least <= self.high


def predictions() -> list[Prediction]:
    """All that were made, in the order of the table.

    Raises:
        ValueError: where a table has other columns, or a prediction has no outcome.

    Example:
        >>> from collections import Counter
        >>> Counter(each.hit for each in predictions())[True]
        13
    """
    folder = tables.folder()
    systems = {row["id"]: row["system"] for row in tables.read(folder / "published_failures.csv", _PUBLISHED)}
    outcomes = {row["id"]: row for row in tables.read(folder / "published_failures_outcomes.csv", _OUTCOMES)}
    found = []
    for row in tables.read(folder / "published_failures_predicted.csv", _PREDICTED):
        out = outcomes.get(row["id"])
        if out is None:
            raise ValueError(f"published_failures_outcomes.csv has no {row['id']}")
        value = float(out["value"])
        low, high = float(out["low"] or value), float(out["high"] or value)
        found.append(
            Prediction(
                row["id"], systems[row["id"]], row["quantity"], row["unit"], float(row["predicted"]),
                row["tolerance"], value, low, high,
            )  # fmt: skip
        )
    return found
