"""Laws of the codec: distortion, unbiasedness, exact bytes, one door, loud errors."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import integrate

from tq import Code, Codec
from tq.quant import bounds
from tq.quant.codebook import lloyd_max
from tq.quant.formats import nmse


def gaussian(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(n)).float()


def round_trip(codec, x, impl="auto"):
    return codec.decode(codec.encode(x, impl=impl), impl=impl)


X = gaussian(1 << 22, seed=11)

# NMSE at b=4 of scale "paper" / "mse" / search 5 / search 17 as specified, by block. The specification's figures come
# from samples: they are resolved to about half a percent (its .00914 is .00917 by exact integration). Its searches
# try other multipliers: theirs are bounds.
TABLE = {
    64: (0.00914, 0.00881, 0.00752, 0.00707),
    128: (0.00931, 0.00915, 0.00816, 0.00784),
    256: (0.00942, 0.00933, 0.00865, 0.00847),
}
SIMULATED_UNBIASED_128 = {1: 0.5676, 2: 0.1307, 3: 0.0347, 4: 0.00924}


def block_nmse(codec, x):
    """Mean over blocks of |x - y|^2 / |x|^2, and its standard error."""
    y = round_trip(codec, x)
    ratio = (x - y).view(-1, codec.block).square().sum(1) / x.view(-1, codec.block).square().sum(1)
    return ratio.mean().item(), ratio.std().item() / math.sqrt(ratio.numel())


@pytest.mark.parametrize("block", TABLE)
def test_scale_and_search_reach_the_specified_distortion(block):
    settings = (("paper", 1), ("mse", 1), ("mse", 5), ("mse", 17))
    for (scale, search), expected in zip(settings, TABLE[block], strict=True):
        mean, error = block_nmse(Codec(4, block, scale, 1, search), X)
        assert mean - expected < 4 * error + 0.005 * expected
        assert search > 1 or expected - mean < 4 * error + 0.005 * expected


@pytest.mark.parametrize("bits", SIMULATED_UNBIASED_128)
def test_unbiased_scale_reaches_the_specified_distortion(bits):
    mean, error = block_nmse(Codec(bits, 128, "unbiased", 1), X)
    assert abs(mean - SIMULATED_UNBIASED_128[bits]) < 4 * error + 0.005 * SIMULATED_UNBIASED_128[bits]


@pytest.mark.parametrize("block", (64, 128, 256, 1024))
def test_gaussian_codebook_on_a_finite_block_by_exact_integration(block):
    """A rotated Gaussian block is uniform on the sphere: the error of N(0, 1)'s levels there is one integral."""
    levels, thresholds = lloyd_max(4)
    root = math.sqrt(block)
    log_norm = math.lgamma(block / 2) - math.lgamma((block - 1) / 2) - 0.5 * math.log(math.pi * block)
    edges = np.concatenate([[-root], thresholds, [root]])

    def density(t):
        return math.exp(log_norm) * max(0.0, 1 - t * t / block) ** ((block - 3) / 2)

    exact = sum(
        integrate.quad(lambda t, c=c: (t - c) ** 2 * density(t), low, high)[0]
        for c, low, high in zip(levels, edges, edges[1:], strict=False)
    )
    mean, error = block_nmse(Codec(4, block, "paper", 1), X)
    assert abs(mean - exact) < 4 * error and error < 0.002 * exact


def test_bar_on_gaussian_input():
    assert nmse(X, round_trip(Codec(4, 128, "mse", 1, 17), X)) <= 0.00790
    assert nmse(X, round_trip(Codec(4, 128, "mse", 1, 5), X)) <= 0.00822


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("block", (64, 1024))
def test_distortion_follows_theory(bits, block):
    """Sphere codebook: a rotated Gaussian block's direction is uniform on the sphere, so theory is exact here."""
    for scale, theory in (("paper", bounds.paper_nmse(bits, block)), ("unbiased", bounds.unbiased_nmse(bits, block))):
        mean, error = block_nmse(Codec(bits, block, scale, 1, codebook="sphere"), X[: 1 << 20])
        # D / (1 - D) is the limit of long blocks: refitting one scale a block takes away about 2 in `block` degrees
        slack = 0.0 if scale == "paper" else theory * 3 / block
        assert abs(mean - theory) < 4 * error + slack


