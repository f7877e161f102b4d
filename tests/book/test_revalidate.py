"""A sample of kept runs lifts the mark of a change that changes nothing, and catches one rounding."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tq.book.record import tasks
from tq.book.record.provenance import commit, full_commit
from tq.book.run import former_code, revalidate
from tq.quant import reference
from tq.quant.codec import Codec

RUNS = [{"seed": seed} for seed in range(40)]


def coded(task: dict[str, Any], device: str) -> dict[str, Any]:
    """A run small enough to be made forty times: what the codec gives back of some numbers."""
    x = torch.randn(512, generator=torch.Generator().manual_seed(task["seed"]))
    codec = Codec(4)
    y = codec.decode(codec.encode(x, impl="reference"), impl="reference")
    return {"error": float((y - x).pow(2).mean()), "decoded": y}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("kept")
    tasks.outcomes(coded, RUNS, folder, jobs=1)
    return tasks.files(coded, RUNS, folder, "cpu")


def test_the_same_code_gives_the_same_bits(kept: list[Path]) -> None:
    agree, bound, lines = revalidate._try(kept[:6], "cpu", 1)
    assert agree and bound == 0 and len(lines) == 6 and all(line.startswith("ok: the same bits") for line in lines)


def test_one_changed_rounding_is_caught_by_six_of_forty_each_time(
    kept: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One quotient of the block's scale is rounded before the product, not after it."""

    def rounded(scale: str, z: torch.Tensor, dot: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        assert scale == "unbiased"
        norm = z.norm(dim=1)
        return norm * (norm / dot)

    monkeypatch.setattr(reference, "_block_scale", rounded)
    caught = 0
    for trial in range(20):
        agree, _, lines = revalidate._try(random.Random(trial).sample(kept, 6), "cpu", 1)
        caught += not agree and any(line.startswith("DIFFERS") for line in lines)
    assert caught == 20


@pytest.fixture
def without_recording(kept: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A chapter whose kept runs are of other code, and which was never recorded."""
    for path in kept:
        run = tasks.read(path)
        tasks.write(tmp_path / f"{path.stem[:16]}-{'0' * 16}.pt", {**run, "sources": "other code"})
    monkeypatch.setattr(revalidate, "load", lambda *_: None)
    monkeypatch.setattr(revalidate.paths, "tasks", lambda *_: tmp_path)
    monkeypatch.setattr(revalidate.archive, "place", lambda *_: tmp_path / "no archive")
    return tmp_path


def test_runs_without_a_recording_count_again(without_recording: Path, kept: list[Path]) -> None:
    agree, said = revalidate.revalidate("gap-trends", sample=4)
    assert agree and said.count("ok: the same bits") == 4 and "40 kept runs count as today's" in said
    assert sorted(path.name for path in without_recording.glob("*.pt")) == sorted(path.name for path in kept)
    note = tasks.read(next(without_recording.glob("*.pt")))["revalidated"]
    assert (note["sample"], note["of"], note["allowed"]) == (4, 40, 0.0)
    assert revalidate.revalidate("gap-trends") == (True, "gap-trends (cpu, full): 40 kept runs are today's")


def test_runs_without_a_recording_that_differ_do_not_count(
    without_recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(path.name for path in without_recording.glob("*.pt"))
    monkeypatch.setattr(revalidate, "difference", lambda a, b: 1.0)
    agree, said = revalidate.revalidate("gap-trends", sample=2)
    assert not agree and said.endswith("today's code gives other results: these runs do not count")
    assert sorted(path.name for path in without_recording.glob("*.pt")) == before


def test_a_chapter_without_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revalidate, "load", lambda *_: None)
    monkeypatch.setattr(revalidate.paths, "tasks", lambda *_: tmp_path)
    monkeypatch.setattr(revalidate.archive, "place", lambda *_: tmp_path / "no archive")
    with pytest.raises(ValueError, match="has no recording and no kept runs"):
        revalidate.revalidate("gap-trends")


def test_times_that_cells_measure_are_not_covered_by_runs() -> None:
    """Kept runs may have the same bits, and a kernel beside them another speed."""
    measured = ("kv-cache", "kernels", "optimizer-state")
    assert all(revalidate._of_its_own(revalidate.paths.notebook(chapter)) for chapter in measured)
    assert revalidate._of_its_own(revalidate.paths.notebook("gap-trends")) == []


def test_another_processor_is_allowed_a_tolerance_that_is_printed(
    kept: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revalidate, "device_name", lambda device: "another processor")
    agree, bound, lines = revalidate._try(kept[:2], "cpu", 1)
    assert agree and bound == revalidate.TOLERANCE and "here another processor: 0.001 of a value's size" in lines[0]
    monkeypatch.setattr(revalidate, "difference", lambda a, b: 2 * revalidate.TOLERANCE)
    monkeypatch.setattr(revalidate.former_code, "outcomes", lambda *_: [tasks.read(kept[0])])
    assert not revalidate._try(kept[:2], "cpu", 1)[0]


@pytest.mark.parametrize("changed", (False, True))
def test_what_another_processor_computes_otherwise_is_compared_with_its_code_there(
    kept: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """That code must give today's bits: the tolerance between processors does not count between codes."""
    asked_of = []

    def former(at: str, function: str, asked: list[dict[str, Any]], device: str, jobs: int | None) -> list[Any]:
        asked_of.append((at, function))
        value = coded(asked[0], device)
        value["error"] *= 1 + 2**-40 if changed else 1
        return [{"value": value, "sources": tasks.read(there)["sources"]}]

    there = tmp_path / kept[0].name
    tasks.write(there, {**tasks.read(kept[0]), "value": {"error": 1.0}, "revalidated": {"at": "the last commit"}})
    monkeypatch.setattr(revalidate, "device_name", lambda device: "another processor")
    monkeypatch.setattr(revalidate.former_code, "outcomes", former)
    agree, _, lines = revalidate._try([there], "cpu", 1)
    assert agree is not changed and [at for at, _ in asked_of] == ["the last commit"]
    assert ("DIFFERS" if changed else "ok: the same bits beside the code of") in lines[1]


@pytest.mark.parametrize(("more", "why"), [
    ({"versions": {"torch": "1.0"}}, "other versions of libraries"),
    ({"commit": None}, "its commit is not known"),
    ({"commit": "0123456789" * 4}, "the code of 0123456789 is not here"),
    ({"sources": "others"}, "are not those that it was computed with"),
])  # fmt: skip
def test_a_run_whose_code_cannot_be_had_stays_stale_and_says_why(
    kept: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], why: str
) -> None:
    there = tmp_path / kept[0].name
    tasks.write(there, {**tasks.read(kept[0]), "value": {"error": 1.0}, **more})
    if "sources" in more:
        monkeypatch.setattr(revalidate.former_code, "outcomes", lambda *_: [tasks.read(kept[0])])
    monkeypatch.setattr(revalidate, "device_name", lambda device: "another processor")
    agree, _, lines = revalidate._try([there], "cpu", 1)
    assert not agree and lines[1].startswith("DIFFERS") and why in lines[1]


def test_a_task_with_a_tuple_is_found_again() -> None:
    kept = [{"task": {"of": [1, number], "seed": 0}, "value": number} for number in range(3)]
    assert [one["value"] for one in former_code.in_order(kept, [{"seed": 0, "of": (1, k)} for k in (2, 0)])] == [2, 0]


@pytest.mark.skipif(commit()[1] is None, reason="no git here")
def test_a_former_code_computes_what_it_computed() -> None:
    function, task = "tq.lab.event_study:ring", {"sites": 500, "rounds": 300, "warm": 300}
    (found,) = former_code.outcomes(full_commit("HEAD"), function, [task], "cpu", 1)
    assert found["value"] == tasks.named(function)(task) and found["task"] == task
    assert len(found["sources"]) == 64
    with pytest.raises(ValueError, match="failed at tq.lab.event_study:nothing: AttributeError"):
        former_code.outcomes(full_commit("HEAD"), "tq.lab.event_study:nothing", [task], "cpu", 1)
    with pytest.raises(ValueError, match="the code of 0123456789 is not here"):
        former_code.outcomes("0123456789" * 4, function, [task], "cpu", 1)


@pytest.mark.parametrize(
    "a, b, expected",
    [
        (1.0, 1.0, 0.0),
        (math.nan, math.nan, 0.0),
        (0.0, -0.0, math.inf),
        (1.0, math.nan, math.inf),
        (2.0, 1.0, 1.0),
        (1, 1.0, math.inf),
        ("a", "b", math.inf),
        ({"k": [1.0, 2.0]}, {"k": [1.0, 2.0]}, 0.0),
        ({"k": [1.0, 2.0]}, {"k": [1.0, 2.5]}, 0.2),
        ({"k": 1.0}, {"l": 1.0}, math.inf),
        ([1.0], [1.0, 2.0], math.inf),
        (torch.zeros(3), torch.zeros(4), math.inf),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64), math.inf),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), math.inf),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([1.0, 2.0], dtype=torch.bfloat16), 0.0),
        (torch.zeros(0), torch.zeros(0), 0.0),
        (None, None, 0.0),
    ],
)
def test_difference_is_relative_and_exact_at_zero(a: object, b: object, expected: float) -> None:
    assert revalidate.difference(a, b) == pytest.approx(expected)
