"""Weights as paths: that they are paths, the nearest ones, and what is made of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.infer.helpers import sharp
from tests.infer.test_gptq import layer
from tq import Codec
from tq.infer.decoder import Decoder
from tq.infer.direct import direct
from tq.infer.evaluate import divergence
from tq.infer.gptq import gptq, output_error
from tq.infer.layers import QuantizedLinear, layers, put, shared, stored_bits
from tq.infer.path_product import PathProduct
from tq.infer.product import integers_run
from tq.infer.trellis import TrellisCode, TrellisLinear, trellis, values
from tq.infer.tuning import tune
from tq.infer.weights import Told, decoded, load, quantize, save
from tq.kernels import path_product
from tq.kernels import trellis as kernel
from tq.train.model import GPT, GPTConfig

Ways = pytest.mark.parametrize("integers", (False, True))
CODEC = Codec(bits=3, block=64, scale_dtype=torch.bfloat16)


def test_values_are_nearly_gaussian_and_computed_as_published() -> None:
    found = values()
    assert abs(float(found.mean())) < 2e-3 and abs(float(found.var()) - 1) < 2e-3
    assert 3.0 < float(found.abs().max()) < 3.5
    state = 12345
    word = (state * 34038481 + 76625530) % 2**32  # 1MAD of QTIP
    assert float(found[state]) == pytest.approx((sum(word.to_bytes(4, "little")) - 510) / 21845**0.5, abs=1e-6)
    assert (path_product.FACTOR, path_product.SUMMAND) == (34038481, 76625530)


@pytest.mark.parametrize("bits", (2, 3, 4, 5))
@pytest.mark.parametrize("rows", (16, 96, 256, 400))
def test_states_follow_each_other_and_end_where_they_began(bits: int, rows: int) -> None:
    w = np.random.default_rng(rows).standard_normal((5, rows)).astype(np.float32)
    scale, table = np.linspace(0.5, 1.5, rows, dtype=np.float32), values().numpy()
    states, error = kernel.round_block(w, scale, np.eye(5, dtype=np.float32), table, bits)
    assert np.abs(w - scale * table[states] - error).max() < 1e-5
    for first, last in kernel._runs(rows):
        path = states[:, first:last].astype(int)
        assert (path >> bits == np.roll(path, 1, axis=1) & (2 ** (14 - bits) - 1)).all()
    assert (kernel.unpack(kernel.pack(states, bits), bits, rows, 5) == states).all()


@pytest.mark.parametrize("bits", (2, 3, 4, 5))
def test_no_path_that_differs_somewhere_is_nearer(bits: int) -> None:
    """Other bits at any one place, which change the values of the weights that see them, make the error no less."""
    rng, table = np.random.default_rng(0), values().numpy()
    x = rng.standard_normal((1, 128)).astype(np.float32)
    states, error = kernel.round_block(x, np.ones(128, np.float32), np.eye(1, dtype=np.float32), table, bits)
    stream = [int(state) & (2**bits - 1) for state in states[0]]
    seen = -(-14 // bits)

    def total(symbols: list[int]) -> float:
        found = np.zeros(len(symbols), np.int64)
        for back in range(seen):
            found += np.roll(symbols, back) << (bits * back)
        return float(((x[0] - table[found & 16383]) ** 2).sum())

    least = total(stream)
    assert least == pytest.approx(float((error**2).sum()), rel=1e-4)
    for place in range(128):
        for symbol in range(2**bits):
            other = [*stream[:place], symbol, *stream[place + 1 :]]
            assert total(other) >= least * (1 - 1e-4)


@pytest.mark.parametrize(("bits", "part"), ((2, 0.66), (3, 0.62), (4, 0.6)))
def test_squared_error_of_gaussian_numbers_is_far_below_that_of_single_levels(bits: int, part: float) -> None:
    """1.88, 2.21 and 2.43 times the least that is possible (4**-bits) is what levels of Lloyd and Max have."""
    w = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    scale = np.full(512, (1.03, 1.07, 1.12)[bits - 2], np.float32)
    _, error = kernel.round_block(w, scale, np.eye(64, dtype=np.float32), values().numpy(), bits)
    single = {2: 1.880, 3: 2.211, 4: 2.432}[bits]
    assert (error**2).mean() * 4**bits < part * single


@pytest.mark.parametrize(("bits", "part"), ((2, 0.75), (3, 0.75), (4, 0.75), (5, 0.85)))
def test_output_error_is_far_below_that_of_codes_of_as_many_bits(bits: int, part: float) -> None:
    """At 5 bits the register holds less than three weights, and so fewer values to choose from for each."""
    weight, moments = layer(256, 192)
    codec = Codec(bits=bits, block=64, scale_dtype=torch.bfloat16)
    code = trellis(weight, moments, codec)
    plain = gptq(weight, moments, codec)
    assert code.nbytes == plain.nbytes
    errors = [output_error(weight, x, moments) for x in (code.decode(), codec.decode(plain))]
    assert errors[0] < part * errors[1]


@pytest.mark.parametrize("shape", ((8, 1), (20, 65), (130, 200), (1, 64)))
def test_shapes_that_are_no_multiples(shape: tuple[int, int]) -> None:
    weight, moments = layer(*shape)
    code = trellis(weight, moments, CODEC)
    assert code.decode().shape == weight.shape and code.decode().isfinite().all()
    again = TrellisCode.from_bytes(code.to_bytes(), CODEC)
    assert torch.equal(again.decode(), code.decode())


def test_what_does_not_fit_is_said() -> None:
    weight, moments = layer(32, 64)
    code = trellis(weight, moments, CODEC)
    with pytest.raises(ValueError, match=r"bits must be one of \(2, 3, 4, 5\), got 6"):
        trellis(weight, moments, Codec(bits=6, block=64))
    with pytest.raises(ValueError, match=r"moments must be \[64, 64\]"):
        trellis(weight, moments[:8, :8], CODEC)
    with pytest.raises(ValueError, match="must be finite"):
        trellis(weight.where(weight < 2, torch.nan), moments, CODEC)
    with pytest.raises(ValueError, match="payload does not fit"):
        TrellisCode(CODEC, (32, 64), code.payload[:-1], code.scales)
    with pytest.raises(ValueError, match="scales do not fit"):
        TrellisCode(CODEC, (32, 64), code.payload, code.scales.float())
    for content in (b"", b"x" * 10, b"x" * 100, code.to_bytes()[:-3], code.to_bytes() + b"x"):
        with pytest.raises(ValueError, match="does not fit|are no code of 3 bits"):
            TrellisCode.from_bytes(content, CODEC)


def test_zero_rows_stay_zero_and_threads_do_not_matter() -> None:
    weight, moments = layer(160, 128)
    weight[3] = 0
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(trellis(weight, moments, CODEC).decode())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found) and found[0][3].abs().max() < 1e-6


@pytest.fixture(scope="module")
def model() -> GPT:
    return sharp(GPTConfig(layers=2, hidden=64, heads=2, vocab=97, seq=48, ffn=128, activation="swiglu"), 4)


@pytest.fixture(scope="module")
def small(model: GPT) -> GPT:
    return quantize(model, CODEC, ids(16), method="trellis")


def ids(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(97, (rows, 48), generator=torch.Generator().manual_seed(seed))


def test_a_model_of_paths_is_nearer_than_one_of_codes(model: GPT, small: GPT) -> None:
    codes = quantize(model, CODEC, ids(16))
    assert stored_bits(small) == stored_bits(codes) == 3.25
    judged = ids(16, seed=9)
    assert divergence(model, small, judged).kl < 0.9 * divergence(model, codes, judged).kl


def test_it_is_kept_loaded_and_goes_on(model: GPT, small: GPT, tmp_path: Path) -> None:
    save(small, tmp_path / "small.safetensors")
    again = load(tmp_path / "small.safetensors")
    assert all(isinstance(each, TrellisLinear) for _, each in layers(again))
    assert torch.equal(again(ids(2))[0], small(ids(2))[0])

    def stop(told: Told) -> None:
        if told.name == "blocks.1.mlp.down":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model, CODEC, ids(16), method="trellis", keep=tmp_path / "kept", progress=stop)
    assert len(list((tmp_path / "kept").iterdir())) == 1
    resumed = quantize(model, CODEC, ids(16), method="trellis", keep=tmp_path / "kept")
    assert torch.equal(resumed(ids(2))[0], small(ids(2))[0])


def test_scales_of_paths_are_learned_too(model: GPT, small: GPT) -> None:
    better = tune(small, model, ids(64, seed=2), steps=40, rate=3e-3)
    judged = ids(16, seed=9)
    assert divergence(model, better, judged).kl < divergence(model, small, judged).kl
    assert stored_bits(better) == stored_bits(small)
    assert all(torch.equal(a.payload, b.payload) for (_, a), (_, b) in zip(layers(better), layers(small), strict=True))


@Ways
def test_a_decoder_reads_paths(integers: bool) -> None:
    if integers and not integers_run():
        pytest.skip("needs a processor with AVX-512 VNNI")
    shape = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "vocab": 97, "seq": 48, "ffn": 320}
    of_paths = quantize(sharp(GPTConfig(**shape, activation="swiglu"), 4), CODEC, ids(16), method="trellis", head=CODEC)
    wanted, decoder = decoded(of_paths.requires_grad_(False))(ids(1))[0][0], Decoder(of_paths, integers=integers)
    found = torch.stack([torch.from_numpy(decoder.step(number).copy()) for number in ids(1)[0].tolist()])
    assert float((found - wanted).norm() / wanted.norm()) < (0.05 if integers else 1e-4)
    assert decoder.nbytes == sum(b.nbytes for n, b in of_paths.named_buffers() if n.endswith(("payload", "scales")))


def test_who_cannot_read_paths_says_so(model: GPT, small: GPT) -> None:
    assert all(type(each) is TrellisLinear for _, each in layers(direct(small)))
    with pytest.raises(ValueError, match="a trellis has 2, 3, 4, 5 bits a weight, got 8"):
        quantize(model, Codec(bits=8, block=64), ids(1), method="trellis")
    mixed = shared(small)
    put(mixed, "blocks.0.mlp.up", QuantizedLinear(CODEC.encode(model.blocks[0].mlp.up.weight, rows=True)))
    with pytest.raises(ValueError, match="codes of one kind"):
        Decoder(mixed)


def test_the_head_has_codes(model: GPT) -> None:
    found = quantize(model, CODEC, ids(4), method="trellis", head=Codec(bits=4, block=64))
    assert type(found.head) is QuantizedLinear and type(found.blocks[0].mlp.up) is TrellisLinear


def of(rows: int, columns: int, bits: int, scales: torch.dtype) -> TrellisCode:
    generator = torch.Generator().manual_seed(rows + columns + bits)
    codec, padded = Codec(bits=bits, block=64, scale_dtype=scales), -(-columns // 64) * 64
    payload = torch.randint(256, (-(-rows // 16) * 16 * padded * bits // 8,), generator=generator, dtype=torch.uint8)
    drawn = torch.rand(rows * padded // 64, generator=generator) + 0.5
    return TrellisCode(codec, (rows, columns), payload, drawn.to(scales))


SHAPES = ((16, 64), (256, 64), (48, 192), (208, 128), (576, 128), (1056, 64))


@Ways
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", (2, 3, 4, 5))
def test_products_are_those_of_the_decoded_matrix(shape: tuple[int, int], bits: int, integers: bool) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        code = of(*shape, bits, dtype)
        product = made([code], integers)
        for seed in range(2):  # in the same memory
            check(product, code.decode(), integers, seed)


@Ways
def test_matrices_below_each_other(integers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [of(rows, 128, 3, torch.bfloat16) for rows in (576, 16, 320)]
    whole = torch.cat([code.decode() for code in parts])
    check(made(parts, integers), whole, integers)
    monkeypatch.setattr("tq.infer.path_product._LARGE", 0)  # as of large matrices
    check(made(parts, integers), whole, integers)


def made(parts: list[TrellisCode], integers: bool) -> PathProduct:
    return PathProduct(parts, integers)


def check(product: PathProduct, matrix: Tensor, integers: bool, seed: int = 0) -> None:
    x = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(seed))
    product.x[:] = x.numpy()
    wrong = torch.from_numpy(product.run()) - matrix @ x
    assert float(wrong.norm() / (matrix @ x).norm()) < (0.012 if integers else 2e-6)


def test_products_of_what_does_not_fit() -> None:
    for code in (of(40, 64, 3, torch.float32), of(32, 100, 3, torch.float32)):
        with pytest.raises(ValueError, match="16 must divide the rows"):
            PathProduct([code], False)
    with pytest.raises(ValueError, match="known are Hadamard rotations"):
        haar = Codec(3, 64, rotation="haar", scale_dtype=torch.float32)
        PathProduct([dataclasses.replace(of(32, 64, 3, torch.float32), codec=haar)], False)


@Ways
def test_without_instructions_that_add_up_bytes_sums_are_the_same(
    integers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tq.kernels import simd

    code, x = of(128, 64, 3, torch.float32), torch.randn(64, generator=torch.Generator().manual_seed(0)).numpy()
    wanted, cpu = run(code, x, integers), path_product.cpu
    real = simd._Code.__init__

    def plain(self: simd._Code, *given: object) -> None:
        real(self, *given)
        self.dot_products = False

    monkeypatch.setattr(simd._Code, "__init__", plain)
    monkeypatch.setattr(cpu, "_compiled", lambda body: path_product.numba.cfunc(cpu._SIGNATURE)(body))
    path_product._kernel.cache_clear()
    found = run(code, x, integers)
    path_product._kernel.cache_clear()
    assert (found == wanted).all()


def run(code: TrellisCode, x: np.ndarray, integers: bool) -> np.ndarray:
    product = PathProduct([code], integers)
    product.x[:] = x
    return product.run().copy()


def test_quiet_rows_beside_loud_ones_keep_their_digits() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    loud = weight.clone()
    loud[:16] *= 1e4
    plain, beside = (trellis(w, torch.eye(128).double(), CODEC).decode() for w in (weight, loud))
    wrong = [float((x - w)[16:].norm() / w[16:].norm()) for x, w in ((plain, weight), (beside, loud))]
    assert wrong[1] < 1.6 * wrong[0]  # loud ones come first where a path must choose
    for factor in (1e-20, 1e15):
        decoded_ = trellis(weight * factor, torch.eye(128).double(), CODEC).decode() / factor
        assert float((decoded_ - weight).norm()) < 1.1 * float((plain - weight).norm())


def test_files_of_another_layout_are_refused(
    small: GPT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(small, tmp_path / "small.safetensors")
    monkeypatch.setattr(kernel, "RUN", 128)
    with pytest.raises(ValueError, match="has paths of .*'run': 256"):
        load(tmp_path / "small.safetensors")


def test_a_decoder_refuses_layers_of_different_blocks() -> None:
    shape = {"layers": 2, "hidden": 128, "heads": 4, "vocab": 97, "seq": 48, "ffn": 256}
    model = sharp(GPTConfig(**shape, activation="swiglu"), 4).requires_grad_(False)
    wide = Codec(bits=3, block=128, scale_dtype=torch.bfloat16)
    for method in ("trellis", "nearest"):
        mixed, other = (quantize(model, codec, ids(8), method=method) for codec in (CODEC, wide))
        put(mixed, "blocks.1.mlp.down", other.blocks[1].mlp.down)
        with pytest.raises(ValueError, match="must have the same bits, blocks"):
            Decoder(mixed)
