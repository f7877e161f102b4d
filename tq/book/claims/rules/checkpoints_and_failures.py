"""Rules over the bytes of checkpoints, how often they are written, and what failures cost."""

from __future__ import annotations

from tq.book.claims.formulas import GIB, Formula, Free, RangeFormula
from tq.book.claims.ledger import COMPUTED, NOT_MEASURED, PRINTED, Claim, Finding, Results, Rule, found
from tq.book.claims.words import Check, compare, in_part
from tq.systems.checkpoint import MOMENT_BYTES, checkpoint_bytes, lost_share, write_s, young_interval_s
from tq.systems.failures import DAY_S, failures_in, mtbf_s

CHAPTER = "checkpoints-and-failures"
MONTH = 1440  # checkpoints, one every 30 minutes
STORE = 5e9  # bytes/s, of the page that S2-005 rests on
USD_B200 = 4.40  # an hour, of the same page
GPUS = 128
INTERRUPTION = "GPU-hours between interruptions (data/reliability.csv)"
YOUNG = f"Young's interval sqrt(2 * write time * {INTERRUPTION} / GPUs)"
KEPT = "1,440 * 12 bytes per parameter * (1 - 1 / ratio) * price (listed: $0.015 to $0.1 per GB and month)"
NVCOMP = 1.27  # ratio of dense models that NVIDIA prints on the page that the document rests on


def _bytes(parameters: float, master: float = 0.0) -> float:
    """As the document counts: 16-bit weights and gradients and both moments, 12 bytes per parameter."""
    return float(checkpoint_bytes(parameters, master=master, gradients=2.0))


def _interval_min(gpus: int, delta_s: float) -> float:
    return float(young_interval_s(delta_s, mtbf_s(gpus))) / 60


def _lost(gpus: int, delta_s: float) -> float:
    """Share of the time that is lost at Young's interval."""
    mtbf = mtbf_s(gpus)
    return float(lost_share(young_interval_s(delta_s, mtbf), delta_s, mtbf))


BLOB_S = float(write_s(_bytes(405e9), STORE))  # of 405B


def _idle_usd(stall_s: float) -> float:
    """Of the GPUs that wait, in a month."""
    return MONTH * stall_s / 3600 * GPUS * USD_B200


def _stored_usd(ratio: float, usd_per_gb_month: float, parameters: float = 70e9) -> float:
    """What lossless compression saves of the storage of a month's checkpoints, all of them kept."""
    return MONTH * _bytes(parameters) / 1e9 * usd_per_gb_month * (1 - 1 / ratio)


def storage_saving(claim: Claim, results: Results) -> Finding:
    """Reproduced if compression by the measured ratio takes the claimed sum off the storage of a month's checkpoints of
    70B, the model whose bytes per month the document names, at some listed price, $0.015 to $0.1 per GB and month. A
    part holds if it does of 405B, or takes that sum off the GPU time that stands idle for 405B."""
    ratio, (low, high) = results(CHAPTER, "ratio/ours/mix"), claim.bounds()
    idle = _idle_usd(BLOB_S) * (1 - 1 / ratio)
    checks: list[Check] = []
    said: list[str] = []
    for size, whole in ((70, True), (405, False)):
        least, most = (_stored_usd(ratio, price, size * 1e9) for price in (0.015, 0.1))
        text = f"storage of {size}B saves ${least:,.0f} to ${most:,.0f}, must overlap {low:,.0f} to {high:,.0f}"
        checks.append(Check(text, least <= high and low <= most, part=not whole))
        said.append(f"${least:,.0f} to ${most:,.0f}")
    checks.append(in_part(compare("dollars of idle GPU time saved", idle, low, high)))
    text = (
        f"At the measured ratio of {ratio:.2f}, compression is modelled to save {said[0]} of monthly storage for 70B, "
        f"all kept, at listed prices, {said[1]} for 405B. Idle GPU time, which NVIDIA's page counts, saves "
        f"${idle:,.0f} for 405B."
    )
    change = "The bytes and prices behind the document's figure."
    return found(claim, checks, text, change, "medium", KEPT, basis=COMPUTED)


PARTIAL = 20.0  # % of the loss that a partial solution leaves


