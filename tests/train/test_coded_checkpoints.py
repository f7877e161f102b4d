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
            codes[id(node)] = node.saved_tensors[:2], node.code[0]
        nodes += [after for after, _ in node.next_functions]
    assert len(codes) == 3
    assert all(payload.nbytes + scales.nbytes < 0.14 * x.nbytes for (payload, scales), _ in codes.values())
    assert len({codec.seed for _, codec in codes.values()}) == 3  # a rotation each
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):  # nothing is left
        y.sum().backward()


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
    exact, checkpoints = model(x), coded_checkpoints(model.children())
    with checkpoints, torch.no_grad():
        y = model(x)
    assert torch.equal(y, exact) and y.grad_fn is None and checkpoints.step == 0
    model.requires_grad_(False)
    with checkpoints:
        assert model(x).grad_fn is None and checkpoints.step == 0
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


def test_a_frozen_block_passes_gradients_on() -> None:
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
        with pytest.raises(ValueError, match="must be one of"):
            model(given(False).double().requires_grad_())
        with pytest.raises(TypeError, match="must be a tensor"):
            model[0](3)
        with pytest.raises(ValueError, match="already replaced"), coded_checkpoints(model.children()):
            pass
    shifted = nn.Bilinear(64, 64, 8)
    with coded_checkpoints([shifted]), pytest.raises(ValueError, match="only the first argument"):
        shifted(given(), given())

    class Nested(nn.Linear):
        def forward(self, x: Tensor, pair: Any = None) -> Any:
            return {"y": super().forward(x)} if pair is None else super().forward(x) + pair[0]["shift"]

    nested = Nested(64, 64)
    with coded_checkpoints([nested]):
        with pytest.raises(TypeError, match="flat tuple"):
            nested(given())
        with pytest.raises(ValueError, match="only the first argument"):
            nested(given(), ({"shift": given()},))
        y = nested(given(), ({"shift": torch.ones(64)},))
    y.sum().backward()
    assert nested.weight.grad is not None


def test_gradients_of_gradients_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), *blocks(1)), given()
    with coded_checkpoints([model[1]]):
        y = model(x)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_hooks_of_parameters_run_once() -> None:
    model, x = blocks(1), given()
    _, exact = gradients(model, x, 8)
    calls = []
    model[0][0].weight.register_hook(lambda g: calls.append(1) or 0.5 * g)
    with coded_checkpoints(model.children(), 8):
        y = model(x)
    y.square().sum().backward()
    assert len(calls) == 1 and torch.allclose(model[0][0].weight.grad, 0.5 * exact[1])


def test_a_weight_that_changes_before_backward_is_noticed() -> None:
    model, x = blocks(1), given()
    with coded_checkpoints(model.children()):
        y = model(x)
    with torch.no_grad():
        model[0][0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_weights_given_for_a_call_get_its_gradients() -> None:
    model, x = blocks(1), given()
    new = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    exact = torch.autograd.grad(torch.func.functional_call(model, new, x).square().sum(), list(new.values()))
    with coded_checkpoints(model.children(), 8):
        y = torch.func.functional_call(model, new, x)
    found = torch.autograd.grad(y.square().sum(), list(new.values()))
    for a, b in zip(exact, found, strict=True):
        assert (a - b).norm() < 0.01 * a.norm()


def test_a_result_that_is_not_used_and_a_block_called_twice() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), (0 * x).sqrt()  # whose gradient is NaN

    torch.manual_seed(0)
    model, x = Two(64, 64), given()
    with coded_checkpoints([model], 8):
        y = model(model(x)[0])[0]
    y.square().sum().backward()
    assert x.grad is not None and model.weight.grad is not None
    exact = torch.autograd.grad((x @ model.weight.T + model.bias).matmul(model.weight.T).add(model.bias).square().sum(),
                                [x, model.weight])  # fmt: skip
    assert (x.grad - exact[0]).norm() < 0.01 * exact[0].norm()
    assert (model.weight.grad - exact[1]).norm() < 0.01 * exact[1].norm()


def test_an_input_without_gradient_still_trains_the_block() -> None:
    model, x = blocks(1), given(False)
    with coded_checkpoints(model.children(), 8):
        y = model(x)
    exact = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(y.square().sum(), list(model.parameters()))
    for a, b in zip(exact, found, strict=True):
        assert (a - b).norm() < 0.01 * a.norm()
