"""The verdict of every claim: rules over recorded full results (here), over arithmetic (`tq.book.arithmetic`), and, for
what nothing decides yet, the chapter that will.

A rule reads results through `Facts` and may use the formulas of `tq.quant`; what it read becomes its evidence. A result
that no full run has recorded gives "not measured". No rule reads the first guesses, and no verdict is typed in.

    for verdict in verdicts(): print(verdict.line())       # S0-001 partly — holds against fp32 ...
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from tq import Codec
from tq.book import (
    capacity_claims,
    communication_claims,
    cost_claims,
    distributed_claims,
    energy_claims,
    infrastructure_claims,
    ledger,
    memory_claims,
    offload_claims,
    paths,
    positioning_claims,
    saving_claims,
    source_claims,
    training_claims,
)
from tq.book.arithmetic import NF4_DQ, STORED, STORED_BF16, SUMS
from tq.book.ledger import (
    NOT_CHECKABLE,
    NOT_MEASURED,
    NOT_REPRODUCED,
    NOT_YET,
    PARTLY,
    REPRODUCED,
    Claim,
    Evidence,
    Facts,
    Finding,
    NotRecorded,
    Rule,
    Verdict,
)
from tq.quant import bounds

ROTATION, TENSORS, KERNELS = "rotation-and-codebook", "training-tensors", "kernels"

# --- rules over recorded results ------------------------------------------------------------------------------


def four_bit_momentum(claim: Claim, facts: Facts) -> Finding:
    """Four bits carry a momentum if a real one loses no more than a Gaussian does; a tenth is left for noise."""
    lost, gaussian = facts(TENSORS, "nmse/momentum/plain"), bounds.unbiased_nmse(4)
    ratio = lost / gaussian
    verdict = REPRODUCED if ratio <= 1.1 else PARTLY if ratio <= 2 else NOT_REPRODUCED
    smallest, largest = STORED_BF16, Codec(bits=4, block=64).bits_per_element
    return Finding(
        verdict,
        f"momenta of a real run lose {lost:.2%} of their energy in the code, Gaussian samples {gaussian:.2%}. "
        f"With scales it is {smallest:.4g} to {largest:.4g} bits a number, {STORED:.4g} by default. "
        "What that does to a loss is another claim",
        "Momenta of a larger or longer trained model that lose more than a Gaussian block does.",
        "medium",
        "D / (1 - D) for the 4-bit Lloyd-Max quantizer",
    )


def gaussian_after_rotation(claim: Claim, facts: Facts) -> Finding:
    """Two statements: real tensors become Gaussian (KS distance below .05, and below what it was), for every block; and
    the sphere's Beta law does not serve (its codebook and the Gaussian one differ by more than a per cent)."""
    kinds = {"gradient": "gradients", "momentum": "momenta", "activation": "activations"}
    before, after = ({k: facts(TENSORS, f"shape/{k}/ks-{when}") for k in kinds} for when in ("before", "after"))
    good = [kind for kind in kinds if after[kind] < 0.05 and after[kind] < before[kind]]
    spike, penalty = facts(ROTATION, "ks/spike/1-round"), facts(ROTATION, "mismatch-penalty")
    every_block, beta_fails = spike < 0.05, penalty > 0.01
    text = "mean distance to a Gaussian, before and after one round: "
    text += ", ".join(f"{name} {before[kind]:.3f} to {after[kind]:.3f}" for kind, name in kinds.items())
    if good:
        text = f"holds in the mean for {', '.join(kinds[kind] for kind in good)} ({text})"
    text += "" if every_block else f"; not for every block: a lone spike keeps {spike:.3f}"
    text += f"; as to the Beta law, at 128 elements exchanging its codebook for the Gaussian one costs {penalty:.2%}"
    whole = len(good) == len(kinds) and every_block and beta_fails
    verdict = REPRODUCED if whole else PARTLY if good else NOT_REPRODUCED
    change = "A kind of tensor that stays farther than 0.05 away, or blocks so short that the Beta law differs."
    return Finding(verdict, text, change, "medium", "KS distance < 0.05")


