"""What a stack's ranks told, taken together: losses, equal replicas, bytes and times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FRAMING = 1514 / 1448  # bytes of a full frame over those of its payload: Ethernet, IP and TCP with time stamps
GRADIENTS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Seen:
    """One program's runs.

    Attributes:
        valid: held-out loss in nats per token, by seed.
        equal: whether all ranks ended every run with the same bits.
        seconds: of every step, the slowest rank's.
        sent: bytes per step at a rank's interface, mean over ranks and steps; 0 without an interface.
        gradients: bytes per step of sums and means at a rank, as they would be sent plain, by the backend's counters.
        coded: the same, as they were sent.
        others: bytes per step of everything else that the backend counted.
    """

    valid: list[float]
    equal: bool
    seconds: list[float]
    sent: float
    gradients: float
    coded: float
    others: float

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds)

    def on_wire(self, others: float) -> float:
        """Bytes per step of gradients at the interface: all that left it without ``others``, counted before headers."""
        return self.sent - FRAMING * others


def seen(told: Sequence[dict[str, Any]], skip: int = 2) -> Seen:
    """From what each rank wrote.

    Args:
        told: by rank.
        skip: first steps of each run that are left out of times and bytes: buckets are cut anew after the first.
    """
    runs = [found["runs"] for found in told]
    seconds = [
        max(turn) for of_seed in zip(*runs, strict=True)
        for turn in list(zip(*(run["seconds"] for run in of_seed), strict=True))[skip:]
    ]  # fmt: skip
    sent = [step for rank in runs for run in rank for step in run["sent"][skip:]]
    steps = [kinds for run in runs[0] for kinds in run["counted"][skip:]]  # judging a model counts too, after them

    def per_step(which: int, chosen: bool) -> float:
        found = [both[which] for kinds in steps for kind, both in kinds.items() if (kind in GRADIENTS) == chosen]
        return sum(found) / len(steps) if steps else 0.0

    return Seen(
        valid=[run["valid"] for run in runs[0]],
        equal=all(len({run["digest"] for run in of_seed}) == 1 for of_seed in zip(*runs, strict=True)),
        seconds=seconds, sent=statistics.fmean(sent) if sent else 0.0,
        gradients=per_step(0, True), coded=per_step(1, True), others=per_step(1, False),
    )  # fmt: skip
