"""Opens every public door of an installed tq-book: plain Python, no checkout, a line with its time for each.

    python -I smoke.py --extras kernels,checkpoint     the extras that were installed; what else there is must be absent
    python -I smoke.py --only codec,lossless

`.ci/wheel` runs it in clean environments. What a codec writes is compared with digests that were taken once, so a wheel
that codes otherwise on another Python or PyTorch is found. Warnings that code of tq causes are errors.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pickle
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SEEDED = 20_000  # elements of what is coded; not a multiple of a block
# Taken with torch 2.13.0 and Python 3.11.7 on x86-64; see ``pinned``. A new one is a new wire format.
CODES = "a6ac1f9f323574446e761a6a0b7c1eca"
LOSSLESS = "5ddd4bbeeffe27bde6235c4aac047f84"
MESSAGE = (
    "5451434402001800141be0ee4c83e1fe8669d1672c7966f204028000020000000001000000000000000000000001c8017ab364692ae337aa"
    "47a761374a7dcb242444a846385597b396da97ae7548b6769b45e46554b8e69cada59b0bbba968942b845a8aab4e99d785708c5848bd6c1e"
    "f5587774bb956785a4759da332ac85ab155e828b7c2595685b29b4475cb9db756d745ecc74532548652554c67b1d688a53799fba6ac84d53"
    "4abab98405374a750cba913fa8835d3f"
)
HOST = "127.0.0.1"
EXTRAS: set[str] = set()
PARTS = {"kernels": ("numba", "triton"), "checkpoint": ("numba", "safetensors")}
Door = Callable[[Path], None]


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def check(holds: object, said: object = "") -> None:
    """An assert that -O does not remove."""
    if not holds:
        raise AssertionError(said)


def seeded(count: int = SEEDED, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers with long tails that every version makes alike: of integers, by operations that round in one way only."""
    u = (torch.arange(count) * 48_271 % 65_537).float() / 32_768 - 1
    return (u * u * u * 3).to(dtype)


def error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / x.double().norm())


