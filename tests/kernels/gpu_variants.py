"""What the Triton kernels are checked on: parity cases (interpreter or GPU) and variants to compile.

Run as a program in a process of its own, because Triton decides at import whether it interprets:
`gpu_variants.py parity` reads numbers of cases from stdin and answers each with a line of JSON, null or the traceback;
`gpu_variants.py compile 90 [count]` prints `resources` for that target as JSON.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tq import Codec
from tq.quant import reference
from tq.quant.bits import packed_bytes, unpack
from tq.quant.codebook import lloyd_max
from tq.quant.logscale import LogCodec
from tq.quant.rotation import rotate, signs, step_seed, unrotate
from tq.quant.scale_search import multipliers, search
from tq.train._torch_private import DispatchMode

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
SENTINEL = 119


# --- parity with the reference --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One encoding and its decoding. data: "normal", or "hostile" (rows of unfriendly blocks, R of them)."""

    bits: int = 4
    block: int = 128
    rounds: int = 2
    scale: str = "unbiased"
    search: int = 1
    shape: tuple[int, int] = (1, 5000)
    dtype: torch.dtype = FLOAT
    scale_dtype: torch.dtype = FLOAT
    factor: float = 1.0
    sphere: bool = False
    data: str = "normal"

    @property
    def name(self) -> str:
        """The settings that differ from the default."""
        parts = [
            f"{key}={str(value).removeprefix('torch.').replace(' ', '')}"
            for key, value in vars(self).items()
            if value != getattr(Case, key)
        ]
        return ",".join(parts) or "default"


def _cases() -> list[Case]:
    base = Case()
    cases = [base]
    cases += [
        replace(base, bits=bits, scale=s)
        for bits, s in zip(range(1, 9), 2 * ("mse", "norm", "unbiased", "paper"), strict=True)
    ]
    cases += [
        replace(base, block=block, rounds=rounds, shape=(1, 20 * block - 37))
        for block in (64, 128, 256, 512, 1024)
        for rounds in (1, 2, 3)
    ]
    cases += [
        replace(base, bits=bits, block=block, rounds=1, shape=(1, 9 * block))
        for bits in (1, 3, 7)
        for block in (64, 256)
    ]
    cases += [replace(base, scale=scale, search=5) for scale in ("paper", "mse", "unbiased", "norm")]
    cases += [replace(base, bits=bits, search=17) for bits in (1, 2, 4, 6, 8)]
    cases += [replace(base, block=1024, bits=3, search=5, rounds=1)]
    cases += [replace(base, dtype=dtype, rounds=r, scale_dtype=BRAIN) for dtype in (FLOAT, BRAIN, HALF) for r in (1, 2)]
    cases += [replace(base, bits=bits, sphere=True, block=block) for bits in (4, 5, 8) for block in (64, 1024)]
    cases += [
        replace(base, shape=shape) for shape in ((1, 0), (0, 7), (1, 1), (1, 127), (1, 128), (1, 4096), (1, 8193))
    ]
    cases += [replace(base, shape=shape, bits=b) for b in (3, 4) for shape in ((5, 200), (7, 1), (33, 128), (3, 1000))]
    cases += [
        replace(base, shape=(5, 1500), block=1024, rounds=1, dtype=BRAIN),
        replace(base, shape=(9, 100), block=64),
    ]
    cases += [replace(base, factor=factor, shape=(3, 200)) for factor in (0.125, 3e-5, 1e30)]
    cases += [
        replace(base, data="hostile", dtype=dtype, scale_dtype=scale_dtype, scale=scale, bits=bits)
        for bits in (1, 4)
        for scale in ("paper", "mse", "unbiased", "norm")
        for dtype, scale_dtype in ((FLOAT, FLOAT), (BRAIN, BRAIN))
    ]
    cases += [replace(base, data="hostile", dtype=HALF), replace(base, data="hostile", block=1024, search=5, bits=8)]
    return cases


CASES = _cases()