def error_against_uniform(claim: Claim, facts: Facts) -> Finding:
    """The reduction on heavy-tailed tensors, against a uniform grid with one scale a tensor and with one a block. It
    agrees where it reaches the claimed share or misses it by five points at most."""
    claimed = claim.number() / 100
    entries = {each: facts.entry(TENSORS, f"reduction-against-uniform/per-{each}") for each in ("tensor", "block")}
    shown = {each: f"with one scale a {each} ({entry['value']:.0%})" for each, entry in entries.items()}
    yes = [shown[each] for each, entry in entries.items() if entry["value"] >= claimed - 0.05]
    no = [shown[each] for each in entries if shown[each] not in yes]
    count = min(entry["n"] for entry in entries.values())
    verdict = PARTLY if yes and no else REPRODUCED if yes else NOT_REPRODUCED
    text = f"holds against a uniform grid {' and '.join(yes)}" if yes else "the reduction is smaller"
    text += ("; not " if yes else " ") + " or ".join(no) if no else ""
    text += f". Median over {count} heavy-tailed tensor{'s' if count != 1 else ''}"
    confidence = "medium" if count >= 20 else "low"
    return Finding(verdict, text, "Heavy-tailed tensors of another model, or another uniform grid.", confidence)


def tuned_on_one_card(claim: Claim, facts: Facts) -> Finding:
    """Unsourced; what arithmetic can add is that the 4-bit weights alone do not fit the card."""
    size = claim.number() * NF4_DQ / 8
    fits = "fit" if size <= 24 else "do not fit"
    why, change = REASONS["source"]
    text = (
        f"{why}; at {NF4_DQ:.4g} bits the weights alone take {size:.1f} GB and {fits} the card's 24 GB without offload"
    )
    return Finding(NOT_CHECKABLE, text, change)


def step_overhead(claim: Claim, facts: Facts) -> Finding:
    """Their step cannot be run; their kernel's own speed, put into the overhead of a step, must give the factor."""
    low, high = (float(part) for part in claim.value.split("-"))
    factors = {size: facts(KERNELS, f"step/report/{size.lower()}") for size in ("124M", "355M", "7B", "70B")}
    inside = [size for size, factor in factors.items() if low <= factor <= high]
    text = "the speed of the report's kernel gives " + ", ".join(f"{f:.1f}x for {s}" for s, f in factors.items())
    text += (
        f" at the tokens a replica that the chapter names; this codec adds {facts(KERNELS, 'step/measured-share'):.1%}"
    )
    text += " to a step on a CPU, so the factor belongs to that implementation. On a GPU ours is not measured"
    verdict = REPRODUCED if len(inside) == len(factors) else PARTLY if inside else NOT_REPRODUCED
    return Finding(verdict, text, "A step timed on a GPU.", "low", "(1.125 / r_e + 2 / r_d) eta P / (6 T)")


def overhead_target(claim: Claim, facts: Facts) -> Finding:
    """Reached by a device whose codec has the speed that a step of the chapter's models needs; in part by one on which
    the step that was measured stays below the target."""
    target = float(claim.value.strip("<=≤ "))
    share, needed = facts(KERNELS, "step/measured-share"), facts(KERNELS, "rate-for-1.2x")
    speed = facts(KERNELS, "round-trip")
    text = f"holds for the step that was measured, {1 + share:.3f}x; beside an H100 the codec needs up to {needed:.0f} "
    text += f"billion elements a second, and this device makes {speed:.2g} of a round trip"
    small = 1 + share <= target
    verdict = REPRODUCED if small and speed >= needed else PARTLY if small else NOT_REPRODUCED
    return Finding(verdict, text, "A step timed on a GPU.", "medium")


