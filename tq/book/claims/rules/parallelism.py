"""Rules over sharding, pipelines and layouts of several dimensions."""

from __future__ import annotations

from tq.book.claims.formulas import Figure, Formula, Free, RangeFormula
from tq.book.claims.ledger import MEASURED, NOT_MEASURED, PRINTED, Claim, Finding, Results, Rule, found, table
from tq.book.claims.words import Check, compare
from tq.systems import Layout, Transformer, hardware
from tq.systems.memory import activation_bytes
from tq.systems.pipeline import bubble_share
from tq.systems.sharding import WEIGHTS, zero_bytes, zero_factor, zero_traffic

CHAPTER, MEMORY = "parallelism", "impact-memory"
BUSY = 0.1  # idle share of a step up to which all devices count as busy
REPLICA = Layout(tp=8, pp=16)  # of the document, and 16 experts
EXPERTS = 16


def _gathered() -> float:
    """Bytes of a rank of 64 under ZeRO-3 with one gathered layer of 7B, over its bytes without."""
    held = zero_bytes(3, 64)
    return (held + WEIGHTS / Transformer.preset("llama2-7b").layers) / held


def _bubbles() -> dict[str, Figure]:
    return {
        "8 stages, 8 micro-batches": 100 * bubble_share(8, 8),
        "8 stages, 10 micro-batches": 100 * bubble_share(8, 10),
        "8 stages, 64 micro-batches": 100 * bubble_share(8, 64),
        "8 stages, 10 micro-batches, 4 chunks per stage": 100 * bubble_share(8, 10, 4),
    }


LARGE = 20.0  # billion parameters from which on layouts are looked at


def _typical(column: str, low: int, high: int, change: str) -> Rule:
    def rule(claim: Claim, results: Results) -> Finding:
        """Reproduced if at least half of the published models of 20 billion parameters or more that use this kind of
        parallelism have the claimed degree."""
        layouts = {
            (row["source"], row["model"]): int(row[column]) for row in table("published_runs.csv")
            if row[column].isdigit() and int(row[column]) > 1 and float(row["params_B"] or 0) >= LARGE
        }  # fmt: skip
        if not layouts:
            return Finding(NOT_MEASURED, "Not measured: no published layout is at hand.", change)
        inside = sum(low <= ways <= high for ways in layouts.values())
        ways = f"{low}" if low == high else f"{low} to {high}"
        kind, parts = {"TP": ("tensor", "ranks"), "PP": ("pipeline", "stages")}[column]
        text = (
            f"Of {len(layouts)} published models of 20B parameters or more with {kind} parallelism, {inside} use "
            f"{ways} {parts} (printed, data/published_runs.csv)."
        )
        checks = (compare("share of the models with the claimed degree", inside / len(layouts), 0.5, 1.0),)
        return found(claim, checks, text, change, "medium", "data/published_runs.csv", basis=PRINTED)

    return rule


def micro_batches(claim: Claim, results: Results) -> Finding:
    """Micro-batching holds if the idle share of a step on four ranks falls with each doubling from 4 to 16
    micro-batches, under GPipe and 1F1B; 1F1B keeps all devices busy if its idle share with 16 is at most a tenth."""
    idle = {name: [results(CHAPTER, f"idle/{name}/{m}") for m in (4, 8, 16)] for name in ("gpipe", "1f1b")}
    falls = all(each[0] > each[1] > each[2] for each in idle.values())
    checks = (
        Check("idle share falls from 4 over 8 to 16 micro-batches, under GPipe and 1F1B", falls),
        compare("idle share of 1F1B with 16 micro-batches", idle["1f1b"][2], most=BUSY),
    )
    text = (
        f"On four ranks whose stages wait instead of compute, 1F1B idles {idle['1f1b'][0]:.0%} of a step with 4 "
        f"micro-batches and {idle['1f1b'][2]:.0%} with 16. GPipe idles {idle['gpipe'][0]:.0%} and "
        f"{idle['gpipe'][2]:.0%}."
    )
    return found(claim, checks, text, "A pipeline with many more micro-batches than stages.", "high", basis=MEASURED)


def _experts() -> float:
    """How many times more GPUs a replica takes for experts that are spread over data-parallel ranks."""
    spread = Layout(tp=8, pp=16, dp=EXPERTS, ep=EXPERTS, global_batch=EXPERTS)
    return spread.gpus / (REPLICA.gpus * spread.dp)


def split_blocks(claim: Claim, results: Results) -> Finding:
    """Reproduced if every layout, tensor parallelism among them, on 2, 4 and 8 ranks ends as one process does, and each
    that has a formula for its bytes (tensor parallelism: two sums a block forward, two backward) sends just these."""
    same, layouts, small, smalls, agree, formulas = (
        results(CHAPTER, key) for key in
        ("proof/passed", "proof/layouts", "wire/small-equal", "wire/small", "bytes/agree", "bytes/formulas")
    )  # fmt: skip
    checks = (
        compare("share of layouts equal to one process", (same + small) / (layouts + smalls), 1.0),
        compare("share of layouts with the bytes of their formula", agree / formulas, 1.0),
    )
    text = (
        f"Split by columns and then by rows, a block is measured to give the losses and gradients of one process on 2, "
        f"4 and 8 ranks, among {layouts + smalls:.0f} layouts. Its sums end attention and the MLP: bytes agree exactly."
    )
    return found(claim, checks, text, "A block whose two halves are split in another way.", "high", basis=MEASURED)


