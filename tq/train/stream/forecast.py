"""What a streamed run will take, before it starts: memory by arithmetic, seconds from one layer and the disk.

Memory is what a process may write to (``RLIMIT_DATA``), the loaded program included. A step's time is that of the model
of ``tq.systems.tiers`` with one block computed once at the real shape, and rates of the real disk.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from tq.systems.tiers import Streamed
from tq.train.model.gpt import GPTConfig, rope_tables
from tq.train.model.loop import TrainConfig
from tq.train.offload import aligned
from tq.train.stream.files import Pages, buffer_of, large_room, whole_pages
from tq.train.stream.layout import Model, Record
from tq.train.stream.records import BUFFERS
from tq.train.stream.update import step_record

#: fp32 numbers per token at the peak of a block's backward pass: so many of width C and so many of width F (measured).
PEAK = {"gelu": (13.0, 4.0), "relu2": (13.0, 6.0), "swiglu": (13.0, 7.5)}
LOSS_COPIES = 3  # logits, their softmax, their gradient
REFERENCE_COPIES = 10  # of a block's numbers, which the update without a kernel makes
MARGIN = 1.05  # an allocator rounds
THREADS = 6 << 20  # bytes of stacks and of what is loaded when it is first called


@dataclass(frozen=True)
class Run:
    """What a forecast is asked for; as the arguments of ``StreamedTrainer``."""

    model: GPTConfig
    config: TrainConfig
    place: Path | None
    state: tuple[int, int] | None = None
    inputs: str | int = "memory"
    clip: str = "global"
    resumable: bool = True
    resident: int = 0
    loss_tokens: int | None = None
    impl: str = "auto"

    @property
    def seq(self) -> int:
        return self.model.seq if self.config.seq is None else self.config.seq

    @property
    def micro_tokens(self) -> int:
        """Tokens that go through a layer at once."""
        return self.config.batch // self.config.accumulate * self.seq

    @property
    def deferred(self) -> bool:
        """Whether gradients wait for their norm."""
        return self.clip == "global" and self.config.grad_clip is not None


def program_bytes() -> int:
    """Bytes that this process may write to now, by the system's count; 0 where it does not tell."""
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


def load_program(impl: str) -> int:
    """Loads all that a step needs, gives back what that has left over, and returns ``program_bytes``."""
    from tqdm import tqdm

    importlib.import_module("tq.train.tqk.disk")
    record = Record({"w": torch.Size((2, 64))}, None)
    buffer = aligned(record.nbytes).zero_()
    settings = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    weights = record.weights(buffer)
    step_record(record, buffer, weights, [torch.zeros_like(w) for w in weights], settings, done=1, impl=impl)
    x = torch.zeros(4, 4, 256, 64, requires_grad=True)  # as large as what starts the threads of a computation
    y = F.gelu(F.linear(F.scaled_dot_product_attention(x, x, x, is_causal=True), torch.zeros(256, 64)))
    torch.autograd.grad(y.sum(), x)
    with tqdm(total=1, file=io.StringIO()):  # which starts one too
        del x, y
    give_back()
    return program_bytes()


def give_back() -> None:
    """Free memory that the C library holds goes back to the system, where there is a call for it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def memory_need(run: Run, program: int | None = None) -> dict[str, int]:
    """Bytes by what takes them, at the peak of a step; program: before it was built, as now if None."""
    model, shape = Model(run.model, run.state), run.model
    block, tokens = 4 * model.block.numel, run.micro_tokens
    tables = sum(4 * x.numel() for x in model.resident.values())
    kept = 4 * tokens * shape.hidden * run.config.accumulate * shape.layers
    if run.inputs == "place":
        kept = (BUFFERS + 1) * 4 * tokens * shape.hidden
    elif isinstance(run.inputs, int):
        kept = int(kept * (run.inputs + 0.125) / 32) + 2 * 4 * tokens * shape.hidden
    wide, inner = PEAK[shape.activation]
    layer = 4 * tokens * (wide * shape.hidden + inner * shape.ffn_width)
    layer += block * (1 + (run.config.accumulate > 1) + (REFERENCE_COPIES if run.impl == "reference" else 0))
    if run.deferred:
        kept += shape.layers * block if run.place is None else BUFFERS * block
        layer += block
    loss = LOSS_COPIES * 4 * shape.vocab * min(tokens, run.loss_tokens or tokens) + tables
    records = model.nbytes
    if run.place is not None:
        records = BUFFERS * (model.largest + large_room(model.largest)) + run.resident * model.block.nbytes
    parts = {
        "the loaded program": (program_bytes() if program is None else program) + THREADS,
        "records of layers": records,
        "embedding and its gradient": 2 * tables,
        "inputs of blocks": kept + 2 * 4 * tokens * shape.hidden * run.config.accumulate,
        "a layer at work": int(max(layer, loss)),
    }
    return {name: int(nbytes * (1 if name == "the loaded program" else MARGIN)) for name, nbytes in parts.items()}


def disk_bytes(run: Run) -> int:
    """That the files take."""
    if run.place is None:
        return 0
    model = Model(run.model, run.state)
    spilled = whole_pages(4 * run.micro_tokens * run.model.hidden) * run.model.layers * run.config.accumulate
    gradients = whole_pages(4 * model.block.numel) * run.model.layers
    return (
        model.nbytes * (2 if run.resumable else 1) + (spilled if run.inputs == "place" else 0)
        + (gradients if run.deferred else 0)
    )  # fmt: skip


def _least(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


@dataclass(frozen=True)
class Speeds:
    """Seconds of a layer's forward, backward (with recomputation) and update, of the ends, and bytes/s of the disk."""

    forward_s: float
    backward_s: float
    update_s: float
    ends_s: float
    read: float
    write: float
    both: float


