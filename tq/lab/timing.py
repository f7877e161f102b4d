"""Throughput of the codec beside a copy, its reference and other people's quantizers, in one run. No bare seconds.

What is compared takes turns, so that a slow minute of the machine meets all of it, and ratios are taken turn by turn.
Buffers rotate from call to call, whichever call it is, so that none finds its data in the caches. A peer that is not
measured is named, with the reason.
How much other processes took of the machine is measured as well: beside them peers lose more than the codec does.

Terms: G elements/s and GB/s count 1e9. The bytes of a codec are those that it must move: one element in and its stored
bits out, or the reverse. "Share of copy" is the time that `y.copy_(x)` of fp32 (read and write counted) would need
for as many bytes, over the time that was needed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tq.lab.stats import Recorder, quartiles

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tq.quant.codec import Codec

COPY_BYTES = 8  # that a copy moves for an fp32 element
ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
SIZES = {"cpu": tuple(1 << k for k in (20, 22, 24, 26)), "cuda": tuple(1 << k for k in (20, 22, 24, 26, 28))}
_M_MMAP_THRESHOLD = -3  # of malloc.h
_ROW = 1 << 24  # elements that a sample of `by_size` covers at least
_ROW_S, _ROW_CALLS = 0.01, 100  # a sample on a GPU lasts as long, or is of as many calls
MOST_BYTES = 1 << 30  # of buffers that rotate: more than twice the largest caches; four times those would be 2 GB a set


class Spread(NamedTuple):
    """Lower quartile, median and upper quartile of the turns."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, turn by turn, and bytes/s of the copy in the same turns."""

    elements: int
    bytes_per_element: float
    seconds: tuple[float, ...]
    copy_bytes_per_s: tuple[float, ...]
    others: float | None = None  # share of the cores that other processes used meanwhile; None: unknown

    @property
    def g_elements_per_s(self) -> Spread:
        return Spread(*quartiles(self.elements / t / 1e9 for t in self.seconds))

    @property
    def gb_per_s(self) -> Spread:
        """1e9 bytes/s of what must be moved."""
        return Spread(*(rate * self.bytes_per_element for rate in self.g_elements_per_s))

    @property
    def share_of_copy(self) -> Spread:
        """1 would be as fast as a copy of the same bytes."""
        moved = self.elements * self.bytes_per_element
        pairs = zip(self.seconds, self.copy_bytes_per_s, strict=True)
        return Spread(*quartiles(moved / rate / t for t, rate in pairs))

    def over(self, other: Timing) -> Spread:
        """How many times as fast as `other` per element, turn by turn; both must be of one run."""
        if len(self.seconds) != len(other.seconds):
            raise ValueError(f"{len(self.seconds)} turns against {len(other.seconds)}: they are not of one run")
        pairs = zip(self.seconds, other.seconds, strict=True)
        return Spread(*quartiles((theirs / other.elements) / (ours / self.elements) for ours, theirs in pairs))


@dataclass(frozen=True)
class Rate:
    """One setting of the codec: how fast it encodes and decodes."""

    label: str
    bits_per_element: float
    encode: Timing
    decode: Timing


def time_calls(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int = 7,
    warmup: int = 1,
    inner: int | None = None,
    settle: int = 0,
) -> dict[str, list[float]]:
    """Seconds of each call, `repeats` times, the calls taken in turn; a sample is the mean of `inner` calls in a row.

    inner: None takes 1 on a CPU and, once CUDA is in use, as many as last 10 ms (at most 100): the next is queued while
    one runs, as in a training step, so the ~100 us that Python needs for a call do not count into a kernel of 300 us.
    CUDA work is waited for. settle: calls before each sample that are not timed. Threads of an OpenMP pool spin for
    milliseconds when their work is done; where libraries bring pools of their own, one would spin while another is
    timed.
    """
    import torch

    if repeats < 1 or warmup < 0 or (inner is not None and inner < 1):
        raise ValueError(f"repeats={repeats!r}, warmup={warmup!r}, inner={inner!r}: at least 1, 0 and 1")

    def wait() -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def sample(call: Callable[[], Any], count: int) -> float:
        for _ in range(settle):
            call()
        wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        return (time.perf_counter() - start) / count

    rows = dict.fromkeys(calls, inner or 1)
    for _ in range(warmup):
        for name, call in calls.items():
            sample(call, rows[name])
    if inner is None and torch.cuda.is_initialized():
        lone_s = {name: sample(call, 1) for name, call in calls.items()}
        rows = {name: min(_ROW_CALLS, math.ceil(_ROW_S / max(t, 1e-9))) for name, t in lone_s.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            taken[name].append(sample(call, rows[name]))
    return taken


def watched(
    calls: Mapping[str, Callable[[], Any]], repeats: int, settle: int = 0
) -> tuple[dict[str, list[float]], float | None]:
    """`time_calls`, and the share of the machine's cores that other processes used meanwhile (Linux; else None)."""

    def busy_s() -> float | None:
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, steal = (int(ticks) for ticks in fields)
        total_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return total_s - time.process_time()

    before_s, start = busy_s(), time.perf_counter()
    samples = time_calls(calls, repeats, settle=settle)
    wall_s, after_s = time.perf_counter() - start, busy_s()
    if before_s is None or after_s is None:
        return samples, None
    return samples, max(0.0, after_s - before_s) / (wall_s * (os.cpu_count() or 1))


# --- buffers --------------------------------------------------------------------------------------------------


def cache_bytes(device: str) -> int:
    """Size of the last-level cache; 32 MiB where the system does not say."""
    if device == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    sizes = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size[:-1]) * unit[size[-1]] for size in sizes if size[-1:] in unit), default=32 << 20)


