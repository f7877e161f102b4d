"""Timing: turns are interleaved and counted, warm-ups are not kept, and the command records what it prints."""

import re

import pytest

from tq.book import bench


def test_calls_take_turns_and_warmups_are_dropped() -> None:
    order: list[str] = []
    samples = bench.time_calls({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3, warmup=2)
    assert order == ["a", "b"] * 5
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}
    assert all(t >= 0 for values in samples.values() for t in values)


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats=0"):
        bench.time_calls({}, repeats=0)


def test_the_command_prints_what_it_records(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TQ_BOOK_OUT", str(tmp_path))
    ch = bench.run("cpu", elements=1 << 16, repeats=2)
    out = capsys.readouterr().out
    recorded = ch._results["rate/encode"]
    assert recorded["low"] <= recorded["value"] <= recorded["high"] and recorded["unit"] == "G elements/s"
    assert re.search(rf"^encode +{recorded['value']:.3f}", out, re.MULTILINE)
    assert "encode over the PyTorch reference" in out
