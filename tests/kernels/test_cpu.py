"""Laws of the CPU kernels: the reference's codes and values, whatever the shape, the threads, the machine's vectors."""

import hashlib
import math
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from llvmlite.binding import get_host_cpu_features

from tq import Codec
from tq.kernels import adamw, attention, blocks, cpu, gptq, logscale, matvec, path_product, trellis
from tq.quant import dispatch
from tq.quant.bits import unpack
from tq.quant.rotation import rotate, unrotate

BLOCKS = (64, 128, 256, 512, 1024)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gaussian(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(n)).float()


def hostile(block):
    """Blocks on which a careless kernel fails, each [block]: exact zeros after rotation, extremes, subnormals."""
    x = gaussian(block, 7)
    spike, pair = torch.zeros(block), torch.zeros(block)
    spike[3] = 1.0
    pair[1], pair[block // 2] = 1.0, 0.3
    two_level = torch.where(torch.arange(block) % 3 == 0, 1.0, -0.2)
    return [
        torch.zeros(block), spike, pair, torch.ones(block), two_level, 1e30 * x, 1e-30 * x, x * 2.0**-140,
        torch.full((block,), 2.0**-149), x * torch.logspace(-30, 4, block), 3e38 * torch.sign(x), -spike * 1e-44,
    ]  # fmt: skip


def exact_units(x, codec):
    """Rotated coordinates of the blocks of x, over their rms, in float64: what is compared with the thresholds."""
    blocks = torch.nn.functional.pad(x.double(), (0, -x.numel() % codec.block)).view(-1, codec.block)
    z = rotate(blocks, codec.rounds, codec.seed)
    rms = z.square().mean(1, keepdim=True).sqrt()
    return z / torch.where(rms > 0, rms, 1.0)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("block", BLOCKS)
def test_codes_are_the_references_but_for_ties(bits, block):
    for rounds, dtype in zip((1, 2, 3), DTYPES, strict=True):
        codec = Codec(bits, block, "mse", rounds, seed=bits, nonfinite="propagate")
        x = torch.cat([gaussian(20_000 + 17, bits), *hostile(block), gaussian(block * 3 + 5, 1)]).to(dtype)
        x = torch.where(x.isfinite(), x, 1.0)
        ours, theirs = codec.encode(x, impl="cpu"), codec.encode(x, impl="reference")
        a, b = (unpack(code.payload, bits, block).long() for code in (ours, theirs))
        differ = (a != b).nonzero()
        thresholds = torch.from_numpy(dispatch._tables(bits, None, "cpu")[1].numpy().astype(np.float64))
        between = torch.minimum(a, b)[differ[:, 0], differ[:, 1]]
        u = exact_units(x, codec)[differ[:, 0], differ[:, 1]]
        assert ((a - b).abs() <= 1).all()  # neighbours only
        assert ((u - thresholds[between]).abs() < 4e-6 * (1 + u.abs())).all()  # and only within rounding of a threshold
        regular = (differ[:, 0] < 20_000 // block).sum().item()
        assert regular < 1e-4 * 20_000
        scales = torch.stack([ours.scales, theirs.scales]).double()
        assert torch.equal(scales[0] == 0, scales[1] == 0) and torch.equal(scales[0].isnan(), scales[1].isnan())
        untouched = torch.ones(len(a), dtype=torch.bool)
        untouched[differ[:, 0]] = False
        # |x - y| is of order 1e-7 where the scale is a normal number of fp32, and one unit where it is subnormal
        gap = (scales[0] - scales[1]).abs() - 4e-6 * scales[1].abs() - 2.0**-149
        assert (gap[untouched & ~scales[0].isnan()] <= 0).all()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("search", (2, 5, 9))
def test_search_chooses_the_references_multiplier(bits, search):
    codec = Codec(bits, 128, "mse", 1, search)
    x = gaussian(1 << 17, 5)
    ours, theirs = codec.encode(x, impl="cpu"), codec.encode(x, impl="reference")
    # a coordinate on a threshold, or two multipliers that lose the same to six digits
    same = (ours.payload == theirs.payload).all(1).float().mean().item()
    assert same > 0.995
    errors = [(x - codec.decode(code)).square().sum().item() for code in (ours, theirs)]
    assert errors[0] == pytest.approx(errors[1], rel=2e-4)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rounds", (1, 2, 3))
def test_decoded_values_round_no_worse_than_twice_the_reference(bits, block, rounds):
    codec = Codec(bits, block, "unbiased", rounds, seed=3)
    x = gaussian(40 * block + 11, 9)
    code = codec.encode(x, impl="reference")
    levels = dispatch._tables(bits, None, "cpu")[0].double()
    exact = unrotate(levels[unpack(code.payload, bits, block).int()], rounds, codec.seed)
    exact = (exact * code.scales.double()[:, None]).view(-1)[: x.numel()]
    ours, theirs = (codec.decode(code, impl=i).double() - exact for i in ("cpu", "reference"))
    assert ours.square().mean() <= 4 * theirs.square().mean() and ours.abs().max() <= 2 * theirs.abs().max()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_output_is_the_rounded_fp32_one(dtype):
    codec = Codec(4, nonfinite="propagate")
    x = torch.cat([gaussian(5000), *hostile(128)]).to(dtype)
    code = codec.encode(torch.where(x.isfinite(), x, 1.0).to(dtype), impl="cpu")
    wide = torch.zeros(x.shape)
    codec.decode(code, out=wide, impl="cpu", accumulate=True)
    largest = torch.finfo(dtype).max
    assert torch.equal(codec.decode(code, impl="cpu"), wide.clamp(-largest, largest).to(dtype))


@pytest.mark.parametrize("impl", ("cpu", "reference"))
def test_accumulate_adds_and_factor_scales(impl):
    for shape, rows in (((1000,), False), ((7, 200), True), ((3, 2, 128), False)):
        for dtype in DTYPES:
            x, codec = gaussian(math.prod(shape)).view(shape).to(dtype), Codec(4, 64)
            code = codec.encode(x, impl=impl, rows=rows)
            once = torch.zeros(shape)
            assert codec.decode(code, out=once, impl=impl, accumulate=True) is once
            if dtype == torch.float32:
                assert torch.equal(once, codec.decode(code, impl=impl))
            base = gaussian(math.prod(shape), 4).view(shape)
            total = codec.decode(code, out=base.clone(), impl=impl, accumulate=True)
            assert torch.equal(total, base + once)
            third = codec.encode(x, impl=impl, rows=rows, factor=1 / 3)
            assert torch.equal(third.payload, code.payload)
            assert torch.allclose(third.scales * 3, code.scales, rtol=1e-6, atol=0)


def test_strided_output_is_written_and_accumulated():
    codec, x = Codec(4), gaussian(600).view(20, 30)
    code = codec.encode(x)
    plain = codec.decode(code)
    wide = torch.ones(20, 60)
    codec.decode(code, out=wide[:, ::2])
    assert torch.equal(wide[:, ::2], plain) and (wide[:, 1::2] == 1).all()
    codec.decode(code, out=wide[:, ::2], accumulate=True)
    assert torch.equal(wide[:, ::2], plain + plain) and (wide[:, 1::2] == 1).all()


@pytest.mark.parametrize("impl", ("cpu", "reference"))
@pytest.mark.parametrize("shape", ((1, 1), (3, 64), (5, 63), (2, 3, 65), (4, 200), (33, 7), (0, 5), (5, 0), (257, 130)))
def test_rows_are_coded_on_their_own(impl, shape):
    codec, x = Codec(3, 64, seed=1), gaussian(math.prod(shape), 2).view(shape)
    code = codec.encode(x, rows=True, impl=impl)
    per_row = -(-shape[-1] // 64)
    assert code.payload.shape[0] == math.prod(shape[:-1]) * per_row
    y = codec.decode(code, impl=impl)
    assert y.shape == x.shape
    flat = x.reshape(math.prod(shape[:-1]), shape[-1]), y.reshape(math.prod(shape[:-1]), shape[-1])
    for r, (row, decoded) in enumerate(zip(*flat, strict=True)):
        alone = codec.encode(row, impl=impl)
        here = slice(r * per_row, (r + 1) * per_row)
        assert torch.equal(alone.payload, code.payload[here]) and torch.equal(alone.scales, code.scales[here])
        assert torch.equal(codec.decode(alone, impl=impl), decoded)


@pytest.mark.parametrize("n", (1, 63, 64, 65, 1023, 1024, 1025, 16 * 128, 16 * 128 + 1, 33 * 128 - 1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beyond_the_ends_is_read_or_written(n, dtype):
    codec = Codec(5, 128, nonfinite="propagate")
    guarded = torch.full((n + 4096,), math.nan, dtype=dtype)
    x = guarded[2048 : 2048 + n]
    x.copy_(gaussian(n))
    code = codec.empty((n,), dtype)
    store = torch.full((code.payload.numel() + 4096,), 0xA5, dtype=torch.uint8)
    inside = store[2048 : 2048 + code.payload.numel()].view_as(code.payload)
    code = type(code)(codec, code.shape, dtype, inside, code.scales)
    codec.encode(x, out=code, impl="cpu")
    assert code.scales.isfinite().all()
    assert (store[:2048] == 0xA5).all() and (store[2048 + inside.numel() :] == 0xA5).all()
    codec.decode(code, out=x, impl="cpu")
    assert guarded[:2048].isnan().all() and guarded[2048 + n :].isnan().all() and x.isfinite().all()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_outputs_written_past_the_caches_are_the_same(block, dtype):
    n = cpu._LARGE // dtype.itemsize + 77
    for bits in (3, 7):
        codec = Codec(bits, block, rounds=1 + bits % 3)
        code = codec.encode(gaussian(n).to(dtype))
        guarded = torch.full((n + 2048,), math.nan, dtype=dtype)
        start = -guarded.data_ptr() % 64 // dtype.itemsize
        aligned, skewed = guarded[start : start + n], torch.empty(n + 1, dtype=dtype)[1:]
        assert aligned.data_ptr() % 64 == 0 and skewed.data_ptr() % 64 != 0
        codec.decode(code, out=aligned, impl="cpu")
        assert torch.equal(aligned, codec.decode(code, out=skewed, impl="cpu"))
        assert guarded[:start].isnan().all() and guarded[start + n :].isnan().all()


def test_a_block_depends_on_nothing_but_itself():
    """Also where a neighbour in the group of 16 overflows, vanishes or is not finite."""
    codec, x = Codec(4, 64, search=3, nonfinite="propagate"), gaussian(64 * 40).view(40, 64)
    alone = [codec.encode(row, impl="cpu") for row in x]
    for value in (0.0, 1e30, 1e-35, math.nan, math.inf):
        x[::3] = value
        code = codec.encode(x, impl="cpu")
        for r in (r for r in range(40) if r % 3):
            assert torch.equal(code.payload[r], alone[r].payload[0]) and code.scales[r] == alone[r].scales[0]


def digest(codec, x):
    code = codec.encode(x, impl="cpu")
    return hashlib.blake2b(code.to_bytes() + codec.decode(code, impl="cpu").numpy().tobytes()).hexdigest()


def test_threads_do_not_matter():
    threads, x, found = torch.get_num_threads(), gaussian(700_001), set()
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.add(digest(Codec(search=3), x))
    finally:
        torch.set_num_threads(threads)
    with ThreadPoolExecutor(4) as pool:
        found.update(pool.map(lambda _: digest(Codec(search=3), x), range(8)))
    assert len(found) == 1


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def test_a_forked_child_has_threads_of_its_own():
    code = """
import os, torch
from tq import Codec
torch.set_num_threads(2)
x = torch.linspace(-1, 1, 1 << 18)
before = Codec().encode(x, impl="cpu").to_bytes()
child = os.fork()
if child == 0:
    os._exit(0 if Codec().encode(x, impl="cpu").to_bytes() == before else 1)
assert os.waitpid(child, 0)[1] == 0
print("same")
"""
    assert run_python(code).stdout == "same\n"


DIGEST = """
import torch
from tq import Codec
from tq.kernels import cpu, simd
x = torch.linspace(-3, 5, 10_000)
codes = [Codec(b, scale="paper", search=s).encode(x, impl="cpu") for b, s in CASES]
near = [torch.round(c.codec.decode(c, impl="cpu") * 1e4) for c in codes]
import hashlib
print(hashlib.blake2b(b"".join(c.payload.numpy().tobytes() for c in codes)).hexdigest())
print(sum(k.cache_hits for k in cpu._compiled_kernels), len(cpu._compiled_kernels))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for another x86")
def test_lesser_machines_give_the_same_codes():
    """An x86 of 2013 (AVX2, half the lanes, no table permutes), or of 2012 on such a one, by Numba's own switch."""
    name, features, cases = "ivybridge", "+avx,+f16c,+popcnt,+sse4.2", "((4, 1),)"  # long to compile: fma is a call
    if get_host_cpu_features().get("avx512f"):
        name, features = "haswell", f"{features},+avx2,+bmi,+bmi2,+fma,+lzcnt,+movbe"
        cases = "((3, 1), (4, 1), (8, 2))"
    code = DIGEST.replace("CASES", cases)
    here = run_python(code)
    # What is compiled for it is kept beside the rest: Numba's key to the disk has the processor.
    there = run_python(code, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
    assert there.returncode == 0, there.stderr
    assert there.stdout.split()[0] == here.stdout.split()[0]


def test_compiled_code_is_kept_on_disk(tmp_path):
    code = DIGEST.replace("CASES", "((4, 1),)")
    first, second = (run_python(code, NUMBA_CACHE_DIR=str(tmp_path)).stdout.split() for _ in range(2))
    assert (first[1], first[2]) == ("0", "2") and (second[1], second[2]) == ("2", "2")
    assert first[0] == second[0]


def test_the_hash_of_the_sources_is_part_of_what_is_kept():
    """Numba looks at the file of a function only; an edit of the vector code must not be answered from the disk."""
    Codec().encode(torch.ones(64), impl="cpu")
    adamw.largest([torch.ones(3)])
    modules = (cpu, logscale, adamw, matvec, gptq, attention, blocks, trellis, path_product)  # all keep theirs there
    stamps = {module.__name__: module._STAMP for module in modules}
    for kernel in [kernel for kernel in cpu._compiled_kernels if hasattr(kernel, "_pyfunc")]:  # others are one file
        of = stamps[kernel._pyfunc.__module__]
        assert of in [cell.cell_contents for cell in kernel._pyfunc.__closure__]


def test_a_place_that_cannot_be_written_is_said_and_the_kernel_still_works(monkeypatch):
    def refuse(function):
        raise RuntimeError("cannot cache function 'encoder': no locator available for file 'x'")

    real = cpu.numba.cfunc
    monkeypatch.setattr(cpu.numba, "cfunc", lambda s, cache=False: refuse if cache else real(s))
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        compiled = cpu._compiled(lambda arguments: None)
    assert compiled.address


def test_without_openmp_the_threads_are_pythons(monkeypatch):
    x = gaussian(400_000)
    before = digest(Codec(), x)
    monkeypatch.setattr(cpu, "_team", None)
    assert digest(Codec(), x) == before


def test_every_codebook_has_its_guess():
    """The look-up of ``_look_up`` is exact for every bit width and every codebook that a codec can have."""
    for bits in range(1, 9):
        for dim in (None, *BLOCKS):
            levels, thresholds = dispatch._tables(bits, dim, "cpu")
            tables = cpu._look_up(bits, thresholds.numpy().tobytes(), levels.numpy().tobytes())
            assert np.isfinite(tables[-1]) and tables.dtype == np.float32
            if bits == 1:
                continue
            half, degree = 1 << (bits - 1), cpu.simd.DEGREE[bits]
            coefficients, largest = tables[-degree:].astype(np.float64), float(tables[-degree - 1])
            positive = thresholds.numpy()[half:].astype(np.float64)
            # just below and above each threshold, and far beyond
            u = np.concatenate([positive * (1 - 1e-6), positive * (1 + 1e-6), np.linspace(0, 12, 5000)])
            near = u if degree == 1 else np.minimum(u, largest)
            guess = np.rint(sum(c * near ** (k + 1) for k, c in enumerate(coefficients)))
            guess = np.minimum(guess, half - 1).astype(int)
            edges = np.concatenate([[-np.inf], positive])
            assert np.array_equal(guess - 1 + (u > edges[guess]), (u[:, None] > positive).sum(1) - 0)


@pytest.mark.parametrize("impl", ("cpu", "reference"))
def test_strided_inputs_are_coded_as_their_values(impl):
    wide = gaussian(4 * 300).view(300, 4)
    for view, rows in ((wide[:, 1], False), (wide[:, 1], True), (wide.T, True), (wide[::2, ::3], True)):
        codec = Codec(5, 64)
        ours, theirs = (codec.encode(x, impl=impl, rows=rows) for x in (view, view.clone()))
        assert ours.to_bytes() == theirs.to_bytes()