def bit_exact(claim: Claim, facts: Facts) -> Finding:
    """Six decimals are measured; bit-exact would mean no difference at all."""
    decimals, bytes_off = facts(KERNELS, "parity/decimals"), facts(KERNELS, "parity/bytes-that-differ")
    agree = decimals >= claim.number()
    text = f"our CPU kernel agrees with the reference to {decimals:.1f} decimals (rms), {bytes_off:.1e} of the code"
    text += " bytes differ (ties of thresholds): six decimals hold, bit-exact does not. Theirs is not published"
    verdict = REPRODUCED if agree and bytes_off == 0 else PARTLY if agree else NOT_REPRODUCED
    return Finding(verdict, text, "Their source.", "medium")


def kernel_over_python(claim: Claim, facts: Facts) -> Finding:
    """As many times the speed of plain PyTorch on the same GPU in both directions; in part if in one."""
    times = {verb: facts.on_gpu(KERNELS, f"over/{verb}/pytorch-reference") for verb in ("encode", "decode")}
    speed = facts.on_gpu(KERNELS, "round-trip")
    enough = [factor >= claim.number() for factor in times.values()]
    text = f"this project's kernels encode {times['encode']:.0f} and decode {times['decode']:.0f} times as fast as its "
    text += f"PyTorch reference on the same GPU, {speed:.3g} billion elements a second of a round trip; theirs is not "
    verdict = REPRODUCED if all(enough) else PARTLY if any(enough) else NOT_REPRODUCED
    return Finding(verdict, text + "published", "Their source.", "medium")


RULES: dict[str, Rule] = {
    **source_claims.RULES,  # first: a rule below that knows more replaces what a source alone says
    "S0-057": step_overhead,
    "T-018": step_overhead,
    "S0-060": overhead_target,
    "T-015": bit_exact,
    "T-013": kernel_over_python,
    "S1-018": tuned_on_one_card,
    "S0-012": four_bit_momentum,
    "T-001": gaussian_after_rotation,
    "T-002": error_against_uniform,
    **SUMS,
    **memory_claims.RULES,  # S0-002 is a sum as well; what was measured says more
    **training_claims.RULES,
    **positioning_claims.RULES,
    **cost_claims.RULES,
    **communication_claims.RULES,
    **saving_claims.RULES,
    **distributed_claims.RULES,
    **capacity_claims.RULES,
    **offload_claims.RULES,
    **infrastructure_claims.RULES,
    **energy_claims.RULES,
}

# --- what cannot be checked, and why --------------------------------------------------------------------------

REASONS = {
    "forecast": ("a forecast: nothing that can be run today decides it", "The day that it names."),
    "opinion": ("a judgement without a measurable quantity", "A statement of what would be measured."),
    "plan": ("a plan of its authors, not a statement about the world", "Its execution."),
    "limit": ("a limit that its authors state themselves", "A published run at that scale."),
    "source": ("no source is named, and none of the set-up is described", "A source or a set-up to repeat."),
    "advice": ("advice that depends on a workload which is not described", "A workload to measure it on."),
    "lost": ("the figure was lost from the document", "An undamaged copy."),
}
NOT_CHECKABLE_BECAUSE = {
    "opinion": "S1-025 S4-013",
    "limit": "S0-056",
    "plan": "S0-061 S0-062 S0-065",
    "source": "S1-021 S3-020 S3-021 S3-022 S3-035 S3-069",
    "forecast": "S1-026 S1-027 S1-028 S1-029 S1-033 S1-034 S1-035",
    "advice": "S3-033 S3-054 S3-058 S3-070",
    "lost": "S4-096",
}
_REASON = {claim: reason for reason, claims in NOT_CHECKABLE_BECAUSE.items() for claim in claims.split()}

# --- which chapter will decide the rest -----------------------------------------------------------------------

