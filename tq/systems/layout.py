"""How a run is laid out over its GPUs, and what of it is compressed: the two records that the models take."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tq.systems.arguments import Real, boolean, one_of, positive, positive_int
from tq.systems.shape import Transformer

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """tp, pp, dp, cp: tensor-, pipeline-, data- and context-parallel ranks; they multiply to the number of GPUs. ep:
    expert-parallel ranks, taken out of dp * cp. micro_batch and global_batch in sequences. recompute: "none",
    "selective" (attention scores) or "full" (each layer). sequence_parallel: activations outside the tensor-parallel
    region are split too. interleave: model chunks a pipeline stage (1F1B with virtual stages). zero: 0-3 [Rajbhandari
    2020]. A contradiction raises here; what depends on the model raises in ``check``."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    interleave: int = 1
    zero: int = 0
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "micro_batch", "global_batch", "interleave", "cp", "ep"):
            positive_int(name, getattr(self, name))
        one_of("recompute", self.recompute, RECOMPUTE)
        boolean("sequence_parallel", self.sequence_parallel)
        if isinstance(self.zero, bool) or not isinstance(self.zero, int | np.integer):
            raise TypeError(f"zero must be 0, 1, 2 or 3, got {self.zero!r}")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero must be 0, 1, 2 or 3, got {self.zero!r}")
        if self.global_batch % (self.dp * self.micro_batch):
            raise ValueError(
                f"global_batch must be a multiple of dp * micro_batch = {self.dp * self.micro_batch}, "
                f"got {self.global_batch}"
            )
        if self.interleave > 1 and (self.pp == 1 or self.micro_batches % self.pp):
            raise ValueError(
                f"interleave={self.interleave} needs pp > 1 and micro-batches in multiples of pp; got pp={self.pp} "
                f"and {self.micro_batches} micro-batches"
            )
        if (self.dp * self.cp) % self.ep:
            raise ValueError(f"ep must divide dp * cp = {self.dp * self.cp}, got {self.ep}")

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def micro_batches(self) -> int:
        """Of one replica and iteration."""
        return self.global_batch // (self.dp * self.micro_batch)

    def check(self, model: Transformer) -> None:
        """Raises ValueError where this layout cannot hold the model."""
        for name, divided, value in (
            ("tp", "heads", model.heads), ("tp", "the width of the MLP", model.width), ("cp", "seq", model.seq),
        ):  # fmt: skip
            if value % getattr(self, name):
                raise ValueError(f"{name} must divide {divided}={value}, got {getattr(self, name)}")
        # the first and the last chunk may hold the embedding and the output layer alone, as in Llama 3
        spare = 2 if self.interleave > 1 else 0
        if self.pp > model.layers or self.pp * self.interleave > model.layers + spare:
            raise ValueError(
                f"pp * interleave must be at most layers={model.layers}, got {self.pp} * {self.interleave}"
            )
        if self.ep > 1 and model.moe is None:
            raise ValueError(f"ep needs a model with experts, got ep={self.ep} for a dense one")
        if model.moe is not None and model.moe.count % self.ep:
            raise ValueError(f"ep must divide experts.count={model.moe.count}, got {self.ep}")

    def stage_layers(self, model: Transformer) -> int:
        """Layers of the fullest stage."""
        return self.interleave * math.ceil(model.layers / (self.pp * self.interleave))


@dataclass(frozen=True)
class Bits:
    """A block codec as its size matters: `bits` an element and one scale of `scale_bytes` a block."""

    bits: int = 4
    block: int = 128
    scale_bytes: int = 4

    def __post_init__(self) -> None:
        positive_int("bits", self.bits)
        positive_int("block", self.block)
        if self.bits > 8:
            raise ValueError(f"bits must be from 1 to 8, got {self.bits}")
        positive_int("scale_bytes", self.scale_bytes)
        if self.scale_bytes not in (2, 4):
            raise ValueError(f"scale_bytes must be 2 or 4, got {self.scale_bytes}")

    @property
    def bits_per_element(self) -> float:
        """bits + 8 scale bytes / block: what ``tq.Codec.bits_per_element`` is for full blocks."""
        return (math.ceil(self.bits * self.block / 8) + self.scale_bytes) * 8.0 / self.block

    @property
    def bytes_per_element(self) -> float:
        return self.bits_per_element / 8


@dataclass(frozen=True)
class Compression:
    """What is kept or sent as codes. gradients: data-parallel traffic. momentum: the same traffic, of momenta in place
    of gradients; every rank then keeps whole first moments, so ZeRO does not shard them. activations: what the forward
    pass keeps for the backward one. states: both moments of the optimizer. feedback: an fp32 residual a parameter.

    hbm_fraction: speed of the codec, as a share of the memory bandwidth over the bytes that it reads and writes. It is
    not measured on GPUs: .25 is an assumption, within what the instructions of the compiled kernels allow an H100
    (chapter `kernels`; on CPUs they reach a quarter to a half, by machine). It may be an array of samples.
    elements_per_s: a measured speed (encode and decode alike) in its place."""

    gradients: Bits | None = None
    momentum: Bits | None = None
    activations: Bits | None = None
    states: Bits | None = None
    feedback: bool = False
    hbm_fraction: Real = 0.25
    elements_per_s: Real = None

    def __post_init__(self) -> None:
        for name in ("gradients", "momentum", "activations", "states"):
            if not isinstance(getattr(self, name), Bits | None):
                raise TypeError(f"{name} must be None or Bits(...), got {getattr(self, name)!r}")
        if self.gradients and self.momentum:
            raise ValueError("gradients and momentum are the same traffic: accepted is one of them, got both")
        boolean("feedback", self.feedback)
        positive("hbm_fraction", self.hbm_fraction)
        if self.elements_per_s is not None:
            positive("elements_per_s", self.elements_per_s)

    @property
    def traffic(self) -> Bits | None:
        return self.gradients or self.momentum

    def check(self, layout: Layout) -> None:
        """Raises ValueError where this cannot be done under that layout."""
        if self.momentum is not None and layout.zero > 1:
            raise ValueError(f"momentum traffic needs whole first moments: accepted is zero=0 or 1, got {layout.zero}")
