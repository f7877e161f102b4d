"""The published shapes that the chapters on costs come back to, on layouts of this book's choice, and one case on two
networks by the step model of `tq.systems`.

The 70B case is the reference job of `tq.economics.savings` (a test compares the two); `fields` puts another case into
that closed form. `step_s` and `relative` are for what it has no terms for: traffic of experts and of tensor parallelism
between nodes. Forms: "plain"; "gradients": the reduce-scatter of gradients is compressed and ZeRO-1's all-gather stays
as it is; "both": the all-gather is compressed too, as if it carried differences of weights. That is the best case; it
is computed as a compressed all-reduce, so its memory is not that of the case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tq.economics import breakeven, savings
from tq.economics.breakeven import Array, Step
from tq.economics.intervals import Interval
from tq.economics.run_cost import LEVEL, SAVING_INPUTS
from tq.economics.uncertainty import monte_carlo
from tq.systems import Bits, Cluster, Compression, Layout, Prediction, Transformer, predict
from tq.systems.arguments import one_of

REPORT_PER_S = 1.28e9  # numbers/s each way, from the report's round trip of 16 million in 26.21 ms (T-013)
CODEC_PER_S = savings.job()["codec_g"].value * 1e9  # that of the reference job; not measured on a GPU
FORMS = ("plain", "gradients", "both")


@dataclass(frozen=True)
class Case:
    """A model on a layout and a GPU type, and the tokens of a whole run."""

    shape: Transformer
    layout: Layout
    tokens: float
    gpu: str = "h100-80gb"

    def cluster(self, network: str | None = None) -> Cluster:
        return Cluster(self.gpu, self.layout.gpus, network)

    def predict(self, network: str | None = None, **more: object) -> Prediction:
        """One iteration under Megatron-Core; more: as ``tq.systems.predict`` takes it."""
        return predict(self.shape, self.layout, self.cluster(network), **more)  # type: ignore[arg-type]


def _layout(tp: int, pp: int, dp: int, batch: int, *, interleave: int = 1, ep: int = 1, cp: int = 1) -> Layout:
    return Layout(
        tp=tp, pp=pp, dp=dp, global_batch=batch, sequence_parallel=tp > 1, interleave=interleave, zero=1, ep=ep, cp=cp
    )


#: Batches of 4 million tokens (405B: 16 million). Tokens: Llama 2's for 7B, 20 a parameter for 70B, GPT-3's for 175B.
CASES: dict[str, Case] = {
    "7b": Case(Transformer.preset("llama2-7b"), _layout(1, 1, 64, 1024), 2e12),
    "70b": Case(Transformer.preset("llama2-70b"), _layout(8, 1, 32, 1024), 1.4e12),
    "175b": Case(Transformer.preset("gpt3-175b"), _layout(8, 8, 16, 2048, interleave=4), 0.3e12),
    "405b": Case(Transformer.preset("llama3-405b"), _layout(8, 16, 64, 2048, interleave=2, cp=2), 15.6e12),
    "70b-tp16": Case(Transformer.preset("llama2-70b"), _layout(16, 1, 16, 1024), 1.4e12),
    "8x22b-ep8": Case(Transformer.preset("mixtral-8x22b"), _layout(4, 2, 32, 1024, ep=8), 2e12),
}


def case(name: str) -> Case:
    """A case by its name; ValueError lists the names."""
    if name not in CASES:
        raise ValueError(f"case={name!r}: accepted are {', '.join(CASES)}")
    return CASES[name]


def fields(name: str) -> dict[str, float]:
    """A case as fields of `tq.economics.savings`: its size, batch and layout, its speed as the step model predicts it
    with the 80 % interval of that, and the share of the compute that one micro-batch is. Interleaved stages hide behind
    one chunk. ValueError: no such case, or one with experts, whose exchange is not that of its compute."""
    found = case(name)
    if found.shape.moe is not None:
        raise ValueError(f"case={name!r} has experts: the closed form is for dense models")
    layout, prediction = found.layout, found.predict()
    alone = float(prediction.iteration_s - prediction.parts["dp_exposed"])
    tokens, cover = float(prediction.tokens_per_iteration), 1 / (layout.micro_batches * layout.interleave)
    tflops = 6 * found.shape.parameters * tokens / alone / layout.gpus / 1e12
    low, high = (float(end / prediction.iteration_s) for end in prediction.interval)
    return {
        "parameters_b": found.shape.parameters / 1e9, "tokens_b": found.tokens / 1e9, "batch_m": tokens / 1e6,
        "gpus": float(layout.gpus), "gpus_per_replica": float(layout.tp * layout.pp),
        "tflops": tflops, "tflops_low": tflops / high, "tflops_high": tflops / low,
        "overlap": cover, "overlap_high": cover,
    }  # fmt: skip


def codec_s(step: Step, elements_per_s: ArrayLike) -> Array:
    """Seconds of coding in a step on each GPU, encoding and decoding at the same speed; inf takes no time."""
    passes = savings.passes(float(step.replicas), step.weight_bits is not None)
    return passes * np.asarray(step.numbers, float) / np.asarray(elements_per_s, float)


def overhead(step: Step, elements_per_s: ArrayLike) -> Array:
    """k: the rest of the step with the codec over that without."""
    return 1 + codec_s(step, elements_per_s) / np.asarray(step.compute_s, float)


def claimed_saving(f: ArrayLike, k: ArrayLike, *, base_bits: float | None = None) -> Array:
    """Amdahl's law in the whitepaper's terms: base_bits None, its factor of 8; else what is stored, with scales."""
    r = 8.0 if base_bits is None else breakeven.ratio(base_bits=base_bits)
    return breakeven.saving(f, r, k)


# --- the same case on two networks ---


def step_s(case: Case, tier: str, form: str, *, link: Any = 1.0, hbm_fraction: Any = 0.5, compute: Any = 1.0) -> Any:
    """Seconds of a step on a network tier. link, compute: factors on the link's rate and on the GPU's peak; arrays of
    samples are accepted. ValueError: an unknown tier or form."""
    one_of("form", form, FORMS)
    cluster = case.cluster(tier)
    cluster = replace(
        cluster, inter_bytes_per_s=link * cluster.inter_bytes_per_s, peak_flops=compute * cluster.peak_flops
    )
    layout = replace(case.layout, zero=0) if form == "both" else case.layout
    coded = None if form == "plain" else Compression(gradients=Bits(4), hbm_fraction=hbm_fraction)
    return predict(case.shape, layout, cluster, compression=coded).iteration_s


def relative(
    case: Case, tier: str, form: str, to_tier: str, to_form: str = "plain", *, samples: int = 10_000, seed: int = 0
) -> Interval:
    """80 % interval of a step's time over that of another network and form, both from the same samples of
    ``run_cost.SAVING_INPUTS``."""

    def ratio(**drawn: Any) -> Any:
        return step_s(case, tier, form, **drawn) / step_s(case, to_tier, to_form, **drawn)

    return monte_carlo(ratio, SAVING_INPUTS, samples, seed).interval(LEVEL)


def payback_years(fabric_usd: float, slower: float, usd_per_gpu_hour: float) -> float | None:
    """Years of use after which a fabric at so many dollars a GPU has paid for itself, if steps take `slower` times as
    long without it; None where they do not take longer. ValueError: a price that is not positive."""
    for name, value in (("fabric_usd", fabric_usd), ("slower", slower), ("usd_per_gpu_hour", usd_per_gpu_hour)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    return fabric_usd / (8760 * (1 - 1 / slower) * usd_per_gpu_hour) if slower > 1 else None
