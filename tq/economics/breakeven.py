"""When compression of gradients pays: Amdahl's law with a compression ratio and an overhead. Everything broadcasts.

f  share of the step that is exposed data-parallel communication, before compression: 0 <= f < 1
r  compression ratio: stored bits before over after, scales included, at least 1
k  overhead: factor on the rest of the step (the codec's work as the step feels it), at least 1

    with / without = (1 - f) k + f / r          speed-up S is its inverse, the saving 1 minus it

f must be the traffic that is compressed: tensor-, pipeline- and expert-parallel traffic belongs to the rest, and so
does latency, which compression leaves as it is.
Sources: Amdahl 1967; a ring sends 2 (n - 1) / n of the data (Thakur et al. 2005); 6 N D FLOPs (Kaplan et al. 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

GBIT = 1e9 / 8  # bytes


def _array(name: str, value: ArrayLike, low: float, high: float = np.inf, *, open_high: bool = False) -> Array:
    """value as floats within [low, high], or [low, high) with `open_high`; NaN never is."""
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be a number or an array of numbers, got {value!r}")
    array = array.astype(float)
    good = (array >= low) & ((array < high) if open_high else (array <= high))
    if not np.all(good):
        bound = f"at least {low:g}" if high == np.inf else f"between {low:g} and {high:g}"
        bound += ", without that end" if open_high and high < np.inf else ""
        raise ValueError(f"{name} must be {bound}, got {array if array.ndim == 0 else array[~good].flat[0]}")
    return array


def _positive(name: str, value: ArrayLike) -> Array:
    array = _array(name, value, 0.0)
    if not np.all(array > 0):
        raise ValueError(f"{name} must be positive, got {value!r}")
    return array


def share(value: ArrayLike, name: str = "share") -> Array:
    """A share of the step within [0, 1)."""
    return _array(name, value, 0.0, 1.0, open_high=True)


# --- the ratio ------------------------------------------------------------------------------------------------


def stored_bits(bits: ArrayLike, block: ArrayLike = 128, scale_bits: ArrayLike = 32) -> Array:
    """Bits a number takes with its share of the block's scale: 4.25 for 4 bits, blocks of 128, an fp32 scale."""
    return _positive("bits", bits) + _array("scale_bits", scale_bits, 0.0) / _array("block", block, 1.0)


def ratio(bits: ArrayLike = 4, block: ArrayLike = 128, scale_bits: ArrayLike = 32, base_bits: ArrayLike = 32) -> Array:
    """Compression ratio against numbers of `base_bits`: 7.53 against fp32 for the defaults, 3.76 against bf16."""
    found = _positive("base_bits", base_bits) / stored_bits(bits, block, scale_bits)
    if not np.all(found >= 1):
        raise ValueError(f"bits={bits!r} with scales takes more than base_bits={base_bits!r}: nothing is compressed")
    return found


# --- Amdahl ---------------------------------------------------------------------------------------------------


def relative_time(f: ArrayLike, r: ArrayLike, k: ArrayLike = 1.0) -> Array:
    """Step time with compression over that without."""
    return (1 - share(f, "f")) * _array("k", k, 1.0) + share(f, "f") / _array("r", r, 1.0)


def speedup(f: ArrayLike, r: ArrayLike, k: ArrayLike = 1.0) -> Array:
    return 1 / relative_time(f, r, k)


def saving(f: ArrayLike, r: ArrayLike, k: ArrayLike = 1.0) -> Array:
    """Share of time, hence of GPU-hours and dollars, that is saved; negative where compression costs."""
    return 1 - relative_time(f, r, k)


def breakeven_overhead(f: ArrayLike, r: ArrayLike) -> Array:
    """The k at which nothing is saved: (1 - f / r) / (1 - f)."""
    f = share(f, "f")
    return (1 - f / _array("r", r, 1.0)) / (1 - f)


def breakeven_share(k: ArrayLike, r: ArrayLike) -> Array:
    """The f from which compression pays at overhead k: (k - 1) / (k - 1 / r)."""
    return share_for(0.0, r, k)


