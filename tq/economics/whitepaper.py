"""The whitepaper's dollars, computed again: what its own figures imply. Numbers only; verdicts are the ledger's.

Source: `data/whitepaper_costs.csv`, its table "LLM Training Cost by Scale", with the claim that each row stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tq.economics import breakeven, energy
from tq.economics.prices import HOURS_PER_MONTH
from tq.systems import tables
from tq.systems.arguments import positive

HOURS_PER_WEEK = 168.0
# The base that its $240K-500K come from: 256 H100, 3 weeks, the lowest price of its "major cloud" (S0-020, S0-029).
BASE_GPUS, BASE_WEEKS, BASE_USD_PER_GPU_HOUR = 256, 3, 6.88
SAVINGS = (0.27, 0.56)  # S0-007
SHARES = (0.20, 0.55)  # S0-013: communication as a share of training time
RATIO = 8.0  # S0-001, as claimed; breakeven.ratio() is what the codec stores
NETWORK_SAVED_USD_PER_GPU = 8000.0  # S0-016: $8M for 1,000 GPUs
CLAIM_COLUMNS = "claim_cost", "claim_config"


@dataclass(frozen=True)
class CostRow:
    """One row of its table; gpu_hours and implied prices follow from it."""

    scale: str
    usd: tuple[float, float]
    gpu: str
    gpu_hours: tuple[float, float]
    claims: tuple[str, str]

    @property
    def implied_usd_per_gpu_hour(self) -> tuple[float, float]:
        """Low cost over low GPU-hours, high cost over high GPU-hours."""
        return self.usd[0] / self.gpu_hours[0], self.usd[1] / self.gpu_hours[1]

    @property
    def widest_usd_per_gpu_hour(self) -> tuple[float, float]:
        """Every reading of the row: low cost over high GPU-hours to high cost over low GPU-hours."""
        return self.usd[0] / self.gpu_hours[1], self.usd[1] / self.gpu_hours[0]

    def usd_at(self, low_usd_per_gpu_hour: float, high_usd_per_gpu_hour: float) -> tuple[float, float]:
        """What the row's GPU-hours cost at a range of prices."""
        positive("low_usd_per_gpu_hour", low_usd_per_gpu_hour)
        positive("high_usd_per_gpu_hour", high_usd_per_gpu_hour)
        return self.gpu_hours[0] * low_usd_per_gpu_hour, self.gpu_hours[1] * high_usd_per_gpu_hour


@cache
def cost_rows() -> dict[str, CostRow]:
    path = tables.folder() / "whitepaper_costs.csv"
    numbers = "usd_low,usd_high,gpus_low,gpus_high,duration_low,duration_high".split(",")
    columns = (
        "scale", "usd_low", "usd_high", "gpu", "gpus_low", "gpus_high", "duration_low", "duration_high", "unit",
        *CLAIM_COLUMNS,
    )  # fmt: skip
    found = {}
    for line, row in enumerate(tables.read(path, columns), start=2):
        n = {name: tables.number(path, line, name, row[name]) for name in numbers}
        hours = {"weeks": HOURS_PER_WEEK, "months": HOURS_PER_MONTH}[row["unit"]]
        gpu_hours = (n["gpus_low"] * n["duration_low"] * hours, n["gpus_high"] * n["duration_high"] * hours)
        claims = (row["claim_cost"], row["claim_config"])
        found[row["scale"]] = CostRow(row["scale"], (n["usd_low"], n["usd_high"]), row["gpu"], gpu_hours, claims)
    return found


def base_usd() -> float:
    """The cost of the 70B run that its savings are shares of."""
    return BASE_GPUS * BASE_WEEKS * HOURS_PER_WEEK * BASE_USD_PER_GPU_HOUR


def saved_usd() -> tuple[float, float]:
    """27 % and 56 % of that base."""
    return SAVINGS[0] * base_usd(), SAVINGS[1] * base_usd()


def shares_needed(ratio: float = RATIO, overhead: float = 1.0) -> tuple[float, float]:
    """The communication shares that savings of 27 % and 56 % need."""
    low, high = breakeven.share_for(list(SAVINGS), ratio, overhead)
    return float(low), float(high)


def savings_at_claimed_shares(ratio: float = RATIO, overhead: float = 1.0) -> tuple[float, float]:
    """What shares of 20 % and 55 % save."""
    low, high = breakeven.saving(list(SHARES), ratio, overhead)
    return float(low), float(high)


def breakeven_overheads(ratio: float = RATIO) -> tuple[float, float]:
    """The overheads at which shares of 20 % and 55 % save nothing."""
    low, high = breakeven.breakeven_overhead(list(SHARES), ratio)
    return float(low), float(high)


def further_time_cut(ratio: float = RATIO) -> tuple[float, float]:
    """What the memory axis would have to cut, of what is left of the time, for 27 % at f = .2 and 56 % at f = .55."""
    low, high = (
        1 - (1 - wanted) / (1 - got) for wanted, got in zip(SAVINGS, savings_at_claimed_shares(ratio), strict=True)
    )
    return low, high


def interconnect_usd_per_gpu(chip_usd: float, chip_share: float = 0.44, interconnect_share: float = 0.17) -> float:
    """Interconnect of a GPU from the price of its chip and a split of the cost of hardware and energy. The shares of
    44 % and 17 % are Epoch AI's as the ledger has them; the abstract of arXiv:2405.21015 puts interconnect at 9-13 % of
    a development's cost, staff included."""
    positive("chip_usd", chip_usd)
    positive("chip_share", chip_share, most=1.0)
    positive("interconnect_share", interconnect_share, most=1.0)
    return chip_usd * interconnect_share / chip_share


def cluster_share(all_in_usd_per_gpu: float) -> float:
    """What $8M on 1,000 GPUs are of a cluster that costs so much a GPU."""
    positive("all_in_usd_per_gpu", all_in_usd_per_gpu)
    return NETWORK_SAVED_USD_PER_GPU / all_in_usd_per_gpu


def power_cut_without_network() -> tuple[float, float]:
    """The share of a cluster's power that its whole network takes, low and high: no change of switches saves more."""
    share = energy.factors()["network_share"]
    return share.low / (1 + share.low), share.high / (1 + share.high)
