"""The command `bench`: the codec on this device beside a copy, its reference and other people's quantizers.

Prints the tables, records them (chapter "bench") and draws one figure. A peer that is not measured is named.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from typing import Any

from tq.book.record import figures
from tq.book.record.provenance import device_name
from tq.book.record.results import Chapter, chapter, show
from tq.lab import peers
from tq.lab.peers import PEER_ELEMENTS, Comparison, compare_peers
from tq.lab.stats import quartiles
from tq.lab.timing import (
    ELEMENTS,
    SIZES,
    Rate,
    Timing,
    by_size,
    inputs_of,
    keep,
    peak_extra_bytes,
    rates,
    settings,
    standard,
)

BUSY = 0.1  # share of the cores used by others from which ratios are not to be cited


def rate_table(found: Sequence[Rate]) -> Any:
    """A DataFrame of rates, medians with quartiles."""
    import pandas as pd

    rows = []
    for rate in found:
        row: dict[str, Any] = {"setting": rate.label, "bits": f"{rate.bits_per_element:.4g}"}
        for verb, timing in (("encode", rate.encode), ("decode", rate.decode)):
            row[f"{verb}, G elements/s"] = str(timing.g_elements_per_s)
            row[f"{verb}, GB/s"] = f"{timing.gb_per_s.median:.3g}"
            row[f"{verb}, share of copy"] = f"{timing.share_of_copy.median:.1%}"
        rows.append(row)
    return pd.DataFrame(rows)


def peer_table(rows: Sequence[Comparison]) -> Any:
    """A DataFrame of comparisons, medians with quartiles."""
    import pandas as pd

    return pd.DataFrame(
        {
            "peer": row.peer.name,
            "bits": f"{row.peer.bits_per_element:.4g}",
            "NMSE": f"{row.nmse:.2g}",
            "encode, G elements/s": f"{row.rate.encode.g_elements_per_s.median:.3g}",
            "decode, G elements/s": f"{row.rate.decode.g_elements_per_s.median:.3g}",
            "ours: bits": f"{row.ours.bits_per_element:.4g}",
            "ours: NMSE": f"{row.ours_nmse:.2g}",
            "encode, ours is × as fast": str(row.encode_over),
            "decode, ours is × as fast": str(row.decode_over),
            "note": row.peer.note,
        }
        for row in rows
    )


def draw(sizes: Sequence[Rate], rows: Sequence[Comparison]) -> Any:
    """The figure: throughput against size beside what copy speed would give, and ours over each peer."""
    fig, (left, right) = figures.figure("wide", cols=2)
    counts, blue, grey = [r.encode.elements for r in sizes], figures.line_style("tq"), figures.colour("copy")
    for verb, look in (("encode", {}), ("decode", {"linestyle": "--", "markerfacecolor": figures.PAPER})):
        speeds = [getattr(rate, verb).g_elements_per_s for rate in sizes]
        left.fill_between(counts, [s.low for s in speeds], [s.high for s in speeds], color=blue["color"], alpha=0.15)
        left.plot(counts, [s.median for s in speeds], label=verb, **{**blue, **look})
        figures.label_line(left, counts[-1], speeds[-1].median, verb, blue["color"])
    limits = [_median(r.encode.copy_bytes_per_s) / r.encode.bytes_per_element / 1e9 for r in sizes]
    left.plot(counts, limits, label="at copy speed", **figures.line_style("copy"))
    figures.label_line(left, counts[-1], limits[-1], "at copy speed", grey, dx=0, dy=9, align="right")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set(title="Throughput", xlabel="fp32 elements", ylabel="G elements/s")
    left.margins(x=0.2)
    for place, row in enumerate(rows):
        family = figures.method(row.peer.family)
        for verb, over, shift in (("encode", row.encode_over, -0.17), ("decode", row.decode_over, 0.17)):
            ends = {"color": family.colour, "label": f"{row.peer.name}, {verb}"}
            right.plot([over.low, over.high], [place + shift] * 2, **ends)
            right.plot(over.median, place + shift, family.marker, **ends)
            figures.label_line(right, over.high, place + shift, verb, family.colour)
    right.axvline(1, color=figures.SOFT, linewidth=0.8)
    right.set_xscale("log")
    right.margins(x=0.3)
    right.set_yticks(range(len(rows)), [row.peer.name for row in rows])
    right.invert_yaxis()
    right.set(title="Ours over others", xlabel="times as fast, on the same data")
    return fig


def _median(values: Sequence[float]) -> float:
    return quartiles(values)[1]


def _key(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def _record(ch: Chapter, kind: str, label: str, found: Rate | Comparison) -> None:
    """Throughputs of a rate, or ratios of a comparison, with their quartiles."""
    for verb in ("encode", "decode"):
        values = {}
        if isinstance(found, Rate):
            timing: Timing = getattr(found, verb)
            values = {"rate": (timing.g_elements_per_s, "G elements/s"), "share-of-copy": (timing.share_of_copy, "1")}
        else:
            values = {"over": (getattr(found, f"{verb}_over"), "1")}
        turns = len((found if isinstance(found, Rate) else found.ours).encode.seconds)
        for what, (spread, unit) in values.items():
            keep(ch, f"{kind}{verb}-{what}/{_key(label)}", spread, turns, unit)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _with_peers(ch: Chapter, elements: int, repeats: int) -> tuple[list[Comparison], list[peers.Missing]]:
    """Times and records the codec beside every peer that is installed; and which are not."""
    rows, missing = compare_peers(ch.device, elements, repeats)
    for row in rows:
        _record(ch, "", row.peer.name, row)
        ch.record(f"nmse/{_key(row.peer.name)}", row.nmse)
    for absent in missing:
        ch.record(f"not-measured/{_key(absent.name)}", absent.reason)
    return rows, missing


def run(device: str = "auto", elements: int | None = None, repeats: int = 7) -> Chapter:
    """Times, prints and records (chapter "bench") the codec on this device: settings, sizes, memory and peers.

    elements: of a tensor, at least 1024; default: `ELEMENTS` of the device. Peers, and ours beside them, get at most
    `PEER_ELEMENTS`. repeats: turns that are timed; sizes get three times as many, for small calls scatter more.
    """
    import torch
    from tqdm import tqdm

    if elements is not None and elements < 1024:
        raise ValueError(f"elements={elements!r}: at least 1024")
    versions = {name: _version(name) for name in peers.PEERS if not name.startswith(peers.OWN)}
    ch = chapter("bench", device=device, parameters={"elements": elements, "repeats": repeats, "peers": versions})
    elements = elements or ELEMENTS[ch.device]
    part = min(elements, PEER_ELEMENTS[ch.device]) // 1024 * 1024  # whole blocks for all of them
    tell = partial(tqdm.write, file=sys.stdout)  # not through the bar
    with tqdm(total=4, disable=None, leave=False, bar_format="{desc} {bar:24} {n_fmt}/{total_fmt}") as bar:
        bar.set_description("settings")
        found = rates(ch.device, elements, settings(), repeats, ch.seed)
        copy_gb_per_s = ch.record_samples("copy", [v / 1e9 for v in found[0].encode.copy_bytes_per_s], "GB/s")
        for rate in found:
            _record(ch, "", rate.label, rate)
        threads = f", {torch.get_num_threads()} threads" if ch.device == "cpu" else ""
        caption = f"{elements:,} elements on {device_name(ch.device)}{threads}, blocks of 128; median [quartiles] of"
        caption += f" {repeats} turns. A copy of fp32 moves {copy_gb_per_s:.3g} GB/s."
        tell(f"{ch.table('settings', rate_table(found), caption)}\n")
        bar.update()
        bar.set_description("sizes")
        fitting = [size for size in SIZES[ch.device] if size <= 4 * elements] or [elements]
        sizes = by_size(ch.device, fitting, 3 * repeats)
        for rate in sizes:
            _record(ch, "by-size/", str(rate.encode.elements), rate)
        caption = f"4 bits, fp32, by size; median [quartiles] of {3 * repeats} turns."
        tell(f"{ch.table('sizes', rate_table(sizes), caption)}\n")
        bar.update()
        bar.set_description("memory")
        codec, x = standard(), inputs_of(ch.device, elements)[0]
        extra = peak_extra_bytes(partial(codec.encode, x, out=codec.encode(x)), ch.device)
        share = ch.record("encode-extra-memory", None if extra is None else extra / x.nbytes)
        tell(f"Most memory of an encode beyond input and output, of the input: {show(share, '.2%')}\n")
        bar.update()
        bar.set_description("peers")
        rows, missing = _with_peers(ch, part, repeats)
        caption = f"{part:,} Gaussian fp32 elements, ours as many; median [quartiles] of {repeats} turns."
        tell(f"{ch.table('peers', peer_table(rows), caption)}\n")
        bar.update()
    shares = [r.encode.others for r in [*found, *sizes, *(row.rate for row in rows)] if r.encode.others is not None]
    others = ch.record("others-share-of-cores", max(shares, default=None))
    if others is None or others > BUSY:
        print(f"Do not cite these ratios: other processes used up to {show(others, '.0%')} of the cores, and peers on")
        print("PyTorch's thread pool, whose waiting threads spin, lose far more by that than the codec does.")
    for absent in missing:
        print(f"Not measured: {absent.name}: {absent.reason}")
    alt = "Left: encoding and decoding speed against tensor size. Right: speed of the codec over that of each peer."
    caption = f"Throughput of 4 bits by size, and over peers at {part:,} elements, with quartiles."
    ch.figure("throughput", draw(sizes, rows), alt, caption)
    return ch
