"""Rules over sharding, pipelines and layouts of several dimensions."""

from __future__ import annotations

from tq.book.claims.formulas import Figure, Formula, Free, RangeFormula
from tq.book.claims.ledger import NOT_MEASURED, PRINTED, Claim, Finding, Results, Rule, found, table
from tq.book.claims.words import compare
from tq.systems import Layout, Transformer
from tq.systems.pipeline import bubble_share
from tq.systems.sharding import WEIGHTS, zero_bytes, zero_factor, zero_traffic

MEMORY = "impact-memory"
REPLICA = Layout(tp=8, pp=16)  # of the document, and 16 experts
EXPERTS = 16


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


LARGE = 20.0  # billion parameters from which on layouts are looked at


def _typical(column: str, low: int, high: int, change: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Half or more of the published models of 20 billion parameters or more that split so do it as claimed."""
        layouts = {
            (row["source"], row["model"]): int(row[column]) for row in table("published_runs.csv")
            if row[column].isdigit() and int(row[column]) > 1 and float(row["params_B"] or 0) >= LARGE
        }  # fmt: skip
        if not layouts:
            return Finding(NOT_MEASURED, "Not measured: no published layout is at hand.", change)
        inside = sum(low <= ways <= high for ways in layouts.values())
        ways = f"{low}" if low == high else f"{low} to {high}"
        text = (
            f"Of {len(layouts)} published models of 20 billion parameters or more that split so, {inside} do it {ways} "
            "ways (data/published_runs.csv)."
        )
        checks = (compare("share of the models", inside / len(layouts), 0.5, 1.0),)
        return found(claim, checks, text, change, "medium", "data/published_runs.csv", basis=PRINTED)

    return rule


def _experts() -> dict[str, Figure]:
    """How many times more GPUs a replica takes for its experts."""
    spread = Layout(tp=8, pp=16, dp=EXPERTS, ep=EXPERTS, global_batch=EXPERTS)
    return {
        "as the document counts": REPLICA.gpus * EXPERTS / REPLICA.gpus,
        "where experts are spread over data-parallel ranks": spread.gpus / (REPLICA.gpus * spread.dp),
    }


RULES: dict[str, Rule] = {
    "S1-005": Formula(
        "N * bytes a GPU / bytes of all states", lambda: {"weights, gradients and states": 64 / zero_factor(3, 64)},
        "Weights, gradients and optimizer states of a GPU shrink to 1/N; with one gathered layer of a 7B model on 64 "
        "GPUs {1:.2f}/N. Activations are not sharded by it.",
        "A layer so large that gathering it takes a fifth of the states.", "of 1/N", claimed=1.0, within=0.2,
        see=MEMORY,
        conditions=lambda: {"with a gathered layer of 7B": _gathered()},
    ),
    "S3-028": Formula(
        "(p - 1) / (v m + p - 1)", _bubbles,
        "Yes, a poor pipeline idles that much: eight stages idle {0:.0f} % of the time with eight micro-batches and "
        "{1:.0f} % with ten; with 64 it is {2:.0f} %, interleaved {3:.0f} %.",
        "Pipelines with less than eight stages.", "%", see=MEMORY,
    ),
    "S3-031": Formula(
        "16 over 4 + 12/n, 2 + 14/n",
        lambda: {"by optimizer states alone, on 1,024 GPUs": zero_factor(1, 1024)},
        "Optimizer states alone, of which the sentence speaks, give {0:.1f} times; eight takes gradients too, {1:.1f} "
        "times on 1,024 GPUs.",
        "A model whose optimizer states are seven eighths of its bytes.", "x", see=MEMORY,
        conditions=lambda: {"by optimizer states and gradients, on 1,024": zero_factor(2, 1024)},
    ),
    "S4-045": Formula(
        "500e9 * 2 bytes", lambda: {"in bf16": 500e9 * 2 / 1e12}, "500 billion weights of two bytes are {0:.0f} TB.",
        "Weights of another width than bf16 in a 500B model.", "TB",
    ),
    "S4-047": _typical("TP", 8, 8, "Published layouts of large models with other tensor parallelism."),
    "S4-048": _typical("PP", 8, 16, "Published layouts of large models with fewer or more pipeline stages."),
    "S4-050": Formula(
        "8 * 16 * 16", lambda: {"the product of the three degrees": float(REPLICA.gpus * EXPERTS)},
        "Eight times sixteen times sixteen are {0:,.0f}.", "Degrees of another product.", "GPUs",
    ),
    "S4-051": Formula(
        "25,000 / 2,048", lambda: {"replicas": 25000 / (REPLICA.gpus * EXPERTS)},
        "25,000 GPUs hold {0:.1f} replicas of 2,048; twelve of them leave 424 GPUs idle.",
        "A cluster of another size than 25,000 GPUs.", "replicas",
    ),
    "S4-052": Formula(
        "world / (TP * PP * DP)", _experts,
        "As its product has it, sixteen times; in Megatron-LM and DeepSeek expert ranks are taken out of the "
        "data-parallel ones, so that experts cost no further GPUs.",
        "A library whose expert ranks stand beside the data-parallel ones.", "x", confidence="medium",
    ),
    "S4-054": RangeFormula(
        "InfiniBand NDR and XDR, one port (data/hardware.csv, data/sources.csv)",
        lambda: {"NDR": 400.0, "XDR": 800.0}, "NDR has {0:.0f} Gbit/s a port and XDR {1:.0f}, as printed.",
        "A cluster whose nodes are joined at another rate.", "Gbit/s", confidence="medium", basis=PRINTED,
    ),
    "S4-060": Free(
        "16 / (4 + 12 / n)", of=lambda n: zero_factor(1, n), over=(2, 16_384), usual=64, name="GPUs, from", see=MEMORY,
        says="Sharded optimizer states save {0:.1f} times of the bytes on 64 GPUs, about four from {low:.0f} on and "
        "four in the limit. Activations stay.",
        would_change="Fewer than twelve GPUs, whose optimizer states are shared by too few.",
    ),
    "S4-061": Free(
        "16 / (2 + 14 / n)", of=lambda n: zero_factor(2, n), over=(2, 16_384), usual=64, name="GPUs, from", see=MEMORY,
        says="Sharded gradients too save {0:.1f} times on 64 GPUs, about eight from {low:.0f} on and eight in the "
        "limit. Activations stay.",
        would_change="Replicas on fewer GPUs than that, where gradients are not shared by enough of them.",
    ),
    "S4-062": RangeFormula(
        "two gathers of the weights and a scatter of the gradients, over an all-reduce: 3 S / 2 S",
        lambda: {"bytes a step": zero_traffic(3) / zero_traffic(0)},
        "{0:.1f} times the bytes of data parallelism, as weights are gathered for both passes.",
        "Weights that are kept between the passes.", "x", claimed=(1.01, 1e9), within=0.0,
    ),
}  # fmt: skip
