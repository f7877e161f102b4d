"""A case on one network beside the same case on another, with and without the codec, when nothing is certain.

Forms: "plain"; "gradients": gradients leave as codes and what ZeRO-1 sends back stays as it is; "both": what comes back
is coded too, as if it were differences of weights. That is the best case; it is computed as a coded all-reduce, so its
memory is not that of the case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tq.economics.cases import Case
from tq.economics.intervals import Interval
from tq.economics.training_cost import LEVEL, SAVING_INPUTS
from tq.economics.uncertainty import monte_carlo
from tq.systems import Bits, Compression, predict
from tq.systems.checks import one_of

FORMS = ("plain", "gradients", "both")


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
    ``training_cost.SAVING_INPUTS``."""

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