def async_is_partial(claim: Claim, results: Results) -> Finding:
    """Reproduced if saving in the background leaves at least a fifth of what synchronous writes are modelled to lose at
    the document's interval. A part holds if lossless compression, as measured, still takes a tenth off the bytes.

    A first rule, which could not fail, was replaced after the first recording.
    """
    whole, left = (
        results(CHAPTER, f"month/{name}/every-30-min") for name in ("as-the-document", "in-the-background")
    )
    ratio = results(CHAPTER, "ratio/ours/mix")
    checks = (
        compare("% of the loss that is left", 100 * left / whole, PARTIAL),
        in_part(compare("times smaller by lossless compression", ratio, 1.1)),
    )
    text = (
        f"For 405B on 128 GPUs, saving in the background every 30 minutes is modelled to lose ${left:,.0f} per month, "
        f"saving synchronously ${whole:,.0f}: {left / whole:.0%} of it is left. Compression by {ratio:.2f} (measured) "
        "still saves bytes."
    )
    change = "A measured stall of an asynchronous save on GPUs."
    return found(claim, checks, text, change, "medium", basis=COMPUTED)


FAR, SIGNIFICANT = 3.0, 5.0  # times that one cost is far above another; % of the bill that is significant
PRICE = 0.023  # dollars per GB and month


def idle_against_storage(claim: Claim, results: Results) -> Finding:
    """Far greater is at least three times: idle GPUs over storage in the document's month, every checkpoint kept. A
    part holds if it is so with the last ten kept."""
    stored = MONTH * _bytes(405e9) / 1e9 * PRICE
    idle = _idle_usd(BLOB_S)
    checks = (
        compare("dollars of idle GPUs over dollars of storage, all kept", idle / stored, FAR),
        in_part(compare("the same, with the last ten kept", idle / (stored * 10 / MONTH), FAR)),
    )
    text = (
        f"Modelled for 405B on 128 GPUs, saving every 30 minutes: idle GPUs cost ${idle:,.0f} per month, storage "
        f"${stored:,.0f} if every checkpoint is kept and ${stored * 10 / MONTH:,.0f} if ten are."
    )
    formula = "1,440 writes * stall * 128 GPUs * $4.40 per hour, over 1,440 * 4.86 TB * $0.023 per GB and month"
    return found(claim, checks, text, "A faster store, or another price per GB.", "medium", formula)


def compression_saves(claim: Claim, results: Results) -> Finding:
    """Reproduced if lossless compression by the measured ratio is modelled to save at least 5 % of the GPU bill at the
    interval that loses least. A part holds if it does every 30 minutes, the document's interval."""
    bill = MONTH / 2 * GPUS * USD_B200
    best = results(CHAPTER, "month/saved-by-compression-at-best")
    often = results(CHAPTER, "month/as-the-document/every-30-min")
    often -= results(CHAPTER, "month/losslessly-compressed/every-30-min")
    checks = (
        compare("% of the bill saved at the best interval", 100 * best / bill, SIGNIFICANT),
        in_part(compare("% of the bill saved every 30 minutes", 100 * often / bill, SIGNIFICANT)),
    )
    text = (
        f"With our codec's measured ratio, compression is modelled to save ${best:,.0f} per month at the best "
        f"interval, {100 * best / bill:.1f}% of the bill of 128 GPUs. Every 30 minutes it saves ${often:,.0f}, "
        f"{100 * often / bill:.0f}%. nvCOMP was not run."
    )
    change = "nvCOMP on a GPU, beside a parallel file system."
    return found(claim, checks, text, change, "medium", basis=COMPUTED)


MOST_LINES = 33.0  # "around 30"
SHORTENED = 0.95  # of the time of a raw load


def short_wrapper(claim: Claim, results: Results) -> Finding:
    """Reproduced if a wrapper of about thirty lines restores weights and moments bit for bit and takes a tenth off."""
    lines, exact, ratio = (results(CHAPTER, f"short/{key}") for key in ("lines", "exact", "ratio"))
    fits = lines <= MOST_LINES and exact == 1 and ratio >= 1.1
    checks = (
        Check(f"{lines:.0f} lines, exact {exact:.0f}, {ratio:.3f} times smaller (required: {MOST_LINES:.0f}, 1, 1.1)",
              fits),
    )  # fmt: skip
    text = (
        f"{lines:.0f} lines of Python make weights and both moments {ratio:.3f} times smaller, bit for bit, with the "
        "Huffman coder of the standard library. They take fp32 tensors only and write no checksum."
    )
    return found(claim, checks, text, "A wrapper that fails on a state of training.", "medium")


def all_wait(claim: Claim, results: Results) -> Finding:
    """Reproduced if in a synchronous save every rank waits at least 90 % of what one slow writer takes longer."""
    least = results(CHAPTER, "slow-writer/least-wait")
    checks = (compare("least wait of any rank, over the slow writer's delay", least, 0.9),)
    text = (
        f"In a synchronous save of four processes, of which one writes slowly, the quickest still waits {least:.2f} "
        "times the delay (torch.distributed.checkpoint over gloo, on a CPU)."
    )
    return found(claim, checks, text, "A writer whose delay the other ranks do not notice.", "high")


