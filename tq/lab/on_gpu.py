"""What a GPU has to give, what machine code foretells of a kernel on it, and what a training step asks of it.

A kernel is bound by the bytes that it moves, at the rate of a copy, or by the instructions that it issues: each of the
four schedulers of a processor starts one per cycle for the 32 threads of a warp. The slower of the two is the forecast.
"""

from __future__ import annotations

import gc
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tq.kernels import gpu
from tq.lab import sm90
from tq.lab.optimizers import Make
from tq.lab.stats import quartiles
from tq.lab.timing import COPY_BYTES, inputs_of, outputs_of, time_calls
from tq.lab.training_step import SHAPES, Activations, Setting
from tq.quant.codec import Codec
from tq.train.model import load
from tq.train.optim import TurboQuantAdamW

ISSUED = 4 * 32  # instructions of single threads that a processor starts in a cycle, from Pascal to Blackwell
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaStreamWaitValue")
COPIES = ("cudaMemcpyAsync", "cudaMemcpy2DAsync")
SMALL = 1 << 16  # elements that a kernel is compiled with


@dataclass(frozen=True)
class Card:
    """processors: streaming multiprocessors. clock_hz: theirs under load. copy_bytes_per_s: read and written."""

    name: str
    processors: int
    clock_hz: float
    copy_bytes_per_s: float

    @property
    def instructions_per_s(self) -> float:
        """Of single threads, at most."""
        return self.processors * ISSUED * self.clock_hz


def _clock_hz() -> float:
    """Of the processors, now."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except OSError:  # PyTorch asks the driver by a package that need not be there
        return 1e6 * float(torch.cuda.clock_rate())
    return 1e6 * float(said.split()[0])


def card(elements: int, repeats: int = 9) -> Card:
    """Measures the GPU there is. elements: of the fp32 tensor that is copied. RuntimeError where there is none."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU here")
    inputs = inputs_of("cuda", elements)
    x, y = inputs[0], outputs_of(inputs)[0]
    copied = time_calls({"copy": lambda: y.copy_(x)}, repeats, warmup=2)["copy"]
    codec = Codec(4, 128, rounds=1, nonfinite="propagate")
    code = codec.encode(x)
    for _ in range(1000):  # the clock of a card that is busy: read while these are queued
        codec.encode(x, out=code)
    clock_hz = _clock_hz()
    torch.cuda.synchronize()
    found = torch.cuda.get_device_properties(0)
    return Card(found.name, found.multi_processor_count, clock_hz, COPY_BYTES * elements / quartiles(copied)[1])


def instructions(kind: str, codec: Codec, dtype: torch.dtype, target: int = 90) -> float:
    """Per element, that the "encode" or "decode" kernel runs on numbers of usual sizes; by its machine code."""
    made = gpu.compiled(
        kind, target, bits=codec.bits, block=codec.block, rounds=codec.rounds, scale=codec.scale, search=codec.search,
        dtype=dtype, rare=False,
    )  # fmt: skip
    return float(sm90.resources(*made)["instructions_per_element"])


def foretold(on: Card, instructions_per_element: float, bytes_per_element: float) -> tuple[float, str]:
    """(share of the speed of a copy of the same bytes, what limits it: "bytes" or "instructions")."""
    issue_s = instructions_per_element / on.instructions_per_s
    bytes_s = bytes_per_element / on.copy_bytes_per_s
    return (1.0, "bytes") if bytes_s >= issue_s else (bytes_s / issue_s, "instructions")


# --- compiling ------------------------------------------------------------------------------------------------


Setup = tuple[Codec, torch.dtype]


def _compiled(codec: dict[str, Any], dtype: str) -> dict[str, float]:
    """Instructions per element of both kernels, which are compiled."""
    made, kind = Codec(**codec), getattr(torch, dtype)
    x = torch.randn(SMALL, device="cuda").to(kind)
    made.decode(made.encode(x), out=x)
    torch.cuda.synchronize()
    return {verb: instructions(verb, made, kind) for verb in ("encode", "decode")}


def _stepped(**options: Any) -> None:
    """The optimizer's kernels, for the first step and those after it."""
    optimizer = TurboQuantAdamW(weights(256, "cuda"), lr=1e-3, **options)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()


