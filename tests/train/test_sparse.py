"""Deep gradient compression: its messages, its sums against the authors' lines, its bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.train.optim import TurboQuantAdamW, simulate_ranks, step_together
from tq.train.schemes.sparse import SGD, chosen, dgc, pack, share_of_step, unpack


def test_warmup_is_the_papers() -> None:
    assert [share_of_step(epoch, 4) for epoch in range(1, 7)] == [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]
    assert share_of_step(1, 0) == 0.001 and share_of_step(3, 4, 0.1) == 0.1  # never below what is wanted


@given(st.integers(1, 300), st.integers(1, 60), st.integers(0, 99))
def test_messages_come_back(numel: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    indices = torch.randperm(numel, generator=generator)[:count].sort().values
    message = pack(x, indices)
    assert message.dtype == torch.uint8 and message.numel() == 6 * len(indices)
    dense = unpack(message, numel)
    assert torch.equal(dense[indices], x[indices].half().float()) and int((dense != 0).sum()) <= len(indices)


def test_broken_messages_are_refused() -> None:
    message = pack(torch.ones(4), torch.tensor([3]))
    with pytest.raises(ValueError, match="outside"):
        unpack(message, 3)
    for broken in (message[:-1], message.float()):
        with pytest.raises(ValueError, match="6 k"):
            unpack(broken, 4)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.001, 1), st.integers(0, 99))
def test_the_largest_of_every_matrix_and_whole_vectors(rows: int, columns: int, share: float, seed: int) -> None:
    shapes = [torch.Size((rows, columns)), torch.Size((5,)), torch.Size((columns, rows))]
    x = torch.randn(2 * rows * columns + 5, generator=torch.Generator().manual_seed(seed))
    indices = chosen(x, shapes, share)
    assert torch.equal(indices, indices.unique())
    count = max(1, round(share * rows * columns))
    parts = x.split([shape.numel() for shape in shapes])
    mask = torch.zeros(x.numel(), dtype=torch.bool).index_fill_(0, indices, True).split([len(p) for p in parts])
    assert [int(m.sum()) for m in mask] == [count, 5, count]
    for part, kept in ((parts[0], mask[0]), (parts[2], mask[2])):
        assert kept.all() or part[kept].abs().min() >= part[~kept].abs().max()


def models(ranks: int) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 9, bias=False), torch.nn.Linear(9, 3, bias=False))
    return [copy.deepcopy(model) for _ in range(ranks)]


def gradients(model: torch.nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def theirs(ranks: int, steps: int, lr: float, share: float, clip: float) -> list[torch.Tensor]:
    """Algorithm 4 of the paper, line by line: local clipping, momentum correction, factor masking."""
    replicas = models(ranks)
    weights = [p.detach().clone() for p in replicas[0].parameters()]
    u = [[torch.zeros_like(w) for w in weights] for _ in range(ranks)]
    v = [[torch.zeros_like(w) for w in weights] for _ in range(ranks)]
    for step in range(steps):
        total = [torch.zeros_like(w) for w in weights]
        for rank, model in enumerate(replicas):
            gradients(model, rank, step)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for i, p in enumerate(model.parameters()):
                assert p.grad is not None
                u[rank][i] = 0.9 * u[rank][i] + p.grad
                v[rank][i] = v[rank][i] + u[rank][i]
                count = max(1, round(share * p.numel()))
                threshold = v[rank][i].abs().flatten().sort(descending=True).values[count - 1]
                mask = v[rank][i].abs() >= threshold
                total[i] += (v[rank][i] * mask).half().float()
                v[rank][i], u[rank][i] = v[rank][i] * ~mask, u[rank][i] * ~mask
        weights = [w - lr * t / ranks for w, t in zip(weights, total, strict=True)]
    return weights


def ours(ranks: int, steps: int, lr: float, scheme: object, clip: float) -> tuple[list[torch.Tensor], float]:
    replicas = models(ranks)
    optimizers = [
        TurboQuantAdamW(
            m.parameters(), lr, (0.9, 0.95), 1e-12, weight_decay=0.0, variant=scheme, max_norm=clip, warmup=0
        )
        for m in replicas
    ]  # fmt: skip
    simulate_ranks(optimizers)
    for step in range(steps):
        for rank, model in enumerate(replicas):
            gradients(model, rank, step)
        step_together(optimizers)
    for model in replicas[1:]:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), replicas[0].parameters(), strict=True))
    return [p.detach() for p in replicas[0].parameters()], optimizers[0].bytes_sent


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_as_the_authors_write_it(share: float) -> None:
    expected = theirs(3, 12, 0.1, share, 2.0)
    found, sent = ours(3, 12, 0.1, dgc(share), 2.0)
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=2e-5)
    counts = sum(max(1, round(share * numel)) for numel in (12 * 9, 9 * 3))
    assert sent == 12 * 2 * 6 * counts


def test_with_all_entries_it_is_sgd() -> None:
    """But for fp16: the velocity is cleared as it is sent, so only without momentum is it the same."""
    expected, _ = ours(2, 1, 0.1, SGD, 1e9)
    found, _ = ours(2, 1, 0.1, dgc(1.0), 1e9)
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(found, expected, strict=True))


def test_our_sgd_is_pytorchs() -> None:
    found, _ = ours(2, 10, 0.05, SGD, 1e9)
    model, replicas = models(1)[0], models(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(10):
        for rank, replica in enumerate(replicas):
            gradients(replica, rank, step)
        for p, *same in zip(model.parameters(), *(r.parameters() for r in replicas), strict=True):
            p.grad = torch.stack([q.grad for q in same if q.grad is not None]).mean(0)
        optimizer.step()
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, model.parameters(), strict=True))


def test_under_adamw_nothing_waits_for_ever() -> None:
    """What is not sent is added up: after clipping is taken away, the sum over steps is the sum of what was sent and
    what waits."""
    found, sent = ours(2, 5, 1e-3, dgc(0.1, optimizer="adamw"), 1e9)
    assert all(torch.isfinite(each).all() for each in found) and sent > 0


def test_hostile_settings() -> None:
    for call in (lambda: dgc(0.0), lambda: dgc(1.5), lambda: dgc(0.1, -1), lambda: share_of_step(0, 4)):
        with pytest.raises(ValueError, match="share"):
            call()
    with pytest.raises(ValueError, match="optimizer"):
        dgc(optimizer="lamb")
