"""What a stack's ranks told, taken together: losses, equal replicas, bytes, times, and what each rank holds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        held: bytes of weights and moments that each rank keeps between steps: of sharded ones its own shards.
    """

    valid: list[float]
    equal: bool
    seconds: list[float]
    sent: float
    gradients: float
    coded: float
    others: float
    held: list[int]

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def sent_by_all(self) -> float:
        """Bytes per step at the interfaces of all ranks together."""
        return self.sent * len(self.held)

    @property
    def framing(self) -> float:
        """Bytes at the interface for one that the backend counted: headers, acknowledgements, checks between ranks.

        Raises:
            ValueError: there was no interface, or nothing was counted, as of a hook on gloo.
        """
        if not self.sent or not self.coded + self.others:
            raise ValueError(f"{self.sent:g} bytes were sent and {self.coded + self.others:g} counted: no ratio")
        return self.sent / (self.coded + self.others)


def fewer(off: Seen, ours: Seen) -> float:
    """How many times fewer bytes of gradients leave a rank's interface than plain fp32 would take there.

    What is no gradient was counted in the run with the codec off, and takes the bytes at the interface that a counted
    byte took in that run. The scales that ``Uncoded`` sends with its numbers are not part of plain fp32.

    Args:
        off: the engine on the backend with the codec off.
        ours: of the same engine; without an interface, by the backend too, whose counts are compared then.
    """
    if not ours.sent:
        return ours.gradients / ours.coded
    return off.framing * off.gradients / (ours.sent - off.framing * off.others)


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
        held=[sum(rank[-1]["held"]) for rank in runs],
    )  # fmt: skip
