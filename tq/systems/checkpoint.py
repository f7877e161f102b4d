"""Checkpoints: their bytes, the time to write one, how often to write, and what that and failures cost.

delta: seconds that a checkpoint stops the run. tau: seconds of work between two checkpoints. M: mean seconds between
failures. The first-order model loses delta / tau for writing and, a failure, half an interval and the restart. The
exact one takes failures as independent and exponentially distributed, during writing and restarting too.
Not modelled: writing in the background (only what stops the run is delta), failures while a checkpoint is damaged.

Sources: Young 1974, A first order approximation to the optimum checkpoint interval (CACM 17); Daly 2006, A higher order
estimate of the optimum checkpoint interval for restart dumps (FGCS 22), equations 20 and 37.
"""

from __future__ import annotations

import numpy as np

from tq.systems.arguments import Real, positive

MOMENT_BYTES = 8.0  # of a parameter: both fp32 moments of Adam


def checkpoint_bytes(
    parameters: Real, *, weights: float = 2.0, master: float = 4.0, gradients: float = 0.0,
    moments: float = MOMENT_BYTES,
) -> Real:  # fmt: skip
    """Bytes of a checkpoint, by bytes a parameter: 16-bit weights, fp32 master copy and both fp32 moments, 14 together.
    Gradients are not needed to go on; some accounts write them."""
    positive("parameters", parameters)
    each = {"weights": weights, "master": master, "gradients": gradients, "moments": moments}
    for name, width in each.items():
        positive(name, width, zero=True, finite=True)
    return parameters * sum(each.values())


def write_s(checkpoint: Real, bytes_per_s: Real) -> Real:
    """delta: seconds to write so many bytes. bytes_per_s: of the whole cluster to the place of its checkpoints."""
    positive("checkpoint", checkpoint)
    positive("bytes_per_s", bytes_per_s)
    return checkpoint / bytes_per_s


def young_interval_s(write_s: Real, mtbf_s: Real) -> Real:
    """tau = sqrt(2 delta M), the interval that loses least by the first-order model [Young 1974]."""
    positive("write_s", write_s)
    positive("mtbf_s", mtbf_s)
    return np.sqrt(2 * write_s * mtbf_s)


def daly_interval_s(write_s: Real, mtbf_s: Real) -> Real:
    """The interval by the exact model, to a fraction of a per cent of its cost [Daly 2006, equation 37]:
    sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + (delta / 2M) / 9) - delta below delta = 2 M, else M."""
    first = young_interval_s(write_s, mtbf_s)
    ratio = write_s / (2 * mtbf_s)
    return np.where(ratio < 1, first * (1 + np.sqrt(ratio) / 3 + ratio / 9) - write_s, mtbf_s)[()]


def lost_share(interval_s: Real, write_s: Real, mtbf_s: Real, restart_s: Real = 0.0) -> Real:
    """Share of the time that trains nothing by the first-order model, delta / tau + (tau / 2 + R) / M; above 1 where
    nothing would be left. Good while tau, delta and R are small against M."""
    positive("interval_s", interval_s)
    positive("write_s", write_s)
    positive("mtbf_s", mtbf_s)
    positive("restart_s", restart_s, zero=True)
    return write_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s


def expected_stretch(interval_s: Real, write_s: Real, mtbf_s: Real, restart_s: Real = 0.0) -> Real:
    """Expected wall time over time at work by the exact model [Daly 2006, equation 20]:
    M exp(R / M) (exp((tau + delta) / M) - 1) / tau."""
    positive("interval_s", interval_s)
    positive("write_s", write_s)
    positive("mtbf_s", mtbf_s)
    positive("restart_s", restart_s, zero=True)
    return mtbf_s * np.exp(restart_s / mtbf_s) * np.expm1((interval_s + write_s) / mtbf_s) / interval_s
