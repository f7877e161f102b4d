"""The lossless codec: bits in, the same bits out; the same code whatever runs it; and no harm from damaged codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tq.quant import lossless
from tq.quant import planes as in_numpy
from tq.quant.planes import Expected, Layout, Planes, Span

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
OTHERS = [torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64]
compiled = pytest.importorskip("tq.kernels.planes")


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def moments(rows: int, columns: int, seed: int = 0, spread: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """A second moment with rows and columns of their own size, and a gradient of that size."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    v = (2 * draw(rows, 1) + 2 * draw(1, columns) + spread * draw(rows, columns) - 12).exp()
    return v, v.sqrt() * draw(rows, columns)


def words_of(kind: str, count: int, dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    size = 8 * dtype.itemsize
    random = rng.integers(0, 1 << min(size, 63), count, dtype=np.uint64).astype(dtype)
    if kind == "random bits":  # every kind of NaN, infinity, denormal and zero among them
        return random
    if kind == "few values":
        return random[rng.integers(0, 3, count)] if count > 3 else random
    if kind == "zeros":
        return np.where(rng.random(count) < 0.7, 0, random).astype(dtype)
    if kind == "small":
        return random % dtype.type(200)  # denormals
    return np.repeat(random[:1], count)


@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_five_thousand_tensors_come_back_to_the_bit(dtype):
    rng = np.random.default_rng(FLOATS.index(dtype) if dtype in FLOATS else 10 + OTHERS.index(dtype))
    itemsize = torch.empty(0, dtype=dtype).element_size()
    word = np.dtype(f"u{min(itemsize, 8)}")
    for case in range(500):
        shape = tuple(rng.integers(0, (3000, 60, 13)[k], size=k + 1)[j] for k in [case % 3] for j in range(k + 1))
        count = int(np.prod(shape))
        kind = ("random bits", "few values", "zeros", "small", "one value")[case % 5]
        words = words_of(kind, count, word, rng)
        if dtype == torch.bool:
            words = words & 1
        tensor = torch.empty(shape, dtype=dtype)
        tensor.reshape(-1).view(torch.uint8)[:] = torch.from_numpy(words.view(np.uint8).copy())
        before = bits(tensor)
        code = lossless.encode(tensor, threads=1)
        back = lossless.decode(code, threads=1)
        assert bits(tensor) == before, "the input was written to"
        assert back.shape == tensor.shape and back.dtype == dtype and bits(back) == before
        assert code.nbytes <= tensor.nbytes + sum(shape)


def test_no_dimension_no_element_and_one_element():
    for tensor in (torch.tensor(1.5), torch.empty(0), torch.empty(3, 0), torch.tensor([float("nan")])):
        back = lossless.decode(lossless.encode(tensor))
        assert back.shape == tensor.shape and bits(back) == bits(tensor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(700, 1100), (3, 300_001), (1_000_003,), (400, 30, 50)], ids=str)
def test_frames_and_threads(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    code = lossless.encode(tensor, threads=1)
    assert len(code.frames) == -(-tensor.numel() // lossless.FRAME)
    assert code == lossless.encode(tensor, threads=3)
    assert bits(lossless.decode(code, threads=3)) == bits(tensor)


def test_a_tensor_that_is_not_contiguous():
    tensor = torch.randn(300, 200, generator=torch.Generator().manual_seed(2)).T
    assert lossless.encode(tensor) == lossless.encode(tensor.contiguous())


def test_ratios_reach_the_entropy_of_what_is_predicted():
    of_v = lossless.encode(moments(600, 800)[0])
    assert 32 / (8 * of_v.nbytes / 480_000) > 1.27 and not of_v.signed and of_v.steps
    v, g = moments(600, 800, spread=2.0)
    plain, of_g = lossless.encode(g), lossless.encode(g, second_moment=v)
    assert of_g.given and of_g.nbytes < 0.835 * g.nbytes and plain.nbytes > 1.015 * of_g.nbytes
    assert torch.equal(lossless.decode(of_g, second_moment=v), g)
    # a standard normal number has log2 sqrt(2 pi e) bits, and as many more as its last place is below one: 26.43
    normal = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0))
    assert 8 * lossless.encode(normal).nbytes / normal.numel() == pytest.approx(26.43, abs=0.06)


def test_what_is_stored_in_fewer_bits_takes_fewer():
    x = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(3))
    short = x.bfloat16()
    assert lossless.encode(short.float()).nbytes == pytest.approx(lossless.encode(short).nbytes, rel=0.01)
    assert lossless.encode(torch.zeros(1000, 1000)).nbytes < 1000
    x[::2] = 0.0
    assert lossless.encode(x).nbytes < 0.55 * x.nbytes


def test_rows_are_read_from_their_frames_alone():
    v, g = moments(3000, 400)
    code = lossless.encode(g, second_moment=v)
    broken = [bytes(len(frame)) for frame in code.frames]
    first, last = 1000, 1200
    for k in range(first * 400 // lossless.FRAME, -(-last * 400 // lossless.FRAME)):
        broken[k] = code.frames[k]
    only = lossless.Encoded(**{**code.__dict__, "frames": tuple(broken)})
    assert torch.equal(lossless.decode(only, second_moment=v, rows=(first, last)), g[first:last])
    assert lossless.decode(code, second_moment=v, rows=(5, 5)).shape == (0, 400)
    for rows in ((-1, 2), (2, 1), (0, 3001)):
        with pytest.raises(ValueError, match="rows"):
            lossless.decode(code, second_moment=v, rows=rows)


def test_second_moments_that_do_not_fit():
    v, g = moments(64, 64)
    code = lossless.encode(g, second_moment=v)
    with pytest.raises(ValueError, match="must be"):
        lossless.encode(g, second_moment=v[:1])
    with pytest.raises(ValueError, match="needs the second moment"):
        lossless.decode(code)
    with pytest.raises(ValueError, match="must be"):
        lossless.decode(code, second_moment=v.half())
    with pytest.raises(ValueError, match="threads"):
        lossless.encode(g, threads=0)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int16], ids=str)