# seed and section -> chapter; single claims that belong elsewhere stand below
SECTIONS = {
    "S0": {
        "Title/Abstract": "compressed-allreduce", "Abstract": "impact-training-cost",
        "Exec summary": "impact-communication", "GPU pricing": "cost-structure",
        "Cost by scale": "cost-structure", "Impact 1": "impact-communication",
        "Impact 2": "impact-infrastructure", "Impact 3": "impact-training-cost", "Impact 4": "impact-memory",
        "Competitive": "compressed-adamw", "Industry": "industry-impact", "Risk": "risk-and-roadmap",
        "Roadmap": "risk-and-roadmap", "Conclusion": "compressed-adamw", "References": "conclusion",
    },
    "S1": {
        "Lead": "offload-and-single-gpu", "Deep dive": "offload-and-single-gpu", "Table": "offload-and-single-gpu",
        "Players": "offload-and-single-gpu", "Entity table": "offload-and-single-gpu", "Market": "industry-impact",
        "Risks": "offload-and-single-gpu", "Predictions": "industry-impact",
    },
    "S2": {"Key details": "checkpoints-and-failures", "Analysis": "checkpoints-and-failures"},
    "S3": {
        "Key numbers": "cost-structure", "Pattern": "network-topology", "Journey": "impact-training-cost",
        "Fat tree": "network-topology", "Product": "network-topology", "Sync": "parallelism",
        "Strategies": "industry-impact", "Memory": "cost-structure", "Innovations": "activation-memory",
        "Optimisation": "activation-memory", "Model selection": "offload-and-single-gpu", "Caching": "industry-impact",
        "Economics": "cost-structure", "Build/buy": "industry-impact", "Emerging": "industry-impact",
        "Framework": "industry-impact", "References": "conclusion",
    },
    "S4": {
        "Header": "conclusion", "s1": "cost-structure", "s2": "conclusion", "s3": "cost-structure", "s4": "parallelism",
        "s5": "activation-memory", "s6": "lab-e6", "s7": "cost-structure", "s8": "checkpoints-and-failures",
        "s9": "lab-e9", "s10": "lab-e9", "s11": "energy", "s12": "cost-structure", "s14": "compressed-allreduce",
        **{f"s16 E{i}": f"lab-e{i}" for i in range(1, 11)},
    },
    "T": {
        "Distribution": TENSORS, "Foundation": TENSORS, "EF": "compressed-adamw", "v_t": "compressed-adamw",
        "v3": "compressed-adamw", "Activation": "activation-memory", "Communication": "compressed-allreduce",
        "Kernels": "kernels", "AMP": "compressed-adamw", "Overhead": "compressed-adamw",
        "Limits": "data-parallel-training", "Drop-in": "compressed-adamw",
    },
}  # fmt: skip
ELSEWHERE = {
    "compressed-adamw": "S0-058 T-009 T-012",
    "loss-at-scale": "S0-003 S0-064 T-006 T-007 T-008 T-010",
    "compressed-allreduce": "S0-001 S0-017 S3-029",
    "data-parallel-training": "S0-059 S4-046",
    "activation-memory": "S0-002 S0-014 S1-010 S1-011 S3-027",
    "optimizer-state": "S1-012 S1-013 S4-066 S4-067 S4-068",
    "kernels": "S0-057 S0-060",
    "parallelism": "S1-005 S4-060 S4-061 S4-062 S4-047",
    "impact-communication": "S0-004 S0-005 S0-006 S0-015 S0-016 S3-003 S3-026 S3-034",
    "impact-training-cost": "S0-018 S0-019 S3-030",
    "impact-memory": "S0-009 S0-010",
    "competitive-positioning": "S0-011",
    "energy": "S0-055 S4-043",
    "offload-and-single-gpu": "S1-024 S3-036 S3-052",
    "cost-structure": "S1-014 S1-016 S3-004 S4-033 S4-034 S4-042 S4-044 S4-084 S4-095 S4-097",
    TENSORS: "S0-012",
    "lab-e4": "S3-051 S4-028 S4-065",
    "lab-e7": "S4-074",
    "lab-e9": "S3-062 S3-063 S3-068 S4-064",
}
_ELSEWHERE = {claim: chapter for chapter, claims in ELSEWHERE.items() for claim in claims.split()}