TRIED = 192 << 20  # bytes: fewer lie in the memory of a drive, or of what stands for one


def disk_speeds(folder: Path, nbytes: int) -> tuple[float, float, float]:
    """(read, written, each way while both go on) in bytes/s, in transfers of ``nbytes``."""
    size = whole_pages(nbytes)
    repeats = max(2, min(256, TRIED // size))
    with closing(Pages(folder, 2 * size * repeats)) as pages:
        buffers = [buffer_of(size).fill_(1), buffer_of(size).fill_(2)]
        half = size * repeats

        def write(start: int) -> None:
            for i in range(repeats):
                pages.write(start + i * size, buffers[0])

        def read(start: int) -> None:
            for i in range(repeats):
                pages.read(start + i * size, buffers[1])

        written = _least(lambda: write(0), 2)
        write(half)
        there = _least(lambda: read(0), 2)
        with ThreadPoolExecutor(2) as threads:

            def together() -> None:
                for future in [threads.submit(write, 0), threads.submit(read, half)]:
                    future.result()

            both = _least(together, 2)
    return half / there, half / written, half / both


def measure(run: Run, repeats: int = 2) -> Speeds:
    """One layer of the real shape with weights of no meaning, computed and updated, and the disk tried."""
    model, tokens = Model(run.model, run.state), run.micro_tokens
    buffer = buffer_of(model.block.nbytes).zero_()
    weights = model.block.weights(buffer)
    generator = torch.Generator().manual_seed(0)
    for w in weights:
        w.normal_(0.0, 0.02, generator=generator)
    x = torch.randn(tokens // run.seq, run.seq, run.model.hidden, generator=generator)
    tables = [t[: run.seq] for t in rope_tables(run.model.seq, run.model.head_size, run.model.rope_theta)]
    kind = run.config.autocast
    found: list[Tensor] = []

    def forward(leaves: list[Tensor], given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
            named = dict(zip(model.shapes, leaves, strict=True))
            return functional_call(model.template, named, (given, *tables))

    def backward() -> None:
        leaves = [w.detach().requires_grad_() for w in weights]
        given = x.detach().requires_grad_()
        found[:] = torch.autograd.grad(forward(leaves, given), [given, *leaves], x)

    with torch.no_grad():
        forward(weights, x)
        there = _least(lambda: forward(weights, x), repeats)
    backward()
    back = _least(backward, repeats)
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

    def update() -> None:
        torch._foreach_norm(found[1:])
        step_record(model.block, buffer, weights, found[1:], settings, done=1, impl=run.impl)

    update()
    moved = _least(update, repeats)
    parts, ends = run.config.accumulate, _ends_s(run, x, repeats)
    ends += moved * sum(p.numel() for p in map(torch.empty, model.resident.values())) / model.block.numel
    disk = (1e18, 1e18, 1e18) if run.place is None else disk_speeds(run.place, model.block.nbytes)
    return Speeds(there * parts, back * parts, moved, ends, *disk)


def _ends_s(run: Run, x: Tensor, repeats: int) -> float:
    """Of look-up and loss, all micro-batches."""
    size = min(run.micro_tokens, run.loss_tokens or run.micro_tokens)
    rows = x.flatten(0, 1)[:size].detach().requires_grad_()
    head = torch.full((run.model.vocab, run.model.hidden), 0.01, requires_grad=True)
    wanted = torch.zeros(size, dtype=torch.int64)

    def loss() -> None:
        torch.autograd.grad(F.cross_entropy(F.linear(rows, head), wanted), [rows, head])

    loss()
    return _least(loss, repeats) * run.micro_tokens / size * run.config.accumulate


def step_model(run: Run, speeds: Speeds) -> Streamed:
    """The run as ``tq.systems.tiers`` has it."""
    model = Model(run.model, run.state)
    numel = model.block.numel
    spilled = 4.0 * run.micro_tokens * run.model.hidden * run.config.accumulate if run.inputs == "place" else 0.0
    ends = sum(record.nbytes for _, record in model.pieces), sum(r.nbytes - r.weights_end for _, r in model.pieces)
    in_memory = run.place is None
    return Streamed(
        layers=run.model.layers, parameters=numel, forward_s=speeds.forward_s,
        backward_s=speeds.backward_s + (0.0 if run.deferred else speeds.update_s),
        ends_s=speeds.ends_s, read_bytes_per_s=speeds.read, write_bytes_per_s=speeds.write,
        both_bytes_per_s=speeds.both, weight_bytes=model.block.weights_end / numel,
        moment_bytes=(model.block.nbytes - model.block.weights_end) / numel, update_s=speeds.update_s,
        resident=run.model.layers if in_memory else run.resident, buffers=BUFFERS,
        deferred=run.deferred and not in_memory, kept=run.resumable and not in_memory, input_bytes=spilled,
        end_bytes=(0.0, 0.0) if in_memory else (float(ends[1]), float(ends[0])),
    )  # fmt: skip
