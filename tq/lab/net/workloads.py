"""Times and bytes of all-reduces, to be called on the ranks of a ``Crew``.

Others' methods run as their authors ship them: PyTorch's hooks for ``DistributedDataParallel`` get the gradient of one
weight, as DDP would hand it to them.
"""

import copy
import json
import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tq.quant.codec import Codec
from tq.train import collectives
from tq.train.experiments.ranks import ParallelTrainer
from tq.train.model.corpus import load
from tq.train.model.gpt import GPT, PRESETS
from tq.train.model.loop import TrainConfig

METHODS = ("fp32", "bf16", "powersgd", "all-gather", "ours")
_FRAME = 1514  # bytes of a full one
_SIDE = 1024  # columns of the weight whose gradient a hook gets


def _hooked(numel: int, hook: Any, state: Any) -> Callable[[int], None]:
    """A backward pass of one weight [numel / 1024, 1024] under DDP, whose time is the hook's and two passes over it."""
    layer = nn.Linear(_SIDE, numel // _SIDE, bias=False)
    nn.init.zeros_(layer.weight)
    model = DistributedDataParallel(layer, bucket_cap_mb=1 << 20, gradient_as_bucket_view=True)
    model.register_comm_hook(state, hook)
    x = torch.randn(1, _SIDE)

    def call(turn: int) -> None:
        model.zero_grad(set_to_none=False)
        model(x).sum().backward()

    return call


def bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """PyTorch's hook under another name: DDP refuses its own one on gloo, which can add bf16 by now."""
    return default_hooks.bf16_compress_hook(state, bucket)


def _powersgd() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=1)


def _nothing(_: object) -> None:
    return None


def _calls(method: str, numel: int, bits: int, x: Tensor) -> Callable[[int], None]:
    if method == "fp32":
        return lambda turn: dist.all_reduce(x)
    if method == "ours":
        return lambda turn: _nothing(collectives.all_reduce(x, Codec(bits), step=turn))
    if method == "all-gather":
        return lambda turn: collectives.all_gather_mean(x, Codec(bits), step=turn)
    if method == "bf16":
        return _hooked(numel, bf16, None)
    if method == "powersgd":
        return _hooked(numel, powerSGD_hook.powerSGD_hook, _powersgd())
    raise ValueError(f"method must be one of {METHODS}, got {method!r}")


def _sent_bytes() -> int:
    for line in open("/proc/self/net/dev"):
        name, _, numbers = line.partition(":")
        if name.strip() != "lo" and numbers:
            return int(numbers.split()[8])
    return 0


