"""Time of a training step whose replicas sit at several sites with a slow link between them.

Inside a site everything is as in `tq.systems.step`; between the sites one rank of each exchanges `numbers` numbers in a
ring, every `every` steps: 1 for data parallelism, H for DiLoCo [Douillard et al. 2023, arXiv:2311.08105], whose loss
is another question. Not modelled: sites of unequal speed, links that others use, lost packets, nodes that leave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tq.systems import network
from tq.systems.checks import positive, positive_int
from tq.systems.network import Link


@dataclass(frozen=True)
class Sites:
    """compute_s: a step inside a site, alone. numbers: parameters that the sites must agree on. bits: a number on the
    wire, scales included. every: steps between exchanges. hidden: share of the computation that an exchange can hide
    behind."""

    compute_s: float
    numbers: float
    sites: int = 2
    bits: float = 16.0
    every: int = 1
    hidden: float = 0.0

    def __post_init__(self) -> None:
        positive("compute_s", self.compute_s)
        positive("numbers", self.numbers)
        positive_int("sites", self.sites)
        positive("bits", self.bits)
        positive_int("every", self.every)
        positive("hidden", self.hidden, zero=True, most=1.0)

    @property
    def bytes_per_step(self) -> float:
        """What leaves a site in the mean step."""
        return network.ring_bytes(self.numbers, self.sites, self.bits / 8) / self.every

    def exchange_s(self, link: Link) -> float:
        """One exchange."""
        return network.ring_s(self.numbers, self.sites, link, self.bits / 8)

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
        allowed = (1 / use - 1 + self.hidden) * self.compute_s * self.every - 2 * (self.sites - 1) * alpha_s
        if allowed <= 0:
            return math.inf
        return network.ring_bytes(self.numbers, self.sites, self.bits / 8) / allowed