TOKENS = 4096
OPTIMIZED = 2 + 2 + 2 + 4  # bytes per parameter: bf16 weights and gradients, two 8-bit moments, fp32 weights
REACHED = 0.4  # share of the peak that computing experts is taken to reach


def _seven_billion(checkpointed: bool) -> float:
    """GB of each of eight cards at the peak of a step of one sequence of 4,096 tokens with fused attention: sharded
    states, two gathered layers, what blocks keep, logits with their gradient and in fp32."""
    model = Transformer.preset("llama2-7b", seq=TOKENS)
    layer = sum(activation_bytes(model, Layout(), True))
    held = 2 * TOKENS * model.hidden * model.layers + layer if checkpointed else layer * model.layers
    gathered = 2 * WEIGHTS * model.parameters / model.layers
    return (OPTIMIZED * model.parameters / 8 + gathered + held + 8 * TOKENS * model.vocab) / 1e9


def _sixteen_over_eight(ports: int) -> float:
    """Times as long that an all-reduce of one size takes over 16 ranks as over 8 in a node, by its slowest link.
    ports: of a node that carry it; 0: all ranks are in one NVLink domain."""
    gpu = hardware.gpu("h100-80gb")
    return (15 / 16) / (7 / 8) * (gpu.nvlink_bytes_per_s / (ports * gpu.nic_bytes_per_s) if ports else 1.0)


def _exchange_share(inside: bool) -> float:
    """Per cent of the time that computing a layer of Mixtral 8x7B takes, by which its four exchanges over eight ranks
    last: each of two experts' inputs and outputs, forward and backward, in bf16."""
    model, gpu = Transformer.preset("mixtral-8x7b"), hardware.gpu("h100-80gb")
    assert model.moe is not None
    sent = 4 * model.moe.active * model.hidden * 2 * 7 / 8
    rate = gpu.nvlink_bytes_per_s if inside else gpu.nic_bytes_per_s
    return 100 * (sent / rate) / (6 * model.active_parameters / model.layers / (REACHED * gpu.peak_flops))