def cold_start(claim: Claim, results: Results) -> Finding:
    """Reproduced if a compressed checkpoint that is not in memory loads in at most 95 % of the time of a raw one.

    A first rule let a part hold where the disk is slower than one core decodes. It was replaced after the recording: a
    load that is slower is no reduced time.
    """
    ratio, disk = results(CHAPTER, "cold/ours-over-torch"), results(CHAPTER, "cold/disk")
    checks = (compare("time to load, over a raw load", ratio, most=SHORTENED),)
    text = (
        f"From a disk of {disk:.2f} GB/s a losslessly compressed checkpoint loads in {ratio:.2f} times the time of a "
        "raw one, checks included. A slower store would favour it; a GPU decoder was not measured."
    )
    return found(claim, checks, text, "A faster or slower store, or a decoder on a GPU.", "medium")


def repeats(claim: Claim, results: Results) -> Finding:
    """Reproduced if training with the same code, seeds, data and ranks ends in different bits on CPUs. If it does not,
    GPUs have to decide, whose kernels may add in any order: not measured.

    A first rule let another number of ranks count in part, a second let CPUs refute it. Both were replaced after the
    recording: another number is another run, and most training runs on GPUs.
    """
    same, other = results(CHAPTER, "repeat/same-ranks"), results(CHAPTER, "repeat/other-ranks")
    checks = (compare("share of repeated runs that are equal", same, most=0.0),)
    text = (
        f"On four CPU ranks repeated runs {'end in the same bits' if same else 'differ'}; on two, the same data "
        f"{'does too' if other else 'ends in other bits'}. GPUs, whose kernels may add in any order, were not measured."
    )
    if all(check.holds for check in checks):
        return found(claim, checks, text, "The same run twice on GPUs.", "low")
    return Finding(NOT_MEASURED, text, "The same run twice on GPUs.", checks=checks)


