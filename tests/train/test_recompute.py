"""A checkpoint whose products are kept as codes: exact forward, nothing dear computed twice, gradients within noise."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tq.quant.codec import Codec
from tq.train.activations import compress_activations
from tq.train.recompute import PRODUCTS, CodedResults

D, HEADS = 128, 4


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout)


class Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[func] += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def model(dropout=0.0):
    torch.manual_seed(0)
    return nn.ModuleList(Block(dropout) for _ in range(3)), torch.randn(4, 64, D)


def loss_of(blocks, x, keep=None):
    for block in blocks:
        given = {} if keep is None else {"context_fn": keep}
        x = block(x) if keep is False else checkpoint(block, x, use_reentrant=False, **given)
    return x.square().mean()


def gradient(blocks, loss, **options):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(blocks.parameters()), **options)])


def error(found, exact):
    return float((found - exact).square().sum() / exact.square().sum())


def test_forward_is_exact_and_gradients_are_near_and_nearer_with_bits():
    blocks, x = model()
    exact_loss = loss_of(blocks, x, False)
    exact, errors = gradient(blocks, exact_loss), []
    for bits in (2, 4, 6, 8):
        loss = loss_of(blocks, x, CodedResults(Codec(bits)))
        assert torch.equal(loss, exact_loss)
        errors.append(error(gradient(blocks, loss), exact))
    assert errors == sorted(errors, reverse=True) and errors[1] < 0.02 and errors[-1] < 1e-4


def test_small_results_and_none_at_all_give_the_exact_gradient():
    blocks, x = model()
    exact = gradient(blocks, loss_of(blocks, x, False))
    for keep in (CodedResults(min_elements=1 << 30), CodedResults(operations=frozenset())):
        assert torch.equal(gradient(blocks, loss_of(blocks, x, keep)), exact)


def test_no_product_of_the_forward_pass_is_computed_again():
    blocks, x = model()
    counts = []
    for keep in (False, None, CodedResults()):
        loss = loss_of(blocks, x, keep)
        with Counts() as seen:
            loss.backward()
        counts.append(seen.found.total())
    plain, again, coded = counts
    assert coded == plain < again


def test_kept_bytes_are_those_of_the_codes():
    blocks, x = model()
    keep, tokens = CodedResults(), x.shape[0] * x.shape[1]
    loss_of(blocks, x, keep)
    results = tokens * D * (3 + 1 + 1 + 4 + 1)  # qkv, attention, out, up, down
    statistics = 4 * tokens * HEADS
    assert keep.kept_bytes == 3 * (results * (4 + 16 / 128) / 8 + statistics)


def test_every_part_has_rotations_of_its_own_and_a_run_is_resumed_with_the_same():
    blocks, x = model()
    keep = CodedResults(Codec(2))
    first, second = (gradient(blocks, loss_of(blocks, x, keep)) for _ in range(2))
    assert keep.step == 6 and not torch.equal(first, second)
    assert torch.equal(gradient(blocks, loss_of(blocks, x, CodedResults(Codec(2), step=3))), second)


def test_the_mean_over_steps_comes_near_for_what_is_linear():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D))
    x, target = torch.randn(64, D), torch.randn(64, D)
    exact = gradient(layers, (layers(x) * target).sum())
    keep, total, n = CodedResults(Codec(2)), 0.0, 100
    for _ in range(n):
        found = gradient(layers, (checkpoint(layers, x, use_reentrant=False, context_fn=keep) * target).sum())
        total = total + found
    assert error(total / n, exact) < 3 * error(found, exact) / n


def test_random_numbers_are_drawn_alike_in_both_runs():
    blocks, x = model(dropout=0.3)
    torch.manual_seed(1)
    exact = gradient(blocks, loss_of(blocks, x, False))
    torch.manual_seed(1)
    found = gradient(blocks, loss_of(blocks, x, CodedResults(Codec(8))))
    assert error(found, exact) < 1e-3


def test_with_autocast_coded_inputs_and_a_retained_graph():
    blocks, x = model()
    exact = gradient(blocks, loss_of(blocks, x, False))
    keep = CodedResults()
    with torch.autocast("cpu", torch.bfloat16), compress_activations() as report:
        loss = loss_of(blocks, x * 1, keep)
    assert report.by_kind["checkpoint"][1] < report.by_kind["checkpoint"][0]
    first, second = (gradient(blocks, loss, retain_graph=True) for _ in range(2))
    assert torch.equal(first, second) and error(first, exact) < 0.05


def test_what_is_not_finite_stays_so():
    blocks, x = model()
    x[0, 0, 0] = float("inf")
    assert not gradient(blocks, loss_of(blocks, x, CodedResults())).isfinite().all()


def test_a_part_that_changes_between_its_runs_is_told():
    torch.manual_seed(0)
    layer, calls = nn.Linear(D, D), []

    def part(x):
        calls.append(1)
        if len(calls) == 2:
            with torch.no_grad():
                layer(x[:32])
        return layer(x).relu()

    x = torch.randn(64, D, requires_grad=True)
    loss = checkpoint(part, x, use_reentrant=False, context_fn=CodedResults()).sum()
    with pytest.raises(RuntimeError, match="made other calls than the first: aten.addmm"):
        loss.backward()


@pytest.mark.parametrize(
    "options,error", [({"codec": 4}, TypeError), ({"min_elements": 0}, ValueError), ({"step": -1}, ValueError)]
)
def test_bad_settings_are_refused(options, error):
    with pytest.raises(error):
        CodedResults(**options)
