"""Published bubble rates beside those of the simulator and the search, and a map of layouts that the models choose."""

from __future__ import annotations

from typing import Any

from tq.systems import Cluster, Transformer, best, tables
from tq.systems.schedule_search import search
from tq.systems.schedules import Cost, interleaved, one_f_one_b, simulate, zb_h1, zb_h2

COLUMNS = (
    "model", "p", "m", "t_forward", "t_input", "t_weight", "t_transfer", "rate_1f1b", "rate_interleaved",
    "rate_zb_h1", "rate_zb_h2", "rate_zb_1p", "rate_zb_2p", "chunks", "kept",
)  # fmt: skip
HAND = {"1f1b": one_f_one_b, "zb_h1": zb_h1, "zb_h2": zb_h2}


def published() -> list[dict[str, str]]:
    """Rows of ``data/zero_bubble.csv``."""
    return tables.read(tables.folder() / "zero_bubble.csv", COLUMNS)


def rates(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Bubble rates of one row: {name: (ours, published)}, and what the search holds at most.

    Args:
        task: row (its number).
        device: "cpu".
    """
    row = published()[task["row"]]
    p, m, v, kept = int(row["p"]), int(row["m"]), int(row["chunks"]), float(row["kept"])
    forward, inputs, weights, transfer = (
        float(row[f"t_{kind}"]) for kind in ("forward", "input", "weight", "transfer")
    )  # fmt: skip
    cost = Cost(forward, inputs, weights, transfer)
    found = {name: (simulate(make(p, m), cost).bubble, float(row[f"rate_{name}"])) for name, make in HAND.items()}
    chunked = Cost(forward / v, inputs / v, weights / v, transfer)
    found["interleaved"] = simulate(interleaved(p, m, v), chunked).bubble, float(row["rate_interleaved"])
    timing = simulate(search(p, m, cost, 2 * p, kept=kept), cost, kept)
    found["search"] = timing.bubble, float(row["rate_zb_2p"])
    return {"rates": found, "held": max(timing.in_flight) / p, "makespan": timing.bubble_of_makespan, **row}


def chosen(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """The layout that ``tq.systems`` predicts to be the fastest.

    Args:
        task: model, gpu, gpus, batch, gbit (of the links between nodes; None: the cluster's).
        device: "cpu".
    """
    options = {} if task["gbit"] is None else {"inter_bytes_per_s": task["gbit"] * 1e9 / 8}
    cluster = Cluster(task["gpu"], task["gpus"], **options)
    layout, prediction = best(Transformer.preset(task["model"]), cluster, task["batch"])
    names = ("tp", "pp", "dp", "zero", "interleave")
    return {**{name: getattr(layout, name) for name in names}, "seconds": float(prediction.iteration_s)}