def sha(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def train(trained: nn.Module, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        trained(torch.randn(32, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def alike(one: nn.Module, other: nn.Module, atol: float = 0.0) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(p, q, rtol=0, atol=atol) for p, q in pairs)


def command(*arguments: str, code: int = 0) -> str:
    """What `python -m ...` prints, both streams; it must end with this code."""
    done = subprocess.run([sys.executable, "-I", "-m", *arguments], capture_output=True, text=True, timeout=600)
    check(done.returncode == code, f"python -m {' '.join(arguments)}: code {done.returncode}\n{done.stderr[-2000:]}")
    check("Traceback" not in done.stderr, done.stderr[-2000:])
    return done.stdout + done.stderr


# --- the package ------------------------------------------------------------------------------------------------


def package(tmp: Path) -> None:
    import tq

    found = importlib.metadata.distribution("tq-book")
    where = Path(tq.__file__).resolve().parent
    check(tq.__version__ == found.version, (tq.__version__, found.version))
    check((where / "py.typed").is_file() and not (where / "kernels" / "__init__.py").exists(), where)
    check(set(PARTS) <= set(found.metadata.get_all("Provides-Extra") or []), "an extra is missing")
    for extra in EXTRAS:
        check(all(has(part) for part in PARTS[extra]), f"[{extra}] did not bring {PARTS[extra]}")
    if not EXTRAS:  # triton comes with PyTorch's builds for GPUs
        check(not has("numba") and not has("safetensors"), "this environment is not clean")
    for absent in ("scipy", "pandas", "matplotlib", "yaml"):
        check(not has(absent), f"{absent} is installed: this environment is not clean")


def lines_of_the_readme(tmp: Path) -> None:
    """The Python of the page that the index shows, as it stands, in a group of one rank."""
    text = importlib.metadata.metadata("tq-book").get_payload()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", str(text), re.MULTILINE | re.DOTALL))
    check(code.count("import") >= 5, "the README has no code")
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": HOST, "MASTER_PORT": str(free_port())}
    group["GLOO_SOCKET_IFNAME"] = "lo"
    code += "\nassert float((x - y).norm() / x.norm()) < 0.11 and set(state) == {'model', 'optimizer'}\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp, capture_output=True, text=True, timeout=300,
        env=os.environ | group,
    )  # fmt: skip
    check(done.returncode == 0, done.stderr[-2000:])


# --- quantizing ---------------------------------------------------------------------------------------------------


def codec(tmp: Path) -> None:
    from tq import Code, Codec
    from tq.quant.codebook import lloyd_max
    from tq.quant.inner_product import ProdCodec
    from tq.quant.logscale import LogCodec

    x = seeded().view(100, 200)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        code = Codec(bits=4).encode(x.to(dtype))
        message = code.to_bytes()
        y = Codec(bits=4).decode(Code.from_bytes(message))
        check(y.dtype == dtype and torch.equal(y, Codec(bits=4).decode(code)) and error(x, y) < 0.11, error(x, y))
    codes = [Codec(bits=bits).encode(x, impl="reference").payload.numpy().tobytes() for bits in range(1, 9)]
    check(sha(*codes) == CODES, f"codes are others than they were: {sha(*codes)}")
    kept = Code.from_bytes(bytes.fromhex(MESSAGE))  # what version 0.1.0 wrote
    again = Codec(bits=4).encode(seeded(200))
    check(torch.equal(kept.payload, again.payload), "a message of 0.1.0 has other codes")
    check(torch.allclose(kept.scales, again.scales, rtol=1e-5), "a message of 0.1.0 has other scales")
    check(error(seeded(200), Codec(bits=4).decode(kept)) < 0.11)
    check(len(lloyd_max(bits=2)[0]) == 4)
    prod = ProdCodec(bits=4, dim=64)
    check(error(x.reshape(-1)[:6400].view(100, 64), prod.decode(prod.encode(x.reshape(-1)[:6400].view(100, 64)))) < 0.5)
    v = seeded().square()
    log = LogCodec(bits=8, block=128)
    check(error(v, log.decode(*log.encode(v, step=1), v.numel())) < 0.05)


def formats(tmp: Path) -> None:
    from tq import Codec
    from tq.quant import formats as f

    x = seeded()
    made = [f.integer(8, 128), f.integer(4, 128), f.affine(4, 128), f.nf4(64), f.nf4_double_quantized(), f.fp4(64)]
    made += [f.mxfp4(), f.nvfp4(), f.fp8(), f.fp8("e5m2"), f.mxfp8(), f.of_codec(Codec(bits=4), "ours")]
    for each in made:
        found = f.nmse(x, each.roundtrip(x))
        check(isinstance(each, f.Format) and found < 0.05, (each.name, found))


def kernels(tmp: Path) -> None:
    """The fast path where its extra is installed, and one sentence about it where not; the same codes both ways."""
    from tq import Codec

    x, four = seeded().view(100, 200), Codec(bits=4)
    plain = four.encode(x, impl="reference")
    if not has("numba"):
        try:
            four.encode(x, impl="cpu")
        except RuntimeError as said:
            check("pip install 'tq-book[kernels]'" in str(said), said)
        else:
            check(False, "impl='cpu' without numba was no error")
        check(torch.equal(four.encode(x).payload, plain.payload))
        return
    fast = four.encode(x, impl="cpu")
    check(torch.equal(fast.payload, plain.payload), "the kernel's codes are others")
    check(torch.allclose(fast.scales, plain.scales, rtol=1e-5))
    check(torch.allclose(four.decode(fast, impl="cpu"), four.decode(plain, impl="reference"), rtol=1e-4, atol=1e-6))
    check("python -m tq.kernels" in command("tq.kernels", "--help"))
    if has("triton"):
        import tq.kernels.gpu
        import tq.kernels.gpu_adamw
        import tq.kernels.gpu_logscale  # noqa: F401


def lossless(tmp: Path) -> None:
    from tq.quant import lossless as exact

    second = seeded().square() + 1e-8
    codes = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        x = seeded(dtype=torch.float32).mul(100).to(dtype).view(100, 200)
        code = exact.encode(x)
        check(isinstance(code, exact.Encoded) and torch.equal(exact.decode(code), x), dtype)
        codes += [bytes(code.steps), *map(bytes, code.frames)]
    code = exact.encode(seeded(), second_moment=second)
    check(torch.equal(exact.decode(code, second_moment=second), seeded()))
    codes += [bytes(code.steps), *map(bytes, code.frames)]
    check(sha(*codes) == LOSSLESS, f"lossless codes are others than they were: {sha(*codes)}")


# --- training in one process ------------------------------------------------------------------------------------


def optimizer_state(tmp: Path) -> None:
    from tq.train.optim import TurboQuantAdamW

    trained, same = model(), model()
    ours = TurboQuantAdamW(trained.parameters(), lr=1e-3, variant="local", state=(4, 8))
    train(trained, ours, 3)
    per_parameter = ours.state_nbytes / sum(p.numel() for p in trained.parameters())
    check(per_parameter < 2, f"{per_parameter} bytes per parameter")
    again = TurboQuantAdamW(same.parameters(), lr=1e-3, variant="local", state=(4, 8))
    same.load_state_dict(trained.state_dict())
    torch.save(ours.state_dict(), tmp / "state.pt")
    again.load_state_dict(torch.load(tmp / "state.pt", weights_only=True))
    train(trained, ours), train(same, again)
    check(alike(trained, same), "resumed otherwise")
    theirs, exact = torch.optim.AdamW(same.parameters(), lr=1e-3), model()
    train(same, theirs)
    taken = TurboQuantAdamW(exact.parameters(), lr=1e-3)
    exact.load_state_dict(same.state_dict())
    taken.load_state_dict(theirs.state_dict())
    train(exact, taken), train(same, theirs)
    check(alike(exact, same, 1e-6), "AdamW's state was taken over otherwise")


def offloading(tmp: Path) -> None:
    from tq.train.offload import OffloadedAdamW
    from tq.train.optim import TurboQuantAdamW

    (tmp / "slabs").mkdir()
    kept = model()
    train(kept, TurboQuantAdamW(kept.parameters(), lr=1e-3, variant="local", state=(4, 8)))
    for place in ("host", tmp / "slabs"):
        trained = model()
        optimizer = OffloadedAdamW(trained.parameters(), lr=1e-3, variant="local", state=(4, 8), place=place)
        train(trained, optimizer)
        optimizer.flush()
        check(alike(trained, kept), place)


def activations(tmp: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    from tq.train.activations import Report, compress_activations
    from tq.train.linear import CompressedLinear, linear, replace_linears
    from tq.train.recompute import CodedResults

    x = seeded(32 * 64).view(32, 64)

    def gradients(trained: nn.Module, forward: Callable[[nn.Module], Tensor]) -> Tensor:
        forward(trained).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in trained.parameters() if p.grad is not None])

    exact = gradients(model(), lambda trained: trained(x))
    compressed = compress_activations(bits=4)
    with compressed as report:
        found = gradients(model(), lambda trained: trained(x))
    check(isinstance(report, Report) and report.bytes_after < report.bytes_before / 2, report.by_kind)
    check(error(exact, found) < 0.2, error(exact, found))
    results = CodedResults()
    found = gradients(model(), lambda trained: checkpoint(trained, x, use_reentrant=False, context_fn=results))
    check(error(exact, found) < 0.2 and results.kept_bytes > 0, error(exact, found))
    replaced = model()
    replace_linears(replaced)
    check(isinstance(replaced[0], CompressedLinear) and error(exact, gradients(replaced, lambda t: t(x))) < 0.2)
    graph = torch.compile(replaced, backend="aot_eager", fullgraph=True)  # without a C++ compiler
    train(graph, torch.optim.AdamW(replaced.parameters()), 1)
    layer, step = CompressedLinear(nn.Linear(64, 32)), torch.tensor(0)
    payload, scales = torch.ops.tq.encode(x, layer.codec, step)
    check(linear(x, layer.weight, layer.bias, payload, scales, layer.codec, step).shape == (32, 32))


def planned(tmp: Path) -> None:
    from tq.train.coded_checkpoints import coded_checkpoints
    from tq.train.planned import compress_activations, plan_activations, plan_lowest_peak, plan_within_peak

    x, trained = seeded(32 * 64).view(32, 64), model()
    given = x.clone().requires_grad_()
    with coded_checkpoints([trained]):
        y = trained(given)
    y.sum().backward()
    check(torch.equal(y, trained(x)) and given.grad is not None)
    try:
        plan = plan_activations(trained, x, 0.5, bits=(), progress=False)
    except ModuleNotFoundError as error:  # SciPy solves and tqdm shows how far it is: neither comes with the package
        check(error.name in ("scipy", "tqdm") and not has(error.name), error)
        return
    with compress_activations(plan=plan) as usage:
        trained(x).sum().backward()
    check(usage.stored == plan.bytes_after, usage)
    low = plan_lowest_peak(trained, x, bits=(), progress=False)
    check(low.peak_bytes <= plan.peak_bytes, low)
    within = plan_within_peak(trained, x, plan.peak_bytes, bits=(), progress=False)
    check(within.peak_bytes <= plan.peak_bytes, within)

    from tq.train.planned.partition import PlannedBackend

    backend = PlannedBackend(0.5, bits=(), progress=False)
    torch.compile(trained, backend=backend, dynamic=False)(x).sum().backward()
    check([cut.bytes_after <= 0.5 * cut.bytes_before for cut in backend.plans] == [True], backend.plans)


def diloco(tmp: Path) -> None:
    from tq import Codec
    from tq.train.diloco import DiLoCo

    trained = model()
    inner = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    outer = DiLoCo(trained.parameters(), every=4, codec=Codec(bits=4), momentum=0.5)
    for _ in range(8):
        train(trained, inner, 1)
        outer.step()
    check(outer.steps_done == 8 and outer.bytes_sent == 0)


def model_of_the_book(tmp: Path) -> None:
    from tq.train import model as m

    corpus = m.load("stdlib", max_bytes=200_000)
    trained = m.GPT(m.GPTConfig(layers=1, hidden=16, heads=2, vocab=256, seq=16))
    losses = m.Trainer(trained, corpus, m.TrainConfig(steps=3, batch=2)).train(progress=False)
    check(isinstance(corpus, m.Corpus) and len(losses) == 3 and m.bits_per_byte(losses[-1], corpus) > 1, losses)
    check(len(m.parameter_groups(trained, 0.1)) == 2 and "tiny" in m.PRESETS)


def streamed(tmp: Path) -> None:
    from tq.train import model as m
    from tq.train.stream import StreamedTrainer

    shape, corpus = m.GPTConfig(layers=2, hidden=16, heads=2, vocab=256, seq=16), m.load("stdlib", max_bytes=200_000)
    place = tmp / "streamed"
    place.mkdir()
    with StreamedTrainer(shape, corpus, m.TrainConfig(steps=2, batch=2), place, impl="reference") as trainer:
        check(len(trainer.train(progress=False)) == 2)


def inference(tmp: Path) -> None:
    """Weights of a model in few bits by GPTQ, kept, decoded as they are stored; its keys and values in few bits."""
    from tq import Codec
    from tq.infer.evaluate import divergence
    from tq.infer.kv import Coder, bytes_per_token, calibrate, coders, with_coded_attention
    from tq.infer.layers import QuantizedLinear, stored_bits
    from tq.infer.weights import decoded, load, quantize, save
    from tq.train.model import GPT, GPTConfig

    config = GPTConfig(layers=1, hidden=64, heads=1, vocab=64, seq=32, ffn=128, activation="swiglu")
    plain, four = GPT(config).requires_grad_(False), Codec(bits=4, block=64)
    ids = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))
    if not has("numba"):
        nearest = quantize(plain, four, ids, method="nearest")
        check(stored_bits(nearest) == 4.5)
        try:
            quantize(plain, four, ids)
        except ImportError as said:
            check("pip install 'tq-book[infer]'" in str(said), said)
        else:
            check(False, "GPTQ without numba was no error")
        return
    from tq.infer.allocation import allocate_bits
    from tq.infer.decoder import Decoder
    from tq.infer.direct import DirectLinear, direct
    from tq.infer.pages import Pages, attend
    from tq.infer.path_product import PathProduct
    from tq.infer.trellis import TrellisCode, TrellisLinear, trellis
    from tq.infer.tuning import tune

    small = quantize(plain, four, ids, head=four)
    check(isinstance(small.head, QuantizedLinear) and divergence(plain, small, ids).kl < 0.01)
    straight = direct(small)
    check(isinstance(straight.head, DirectLinear) and torch.equal(straight(ids)[0], small(ids)[0]))
    logits = Decoder(small, integers=False).step(int(ids[0, 0]))
    check(torch.allclose(torch.from_numpy(logits), decoded(small)(ids[:1, :1])[0][0, 0], atol=1e-3))
    paths = trellis(plain.blocks[0].mlp.up.weight, torch.eye(64).double(), four)
    check(isinstance(paths, TrellisCode) and TrellisLinear(paths)(torch.ones(2, 64)).shape == (2, 128))
    widths = allocate_bits(plain, four, ids)
    check(quantize(plain, four, ids, widths=widths).blocks[0].mlp.up.codec.bits == widths["blocks.0.mlp.up"], widths)
    product = PathProduct([paths], integers=False)
    product.x[:] = 1
    check(torch.allclose(torch.from_numpy(product.run()), paths.decode().sum(1), atol=1e-3))
    check(stored_bits(tune(small, plain, ids, steps=1, batch=2)) == 4.5)
    coded = with_coded_attention(plain, coders(four, four, calibrate(plain, ids)))
    check(divergence(plain, coded, ids).kl < 0.01 and bytes_per_token(plain, four, four) == 72)
    keys, values = (Pages(Coder(four)) for _ in range(2))
    for pages in (keys, values):
        pages.append(seeded(64 * 300).view(1, 1, 300, 64))
    check(attend(seeded(64).view(1, 64), keys, values).isfinite().all())
    if has("safetensors"):
        save(small, tmp / "small.safetensors")
        check(torch.equal(load(tmp / "small.safetensors")(ids)[0], small(ids)[0]))
    if has("tokenizers"):
        from tq.infer import pretrained

        try:
            pretrained.load(tmp / "nowhere.gguf")
        except FileNotFoundError as said:
            check("no file" in str(said) and pretrained.Language.__doc__, said)
        check("quantize" in command("tq.infer", "--help"))


