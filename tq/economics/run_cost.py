"""A whole run: shape, layout, cluster and tokens -> hours, GPU-hours, dollars, electricity, carbon, each an interval.

The iteration comes from `tq.systems.predict`, whose 80 % interval is taken over; price and power vary within theirs,
and a Monte-Carlo over all of them gives 80 % intervals of the products. Failures are optional: checkpoints at the best
interval of the exact renewal model (`tq.systems.renewal`), failures while writing and restarting included.
Not counted: staff, failed experiments, evaluation, data, idle reservations.

An iteration that is predicted is not a run: restarts, evaluations and slow beginnings come on top.
`published_gpu_hours` is what published runs lead to expect, a wider interval whose coverage is known.
Sources: `tq.systems.checkpoint`, `tq.systems.failures`, `tq.systems.whole_runs`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tq.economics import energy
from tq.economics.intervals import Interval
from tq.economics.uncertainty import Bar, Uncertain, monte_carlo, sample, tornado
from tq.systems import Cluster, Compression, Layout, Prediction, Transformer, predict, renewal
from tq.systems.arguments import positive
from tq.systems.checkpoint import checkpoint_bytes, write_s
from tq.systems.failures import mtbf_s
from tq.systems.whole_runs import accelerator_hours

LEVEL = 0.8
FEW, LEFT = 20.0, 0.999  # lives that a checkpoint may take, and the waste beyond which a run would not end
CHECKPOINT_BYTES = checkpoint_bytes(1.0)  # a parameter


@dataclass(frozen=True)
class Failures:
    """write_bytes_per_s: of the whole cluster to the place of its checkpoints. restart_s: from an interruption to the
    first new step. gpu_hours_per_failure: None, what Llama 3 saw."""

    write_bytes_per_s: float
    restart_s: float = 600.0
    gpu_hours_per_failure: float | None = None

    def __post_init__(self) -> None:
        positive("write_bytes_per_s", self.write_bytes_per_s)
        positive("restart_s", self.restart_s, zero=True)
        if self.gpu_hours_per_failure is not None:
            positive("gpu_hours_per_failure", self.gpu_hours_per_failure)


@dataclass(frozen=True)
class Waste:
    """checkpoint_s: delta. interval_s: the best time between two. share: of the wall time that trains nothing."""

    checkpoint_s: float
    mtbf_s: float
    interval_s: float
    share: float


def waste(parameters: float, gpus: int, failures: Failures) -> Waste:
    """What failures and checkpoints cost at the best interval; ValueError where nothing would be left."""
    positive("parameters", parameters)
    positive("gpus", gpus)
    delta = write_s(checkpoint_bytes(parameters), failures.write_bytes_per_s)
    mtbf = mtbf_s(gpus, failures.gpu_hours_per_failure)
    tau = renewal.best_interval_s(float(delta), float(mtbf)) if delta < FEW * mtbf else float(mtbf)
    share = renewal.waste(tau, float(delta), float(mtbf), failures.restart_s) if delta < FEW * mtbf else 1.0
    if share > LEFT:
        raise ValueError(
            f"write_bytes_per_s={failures.write_bytes_per_s:g} and {gpus} GPUs: a checkpoint takes {delta:.0f} s and "
            f"something fails every {mtbf:.0f} s, so hardly any time is left to train"
        )
    return Waste(delta, mtbf, tau, share)


@dataclass(frozen=True)
class RunCost:
    """80 % intervals, of the iteration as predicted. usd: GPUs alone; storage_usd: checkpoints kept to the end.
    published_gpu_hours: of published whole runs. tornado: of usd, widest first."""

    prediction: Prediction
    iterations: float
    iteration_s: Interval
    hours: Interval
    gpu_hours: Interval
    usd: Interval
    kwh: Interval
    carbon_kg: Interval
    storage_usd: float
    published_gpu_hours: Interval
    waste: Waste | None
    tornado: list[Bar]


def as_interval(name: str, value: float | Interval) -> Interval:
    """A price or the like as an interval of positive numbers."""
    found = value if isinstance(value, Interval) else Interval.exactly(value)
    if found.low <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return found


def run_cost(
    shape: Transformer, layout: Layout, cluster: Cluster, tokens: float, usd_per_gpu_hour: float | Interval, *,
    software: str = "megatron-core", compression: Compression | None = None, region: str = "us",
    failures: Failures | None = None, checkpoints_kept: int = 0, usd_per_gb_month: float = 0.0,
    samples: int = 10_000, seed: int = 0,
) -> RunCost:  # fmt: skip
    """The cost of training on `tokens`. usd_per_gpu_hour: a price, or its spread (lowest, usual, highest).

    ValueError: what does not go together, an unknown GPU, software or region, a price or tokens not positive.
    """
    positive("tokens", tokens, finite=True)
    positive("checkpoints_kept", checkpoints_kept, zero=True)
    positive("usd_per_gb_month", usd_per_gb_month, zero=True)
    price = as_interval("usd_per_gpu_hour", usd_per_gpu_hour)
    watts = energy.gpu_interval_w(cluster.gpu)
    prediction = predict(shape, layout, cluster, software, compression)
    low, high = (float(end) for end in prediction.interval)
    iteration = Interval(low, float(prediction.iteration_s), high)
    iterations = tokens / prediction.tokens_per_iteration
    lost = waste(shape.parameters, cluster.gpus, failures) if failures else None
    scale = iterations / 3600 / (1 - lost.share if lost else 1.0)

    inputs = {
        "iteration_s": Uncertain.of(iteration, "quantiles"),
        "usd_per_gpu_hour": Uncertain.of(price, "halves"),
        "gpu_w": Uncertain.of(watts, "halves"),
    }

    def usd(iteration_s: NDArray[np.float64], usd_per_gpu_hour: NDArray[np.float64], **_: object) -> object:
        return iteration_s * scale * cluster.gpus * usd_per_gpu_hour

    drawn = sample(inputs, samples, seed)
    hours = drawn["iteration_s"] * scale
    kwh = hours * cluster.gpus * drawn["gpu_w"] / 1000

    def central(values: NDArray[np.float64]) -> Interval:
        return Interval(*(float(q) for q in np.quantile(values, [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2])))

    gigabytes = checkpoints_kept * checkpoint_bytes(shape.parameters) / 1e9
    per_kwh = energy.carbon_kg(1.0, region)
    wall = central(hours)
    whole = accelerator_hours(shape.active_parameters, tokens, cluster.gpu)
    return RunCost(
        prediction, iterations, iteration, wall, wall * cluster.gpus,
        monte_carlo(usd, inputs, samples, seed).interval(LEVEL), central(kwh), central(kwh) * per_kwh,
        gigabytes * usd_per_gb_month * wall.mid / 730, Interval(whole.low, whole.median, whole.high), lost,
        tornado(usd, {name: inputs[name] for name in ("iteration_s", "usd_per_gpu_hour")}),
    )  # fmt: skip


# What the saving of compression is not sure of: the link and the GPU beside what the step model takes them to reach,
# and the codec's share of the memory bandwidth on a GPU (not measured in this project). The ends are those of the
# reference job: data/reference_job.csv says where they come from.
SAVING_INPUTS = {
    "link": Uncertain(0.7, 1.0, 1.1, "halves"),
    "hbm_fraction": Uncertain(0.002, 0.25, 0.8, "halves"),
    "compute": Uncertain(0.8, 1.0, 1.1, "halves"),
}


@dataclass(frozen=True)
class CompressionSaving:
    """Share of the iteration that compression saves: 80 % interval, chance of being positive, what it hangs on."""

    saving: Interval
    chance: float
    tornado: list[Bar]


def compression_saving(
    shape: Transformer, layout: Layout, cluster: Cluster, compression: Compression, *,
    software: str = "megatron-core", inputs: dict[str, Uncertain] | None = None, samples: int = 10_000, seed: int = 0,
) -> CompressionSaving:  # fmt: skip
    """Iterations with and without compression, predicted over the same samples. inputs: None, `SAVING_INPUTS`."""
    inputs = SAVING_INPUTS if inputs is None else inputs
    if set(inputs) != set(SAVING_INPUTS):
        raise ValueError(f"inputs must be {', '.join(SAVING_INPUTS)}; got {', '.join(inputs)}")

    def saved(link: object, hbm_fraction: object, compute: object) -> object:
        shaken = replace(
            cluster,
            inter_bytes_per_s=np.asarray(link) * cluster.inter_bytes_per_s,
            peak_flops=np.asarray(compute) * cluster.peak_flops,
        )
        plain = predict(shape, layout, shaken, software)
        coded = predict(shape, layout, shaken, software, replace(compression, hbm_fraction=hbm_fraction))
        return 1 - coded.iteration_s / plain.iteration_s

    found = monte_carlo(saved, inputs, samples, seed)
    return CompressionSaving(found.interval(LEVEL), found.share(0.0), tornado(saved, inputs))
