"""A step of generation with caches of codes, timed."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", reason="needs transformers")
from tq.infer import cache  # noqa: E402
from tq.infer.pages import attend  # noqa: E402
from tq.lab import generation_step  # noqa: E402


def test_ways_are_timed_and_their_bytes_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(cache, "attend", lambda *given: calls.append(1) or attend(*given))
    generation_step.main(["--layers", "2", "--tokens", "300", "--repeats", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(calls) == 2 * 2 * 2 * (1 + 2), "of two ways two layers, in a first and in two turns of two calls each"
    assert len(found) == 5 and all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in found.values())
    assert found["bf16"]["bytes"] == 2 * 2 * 3 * 300 * 64 * 2  # crop leaves what was there
    assert found["4 and 3 bits, decoded"]["bytes"] == found["4 and 3 bits, read as codes"]["bytes"]
    assert found["4 and 3 bits, decoded"]["bytes"] < found["4 and 4 bits, decoded"]["bytes"] < found["bf16"]["bytes"]


def test_the_table_and_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    generation_step.main(["--layers", "1", "--tokens", "20", "--repeats", "1"])
    assert "read as codes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        generation_step.main(["--tokens", "0"])
    assert "at least 1" in capsys.readouterr().err
