"""Channels and their streams are made once; messages arrive alike by tags and by the library's collectives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.helpers import values
from tq import Codec
from tq.train import _torch_private, collectives
from tq.train.collectives import HookState, Mean, all_gather_mean, all_reduce, background, over_group
from tq.train.comm import channels
from tq.train.comm.channels import BEHIND, Messages, channel_of, new_channel


def counted(rank: int, ranks: int) -> dict[str, int]:
    """Threads and process groups that five asynchronous calls make, plainly and where there are no tags."""
    made = {"threads": 0, "groups": 0}

    def pool(*arguments: Any) -> ThreadPoolExecutor:
        made["threads"] += 1
        return ThreadPoolExecutor(*arguments)

    def new_group(*arguments: Any, **options: Any) -> Any:
        made["groups"] += 1
        return dist.group.WORLD

    channels.ThreadPoolExecutor = pool  # type: ignore[misc, assignment]
    for _ in range(5):
        work = all_reduce(torch.ones(300), Codec(4), async_op=True)
        assert work is not None
        work.wait()
        background(Mean(torch.ones(300))).wait()
    plain = dict(made)
    pair = dist.new_group([0, 1])
    dist.get_backend, dist.new_group = lambda group: "nccl", new_group
    _torch_private.timeout = lambda group, device: None  # type: ignore[assignment, return-value]
    found = [channel_of(pair, BEHIND) for _ in range(5)]
    owned = [new_channel(pair) for _ in range(2)]
    direct = channel_of(pair)
    assert len({id(channel) for channel in found}) == 1 and len({c.number for c in [*found, *owned, direct]}) == 4
    assert direct.group == pair and found[0].group == dist.group.WORLD
    return {**{f"plain {k}": n for k, n in plain.items()}, **{k: n - plain[k] for k, n in made.items()}}


def test_a_channel_is_made_once(tmp_path: Path) -> None:
    """A thread for all asynchronous calls; without tags also a process group, and one more for each owner."""
    expected = {"plain threads": 1, "plain groups": 0, "threads": 3, "groups": 3}
    assert values(2, tmp_path, counted) == [expected] * 2


def exchanged(rank: int, ranks: int, tagged: bool) -> list[Tensor]:
    for number in (channels.DIRECT, BEHIND):
        channel_of(None, number).tagged = tagged
    calls, kinds = [], []
    whole = dist.all_to_all_single, channels.all_gather
    for name, of, call in (("all_to_all_single", dist, whole[0]), ("all_gather", channels, whole[1])):
        setattr(of, name, lambda *a, call=call, name=name, **k: (kinds.append(name), call(*a, **k))[1])
    for numel in (1, 500, 70_003):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        calls.append(x.clone())
        all_reduce(calls[-1], Codec(4))
        calls.append(x.clone())
        work = all_reduce(calls[-1], Codec(2), async_op=True, step=3)
        assert work is not None
        work.wait()
        calls.append(x.clone())
        background(Mean(calls[-1])).wait()
    x = torch.randn(3000, generator=torch.Generator().manual_seed(rank))
    own = collectives.chunk_numel(3000, 128, rank, ranks)
    asked = Mean(x, (Codec(2), Codec(2)), residuals=(torch.ones(3000), torch.ones(own)))
    (answer,) = over_group([asked])
    assert answer.residuals is not None
    total = torch.cat([answer.mean, *answer.residuals])
    assert (not kinds) == tagged and (tagged or set(kinds) == {"all_to_all_single", "all_gather"})
    return [*calls, total]


def test_messages_arrive_alike_by_tags_and_by_collectives(tmp_path: Path) -> None:
    """The path that GPUs take, on CPUs: the same bits."""
    for ranks in (2, 3):
        both = [values(ranks, tmp_path / f"{ranks} {tagged}", exchanged, tagged) for tagged in (True, False)]
        for mine, others in zip(*both, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def gathered(rank: int, ranks: int) -> list[int]:
    found = []
    for tagged in (True, False):
        channel = new_channel(None)
        channel.tagged = tagged
        x = torch.full((300,), float(rank))
        channel_of(None).tagged = tagged
        all_gather_mean(x, Codec(8))
        found.append(round(x.mean().item() * 2))
        messages = Messages(3, torch.device("cpu"), channel, 5)
        messages.send_all(torch.tensor([rank, rank, 7], dtype=torch.uint8))
        found += messages.wait()[:, 0].tolist()
    return found


def test_a_gathering_by_tags_and_by_collectives(tmp_path: Path) -> None:
    assert values(3, tmp_path, gathered) == [[2, 0, 1, 2] * 2] * 3


class FakeStream:
    made = 0

    def __init__(self, device: torch.device) -> None:
        type(self).made += 1
        self.seen: list[str] = []

    def wait_stream(self, other: str) -> None:
        self.seen.append(f"waits for {other}")


def on_a_stream(rank: int, ranks: int) -> tuple[int, list[str], float]:
    """The hook's way on a GPU, with streams that only keep a record."""
    seen: list[str] = []

    @contextmanager
    def entered(stream: FakeStream) -> Any:
        stream.seen.append("enters")
        yield
        stream.seen.append("leaves")

    torch.cuda.Stream, torch.cuda.stream = FakeStream, entered  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda device: "the caller's"  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: stream.seen.append("keeps the memory")  # type: ignore[method-assign, assignment]
    future = torch.futures.Future
    torch.futures.Future = lambda devices: future()  # type: ignore[misc, assignment]
    state = HookState(Codec(8), warmup=0)
    for step in range(5):
        x = torch.full((300,), float(rank))
        answer = collectives._on_stream(state, x, (step, 0)).wait()
        assert answer is x
    seen = state.channel.stream(torch.device("cpu")).seen
    return FakeStream.made, seen[:4], round(x.mean().item(), 1)


def test_the_hook_runs_on_one_stream_that_waits_for_the_callers(tmp_path: Path) -> None:
    expected = (1, ["waits for the caller's", "enters", "keeps the memory", "leaves"], 0.5)
    assert values(2, tmp_path, on_a_stream) == [expected] * 2