def test_numpy_writes_and_reads_the_same_bytes(dtype, monkeypatch):
    v, g = moments(90, 700, seed=4)
    v, g = v.to(dtype), g.to(dtype)
    g[3], g[:, 5], g[7, 7], g[8, 8] = 0, 0, 1, 0
    if dtype.is_floating_point:
        g[1, 1:4] = torch.tensor([float("nan"), float("inf"), -0.0])
        g[2] *= 2.0**-60
    codes = [lossless.encode(g, second_moment=v), lossless.encode(g), lossless.encode(v)]
    monkeypatch.setattr(lossless, "_kernels", lambda: in_numpy)
    assert codes == [lossless.encode(g, second_moment=v), lossless.encode(g), lossless.encode(v)]
    assert bits(lossless.decode(codes[0], second_moment=v)) == bits(g)
    assert bits(lossless.decode(codes[2])) == bits(v)


def test_sections_of_both_are_one(monkeypatch):
    rng = np.random.default_rng(5)
    for _ in range(300):
        n, top = int(rng.integers(0, 5000)), int(rng.integers(1, 256))
        data = (rng.integers(0, top + 1, n) * (rng.random(n) < rng.random())).astype(np.uint8)
        written = []
        for module in (compiled, in_numpy):
            out, words = np.zeros(n + 1024, np.uint8), np.empty(n + 128, np.uint16)
            end = module.put_section(data, n, out, 0, words)
            written.append(out[:end].copy())
        assert np.array_equal(*written)
        for module in (compiled, in_numpy):
            back = np.zeros(n, np.uint8)
            assert module.get_section(written[0], 0, n, back) == written[0].size
            assert np.array_equal(back, data)


@pytest.mark.parametrize("module", [compiled, in_numpy], ids=["compiled", "numpy"])
def test_no_section_is_read_beyond_its_end(module):
    """Every byte damaged, every length cut: an answer of -1 or other numbers, never a crash nor a write outside."""
    rng = np.random.default_rng(6)
    data = np.minimum(rng.geometric(0.2, 3000), 255).astype(np.uint8)
    out, words = np.zeros(4100, np.uint8), np.empty(3200, np.uint16)
    whole = out[: module.put_section(data, data.size, out, 0, words)].copy()
    guard = np.full(3064, 77, np.uint8)
    for case in range(3000 if module is compiled else 200):
        damaged = whole.copy()
        for at in rng.integers(0, 200 if case % 2 else whole.size, 1 + case % 3):
            damaged[at] = rng.integers(0, 256)
        damaged = damaged[: damaged.size if case % 5 else int(rng.integers(0, whole.size))]
        end = module.get_section(damaged, 0, 3000, guard)
        assert end == -1 or 0 < end <= damaged.size
        assert (guard[3000:] == 77).all()
    assert module.get_section(whole, 0, 2999, guard) == -1
    assert module.get_section(whole[:-8], 0, 3000, guard) == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_a_damaged_frame_is_refused_or_read_otherwise(dtype):
    tensor = (1000 * torch.randn(80, 100, generator=torch.Generator().manual_seed(7))).to(dtype)
    code, rng, refused = lossless.encode(tensor), np.random.default_rng(8), 0
    for case in range(600):
        frame = bytearray(code.frames[0])
        frame[int(rng.integers(0, 60 if case % 2 else len(frame)))] ^= int(rng.integers(1, 256))
        frame = frame[: len(frame) - 8 * (case % 7 == 0)]
        damaged = lossless.Encoded(**{**code.__dict__, "frames": (bytes(frame),)})
        try:
            assert lossless.decode(damaged).shape == tensor.shape
        except lossless.CorruptCode as error:
            assert "frame 0" in str(error)
            refused += 1
    assert refused > 50
    with pytest.raises(lossless.CorruptCode, match="2 frames"):
        lossless.decode(lossless.Encoded(**{**code.__dict__, "frames": code.frames * 2}))
    with pytest.raises(lossless.CorruptCode, match="expected"):
        lossless.decode(lossless.Encoded(**{**lossless.encode(tensor.float()).__dict__, "steps": b"123"}))


def test_no_room_is_shared_by_kernels_and_arguments():
    """A frame that needs every part: escapes, low bytes that are coded, signs."""
    words = np.random.default_rng(9).integers(0, 1 << 32, 5000, dtype=np.uint64).astype(np.uint32)
    layout, nothing = Layout(21, 16, 22), np.zeros(0, np.int8)
    expected = Expected(5000, nothing, nothing, words[:0], 500)
    for module in (compiled, in_numpy):
        room = Planes(*(np.zeros(5000, kind) for kind in (np.uint8, np.uint8, np.uint16, np.uint16)))
        escaped = module.split_frame(words, Span(0, 5000), expected, layout, 1, room)
        assert 0 < escaped < 5000
        back = np.zeros(5000, np.uint32)
        planes = room._replace(escapes=room.escapes[:escaped])
        assert module.join_frame(back, Span(0, 5000), expected, layout, 1, planes)
        assert np.array_equal(back, words)
        assert not module.join_frame(back, Span(0, 5000), expected, layout, 1, room._replace(escapes=room.escapes[:1]))
