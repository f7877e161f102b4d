"""Ranks compare what they ask for as often as they must, and an error of one rank alone is told as that."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.helpers import outcomes, values
from tq import Codec
from tq.train import collectives
from tq.train.collectives import (
    GroupError,
    HookState,
    Mean,
    ReduceScatter,
    all_gather_mean,
    all_reduce,
    background,
    ddp_hook,
    over_group,
)  # fmt: skip
from tq.train.comm import agreement, pipeline
from tq.train.comm.agreement import EVERY, Request, check_consistent
from tq.train.comm.channels import BEHIND, Messages, channel_of

CPU = torch.device("cpu")


def said_by(call: Callable[[], object]) -> str:
    """What it raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'ranks', '')} {error}"
    return "nothing"


# --- what is compared -----------------------------------------------------------------------------------------


def comparisons(rank: int, ranks: int, checks: str) -> tuple[list[int], int]:
    """Comparisons up to each step: the shapes of two buckets, and a third one from step 10 on."""
    channel, made = channel_of(None), []
    channel.checks = checks
    swap = agreement._swap
    agreement._swap = lambda *arguments: (made.append(0), swap(*arguments))[1]
    counts = []
    for step in range(20):
        for bucket, numel in enumerate((300, 500, 700) if step >= 10 else (300, 500)):
            x = torch.full((numel,), float(rank))
            pipeline.mean_over([(x, (step, bucket))], (Codec(8), Codec(8)))
            assert abs(x.mean().item() - (ranks - 1) / 2) < 0.01
        counts.append(len(made))
    return counts, len(channel.agreed)


def test_each_configuration_is_compared_once_where_an_answer_must_be_waited_for(tmp_path: Path) -> None:
    each = [2 * (step + 1) + max(0, step - 9) for step in range(20)]
    assert values(2, tmp_path / "each", comparisons, "each") == [(each, 0)] * 2
    once = [2 + (step >= 10) for step in range(20)]
    assert values(2, tmp_path / "once", comparisons, "once") == [(once, 3)] * 2


def remembered(rank: int, ranks: int) -> tuple[int, int]:
    """(configurations kept, comparisons) where sizes change in every step."""
    agreement.REMEMBERED, made, swap = 4, [], agreement._swap
    agreement._swap = lambda *arguments: (made.append(0), swap(*arguments))[1]
    channel = channel_of(None)
    for size in (*range(1, 13), 12, 9, 1):  # the last one was forgotten
        check_consistent(Request("a mean", tensors=((size, torch.float32),)), CPU, channel, "once")
    return len(channel.agreed), len(made)


def test_what_is_remembered_has_a_bound(tmp_path: Path) -> None:
    assert values(2, tmp_path, remembered) == [(4, 13)] * 2


def other_steps(rank: int, ranks: int) -> tuple[int, str]:
    """Rank 1 leaves out a step; the call in which that is noticed, and how."""
    channel = channel_of(None)
    for call in range(1, 3 * EVERY):
        step = call + (rank == 1 and call > 5)
        asked = Request("a mean", (Codec(4),), ((100, torch.float32),), ((step, 0),))
        if (said := said_by(lambda: check_consistent(asked, CPU, channel, "once"))) != "nothing":  # noqa: B023
            return call, said
    return 0, "nothing"


def test_steps_are_compared_now_and_then(tmp_path: Path) -> None:
    for call, said in values(3, tmp_path, other_steps):
        assert call == EVERY and said.startswith("GroupError (1,) rank 1 asks for"), said
        assert f"step {EVERY + 1}/0, others" in said and said.endswith(f"step {EVERY}/0")


def late(rank: int, ranks: int) -> str:
    """Where it is compared once, a rank that asks for something new finds the others at something known."""
    channel_of(None).checks = "once"
    for step in range(3):
        all_reduce(torch.ones(1000), Codec(4), step=step)
    start = time.monotonic()
    said = said_by(lambda: all_reduce(torch.ones(1000), Codec(2 if rank == 1 else 4), step=3))
    assert time.monotonic() - start < 15
    return said


def test_a_difference_that_nobody_compared_is_told_after_the_failure(tmp_path: Path) -> None:
    found = outcomes(3, tmp_path, late, timeout_s=3)
    for outcome in found:
        said = outcome.get("value", outcome.get("error"))
        assert "rank 1 asks for a mean of 1000 x float32 by Codec(bits=2" in said, said


def far_down(rank: int, ranks: int) -> str:
    """The ranks' requests differ in the 91st of a hundred tensors, whose sizes are written out after two codecs."""
    sizes = [1000 + n for n in range(100)]
    sizes[90] += rank == 1
    tensors: list[tuple[Tensor, pipeline.Key]] = [(torch.ones(n), (0, number)) for number, n in enumerate(sizes)]
    codecs = Codec(4, search=64, seed=2**64 - 1, scale_dtype=torch.bfloat16), Codec(2, search=64, seed=2**64 - 1)
    return said_by(lambda: pipeline.mean_over(tensors, codecs))