RULES: dict[str, Rule] = {
    "S2-001": Formula(
        "70e9 * bytes per parameter", lambda: {"in GiB at 12 bytes per parameter": _bytes(70e9) / GIB},
        "A 70B checkpoint with 12 bytes per parameter is computed to take {0:.0f} GiB, which the document writes as GB "
        "({1:.0f} GB). An fp32 master copy would add a third.",
        "A statement of which tensors such a checkpoint holds.", conditions=lambda: {"in GB": _bytes(70e9) / 1e9},
    ),
    "S2-002": Formula(
        "70e9 * 8 bytes", lambda: {"in GiB": 70e9 * MOMENT_BYTES / GIB},
        "Two fp32 moments of 70 billion parameters are computed to take {0:.0f} GiB, or {1:.0f} GB. The document "
        "writes GB for GiB.",
        "Moments of another width than four bytes.", conditions=lambda: {"in GB": 70e9 * MOMENT_BYTES / 1e9},
    ),
    "S2-003": Formula(
        "8 bytes of moments / 2 bytes of weight", lambda: {"16-bit weights": MOMENT_BYTES / 2},
        "Two fp32 moments are computed to take {0:.0f} times the bytes of the 16-bit weights. Against the weights "
        "together with an fp32 master copy it is {1:.2f} times.",
        "Weights of another width than two bytes.", "x",
        conditions=lambda: {"with a master copy": MOMENT_BYTES / 6},
    ),
    "S2-004": Formula(
        "1,440 checkpoints per month * 70e9 * 12 bytes",
        lambda: {"GiB counted as GB": MONTH * _bytes(70e9) / GIB / 1e6, "in PB": MONTH * _bytes(70e9) / 1e15},
        "1,440 checkpoints of 782 GiB are computed to take {0:.2f} million GiB per month, or {1:.2f} PB. The document "
        "writes PB for a million GiB.",
        "A month in which not all checkpoints are kept.",
    ),
    "S2-005": Formula(
        "1,440 writes * stall * 128 GPUs * $4.40 per hour", lambda: {"a write every 30 minutes": _idle_usd(BLOB_S)},
        "A write every 30 minutes at 5 GB/s is modelled to cost ${0:,.0f} per month in 128 idle GPUs. At Young's "
        "interval writes and failures together cost ${1:,.0f}.",
        "A store faster than 5 GB/s, or fewer writes per month.", "dollars", see=CHAPTER,
        conditions=lambda: {"at Young's interval": _lost(GPUS, BLOB_S) * 730 * GPUS * USD_B200},
    ),
    "S2-008": storage_saving,
    "S2-010": Formula(
        "The printed number of interruptions in 54 days on 16,384 H100 (data/reliability.csv)",
        lambda: {"unexpected": 419.0},
        "Meta printed {0:.0f} unexpected interruptions in 54 days on 16,384 H100, and {1:.0f} with planned ones. That "
        "is about one every three hours; a Poisson count of this size is known to 10%.",
        "Another count in table 5 of the Llama 3 paper.", "interruptions", basis=PRINTED, confidence="medium",
        conditions=lambda: {"with planned ones": 466.0},
    ),
    "S2-011": Free(
        YOUNG, of=lambda write: _interval_min(16384, write), over=(1, 1000), usual=60,
        name="write times in seconds", unit="minutes", see=CHAPTER, claimed=(15.0, 30.0), within=0.0,
        conditions=lambda: {"for 128 GPUs and the 972 s of 405B at 5 GB/s": _interval_min(GPUS, BLOB_S)},
        says="On 16,384 GPUs the best interval is modelled at 15 to 30 minutes for writes of {low:.0f} to "
        "{high:.0f} seconds. It is {0:.0f} minutes at 60 seconds, and {1:,.0f} minutes for 405B on 128 GPUs.",
        would_change="The time that Meta's checkpoint writes took.",
    ),
    "S2-007": short_wrapper,
    "S2-014": all_wait,
    "S2-015": async_is_partial,
    "S2-016": cold_start,
    "S2-018": idle_against_storage,
    "S2-019": compression_saves,
    "S2-013": RangeFormula(
        "8 bytes of moments / bytes per parameter, above one half",
        lambda: {"at 12 bytes per parameter": 100 * MOMENT_BYTES / _bytes(1.0)},
        "Both moments are computed to take {0:.0f}% of a checkpoint of 12 bytes per parameter, and {1:.0f}% of one "
        "with an fp32 master copy. They are the largest part of either.",
        "Moments that are stored in fewer bits than the weights.", "%", claimed=(50.0, 100.0), within=0.0,
        conditions=lambda: {"with an fp32 master copy": 100 * MOMENT_BYTES / _bytes(1.0, master=4.0)},
    ),
    "S2-017": Free(
        KEPT, of=lambda price: _stored_usd(NVCOMP, price), over=(0.01, 0.15), usual=0.03,
        name="prices in dollars per GB and month", unit="dollars", claimed=(10e3, 99e3), within=0.1, see=CHAPTER,
        conditions=lambda: {"if the last ten are kept": _stored_usd(NVCOMP, 0.03) / 144},
        says="By NVIDIA's printed ratio of 1.27, compression is modelled to save ${0:,.0f} per month of 70B's storage "
        "at $0.03 per GB, every checkpoint kept. Tens of thousands, within a tenth, need ${low:.3f} or more; ten kept "
        "save ${1:,.0f}.",
        would_change="A statement of how many checkpoints are kept.",
    ),
    "S4-081": RangeFormula(
        f"25,000 GPUs * 24 h / {INTERRUPTION}", lambda: {"failures": float(failures_in(DAY_S, 25_000))},
        "A cluster of 25,000 GPUs is modelled to stop {0:.0f} times per day at the interruption rate that Meta printed "
        "for Llama 3.",
        "A cluster that fails a tenth as often.", "per day", claimed=(2.0, 1e9), within=0.0, see=CHAPTER,
    ),
    "S4-082": Formula(
        "500e9 * bytes per parameter",
        lambda: {"weights and both moments": float(checkpoint_bytes(500e9, master=0.0)) / 1e12},
        "Weights and optimizer state of 500 billion parameters are computed to take {0:.0f} TB, and {1:.0f} TB with an "
        "fp32 master copy. One TB holds the 16-bit weights alone.",
        "An optimizer state that takes almost no bytes.", "TB", see=CHAPTER,
        conditions=lambda: {"with an fp32 master copy too": float(checkpoint_bytes(500e9)) / 1e12},
    ),
    "S4-083": Free(
        YOUNG, of=lambda gpus: _interval_min(round(gpus), 60), over=(8, 100_000), usual=16_384,
        name="cluster sizes in GPUs", unit="minutes", claimed=(60.0, 60.0), within=0.1, see=CHAPTER,
        says="An interval of one hour is modelled to be best for {low:,.0f} to {high:,.0f} GPUs, at Llama 3's "
        "interruption rate and writes of one minute. For 16,384 GPUs it is {0:.0f} minutes.",
        would_change="A statement of which cluster sizes are typical.",
    ),
    "S4-085": repeats,
}
