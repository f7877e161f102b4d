"""Rules over the bytes of checkpoints, how often they are written, and what failures cost."""

from __future__ import annotations

from tq.book.claims.formulas import GIB, Formula, Free, RangeFormula
from tq.book.claims.ledger import PRINTED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part
from tq.systems.checkpoint import MOMENT_BYTES, checkpoint_bytes, lost_share, write_s, young_interval_s
from tq.systems.failures import DAY_S, failures_in, mtbf_s

CHAPTER = "checkpoints-and-failures"
MONTH = 1440  # checkpoints, one every 30 minutes
STORE = 5e9  # bytes/s, of the page that S2-005 rests on
USD_B200 = 4.40  # an hour, of the same page
GPUS = 128
INTERRUPTION = "GPU-hours between interruptions (data/reliability.csv)"
YOUNG = f"sqrt(2 delta M), M = {INTERRUPTION} / GPUs"
KEPT = "1,440 * 840 GB * price * (1 - 1 / ratio); storage_prices.csv lists 0.015 to 0.1 dollars a GB and month"


def _bytes(parameters: float, master: float = 0.0) -> float:
    """As the document counts: 16-bit weights and gradients and both moments, 12 bytes a parameter."""
    return float(checkpoint_bytes(parameters, master=master, gradients=2.0))


def _interval_min(gpus: int, delta_s: float) -> float:
    return float(young_interval_s(delta_s, mtbf_s(gpus))) / 60


def _lost(gpus: int, delta_s: float) -> float:
    """Share of the time that is lost at Young's interval."""
    mtbf = mtbf_s(gpus)
    return float(lost_share(young_interval_s(delta_s, mtbf), delta_s, mtbf))


BLOB_S = float(write_s(_bytes(405e9), STORE))  # of 405B
MIXED_S = BLOB_S / GIB * 1e9  # with GiB counted as GB


def _idle_usd(stall_s: float) -> float:
    """Of the GPUs that wait, in a month."""
    return MONTH * stall_s / 3600 * GPUS * USD_B200


def _stored_usd(ratio: float, usd_per_gb_month: float) -> float:
    """What lossless compression saves of the storage of a month's checkpoints of 70B, all of them kept."""
    return MONTH * _bytes(70e9) / 1e9 * usd_per_gb_month * (1 - 1 / ratio)


def storage_saving(claim: Claim, results: Results) -> Finding:
    """Storage at some listed price, 0.015 to 0.1 dollars a GB and month, costs less by the claimed sum; in part if
    GPU time
    that does not stand idle does."""
    low, high = claim.bounds()
    storage, idle = [_stored_usd(1.38, price) for price in (0.015, 0.1)], _idle_usd(MIXED_S) * (1 - 1 / 1.38)
    checks = (
        Check(f"storage saves ${storage[0]:,.0f} to ${storage[1]:,.0f}, needed {low:,.0f} to {high:,.0f} among them",
              storage[0] <= high and low <= storage[1]),
        in_part(compare("dollars of idle GPU time", idle, low, high)),
    )  # fmt: skip
    text = (
        f"What saves ${idle:,.0f} is GPU time that does not stand idle, at a ratio of 1.38. Storage, which the "
        "document "
        f"names, saves ${storage[0]:,.0f} to ${storage[1]:,.0f} if every checkpoint is kept. The page now says 40,000."
    )
    return found(claim, checks, text, "The list of bytes and prices behind the figure.", "medium", KEPT)


