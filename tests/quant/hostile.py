"""Hostile inputs at the door to the native code, by number; ``test_native_boundary`` runs ranges of them in children.

    python hostile.py FIRST COUNT PROGRESS

Each case either raises TypeError or ValueError or gives what the PyTorch reference gives on a plain contiguous copy.
The number of the case is written to the file PROGRESS before it runs, so that the parent knows whom to blame for a
crash; a negative one crashes on purpose. Prints, as JSON, how often each kind was accepted and refused, and what went
wrong.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import mmap
import os
import random
import signal
import struct
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tq import Code, Codec
from tq.quant import dispatch
from tq.quant.bits import unpack
from tq.quant.inner_product import ProdCodec
from tq.quant.logscale import LogCodec
from tq.quant.reference import _best_multipliers, _squared_sine
from tq.quant.rotation import rotate
from tq.quant.scale_search import INTEGER_BITS, STEPS

REFUSALS = (TypeError, ValueError)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((), (0,), (1,), (2, 0, 3), (127,), (128,), (129,), (7, 19), (3, 5, 11), (2, 3, 4, 5), (1025,), (40, 33))
LARGE = ((1 << 17,), (300, 1000), (3 << 18,))  # several threads work on these


class Case:
    """The draws of one case."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(number)
        self.torch = torch.Generator().manual_seed(number)

    def one_of(self, *options: Any) -> Any:
        return self.random.choice(options)

    def codec(self, **fixed: Any) -> Codec:
        bits = self.random.randint(1, 8)
        haar = self.random.random() < 0.1
        arguments: dict[str, Any] = {
            "block": self.random.randint(3, 40) if haar else self.one_of(64, 128, 128, 256, 512, 1024),
            "rotation": "haar" if haar else "hadamard",
            "scale": self.one_of("paper", "mse", "unbiased", "norm"),
            "rounds": self.random.randint(1, 3),
            "search": self.one_of(1, 1, 1, 5),
            "seed": self.random.randint(0, 9),
            "scale_dtype": self.one_of(torch.float32, torch.bfloat16) if bits <= 6 else torch.float32,
            "nonfinite": self.one_of("raise", "propagate"),
        }
        return Codec(bits, **(arguments | fixed))

    def impl(self, codec: Codec) -> str:
        return self.one_of("auto", "reference", "auto" if codec.rotation == "haar" else "cpu")

    def shape(self) -> tuple[int, ...]:
        return self.one_of(*LARGE) if self.random.random() < 0.003 else self.one_of(*SHAPES)

    def values(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.randn(shape, generator=self.torch)
        kind = self.random.random()
        if kind < 0.1:
            x.zero_()
        elif kind < 0.3:
            x *= torch.rand(shape, generator=self.torch) < 0.1
        x *= 10.0 ** self.one_of(0, 0, 0, -4, 4, -30, 30, -41)
        limit = torch.finfo(dtype).max / 16
        x = x.clamp_(-limit, limit).to(dtype)
        if self.random.random() < 0.05 and x.numel():
            x.view(-1)[self.random.randrange(x.numel())] = self.one_of(math.nan, math.inf, -math.inf)
        return x


# --- tensors that must work exactly, or be refused -------------------------------------------------------------


def strided(case: Case, x: Tensor) -> Tensor:
    """The values of x, or others, behind a layout that is hard to read."""

    def misaligned(x: Tensor) -> Tensor:
        raw = bytearray(1 + x.nbytes)
        raw[1:] = x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return torch.frombuffer(raw, dtype=x.dtype, offset=1, count=x.numel()).view(x.shape) if x.numel() else x

    def inference(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return x.clone()

    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda x: torch.stack((x, x + 1), -1)[..., 0],
        lambda x: torch.cat((x.view(-1), x.view(-1)))[x.numel() :].view(x.shape),
        lambda x: x.transpose(0, -1) if x.ndim else x,
        lambda x: x.expand(3, *x.shape),
        lambda x: x[..., :1].expand(x.shape) if x.ndim and x.numel() else x,
        lambda x: x.view(-1).as_strided((max(x.numel() - 4, 0), 5), (1, 1)) if x.numel() > 4 else x,
        lambda x: x.view(-1)[: x.numel() // 2 * 2].as_strided((1, x.numel() // 2), (977, 2)),
        lambda x: x.flip(0) if x.ndim else x,
        lambda x: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x,
        lambda x: x.diagonal() if x.ndim == 2 else x,
        torch._neg_view,
        lambda x: torch._neg_view(torch.stack((x, x), -1)[..., 1]),
        lambda x: torch.complex(x.float(), x.float()).conj().imag,
        lambda x: torch.view_as_real(torch.complex(x.float(), x.float()).conj().resolve_conj())[..., 1],
        lambda x: x.requires_grad_(),
        lambda x: x.requires_grad_() * 2,
        torch.nn.Parameter,
        misaligned,
        inference,
        lambda x: x.detach(),
        lambda x: x.data,
        lambda x: x.view(torch.int16 if x.itemsize == 2 else torch.int32).view(x.dtype),
        lambda x: x.unsqueeze(0).unsqueeze(-1),
        lambda x: x.split(max(1, x.numel() // 2))[0] if x.ndim == 1 and x.numel() else x,
        lambda x: x.share_memory_(),
    ]
    return case.random.choice(layouts)(x)


class Plain(torch.Tensor):
    """A subclass with memory of its own and no behaviour."""


class Liar(torch.Tensor):
    """A subclass that answers every question about itself with another tensor's answer."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.ones(3) if func is torch.Tensor.reshape else super().__torch_function__(func, types, args, kwargs)


class Wrapper(torch.Tensor):
    """A wrapper subclass: a shape in front of another tensor, no memory."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a Wrapper")


@cache
def _mesh() -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


@cache
def _fake_mode() -> Any:
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()


def _sharded(x: Tensor, shard: bool) -> Tensor:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return distribute_tensor(x, _mesh(), [Shard(0) if shard and x.ndim else Replicate()])


def _awaited(x: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(x)


def _resized(x: Tensor, keep: int) -> Tensor:
    x = torch.cat((x.reshape(-1), x.new_ones(8)))[3:]
    x.untyped_storage().resize_(min(keep, x.untyped_storage().nbytes() - 8))
    return x


def _under(transform: str, x: Tensor) -> Tensor:
    """Never returns: gives the tensor of a transform to the codec inside."""
    codec = Codec()
    if transform == "vmap":
        torch.vmap(lambda row: codec.encode(row).scales)(x.reshape(1, -1))
    elif transform == "grad":
        torch.func.grad(lambda v: codec.encode(v).scales.sum() + v.sum())(x.float())
    elif transform == "jvp":
        torch.func.jvp(lambda v: codec.encode(v).scales, (x.float(),), (x.float(),))
    else:
        torch.func.functionalize(lambda v: codec.encode(v).scales)(x)
    raise AssertionError(f"a tensor inside {transform} was accepted")


def refused(case: Case, x: Tensor) -> Any:
    """What no codec can read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes
        options: list[Callable[[], Any]] = [
            lambda: x.to("meta"),
            lambda: _fake_mode().from_tensor(x),
            lambda: torch._to_functional_tensor(x.contiguous()) if x.numel() else None,
            lambda: torch._efficientzerotensor((5, 3), dtype=x.dtype),
            lambda: _sharded(x.contiguous(), True),
            lambda: _sharded(x.contiguous(), False),
            lambda: _awaited(x),
            lambda: x.as_subclass(Plain),
            lambda: x.as_subclass(Liar),
            lambda: Wrapper(x),
            lambda: torch.nn.UninitializedParameter(),
            lambda: x.float().to_sparse() if x.ndim else None,
            lambda: x.float().to_sparse_csr() if x.ndim == 2 else None,
            lambda: x.float().to_mkldnn() if x.ndim else None,
            lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)]),
            lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)], layout=torch.jagged),
            lambda: torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.quint8),
            lambda: x.double(),
            lambda: x.float().int(),
            lambda: x > 0,
            lambda: x.float().to(torch.complex64),
            lambda: x.float().to(torch.float8_e4m3fn),
            lambda: _resized(x, 0),
            lambda: _resized(x, 12),
            lambda: x.float().numpy(),
            lambda: x.float().tolist(),
            lambda: None,
            lambda: "tensor",
            lambda: _under("vmap", x) if x.numel() else None,
            lambda: _under("grad", x) if x.numel() else None,
            lambda: _under("functionalize", x) if x.numel() else None,
        ]
        return case.random.choice(options)()


# --- comparisons ------------------------------------------------------------------------------------------------


def bits_of(x: Tensor) -> bytes:
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _near(a: Tensor, b: Tensor, slack: Tensor | float, what: str) -> None:
    """a and b agree to a slack; NaN and infinities in the same places."""
    a, b = a.double(), b.double()
    assert torch.equal(a.isnan(), b.isnan()), f"{what}: NaN in other places"
    both = a.isfinite() & b.isfinite()
    assert torch.equal(a[~both & ~a.isnan()], b[~both & ~a.isnan()]), f"{what}: infinite in other places"
    off = torch.where(both, (a - b).abs() - slack, -1.0)
    assert not (off > 0).any(), f"{what}: off by {off.max().item():.3g} over the slack"


def check_code(codec: Codec, plain: Tensor, code: Code, factor: float, rows: bool, impl: str) -> None:
    """The code of a hostile tensor against those of its plain copy: the same kernel's bit for bit, the reference's."""
    same = codec.encode(plain.clone(), impl=impl, factor=factor, rows=rows)
    assert bits_of(same.payload) == bits_of(code.payload), "payload differs from that of a plain copy"
    assert bits_of(same.scales) == bits_of(code.scales), "scales differ from those of a plain copy"
    want = codec.encode(plain.clone(), impl="reference", factor=factor, rows=rows)
    if bits_of(want.payload) == bits_of(code.payload):
        half = 2.0**-7 if codec.scale_dtype == torch.bfloat16 else 4e-6
        _near(code.scales, want.scales, want.scales.double().abs() * half + 2.0**-149, "scales")
        return
    for coded in (torch.isnan, torch.count_nonzero):
        assert torch.equal(coded(code.scales), coded(want.scales)), "other blocks are zero, or not finite"
    x_RD = plain.double().reshape(-1, plain.shape[-1]) if rows else plain.double().reshape(1, -1)
    x_NB = torch.nn.functional.pad(x_RD, (0, -x_RD.shape[1] % codec.block)).reshape(-1, codec.block)
    z_NB = rotate(x_NB, codec.rounds, codec.seed)
    u_NB = z_NB / z_NB.square().mean(1, keepdim=True).sqrt()
    a, b = (unpack(c.payload, codec.bits, codec.block).long() for c in (code, want))
    thresholds = dispatch._tables(codec.bits, None, "cpu")[1].double()
    if codec.search > 1:
        for row in (a != b).any(1).nonzero().flatten().tolist():
            tried = _multipliers_that_may_win(codec, u_NB[row])
            gaps = [_from_thresholds(u_NB[row] * m, a[row], thresholds) for m in tried]
            assert min(gaps) < 4e-6, f"no multiplier that may win gives this code; {min(gaps):.2g} from one of {tried}"
        return
    at = (a != b).nonzero(as_tuple=True)
    u = u_NB[at]
    assert (a - b).abs().max() <= 1, "an index that is not the neighbour of the reference's"
    gap = (u - thresholds[torch.minimum(a, b)[at]]).abs()
    assert (gap < 4e-6 * (1 + u.abs())).all(), f"an index is off, {gap.max().item():.2g} from the threshold"


def _from_thresholds(u: Tensor, index: Tensor, thresholds: Tensor) -> float:
    """How far the numbers [B] have to move, at most and by their size, to get these indices."""
    edges = torch.cat([u.new_tensor([-math.inf]), thresholds, u.new_tensor([math.inf])])
    off = torch.maximum(edges[index] - u, u - edges[index + 1]).clamp(min=0.0)
    return float((off / (1 + u.abs())).max())


def _multipliers_that_may_win(codec: Codec, u: Tensor) -> set[float]:
    """Those that the search may choose for a block [B], as its numbers are known but for their rounding.

    Integers judge exactly, so their choice differs only where a number lies between two of their steps.
    """
    tried = dispatch._search(codec.search, codec.bits, codec.sphere_dim)
    levels, thresholds = dispatch._tables(codec.bits, codec.sphere_dim, "cpu")
    steps = u.abs() * STEPS
    between = ((steps % 1 - 0.5).abs() < 2e-3).nonzero().flatten()
    if codec.bits > INTEGER_BITS or len(between) > 7:  # blocks of one number again and again: any may round either way
        trials = u * torch.tensor(tried.multipliers, dtype=torch.float64)[:, None]
        loss = _squared_sine(trials, levels.double()[torch.bucketize(trials, thresholds.double())])
        slack = 2e-6 if codec.bits > INTEGER_BITS else 0.02
        return {m for m, of_m in zip(tried.multipliers, loss.tolist(), strict=True) if of_m < loss.min() + slack}
    ways = []
    for way in itertools.product((torch.floor, torch.ceil), repeat=len(between)):
        steps_of_way = steps.round()
        for at, rounded in zip(between.tolist(), way, strict=True):
            steps_of_way[at] = rounded(steps[at])
        ways.append(steps_of_way / STEPS)
    return set(_best_multipliers(torch.stack(ways).float(), tried, levels, thresholds).tolist())



def check_values(codec: Codec, code: Code, y: Tensor, base: Tensor | None) -> None:
    """Decoded values against the reference's on plain copies of payload and scales."""
    parts = code.payload.clone(), code.scales.clone()
    want = torch.zeros(code.shape) if base is not None else torch.empty(code.shape, dtype=code.dtype)
    copy = Code(codec, code.shape, code.dtype, *parts, code.rows)
    codec.decode(copy, out=want, impl="reference", accumulate=base is not None)
    # what a scale of this size can round to: levels of unit variance, so below 10 in any block
    reach = _spread(code).double() * 1e-5
    y, largest = y.detach(), torch.finfo(want.dtype).max
    slack = reach + want.double().abs() * (2.0 * torch.finfo(want.dtype).eps) + torch.finfo(want.dtype).smallest_normal
    if base is not None:
        want = want.double() + base.double()
        slack = slack + want.abs() * 2.0**-22
    _near(y.clamp(-largest, largest), want.clamp(-largest, largest), slack.nan_to_num(0.0, largest), "decoded")


def _spread(code: Code) -> Tensor:
    """The magnitude of the scale that each element was decoded with, in the shape of the code."""
    scales = code.scales.double().abs().nan_to_num(0.0).repeat_interleave(code.codec.block)
    if code.rows:
        rows, dim = math.prod(code.shape[:-1]), code.shape[-1]
        return scales.view(rows, -1)[:, :dim].reshape(code.shape) if scales.numel() else scales.view(code.shape)
    return scales[: math.prod(code.shape)].view(code.shape)


# --- cases: each returns "accepted" or "refused" ------------------------------------------------------------------


def encode_layout(case: Case) -> str:
    codec, dtype = case.codec(), case.one_of(*DTYPES)
    x = strided(case, case.values(case.shape(), dtype))
    rows = bool(case.one_of(False, False, True)) and x.ndim > 0
    factor, impl = case.one_of(1.0, 1.0, 1 / 3, 2), case.impl(codec)
    plain = x.detach().clone(memory_format=torch.contiguous_format).resolve_neg()
    before = bits_of(plain)
    try:
        code = codec.encode(x, impl=impl, factor=factor, rows=rows)
    except ValueError:
        try:
            codec.encode(plain, impl="reference", factor=factor, rows=rows)
        except ValueError:
            return "refused"
        raise
    check_code(codec, plain, code, factor, rows, impl)
    assert bits_of(x.detach().clone(memory_format=torch.contiguous_format).resolve_neg()) == before, "x was written to"
    return "accepted"


def _must_refuse(call: Callable[[], Any], what: str) -> str:
    try:
        call()
    except REFUSALS as error:
        assert str(error), "an error without a word"
        return "refused"
    raise AssertionError(f"{what} was accepted")


def encode_refused(case: Case) -> str:
    x = case.values(case.one_of((0,), (1,), (129,), (7, 19), (3, 5, 11)), case.one_of(*DTYPES))
    x = torch.where(x.isfinite(), x, 0.0)
    codec = case.codec()

    def call() -> None:
        bad = refused(case, x)
        case.one_of(
            partial(codec.encode, bad, impl=case.impl(codec)),
            partial(codec.encode, bad, rows=True),
            partial(codec.encode, bad, out=codec.encode(x)),
            partial(LogCodec().encode, bad.abs() if type(bad) is Tensor and bad.is_meta else bad),
            partial(ProdCodec(2, 64).encode, bad),
        )()

    return _must_refuse(call, "a tensor that cannot be read")


def encode_out(case: Case) -> str:
    """Codes to write into: right ones, and ones that do not fit or lie over the input."""
    codec = case.codec(nonfinite="propagate")
    shape = case.one_of((129,), (7, 70), (3, 5, 11))
    x = case.values(shape, torch.float32)
    kind = case.one_of("fits", "view", "shape", "dtype", "rows", "codec", "aliases", "freed", "resized", "type")
    store = torch.zeros(1 << 16, dtype=torch.uint8)
    blocks, width, size = codec.blocks(shape), codec.packed_bytes, codec.scale_dtype.itemsize
    payload = store[16 : 16 + blocks * width].view(blocks, width)
    scales = store[32768 : 32768 + blocks * size].view(codec.scale_dtype)
    out: Any = Code(codec, shape, torch.float32, payload, scales)
    if kind == "fits":
        out = codec.encode(-x)
    elif kind == "shape":
        out = codec.empty((*shape, 1), torch.float32)
    elif kind == "dtype":
        out = codec.empty(shape, torch.bfloat16)
    elif kind == "rows":
        out = codec.empty(shape, torch.float32, rows=True)
    elif kind == "codec":
        out = codec.derive(1).empty(shape, torch.float32)
    elif kind == "aliases":
        raw = case.one_of(store[16:], store[32768 - 4 * x.numel() + 4 :])
        x = raw[: x.nbytes].view(torch.float32).view(shape)
    elif kind == "freed":
        out.payload.untyped_storage().resize_(case.one_of(0, 15, 16 + blocks * width - 1))
    elif kind == "resized":
        out.scales.resize_(blocks + 1)
    elif kind == "type":
        out = case.one_of(payload, (payload, scales), "code")
    impl = case.impl(codec)
    if kind not in ("fits", "view"):
        return _must_refuse(lambda: codec.encode(x, out=out, impl=impl), f"out: {kind}")
    assert codec.encode(x, out=out, impl=impl) is out
    check_code(codec, x, out, 1.0, False, impl)
    touched = torch.ones(store.numel(), dtype=torch.bool)
    touched[16 : 16 + blocks * width] = touched[32768 : 32768 + blocks * size] = False
    assert not store[touched].any(), "wrote beside the code"
    return "accepted"


def make_code(case: Case) -> str:
    """Fields of a code that no encoder gives."""
    codec, shape = case.codec(), case.one_of((), (0,), (1,), (129,), (7, 70), (3, 5, 11))
    rows = bool(shape) and case.one_of(True, False)
    good = codec.empty(shape, case.one_of(*DTYPES), rows=rows)
    payload, scales = good.payload, good.scales
    payload.random_(generator=case.torch)
    scales.copy_(torch.rand(scales.shape, generator=case.torch))
    blocks, width = payload.shape
    wide = torch.zeros(2 * blocks, 2 * width, dtype=torch.uint8)
    changes: list[dict[str, Any]] = [
        {},
        {"payload": wide[:blocks, :width].copy_(payload)},
        {"payload": wide[::2, :width].copy_(payload)},
        {"payload": payload.T.contiguous().T},
        {"payload": torch.cat((payload, payload))},
        {"payload": torch.cat((payload, payload))[blocks:]},
        {"payload": payload[:-1]},
        {"payload": payload[:, :-1]},
        {"payload": payload.view(-1)},
        {"payload": payload.view(torch.int8)},
        {"payload": payload.short()},
        {"payload": payload.to("meta")},
        {"payload": payload[:1].expand(blocks, width)},
        {"payload": payload.as_subclass(Plain)},
        {"payload": payload.numpy()},
        {"payload": torch._neg_view(payload)},
        {"payload": torch.nn.Parameter(payload, requires_grad=False)},
        {"payload": _resized(payload, 5)},
        {"payload": None},
        {"scales": torch.stack((scales, scales), -1)[..., 0]},
        {"scales": torch.cat((scales, scales))[blocks:]},
        {"scales": scales[:1].expand(blocks)},
        {"scales": scales[:-1]},
        {"scales": scales[:, None]},
        {"scales": scales.double()},
        {"scales": scales.half()},
        {"scales": scales.to("meta")},
        {"scales": torch._neg_view(scales)},
        {"scales": scales.requires_grad_()},
        {"shape": (*shape, 2)},
        {"shape": (*shape, 0)},
        {"shape": (*shape, 1)},
        {"shape": [*shape]},
        {"shape": (*shape, -1)},
        {"shape": (*shape, 2.0)},
        {"shape": (0, 2**62, 4)},
        {"shape": (0, 2**70)},
        {"shape": (2**40, 2**40)},
        {"shape": torch.Size(shape)},
        {"dtype": torch.float64},
        {"dtype": torch.uint8},
        {"dtype": "float32"},
        {"dtype": case.one_of(*DTYPES)},
        {"rows": not rows},
        {"rows": 1},
        {"codec": codec.derive(3)},
        {"codec": dataclasses.replace(codec, bits=codec.bits % 6 + 1)},
        {"codec": None},
    ]
    change = case.random.choice(changes)
    try:
        code = dataclasses.replace(good, **change)
    except REFUSALS:
        return "refused"
    impl = case.impl(code.codec)
    check_values(code.codec, code, code.codec.decode(code, impl=impl), None)
    return "accepted"


def decode_random(case: Case) -> str:
    """Any payload and any scales, as a damaged wire might give: what the reference decodes, also of absurd scales."""
    codec, shape = case.codec(), case.shape()
    rows = bool(shape) and case.one_of(True, False)
    code = codec.empty(shape, case.one_of(*DTYPES), rows=rows)
    code.payload.random_(generator=case.torch)
    if case.one_of(True, False):
        code.scales.view(torch.uint8).random_(generator=case.torch)
    else:
        code.scales.copy_(torch.randn(code.scales.shape, generator=case.torch))
    base = torch.randn(shape, generator=case.torch) if case.one_of(True, False, False) else None
    out = None if base is None else base.clone()
    y = codec.decode(code, out=out, impl=case.impl(codec), accumulate=base is not None)
    check_values(codec, code, y, base)
    return "accepted"


def decode_out(case: Case) -> str:
    """Tensors to decode into: every layout without two elements at one place works, and nothing beside is written."""
    codec, dtype = case.codec(nonfinite="propagate"), case.one_of(*DTYPES)
    shape = case.one_of((129,), (7, 70), (3, 5, 11), (2, 3, 4, 5))
    x = torch.where((x := case.values(shape, dtype)).isfinite(), x, 1.0)
    code, numel = codec.encode(x), math.prod(shape)
    accumulate = bool(case.one_of(False, False, True))
    kept = torch.float32 if accumulate else dtype
    store = torch.randn(8 * numel + 64, generator=case.torch).to(kept)
    inside = store[5 : 5 + numel].view(shape)
    freed = store.clone()[3 : 3 + numel].view(shape)
    layouts: list[tuple[bool, Callable[[], Any]]] = [
        (True, lambda: inside),
        (True, lambda: store[5 : 5 + 2 * numel : 2].view(shape)),
        (True, lambda: store[5 : 5 + numel].view(shape[::-1]).permute(*range(len(shape))[::-1])),
        (True, lambda: torch._neg_view(inside)),
        (True, lambda: store.as_strided((1, *shape), (3, *inside.stride()), 7)[0]),
        (True, lambda: store[9 : 9 + 3 * numel].view(*shape, 3)[..., 1]),
        (True, lambda: torch.nn.Parameter(inside)),
        (False, lambda: store[:1].expand(shape)),
        (False, lambda: store.as_strided(shape, (1,) * len(shape)) if len(shape) > 1 else store[:1].expand(shape)),
        (False, lambda: inside.to("meta")),
        (False, lambda: inside.as_subclass(Plain)),
        (False, lambda: _fake_mode().from_tensor(inside)),
        (False, lambda: _sharded(inside, True)),
        (False, lambda: inside.double()),
        (False, lambda: inside[..., :-1]),
        (False, lambda: inside.view(-1)[None]),
        (False, lambda: inside.numpy() if kept == torch.float32 else "out"),
        (False, lambda: (freed.untyped_storage().resize_(0), freed)[1]),
        (False, lambda: (freed.untyped_storage().resize_(40), freed)[1]),
        (False, lambda: code.payload.untyped_storage()),
    ]
    fits, make = case.random.choice(layouts)
    impl = case.impl(codec)
    if not fits:
        return _must_refuse(lambda: codec.decode(code, out=make(), impl=impl, accumulate=accumulate), "out")
    out = make()
    mask = torch.zeros(store.shape, dtype=torch.bool)
    mask.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(True)
    before, base = store.clone(), out.detach().clone() if accumulate else None
    assert codec.decode(code, out=out, impl=impl, accumulate=accumulate) is out
    check_values(codec, code, out.detach().resolve_neg(), base)
    assert torch.equal(store[~mask], before[~mask]), "wrote beside out"
    return "accepted"


def decode_aliased(case: Case) -> str:
    """An output over its own code, and scales over their payload."""
    codec = case.codec(rotation="hadamard", block=64)
    numel = 64 * 8
    store = torch.zeros(1 << 14, dtype=torch.uint8)
    payload = store[4096 : 4096 + 8 * codec.packed_bytes].view(8, -1)
    at = case.random.randrange(1024, 8192 - 64, 4)
    scales = store[at : at + 8 * codec.scale_dtype.itemsize].view(codec.scale_dtype)
    over = at < 4096 + payload.nbytes and at + scales.nbytes > 4096
    try:
        code = Code(codec, (numel,), torch.float32, payload, scales)
    except ValueError:
        assert over, "scales apart from the payload were refused"
        return "refused"
    assert not over, "scales over the payload were accepted"
    start = case.random.randrange(0, (1 << 14) - 4 * numel, 4)
    out = store[start : start + 4 * numel].view(torch.float32)
    end, parts = start + 4 * numel, ((4096, payload.nbytes), (at, scales.nbytes))
    if any(start < first + size and first < end for first, size in parts):
        return _must_refuse(lambda: codec.decode(code, out=out), "an output over its own code")
    codec.decode(code, out=out)
    return "accepted"


@cache
def _stored(number: int) -> bytes:
    case = Case(number)
    codec = case.codec(nonfinite="propagate")
    return codec.encode(case.values((3, 50), case.one_of(*DTYPES)), rows=bool(number % 2)).to_bytes()


def damaged_bytes(case: Case) -> str:
    """Bytes of a file or a wire; half of them with a checksum that is right."""
    good = _stored(case.random.randrange(40))
    raw = bytearray(good)
    size, header = len(raw), struct.unpack_from("<H", raw, 6)[0]
    kind = case.one_of("flip", "header", "header", "truncate", "lengthen", "splice", "shape", "noise")
    if kind == "flip":
        for _ in range(case.random.randint(1, 4)):
            raw[case.random.randrange(size)] ^= 1 << case.random.randrange(8)
    elif kind == "header":
        raw[24 + case.random.randrange(header)] = case.random.randrange(256)
    elif kind == "truncate":
        raw = raw[: case.random.randrange(size)]
    elif kind == "lengthen":
        raw += case.random.randbytes(case.random.randint(1, 40))
    elif kind == "splice":
        at = case.random.randrange(size - 8)
        raw[at : at + 8] = case.random.randbytes(case.random.randrange(16))
    elif kind == "shape":
        sizes = [case.one_of(0, 1, 3, 50, 2**31, 2**40, 2**62, 2**80) for _ in range(case.random.randint(0, 5))]
        spelt = b"".join(_varint(n) for n in (len(sizes), *sizes))
        raw[24 + 21 : 24 + header] = spelt
        raw[6:8] = struct.pack("<H", 21 + len(spelt))
    else:
        raw = bytearray(case.random.randbytes(case.random.randrange(300)))
    if case.one_of(True, True, False) and len(raw) > 24:
        raw[8:24] = hashlib.blake2b(raw[24:], digest_size=16, key=bytes(raw[:8])).digest()
    try:
        code = Code.from_bytes(case.one_of(bytes, bytearray, memoryview)(raw))
    except ValueError:
        return "refused"
    assert code.to_bytes() == bytes(raw), "other bytes than were read"
    check_values(code.codec, code, code.codec.decode(code, impl="auto"), None)
    return "accepted"


def _varint(n: int) -> bytes:
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def logarithmic(case: Case) -> str:
    """The codec of second moments: layouts, and codes and ranges that are damaged; the reference's bits."""
    codec = LogCodec(case.one_of(2, 4, 8), case.one_of(8, 64, 128, 200))
    v = strided(case, case.values(case.shape(), torch.float32))
    v = v if v.dtype == torch.float32 else v.float()
    v = v if v.requires_grad or v.is_neg() or v.is_inference() or case.one_of(True, False, False) else v.abs()
    plain = v.detach().clone(memory_format=torch.contiguous_format).resolve_neg()
    step = case.random.randrange(9)
    codes, ranges = codec.encode(v, step)
    want_codes, want_ranges = codec.encode(plain, step, impl="reference")
    bad = want_ranges[:, 1] == 0x7FC0  # whose codes mean nothing
    assert torch.equal(ranges, want_ranges) and torch.equal(codes[~bad], want_codes[~bad]), "other codes"
    kind = case.one_of("as it is", "noise", "short", "wide", "strided", "dtype", "meta", "numel", "freed")
    numel: Any = plain.numel()
    if kind == "noise":
        codes.random_(generator=case.torch)
        ranges.random_(-(2**15), 2**15, generator=case.torch)
    elif kind == "short":
        codes = codes[1:]
    elif kind == "wide":
        codes = torch.cat((codes, codes), 1)
    elif kind == "strided":
        codes, ranges = torch.stack((codes, codes), -1)[..., 0], torch.stack((ranges, ranges), -1)[..., 0]
    elif kind == "dtype":
        ranges = ranges.int()
    elif kind == "meta":
        codes = codes.to("meta")
    elif kind == "numel":
        numel = case.one_of(numel + codec.block, -1, 1.0, None, 2**61)
    elif kind == "freed":
        codes.untyped_storage().resize_(codes.nbytes // 2)
    try:
        decoded = codec.decode(codes, ranges, numel)
    except REFUSALS:
        assert kind not in ("as it is", "noise", "strided"), f"{kind} was refused"
        return "refused"
    want = codec.decode(codes.clone(), ranges.clone(), numel, impl="reference")
    assert bits_of(decoded.nan_to_num(-7.0)) == bits_of(want.nan_to_num(-7.0)), "other values"
    return "accepted"


@cache
def _prod(bits: int) -> ProdCodec:
    return ProdCodec(bits, 20)


def inner_product(case: Case) -> str:
    """Layouts and damaged codes of TurboQuant_prod."""
    codec = _prod(case.one_of(1, 2, 3))
    x = torch.randn(6, 40, generator=case.torch).to(case.one_of(*DTYPES))
    x = case.one_of(x[:, ::2], x[::2, 20:], x.T[:20].T, torch._neg_view(x[:, :20].contiguous()), x[:0, :20])
    code = codec.encode(x)
    want = codec.decode(codec.encode(x.clone().resolve_neg()))
    assert torch.equal(codec.decode(code), want), "other values"
    changes: list[dict[str, Any]] = [
        {"sign_bits": code.sign_bits[:, :-1]},
        {"sign_bits": torch.cat((code.sign_bits, code.sign_bits))},
        {"sign_bits": code.sign_bits.to("meta")},
        {"sign_bits": code.sign_bits.int()},
        {"residual_norm": code.residual_norm.to(torch.float64)},
        {"residual_norm": torch.cat((code.residual_norm, torch.ones(1)))},
        {"residual_norm": code.residual_norm.as_subclass(Plain)},
        {"shape": (*code.shape[:-1], 21)},
        {"shape": ()},
        {"mse": codec.mse_codec.encode(torch.ones(7, 20)) if code.mse is None or len(x) != 7 else None},
    ]
    damaged = dataclasses.replace(code, **case.random.choice(changes if len(x) else changes[-3:]))
    return _must_refuse(lambda: codec.decode(damaged), "a damaged ProdCode")


def arguments(case: Case) -> str:
    """Everything beside the tensor."""
    codec, x = case.codec(), torch.ones(130)
    code = codec.encode(x)
    calls: list[Callable[[], Any]] = [
        lambda: codec.encode(x, impl=case.one_of("cuda", "", None, 1)),
        lambda: codec.encode(x, factor=case.one_of(0.0, -1.0, math.nan, math.inf, "2", True, None)),
        lambda: codec.encode(x, rows=case.one_of(None, 2, "yes", 1)),
        lambda: codec.encode(torch.tensor(1.0), rows=True),
        lambda: codec.decode(case.one_of(None, b"abc", x, code.payload, code.to_bytes())),
        lambda: codec.decode(code, impl=case.one_of("cuda", "", None)),
        lambda: codec.decode(code, accumulate=True),
        lambda: codec.derive(1).decode(code),
        lambda: Code.from_bytes(case.one_of(5, None, "TQCD", [1, 2], x)),
        lambda: codec.empty(case.one_of((2.0,), (-1,), (2**70,), "ab"), torch.float32),
        lambda: codec.empty((4,), case.one_of(torch.float64, None, "float32")),
    ]
    return _must_refuse(case.random.choice(calls), "an argument")


KINDS: tuple[tuple[Callable[[Case], str], int], ...] = (
    (encode_layout, 22), (encode_refused, 22), (encode_out, 8), (make_code, 14), (decode_random, 8), (decode_out, 10),
    (decode_aliased, 3), (damaged_bytes, 20), (logarithmic, 8), (inner_product, 3), (arguments, 6),
)  # fmt: skip


def run(number: int) -> tuple[str, str]:
    """(kind, "accepted" or "refused") of a case; raises what is neither."""
    if number < 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    case = Case(number)
    kind = case.random.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0]
    torch.set_num_threads(case.random.choice((1, 1, 3)))
    return kind.__name__, kind(case)


def main(first: int, count: int, progress: str) -> None:
    with open(progress, "r+b") as file:
        place = mmap.mmap(file.fileno(), 8)
    warnings.simplefilter("error")
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for number in range(first, first + count):
        struct.pack_into("<q", place, 0, number)
        try:
            counts[" ".join(run(number))] += 1
        except Exception:
            problems.append(f"case {number}: {traceback.format_exc()}")
    print(json.dumps({"counts": counts, "problems": problems}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
