"""Checkpoints of quantized inputs: exact forward, gradients near the exact ones, few bytes, and clear refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tq import Codec
from tq.train.coded_checkpoints import coded_checkpoints
from tq.train.model import GPT, GPTConfig


def blocks(depth: int = 3, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, 64)) for _ in range(depth)
    ])  # fmt: skip


def given(requires_grad: bool = True) -> Tensor:
    return torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).requires_grad_(requires_grad)


def gradients(model: nn.Module, x: Tensor, bits: int | None) -> tuple[Tensor, list[Tensor]]:
    if bits is None:
        y = model(x)
    else:
        with coded_checkpoints(model.children(), bits):
            y = model(x)
    return y, list(torch.autograd.grad(y.square().sum(), [x, *model.parameters()]))


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.2), (2, 0.8)])
def test_the_forward_pass_is_exact_and_gradients_are_near(bits: int, error: float) -> None:
    model, x = blocks(), given()
    y, exact = gradients(model, x, None)
    z, found = gradients(model, x, bits)
    assert torch.equal(y, z)
    for a, b in zip(exact, found, strict=True):
        assert (a - b).norm() < error * a.norm()
    assert any(not torch.equal(a, b) for a, b in zip(exact, found, strict=True))


def test_what_is_kept_are_the_codes_of_inputs() -> None:
    model, x = blocks(), given()
    with coded_checkpoints(model.children(), 4):
        y = model(x)
    nodes, codes = [y.grad_fn], {}
    while nodes:
        node: Any = nodes.pop()
        if node is None or id(node) in codes:
            continue
        if type(node).__name__ == "_FromCodeBackward":
            codes[id(node)] = node.code
        nodes += [after for after, _ in node.next_functions]
    assert len(codes) == 3
    assert all(code.nbytes < 0.14 * x.nbytes for code in codes.values())
    assert len({code.codec.seed for code in codes.values()}) == 3  # a rotation each


def test_random_numbers_and_autocast_of_the_second_run_are_those_of_the_first() -> None:
    model, x = blocks(1, dropout=0.5), given()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        exact = torch.autograd.grad(model(x).float().sum(), [x, *model.parameters()])
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16), coded_checkpoints(model.children(), 8):
        y = model(x)
    assert y.dtype == torch.bfloat16
    found = torch.autograd.grad(y.float().sum(), [x, *model.parameters()])
    assert torch.equal(after, torch.get_rng_state())  # backward drew none of its own
    for a, b in zip(exact, found, strict=True):
        assert (a - b).norm() <= 0.03 * a.norm()


def test_several_results_and_other_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor, factor: float, *, shift: Tensor) -> tuple[Tensor, Tensor]:
            return factor * self.linear(x) + shift, x.detach()

    torch.manual_seed(0)
    model, x = Two(), given()
    with coded_checkpoints([model], 8):
        y, same = model(x, 2.0, shift=torch.ones(64))
    assert torch.equal(same, x)
    y.sum().backward()
    assert model.linear.weight.grad is not None and x.grad is not None
    assert torch.allclose(x.grad, 2 * model.linear.weight.sum(0).expand_as(x), rtol=1e-5)


def test_without_gradients_nothing_is_kept_and_blocks_are_restored() -> None:
    model, x = blocks(1), given(False)
    with coded_checkpoints(model.children()), torch.no_grad():
        assert torch.equal(model(x), model[0](x))
    assert "forward" not in vars(model[0])
    with pytest.raises(RuntimeError, match="mid"), coded_checkpoints(model.children()):
        raise RuntimeError("mid")
    assert "forward" not in vars(model[0])


def test_each_step_has_other_rotations_and_a_resumed_run_the_same() -> None:
    model, x = blocks(1), given()
    exact = gradients(model, x, None)[1][0]

    def steps(checkpoints: coded_checkpoints, count: int) -> list[Tensor]:
        found = []
        for _ in range(count):
            with checkpoints:
                y = model(x)
            found.append(torch.autograd.grad(y.square().sum(), x)[0])
        return found

    whole = steps(coded_checkpoints(model.children(), 4), 16)
    again = coded_checkpoints(model.children(), 4, step=15)
    assert torch.equal(whole[15], steps(again, 1)[0]) and again.step == 16
    mean = torch.stack(whole).mean(0)
    assert (mean - exact).norm() < 0.5 * (whole[0] - exact).norm()


def test_a_frozen_block_and_a_clipped_model_train() -> None:
    model = GPT(GPTConfig(layers=2, hidden=64, heads=2, vocab=256, seq=32), seed=0)
    model.blocks[0].requires_grad_(False)
    ids = torch.randint(0, 256, (2, 32))
    with coded_checkpoints(model.blocks, 4, codec=Codec(seed=5)):
        loss = model(ids, ids)[1]
    loss.backward()
    assert all(p.grad is None for p in model.blocks[0].parameters())
    assert all(p.grad is not None for p in model.blocks[1].parameters())


@pytest.mark.parametrize(
    ("asked", "raised", "said"),
    [
        (lambda: coded_checkpoints(blocks(1).children(), 9), ValueError, "between 1 and 8"),
        (lambda: coded_checkpoints(blocks(1).children(), True), ValueError, "between 1 and 8"),
        (lambda: coded_checkpoints(blocks(1).children(), step=-1), ValueError, "at least 0"),
        (lambda: coded_checkpoints([torch.ones(2)]), TypeError, "must be modules"),  # type: ignore[list-item]
    ],
)
def test_arguments_are_refused(asked: Any, raised: type[Exception], said: str) -> None:
    with pytest.raises(raised, match=said):
        asked()


def test_calls_are_refused_that_would_lose_gradients() -> None:
    model = blocks(1)
    with coded_checkpoints(model.children()):
        with pytest.raises(ValueError, match="must require a gradient"):
            model(given(False))
        with pytest.raises(ValueError, match="must be one of"):
            model(given(False).double().requires_grad_())
        with pytest.raises(TypeError, match="must be a tensor"):
            model[0](3)
        with pytest.raises(ValueError, match="already replaced"), coded_checkpoints(model.children()):
            pass
    shifted = nn.Bilinear(64, 64, 8)
    with coded_checkpoints([shifted]), pytest.raises(ValueError, match="only the first argument"):
        shifted(given(), given())
