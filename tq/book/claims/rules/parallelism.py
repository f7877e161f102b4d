"""Rules over sharding, pipelines and layouts of several dimensions."""

from __future__ import annotations

import math

from tq.book.claims.formulas import TIGHT, WEIGHTS_ALONE, Figure, Formula, Readings
from tq.book.claims.ledger import Rule
from tq.systems import Layout, Transformer
from tq.systems.pipeline import bubble_share
from tq.systems.sharding import WEIGHTS, zero_bytes, zero_factor, zero_traffic

MEMORY = "impact-memory"
REPLICA = Layout(tp=8, pp=16)  # of the document, and 16 experts
EXPERTS = 16


def _zeros(stage: int) -> Readings:
    ranks = {"on 8 GPUs": 8.0, "on 64": 64.0, "on 1,024": 1024.0, "in the limit": math.inf}
    return lambda: {label: zero_factor(stage, n) for label, n in ranks.items()}


def _gathered() -> float:
    """Bytes of a rank of 64 under ZeRO-3 with one gathered layer of 7B, over what it holds without."""
    held = zero_bytes(3, 64)
    return (held + WEIGHTS / Transformer.preset("llama2-7b").layers) / held


def _bubbles() -> dict[str, Figure]:
    return {
        "8 stages and 8 micro-batches": 100 * bubble_share(8, 8),
        "8 and 10": 100 * bubble_share(8, 10),
        "8 and 64": 100 * bubble_share(8, 64),
        "8 and 10 with 4 chunks a stage": 100 * bubble_share(8, 10, 4),
    }


def _experts() -> dict[str, Figure]:
    """How many times more GPUs a replica takes for its experts."""
    spread = Layout(tp=8, pp=16, dp=EXPERTS, ep=EXPERTS, global_batch=EXPERTS)
    return {
        "as the document counts": REPLICA.gpus * EXPERTS / REPLICA.gpus,
        "where experts are spread over data-parallel ranks": spread.gpus / (REPLICA.gpus * spread.dp),
    }


RULES: dict[str, Rule] = {
    "S1-005": Formula(
        "N * bytes a GPU / bytes of all states",
        lambda: {
            "for weights, gradients and states": 64 / zero_factor(3, 64), "with a gathered layer of 7B": _gathered()
        },
        "of 1/N", claimed=1.0, see=MEMORY, note="Activations are not sharded by it.",
    ),
    "S3-028": Formula("(p - 1) / (v m + p - 1)", _bubbles, "%", see=MEMORY),
    "S3-031": Formula(
        "16 over 4 + 12/n, 2 + 14/n, 16/n",
        lambda: {f"by stage {stage} on 64 GPUs": zero_factor(stage, 64) for stage in (1, 2, 3)}, "x", see=MEMORY,
    ),
    "S4-045": Formula(
        "500e9 * 2 bytes", lambda: {"in bf16": 500e9 * 2 / 1e12}, "TB", TIGHT, note=WEIGHTS_ALONE,
    ),
    "S4-050": Formula(
        "8 * 16 * 16", lambda: {"as the product of the three degrees": float(REPLICA.gpus * EXPERTS)}, "GPUs", TIGHT
    ),
    "S4-051": Formula(
        "floor(25,000 / 2,048)", lambda: {"in whole replicas": float(25000 // (REPLICA.gpus * EXPERTS))}, "replicas",
        TIGHT, note=f"{25000 % (REPLICA.gpus * EXPERTS)} GPUs stay idle.",
    ),
    "S4-052": Formula(
        "world / (TP * PP * DP)", _experts, "x", TIGHT,
        note="In Megatron-LM and DeepSeek the expert ranks are taken out of the data-parallel ones.",
        confidence="medium",
    ),
    "S4-060": Formula("16 / (4 + 12 / n)", _zeros(1), "x", see=MEMORY, note="Of the states; activations stay."),
    "S4-061": Formula("16 / (2 + 14 / n)", _zeros(2), "x", see=MEMORY, note="Of the states; activations stay."),
    "S4-062": Formula(
        "two gathers of the weights and a scatter of the gradients, over an all-reduce: 3 S / 2 S",
        lambda: {"as bytes a step": zero_traffic(3) / zero_traffic(0)}, "x", TIGHT,
    ),
}  # fmt: skip
