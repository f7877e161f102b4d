"""Turns are interleaved, buffers rotate, ratios are paired, and what is missing or disturbed is said."""

from __future__ import annotations

import json
import re
import sys
import types
from typing import Any

import pytest
import torch

from tq import Codec
from tq.book import bench, peers, timing
from tq.book.peers import Missing
from tq.book.timing import Rate, Spread, Timing
from tq.train.optim import TurboQuantAdamW

HERE = ("PyTorch reference", "bitsandbytes", "turboquant-torch", "fast-hadamard-transform")


def few_peers(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Only these: compiling takes long, and a machine may have peers installed."""
    monkeypatch.setattr(peers, "PEERS", {name: peers.PEERS[name] for name in names})


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(peers.metadata, "version", _no_version)


def _no_version(name: str) -> str:
    raise peers.metadata.PackageNotFoundError(name)


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


# --- memory ---------------------------------------------------------------------------------------------------


def test_native_allocations_are_seen() -> None:
    held = torch.ones(16 << 20, dtype=torch.uint8)
    extra = timing.peak_extra_bytes(lambda: torch.empty(64 << 20, dtype=torch.uint8).fill_(1))
    again = timing.peak_extra_bytes(lambda: held.fill_(2))
    assert extra is not None and again is not None, "the system does not tell peak memory"
    assert 60 << 20 < extra < 72 << 20
    assert again < 4 << 20


def test_what_was_freed_does_not_count_as_held() -> None:
    weights = [torch.nn.Parameter(torch.randn(1 << 20)) for _ in range(8)]
    for w in weights:
        w.grad = torch.ones_like(w)

    def stepping() -> None:  # leaves holes of 4 MiB
        optimizer = TurboQuantAdamW(weights, variant="exact", bucket_elements=1 << 20)
        optimizer.step()
        optimizer.step()

    extra = timing.peak_extra_bytes(stepping)
    assert extra is not None and 8.0 < extra / (8 << 20) < 10.0  # both moments, and tensors of a bucket


def test_encoding_holds_little_beyond_input_and_output() -> None:
    x = torch.randn(1 << 24)
    codec = timing.standard()
    code = codec.encode(x)
    extra = timing.peak_extra_bytes(lambda: codec.encode(x, out=code))
    assert extra is not None and extra <= 0.05 * x.nbytes


# --- peers ----------------------------------------------------------------------------------------------------


def test_missing_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    few_peers(monkeypatch, *HERE)
    hide(monkeypatch, "bitsandbytes", "bitsandbytes.functional", "turboquant", "fast_hadamard_transform")
    found, missing = peers.peers("cpu", 1 << 12)
    assert [peer.name for peer in found] == ["PyTorch reference"]
    assert [absent.name for absent in missing] == list(HERE[1:])
    assert all("not installed" in absent.reason for absent in missing), missing


def test_what_a_peer_needs_and_how_it_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(*_: Any) -> list[Any]:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    def fails(*_: Any) -> list[Any]:
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setattr(peers, "PEERS", {"turboquant-torch": needs, "torchao": fails})
    assert peers.peers("cpu", 1 << 12)[1] == [
        Missing("turboquant-torch", "needs scipy, which is not installed"),
        Missing("torchao", "RuntimeError: no compiler"),
    ]


def test_an_installed_peer_is_measured_on_the_same_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for bitsandbytes: halves of everything, so its error is known, and it is slow."""
    fake = types.ModuleType("bitsandbytes.functional")
    sizes: list[int] = []

    def quantize(x: torch.Tensor, **_: Any) -> tuple[torch.Tensor]:
        sizes.append(x.numel())
        timing.time.sleep(0.003)
        return (x.clone(),)

    def dequantize(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        timing.time.sleep(0.003)
        return x / 2

    for name in ("quantize_4bit", "quantize_blockwise"):
        monkeypatch.setattr(fake, name, quantize, raising=False)
        monkeypatch.setattr(fake, "de" + name, dequantize, raising=False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", fake)
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 12)
    few_peers(monkeypatch, "bitsandbytes")
    rows, missing = peers.compare_peers("cpu", 1 << 12, repeats=3)
    assert missing == [] and set(sizes) == {1 << 12}
    assert [row.peer.name for row in rows] == ["bitsandbytes NF4", "bitsandbytes 8-bit"]
    for row in rows:
        assert row.nmse == pytest.approx(0.25)
        assert row.ours_nmse < 0.02
        assert row.ours.bits_per_element == row.peer.bits + 0.25  # as many bits as the peer, not 4 against 8
        assert row.encode_over.low > 1 and row.decode_over.low > 1


def test_the_compiled_reference_gives_the_reference_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    few_peers(monkeypatch, "torch.compile of it")
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 12)
    found, missing = peers.peers("cpu", 1 << 12)
    if not found:  # a machine without a C++ compiler
        (absent,) = missing
        assert absent.name == "torch.compile of it" and absent.reason
        return
    x = torch.randn(1 << 12, generator=torch.Generator().manual_seed(1))
    want = timing.standard().encode(x, impl="reference")
    code = found[0].encode(x)
    assert (code.payload == want.payload).float().mean() > 0.999
    torch.testing.assert_close(found[0].decode(want), timing.standard().decode(want, impl="reference"))


# --- the command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [0.0, 0.5])
def test_the_command_prints_what_it_records(
    capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch: pytest.MonkeyPatch, others: float
) -> None:
    monkeypatch.setenv("TQ_BOOK_OUT", str(tmp_path))
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 1 << 18)
    watched = timing.watched
    for module in (timing, peers):
        monkeypatch.setattr(module, "watched", lambda *given, **more: (watched(*given, **more)[0], others))
    few_peers(monkeypatch, *HERE)
    hide(monkeypatch, "bitsandbytes", "bitsandbytes.functional", "turboquant", "fast_hadamard_transform")
    bench.run("cpu", elements=1 << 16, repeats=2)
    out = capsys.readouterr().out
    recorded = json.loads((tmp_path / "results/cpu/quick/bench.json").read_text())
    results = recorded["results"]
    rate = results["encode-rate/b-4"]
    assert rate["low"] <= rate["value"] <= rate["high"] and rate["unit"] == "G elements/s"
    spread = str(Spread(rate["low"], rate["value"], rate["high"]))
    assert re.search(rf"^ *b=4 +4\.25 +{re.escape(spread)}", out, re.MULTILINE)
    ratio = results["encode-over/pytorch-reference"]
    assert str(Spread(ratio["low"], ratio["value"], ratio["high"])) in out
    for name in HERE[1:]:
        assert f"Not measured: {name}: not installed" in out
        assert "not installed" in results[f"not-measured/{name}"]["value"]
    assert recorded["parameters"]["peers"] == dict.fromkeys(HERE[1:])
    assert results["others-share-of-cores"]["value"] == others
    assert ("Do not cite" in out) == (others > bench.BUSY)  # a disturbed run says so
    assert (tmp_path / "figures/cpu/quick/bench/throughput.png").is_file()


def test_too_few_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="elements=1000"):
        bench.run("cpu", elements=1000)


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
    assert timing.watched({}, 1, 1)[1] == pytest.approx((4.0 - 1.0) / (2.0 * 2))


def test_sizes_share_one_codec() -> None:
    found: list[Rate] = timing.by_size("cpu", [1 << 10, 1 << 12], repeats=2, codec=Codec(bits=2, nonfinite="propagate"))
    assert [rate.encode.elements for rate in found] == [1 << 10, 1 << 12]
    assert {rate.bits_per_element for rate in found} == {2.25}
