"""Timing by ratios in one run: medians and quartiles of repeats, beside a copy of the same bytes. No bare seconds.

`time_calls` interleaves what it compares, so that a slow minute of the machine meets all of them. The command times the
codec on this device against a copy, the PyTorch reference and installed peers; a missing peer is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tq.book.results import Chapter, chapter, quartiles


def time_calls(calls: Mapping[str, Callable[[], Any]], repeats: int = 7, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each call, `repeats` times, the calls taken in turn. CUDA work is waited for."""
    import torch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats!r}, warmup={warmup!r}: at least 1 and 0")
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + repeats):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            if turn >= warmup:
                samples[name].append(time.perf_counter() - start)
    return samples


def _peers(x: Any) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Round trips of other people's 4-bit quantizers that are installed, and the names of those that are not."""
    found: dict[str, Callable[[], Any]] = {}
    missing = []
    try:
        import bitsandbytes.functional as bnb
    except ImportError:
        missing.append("bitsandbytes (NF4)")
    else:

        def nf4() -> Any:
            return bnb.dequantize_4bit(*bnb.quantize_4bit(x, blocksize=64, quant_type="nf4"))

        found["bitsandbytes NF4 round trip"] = nf4
    return found, missing


def run(device: str = "auto", elements: int = 1 << 24, repeats: int = 7) -> Chapter:
    """Times, prints and records (chapter "bench") a table of the codec's throughput on random fp32 input."""
    import torch

    from tq import Codec

    ch = chapter("bench", device=device)
    generator = torch.Generator(ch.device).manual_seed(ch.seed)
    x = torch.randn(elements, generator=generator, device=ch.device)
    y = torch.empty_like(x)
    codec = Codec(bits=4, block=128, rounds=1)
    code = codec.encode(x)
    search = Codec(bits=4, block=128, rounds=1, scale="mse", search=5)
    searched = search.encode(x)
    small = x[: elements // 16]
    peers, missing = _peers(x)
    samples = time_calls(
        {
            "copy": lambda: y.copy_(x),
            "encode": lambda: codec.encode(x, out=code),
            "encode, search 5": lambda: search.encode(x, out=searched),
            "decode": lambda: codec.decode(code, out=y),
            **peers,
        },
        repeats,
    )
    # the reference is slow: a sixteenth of the elements, and its own ratio to the kernel on the same ones
    reference = time_calls(
        {
            "reference encode": lambda: codec.encode(small, impl="reference"),
            "encode of the same": lambda: codec.encode(small),
        },
        repeats,
    )
    copy_s = quartiles(samples["copy"])[1]
    # what a codec that only moved its 4 + 0.53 bytes an element at the copy's bandwidth would need, of the copy's 8
    floor_s = copy_s * (4 + codec.bits_per_element / 8) / 8
    print(f"{elements:,} fp32 elements on {ch.device}, {torch.get_num_threads()} threads, b=4, B=128, one round")
    print(f"{'':28} {'G elements/s':>14} {'quartiles':>15} {'of copy speed':>14}")
    for name, values in samples.items():
        low, median, high = quartiles(values)
        rate = [elements / t / 1e9 for t in (high, median, low)]
        key = name.replace(",", "").replace(" ", "-").lower()
        ch.record(f"rate/{key}", rate[1], "G elements/s", low=rate[0], high=rate[2], spread="quartiles", n=repeats)
        share = floor_s / median if name != "copy" else 1.0
        ch.record(f"share-of-copy/{key}", share)
        print(f"{name:28} {rate[1]:14.3f} {rate[0]:7.3f}–{rate[2]:<7.3f} {share:14.1%}")
    ratios = [r / k for r, k in zip(reference["reference encode"], reference["encode of the same"], strict=True)]
    print(f"encode over the PyTorch reference: {ch.record_samples('speedup-over-reference', ratios):.1f}×")
    if missing:
        print("not installed, so not measured:", ", ".join(missing), "(pip install '.[peers]')")
    return ch
