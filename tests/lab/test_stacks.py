"""What every stack's program is made of: the task, the catalog, and what is read from what ranks told."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from tq.lab.net import hosts
from tq.lab.net.crew import Crew
from tq.lab.net.hosts import Lab
from tq.lab.stacks import catalog, elastic, exits, failures, pace
from tq.lab.stacks.__main__ import main
from tq.lab.stacks.catalog import STACKS, Stack
from tq.lab.stacks.compare import Seen, fewer, seen
from tq.lab.stacks.run import StackFailed, here
from tq.lab.stacks.task import Task
from tq.lab.stacks.uncoded import Uncoded
from tq.quant.codec import Codec
from tq.train.model.gpt import PRESETS

pytestmark = pytest.mark.xdist_group("ranks")
WHY = hosts.obstacle()


def test_samples_are_the_rows_of_the_steps_in_order() -> None:
    task = Task(steps=3, batch=4)
    windows = task.dataset(7)
    for step in range(3):
        ids, targets = task.corpus.batch(step, 4, 128, 7)
        for row in range(4):
            given = windows[4 * step + row]
            assert torch.equal(given[0], ids[row]) and torch.equal(given[1], targets[row])
    assert len(windows) == 12


def test_ranks_share_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    task, rows = Task(steps=3, batch=4), []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        rows.append([ids for ids, _ in task.batches(5, first=1)])
    assert [len(each) for each in rows] == [2, 2]
    whole = task.corpus.batch(1, 4, 128, 5)[0]
    assert torch.equal(torch.stack([rows[0][0], rows[1][0]], 1).flatten(0, 1), whole)


def test_a_task_knows_its_ways() -> None:
    ways = {"plain": "gloo", "forward": "tq", "bf16": "tq", "backend": "tq", "hook": "gloo"}
    assert {way: Task(way=way).backend for way in ways} == ways
    with pytest.raises(ValueError, match="way must be one of plain, forward, bf16, backend, hook, optimizer, got 'no"):
        Task(way="none")
    assert type(Task(way="hook").codec) is Codec and type(Task(way="hook", codes=False).codec) is Uncoded
    with pytest.raises(ValueError, match="codes=False goes with a backend, a hook or an optimizer, got way='plain'"):
        Task(codes=False)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_without_codes_numbers_are_what_they_were(dtype: torch.dtype) -> None:
    codec, x = Uncoded(), torch.randn(3, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    code = codec.encode(x)
    assert torch.equal(codec.decode(code), x) and code.nbytes == 3 * (4 * 128 + 4)
    assert codec.at_step(1).derive("a") != codec and type(codec.at_step(1)) is Uncoded and codec != Codec()
    total = torch.ones(300)
    codec.decode(codec.encode(x.view(-1), factor=0.5), out=total, accumulate=True)
    assert torch.equal(total, 1 + (x * 0.5).float().view(-1))
    with pytest.raises(ValueError, match="rows=True"):
        codec.encode(x, rows=True)


def told(rank: int, digest: str) -> dict:
    step = {"all_reduce": [200.0, 25.0], "all_gather": [10.0, 10.0]}
    run = {
        "seed": 0, "valid": 3.0, "digest": digest, "seconds": [9.0, 1.0 + rank, 2.0], "sent": [900, 100, 300],
        "held": [40, 80 + rank],
        "counted": [{"all_reduce": [999.0, 999.0]}, step, step],
    }  # fmt: skip
    return {"rank": rank, "runs": [run]}


def test_what_ranks_told_is_taken_together() -> None:
    found = seen([told(0, "a"), told(1, "a")], skip=1)
    assert found.equal and found.seconds == [2.0, 2.0] and found.step_s == 2.0 and found.sent == 200
    assert (found.gradients, found.coded, found.others) == (200.0, 25.0, 10.0)
    assert found.held == [120, 121] and found.sent_by_all == 400
    assert not seen([told(0, "a"), told(1, "b")], skip=1).equal


def bytes_of(sent: float, gradients: float, coded: float, others: float) -> Seen:
    return Seen([3.0], True, [1.0], sent, gradients, coded, others, [1, 1])


def test_bytes_of_gradients_are_told_by_the_run_with_the_codec_off() -> None:
    off = bytes_of(1100, 600, 610, 390)  # 1.1 at the interface for a byte that was counted; scales are ten of them
    assert off.framing == pytest.approx(1.1)
    assert fewer(off, bytes_of(1.1 * (390 + 80), 600, 80, 390)) == pytest.approx(600 / 80)
    assert fewer(off, bytes_of(1.1 * (390 + 80), 0, 0, 0)) == pytest.approx(600 / 80), "a hook is not counted"
    assert fewer(off, bytes_of(0, 600, 80, 390)) == 600 / 80, "no interface"
    for nothing in (bytes_of(0, 600, 610, 390), bytes_of(1100, 0, 0, 0)):
        with pytest.raises(ValueError, match="no ratio"):
            _ = nothing.framing


def test_fsdp_trains_alike_by_hook_and_backend_and_as_ddp() -> None:
    ways = (("ddp", "forward"), ("fsdp", "forward"), ("fsdp", "backend"), ("fsdp", "hook"))
    found = {(name, way): seen(here(STACKS[name], way=way, steps=6, seeds=[3])) for name, way in ways}
    assert all(each.equal for each in found.values())
    plain, coded = found["fsdp", "forward"], found["fsdp", "backend"]
    assert plain.valid == pytest.approx(found["ddp", "forward"].valid, abs=1e-5)
    assert found["fsdp", "hook"].valid == coded.valid != plain.valid, "the same seeds, the same sums"
    assert plain.gradients == plain.coded == coded.gradients > 7 * coded.coded
    sharded = 4 * PRESETS["tiny"].num_parameters / 2  # a rank's weights go to the other one, in both passes
    assert coded.others == plain.others and sharded < plain.others < 2 * sharded, "the last module stays gathered"


@pytest.mark.parametrize("name", ("ddp", "fsdp"))
@pytest.mark.parametrize("way", ("backend", "hook"))
def test_with_the_codec_off_a_way_trains_as_fp32_does(name: str, way: str) -> None:
    off, plain = (seen(here(STACKS[name], steps=6, **task)) for task in ({"way": way, "codes": False}, {}))
    assert off.equal and off.valid == pytest.approx(plain.valid, abs=1e-5)
    if way == "backend":
        assert off.gradients < off.coded < 1.01 * off.gradients, "a scale for each block"
    replica = 12 * PRESETS["tiny"].num_parameters  # fp32 weights and two moments
    assert off.held == [replica, replica] if name == "ddp" else sum(off.held) == replica and min(off.held) > 0


@pytest.mark.parametrize("name", ("ddp", "fsdp"))
def test_gradients_of_sixteen_bits_are_the_engine_s_own(name: str) -> None:
    half, plain = (seen(here(STACKS[name], steps=6, way=way)) for way in ("bf16", "forward"))
    assert half.equal and half.valid != plain.valid and half.valid == pytest.approx(plain.valid, abs=0.01)
    assert half.gradients == half.coded == plain.gradients / 2 and half.others == plain.others


def test_a_program_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StackFailed, match="PyTorch DDP: ended with 1"):
        here(STACKS["ddp"], steps=0, batch=-1)
    with pytest.raises(StackFailed, match="after 0.01 s still at work"):
        here(STACKS["ddp"], timeout_s=0.01)


def test_stacks_are_pinned_and_named() -> None:
    for stack in STACKS.values():
        assert all("==" in pin for pin in stack.needs), stack.name
        assert set(stack.ways) <= {"backend", "hook", "optimizer", "bf16"} and stack.changes
    assert [stack.module for stack in STACKS.values()] == list(catalog.PROGRAMS)
    assert all(importlib.util.find_spec(program) for program in catalog.PROGRAMS)


def test_a_stack_is_installed_once(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TQ_STACKS", str(tmp_path))
    stack, ran = Stack("other", "Other 1.0", ("other==1.0", "more==2"), environment={"BUILD": "0"}), []
    monkeypatch.setattr(catalog.subprocess, "run", lambda argv, **named: (stack.folder.mkdir(), ran.append(argv)))
    assert stack.obstacle() == "Other 1.0 is not installed (python -m tq.lab.stacks install other)"
    stack.install()
    stack.install()
    assert len(ran) == 1 and ran[0][-2:] == ["other==1.0", "more==2"] and "--no-deps" in ran[0]
    assert stack.obstacle() is None
    changed = Stack("other", "Other 1.0", ("other==1.1", "more==2"))
    assert changed.obstacle() is not None


def test_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["list"]) == 0
    assert "PyTorch DDP" in capsys.readouterr().out
    monkeypatch.setenv("TQ_STACKS", "/nonexistent")
    assert main(["run", "trainer"]) == 1
    assert "is not installed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "none"])


@pytest.mark.parametrize("kind", list(failures.KINDS))
def test_a_broken_group_is_told_on_all_ranks(kind: str) -> None:
    program = f"import json; from tq.lab.stacks import failures; print(json.dumps(failures.trial({kind!r}, 3)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["told"] == found["asked"] and found["s"] < 10, found
    taken = {"two_hooks": failures.EXACT, "two_warmups": found["at"], "two_codecs": 0, "two_versions": 0}
    assert set(found["steps"]) == {taken[kind]} if kind in taken else max(found["steps"]) >= found["at"] - 1, found


@pytest.mark.parametrize(("starts", "ends", "told"), [(1.5, 0.0, 3), (0.0, 30.0, 0)])
def test_ranks_are_waited_for_from_the_moment_that_something_is_wrong(starts: float, ends: float, told: int) -> None:
    program = f"""
