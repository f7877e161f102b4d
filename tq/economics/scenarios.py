"""The runs that the chapters on costs come back to, and what compressed gradients save of them when nothing is certain.

`CASES` are shapes as published on layouts of this book's choice: the whitepaper names models and numbers of GPUs only.
`step_saving` is the closed form of `tq.economics.breakeven` over physical inputs, so that it takes arrays of samples:
data-parallel traffic on one flat network and the codec, nothing else. Both phases, reduce-scatter and all-gather, are
compressed, which is the best case: under ZeRO the all-gather carries weights, and those stay as they are.

`step_s` and `relative` put a case on one network beside the same case on another. Forms: "plain"; "gradients": the
reduce-scatter of gradients is compressed and ZeRO-1's all-gather stays as it is; "both": the all-gather is compressed
too, as if it carried differences of weights. That is the best case; it is computed as a compressed all-reduce, so its
memory is not that of the case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tq.economics import breakeven
from tq.economics.breakeven import Array, Step
from tq.economics.intervals import Interval
from tq.economics.run_cost import LEVEL, SAVING_INPUTS
from tq.economics.uncertainty import Uncertain, monte_carlo
from tq.systems import Bits, Cluster, Compression, Layout, Prediction, Transformer, predict
from tq.systems.arguments import one_of

REPORT_PER_S = 1.28e9  # numbers/s each way, from the report's round trip of 16 million in 26.21 ms (T-013)
FAST_PER_S = 100e9  # what a kernel near the memory bandwidth of today's GPUs would do; not measured on one
FORMS = ("plain", "gradients", "both")
BACKWARD = 2 / 3  # share of the computing time that is backward, and can hide an exchange


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


def codec_s(numbers: ArrayLike, replicas: ArrayLike, elements_per_s: ArrayLike) -> Array:
    """Seconds of coding in a compressed all-reduce: everything encoded and decoded, the rank's share once more encoded,
    the mean decoded. elements_per_s: of encoding and decoding alike; inf takes no time."""
    passes = 1 + 1 / np.asarray(replicas, float) + 2
    return np.asarray(numbers, float) * passes / np.asarray(elements_per_s, float)


def overhead(step: Step, elements_per_s: ArrayLike) -> Array:
    """k: the rest of the step with the codec over that without."""
    return 1 + codec_s(step.numbers, step.replicas, elements_per_s) / np.asarray(step.compute_s, float)


def step_saving(
    tokens_per_step: ArrayLike, tflops: ArrayLike, reach: ArrayLike, overlap: ArrayLike, elements_per_s: ArrayLike, *,
    link_gbit: ArrayLike, base_bits: float = 16, parameters: float = 70e9, gpus: float = 256,
    gpus_per_replica: float = 8,
) -> Array:  # fmt: skip
    """Share of the step that 4-bit codes save. tflops: of a GPU without the exchange; reach: share of the link's rate
    that a collective gets; overlap: share of the computing time that can hide the exchange."""
    step = Step.of(parameters, tokens_per_step, gpus, gpus_per_replica, tflops, base_bits)
    coding = codec_s(step.numbers, step.replicas, elements_per_s)
    rate = np.asarray(link_gbit, float) * np.asarray(reach, float)
    return step.saving(rate, breakeven.ratio(base_bits=base_bits), coding, overlap)


def saving_inputs(name: str) -> dict[str, Uncertain]:
    """What the saving of a case is not sure of, whatever its link. Its speed is predicted, with the model's 80 %
    interval; the others are assumptions: batches between Llama 2's and Llama 3's, a collective's share of the link,
    none to all of the backward pass as cover, a codec between the report's and one near the memory bandwidth."""
    found = case(name)
    prediction = found.predict()
    alone = float(prediction.iteration_s - prediction.parts["dp_exposed"])
    flops = 6 * found.shape.parameters * prediction.tokens_per_iteration
    tflops = flops / alone / found.layout.gpus / 1e12
    low, high = (float(end / prediction.iteration_s) for end in prediction.interval)
    return {
        "tokens_per_step": Uncertain(2e6, 4e6, 16e6, "loguniform"),
        "tflops": Uncertain(tflops / high, tflops, tflops / low, "quantiles"),
        "reach": Uncertain(0.6, 0.85, 0.95),
        "overlap": Uncertain(0.0, BACKWARD / 2, BACKWARD, "uniform"),
        "elements_per_s": Uncertain(REPORT_PER_S, (REPORT_PER_S * FAST_PER_S) ** 0.5, FAST_PER_S, "loguniform"),
    }


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