# --- checkpoints ------------------------------------------------------------------------------------------------


def state_of(trained: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": trained.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}


def checkpoints(tmp: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from tq.train import tqk
    from tq.train.tqk.dcp import Reader, Writer

    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    train(trained, optimizer)
    state, weight = state_of(trained, optimizer), trained[0].weight
    path = tmp / "a.tqk"
    tqk.save(path, state)
    check(torch.equal(tqk.load(path)["model"]["0.weight"], weight) and tqk.load(path)["step"] == 7)
    with tqk.File(path) as file:
        check(torch.equal(file.read("model/0.weight", rows=(3, 9)), weight[3:9]), file.names())
    for share in (False, True):
        kept = tqk.Checkpoints(tmp / f"kept-{share}", keep=2, share=share)
        with tqk.Background(lambda given, kept=kept: kept.save(given["step"], given)) as saving:
            for step in (1, 2, 3):
                saving.save(state | {"step": step})
        check(kept.steps() == [2, 3] and torch.equal(kept.load()["model"]["2.bias"], trained[2].bias))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp / "damaged.tqk").write_bytes(damaged)
    try:
        tqk.load(tmp / "damaged.tqk")
    except tqk.DamagedFile:
        pass
    else:
        check(False, "a damaged file was read")
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        dcp.save({"weight": weight, "step": 7}, storage_writer=Writer(tmp / "dcp"), no_dist=True)
        there = {"weight": torch.zeros_like(weight), "step": 0}
        dcp.load(there, storage_reader=Reader(tmp / "dcp"), no_dist=True)
    check(torch.equal(there["weight"], weight) and there["step"] == 7)


def checkpoint_commands(tmp: Path) -> None:
    trained = model()
    torch.save({"model": trained.state_dict()}, tmp / "a.pt")
    command("tq.train.tqk", "convert", str(tmp / "a.pt"), str(tmp / "b.tqk"))
    check("model/0.weight" in command("tq.train.tqk", "inspect", str(tmp / "b.tqk")))
    check("whole" in command("tq.train.tqk", "verify", str(tmp / "b.tqk")))
    if has("safetensors"):
        command("tq.train.tqk", "convert", str(tmp / "b.tqk"), str(tmp / "c.safetensors"))
        command("tq.train.tqk", "convert", str(tmp / "c.safetensors"), str(tmp / "d.pt"))
        back = torch.load(tmp / "d.pt", weights_only=True)
        check(torch.equal(back["model/0.weight"], trained[0].weight), list(back))
    else:
        said = command("tq.train.tqk", "convert", str(tmp / "b.tqk"), str(tmp / "c.safetensors"), code=1)
        check("pip install" in said and len(said.splitlines()) == 1, said)


# --- two ranks --------------------------------------------------------------------------------------------------
# Each runs in a group of two, over gloo or over tq; it returns what must be the same on both.


def parameters_of(trained: nn.Module) -> list[Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in trained.parameters()]


def train_rank(trained: nn.Module, optimizer: Any, rank: int, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        trained(torch.randn(32, 64, generator=generator)).square().mean().backward()
        optimizer.step()


def all_reduces(rank: int, tmp: Path) -> list[Tensor]:
    from tq import Codec
    from tq.train.collectives import Work, all_reduce

    x = seeded() * (1 + rank)
    all_reduce(x, Codec(bits=4), step=1)
    work = all_reduce(y := seeded() * (1 + rank), Codec(bits=4), step=1, async_op=True)
    check(isinstance(work, Work))
    work.wait()
    check(torch.equal(x, y) and error(seeded() * 1.5, x) < 0.15, error(seeded() * 1.5, x))
    return [x]


def ddp(rank: int, tmp: Path) -> list[Tensor]:
    from tq import Codec
    from tq.train import hooks
    from tq.train.collectives import HookState, ddp_hook

    found = []
    early = pickle.loads(pickle.dumps(hooks.HookState(Codec(bits=4), warmup=1)))  # as launchers send it
    for state, hook in ((HookState(Codec(bits=4), warmup=1), ddp_hook), (early, hooks.ddp_hook)):
        replica = DistributedDataParallel(model())
        replica.register_comm_hook(state, hook)
        train_rank(replica, torch.optim.AdamW(replica.parameters(), lr=1e-3), rank)
        check(state.step == 3, state.state_dict())
        found += parameters_of(replica)
    return found


def fsdp(rank: int, tmp: Path) -> list[Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    from tq import Codec
    from tq.train.collectives import ReduceScatter
    from tq.train.optim import TurboQuantAdamW
    from tq.train.tqk.dcp import Reader, Writer

    sharded = fully_shard(model())
    exchanged = ReduceScatter(Codec(bits=4))
    sharded.set_custom_reduce_scatter(exchanged)
    train_rank(sharded, TurboQuantAdamW(sharded.parameters(), variant="local", state=(4, 8)), rank)
    check(exchanged.step == 3, exchanged.state_dict())
    before = parameters_of(sharded)
    dcp.save(state := sharded.state_dict(), storage_writer=Writer(tmp / "fsdp"))
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    dcp.load(state, storage_reader=Reader(tmp / "fsdp"))
    check(all(torch.equal(p, q) for p, q in zip(before, parameters_of(sharded), strict=True)), "loaded otherwise")
    return before


def compressed_optimizer(rank: int, tmp: Path) -> list[Tensor]:
    from tq.train.optim import TurboQuantAdamW

    trained = model()
    train_rank(trained, TurboQuantAdamW(trained.parameters(), lr=1e-3), rank)
    return parameters_of(trained)


def sites(rank: int, tmp: Path) -> list[Tensor]:
    from tq import Codec
    from tq.train.diloco import DiLoCo

    trained = model()
    inner = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    outer = DiLoCo(trained.parameters(), every=4, codec=Codec(bits=4), momentum=0.5)
    for _ in range(8):
        train_rank(trained, inner, rank, 1)
        outer.step()
    check(outer.bytes_sent > 0)
    return parameters_of(trained)


def peer_memory(rank: int, tmp: Path) -> list[Tensor]:
    from tq.train.tqk import Checkpoints
    from tq.train.tqk.peers import PeerMemory

    memory, kept = PeerMemory(tmp / f"host-{rank}"), Checkpoints(tmp / "ranks", group=dist.group.WORLD)
    mine = torch.full((3,), float(rank))
    for step in (7, 8):
        memory.save(step, {"w": mine})
        kept.save(step, {"w": mine})
    if rank == 0:
        memory.forget()  # this host was lost
    dist.barrier()
    found = memory.load()
    check(found is not None and found[0] == 8 and torch.equal(found[1]["w"], mine), found)
    check(torch.equal(kept.load()["w"], mine))
    return []


def backend_ddp(rank: int, tmp: Path) -> list[Tensor]:
    import tq.backend

    replica = DistributedDataParallel(model())
    train_rank(replica, torch.optim.AdamW(replica.parameters(), lr=1e-3), rank)
    (line,) = [line.split() for line in tq.backend.report().splitlines() if " all_reduce " in line]
    check(int(line[3]) >= 3, tq.backend.report())  # coded
    calls = tq.backend.state_dict()
    tq.backend.load_state_dict(calls)
    check(all(count >= 3 for count in calls.values()), calls)
    return parameters_of(replica)


def backend_fsdp(rank: int, tmp: Path) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    import tq.backend

    sharded = fully_shard(model())
    train_rank(sharded, torch.optim.AdamW(sharded.parameters(), lr=1e-3), rank)
    (line,) = [line.split() for line in tq.backend.report().splitlines() if " reduce_scatter " in line]
    check(int(line[3]) >= 3, tq.backend.report())
    return parameters_of(sharded)


def backend_mesh(rank: int, tmp: Path) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    from tq.backend import Config, configure

    check(configure(Config(min_numel=1000, warmup=0)).min_numel == 1000)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"), backend_override={"dp": "tq"})
    dist.all_reduce(x := seeded() * (1 + rank), group=mesh.get_group("dp"))
    check(1e-3 < error(seeded() * 3, x) < 0.15, error(seeded() * 3, x))  # coded
    return [x]


RANKS: tuple[tuple[str, Callable[[int, Path], list[Tensor]]], ...] = (
    ("gloo", all_reduces), ("gloo", ddp), ("gloo", fsdp), ("gloo", compressed_optimizer), ("gloo", sites),
    ("gloo", peer_memory), ("tq", backend_ddp), ("tq", backend_fsdp), ("gloo", backend_mesh),
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def be_rank(rank: int, tmp: Path, names: Sequence[str]) -> int:
    """All doors that need two ranks, one group after the other; what replicas hold is compared. Rank 0 speaks."""
    warn()
    failed = 0
    for number, (kind, door) in enumerate((kind, door) for kind, door in RANKS if door.__name__ in names):

        def opened(kind: str = kind, door: Callable[[int, Path], list[Tensor]] = door, number: int = number) -> None:
            import tq.backend

            tq.backend.configure(tq.backend.Config(warmup=0))  # else the first steps are exact
            store = dist.FileStore(str(tmp / f"store-{number}"), 2)
            dist.init_process_group(kind, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
            try:
                (own := tmp / f"rank-{number}").mkdir(exist_ok=True)
                found = door(rank, own)
                digest = sha(*(x.detach().contiguous().numpy().tobytes() for x in found))
                said: list[Any] = [None, None]
                dist.all_gather_object(said, digest)
                check(said[0] == said[1], "the ranks hold different numbers")
            finally:
                dist.destroy_process_group()

        failed += not run(f"{door.__name__} (2 ranks, {kind})", opened, quiet=rank > 0)
        if failed:
            break  # the other rank waits, or is gone
    return failed


def two_ranks(tmp: Path, names: Sequence[str]) -> int:
    """Starts both; returns how many failed."""
    arguments = ["--extras", ",".join(sorted(EXTRAS)), "--only", ",".join(names)]
    own = [sys.executable, "-I", __file__, *arguments, "--folder", str(tmp)]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*own, "--rank", str(rank)], env=env) for rank in range(2)]
    try:
        return sum(rank.wait(900) != 0 for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()


# --- models -----------------------------------------------------------------------------------------------------


def systems(tmp: Path) -> None:
    from tq import systems as s

    shape, cluster = s.Transformer.preset("llama2-7b"), s.Cluster("h100-80gb", 64, network="eth-10g")
    layout = s.Layout(dp=64, global_batch=64)
    plain = s.predict(shape, layout, cluster)
    coded = s.predict(shape, layout, cluster, compression=s.Compression(gradients=s.Bits(4)))
    check(isinstance(plain, s.Prediction) and coded.iteration_s < plain.iteration_s)
    check(isinstance(s.memory(shape, layout), s.Memory) and s.Efficiency and s.Experts)
    small = s.Transformer.preset("gpt2-1.5b"), s.Cluster("a100-80gb", 8), 64
    check(s.best(*small) and isinstance(next(s.layouts(*small)), s.Layout))


def calculators(tmp: Path) -> None:
    from tq.economics.calculator import FIELDS, Case, Field, Result, codec, defaults, memory, savings
    from tq.quant.codebook import distortion

    check(codec(defaults("codec"), {4: distortion(4)})["bits_per_element"] == 4.25)
    check(memory(defaults("memory"))["coded_largest_batch"] == 14)
    check(savings(defaults("savings")) and all(isinstance(each, Field) for each in FIELDS["savings"]))
    check(Case and Result)


def commands_of_economics(tmp: Path) -> None:
    """Every command that `--help` names, with an answer in JSON."""
    asked = {
        "savings": ("--gpus", "64", "--link-gbit", "25", "--codec-g", "50"),
        "memory": ("--model", "llama2-7b", "--gpu", "h100-80gb", "--dp", "8", "--activation-bits", "4"),
        "cost": ("--model", "llama2-70b", "--tp", "8", "--dp", "32", "--global-batch", "1024", "--tokens", "1.4e12"),
        "checkpoint": ("--model", "llama2-70b", "--gpus", "1024", "--write-gb-s", "50"),
        "breakeven": ("--share", ".04", ".2", "--link", "400", "100", "25", "--overhead", "1", "1.2"),
        "pareto": ("--model", "llama2-7b", "--tokens", "1e12", "--gpus", "64", "128", "--batch", "512"),
        "prices": ("--gpu", "h100-80gb"),
    }
    from tq.economics.commands import COMMANDS

    check(set(asked) == set(COMMANDS), set(asked) ^ set(COMMANDS))
    shown = command("tq.economics", "--help")
    for name, options in asked.items():
        check(name in shown)
        # in this process: PyTorch is imported once
        with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that prices grow old
            before, sys.argv = sys.argv, ["economics", name, *options, "--json"]
            try:
                runpy.run_module("tq.economics", run_name="__main__")
            except SystemExit as ended:
                check(not ended.code, f"{name}: {ended.code}")
            finally:
                sys.argv = before
        check(json.loads(out.getvalue()), name)


# --- all of it --------------------------------------------------------------------------------------------------

DOORS: tuple[Door, ...] = (
    package, codec, formats, kernels, lossless, optimizer_state, offloading, activations, planned, diloco,
    model_of_the_book, streamed, inference, checkpoints, checkpoint_commands, systems, calculators,
    commands_of_economics, lines_of_the_readme,
)  # fmt: skip


def warn() -> None:
    """What tq itself causes is an error; PyTorch may warn of itself."""
    warnings.filterwarnings("error", module=r"tq(\.|$)")


def run(name: str, opened: Callable[[], None], quiet: bool = False) -> bool:
    begun = time.perf_counter()
    try:
        opened()
        word = "ok"
    except BaseException:
        word = "FAILED"
        traceback.print_exc()
    if not quiet or word == "FAILED":
        print(f"{word:6} {time.perf_counter() - begun:6.1f} s  {name}", flush=True)
    return word == "ok"


def pinned() -> None:
    """The digests to write above, from this machine."""
    from tq import Codec
    from tq.quant import lossless as exact

    print("message", Codec(bits=4).encode(seeded(200)).to_bytes().hex(), exact.FRAME)
    for door in (codec, lossless):
        run(door.__name__, lambda door=door: door(Path()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", default="", help="of the wheel, that were installed: kernels, checkpoint")
    parser.add_argument("--only", default="", help="these doors, with commas between them")
    parser.add_argument("--pin", action="store_true", help="print the digests of this machine")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    EXTRAS.update(filter(None, given.extras.split(",")))
    names = [door.__name__ for door in DOORS] + [door.__name__ for _, door in RANKS]
    chosen = [name for name in given.only.split(",") if name] or names
    if unknown := set(chosen) - set(names) | EXTRAS - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if given.pin:
        pinned()
        return 0
    if given.rank is not None:
        return be_rank(given.rank, given.folder, chosen)
    there = ["tq-book", *filter(has, ("torch", "numpy", "numba", "triton", "safetensors"))]
    print(f"Python {sys.version.split()[0]}:", *(f"{name} {importlib.metadata.version(name)}" for name in there))
    warn()
    begun, failed = time.perf_counter(), 0
    with tempfile.TemporaryDirectory(prefix="tq-smoke-") as folder:
        for door in DOORS:
            if door.__name__ in chosen:
                (own := Path(folder) / door.__name__).mkdir()
                failed += not run(door.__name__, lambda door=door, own=own: door(own))
        ranked = [door.__name__ for _, door in RANKS if door.__name__ in chosen]
        failed += two_ranks(Path(folder), ranked) if ranked else 0
    print(f"{len(chosen)} doors, {failed} failed, {time.perf_counter() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