def _sent_again_bytes() -> int:
    """Of whole segments that TCP has sent more than once on this host so far, with their headers."""
    names, values = (line.split()[1:] for line in open("/proc/self/net/snmp") if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")]) * _FRAME


_made: dict[tuple[str, int, int], tuple[Callable[[int], None], Tensor]] = {}


def measure(method: str, numel: int, bits: int = 4, repeats: int = 5, warmup: int = 2) -> dict[str, Any]:
    """Seconds of all-reduces of ``numel`` fp32 numbers, each between two barriers, and bytes that this rank sent.

    Returns: seconds [repeats]; sent: bytes at the interface for one call, headers and barriers included; again: those
    among them that TCP had sent before.
    """
    key = (method, numel, bits)
    if key not in _made:
        _made.clear()
        x = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
        _made[key] = _calls(method, numel, bits, x), x
    call, x = _made[key]
    seconds = []
    for turn in range(warmup + repeats):
        if turn == warmup:
            dist.barrier()
            before, again = _sent_bytes(), _sent_again_bytes()
        dist.barrier()
        start = time.perf_counter()
        call(turn)
        if turn >= warmup:
            seconds.append(time.perf_counter() - start)
    dist.barrier()
    sent, again = _sent_bytes() - before, _sent_again_bytes() - again
    return {"seconds": seconds, "sent": sent / repeats, "again": again / repeats}


def check(method: str, numel: int, bits: int = 4) -> dict[str, float]:
    """Error of the mean relative to its own energy, and whether all ranks hold the same bytes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    x, exact = parts[rank].clone(), torch.stack(parts).mean(0)
    _calls(method, numel, bits, x)(0)
    if method == "fp32":
        x /= ranks
    digest = torch.tensor([zlib.crc32(x.numpy().tobytes())])
    everyone = [torch.empty_like(digest) for _ in range(ranks)]
    dist.all_gather(everyone, digest)
    error = ((x - exact).square().mean() / exact.square().mean()).item()
    return {"error": error, "same": float(all(torch.equal(d, digest) for d in everyone))}


def coding(numel: int, bits: int = 4, repeats: int = 7) -> dict[str, float]:
    """Numbers a second that this rank encodes, decodes and adds up, while all other ranks do the same."""
    codec = Codec(bits)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    code, out = codec.encode(x), torch.zeros(numel)
    calls: dict[str, Callable[[], Any]] = {
        "encode": lambda: codec.encode(x, code),
        "decode": lambda: codec.decode(code, out),
        "accumulate": lambda: codec.decode(code, out, accumulate=True),
    }
    rates = {}
    for name, call in calls.items():
        seconds = []
        for _ in range(repeats + 1):
            dist.barrier()
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        rates[name] = numel / statistics.median(seconds[1:])
    return rates


_training: dict[str, ParallelTrainer] = {}
_starts: dict[str, dict[str, Any]] = {}


def _trainer(
    *, how: str = "ddp", bits: int | None = None, hook: str | None = None, total: int = 400, preset: str = "1m",
    batch: int = 8, lr: float = 4e-3, seed: int = 0, shared: int = 0, max_bytes: int = 4_000_000,
    bucket_mb: float = 25.0, diloco: dict[str, Any] | None = None, sites: list[int] | None = None,
    pairwise: bool = False,
) -> ParallelTrainer:  # fmt: skip
    config = TrainConfig(steps=total, batch=batch, lr=lr, seed=seed)
    hooks = {"bf16": (None, bf16), "powersgd": (_powersgd(), powerSGD_hook.powerSGD_hook)}
    made = ParallelTrainer(
        GPT(PRESETS[preset], seed), load("stdlib", max_bytes=max_bytes), config, how,
        None if bits is None else Codec(bits), hook=None if hook is None else hooks[hook], diloco=diloco,
        bucket_mb=bucket_mb, sites=sites, pairwise=pairwise,
    )  # fmt: skip
    if shared:
        if how == "diloco":
            raise ValueError("shared: a run of DiLoCo starts from its first step")
        key = repr((how, total, preset, batch, lr, seed, shared, max_bytes))
        if key not in _starts:
            first = _trainer(
                how=how, total=total, preset=preset, batch=batch, lr=lr, seed=seed, max_bytes=max_bytes
            )
            first.train(shared, progress=False)
            _starts.clear()
            _starts[key] = copy.deepcopy({"model": first.model.state_dict(), "adamw": first.optimizer.state_dict()})
            _starts[key]["losses"] = list(first.losses)
        made.model.load_state_dict(_starts[key]["model"])
        made.optimizer.load_state_dict(copy.deepcopy(_starts[key]["adamw"]))
        made.losses = list(_starts[key]["losses"])
    return made


def training(run: dict[str, Any], steps: int, every: int = 0, batches: int = 4, alone: bool = False) -> dict[str, Any]:
    """The next steps of a training run; the first call with another run than the last starts that one.

    Arguments:
        run: how, bits, diloco, sites, bucket_mb, pairwise: as of ``ParallelTrainer``; hook: "bf16" or "powersgd", for
            DDP; total: steps that the schedule of the learning rate knows; preset, batch, lr, seed, max_bytes: of model
            and data; shared: steps that it takes with exact means before, together with other runs of its seed.
        every: held-out loss after each so many steps, in nats, from so many ``batches``.
        alone: without any exchange, for the time of the computation.

    Returns: seconds of each step; sent: bytes of this rank at the interface for a step; losses: mean over the ranks of
    every step so far; valid: [steps done, held-out loss] in turn.
    """
    key = json.dumps(run, sort_keys=True)
    if key not in _training:
        _training.clear()
        _training[key] = _trainer(**run)
    trainer = _training[key]
    wrapped = trainer.forward
    trainer.forward = trainer.model if alone else wrapped
    seconds: list[float] = []
    valid: list[list[float]] = []
    sent = 0
    dist.barrier()
    try:
        for _ in range(steps):
            before, start = _sent_bytes(), time.perf_counter()
            trainer.step()
            seconds.append(time.perf_counter() - start)
            sent += _sent_bytes() - before
            if every and trainer.steps_done % every == 0:
                valid.append([trainer.steps_done, trainer.evaluate(batches)])
    finally:
        trainer.forward = wrapped
    dist.barrier()
    return {"seconds": seconds, "sent": sent / max(1, steps), "losses": trainer.mean_losses(), "valid": valid}
