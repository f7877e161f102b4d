"""DiLoCo: what it computes, that processes give the bits of the simulation, and stop and resume."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.helpers import values
from tq import Codec
from tq.train.diloco import DiLoCo, agree_together

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "coded": {"codec": Codec(4)},
    "feedback": {"codec": Codec(2, scale="mse"), "feedback": True},
    "fragments": {"codec": Codec(4), "fragments": 2},
    "delayed": {"codec": Codec(4), "fragments": 2, "delay": 1},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 7))


def inner_step(replica: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    x = torch.randn(8, 30, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    (replica(x) - x[:, :7].sin()).square().mean().backward()
    optimizer.step()


class Simulated:
    """Replicas in this process."""

    def __init__(self, ranks: int, **options: Any) -> None:
        self.models = [model() for _ in range(ranks)]
        self.inner = [torch.optim.AdamW(m.parameters(), 1e-2) for m in self.models]
        self.outer = [DiLoCo(m.parameters(), 4, **options) for m in self.models]

    def run(self, first: int, end: int) -> None:
        for step in range(first, end):
            for rank, replica in enumerate(self.models):
                inner_step(replica, self.inner[rank], step, rank)
            agree_together(self.outer)

    def weights(self, rank: int = 0) -> Tensor:
        return nn.utils.parameters_to_vector(self.models[rank].parameters()).detach().clone()


def test_one_step_of_lr_one_without_momentum_is_the_mean_of_the_weights() -> None:
    both = Simulated(3, lr=1.0, momentum=0.0)
    alone = Simulated(3)
    for step in range(4):
        for rank, replica in enumerate(alone.models):
            inner_step(replica, alone.inner[rank], step, rank)
    both.run(0, 4)
    mean = torch.stack([alone.weights(r) for r in range(3)]).mean(0)
    for rank in range(3):
        torch.testing.assert_close(both.weights(rank), mean, rtol=1e-5, atol=1e-6)


def test_the_outer_step_is_that_of_torch_sgd_with_nesterov() -> None:
    found, alone = Simulated(1, lr=0.7, momentum=0.9), model()
    inner = torch.optim.AdamW(alone.parameters(), 1e-2)
    agreed = [p.detach().clone().requires_grad_() for p in alone.parameters()]
    outer = torch.optim.SGD(agreed, 0.7, momentum=0.9, nesterov=True)
    for step in range(12):
        inner_step(alone, inner, step, 0)
        if step % 4 == 3:
            for p, q in zip(agreed, alone.parameters(), strict=True):
                p.grad = p.detach() - q.detach()
            outer.step()
            for p, q in zip(agreed, alone.parameters(), strict=True):
                q.data.copy_(p.detach())
    found.run(0, 12)
    torch.testing.assert_close(
        found.weights(), nn.utils.parameters_to_vector(alone.parameters()).detach(), rtol=1e-5, atol=1e-6
    )


def test_replicas_agree_when_it_is_their_turn_and_only_then() -> None:
    found = Simulated(2, codec=Codec(4))
    found.run(0, 3)
    assert not torch.equal(found.weights(0), found.weights(1))
    found.run(3, 4)
    assert torch.equal(found.weights(0), found.weights(1))


def test_fragments_take_turns_and_send_what_the_whole_sends() -> None:
    whole, parts = Simulated(2, codec=Codec(4)), Simulated(2, codec=Codec(4), fragments=2)
    whole.run(0, 8)
    sent = []
    for step in range(8):
        parts.run(step, step + 1)
        sent.append(parts.outer[0].bytes_sent)
    assert [b > a for a, b in zip([0.0, *sent], sent)] == [False, True, False, True] * 2  # noqa: B905
    assert abs(sent[-1] / whole.outer[0].bytes_sent - 1) < 0.1
    numel = sum(p.numel() for p in whole.models[0].parameters())
    blocks = -(-numel // 128)
    assert whole.outer[0].bytes_sent == 2 * 2 * 0.5 * blocks * (64 + 4)  # two turns and phases, half of it to the other


def test_a_delay_meets_the_new_weights_half_way() -> None:
    found = Simulated(2, codec=None, delay=2, lr=1.0, momentum=0.0)
    found.run(0, 5)
    before = [found.weights(rank) for rank in range(2)]
    agreed = found.outer[0].fragments[0].pending
    assert agreed is not None
    found.run(5, 6)
    assert found.outer[0].fragments[0].pending is None
    assert not torch.equal(found.weights(0), found.weights(1))
    apart = (found.weights(0) - found.weights(1)).norm()
    assert 0.2 * (before[0] - before[1]).norm() < apart < 0.9 * (before[0] - before[1]).norm()


def ranks_of(rank: int, ranks: int) -> dict[str, Tensor]:
    found = {}
    for name, options in FORMS.items():
        replica = model()
        inner, outer = torch.optim.AdamW(replica.parameters(), 1e-2), DiLoCo(replica.parameters(), 4, **options)
        for step in range(9):
            inner_step(replica, inner, step, rank)
            outer.step()
        found[name] = nn.utils.parameters_to_vector(replica.parameters()).detach().clone()
    return found


def test_processes_give_the_bits_of_the_simulation(tmp_path: Path) -> None:
    found = values(2, tmp_path, ranks_of)
    for name, options in FORMS.items():
        simulated = Simulated(2, **options)
        simulated.run(0, 9)
        for rank in range(2):
            assert torch.equal(simulated.weights(rank), found[rank][name]), name


@pytest.mark.parametrize("name", FORMS)
def test_stop_and_resume_gives_the_same_bits(name: str) -> None:
    whole, first = Simulated(2, **FORMS[name]), Simulated(2, **FORMS[name])
    whole.run(0, 14)
    first.run(0, 7)
    buffer = io.BytesIO()
    torch.save(
        [
            (m.state_dict(), i.state_dict(), o.state_dict())
            for m, i, o in zip(first.models, first.inner, first.outer, strict=True)
        ],
        buffer,
    )
    buffer.seek(0)
    again = Simulated(2, **FORMS[name])
    for (m, i, o), state in zip(
        zip(again.models, again.inner, again.outer, strict=True), torch.load(buffer, weights_only=True), strict=True
    ):
        m.load_state_dict(state[0]), i.load_state_dict(state[1]), o.load_state_dict(state[2])
    again.run(7, 14)
    for rank in range(2):
        assert torch.equal(whole.weights(rank), again.weights(rank))


def test_errors() -> None:
    parameters = list(model().parameters())
    for options, said in (
        ({"every": 0}, "every must be a positive multiple of fragments=1, got 0"),
        ({"every": 9, "fragments": 2}, "every must be a positive multiple of fragments=2, got 9"),
        ({"every": 8, "fragments": 5}, "fragments must be 1 to the number of parameters"),
        ({"every": 8, "delay": 8}, "delay must be 0 to every / fragments - 1 = 7, got 8"),
        ({"every": 8, "feedback": True}, "feedback=True needs a codec"),
        ({"every": 8, "lr": 0.0}, "lr must be positive"),
    ):
        with pytest.raises(ValueError, match=said):
            DiLoCo(parameters, **options)  # type: ignore[arg-type]
    found = Simulated(2, delay=2)
    found.run(0, 5)
    with pytest.raises(RuntimeError, match="an exchange is under way until step 6, this is 5"):
        found.outer[0].state_dict()
    other = DiLoCo(parameters, 4)
    with pytest.raises(ValueError, match="not a state of DiLoCo with every=4: version 1, every=8"):
        other.load_state_dict(DiLoCo(parameters, 8).state_dict())
    with pytest.raises(ValueError, match="the state has fragments of"):
        other.load_state_dict(DiLoCo(parameters[:2], 4).state_dict())