RULES: dict[str, Rule] = {
    "S1-005": Formula(
        "N * bytes per GPU / bytes of all states",
        lambda: {"weights, gradients and states": 64 / zero_factor(3, 64), "with a gathered layer of 7B": _gathered()},
        "Full sharding is computed to shrink weights, gradients and optimizer states per GPU to 1/N. With one gathered "
        "layer of 7B on 64 GPUs it is {1:.2f}/N; activations are not sharded.",
        "A statement that the gathered layer is left out.", "times 1/N", claimed=1.0, within=0.2, see=MEMORY,
    ),
    "S3-028": Formula(
        "(p - 1) / (v m + p - 1) for p stages, m micro-batches, v chunks per stage", _bubbles,
        "Eight pipeline stages are computed to idle {0:.0f}% of the time with eight micro-batches, {1:.0f}% with ten. "
        "With 64 micro-batches the idle time is {2:.0f}%, with ten interleaved ones {3:.0f}%.",
        "Pipelines with fewer than eight stages.", "%", see=MEMORY,
    ),
    "S3-031": Formula(
        "16 bytes per parameter over 4 + 12 / n (states), 2 + 14 / n (states and gradients)",
        lambda: {"by optimizer states alone, on 1,024 GPUs": zero_factor(1, 1024)},
        "Partitioning only the optimizer states, as claimed, is computed to cut memory {0:.1f} times on 1,024 GPUs. "
        "Partitioning the gradients too cuts memory {1:.1f} times.",
        "A model whose optimizer states are seven eighths of its bytes.", "x", see=MEMORY,
        conditions=lambda: {"by optimizer states and gradients, on 1,024": zero_factor(2, 1024)},
    ),
    "S4-045": Formula(
        "500e9 * 2 bytes", lambda: {"in bf16": 500e9 * 2 / 1e12},
        "500 billion weights of 2 bytes take {0:.0f} TB (computed).",
        "Weights of another width than bf16 in a 500B model.", "TB",
    ),
    "S4-047": _typical("TP", 8, 8, "Published layouts of large models with another degree of tensor parallelism."),
    "S4-048": _typical("PP", 8, 16, "Published layouts of large models with fewer or more pipeline stages."),
    "S4-050": Formula(
        "8 * 16 * 16", lambda: {"the product of the three degrees": float(REPLICA.gpus * EXPERTS)},
        "Eight times sixteen times sixteen GPUs are {0:,.0f} (computed).", "Degrees with another product.", "GPUs",
    ),
    "S4-051": Formula(
        "25,000 / 2,048", lambda: {"replicas": 25000 / (REPLICA.gpus * EXPERTS)},
        "25,000 GPUs hold {0:.1f} replicas of 2,048 (computed). Twelve replicas leave 424 GPUs idle.",
        "A cluster of another size than 25,000 GPUs.", "replicas",
    ),
    "S4-052": Formula(
        "GPUs / (TP * PP * DP)", lambda: {"where experts are spread over data-parallel ranks": _experts()},
        "In the document's product, experts multiply the GPUs per replica by {1:.0f} (computed). Megatron-LM and "
        "DeepSeek take expert ranks from the data-parallel ranks, so experts need no further GPUs.",
        "A library whose expert ranks come on top of the data-parallel ranks.", "x", confidence="medium",
        conditions=lambda: {"as the document counts": float(EXPERTS)},
    ),
    "S4-054": RangeFormula(
        "InfiniBand NDR and XDR, one port (data/hardware.csv, data/sources.csv)",
        lambda: {"NDR": 400.0, "XDR": 800.0},
        "InfiniBand NDR is printed with {0:.0f} Gbit/s per port, XDR with {1:.0f}. No link was measured here.",
        "A cluster whose nodes are joined at another rate.", "Gbit/s", confidence="medium", basis=PRINTED,
    ),
    "S4-060": Free(
        "16 / (4 + 12 / n)", of=lambda n: zero_factor(1, n), over=(2, 16_384), usual=64, name="GPU counts", see=MEMORY,
        says="Sharding the optimizer states is computed to cut the bytes per GPU {0:.1f} times on 64 GPUs, and at most "
        "four times. About four is reached from {low:.0f} GPUs on; activations are not sharded.",
        would_change="A job on fewer than twelve GPUs, too few to share the optimizer states.",
    ),
    "S4-061": Free(
        "16 / (2 + 14 / n)", of=lambda n: zero_factor(2, n), over=(2, 16_384), usual=64, name="GPU counts", see=MEMORY,
        says="Sharding gradients too is computed to cut the bytes per GPU {0:.1f} times on 64 GPUs, and at most eight "
        "times. About eight is reached from {low:.0f} GPUs on; activations are not sharded.",
        would_change="A job on fewer GPUs than that, too few to share the gradients.",
    ),
    "S4-062": RangeFormula(
        "two weight all-gathers and a gradient reduce-scatter over an all-reduce, 3 S / 2 S",
        lambda: {"bytes per step": zero_traffic(3) / zero_traffic(0)},
        "Full sharding is computed to send {0:.1f} times the bytes of data parallelism per step, because both passes "
        "all-gather the weights.",
        "A scheme that keeps the gathered weights between the passes.", "x", claimed=(1.01, 1e9), within=0.0,
    ),
    "S4-111": RangeFormula(
        "10 N / 8 + two gathered layers + inputs of blocks + a layer + logits, of one sequence of 4,096 tokens",
        lambda: {"with all four": _seven_billion(True)},
        "On eight cards of 24 GB a 7B model is computed to take {0:.0f} GB per card for one sequence of 4,096 tokens. "
        "Without gradient checkpointing it would take {1:.0f} GB.",
        "Longer sequences, or a framework that keeps more copies.", "GB per card", claimed=(0.0, 24.0), within=0.0,
        conditions=lambda: {"without checkpointing": _seven_billion(False)}, confidence="medium",
    ),
    "S4-119": split_blocks,
    "S4-120": RangeFormula(
        "(15/16) / (7/8) * NVLink over network, of one H100 or of a node of eight; substantial: at least twice as long",
        lambda: {
            "16 ways over nodes of 8, through one port": _sixteen_over_eight(1),
            "through all ports at once": _sixteen_over_eight(8),
        },
        "By bandwidth, sums over 16 ranks on two nodes of eight H100 are computed to take {0:.1f} times as long as "
        "over eight in one if they pass one port, {1:.1f} times through all eight; latency aside.",
        "Nodes of more than eight GPUs, where 16 ways stay inside.", "x", claimed=(2.0, 1e9), within=0.0,
        conditions=lambda: {"16 ways inside one NVLink domain": _sixteen_over_eight(0)}, confidence="low",
    ),
    "S4-121": micro_batches,
    "S4-122": RangeFormula(
        "4 * experts * hidden * 2 B * 7/8 / link over 6 * active / layers / (.4 peak); substantial: at least 10 %",
        lambda: {"over the network of 400 Gbit/s": _exchange_share(False), "over NVLink": _exchange_share(True)},
        "The exchanges of a Mixtral 8x7B layer over eight ranks are computed to last {0:.0f}% of its computing on H100 "
        "at 400 Gbit/s per GPU, and {1:.0f}% over NVLink, at 40% of the peak.",
        "Experts chosen near their tokens, or fewer per token.", "%", claimed=(10.0, 1e9), within=0.0,
        confidence="medium",
    ),
}  # fmt: skip