def chapter_of(claim: Claim) -> str:
    """The chapter that decides the claim, or will; a claim that no chapter takes raises."""
    seed = "T" if claim.seed == "T" else f"S{claim.seed}"
    chapter = _ELSEWHERE.get(claim.id) or SECTIONS.get(seed, {}).get(claim.section)
    if chapter is None:
        raise KeyError(f"{claim.id}: no chapter takes {seed} {claim.section!r}; add it to SECTIONS or ELSEWHERE")
    return chapter


def _undecided(claim: Claim, chapter: str) -> Finding:
    """Without a rule: not checkable in principle, or waiting for a chapter, or for a GPU run of one that exists."""
    if claim.kinds == ("none",):
        why, change = REASONS[_REASON[claim.id]]
        return Finding(NOT_CHECKABLE, why, change)
    exists = paths.notebook(chapter).is_file() or (paths.root() / "book" / f"{chapter}.md").is_file()
    if exists and "gpu" in claim.kinds:
        return Finding(NOT_MEASURED, f"{chapter} has recorded nothing on a GPU that decides it", "Such a recording.")
    text = f"{chapter} does not decide it yet" if exists else f"to be decided by {chapter}, which is not written yet"
    return Finding(NOT_YET, text, "That chapter.")


def judge(claim: Claim, facts: Facts) -> Verdict:
    """The verdict of one claim."""
    chapter, rule = chapter_of(claim), RULES.get(claim.id)
    if rule is None:
        found = _undecided(claim, chapter)
        return Verdict(claim.id, found.verdict, found.condition, "", (), found.would_change, chapter)
    facts.read.clear()
    try:
        found = rule(claim, facts)
    except NotRecorded as missing:
        gpu = " --device cuda" if missing.device == "cuda" else ""
        change = f"The full run: python -m tq.book reproduce {missing.chapter} --profile full{gpu}."
        return Verdict(claim.id, NOT_MEASURED, str(missing), "", (), change, chapter)
    formula = (Evidence(found.formula, found.see),) if found.formula else ()
    evidence = (*facts.evidence(), *formula)
    return Verdict(claim.id, found.verdict, found.condition, found.confidence, evidence, found.would_change, chapter)


def verdicts(fresh: bool = False) -> list[Verdict]:
    """Every claim judged, in the order of `data/claims.csv`. fresh: a fresh full run goes before the committed one."""
    facts = Facts(fresh)
    return [judge(claim, facts) for claim in ledger.claims()]


def report(verdict: str | None = None, seed: str | None = None, ids: Sequence[str] = (), as_json: bool = False) -> str:
    """The chosen verdicts, a line each, and how many of each there are; or the same as JSON. An unknown id raises."""
    every = {claim.id: (claim, judged) for claim, judged in zip(ledger.claims(), verdicts(), strict=True)}
    unknown = [name for name in ids if name not in every]
    if unknown:
        raise ValueError(f"id={unknown[0]!r}: no such claim; accepted are S0-001 and the other ids of data/claims.csv")
    chosen = [
        (claim, judged)
        for name, (claim, judged) in every.items()
        if (not ids or name in ids) and verdict in (None, judged.verdict) and seed in (None, claim.seed)
    ]
    if as_json:
        rows = [{**asdict(claim), **asdict(judged)} for claim, judged in chosen]
        return json.dumps(rows, indent=1, ensure_ascii=False)
    found = ", ".join(f"{count} {name}" for name, count in ledger.counts(j for _, j in chosen).items())
    return "\n".join([*(judged.line() for _, judged in chosen), f"{len(chosen)} of {len(every)} claims: {found}"])


def record() -> str:
    """Brings `data/verdicts.json` in step with today's rules and results; says what changed."""
    changes = ledger.record(verdicts())
    lines = [f"{v.id}: {was or 'new'} -> {v.verdict}" for v, was in changes]
    return "\n".join([*lines, f"{len(changes)} changed; data/verdicts.json is in step"])