RULES: dict[str, Rule] = {
    "S2-001": Formula(
        "70e9 * bytes a parameter", lambda: {"in GiB at 12 bytes a parameter": _bytes(70e9) / GIB},
        "12 bytes for each of 70 billion parameters are {0:.0f} GiB, which the document calls GB; in GB they are "
        "{1:.0f}. "
        "A master copy in fp32 would add a third.",
        "A statement which tensors such a checkpoint holds.", conditions=lambda: {"in GB": _bytes(70e9) / 1e9},
    ),
    "S2-002": Formula(
        "70e9 * 8 bytes", lambda: {"in GiB": 70e9 * MOMENT_BYTES / GIB},
        "Two fp32 moments of 70 billion parameters are {0:.0f} GiB, which the document calls GB; in GB they are "
        "{1:.0f}.",
        "Moments of another width than four bytes.", conditions=lambda: {"in GB": 70e9 * MOMENT_BYTES / 1e9},
    ),
    "S2-003": Formula(
        "8 bytes of moments / 2 bytes of weight", lambda: {"16-bit weights": MOMENT_BYTES / 2},
        "Two fp32 moments take {0:.0f} times the bytes of a 16-bit weight; beside a master copy in fp32 it is {1:.2f}.",
        "Weights of another width than two bytes.", "x",
        conditions=lambda: {"with a master copy": MOMENT_BYTES / 6},
    ),
    "S2-004": Formula(
        "1,440 checkpoints a month * 70e9 * 12 bytes", lambda: {"GiB counted as GB": MONTH * _bytes(70e9) / GIB / 1e6},
        "1,440 checkpoints of 782 GiB are {0:.2f} million GiB, which the document calls PB; in PB it is {1:.2f}.",
        "Checkpoints that are not all kept.", conditions=lambda: {"in PB": MONTH * _bytes(70e9) / 1e15},
    ),
    "S2-005": Formula(
        "1,440 * stall * 128 * 4.40 dollars an hour", lambda: {"a write every 30 minutes": _idle_usd(BLOB_S)},
        "A write every half an hour at 5 GB/s leaves 128 GPUs idle for ${0:,.0f} a month; at Young and Daly's interval "
        "checkpoints and failures together cost ${1:,.0f}.",
        "A store of more than 5 GB/s, or fewer writes.", "dollars", see=CHAPTER,
        conditions=lambda: {"at Young and Daly's interval": _lost(GPUS, BLOB_S) * 730 * GPUS * USD_B200},
    ),
    "S2-008": storage_saving,
    "S2-010": Formula(
        "interruptions in 54 days on 16,384 H100, as reported (data/reliability.csv)",
        lambda: {"unexpected": 419.0},
        "Meta reported {0:.0f} unexpected interruptions in 54 days, and {1:.0f} with planned ones: one in three hours. "
        "A "
        "Poisson count of that size is known to ten per cent.",
        "Another count in table 5 of the Llama 3 paper.", "interruptions", basis=PRINTED, confidence="medium",
        conditions=lambda: {"with planned ones": 466.0},
    ),
    "S2-011": Free(
        YOUNG, of=lambda write: _interval_min(16384, write), over=(1, 1000), usual=60,
        name="seconds a write takes, from",
        unit="minutes", see=CHAPTER, claimed=(15.0, 30.0), within=0.1,
        conditions=lambda: {"for 128 GPUs and the 972 s of 405B at 5 GB/s": _interval_min(GPUS, BLOB_S)},
        says="On the 16,384 GPUs of its example the best interval is 15 to 30 minutes where a write takes {low:.0f} to "
        "{high:.0f} seconds, {0:.0f} minutes for one of 60; on 128 GPUs it is {1:,.0f}.",
        would_change="The time that Meta's writes took.",
    ),
    "S2-013": RangeFormula(
        "8 / bytes a parameter, more than a half",
        lambda: {"at 12 bytes a parameter": 100 * MOMENT_BYTES / _bytes(1.0)},
        "Both moments are {0:.0f} % of a checkpoint of 12 bytes a parameter, and {1:.0f} % beside a master copy: the "
        "largest part of either.",
        "Moments that are stored in fewer bits than the weights.", "%", claimed=(50.0, 100.0), within=0.0,
        conditions=lambda: {"with an fp32 master copy": 100 * MOMENT_BYTES / _bytes(1.0, master=4.0)},
    ),
    "S2-017": Free(
        KEPT, of=lambda price: _stored_usd(1.27, price), over=(0.01, 0.15), usual=0.03,
        name="dollars a GB and month, from", unit="dollars", claimed=(10e3, 99e3), within=0.1, see=CHAPTER,
        conditions=lambda: {"if the last ten are kept": _stored_usd(1.27, 0.03) / 144},
        says="If every checkpoint of a month is kept, a ratio of 1.27 saves tens of thousands from {low:.3f} dollars a "
        "GB on, ${0:,.0f} at 0.03; if the last ten are kept, ${1:,.0f}.",
        would_change="How many checkpoints are kept.",
    ),
    "S4-081": RangeFormula(
        f"25,000 * 24 h / {INTERRUPTION}", lambda: {"failures a day": float(failures_in(DAY_S, 25_000))},
        "At the failure rate that Llama 3 saw 25,000 GPUs stop {0:.0f} times a day.",
        "A cluster that fails a tenth as often.", "a day", claimed=(2.0, 1e9), within=0.0, see=CHAPTER,
    ),
    "S4-082": Formula(
        "500e9 * bytes", lambda: {"weights and both moments": float(checkpoint_bytes(500e9, master=0.0)) / 1e12},
        "Weights and optimizer state of 500 billion parameters take {0:.0f} TB, with a master copy {1:.0f}; one TB is "
        "the "
        "16-bit weights alone.",
        "An optimizer state of next to nothing.", "TB", see=CHAPTER,
        conditions=lambda: {"with a master copy too": float(checkpoint_bytes(500e9)) / 1e12},
    ),
    "S4-083": Free(
        YOUNG, of=lambda gpus: _interval_min(round(gpus), 60), over=(8, 100_000), usual=16_384, name="GPUs, from",
        unit="minutes", claimed=(60.0, 60.0), within=0.1, see=CHAPTER,
        says="At Llama 3's failure rate and writes of a minute an hour is best for {low:,.0f} to {high:,.0f} GPUs; for "
        "16,384 it is {0:.0f} minutes.",
        would_change="The size of the clusters that are typical.",
    ),
}  # fmt: skip