def test_a_difference_far_down_a_list_is_found_and_named(tmp_path: Path) -> None:
    for said in values(3, tmp_path, far_down):
        assert said.startswith("GroupError (1,) rank 1 asks for a mean of 1091 x float32 (number 90 of 100) by"), said
        assert "others for a mean of 1090 x float32 (number 90 of 100) by" in said


def unknown(rank: int, ranks: int) -> str:
    return said_by(lambda: check_consistent(Request("a mean"), CPU, channel_of(None), "never"))


def test_bad_arguments(tmp_path: Path) -> None:
    (said,) = values(1, tmp_path, unknown)
    assert said == "ValueError  checks must be one of each, once, got 'never'"
    for state in ({}, {"step": "1"}, {"step": 1, "bits": 4}):
        with pytest.raises(ValueError, match="not a state of ReduceScatter: it must have an int as 'step'"):
            ReduceScatter(Codec(4)).load_state_dict(state)


# --- an error of one rank -------------------------------------------------------------------------------------


def failing(name: str, calls: int, mean: bool | None = None) -> None:
    """From now on the codec's encode (mean: of a mean, or not of one) or decode runs out of memory, once, at a call."""
    whole, left = getattr(Codec, name), [calls]

    def once(self: Codec, *arguments: Any, **options: Any) -> Any:
        if mean is None or mean == ("factor" in options):
            left[0] -= 1
            if left[0] == 0:
                setattr(Codec, name, whole)
                raise torch.OutOfMemoryError("not enough memory: you tried to allocate 4 bytes")
        return whole(self, *arguments, **options)

    setattr(Codec, name, once)


def scatter() -> None:
    out = torch.empty(1000)
    ReduceScatter(Codec(4))(out, torch.ones(dist.get_world_size() * 1000), dist.group.WORLD, dist.ReduceOp.AVG)


def fed_back() -> None:
    own = pipeline.chunk_numel(1000, 128, dist.get_rank(), dist.get_world_size())
    over_group([Mean(torch.ones(1000), (Codec(4), Codec(4)), residuals=(torch.ones(1000), torch.ones(own)))])


def behind() -> None:
    work = all_reduce(torch.ones(1000), Codec(4), async_op=True)
    assert work is not None
    work.wait()


def in_front() -> None:
    all_reduce(torch.ones(1000), Codec(4))


def in_pieces() -> None:
    pipeline.mean_over([(torch.ones(5000), (0,))], (Codec(4), Codec(4)), piece=512)


def asked_behind() -> None:
    background(Mean(torch.ones(1000), (Codec(4), Codec(4)))).wait()


CALLS: dict[str, tuple[Callable[[], object], tuple[str, int, bool | None]]] = {
    "first message": (in_front, ("encode", 1, False)),
    "second message": (in_front, ("encode", 2, False)),
    "mean": (in_front, ("encode", 1, True)),
    "fourth piece": (in_pieces, ("encode", 7, False)),
    "feedback": (fed_back, ("encode", 2, None)),
    "decoding of the first phase": (in_front, ("decode", 1, None)),
    "in the background": (behind, ("encode", 2, False)),
    "a request in the background": (asked_behind, ("encode", 1, True)),
    "gathering": (lambda: all_gather_mean(torch.ones(1000), Codec(4)), ("encode", 1, None)),
    "reduce-scatter": (scatter, ("encode", 2, None)),
}


def one_fails(rank: int, ranks: int) -> dict[str, str]:
    """Rank 1 fails in each of the calls; afterwards all can still be used."""
    for call, _ in CALLS.values():
        call()  # the time below is not to hold the compiler's
    all_reduce(torch.ones(10), Codec(8))
    found, start = {}, time.monotonic()
    for name, (call, where) in CALLS.items():
        if rank == 1:
            failing(*where)
        found[name] = said_by(call)
    for of in (all_reduce, all_gather_mean):
        x = torch.full((1000,), float(rank))
        of(x, Codec(8))
        assert abs(x.mean().item() - (ranks - 1) / 2) < 0.01
    assert time.monotonic() - start < 20  # the group would wait for 60
    return found


@pytest.mark.parametrize("ranks", (2, 3))
def test_an_error_of_one_rank_is_its_own(ranks: int, tmp_path: Path) -> None:
    own = "OutOfMemoryError  not enough memory: you tried to allocate 4 bytes"
    others = "GroupError (1,) rank 1 failed: OutOfMemoryError: not enough memory: you tried to allocate 4 bytes"
    for rank, found in enumerate(values(ranks, tmp_path, one_fails)):
        assert found == dict.fromkeys(CALLS, own if rank == 1 else others)