def buffer_count(nbytes: int, device: str, most_bytes: int = MOST_BYTES) -> int:
    """How many buffers of this size rotate: at least 3 and four caches full, or 1 that is larger than four caches.

    most_bytes: of all of them. What it cuts short (never below 3) may be found in the caches again: for a rehearsal,
    or where caches are so large that four of them would fill the memory.
    """
    if nbytes > 4 * cache_bytes(device):
        return 1
    return max(3, min(math.ceil(4 * cache_bytes(device) / nbytes), most_bytes // nbytes))


def inputs_of(device: str, elements: int, seed: int = 0, most_bytes: int = MOST_BYTES) -> list[Tensor]:
    import torch

    count = buffer_count(4 * elements, device, most_bytes)
    generator = torch.Generator(device).manual_seed(seed)
    return list(torch.randn(count, elements, generator=generator, device=device).unbind())


def outputs_of(inputs: Sequence[Tensor]) -> list[Tensor]:
    """As many outputs. They are written to once: fresh pages would be charged to the first calls."""
    import torch

    return [torch.empty_like(x).fill_(1.0) for x in inputs]


def rotating(
    call: Callable[..., Any], *buffers: Sequence[Any], turns: Iterator[int] | None = None
) -> Callable[[], Any]:
    """`call` on the next buffer of each sequence, every time.

    turns: one `itertools.count()` for all that are timed together, or each would find what the one before has read.
    """
    together = list(zip(*buffers, strict=True))
    place = itertools.count() if turns is None else turns
    return lambda: call(*together[next(place) % len(together)])


# --- the codec itself -----------------------------------------------------------------------------------------


def standard(bits: int = 4) -> Codec:
    """The setting that everything is compared at: blocks of 128, one round, no search."""
    from tq.quant.codec import Codec

    # "raise" would look through the scales once more
    return Codec(bits=bits, block=128, rounds=1, nonfinite="propagate")


def calls_of(
    codec: Codec, inputs: Sequence[Tensor], outputs: Sequence[Tensor], turns: Iterator[int] | None = None
) -> tuple[Callable[[], Any], ...]:
    """(encode, decode) on rotating buffers, without an allocation."""
    codes = [codec.encode(x) for x in inputs]
    return (
        rotating(lambda x, code: codec.encode(x, out=code), inputs, codes, turns=turns),
        rotating(lambda code, y: codec.decode(code, out=y), codes, outputs, turns=turns),
    )


def rate_of(
    label: str,
    bits: float,
    itemsize: int,
    elements: int,
    samples: Mapping[str, Sequence[float]],
    others: float | None,
    *,
    copy: str = "copy",
) -> Rate:
    """The rate called `label` from samples of `encode label`, `decode label` and a copy of fp32."""
    copied = tuple(COPY_BYTES * elements / t for t in samples[copy])
    encode, decode = (
        Timing(elements, itemsize + bits / 8, tuple(samples[f"{verb} {label}"]), copied, others)
        for verb in ("encode", "decode")
    )
    return Rate(label, bits, encode, decode)


def rates(
    device: str,
    elements: int,
    settings: Mapping[str, tuple[Codec, torch.dtype]],
    repeats: int = 7,
    seed: int = 0,
    *,
    most_bytes: int = MOST_BYTES,
) -> list[Rate]:
    """Throughput of each setting (codec, dtype of what it encodes) on Gaussian data, all in one run with a copy.

    most_bytes: of the fp32 inputs that rotate, see `buffer_count`.
    """
    import torch

    inputs = inputs_of(device, elements, seed, most_bytes)
    buffers = {torch.float32: (inputs, outputs_of(inputs))}
    turns = itertools.count()
    calls = {"copy": rotating(lambda x, y: y.copy_(x), *buffers[torch.float32], turns=turns)}
    for label, (codec, dtype) in settings.items():
        if dtype not in buffers:
            typed = [x.to(dtype) for x in inputs]
            buffers[dtype] = (typed, outputs_of(typed))
        calls[f"encode {label}"], calls[f"decode {label}"] = calls_of(codec, *buffers[dtype], turns)
    samples, others = watched(calls, repeats)
    return [
        rate_of(label, c.bits_per_element, t.itemsize, elements, samples, others) for label, (c, t) in settings.items()
    ]


def by_size(
    device: str,
    sizes: Sequence[int],
    repeats: int = 7,
    codec: Codec | None = None,
    *,
    most_bytes: int = MOST_BYTES,
) -> list[Rate]:
    """Throughput of one codec (default: `standard()`) on fp32 tensors of these numbers of elements, all in one run.

    A sample of a small size is a row of calls on as many buffers: what a lone small call finds cold says nothing about
    throughput. most_bytes: of the inputs of each size, see `buffer_count`.
    """
    chosen = codec or standard()
    calls: dict[str, Callable[[], Any]] = {}
    many = {n: max(1, _ROW // n) for n in sizes}

    def repeated(call: Callable[[], Any], n: int) -> Callable[[], Any]:
        return lambda: [call() for _ in range(many[n])]

    for n in sizes:
        inputs = inputs_of(device, n, most_bytes=most_bytes)
        outputs, turns = outputs_of(inputs), itertools.count()
        calls[f"copy {n}"] = repeated(rotating(lambda x, y: y.copy_(x), inputs, outputs, turns=turns), n)
        for verb, call in zip(("encode", "decode"), calls_of(chosen, inputs, outputs, turns), strict=True):
            calls[f"{verb} {n}"] = repeated(call, n)
    samples, others = watched(calls, repeats)
    each = {name: [t / many[int(name.split()[1])] for t in taken] for name, taken in samples.items()}
    return [rate_of(str(n), chosen.bits_per_element, 4, n, each, others, copy=f"copy {n}") for n in sizes]


def settings() -> dict[str, tuple[Codec, torch.dtype]]:
    """What the command times: bits, rounds, search and the type of the input, changed one at a time."""
    import torch

    fp32 = torch.float32
    return {
        "b=4": (standard(), fp32),
        "b=4, bf16 input": (standard(), torch.bfloat16),
        "b=4, two rounds": (dataclasses.replace(standard(), rounds=2), fp32),
        "b=4, search 5": (dataclasses.replace(standard(), scale="mse", search=5), fp32),
        "b=2": (standard(2), fp32),
        "b=8": (standard(8), fp32),
    }


def keep(ch: Recorder, key: str, spread: Spread, turns: int, unit: str = "1") -> None:
    """Records a median with its quartiles."""
    ch.record(key, spread.median, unit, low=spread.low, high=spread.high, spread="quartiles", n=turns)


def peak_extra_bytes(call: Callable[[], Any], device: str = "cpu") -> int | None:
    """Most memory that one `call` holds beyond what was held before it; None where the system does not tell.

    CPU: growth of the resident set to its high-water mark (Linux), so native allocations count, in whole pages.
    CUDA: what torch's allocator hands out. `call` runs once before, so that compilation and tables do not count.
    """
    if device == "cuda":
        import torch

        call()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with _freed_at_once(), ThreadPoolExecutor(1) as own:  # a thread of its own has a heap without the holes of before
        own.submit(call).result()
        gc.collect()
        try:
            # Freed memory that the C library keeps would be taken again unseen.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is resident now
        except (OSError, AttributeError):
            return None
        before = _resident("VmRSS")
        own.submit(call).result()
        return max(0, _resident("VmHWM") - before)


def _resident(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, key
    return int(found[1]) << 10


@contextmanager
def _freed_at_once() -> Iterator[None]:
    """The C library (glibc) gives back at once what it frees, from 1 MiB on. It would keep blocks below its threshold,
    which grows to 32 MiB, in a heap with holes, and these would count as held."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        yield
        return
    set_option(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        set_option(_M_MMAP_THRESHOLD, 32 << 20)