def _passed(way: str) -> None:
    """What a training step with activations in few bits compiles."""
    setting = Setting(SHAPES["25m"], 2, torch.bfloat16, "cuda")
    Activations(setting.trainer(load("stdlib", max_bytes=300_000))).ways[way]()
    torch.cuda.synchronize()


def compile_ahead(
    codecs: Iterable[Setup], optimizers: Iterable[dict[str, Any]] = (), ways: Iterable[str] = (), jobs: int = 14
) -> list[dict[str, float]]:
    """Fills Triton's cache in processes of their own, as it takes minutes one by one; needs a GPU.

    Returns {"encode", "decode"}: instructions per element, see ``instructions``, for each codec and the dtype of what
    it encodes. optimizers: options of ``TurboQuantAdamW``. ways: of ``training_step.ACTIVATIONS``.
    """
    names = ("bits", "block", "rounds", "scale", "search", "nonfinite")
    tasks: list[Callable[[], Any]] = [
        partial(_compiled, {name: getattr(codec, name) for name in names}, str(dtype).removeprefix("torch."))
        for codec, dtype in codecs
    ]
    count = len(tasks)
    tasks += [partial(_stepped, **options) for options in optimizers] + [partial(_passed, way) for way in ways]
    with ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn")) as pool:
        return [found.result() for found in [pool.submit(task) for task in tasks]][:count]


# --- steps ----------------------------------------------------------------------------------------------------


def traced(call: Callable[[], Any], steps: int = 3) -> dict[str, float]:
    """{"launches", "waits" of the host, "copies" queued, "kernels_s"} of a call, by PyTorch's profiler on a GPU."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            call()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    kernels_us = 0.0
    for event in found.key_averages():
        counts[event.key] += event.count
        annotation = getattr(event, "is_user_annotation", False) or event.key.startswith(("Optimizer.", "ProfilerStep"))
        if event.device_type == torch.autograd.DeviceType.CUDA and not annotation:
            kernels_us += event.self_device_time_total
    groups = {"launches": LAUNCHES, "waits": WAITS, "copies": COPIES}
    each = {name: sum(counts[key] for key in keys) / steps for name, keys in groups.items()}
    return each | {"kernels_s": kernels_us / steps / 1e6}


def weights(side: int, device: str) -> list[torch.nn.Parameter]:
    """Eight square matrices with gradients."""
    made = [torch.nn.Parameter(torch.randn(side, side, device=device)) for _ in range(8)]
    for weight in made:
        weight.grad = torch.randn_like(weight)
    return made


def replayed(make: Make, side: int) -> Callable[[], Any]:
    """A step of an optimizer of ``weights`` as a CUDA graph."""
    optimizer = make(weights(side, "cuda"), lr=1e-3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()

    def replay() -> Any:
        graph.replay()
        return optimizer  # it holds the memory that the graph writes to, and has to live as long

    return replay


def peaks(
    setting: Setting, sequences: Sequence[int], names: Collection[str], optimizer: Callable[..., Any] | None = None
) -> dict[int, dict[str, float]]:
    """{sequences per step: {name: most bytes that the device held during a whole step}}, on a GPU.

    Weights, gradients and the optimizer's state are among them. names: ways of ``training_step.ACTIVATIONS``.
    optimizer: makes that of the trainer; None: AdamW.
    """
    run = Activations(setting.trainer(load("stdlib", max_bytes=2_000_000), optimizer=optimizer))
    found: dict[int, dict[str, float]] = {}
    for count in sequences:
        run.run.config = replace(run.run.config, batch=count)
        found[count] = {}
        for name in names:
            run.ways[name]()
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run.ways[name]()
            torch.cuda.synchronize()
            found[count][name] = float(torch.cuda.max_memory_allocated())
    return found


def codecs(bits: Iterable[int], rounds: int = 1) -> dict[str, tuple[Codec, torch.dtype]]:
    """{"4 bits": (codec, fp32)} for each number of bits."""
    make = partial(Codec, block=128, rounds=rounds, nonfinite="propagate")
    return {f"{b} bit{'s' * (b > 1)}": (make(b), torch.float32) for b in bits}