import json, time
from tq.lab.stacks import failures
def slow(trial):
    time.sleep({starts})  # as while kernels are compiled
    trial.tell()
    time.sleep({ends})
    raise RuntimeError("of all ranks")
failures.PATIENCE_S, failures.KINDS["slow"] = 1.0, slow
print(json.dumps(failures.trial("slow", 0)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=25, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["told"] == told


def test_kills_are_drawn_among_exact_and_quantized_steps() -> None:
    found = [failures.drawn("rank_dies", seed) for seed in range(40)]
    assert found == [failures.drawn("rank_dies", seed) for seed in range(40)]
    ranks, steps, moments = (set(each) for each in zip(*found, strict=True))
    assert ranks == {0, 1, 2} and len(steps) > 10 and len(moments) == 40
    assert min(steps) < failures.EXACT <= max(steps) < 2 * failures.EXACT


@pytest.mark.parametrize("kind", exits.KINDS)  # the chapter runs them often
def test_interpreters_end_well(kind: str) -> None:
    assert exits.run(kind) == {"kind": kind, "codes": [0, 0], "said": ["", ""]}


def test_an_end_that_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "PATIENCE_S", 0.2)
    assert exits.run("left")["codes"] == [None, None]


def step(rank: int, ranks: int, number: int, at: float, calls: int, weights: str = "a") -> dict:
    return {"rank": rank, "ranks": ranks, "step": number, "at": at, "calls": calls, "weights": weights}


def test_what_workers_told_of_a_lost_host() -> None:
    before = [step(rank, 3, number, number, 2 * number) for number in (1, 2) for rank in range(3)]
    after = [step(rank, 2, 2, 9.0, 5) for rank in range(2)]
    assert elastic._went_on(before + after, 8.0, 2) == (2, True) and elastic._equal(before + after)
    again = [step(rank, 2, 2, 9.0, 1) for rank in range(2)]
    assert elastic._went_on(before + again, 8.0, 2) == (2, False), "codes were numbered from the start again"
    assert not elastic._equal([*before, *after, step(0, 2, 2, 9.5, 5, "b")])


@pytest.mark.soak
@pytest.mark.skipif(WHY is not None, reason=f"needs hosts: {WHY}")
def test_a_host_is_lost_and_comes_back() -> None:
    with Lab(3) as lab:
        found = elastic.churn(lab, 2)
    assert found["equal"] and found["carried"] and max(found["lost_steps"]) <= 5 and max(found["lost_s"]) < 60


@pytest.mark.skipif(WHY is not None, reason=f"needs hosts: {WHY}")
def test_ways_step_in_turn_in_the_same_processes() -> None:
    with Lab(2) as lab, Crew(lab) as crew:
        found = crew.call(pace.in_turn, rounds=2, warm=1, preset="tiny", batch=2)
    for rank in found:
        assert set(rank) == set(pace.WAYS) and all(len(each) == 2 and min(each) > 0 for each in rank.values())
