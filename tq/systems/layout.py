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
    """How a training run is split over GPUs, and what is recomputed.

    The product ``tp * pp * dp * cp`` is the number of GPUs. All ranks are 1 by default.

    Attributes:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        dp: data-parallel ranks.
        micro_batch: sequences per micro-batch and replica; 1 by default.
        global_batch: sequences per step over all replicas, a multiple of ``dp * micro_batch``; 1 by default.
        recompute: "none" (default), "selective" (attention scores) or "full" (every layer).
        sequence_parallel: whether activations outside the tensor-parallel region are split over ``tp`` too.
        interleave: model chunks per pipeline stage (1F1B with virtual stages); 1 by default.
        zero: ZeRO stage from 0 (default) to 3 (Rajbhandari et al. 2020, arXiv:1910.02054).
        cp: context-parallel ranks, which split the sequence.
        ep: expert-parallel ranks, taken out of ``dp * cp``.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if the fields contradict each other.

    Example:
        >>> from tq.systems import Layout
        >>> layout = Layout(tp=4, pp=2, dp=8, global_batch=64)
        >>> layout.gpus, layout.micro_batches
        (64, 8)
    """

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
        """GPUs that the layout needs."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def micro_batches(self) -> int:
        """Micro-batches per replica and step."""
        return self.global_batch // (self.dp * self.micro_batch)

    def check(self, model: Transformer) -> None:
        """Checks that the layout can hold a model.

        Args:
            model: shape of the model.

        Raises:
            ValueError: if a number of ranks does not divide what it splits, or the pipeline is longer than the model.
        """
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
        """Layers of the pipeline stage that has most.

        Args:
            model: shape of the model.

        Returns:
            A number of layers.
        """
        return self.interleave * math.ceil(model.layers / (self.pp * self.interleave))


@dataclass(frozen=True)
class Bits:
    """Size of a block codec: indices and one scale per block.

    Attributes:
        bits: bits per index, from 1 to 8; 4 by default.
        block: elements per block; 128 by default.
        scale_bytes: bytes of a block's scale, 2 or 4 (default).

    Raises:
        TypeError: if a field is no int.
        ValueError: if a field is out of range.

    Example:
        >>> from tq.systems import Bits
        >>> Bits(4).bits_per_element, Bits(4).bytes_per_element
        (4.25, 0.53125)
    """

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
        """Stored bits per element with the share of the scale, as ``tq.Codec.bits_per_element`` for full blocks."""
        return (math.ceil(self.bits * self.block / 8) + self.scale_bytes) * 8.0 / self.block

    @property
    def bytes_per_element(self) -> float:
        """Stored bytes per element with the share of the scale."""
        return self.bits_per_element / 8


@dataclass(frozen=True)
class Compression:
    """What a training run keeps or sends quantized, and the speed of the codec.

    Each of the first four fields is ``Bits``, or None (default) for what is not quantized.

    Attributes:
        gradients: data-parallel gradient traffic.
        momentum: the same traffic with momenta in place of gradients; every rank then keeps whole first moments,
            so ZeRO does not split them.
        activations: what the forward pass keeps for the backward pass.
        states: both moments of the optimizer.
        feedback: whether an fp32 residual per parameter is kept for error feedback; False by default.
        hbm_fraction: speed of the codec as a share of the memory bandwidth, over the bytes that it reads and writes:
            a number or an array of samples. The default of 0.25 is an assumption, not measured on GPUs. The compiled
            kernels' instructions allow it on an H100; on CPUs they reach a quarter to a half (chapter "Kernels").
        elements_per_s: measured elements per second, for encoding and decoding alike, used instead of
            ``hbm_fraction``; None by default.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if both ``gradients`` and ``momentum`` are given, or a speed is not positive.

    Example:
        >>> from tq.systems import Bits, Compression
        >>> Compression(gradients=Bits(4)).traffic
        Bits(bits=4, block=128, scale_bytes=4)
    """

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
        """The format of the data-parallel traffic, or None."""
        return self.gradients or self.momentum

    def check(self, layout: Layout) -> None:
        """Checks that the layout allows this compression.

        Args:
            layout: how the run is split over GPUs.

        Raises:
            ValueError: if momenta are sent and the layout has ZeRO stage 2 or 3.
        """
        if self.momentum is not None and layout.zero > 1:
            raise ValueError(f"momentum traffic needs whole first moments: accepted is zero=0 or 1, got {layout.zero}")
