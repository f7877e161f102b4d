"""Where the time of a training step goes, by kinds of operations: what keeps it from the speed of its products.

    python -m tq.lab.step_profile                                        25 million parameters, 1,024 tokens per step
    python -m tq.lab.step_profile --preset gpt2-124m --vocab 4096 --precision bf16

PyTorch's profiler counts the time of each operation without that of the operations it calls. On a GPU it is the time of
kernels, so what the host alone does is not seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tq.lab.stats import quartiles
from tq.lab.timing import time_calls
from tq.lab.training_step import SHAPES, Setting, fitting_autocast, products_per_s
from tq.train.model import load

# The first kind counts one of whose texts is in the operation's name.
KINDS = {
    "attention": ("scaled_dot_product", "flash_attention"),
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear", "mkldnn_linear"),
    "loss": ("softmax", "nll_loss", "cross_entropy"),
    "nonlinearity": ("gelu", "silu", "relu", "threshold_backward"),
    "optimizer and clipping": ("adamw", "vector_norm", "_foreach_"),
    "embedding": ("embedding", "index_"),
    "casts and copies": ("aten::copy_", "aten::_to_copy", "aten::clone", "aten::cat", "Memcpy"),
    "norms, rotary, sums": (
        "aten::mul", "aten::add", "aten::sub", "aten::neg", "aten::pow", "aten::rsqrt", "aten::mean", "aten::sum",
        "rms_norm", "aten::div",
    ),
}  # fmt: skip
REST = "the rest"


def kind(operation: str) -> str:
    """The kind of an operation, by its name."""
    return next((name for name, texts in KINDS.items() if any(text in operation for text in texts)), REST)


def by_kind(run: Any, steps: int = 1) -> dict[str, float]:
    """Seconds of a step of the trainer ``run`` by kind, the most first; ``REST`` is what no kind counts."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints how it starts and stops
    on_gpu = run.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        for _ in range(steps):
            run.step()
    seconds: Counter[str] = Counter()
    for event in found.key_averages():
        if event.device_type != torch.autograd.DeviceType.CPU:  # a kernel, whose time its operation has already
            continue
        seconds[kind(event.key)] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    return {name: spent / steps / 1e6 for name, spent in seconds.most_common()}


def table(setting: Setting, parts: dict[str, float], peak: float, step_s: float) -> str:
    """The parts as text, below what the step reaches of ``peak``, the products' floating-point operations a second."""
    shape, all_s = setting.shape, sum(parts.values())
    kinds = "fp32" if setting.autocast is None else str(setting.autocast).removeprefix("torch.")
    at_peak = shape.flops_per_token() * setting.tokens / peak
    lines = [
        f"{shape.num_parameters / 1e6:.0f} million parameters, {setting.tokens} tokens per step, {kinds}, "
        f"{torch.get_num_threads()} threads: {step_s:.3f} s per step, {at_peak / step_s:.0%} of the products' peak of "
        f"{peak / 1e12:.2f} TFLOP/s"
    ]
    return "\n".join(lines + [f"{name:24s} {1e3 * s:9.1f} ms  {s / all_s:6.1%}" for name, s in parts.items()])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tq.lab.step_profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(SHAPES), default="25m", help="shape of the model (25m)")
    parser.add_argument("--vocab", type=int, help="tokens that it knows, 256 or more (the preset's)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(cpu)")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto", help="auto: the faster here")
    given = parser.parse_args(arguments)
    shape = SHAPES[given.preset]
    if given.vocab is not None:
        if given.vocab < 256:
            parser.error(f"--vocab must be at least 256, got {given.vocab}")
        shape = dataclasses.replace(shape, vocab=given.vocab)
    setting = Setting(shape, max(1, 1024 // shape.seq), device=given.device)
    named = {"fp32": None, "bf16": torch.bfloat16}
    autocast = fitting_autocast(setting) if given.precision == "auto" else named[given.precision]
    setting = dataclasses.replace(setting, autocast=autocast)
    peak = products_per_s(setting, autocast or torch.float32)
    run = setting.trainer(load("stdlib", max_bytes=2_000_000))
    step_s = quartiles(time_calls({"step": run.step}, 3, warmup=1)["step"])[1]
    print(table(setting, by_kind(run), peak, step_s))


if __name__ == "__main__":
    main()
