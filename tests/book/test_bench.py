"""The command `bench`: what it prints is what it records, and a disturbed run says so."""

from __future__ import annotations

import json
import re

import pytest

from tests.lab.helpers import HERE, HIDDEN, few_peers, hide
from tq.book.run import bench
from tq.lab import peers, timing
from tq.lab.timing import Spread


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
    hide(monkeypatch, *HIDDEN)
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
