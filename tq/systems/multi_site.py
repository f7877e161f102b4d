"""Time of a training step whose replicas sit at several sites with a slow link between them.

Inside a site everything is as in `tq.systems.iteration`; between the sites one rank of each exchanges `numbers` numbers
in a ring, or with a server whose own link is not short, every `every` steps: 1 for data parallelism, H for DiLoCo
[Douillard et al. 2023, arXiv:2311.08105], whose loss is another question. Not modelled: sites of unequal speed, links
that others use, lost packets, nodes that leave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tq.systems import collectives
from tq.systems.arguments import positive, positive_int
from tq.systems.collectives import Link


@dataclass(frozen=True)
class Sites:
    """compute_s: a step inside a site, alone. numbers: parameters that the sites must agree on. bits: a number on the
    wire, scales included. every: steps between exchanges. hidden: share of the computation that an exchange can hide
    behind. server: in place of a ring, each site sends its numbers to a server and then gets the mean."""

    compute_s: float
    numbers: float
    sites: int = 2
    bits: float = 16.0
    every: int = 1
    hidden: float = 0.0
    server: bool = False

    def __post_init__(self) -> None:
        positive("compute_s", self.compute_s)
        positive("numbers", self.numbers)
        positive_int("sites", self.sites)
        positive("bits", self.bits)
        positive_int("every", self.every)
        positive("hidden", self.hidden, zero=True, most=1.0)

    @property
    def _sent_bytes(self) -> float:
        """What leaves a site in one exchange."""
        each = self.bits / 8
        return self.numbers * each if self.server else collectives.ring_bytes(self.numbers, self.sites, each)

    @property
    def _line_bytes(self) -> float:
        """Bytes that the link carries one after the other: a ring sends and receives at the same time."""
        return 2 * self._sent_bytes if self.server else self._sent_bytes

    @property
    def _rounds(self) -> int:
        return 2 if self.server else 2 * (self.sites - 1)

    @property
    def bytes_per_step(self) -> float:
        """What leaves a site in the mean step."""
        return self._sent_bytes / self.every

    def exchange_s(self, link: Link) -> float:
        """One exchange."""
        return link.seconds(self._line_bytes) + self._rounds * link.alpha_s

    def step_s(self, link: Link) -> float:
        """The mean step."""
        window = self.hidden * self.compute_s * self.every
        return self.compute_s + max(0.0, self.exchange_s(link) - window) / self.every

    def use(self, link: Link) -> float:
        """Share of the time in which a site computes; sites * use is what they are worth beside one alone."""
        return self.compute_s / self.step_s(link)

    def rate_for(self, use: float, alpha_s: float = 0.0) -> float:
        """Bytes/s that a site needs for a share of use below 1; inf where the latency alone is too long."""
        positive("use", use, most=1.0)
        positive("alpha_s", alpha_s, zero=True)
        allowed = (1 / use - 1 + self.hidden) * self.compute_s * self.every - self._rounds * alpha_s
        if allowed <= 0:
            return math.inf
        return self._line_bytes / allowed
