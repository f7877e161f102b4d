"""What is known of Triton's kernels before there is a GPU: machine code, registers, warps that fit, and a forecast."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tq.kernels import gpu
from tq.lab import on_gpu, sm90
from tq.quant.codec import Codec
from tq.systems import hardware

REGISTERS, WARPS, SHARED_BYTES = 65536, 64, 227 * 1024  # of a processor, compute capability 9.0 and 10.0


@dataclass(frozen=True)
class Target:
    """A card by its data sheet.

    Attributes:
        name: of it.
        capability: compute capability, 90 for 9.0.
        processors: streaming multiprocessors.
        clock_hz: of them under load; assumed where it was not measured.
    """

    name: str
    capability: int
    processors: int
    clock_hz: float

    def card(self, copied: float) -> on_gpu.Card:
        """copied: share of the memory's data-sheet rate that a copy reaches."""
        return on_gpu.Card(self.name, self.processors, self.clock_hz, copied * hardware.gpu(self.name).hbm_bytes_per_s)


@dataclass(frozen=True)
class Forecast:
    """Of one kernel on one card.

    Attributes:
        instructions: per element, of programs with numbers of usual sizes.
        registers: of a thread.
        spills: bytes of stack of a thread.
        warps: that fit into a processor at once, of ``WARPS``.
        share: of the speed of a copy of the same bytes.
        limit: "bytes" or "instructions".
        issue: share of its instruction slots that the kernel needs to be as fast as the copy.
    """

    instructions: float
    registers: int
    spills: int
    warps: int
    share: float
    limit: str
    issue: float


def forecast(kind: str, codec: Codec, dtype: torch.dtype, target: Target, copied: float) -> Forecast:
    """Of the "encode" or "decode" kernel of a codec, compiled here.

    Args:
        kind: which.
        codec: its settings.
        dtype: of the numbers.
        target: the card.
        copied: share of the memory's data-sheet rate that a copy reaches.
    """
    made = gpu.compiled(
        kind, target.capability, bits=codec.bits, block=codec.block, rounds=codec.rounds, scale=codec.scale,
        search=codec.search, dtype=dtype, rare=False,
    )  # fmt: skip
    found, card = sm90.resources(*made), target.card(copied)
    count = float(found["instructions_per_element"])
    moved = dtype.itemsize + codec.bits_per_element / 8
    share, limit = on_gpu.foretold(card, count, moved)
    issue = count / card.instructions_per_s / (moved / card.copy_bytes_per_s)
    return Forecast(count, found["registers"], found["spills"], fitting(made[0], found), share, limit, issue)


def fitting(compiled: object, found: dict[str, int]) -> int:
    """Warps of a kernel that a processor holds at once.

    Args:
        compiled: by Triton.
        found: its ``registers`` and ``shared_bytes``.
    """
    each: int = compiled.metadata.num_warps  # type: ignore[attr-defined]
    registers = -(-found["registers"] // 8) * 8 * 32  # of a warp, given in eights
    programs = min(REGISTERS // (registers * each), SHARED_BYTES // (found["shared_bytes"] + 1024), WARPS // each, 32)
    return programs * each
