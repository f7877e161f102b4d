"""What the codecs take and refuse at their door, and what a Code promises: one test a defect that was seen."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import struct
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tq import Code, Codec
from tq.kernels import cpu
from tq.quant import dispatch
from tq.quant.inner_product import ProdCodec
from tq.quant.logscale import LogCodec

# version 2 of the format: Codec(3, 64, scale_dtype=bfloat16, seed=7), [[0, 1], [-2, 3]], rows=True
STORED = (
    "5451434402001800e5b32367975d5b057771b34859831ce10302400002000001000100000107000000000000000202"
    "02696914beb4b463c9e1483e36963c2beb510b384a477b91065ccce5aa40a533c515b03fca5c3c74aa51033c4a0f7b9103f83df73e"
)
# the same in version 1, in which a seed gave other signs
FIRST = (
    "54514344010018004249459477f968a295463c97b7945d8b0302400002000001000100000107000000000000000202"
    "02f3013a03340c0790ef5dfdd507df73fea2ebd9bcd2716209a38e3f533b5c5535aaa5f55a055a59fa02ebd8bcf3f3f30d0f3ef33e"
)
ENCODERS: dict[str, Callable[[Any], Any]] = {
    "Codec": Codec(block=64).encode,
    "Codec, reference": lambda x: Codec(block=64).encode(x, impl="reference"),
    "LogCodec": LogCodec().encode,
    "ProdCodec": ProdCodec(2, 64).encode,
}


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def shards() -> Iterator[Callable[[Tensor], Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda x: distribute_tensor(x, init_device_mesh("cpu", (1,)), [Shard(0)])
    dist.destroy_process_group()


# --- tensors without memory of their own ------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_dtensor_is_refused_and_its_shard_is_named(encoder: str, shards: Callable[[Tensor], Tensor]) -> None:
    x = shards(gaussian(4, 64))
    with pytest.raises(TypeError, match=r"DTensor: pass the local shard: to_local\(\)"):
        ENCODERS[encoder](x)
    ENCODERS[encoder](x.to_local())


@pytest.mark.parametrize("encoder", ENCODERS)
def test_tensors_without_memory_are_refused(encoder: str) -> None:
    from torch._subclasses import FakeTensorMode

    encode, x = ENCODERS[encoder], gaussian(4, 64)
    with pytest.raises(TypeError, match="FakeTensor: pass a plain tensor; code that is traced"):
        encode(FakeTensorMode().from_tensor(x))
    with pytest.raises(TypeError, match="Tensor"):  # a real tensor where results would be fake
        with FakeTensorMode(allow_non_fake_inputs=True):
            encode(x)
    with pytest.raises(TypeError, match="device meta"):
        encode(x.to("meta"))
    with pytest.raises(TypeError, match="address 0"):
        encode(torch._to_functional_tensor(x))
    with pytest.raises(TypeError, match="address 0"):
        encode(torch._efficientzerotensor((4, 64)))
    with pytest.raises(TypeError, match="must lie in memory"):
        torch.vmap(lambda v: encode(v[None]))(x)
    with pytest.raises(TypeError, match="must lie in memory"):
        torch.func.grad(lambda v: (encode(v), v.sum())[1])(x)


def test_a_tracer_leaves_nothing_behind() -> None:
    """Codebooks and signs are kept from call to call: none may be a tensor of a tracer."""
    from torch._subclasses import FakeTensorMode

    codec, x = Codec(3, 256, "norm", 3, seed=4321, scale_dtype=torch.bfloat16), gaussian(300)
    code = Code(codec, (300,), x.dtype, torch.zeros(2, 96, dtype=torch.uint8), torch.ones(2).bfloat16())
    for use in (lambda: codec.encode(x, out=code), lambda: codec.decode(code, out=x.clone())):
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(TypeError, match="Tensor"):
            use()
    assert torch.allclose(codec.decode(codec.encode(x)), x, atol=1.0)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_layouts_and_subclasses_are_refused(encoder: str) -> None:
    class Mine(torch.Tensor):
        pass

    encode, x = ENCODERS[encoder], gaussian(4, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes
        nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])
        others = [x.to_sparse(), x.to_sparse_csr(), x.to_mkldnn(), nested]
    for other in others:
        with pytest.raises(TypeError, match="must be a dense tensor"):
            encode(other)
    with pytest.raises(TypeError, match="Mine: pass a plain tensor"):
        encode(x.as_subclass(Mine))


@pytest.mark.parametrize("encoder", ENCODERS)
def test_freed_storage_is_refused(encoder: str) -> None:
    """What FSDP does to a gathered parameter after its use; with an offset the address is not even 0."""
    for offset, left in ((0, 0), (64, 0), (64, 1000)):
        x = gaussian(5 * 64)[offset:].view(-1, 64)
        x.untyped_storage().resize_(left)
        with pytest.raises(ValueError, match=f"on a storage of {left} bytes"):
            ENCODERS[encoder](x)


@pytest.mark.parametrize("impl", ("reference", "cpu"))
def test_a_lazy_negation_is_coded_as_its_values(impl: str) -> None:
    """Bits of the memory are those of the opposite numbers."""
    x, codec = gaussian(300), Codec()
    for lazy in (torch._neg_view(x), torch.complex(x, x).conj().imag):
        assert lazy.is_neg()
        values = lazy.clone().resolve_neg()
        assert codec.encode(lazy, impl=impl).to_bytes() == codec.encode(values, impl=impl).to_bytes()
    into = torch._neg_view(torch.zeros(300))
    codec.decode(codec.encode(x), out=into, impl=impl)
    assert torch.equal(into, codec.decode(codec.encode(x), impl=impl))
    moments = x.abs().neg()
    assert all(map(torch.equal, LogCodec().encode(torch._neg_view(moments)), LogCodec().encode(moments.neg())))


def test_strided_vectors_of_the_product_codec_are_coded_as_their_values() -> None:
    x, codec = gaussian(64, 6).T, ProdCodec(3, 64)
    ours, theirs = codec.encode(x), codec.encode(x.contiguous())
    assert torch.equal(ours.sign_bits, theirs.sign_bits) and torch.equal(ours.residual_norm, theirs.residual_norm)


# --- codes ------------------------------------------------------------------------------------------------------


def parts() -> Code:
    return Codec(4, 64).encode(gaussian(8, 64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"payload": c.payload.repeat_interleave(2, 0)[::2]}, "payload must be contiguous, got strides"),
        (lambda c: {"payload": torch._neg_view(c.payload)}, "payload must be contiguous, got a lazy negation"),
        (lambda c: {"scales": torch.stack((c.scales, c.scales), 1)[:, 0]}, "scales must be contiguous"),
        (lambda c: {"scales": c.scales[:1].expand(8)}, "scales must be contiguous"),
        (lambda c: {"payload": c.payload[:4], "scales": c.scales[:4]}, r"payload must be .* of shape \(8, 32\)"),
        (lambda c: {"payload": c.payload[:, :16]}, r"payload must be .* got torch.uint8 of shape \(8, 16\)"),
        (lambda c: {"payload": c.payload.int()}, "payload must be torch.uint8"),
        (lambda c: {"scales": c.scales.double()}, "scales must be torch.float32"),
        (lambda c: {"scales": c.scales[:, None]}, r"scales must be torch.float32 of shape \(8,\)"),
        (lambda c: {"scales": c.payload.view(-1)[:32].view(torch.float32)}, "scales must not share memory"),
        (lambda c: {"payload": c.payload.to("meta")}, "payload must lie in memory"),
        (lambda c: {"payload": c.payload.numpy()}, "payload must be a torch.Tensor"),
        (lambda c: {"shape": (8, 65)}, "payload must be"),
        (lambda c: {"shape": [8, 64]}, "shape must be a tuple"),
        (lambda c: {"shape": (8, -64)}, "shape must be a tuple"),
        (lambda c: {"shape": (0, 2**62, 4)}, r"shape must have at most 2\*\*50"),
        (lambda c: {"dtype": torch.float64}, "dtype must be"),
        (lambda c: {"rows": 1}, "rows must be"),
        (lambda c: {"codec": None}, "codec must be"),
        (lambda c: {"codec": Codec(5, 64)}, "payload must be"),
    ],
)
def test_a_code_checks_its_fields_when_it_is_made(change: Callable[[Code], dict[str, Any]], message: str) -> None:
    code = parts()
    with pytest.raises((TypeError, ValueError), match=message):
        dataclasses.replace(code, **change(code))


def test_rows_that_are_cut_out_are_a_code() -> None:
    """Slices of payload and scales; every second row only as a copy, as kernels read rows one after another."""
    codec, x = Codec(4, 64), gaussian(32, 128)
    code, y = codec.encode(x, rows=True), codec.decode(codec.encode(x, rows=True))
    some = Code(codec, (8, 128), x.dtype, code.payload[16:32], code.scales[16:32], True)
    assert torch.equal(codec.decode(some), y[8:16])
    payload, scales = code.payload.view(32, 2, -1)[::2].flatten(0, 1), code.scales.view(32, 2)[::2].flatten()
    assert torch.equal(codec.decode(Code(codec, (16, 128), x.dtype, payload, scales, True)), y[::2])


def test_a_code_that_changed_after_it_was_made_is_refused() -> None:
    codec, x = Codec(4, 64), gaussian(8, 64)
    for change in (
        lambda code: code.payload.untyped_storage().resize_(0),
        lambda code: code.scales.untyped_storage().resize_(12),
        lambda code: code.payload.t_(),
        lambda code: code.scales.resize_(9),
        lambda code: object.__setattr__(code, "shape", (9, 64)),
    ):
        code = codec.encode(x)
        change(code)
        for use in (lambda c: codec.decode(c), lambda c: c.to_bytes(), lambda c: codec.encode(x, out=c)):
            with pytest.raises(ValueError, match="must"):
                use(code)


def test_codes_are_copied_and_moved_as_ever() -> None:
    code = parts()
    for other in (copy.deepcopy(code), code.to("cpu"), dataclasses.replace(code)):
        assert other.to_bytes() == code.to_bytes()
    with pytest.raises(TypeError, match="device meta"):
        code.to("meta")


# --- outputs ----------------------------------------------------------------------------------------------------


def test_outputs_that_hold_an_element_twice_are_refused() -> None:
    codec = Codec()
    code = codec.encode(gaussian(10, 10))
    store = torch.zeros(100)
    for out in (store[:1].expand(10, 10), store.as_strided((10, 10), (1, 1)), store.as_strided((10, 10), (9, 1))):
        with pytest.raises(ValueError, match="out must not hold an element twice"):
            codec.decode(code, out=out)
    assert not store.any()


def test_outputs_over_their_own_code_are_refused() -> None:
    codec, x = Codec(8, 64), gaussian(64)
    store = torch.zeros(512, dtype=torch.uint8)
    payload, scales = store[100:164].view(1, 64), store[164:168].view(torch.float32)
    code = codec.encode(x, out=Code(codec, (64,), torch.float32, payload, scales))
    with pytest.raises(ValueError, match="out must not share memory with the code"):
        codec.decode(code, out=store[:256].view(torch.float32))
    with pytest.raises(ValueError, match="out must not share memory with x"):
        codec.encode(store[:256].view(torch.float32), out=code)
    assert torch.equal(codec.decode(code, out=store[168:424].view(torch.float32)), codec.decode(codec.encode(x)))


@pytest.mark.parametrize("impl", ("reference", "cpu"))
def test_autograd_sees_what_kernels_write(impl: str) -> None:
    """A kernel writes past PyTorch; a tensor that backward still needs must not change in silence."""
    codec, weight = Codec(), torch.ones(128, requires_grad=True)
    kept = torch.ones(128)
    loss = (weight * kept).sum()
    codec.decode(codec.encode(gaussian(128)), out=kept, impl=impl)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- stored bytes -----------------------------------------------------------------------------------------------


def with_header(header: bytes, content: bytes = b"") -> bytes:
    """Stored bytes with a checksum that is right, whatever they say."""
    start, body = struct.pack("<4sHH", b"TQCD", 2, len(header)), header + content
    return start + hashlib.blake2b(body, digest_size=16, key=start).digest() + body


def test_bytes_of_this_version_load() -> None:
    code = Code.from_bytes(bytes.fromhex(STORED))
    assert code.codec == Codec(3, 64, seed=7, scale_dtype=torch.bfloat16) and code.rows
    want = torch.tensor([[0.025048434734344482, 0.998416006565094], [-2.0489795207977295, 2.9701406955718994]])
    assert torch.allclose(code.codec.decode(code), want, rtol=1e-6)
    assert code.to_bytes().hex() == STORED
    again = code.codec.encode(torch.tensor([[0.0, 1.0], [-2.0, 3.0]]), rows=True, impl="reference")
    assert again.to_bytes().hex() == STORED


def test_the_first_version_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="version 1, in which seeds gave other signs; this release reads version 2"):
        Code.from_bytes(bytes.fromhex(FIRST))


def test_sizes_are_compared_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    header = bytes.fromhex(STORED)[24:][:21]
    huge = with_header(header + b"\x01" + b"\x80\x80\x80\x80\x80\x80\x40", b"1234")  # 2**48 elements, four bytes

    def refuse(*sizes: Any, **kwargs: Any) -> Tensor:
        raise AssertionError(f"allocates {sizes}")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ValueError, match="4 bytes of content, the header says"):
        Code.from_bytes(huge)


def test_bytes_that_no_code_gives_are_refused() -> None:
    """With a checksum that is right: two spellings of one header, shapes that no tensor has."""
    header = bytes.fromhex(STORED)[24:][:21]
    content = bytes.fromhex(STORED)[24 + 24 :]
    good = with_header(header + b"\x02\x02\x02", content)
    for bad in (
        with_header(header + b"\x02\x02\x82\x00", content),  # a longer spelling of 2
        with_header(header[:12] + b"\x05" + header[13:] + b"\x02\x02\x02", content),  # rows: 5
        with_header(header + b"\x02\x00" + b"\xff" * 9 + b"\x01"),  # (0, 2**64 - 1)
        with_header(header + b"\x02\x02\x02\x00", content),  # a byte too many
        with_header(header + b"\xff\x7f" + b"\x01" * 300, content),
        good[:-1],
    ):
        with pytest.raises(ValueError, match="damaged tq code"):
            Code.from_bytes(bad)
    for wrong in (5, None, "TQCD", [1], np.zeros(3)):
        with pytest.raises(TypeError, match="data must be bytes"):
            Code.from_bytes(wrong)  # type: ignore[arg-type]


# --- the other codecs -------------------------------------------------------------------------------------------


def test_codes_of_the_logarithmic_codec_must_fit() -> None:
    codec = LogCodec(4)
    codes, ranges = codec.encode(gaussian(300).abs())
    for arguments, error in (
        ((codes[:-1], ranges, 300), ValueError), ((codes, ranges[:-1], 300), ValueError),
        ((codes, ranges, 400), ValueError), ((codes, ranges, 100), ValueError), ((codes, ranges, -1), ValueError),
        ((codes, ranges, 300.0), TypeError), ((codes.int(), ranges, 300), ValueError),
        ((codes, ranges.int(), 300), ValueError), ((codes.to("meta"), ranges, 300), TypeError),
        ((codes.numpy(), ranges, 300), TypeError),
    ):  # fmt: skip
        with pytest.raises(error, match="codes must|ranges must|numel must"):
            codec.decode(*arguments)  # type: ignore[arg-type]
    wide = torch.stack((codes, codes), -1)[..., 0], torch.stack((ranges, ranges), -1)[..., 1]
    assert torch.equal(codec.decode(*wide, 300), codec.decode(codes, ranges, 300))
    with pytest.raises(TypeError, match="v must be float32"):
        codec.encode(gaussian(30).double())


@pytest.mark.parametrize("bits", (2, 4, 8))
def test_damaged_ranges_decode_as_the_reference_does(bits: int) -> None:
    codec, generator = LogCodec(bits, 8), torch.Generator().manual_seed(bits)
    codes = torch.empty(2000, bits, dtype=torch.uint8).random_(generator=generator)
    ranges = torch.empty(2000, 2, dtype=torch.int16).random_(-(2**15), 2**15, generator=generator)
    ours, theirs = (codec.decode(codes, ranges, 16_000, impl=impl) for impl in ("cpu", "reference"))
    assert torch.equal(ours.nan_to_num(-7.0).view(torch.int32), theirs.nan_to_num(-7.0).view(torch.int32))


def test_codes_of_the_product_codec_must_fit() -> None:
    codec = ProdCodec(3, 64)
    code = codec.encode(gaussian(5, 64))
    assert code.mse is not None
    for change in (
        {"sign_bits": code.sign_bits[:4]}, {"sign_bits": code.sign_bits.int()}, {"shape": (5, 65)}, {"shape": ()},
        {"residual_norm": code.residual_norm[:4]}, {"mse": None}, {"residual_norm": code.residual_norm.to("meta")},
        {"mse": codec.mse_codec.encode(gaussian(4, 64))},
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match="must"):
            codec.decode(dataclasses.replace(code, **change))
    with pytest.raises(TypeError, match="ProdCode"):
        codec.decode(code.mse)  # type: ignore[arg-type]


def test_kernels_are_held_to_the_length_of_their_arguments() -> None:
    """Compiled code reads so many numbers from an address, however many there are."""
    for wrong in (np.zeros(21, np.int64), np.zeros(23, np.int64), np.zeros(22, np.int32), np.zeros(44, np.int64)[::2]):
        with pytest.raises(ValueError, match="22 int64 in a row"):
            cpu._run(None, wrong, 1)
    assert len(set(cpu._PLACES)) == cpu._FIELDS == 22


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_what_a_call_needs_is_made_once_for_all_seeds(impl: str) -> None:
    """Each settings has its own, each seed its own codes; what is handed out unchecked passes the check."""
    x, first = gaussian(3, 200), Codec(3, 64, "mse", 2, 5)
    first.decode(first.encode(x, impl=impl), impl=impl)
    before = dispatch._encoder.cache_info().misses, dispatch._decoder.cache_info().misses
    for codec in (first.at_step(7), first.derive("a"), dataclasses.replace(first, seed=3), copy.deepcopy(first)):
        code, alone = codec.encode(x, impl=impl), Codec(3, 64, "mse", 2, 5, codec.seed)
        code.check()
        assert codec == alone and hash(codec) == hash(alone)
        assert code.to_bytes() == alone.encode(x, impl=impl).to_bytes()
        assert torch.allclose(codec.decode(code, impl=impl), alone.decode(code), atol=1e-5)
    assert (dispatch._encoder.cache_info().misses, dispatch._decoder.cache_info().misses) == before
    for other in (Codec(4, 64, "mse", 2, 5), Codec(3, 64, "mse", 1, 5), Codec(3, 64, "mse", 2, 1), Codec(3, 64)):
        assert other.decode(other.encode(x, impl=impl)).isfinite().all()
        code = dataclasses.replace(other, seed=9).encode(x, impl=impl)
        assert not torch.equal(code.scales, other.encode(x, impl=impl).scales)


# --- compilers --------------------------------------------------------------------------------------------------


def round_trip(x: Tensor) -> Tensor:
    codec = Codec()
    return codec.decode(codec.encode(x * 2)) + 1


def test_a_compiled_function_leaves_its_graph_for_the_codec() -> None:
    torch._dynamo.reset()
    compiled, x = torch.compile(round_trip, backend="eager"), gaussian(300)
    for _ in range(2):
        assert torch.equal(compiled(x), round_trip(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="encode"):
        torch.compile(round_trip, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()


def test_tracers_are_told_what_the_codec_needs() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    for mode in ("fake", "symbolic"):
        with pytest.raises(TypeError, match="Tensor"):
            make_fx(round_trip, tracing_mode=mode)(gaussian(300))


def test_sizes_of_an_empty_code_are_checked() -> None:
    for shape, error in (((2**70,), ValueError), ((-1,), TypeError), ((2.0,), TypeError)):
        with pytest.raises(error, match="shape must"):
            Codec().empty(shape, torch.float32)  # type: ignore[arg-type]
    assert math.prod(Codec().empty((2, 0, 3), torch.float32).payload.shape) == 0