def share_for(wanted: ArrayLike, r: ArrayLike, k: ArrayLike = 1.0) -> Array:
    """The f that a wanted saving needs: (wanted + k - 1) / (k - 1 / r); above 1 where no share is enough."""
    k, r = _array("k", k, 1.0), _array("r", r, 1.0)
    gap = k - 1 / r
    if not np.all(gap > 0):
        raise ValueError(f"k={k} and r={r} save nothing at any share")
    return (_array("wanted", wanted, 0.0, 1.0) + k - 1) / gap


# --- links ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A data-parallel step as far as its gradients are concerned. Fields are numbers or arrays that broadcast.

    compute_s: what a GPU does besides, seconds · numbers: gradient numbers a GPU exchanges (parameters over the GPUs of
    a replica) · replicas: ranks of the all-reduce · base_bits: a gradient number on the wire without compression ·
    weight_bits: None, an all-reduce of gradients; a number, ZeRO-1: the all-gather carries weights of so many bits, and
    compression leaves them as they are · local: ranks that share a node; they reduce among themselves first, which
    takes no time here, and each carries its part of the numbers between nodes.
    """

    compute_s: Any
    numbers: Any
    replicas: Any
    base_bits: Any = 16
    weight_bits: Any = None
    local: Any = 1

    def __post_init__(self) -> None:
        _positive("compute_s", self.compute_s)
        _positive("numbers", self.numbers)
        _array("replicas", self.replicas, 1.0)
        _positive("base_bits", self.base_bits)
        if self.weight_bits is not None:
            _positive("weight_bits", self.weight_bits)
        _array("local", self.local, 1.0)

    @classmethod
    def of(
        cls, parameters: ArrayLike, tokens_per_step: ArrayLike, gpus: ArrayLike, gpus_per_replica: ArrayLike,
        tflops_per_gpu: ArrayLike, base_bits: ArrayLike = 16,
    ) -> Step:  # fmt: skip
        """From a model's size: 6 FLOPs a parameter and token at the rate that a GPU reaches without this exchange."""
        parameters, gpus = _positive("parameters", parameters), _array("gpus", gpus, 1.0)
        each = _array("gpus_per_replica", gpus_per_replica, 1.0)
        if not np.all(gpus >= each):
            raise ValueError(f"gpus_per_replica must be at most gpus={gpus}, got {each}")
        flops = 6 * parameters * _positive("tokens_per_step", tokens_per_step)
        compute_s = flops / (gpus * _positive("tflops_per_gpu", tflops_per_gpu) * 1e12)
        return cls(compute_s, parameters / each, gpus / each, base_bits)

    @property
    def wire_bytes(self) -> Array:
        """Bytes a GPU sends between nodes in a step: (n - 1) / n of its part of the gradients and of what comes back,
        on n nodes."""
        local, gradient = np.asarray(self.local, float), np.asarray(self.base_bits, float)
        n = np.maximum(np.asarray(self.replicas, float) / local, 1.0)
        back = gradient if self.weight_bits is None else np.asarray(self.weight_bits, float)
        return (n - 1) / n * np.asarray(self.numbers, float) / local * (gradient + back) / 8

    def smaller(self, r: ArrayLike) -> Array:
        """How many times fewer bytes a step sends where gradients take r times fewer: r in an all-reduce, less where
        weights come back."""
        r = _array("r", r, 1.0)
        if self.weight_bits is None:
            return r
        gradient, back = np.asarray(self.base_bits, float), np.asarray(self.weight_bits, float)
        return (gradient + back) / (gradient / r + back)

    def exchange_s(self, link_gbit: ArrayLike, r: ArrayLike = 1.0) -> Array:
        """Seconds on a link of so many Gbit/s a GPU in each direction; inf is a link that takes no time."""
        return self.wire_bytes / (_positive("link_gbit", link_gbit) * GBIT) / self.smaller(r)

    def share(self, link_gbit: ArrayLike, overlap: ArrayLike = 0.0) -> Array:
        """f: exposed exchange over the step; `overlap` of the compute time can hide it."""
        exposed = self.exposed_s(link_gbit, 1.0, overlap)
        return exposed / (np.asarray(self.compute_s, float) + exposed)

    def exposed_s(self, link_gbit: ArrayLike, r: ArrayLike = 1.0, overlap: ArrayLike = 0.0) -> Array:
        hidden = _array("overlap", overlap, 0.0, 1.0) * np.asarray(self.compute_s, float)
        return np.maximum(self.exchange_s(link_gbit, r) - hidden, 0.0)

    def seconds(
        self, link_gbit: ArrayLike, r: ArrayLike = 1.0, codec_s: ArrayLike = 0.0, overlap: ArrayLike = 0.0
    ) -> Array:
        """The step: compute, the codec's seconds, and what of the exchange is not hidden."""
        compute = np.asarray(self.compute_s, float)
        return compute + _array("codec_s", codec_s, 0.0) + self.exposed_s(link_gbit, r, overlap)

    def saving(self, link_gbit: ArrayLike, r: ArrayLike, codec_s: ArrayLike = 0.0, overlap: ArrayLike = 0.0) -> Array:
        """Share of the step that compression saves."""
        return 1 - self.seconds(link_gbit, r, codec_s, overlap) / self.seconds(link_gbit, 1.0, 0.0, overlap)

    def breakeven_gbit(self, r: ArrayLike, codec_s: ArrayLike, overlap: ArrayLike = 0.0) -> Array:
        """Link rate above which compression does not pay; inf where the codec takes no time and something is exposed.

        Between the rate at which the plain exchange is just hidden and slower ones the gain of compression grows, so
        there is one such rate: the one at which the plain exchange is exposed by exactly codec_s while the coded one is
        hidden, or, slower, at which the difference of the two is codec_s.
        """
        r, codec_s = self.smaller(r), _array("codec_s", codec_s, 0.0)
        hidden = _array("overlap", overlap, 0.0, 1.0) * np.asarray(self.compute_s, float)
        plain_s, gain = hidden + codec_s, 1 - 1 / r
        with np.errstate(divide="ignore", invalid="ignore"):
            # the coded exchange is hidden as well: plain_s / r <= hidden
            at = np.where(plain_s <= r * hidden, plain_s, codec_s / gain)
            rate = self.wire_bytes / GBIT / at
        return np.where((gain == 0) | (self.wire_bytes == 0), 0.0, rate)  # nothing to gain: it never pays


