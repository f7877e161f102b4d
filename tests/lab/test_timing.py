"""Turns are interleaved, buffers rotate and stay within bounds, ratios are paired, memory and disturbance are seen."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from tq import Codec
from tq.lab import timing
from tq.lab.timing import Rate, Spread, Timing

MIB = 1 << 20


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four caches full of small tensors would be gigabytes on some machines."""
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 15)


# --- timing ---------------------------------------------------------------------------------------------------


def test_calls_take_turns_and_warmups_are_dropped() -> None:
    order: list[str] = []
    samples = timing.time_calls({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3, warmup=2)
    assert order == ["a", "b"] * 5
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}
    assert all(t >= 0 for values in samples.values() for t in values)


def test_a_sample_of_several_calls_is_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call() -> None:
        now[0] += 2.0

    assert timing.time_calls({"a": call}, repeats=2, inner=4) == {"a": [2.0, 2.0]}


@pytest.mark.parametrize(("lone_s", "row"), [(1.0, 1), (0.003, 4), (0.0003, 34), (1e-6, 100)])
def test_on_a_gpu_a_sample_is_a_row_of_ten_milliseconds(
    monkeypatch: pytest.MonkeyPatch, lone_s: float, row: int
) -> None:
    """What Python needs before the first kernel starts is then a hundredth of a sample, not a third of it."""
    now, calls = [0.0], [0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def call() -> None:
        now[0] += lone_s
        calls[0] += 1

    assert timing.time_calls({"a": call}, repeats=3)["a"] == pytest.approx([lone_s] * 3)
    assert calls[0] == 2 + 3 * row  # the warm-up, the one that tells how many make a row, and three rows


def test_without_cuda_nothing_is_repeated_and_cuda_stays_untouched() -> None:
    calls = [0]

    def call() -> None:
        calls[0] += 1

    timing.time_calls({"a": call}, repeats=3)
    assert calls[0] == 4 and not torch.cuda.is_initialized()


@pytest.mark.parametrize("bad", [{"repeats": 0}, {"warmup": -1}, {"inner": 0}])
def test_bad_counts_are_refused(bad: dict[str, int]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        timing.time_calls({}, **bad)


# --- arithmetic on hand numbers -------------------------------------------------------------------------------


def test_rates_and_share_of_copy() -> None:
    # 1e9 elements of 4.5 bytes in 1 s beside a copy of 9e9 bytes/s: half of the copy's speed.
    timing = Timing(10**9, 4.5, (1.0, 0.5, 2.0), (9e9, 18e9, 4.5e9))
    assert timing.g_elements_per_s == Spread(0.75, 1.0, 1.5)
    assert timing.gb_per_s == pytest.approx((0.75 * 4.5, 4.5, 1.5 * 4.5))
    # The copy was as slow as the codec in every turn: paired, the spread of the machine is gone.
    assert timing.share_of_copy == pytest.approx((0.5, 0.5, 0.5))


def test_ratios_are_taken_turn_by_turn_and_per_element() -> None:
    ours = Timing(100, 4.5, (1.0, 10.0, 2.0), (1.0,) * 3)
    theirs = Timing(50, 4.5, (2.0, 20.0, 4.0), (1.0,) * 3)  # twice as long for half as many
    assert ours.over(theirs) == pytest.approx((4.0, 4.0, 4.0))
    assert theirs.over(ours) == pytest.approx((0.25, 0.25, 0.25))
    with pytest.raises(ValueError, match="3 turns against 2"):
        ours.over(Timing(50, 4.5, (1.0, 1.0), (1.0,) * 2))


@pytest.mark.usefixtures("small_cache")
def test_bytes_of_an_element() -> None:
    """4 bits in blocks of 128 with an fp32 scale: 4 + 4.25 / 8 bytes from fp32, 2 less from bf16."""
    codec = Codec(bits=4, block=128, nonfinite="propagate")
    found = timing.rates("cpu", 1 << 12, {"a": (codec, torch.float32), "b": (codec, torch.bfloat16)}, repeats=2)
    assert [rate.encode.bytes_per_element for rate in found] == [4.53125, 2.53125]
    assert all(len(r.encode.seconds) == len(r.decode.seconds) == len(r.encode.copy_bytes_per_s) == 2 for r in found)
    assert found[0].encode.copy_bytes_per_s == found[1].decode.copy_bytes_per_s  # one copy beside all of them
    assert all(t > 0 for rate in found for t in rate.encode.seconds + rate.decode.seconds)


# --- buffers --------------------------------------------------------------------------------------------------


def test_buffers_together_exceed_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1000)
    assert timing.buffer_count(4001, "cpu") == 1
    for nbytes in (1, 7, 999, 2000, 4000):
        count = timing.buffer_count(nbytes, "cpu")
        assert count >= 3 and count * nbytes >= 4000


# In a process of its own: of a large one the system may take idle pages while it is measured.
HALF_A_GIGABYTE = f"""
import torch
from tq.lab import timing

timing.cache_bytes = lambda device: 512 * {MIB}
settings = {{"a": (timing.standard(), torch.float32), "b": (timing.standard(), torch.bfloat16)}}
print(timing.peak_extra_bytes(lambda: timing.rates("cpu", {MIB}, settings, 1, most_bytes=16 * {MIB})))
print(timing.peak_extra_bytes(lambda: timing.by_size("cpu", [{MIB}, {MIB // 4}], 1, most_bytes=16 * {MIB})))
"""


def test_a_cache_of_half_a_gigabyte_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such processors exist; the tensors of ten settings would need a dozen gigabytes."""
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 512 * MIB)
    for nbytes in (1, 4096, 4 * MIB, 64 * MIB):
        assert timing.buffer_count(nbytes, "cpu") * nbytes <= timing.MOST_BYTES == 1024 * MIB
        assert 3 <= timing.buffer_count(nbytes, "cpu", 16 * MIB) <= max(3, 16 * MIB // nbytes)
    done = subprocess.run([sys.executable, "-c", HALF_A_GIGABYTE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    timed, sizes = map(int, done.stdout.split())
    assert 48 * MIB < timed < 80 * MIB  # in and out as fp32 and bf16, and codes
    assert 60 * MIB < sizes < 96 * MIB  # in and out twice, less what the process had at hand


def test_the_cache_is_known_and_inputs_are_distinct_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timing.cache_bytes("cpu") >= 1 << 18
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 12)
    inputs = timing.inputs_of("cpu", 1 << 11)
    assert len(inputs) == 3 and len({x.data_ptr() for x in inputs}) == 3
    assert all(abs(float(x.square().mean()) - 1) < 0.2 for x in inputs) and not torch.equal(inputs[0], inputs[1])


def test_calls_go_round_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    call = timing.rotating(lambda a, b: seen.append((a, b)), [1, 2, 3], [4, 5, 6])
    for _ in range(7):
        call()
    assert seen == [(1, 4), (2, 5), (3, 6)] * 2 + [(1, 4)]
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 12)
    inputs = timing.inputs_of("cpu", 1 << 11)
    outputs = [torch.zeros_like(x) for x in inputs]
    encode, decode = timing.calls_of(timing.standard(), inputs, outputs)
    codes = {encode().payload.data_ptr() for _ in range(6)}
    assert len(codes) == 3
    assert {decode().data_ptr() for _ in range(6)} == {y.data_ptr() for y in outputs}
    for x, y in zip(inputs, outputs, strict=True):
        assert float((x - y).square().mean()) < 0.02  # each output belongs to the input of its turn


def test_no_call_finds_what_the_one_before_has_touched() -> None:
    seen: list[int] = []
    turns = itertools.count()
    calls = {name: timing.rotating(seen.append, range(5), turns=turns) for name in "abc"}
    timing.time_calls(calls, repeats=4)
    assert seen == [turn % 5 for turn in range(15)]


@pytest.mark.usefixtures("small_cache")
@pytest.mark.parametrize("sizes", [False, True])
def test_all_that_is_timed_together_takes_turns_at_the_buffers(monkeypatch: pytest.MonkeyPatch, sizes: bool) -> None:
    touched: list[int] = []
    given = timing.rotating

    def spied(call, *buffers, turns=None):
        places = [[(k, part) for k, part in enumerate(one)] for one in buffers]

        def spy(*items):
            touched.append(items[0][0])
            return call(*(part for _, part in items))

        return given(spy, *places, turns=turns)

    monkeypatch.setattr(timing, "rotating", spied)
    if sizes:
        monkeypatch.setattr(timing, "_ROW", 1 << 11)
        timing.by_size("cpu", [1 << 11], repeats=2)
    else:
        settings = {"a": (timing.standard(), torch.float32), "b": (timing.standard(2), torch.float32)}
        timing.rates("cpu", 1 << 11, settings, repeats=2)
    count = timing.buffer_count(4 << 11, "cpu")
    assert count == 16 and touched == [turn % count for turn in range(len(touched))] and len(touched) >= 9


# --- memory ---------------------------------------------------------------------------------------------------


def test_native_allocations_are_seen() -> None:
    held = torch.ones(16 << 20, dtype=torch.uint8)
    extra = timing.peak_extra_bytes(lambda: torch.empty(64 << 20, dtype=torch.uint8).fill_(1))
    again = timing.peak_extra_bytes(lambda: held.fill_(2))
    assert extra is not None and again is not None, "the system does not tell peak memory"
    assert 60 << 20 < extra < 72 << 20
    assert again < 4 << 20


REPLACING = """
import torch
from tq.lab import timing

mib = 1 << 20

def replacing():  # leaves holes of 4 and of 8 MiB
    kept = [torch.zeros(mib) for _ in range(16)]
    for turn in range(32):
        wide = torch.ones(mib).double()
        kept[turn % 16] = wide.sqrt().float()
        del wide

print(timing.peak_extra_bytes(replacing) / mib)
"""


def test_what_was_freed_does_not_count_as_held() -> None:
    """In a process of its own: what other tests left to be freed would count."""
    told = subprocess.run([sys.executable, "-c", REPLACING], capture_output=True, text=True, check=True)
    assert 83 < float(told.stdout) < 87  # 64 kept, and 8, 8 and 4 at a time


def test_encoding_holds_little_beyond_input_and_output() -> None:
    x = torch.randn(1 << 24)
    codec = timing.standard()
    code = codec.encode(x)
    extra = timing.peak_extra_bytes(lambda: codec.encode(x, out=code))
    assert extra is not None and extra <= 0.05 * x.nbytes


def test_other_processes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the time that all processes took, our own is not the others'."""
    ticks = iter([1000, 1400])
    stat = "cpu  {} 0 0 5 5 0 0 0 0 0\n"
    hz = timing.os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(timing.Path, "read_text", lambda self, *_: stat.format(next(ticks) * hz // 100))
    monkeypatch.setattr(timing.time, "process_time", iter([0.0, 1.0]).__next__)
    monkeypatch.setattr(timing.time, "perf_counter", iter([0.0, 2.0]).__next__)
    monkeypatch.setattr(timing.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(timing, "time_calls", lambda *_, **__: {})
    assert timing.watched({}, 1)[1] == pytest.approx((4.0 - 1.0) / (2.0 * 2))


@pytest.mark.usefixtures("small_cache")
def test_sizes_share_one_codec() -> None:
    found: list[Rate] = timing.by_size("cpu", [1 << 10, 1 << 12], repeats=2, codec=Codec(bits=2, nonfinite="propagate"))
    assert [rate.encode.elements for rate in found] == [1 << 10, 1 << 12]
    assert {rate.bits_per_element for rate in found} == {2.25}