def fails_and_leaves(rank: int, ranks: int, late: bool) -> float:
    """Rank 0 fails, where the others cannot notice any more or before it has sent anything, and its process ends."""
    all_reduce(torch.ones(ranks * 128), Codec(4))  # compiled before anybody waits
    start = time.monotonic()
    if rank == 0:
        if late:
            failing("decode", 2 * ranks, None)
        else:
            pipeline.new_messages = None  # type: ignore[assignment]
    for step in range(5):
        try:
            all_reduce(torch.ones(ranks * 128), Codec(4), step=step)
        except GroupError as error:
            assert step == int(late), step
            raise RuntimeError(f"{error.ranks} {error} within {time.monotonic() - start:.0f} s") from error
    return 0.0


@pytest.mark.parametrize("late", (True, False))
def test_a_rank_that_failed_and_left_is_named_with_its_error(late: bool, tmp_path: Path) -> None:
    found = outcomes(3, tmp_path, fails_and_leaves, late, timeout_s=30)
    own = "not enough memory: you tried to allocate 4 bytes" if late else "'NoneType' object is not callable"
    assert own in found[0]["error"] and "GroupError" not in found[0]["error"]
    for outcome in found[1:]:
        assert f"(0,) rank 0 failed: {'OutOfMemoryError' if late else 'TypeError'}: {own}" in outcome["error"], outcome


def fails_and_stays(rank: int, ranks: int) -> str:
    """Rank 0 fails where the others do not notice, and goes on; in the next call rank 2 fails."""
    said = []
    for step in range(2):
        if rank == 2 * step:
            failing(*(("decode", 2 * ranks, None) if step == 0 else ("encode", 1, None)))
        said.append(said_by(lambda: all_reduce(torch.ones(ranks * 128), Codec(4), step=step)))  # noqa: B023
    return " | ".join(said)


def test_a_rank_that_failed_and_stayed_is_not_blamed_for_the_next_failure(tmp_path: Path) -> None:
    own = "OutOfMemoryError  not enough memory: you tried to allocate 4 bytes"
    others = "GroupError (2,) rank 2 failed: OutOfMemoryError: not enough memory: you tried to allocate 4 bytes"
    assert values(3, tmp_path, fails_and_stays) == [f"{own} | {others}", f"nothing | {others}", f"nothing | {own}"]


def dies_later(rank: int, ranks: int) -> None:
    all_reduce(torch.ones(ranks * 128), Codec(4))  # or one rank might still compile what the other has waited for
    if rank == 0:
        failing("decode", 2 * ranks, None)
    for step in range(3):
        if rank == 2 and step == 1:
            os._exit(9)
        try:
            all_reduce(torch.ones(ranks * 128), Codec(4), step=step)
        except torch.OutOfMemoryError:
            assert (rank, step) == (0, 0)


def test_nor_for_another_ranks_death(tmp_path: Path) -> None:
    found = outcomes(3, tmp_path, dies_later, timeout_s=20)
    assert found[2] == {}
    for outcome in found[:2]:
        assert "no answer from rank 2" in outcome["error"], outcome


def dies_while_others_wait(rank: int, ranks: int, when: str) -> str:
    """The last rank dies, and some that wait for others do not see it."""
    call = (lambda: all_gather_mean(torch.ones(1000), Codec(4))) if when == "in a ring" else in_front
    call()
    send = Messages.send
    if rank == ranks - 1:
        if when == "before the call":
            time.sleep(0.5)
            os._exit(9)
        if when == "halfway":
            Messages.turns = lambda self: [1, 0, 2]  # type: ignore[method-assign]
            Messages.send = lambda self, to, sent: os._exit(9) if to == 0 else send(self, to, sent)  # type: ignore[method-assign]
        collectives.pass_round = lambda *_: os._exit(9)
    if when == "before the call" and rank == 0:  # it alone can see that the last one is gone; rank 1 waits for it
        time.sleep(1.5)
    said = said_by(call)
    assert said_by(call).endswith(f"an earlier collective failed, and its group with it: {said.split(') ', 1)[1]}")
    return said


@pytest.mark.parametrize("when", ("before the call", "halfway", "in a ring"))
def test_who_waits_for_a_rank_that_has_failed_is_told(when: str, tmp_path: Path) -> None:
    ranks, start = 4 if when == "in a ring" else 3, time.monotonic()
    found = outcomes(ranks, tmp_path, dies_while_others_wait, when)
    assert time.monotonic() - start < 40 and found[-1] == {}
    for rank, outcome in enumerate(found[:-1]):
        says = f"GroupError ({ranks - 1},) a collective of rank {rank} failed, no answer from rank {ranks - 1}: "
        assert says in outcome["value"], outcome