def share_at_link(f: ArrayLike, link_gbit: ArrayLike, reference_gbit: ArrayLike = 400.0) -> Array:
    """f on another link, without overlap: the exchange takes reference / link times as long, the rest is as it was."""
    f = share(f, "f")
    scaled = f * _positive("reference_gbit", reference_gbit) / _positive("link_gbit", link_gbit)
    return scaled / (1 - f + scaled)


def surface(
    shares: ArrayLike, links_gbit: ArrayLike, overheads: ArrayLike, *, base_bits: float = 16, bits: float = 4,
    block: int = 128, scale_bits: float = 32, reference_gbit: float = 400.0, share_base_bits: float = 16,
) -> Array:  # fmt: skip
    """Savings [shares, links, overheads]: the break-even chart.

    shares: f on the reference link with gradients of `share_base_bits`; base_bits: what the job sends without
    compression (32 doubles the traffic of 16, and the ratio with it).
    """
    f = share(np.atleast_1d(shares), "shares")[:, None, None]
    link = np.atleast_1d(np.asarray(links_gbit, float))[None, :, None]
    k = np.atleast_1d(np.asarray(overheads, float))[None, None, :]
    traffic = _positive("base_bits", base_bits) / _positive("share_base_bits", share_base_bits)
    at_link = share_at_link(f, link / traffic, reference_gbit)
    return saving(at_link, ratio(bits, block, scale_bits, base_bits), k)