def _input(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if case.data == "normal":
        x_RD = torch.randn(case.shape, generator=generator)
        x_RD[:, ::97] *= 30  # heavy tails reach the outer cells
        return x_RD.to(case.dtype)
    b = case.block
    rows = torch.randn(16, b, generator=generator)
    rows[0] = 0
    rows[1], rows[1, 5] = 0, 3.0  # one spike
    rows[2] = 0.7
    rows[3] = torch.where(rows[3] > 0, 1.0, -2.0)  # two levels
    rows[4] *= 1e38
    rows[5] *= 1e-38
    rows[6] *= 3e-44  # subnormals
    rows[7], rows[7, 0] = 0, 1e-45
    rows[8, 3] = torch.tensor(-1, dtype=torch.int32).view(FLOAT)  # NaN as a GPU makes it, all ones
    rows[9, b - 1] = torch.inf
    rows[10, 0] = -torch.inf
    rows[11] = 3.3e38  # paper: a scale beyond bf16; others: fits
    rows[12], rows[12, 0] = 1e-30, 1e38
    rows[13] = torch.arange(b) % 2
    rows[14] = 3.4028234663852886e38
    return rows.to(case.dtype)


def _tables(case: Case) -> tuple[Tensor, Tensor]:
    levels, thresholds = lloyd_max(case.bits, case.block if case.sphere else None)
    return torch.tensor(levels, dtype=FLOAT), torch.tensor(thresholds, dtype=FLOAT)


def _guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A poisoned tensor, and the guard behind it that nobody may write into."""
    size = torch.Size(shape).numel()
    memory = torch.full(((size + 64) * dtype.itemsize,), SENTINEL, dtype=torch.uint8, device=device).view(dtype)
    return memory[:size].view(shape), memory[size:]


def _untouched(guard: Tensor) -> bool:
    return bool((guard.view(torch.uint8) == SENTINEL).all())


def _blocks(case: Case, x_RD: Tensor) -> Tensor:
    """float64 [N, B], padded."""
    return torch.nn.functional.pad(x_RD.double(), (0, -x_RD.shape[1] % case.block)).view(-1, case.block)


def _exact(case: Case, index_NB: Tensor, scale_N: Tensor, levels_L: Tensor) -> Tensor:
    """Decoded values [R, D] in float64."""
    q_NB = levels_L.double()[index_NB]
    y_NB = unrotate(q_NB, case.rounds, 3) * scale_N.double()[:, None]
    rows, d = _input(case).shape
    return y_NB.view(rows, -(-d // case.block) * case.block)[:, :d]


def _check_indices(case: Case, x_RD: Tensor, want_NB: Tensor, got_NB: Tensor, thresholds: Tensor) -> None:
    """Equal, but for neighbours where a float64 coordinate lies on the threshold between them to fp32 rounding."""
    n, at = (want_NB != got_NB).nonzero(as_tuple=True)
    if n.numel() == 0:
        return
    assert bool(((want_NB - got_NB)[n, at].abs() == 1).all()), "indices differ by more than one"
    x_NB = _blocks(case, x_RD)
    dense = ((x_NB != 0).sum(1) >= 16)[n]  # sparse blocks meet thresholds exactly, and often
    x_NB = x_NB / x_NB.abs().amax(1, keepdim=True)
    z_NB = rotate(x_NB, case.rounds, 3)
    u = (z_NB / z_NB.pow(2).mean(1, keepdim=True).sqrt())[n, at]
    t = thresholds.double()[torch.minimum(want_NB, got_NB)[n, at]]
    ms = torch.tensor(multipliers(case.search), dtype=torch.float64)
    distance = (u[:, None] * ms - t[:, None]).abs().amin(1).max().item()
    assert distance < 2e-5, f"an index differs {distance:.2g} from the threshold"
    count = int(dense.sum())
    assert case.data == "hostile" or count <= max(1, 1e-4 * want_NB.numel()), f"{count} indices differ"


def check(case: Case, device: str) -> None:
    """Hold the kernels to the reference on one case; raises AssertionError with what differs."""
    from tq.kernels import gpu

    x_RD = _input(case)
    rows, d = x_RD.shape
    blocks, width = rows * -(-d // case.block), packed_bytes(case.bits, case.block)
    levels, thresholds = _tables(case)
    tried = search(case.search, case.bits, levels.numpy().tobytes(), thresholds.numpy().tobytes())
    same = dict(bits=case.bits, block=case.block, rounds=case.rounds, rotation="hadamard", seed=3, levels_L=levels)
    want, want_scale = torch.empty(blocks, width, dtype=torch.uint8), torch.empty(blocks, dtype=case.scale_dtype)
    reference.encode(
        x_RD, want, want_scale, scale=case.scale, thresholds=thresholds, search=tried, factor=case.factor, **same,
    )  # fmt: skip

    payload, guard = _guarded((blocks, width), torch.uint8, device)
    scale, scale_guard = _guarded((blocks,), case.scale_dtype, device)
    tables: dict[str, Any] = dict(signs_RB=signs(case.block, case.rounds, 3).to(device), levels_L=levels.to(device))
    gpu.encode(
        x_RD.to(device), payload, scale, **tables, thresholds=thresholds.to(device), bits=case.bits, scale=case.scale,
        search=tried, factor=case.factor,
    )  # fmt: skip
    assert _untouched(guard) and _untouched(scale_guard), "wrote behind the code"
    got, got_scale = payload.cpu(), scale.cpu()
    want_NB, got_NB = (unpack(t, case.bits, case.block).long() for t in (want, got))
    a, b = want_scale.double(), got_scale.double()
    assert torch.equal(a.isnan(), b.isnan()), f"NaN scales in blocks {(a.isnan() != b.isnan()).nonzero().flatten()}"
    assert torch.equal(a == 0, b == 0), "zero scales differ"
    coded = a.isfinite() & (a != 0)
    _check_indices(case, x_RD, want_NB, got_NB, thresholds)
    if bool(coded.any()):
        tolerance = 2e-6 if case.scale_dtype == FLOAT else 2.0**-7
        relative = ((b - a)[coded].abs() - 3e-45).div(a[coded].abs()).max().item()  # subnormals: to their last place
        assert relative < tolerance, f"scales differ by {relative:.2g}"
    empty = a.isnan() | (_blocks(case, x_RD) == 0).all(1)
    assert bool((got[empty] == 0).all()), "payload of a block without code"

    if blocks == 0:
        return
    interpreted_brain = device == "cpu" and case.dtype == BRAIN
    limit = 2.2 if interpreted_brain else 2.0  # the interpreter truncates to bf16
    # Each decodes what the other encoded.
    for code, s, index_NB in ((want, want_scale, want_NB), (got, got_scale, got_NB)):
        accumulators = (False, True) if case.dtype == FLOAT else (False,)
        for accumulate in accumulators:
            start = torch.randn(x_RD.shape, generator=torch.Generator().manual_seed(1)) if accumulate else None
            plain = start.clone() if accumulate else torch.empty_like(x_RD)
            reference.decode(code, s, plain, accumulate=accumulate, **same)
            out, out_guard = _guarded(tuple(x_RD.shape), case.dtype, device)
            if accumulate:
                out.copy_(start)
            gpu.decode(code.to(device), s.to(device), out, **tables, bits=case.bits, accumulate=accumulate)
            assert _untouched(out_guard), "wrote behind the output"
            y, largest = out.cpu().double(), torch.finfo(case.dtype).max
            exact = _exact(case, index_NB, s, levels).clamp(-largest, largest) + (start.double() if accumulate else 0)
            assert torch.equal(y.isnan(), plain.isnan()), "NaN in other places"
            assert not bool(y.isinf().any()), "infinite"
            # block by block, as their magnitudes differ by 80 decades
            full = torch.nn.functional.pad(torch.stack((y, plain.double(), exact)), (0, -d % case.block))
            mine, theirs, true = full.nan_to_num(0).view(3, blocks, case.block)
            if interpreted_brain:  # the interpreter loses subnormals in this cast
                kept = true.abs().amax(1) > 1e-36
                mine, theirs, true = mine[kept], theirs[kept], true[kept]
            size = true.abs().amax(1).clamp_min(1e-44)[:, None] * torch.finfo(case.dtype).eps
            worst = ((mine - true) / size).abs().max().item()
            assert worst <= 2 * ((theirs - true) / size).abs().max().item() + 1, f"off by {worst:.3g} ulp"
            error, allowed = ((t - true).div(size).norm().item() for t in (mine, theirs))
            assert error <= limit * allowed + 1.0, f"decoding error {error / allowed:.3g} times the reference's"


def check_signs(device: str) -> None:
    """Signs made on the device are those of the reference, for a seed and for a step under it."""
    from tq.kernels import gpu

    for seed in (0, 3, 2**31 + 5, 2**63 + 11, 2**64 - 1):
        for block, rounds in ((64, 1), (64, 3), (128, 1), (256, 2), (1024, 3)):
            assert torch.equal(gpu.signs(block, rounds, seed, device).cpu(), signs(block, rounds, seed)), (seed, block)
        for step in (0, 1, 2**31 + 7, 2**40 + 3):
            held = torch.tensor([step], device=device)
            found = gpu.signs(128, 2, seed, device, held).cpu()
            assert torch.equal(found, signs(128, 2, step_seed(seed, step))), (seed, step)


def check_logscale(device: str) -> None:
    """The logarithmic codec on the device gives the reference's bits."""
    codec_of = {(bits, block): LogCodec(bits, block) for bits in (8, 4, 2) for block in (128, 256, 2048)}
    for (bits, block), codec in codec_of.items():
        for n in (1, 128, 5000, 128 * 37):
            v = torch.rand(n, generator=torch.Generator().manual_seed(n)) ** 9
            v[::7] = 0
            if n >= 5000 - 264:
                v[300:500], v[600], v[1000], v[2000], v[3000] = 0.0, torch.inf, -1.0, 1e-40, torch.nan
            for step in (0, 5, 2**40):
                want, got = (
                    codec.encode(v.to(on), step, impl) for on, impl in (("cpu", "reference"), (device, "triton"))
                )
                codes, ranges = (x.cpu() for x in got)
                assert torch.equal(ranges, want[1]), (bits, block, n)
                assert torch.equal(codes[ranges[:, 1] != 0x7FC0], want[0][ranges[:, 1] != 0x7FC0]), (bits, block, n)
                a, b = codec.decode(*want, n, "reference"), codec.decode(*got, n, "triton").cpu()
                assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


def _optimizers(device: str, dtype: torch.dtype, state: tuple[int, int] | None, **options: Any) -> list[Any]:
    """The unfused path, and the kernel, over parameters that share blocks and end inside them."""
    from tq.train.optim import TurboQuantAdamW

    made = []
    for on, impl in (("cpu", "reference"), (device, "triton")):
        generator = torch.Generator().manual_seed(0)
        sizes = ((257, 5), (3,), (128,), (), (0, 5), (1100,), (7,))
        tensors = [torch.randn(size, generator=generator).to(dtype).to(on).requires_grad_() for size in sizes]
        ours = options if impl == "triton" else {k: v for k, v in options.items() if k != "capturable"}
        made.append(TurboQuantAdamW(tensors, lr=1e-2, variant="local", state=state, impl=impl, **ours))
        other = torch.randn(300, generator=generator).to(dtype).to(on).requires_grad_()
        made[-1].add_param_group({"params": [other], "maximize": True, "lr": 3e-3})
    return made


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _give(optimizer: Any, step: int, without: tuple[int, ...] = (4,), scale: float = 1.0) -> None:
    """Gradients, which stay where they are if there were some."""
    generator = torch.Generator().manual_seed(step)
    for number, p in enumerate(_parameters(optimizer)):
        drawn = torch.randn(p.shape, generator=generator) * 10.0 ** torch.randn(p.shape, generator=generator)
        if number in without:
            p.grad = None
        elif p.grad is None:
            p.grad = (scale * drawn).to(p.dtype).to(p.device)
        else:
            p.grad.copy_((scale * drawn).to(p.dtype))


def _hold_together(reference: Any, kernel: Any, state: tuple[int, int] | None) -> None:
    """Steps, weights and moments agree, but for what falls to the other side of a threshold.

    Of moments in few bits the scale of a whole block may differ by its last place, and a few codes by one.
    """
    for p, q in zip(_parameters(reference), _parameters(kernel), strict=True):
        moment_eps, strays = (torch.finfo(FLOAT).eps, 0) if state is None else (2.0**-9, 2 + p.numel() // 200)
        pairs = zip((p, *reference.moments(p)), (q, *kernel.moments(q)), strict=True)
        for (x, y), eps in zip(pairs, (torch.finfo(p.dtype).eps, moment_eps, moment_eps), strict=True):
            x, y = x.detach().float(), y.detach().float().cpu()
            assert torch.equal(x.isnan(), y.isnan())
            largest = x.abs().max().item() if x.numel() else 0.0  # m is a sum whose terms may cancel
            far = ((x - y).abs() > 4 * eps * x.abs() + 3e-6 * largest).sum().item()
            assert far <= strays, f"{far} of {x.numel()} differ"
    for (_, _, one), (_, _, other) in zip(reference._buckets(), kernel._buckets(), strict=True):
        assert one.steps == other.steps and one.done == other.done
    assert kernel.steps_done == reference.steps_done


def check_adamw(device: str) -> None:
    """AdamW in one pass is the unfused step up to rounding."""
    for dtype, state, options in (
        (FLOAT, None, {}), (FLOAT, (4, 8), {}), (BRAIN, (4, 8), {}), (HALF, (8, 8), {}), (FLOAT, (3, 4), {}),
        (FLOAT, (6, 2), {"maximize": True}), (FLOAT, None, {"max_norm": 0.1}),
        (BRAIN, None, {"stochastic_rounding": True}),
    ):  # fmt: skip
        reference, kernel = _optimizers(device, dtype, state, **options)
        for step, without in enumerate(((4,), (1, 4), (*range(7),), (4,))):  # in the third step, a whole bucket
            for optimizer in (reference, kernel):
                _give(optimizer, step, without)
                optimizer.step()
            _hold_together(reference, kernel, state)
            kernel.load_state_dict(reference.state_dict())  # a code that differs would go on to differ


class _Alone(DispatchMode):
    """Raises where the host asks the device for a number, or makes a tensor of numbers of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ops = torch.ops.aten
        if func in (ops._local_scalar_dense.default, ops.is_nonzero.default, ops.lift_fresh.default):
            raise AssertionError(f"the host talks to the device: {func}")
        return func(*args, **(kwargs or {}))


def check_captured(device: str) -> None:
    """A capturable step does without the host, leaves out what overflowed, and counts the steps of each parameter.

    A graph could hold it: what it reads and writes stays where it is, also while somebody looks at the state.
    """
    for dtype, state, options in (
        (FLOAT, (4, 8), {}), (BRAIN, (8, 4), {"stochastic_rounding": True}), (FLOAT, None, {"max_norm": 1.0}),
    ):  # fmt: skip
        reference, kernel = _optimizers(device, dtype, state, nonfinite="propagate", capturable=True, **options)
        places: list[int] = []
        for step, overflows in enumerate((False, True, False, False, True, False)):
            without = (4, 7) if step < 3 else (4,)  # the second group has gradients from the fourth step on
            _give(kernel, step, without, scale=4.0)
            kernel.grad_scale = torch.tensor(4.0, device=device)
            kernel.found_inf = torch.tensor(float(overflows), device=device)
            if step == 4 and "max_norm" in options:  # left out without being told
                kernel.found_inf = None
                kernel.param_groups[0]["params"][0].grad[3, 3] = torch.nan
            with nullcontext() if step in (0, 3) else _Alone():  # where other gradients are there than before
                kernel.step()
            lying = [x for _, _, store in kernel._buckets() for x in store.tensors.values()]
            found = [x.data_ptr() for x in (*lying, kernel._counter.steps, *kernel._counter.buckets)]
            assert not places or found == places, "the state has moved"
            places = found
            if not overflows:
                _give(reference, step, without, scale=1.0)
                reference.step()
            if step == 3:
                kernel.state_dict()
                deepcopy(kernel)
                kernel.load_state_dict(kernel.state_dict())
        _hold_together(reference, kernel, state)
        copied = _optimizers(device, dtype, state, nonfinite="propagate", capturable=True, **options)[1]
        _give(copied, 8)
        copied.step()  # what it holds by then is written over
        copied.load_state_dict(kernel.state_dict())
        saved = kernel.state_dict()
        held = {x.untyped_storage().data_ptr() for bucket in saved["turboquant"]["buckets"] for x in bucket.values()}
        if state is None:  # AdamW's form and the whole one are the same tensors
            assert {entry["exp_avg"].untyped_storage().data_ptr() for entry in saved["state"].values()} <= held
        for optimizer in (kernel, copied):
            _give(optimizer, 9)
            optimizer.grad_scale = optimizer.found_inf = None
            optimizer.step()
        for p, q in zip(_parameters(kernel), _parameters(copied), strict=True):
            for x, y in zip(kernel.moments(p), copied.moments(q), strict=True):
                assert torch.equal(x, y)
        assert kernel.steps_done == copied.steps_done == 5


def check_addresses(device: str) -> None:
    """What a launch writes is what is uploaded."""
    from tq.kernels import gpu_adamw

    for count in (1, 3, 4, 5, 16, 23):
        places = tuple((k, 2**31 + k, 2**47 - k, k * 2**40) for k in range(count))
        written = gpu_adamw._written(places, torch.device(device))[:count]
        assert torch.equal(written.cpu(), gpu_adamw._segments(places, device).cpu())


def check_graph() -> None:
    """On a GPU: replays of one captured step are as many steps, also after somebody looked at the state."""
    device = "cuda"
    for state in (None, (4, 8)):
        eager, held = (_optimizers(device, FLOAT, state, nonfinite="propagate", capturable=True)[1] for _ in range(2))
        for optimizer in (eager, held):
            _give(optimizer, 0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            held.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        for p in _parameters(held):
            p.grad = None if p.grad is None else p.grad.clone()  # elsewhere than in the step before
        with torch.cuda.graph(graph):
            held.step()
        eager.step()
        for step in (1, 2, 3):
            for optimizer in (eager, held):
                _give(optimizer, step)
            eager.step()
            graph.replay()
            assert held.steps_done == eager.steps_done == step + 1
            held.state_dict()
        for p, q in zip(_parameters(eager), _parameters(held), strict=True):
            assert torch.equal(p, q)


def check_product(device: str) -> None:
    """Codes times one to eight vectors, beside the decoded matrix."""
    from tq.kernels import gpu_codes

    for bits, rows, columns, vectors, block, dtype in (
        (4, 19, 192, 1, 64, BRAIN), (3, 8, 128, 3, 128, FLOAT), (2, 9, 128, 8, 64, BRAIN),
    ):  # fmt: skip
        codec = Codec(bits, block, scale_dtype=dtype)
        weight, x = (torch.randn(n, columns, generator=torch.Generator().manual_seed(n)) for n in (rows, vectors))
        code = codec.encode(weight, rows=True, impl="reference")
        wanted = x @ codec.decode(code, impl="reference").T
        rotated = rotate(x.view(-1, block), codec.rounds, codec.seed).view(x.shape)
        given = (t.to(device) for t in (code.payload, code.scales, rotated))
        levels = torch.from_numpy(lloyd_max(bits)[0]).float().to(device)
        found = gpu_codes.multiply(*given, block, bits, levels).cpu()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def check_attend(device: str) -> None:
    """Attention straight from codes, over pages of which the last is not full, beside what they decode to."""
    from tq.infer.kv import Coder
    from tq.infer.pages import Pages, attend

    generator = torch.Generator().manual_seed(0)
    for heads, queries, bits in ((2, 2, (4, 4)), (1, 4, (3, 2))):
        mean, factor = torch.randn(heads, 64, generator=generator), torch.rand(heads, 64, generator=generator) + 0.5
        keys = Pages(Coder(Codec(bits[0], 64, "mse", seed=1, scale_dtype=BRAIN), mean, factor))
        values = Pages(Coder(Codec(bits[1], 64, "mse", seed=2, scale_dtype=BRAIN)))
        for pages in (keys, values):
            pages.append(torch.randn(1, heads, 300, 64, generator=generator))
        q = torch.randn(queries, 64, generator=generator)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q[None, :, None], keys.decoded(), values.decoded(), enable_gqa=True
        )[0, :, 0]
        for pages in (keys, values):
            pages.to(device)
        impl = "triton" if device == "cpu" else "auto"  # what is interpreted has to be asked for
        torch.testing.assert_close(attend(q.to(device), keys, values, impl=impl).cpu(), wanted, rtol=1e-4, atol=1e-4)


EXTRA = {
    -1: check_signs, -2: check_logscale, -3: check_adamw, -4: check_captured, -5: check_addresses, -6: check_product,
    -7: check_attend,
}  # fmt: skip

# --- variants to compile --------------------------------------------------------------------------------------


def _variants() -> list[dict[str, Any]]:
    both = [dict(kind=kind, **v) for v in _common() for kind in ("encode", "decode")]
    encoders = [dict(scale=s) for s in ("paper", "norm")]
    encoders += [dict(search=5), dict(search=5, block=256), dict(search=5, bits=8), dict(search=5, dtype=BRAIN)]
    encoders += [dict(search=5, block=1024, bits=2), dict(scale_dtype=BRAIN)]
    decoders = [dict(accumulate=True), dict(accumulate=True, block=256), dict(dtype=BRAIN, scale_dtype=BRAIN, rounds=1)]
    return both + [dict(kind="encode", **v) for v in encoders] + [dict(kind="decode", **v) for v in decoders]


def _common() -> list[dict[str, Any]]:
    common: list[dict[str, Any]] = [dict(), dict(rounds=1), dict(dtype=BRAIN), dict(dtype=BRAIN, rounds=1)]
    common += [dict(bits=bits) for bits in (1, 3, 6, 8)]
    common += [dict(block=64), dict(block=256), dict(block=1024), dict(tiling="tail")]
    return common + [dict(tiling="rows", dtype=HALF)]


VARIANTS = _variants()
ADAMW: list[dict[str, Any]] = [
    dict(state=None), dict(), dict(state=(8, 8)), dict(state=(2, 2)), dict(dtype=BRAIN, at_random=True, stepped=True),
]  # fmt: skip


def variant_name(variant: dict[str, Any]) -> str:
    settings = [f"{k}={str(v).removeprefix('torch.')}" for k, v in variant.items() if k != "kind"]
    return " ".join([variant.get("kind", "adamw"), *settings])


def resources(target: int, numbers: list[int]) -> list[dict[str, Any]]:
    """name, target, registers, spills, shared_bytes, instructions_per_element, ... of these of VARIANTS + ADAMW."""
    import triton

    from tq.kernels import gpu, gpu_adamw
    from tq.lab import sm90

    version = [int(part) for part in triton.__version__.split(".")[:2]]
    made = [(gpu.compiled, v) for v in VARIANTS] + [(gpu_adamw.compiled, v) for v in ADAMW]
    return [
        dict(name=variant_name(v), triton=version, target=target) | sm90.resources(*compiled(target=target, **v))
        for compiled, v in (made[number] for number in numbers)
    ]


def _main(task: str, *arguments: str) -> None:
    if task == "compile":
        target, *numbers = map(int, arguments)
        print(json.dumps(resources(target, numbers)))
        return
    warnings.simplefilter("ignore")  # NumPy's, from the interpreter's arithmetic on zeros and infinities
    for line in sys.stdin:
        try:
            number = int(line)
            check(CASES[number], "cpu") if number >= 0 else EXTRA[number]("cpu")
            answer = None
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _main(*sys.argv[1:])