def dies_while_another_is_late(rank: int, ranks: int) -> str:
    all_reduce(torch.ones(1000), Codec(4))
    if rank == 0:
        os._exit(9)
    time.sleep(0 if rank == 2 else agreement.GRACE_S + 2)
    return said_by(in_front)


def test_a_late_rank_is_not_taken_for_a_dead_one(tmp_path: Path) -> None:
    found = outcomes(3, tmp_path, dies_while_another_is_late)
    late = "no answer from rank 0, and none within 3 s from rank 1, which can be reached: "
    assert f"GroupError (0,) a collective of rank 2 failed, {late}" in found[2]["value"], found
    assert "GroupError (0,) a collective of rank 1 failed, no answer from rank 0: " in found[1]["value"], found


def fails_where_nothing_is_kept(rank: int, ranks: int) -> tuple[str, float]:
    """Rank 1 fails beside the encoding, where the others already wait for it, and stays."""
    in_front()
    start, made = time.monotonic(), torch.empty
    if rank == 1:
        torch.empty = lambda *_, **__: made(1 << 60)  # type: ignore[assignment]
    said = said_by(in_front)
    seconds = time.monotonic() - start
    torch.empty = made  # type: ignore[assignment]
    time.sleep(10)  # the others could not tell otherwise that it is still there
    return said, seconds


def test_a_rank_without_memory_for_messages_is_named(tmp_path: Path) -> None:
    found = values(3, tmp_path, fails_where_nothing_is_kept)
    assert found[1][0].startswith("OutOfMemoryError") and "memory" in found[1][0]
    for said, seconds in (found[0], found[2]):
        assert said.startswith("GroupError (1,) rank 1 failed: OutOfMemoryError: ") and seconds < 9, found


def a_call_apart(rank: int, ranks: int, notes: list[tuple[int, bool]]) -> str:
    """What the ranks whose own last note is of no error of theirs say; notes: (call, own error) of each."""
    channel, (channel.calls, own) = channel_of(None), notes[rank]
    if own:
        agreement._leave_note(channel, ValueError(f"of {rank}"), call=0)
    dist.barrier()
    said = "" if own else str(agreement.explain(RuntimeError("closed"), channel))
    dist.barrier()
    return said


def test_a_rank_that_is_a_call_ahead_is_not_missed(tmp_path: Path) -> None:
    apart = "a collective of rank {} failed, {}: closed".format
    ends = {
        "all": ([(7, False), (8, False), (7, False)], lambda r: apart(r, "all ranks answer")),
        "failed": ([(7, False), (8, True), (7, False)], lambda r: "rank 1 failed: ValueError: of 1"),
        "went on": ([(7, False), (6, True), (7, False)], lambda r: apart(r, "no answer from rank 1")),
        "one missing": ([(7, False), (8, True), (9, True)], lambda r: apart(r, "no answer from rank 2")),
        "failed and missing": (
            [(7, False), (7, True), (9, True)],
            lambda r: "rank 1 failed: ValueError: of 1; no answer from rank 2: closed",
        ),
    }
    for name, (notes, says) in ends.items():
        found = values(3, tmp_path / name, a_call_apart, notes)
        assert found == ["" if own else says(rank) for rank, (_, own) in enumerate(notes)], name


def in_ddp(rank: int, ranks: int) -> str:
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Linear(40, 30))
    wrapped.register_comm_hook(HookState(Codec(4), warmup=0), ddp_hook)
    loss = wrapped(torch.ones(2, 40)).sum()
    if rank == 1:
        failing("encode", 1, None)
    return said_by(loss.backward)


def test_a_hook_that_fails_on_one_rank(tmp_path: Path) -> None:
    other, own = values(2, tmp_path, in_ddp)
    assert "not enough memory: you tried" in own and "rank" not in own
    assert "rank 1 failed: OutOfMemoryError: not enough memory: you tried" in other


def both(rank: int, ranks: int) -> str:
    """Asynchronous calls fail on rank 0, direct ones on rank 1: each is told of its own channel."""
    work = all_reduce(torch.ones(1000), Codec(4, seed=rank), async_op=True)
    said = said_by(lambda: all_reduce(torch.ones(1000 + rank), Codec(4)))
    assert work is not None and channel_of(None, BEHIND).calls == 1
    return f"{said_by(work.wait)} | {said}"


def test_failures_of_two_channels_are_not_mixed(tmp_path: Path) -> None:
    for said in values(3, tmp_path, both):
        behind, direct = said.split(" | ")
        assert behind.startswith("GroupError (1, 2) rank 1 asks for") and "seed=1" in behind, said
        assert direct.startswith("GroupError (1, 2) rank 1 asks for a mean of 1001 x"), said
