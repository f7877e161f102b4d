"""What a compressed mean over ranks computes on a GPU, in a launch or two each: encode, average the codes, decode.

The same codes as ``Codec`` makes with each rank's seed, one after the other. It takes no checks and no memory of its
own, so that a bucket of gradients costs the host little; who calls it answers for shapes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tq.quant import dispatch
from tq.quant.codec import Codec

Codecs = tuple[Codec, Codec]


def why_not(codecs: Codecs, device: torch.device) -> str | None:
    """Why the kernels cannot serve both codecs on a device; None if they can."""
    found = (dispatch._obstacle("triton", codec, device) for codec in codecs)
    return next((obstacle for obstacle in found if obstacle), None)


@lru_cache(1024)
def _seeds(seeds: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [seeds] on the device, uploaded once: those of steps follow from them there."""
    signed = [seed - (1 << 64) if seed >> 63 else seed for seed in seeds]
    return torch.tensor(signed, dtype=torch.int64, device=device)


class RankMean:
    """Of tensors of one bucket, which exchange names: see ``of``.

    Attributes:
        payload_bytes, scale_dtypes: of a block's code, of the two phases.
    """

    def __init__(self, codecs: Codecs, seeds: tuple[int, ...], device: torch.device) -> None:
        from tq.kernels import gpu, gpu_mean  # Triton may not be installed

        self._gpu, self._middle, self._codecs = gpu, gpu_mean, codecs
        self._seeds, self.block = _seeds(seeds, device), codecs[0].block
        self._rounds = max(codec.rounds for codec in codecs)
        tables = [dispatch._tables(codec.bits, codec.sphere_dim, str(device)) for codec in codecs]
        searches = [dispatch._search(codec.search, codec.bits, codec.sphere_dim) for codec in codecs]
        self.payload_bytes = codecs[0].packed_bytes, codecs[1].packed_bytes
        self.scale_dtypes = codecs[0].scale_dtype, codecs[1].scale_dtype
        (first, second), (levels, more) = codecs, tables
        self._encoding = {
            "levels_L": levels[0], "thresholds": levels[1], "search": searches[0], "bits": first.bits,
            "scale": first.scale,
        }  # fmt: skip
        self._averaging = {
            "part_levels_L": levels[0], "part_bits": first.bits, "part_rounds": first.rounds, "levels_L": more[0],
            "thresholds": more[1], "search": searches[1], "bits": second.bits, "rounds": second.rounds,
            "scale": second.scale,
        }  # fmt: skip

    @staticmethod
    @lru_cache(1024)
    def of(codecs: Codecs, names: tuple[int, ...], ranks: int, device: torch.device) -> RankMean:
        """That of a tensor whose seeds have these names, behind the step; made once. codecs: of the two phases."""
        firsts = (codecs[0].derive(*names, 1, rank).seed for rank in range(ranks))
        return RankMean(codecs, (*firsts, codecs[1].derive(*names, 2).seed), device)

    def signs(self, step: int) -> Tensor:
        """fp32 [ranks + 1, rounds, block] of a step's rotations: of each rank, and of the mean."""
        made: Tensor = self._middle.signs(self._seeds, step, self.block, self._rounds)
        return made

    def encode(self, x: Tensor, payload: Tensor, scales: Tensor, signs: Tensor, rank: int) -> None:
        """The code of x [rows, numbers], contiguous, as this rank makes it: uint8 [blocks, bytes] and [blocks]."""
        own = signs[rank, : self._codecs[0].rounds]
        self._gpu.encode(x, payload, scales, signs_RB=own, **self._encoding)

    def average(
        self, parts: Tensor, part_scales: Tensor, payload: Tensor, scales: Tensor, signs: Tensor, numel: int
    ) -> None:
        """The code of the mean of the ranks' codes: parts uint8 [ranks, room, bytes], part_scales [ranks, room]."""
        self._middle.mean(parts, part_scales, payload, scales, numel, signs_SRB=signs, **self._averaging)

    def total(self, parts: Tensor, scales: Tensor, out: Tensor, signs: Tensor, divisor: float) -> None:
        """Flat out, contiguous, becomes the sum of the ranks' codes over ``divisor``; parts and scales as above."""
        first = self._codecs[0]
        self._middle.total(
            parts, scales, out, signs_SRB=signs, levels_L=self._encoding["levels_L"], bits=first.bits,
            rounds=first.rounds, divisor=divisor,
        )  # fmt: skip

    def decode(self, payload: Tensor, scales: Tensor, out: Tensor, signs: Tensor) -> None:
        """Flat out, contiguous, becomes what the code of the mean stands for."""
        second, own = self._codecs[1], signs[-1, : self._codecs[1].rounds]
        levels = self._averaging["levels_L"]
        self._gpu.decode(payload, scales, out.view(1, -1), signs_RB=own, levels_L=levels, bits=second.bits)