@pytest.mark.parametrize("bits", (1, 2, 4, 8))
def test_what_each_scale_promises(bits):
    x = X[: 1 << 16].view(-1, 128)
    unbiased = round_trip(Codec(bits, scale="unbiased"), x)
    assert torch.allclose((unbiased * x).sum(1), x.square().sum(1), rtol=1e-4)  # <x, y> = |x|^2, block by block
    norm = round_trip(Codec(bits, scale="norm"), x)
    assert torch.allclose(norm.norm(dim=1), x.norm(dim=1), rtol=1e-5)
    mse = round_trip(Codec(bits, scale="mse"), x)
    assert torch.allclose((mse * (x - mse)).sum(1), torch.zeros(len(x)), atol=2e-3)  # residual orthogonal to the code
    paper = round_trip(Codec(bits, scale="paper"), x)
    assert torch.all((x - mse).norm(dim=1) <= (x - paper).norm(dim=1) * (1 + 1e-6))


def structured_blocks(block=128):
    i = torch.arange(block)
    return {
        "gaussian": gaussian(block, 5),
        "one-hot": (i == 17).float(),
        "one large": torch.where(i == 0, 100.0, gaussian(block, 6)),
        "1, .3, 0": torch.where(i == 0, 1.0, torch.where(i == 1, 0.3, 0.0)),
        "constant": torch.ones(block),
        "alternating": 1.0 - 2.0 * (i % 2),
        "two-level": torch.where(i < block // 2, 1.0, 0.1),
    }


def bias_square(x, decoded_SB):
    """|E y - x|^2 / |x|^2 with the sampling noise of the mean taken out (unbiased; may come out negative)."""
    count = decoded_SB.shape[0]
    mean = decoded_SB.mean(0)
    noise = decoded_SB.var(0).sum() / count
    return float(((mean - x).square().sum() - noise) / x.square().sum())


def decode_over_seeds(x, count, **settings):
    return torch.stack([round_trip(Codec(seed=s, **settings), x, impl="reference") for s in range(count)])


@pytest.mark.parametrize("bits", (1, 2, 4))
@pytest.mark.parametrize("name", structured_blocks())
def test_unbiased_scale_with_two_rounds(name, bits):
    x = structured_blocks()[name]
    y = decode_over_seeds(x, 1500, bits=bits, scale="unbiased", rounds=2)
    if name == "gaussian":
        z = (y.mean(0) - x) / (y.std(0) / math.sqrt(len(y)))
        assert z.abs().max() < 4.5 and abs(z.square().mean() - 1) < 4 * (2 / len(x)) ** 0.5  # chi-square of 128
    assert bias_square(x, y) <= 3e-3


def test_one_round_is_biased_on_structured_blocks():
    """The reason for the second round; also shows that the test above can fail."""
    x = structured_blocks()["1, .3, 0"]
    assert bias_square(x, decode_over_seeds(x, 500, bits=1, scale="unbiased", rounds=1)) > 1e-2
    x = structured_blocks()["gaussian"]
    assert bias_square(x, decode_over_seeds(x, 500, bits=1, scale="mse", rounds=2)) > 5e-2  # shrinks by 2/pi


@pytest.mark.parametrize("shape", [(), (1,), (127,), (128,), (129,), (3, 5, 7), (0,), (2, 0, 3)])
@pytest.mark.parametrize("bits,scale_dtype", [(1, torch.float32), (3, torch.bfloat16), (7, torch.float32)])
def test_exact_bytes(shape, bits, scale_dtype):
    codec = Codec(bits, scale_dtype=scale_dtype)
    x = gaussian(max(1, math.prod(shape)), 1)[: math.prod(shape)].view(shape)
    code = codec.encode(x)
    blocks = math.ceil(math.prod(shape) / 128)
    assert code.nbytes == blocks * (bits * 16 + scale_dtype.itemsize)
    data = code.to_bytes()
    assert len(data) <= code.nbytes + 256 and data == code.to_bytes()
    again = Code.from_bytes(data)
    assert again.codec == codec and again.shape == shape and again.dtype == x.dtype
    assert torch.equal(codec.decode(again), codec.decode(code))
    assert codec.decode(code).shape == shape


def test_bits_per_element():
    assert Codec().bits_per_element == 4.25
    assert Codec(scale_dtype=torch.bfloat16).bits_per_element == 4.125
    assert bounds.compression_ratio(Codec().bits_per_element) == pytest.approx(7.53, abs=0.005)
    assert bounds.compression_ratio(Codec().bits_per_element, 16) == pytest.approx(3.76, abs=0.005)
    x = gaussian(1 << 16)
    for codec in (Codec(3, 256), Codec(7, 64), Codec(4, 200, rotation="haar")):
        whole = x[: len(x) // codec.block * codec.block]
        assert codec.encode(whole).nbytes * 8 == codec.bits_per_element * whole.numel()


def test_out_is_reused_and_must_fit():
    codec, x = Codec(), gaussian(1000)
    code = codec.encode(x)
    payload = code.payload.clone()
    same = codec.encode(-x, out=code)
    assert same is code and not torch.equal(payload, code.payload)
    out = torch.empty(1000)
    assert codec.decode(code, out=out) is out
    strided = torch.empty(1000, 2)[:, 0]
    assert torch.equal(codec.decode(code, out=strided), out) and torch.equal(strided, out)
    for bad in (x[:999], x.bfloat16()):
        with pytest.raises(ValueError, match="out must be a Code"):
            codec.encode(bad, out=code)
    with pytest.raises(ValueError, match="out must have shape"):
        codec.decode(code, out=torch.empty(999))
    with pytest.raises(ValueError, match="out must have shape"):
        codec.decode(code, out=torch.empty(1000, dtype=torch.float16))


@pytest.mark.parametrize(
    "change", [{"bits": 5}, {"block": 256}, {"seed": 1}, {"rounds": 1}, {"scale": "mse"}, {"codebook": "sphere"}]
)
def test_code_of_another_codec_is_refused(change):
    code = Codec().encode(gaussian(256))
    with pytest.raises(ValueError, match="another codec"):
        dataclasses.replace(Codec(), **change).decode(code)


@pytest.mark.parametrize(
    "bad",
    [
        {"bits": 0}, {"bits": 9}, {"bits": 4.0}, {"bits": True}, {"block": 96}, {"block": 32}, {"block": 2048},
        {"block": 128.0}, {"scale": "rms"}, {"scale": None}, {"rounds": 0}, {"rounds": 4}, {"search": 0},
        {"search": 65}, {"search": 1.5}, {"seed": -1}, {"seed": 2**64}, {"seed": 0.5}, {"rotation": "dct"},
        {"codebook": "nf4"}, {"scale_dtype": torch.float16}, {"scale_dtype": "float32"}, {"nonfinite": "ignore"},
        {"bits": 7, "scale_dtype": torch.bfloat16}, {"rotation": "haar", "block": 2},
        {"rotation": "haar", "block": 5000},
    ],
)  # fmt: skip
def test_bad_settings_raise_at_construction_and_name_the_argument(bad):
    name = "scale_dtype" if "scale_dtype" in bad else "block" if "block" in bad else next(iter(bad))
    with pytest.raises((ValueError, TypeError), match=name):
        Codec(**bad)


@pytest.mark.parametrize(
    "x", [torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.bool),
          torch.zeros(4, dtype=torch.complex64), [1.0, 2.0], np.zeros(4, np.float32), torch.eye(3).to_sparse()],
)  # fmt: skip
def test_refused_inputs(x):
    with pytest.raises(TypeError, match="x must be"):
        Codec().encode(x)


def test_wrong_code_and_impl():
    with pytest.raises(TypeError, match="tq.Code"):
        Codec().decode(b"abc")
    with pytest.raises(ValueError, match="impl must be one of"):
        Codec().encode(gaussian(10), impl="cuda")
    with pytest.raises(RuntimeError, match="haar"):
        Codec(rotation="haar").encode(gaussian(128), impl="cpu")
    with pytest.raises(RuntimeError, match="CUDA tensors, got one on cpu|triton is not installed"):
        Codec().encode(gaussian(128), impl="triton")


@pytest.mark.parametrize("factor", (0.0, -1.0, math.nan, math.inf, "2", True))
def test_factor_is_a_finite_positive_number(factor):
    with pytest.raises((TypeError, ValueError), match="factor must be a finite positive number"):
        Codec().encode(gaussian(10), factor=factor)


def test_rows_are_part_of_a_code():
    codec, x = Codec(3, 64), gaussian(5 * 70).view(5, 70)
    code = codec.encode(x, rows=True)
    assert code.rows and code.payload.shape[0] == 10 and codec.encode(x).payload.shape[0] == 6
    again = Code.from_bytes(code.to_bytes())
    assert again.rows and torch.equal(codec.decode(again), codec.decode(code))
    assert codec.encode(2 * x, out=code, rows=True) is code
    with pytest.raises(ValueError, match="rows=True"):
        codec.encode(x, out=code)
    with pytest.raises(ValueError, match="at least one dimension"):
        codec.encode(torch.tensor(1.0), rows=True)


def test_accumulating_needs_an_fp32_tensor_to_add_to():
    codec, x = Codec(), gaussian(300).bfloat16()
    code = codec.encode(x)
    with pytest.raises(ValueError, match="adds to out"):
        codec.decode(code, accumulate=True)
    with pytest.raises(ValueError, match="torch.float32"):
        codec.decode(code, out=torch.zeros(300, dtype=torch.bfloat16), accumulate=True)


@pytest.mark.parametrize("impl", ("reference", "cpu"))
@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
def test_nonfinite(impl, value):
    x = gaussian(1000)
    x[400] = value
    with pytest.raises(ValueError, match="block 3 holds .* at flat index 400"):
        Codec().encode(x, impl=impl)
    y = round_trip(Codec(nonfinite="propagate"), x, impl)
    assert y[384:512].isnan().all() and y[:384].isfinite().all() and y[512:].isfinite().all()


@pytest.mark.parametrize("impl", ("reference", "cpu"))
def test_scale_that_overflows_is_said(impl):
    x = torch.full((128,), 3.4e38)
    with pytest.raises(ValueError, match="block 0 has a scale beyond the range"):
        Codec(1, scale="unbiased").encode(x, impl=impl)  # the unbiased scale at one bit is pi/2 times the rms
    assert round_trip(Codec(1, scale="unbiased", nonfinite="propagate"), x, impl).isnan().all()
    assert round_trip(Codec(4, scale="mse"), x, impl).isfinite().all()  # decoded values stop at the largest number


def test_large_finite_scales_are_not_taken_for_infinite_ones():
    x = torch.full((1024,), 1e38)  # the sum of the scales overflows
    assert Codec(4).decode(Codec(4).encode(x)).isfinite().all()
    x[700] = math.nan
    with pytest.raises(ValueError, match="block 5 holds nan"):
        Codec(4).encode(x)


@pytest.mark.parametrize("impl", ("reference", "cpu"))
@pytest.mark.parametrize("scale", ("paper", "mse", "unbiased", "norm"))
def test_zero_blocks(impl, scale):
    x = torch.cat([torch.zeros(128), gaussian(128), torch.zeros(100)])
    code = Codec(scale=scale).encode(x, impl=impl)
    y = Codec(scale=scale).decode(code, impl=impl)
    assert (y[:128] == 0).all() and (y[256:] == 0).all() and y[128:256].abs().min() > 0
    assert (code.scales[[0, 2]] == 0).all() and (code.payload[[0, 2]] == 0).all()


@pytest.mark.parametrize("bits", (1, 4, 8))
def test_scaling_by_powers_of_two_commutes(bits):
    """Same bits at every magnitude that fp32 can hold, from 2**-100 to 2**120."""
    codec, x = Codec(bits), gaussian(512)
    reference = codec.encode(x)
    for exponent in (-100, -60, 37, 120):
        code = codec.encode(x * 2.0**exponent)
        assert torch.equal(code.payload, reference.payload)
        assert torch.equal(code.scales, reference.scales * 2.0**exponent)


def test_strides_grad_and_global_state():
    x = gaussian(6000).view(60, 100)
    codec = Codec()
    assert codec.encode(x.T).to_bytes() == codec.encode(x.T.contiguous()).to_bytes()
    assert codec.encode(x[::2, 1::3]).to_bytes() == codec.encode(x[::2, 1::3].clone()).to_bytes()
    w = x.clone().requires_grad_()
    assert not codec.decode(codec.encode(w)).requires_grad and not codec.encode(w).scales.requires_grad
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    round_trip(codec.derive(1, "a", 2), x)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(x, gaussian(6000).view(60, 100))  # the input is not written to


def test_seeds_decide_the_bits():
    x = gaussian(4096)
    assert Codec(seed=1).encode(x).to_bytes() == Codec(seed=1).encode(x).to_bytes()
    assert not torch.equal(Codec(seed=1).encode(x).payload, Codec(seed=2).encode(x).payload)
    a, b = Codec().derive("step", 3), Codec().derive("step", 3)
    assert a == b and a != Codec().derive("step", 4) and hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a


def test_half_precision_error_is_the_codecs_own():
    x = X[: 1 << 18]
    for dtype in (torch.bfloat16, torch.float16):
        y = round_trip(Codec(4, scale="mse"), x.to(dtype))
        assert y.dtype == dtype
        assert nmse(x.to(dtype), y) == pytest.approx(nmse(x, round_trip(Codec(4, scale="mse"), x)), rel=0.01)


def test_haar_rotation_and_sphere_codebook():
    d = 200
    x = gaussian(d * 2000, 3)
    for bits in (2, 4):
        codec = Codec(bits, d, "paper", rotation="haar", codebook="sphere")
        assert nmse(x, round_trip(codec, x)) == pytest.approx(bounds.paper_nmse(bits, d), rel=0.02)
