"""Rules over the bytes of checkpoints, how often they are written, and what failures cost."""

from __future__ import annotations

from tq.book.claims.formulas import GIB, LOOSE, TIGHT, Formula, RangeFormula, at_least
from tq.book.claims.ledger import Rule
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


RULES: dict[str, Rule] = {
    "S2-001": Formula(
        "70e9 * bytes a parameter",
        lambda: {
            "in GiB at 12 bytes a parameter": _bytes(70e9) / GIB, "in GB at 12": _bytes(70e9) / 1e9,
            "in GiB with an fp32 master copy": _bytes(70e9, master=4.0) / GIB,
        }, within=TIGHT,
    ),
    "S2-002": Formula(
        "70e9 * 8 bytes",
        lambda: {"in GiB": 70e9 * MOMENT_BYTES / GIB, "in GB": 70e9 * MOMENT_BYTES / 1e9}, within=TIGHT,
    ),
    "S2-003": Formula(
        "8 bytes of moments / 2 bytes of weight", lambda: {"for bf16 weights": MOMENT_BYTES / 2}, "x", TIGHT
    ),
    "S2-004": Formula(
        "1,440 checkpoints a month * 70e9 * 12 bytes",
        lambda: {
            "if GiB are counted as GB": MONTH * _bytes(70e9) / GIB / 1e6, "in PB": MONTH * _bytes(70e9) / 1e15,
            "in PiB": MONTH * _bytes(70e9) / 2.0**50,
        }, within=TIGHT,
    ),
    "S2-005": Formula(
        f"1,440 * stall * 128 * 4.40 dollars an hour; {YOUNG}",
        lambda: {
            "with 4,526 GiB counted as GB at 5 GB/s": _idle_usd(MIXED_S), "with GB": _idle_usd(BLOB_S),
            "at Young and Daly's interval": _lost(GPUS, BLOB_S) * 730 * GPUS * USD_B200,
        }, "dollars", see=CHAPTER,
    ),
    "S2-006": Formula(
        f"stall / interval; {YOUNG}",
        lambda: {
            "of the 30 minutes": 100 * MIXED_S / 1800, "of interval and stall": 100 / (1 + 1800 / MIXED_S),
            "at Young and Daly's interval": 100 * _lost(GPUS, BLOB_S),
        }, "%", see=CHAPTER,
    ),
    "S2-008": Formula(
        f"1,440 * 905 s * 128 * 4.40 * (1 - 1/1.38); {KEPT}",
        lambda: {
            "of idle GPU time": _idle_usd(MIXED_S) * (1 - 1 / 1.38),
            "of storage at 0.03": _stored_usd(1.38, 0.03),
            "of storage at 0.1": _stored_usd(1.38, 0.1),
        }, "dollars", note="The document calls it storage.", see=CHAPTER,
    ),
    "S2-011": RangeFormula(
        YOUNG,
        lambda: {
            "for 16,384 GPUs and 60 s": _interval_min(16384, 60), "for 1,024": _interval_min(1024, 60),
            "for 128 and the 972 s of 405B at 5 GB/s": _interval_min(GPUS, BLOB_S),
        }, "minutes", note="At the failure rate that Llama 3 saw.", see=CHAPTER,
    ),
    "S2-013": Formula(
        "8 / bytes a parameter",
        lambda: {
            "at 12 bytes a parameter": 100 * MOMENT_BYTES / _bytes(1.0),
            "with an fp32 master copy": 100 * MOMENT_BYTES / _bytes(1.0, master=4.0),
        }, "%", TIGHT,
    ),
    "S2-017": RangeFormula(
        KEPT, lambda: {f"at {price} dollars": _stored_usd(1.27, price) for price in (0.015, 0.03, 0.1)}, "dollars",
        0.0, claimed=(10e3, 99e3), note="At a ratio of 1.27, if every checkpoint of a month is kept.", see=CHAPTER,
    ),
    "S4-081": RangeFormula(
        f"25,000 * 24 h / {INTERRUPTION}",
        lambda: {"at the rate that Llama 3 saw": float(failures_in(DAY_S, 25_000))}, "a day", 0.0, claimed=at_least,
        see=CHAPTER,
    ),
    "S4-082": Formula(
        "500e9 * bytes",
        lambda: {
            "with both moments": float(checkpoint_bytes(500e9, master=0.0)) / 1e12,
            "with a master copy too": float(checkpoint_bytes(500e9)) / 1e12,
        }, "TB", note="1 TB is the 16-bit weights alone.", see=CHAPTER,
    ),
    "S4-083": Formula(
        YOUNG, lambda: {f"for {n:,} GPUs and 60 s": _interval_min(n, 60) for n in (16384, 2048, 128)}, "minutes", LOOSE,
        claimed=60.0, note="At the failure rate that Llama 3 saw.", see=CHAPTER,
    ),
}  # fmt: skip
