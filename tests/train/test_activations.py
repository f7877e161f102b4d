"""Coded activations: the bytes fall as stated, gradients stay unbiased, and what must be exact is exact."""

import gc
import io
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tq import Codec
from tq.train.activations import BITS, EXACT, RECOMPUTE, Report, compress_activations
from tq.train.linear import CompressedLinear, replace_linears
from tq.train.model.gpt import GPT, GPTConfig

BF16 = Codec(scale_dtype=torch.bfloat16)
CONFIG = GPTConfig(layers=2, hidden=128, heads=4, vocab=256, seq=64)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))


def model_of(dtype: torch.dtype = torch.float32, **changed: object) -> GPT:
    return GPT(GPTConfig(**{**vars(CONFIG), **changed}), seed=0).to(dtype)


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten().float() for g in torch.autograd.grad(loss, list(model.parameters()))])


def block_of(dtype: torch.dtype, **options: object) -> tuple[Report, Tensor]:
    """One transformer block, forward and backward."""
    model = model_of(dtype)
    x = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    with compress_activations(**options) as report:
        y = model.blocks[0](x * 1, model.cos, model.sin)
    return report, gradient(model.blocks[0], y.float().sin().sum())


def error(measured: Tensor, exact: Tensor) -> float:
    return float((measured - exact).norm() / exact.norm())


def saved_by(run: Callable[[], Tensor], held: list[Tensor]) -> tuple[int, Tensor]:
    """Bytes that autograd keeps besides ``held``, counted from outside, and the result."""
    known = {x.untyped_storage().data_ptr() for x in held}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in known:
            found[x.data_ptr()] = x.nbytes
        return x.detach()

    with saved_tensors_hooks(pack, lambda x: x):
        result = run()
    return sum(found.values()), result


# --- bytes ----------------------------------------------------------------------------------------------------


def test_a_tensor_takes_bits_plus_scale():
    layer = nn.Linear(256, 256, dtype=torch.bfloat16)
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    with compress_activations(BF16) as report:
        layer(x * 1)
    assert report.by_kind == {"linear": (64 * 256 * 2, 64 * 256 // 2 + 64 * 256 // 128 * 2)}
    assert report.bytes_before / report.bytes_after == pytest.approx(16 / 4.125)


def test_a_block_in_bfloat16_falls_by_four_with_cheap_operations_computed_again():
    base, exact = block_of(torch.bfloat16, bits=EXACT)
    assert base.bytes_before == base.bytes_after
    plain, noisy = block_of(torch.bfloat16)
    again, noisier = block_of(torch.bfloat16, recompute=RECOMPUTE)
    assert base.bytes_before == plain.bytes_before
    assert base.bytes_before / plain.bytes_after > 3.7
    assert base.bytes_before / again.bytes_after > 6
    for coded in (noisy, noisier):
        assert 0 < error(coded, exact) < 0.15


def test_the_report_counts_what_autograd_keeps(ids: Tensor):
    model = model_of()
    held = [*model.parameters(), *model.buffers()]
    counted, _ = saved_by(lambda: model(ids, ids)[1], held)
    with compress_activations(bits=EXACT) as report:
        model(ids, ids)
    assert report.bytes_before == pytest.approx(counted, rel=0.01)


def test_recomputation_alone_changes_no_bit(ids: Tensor):
    for activation in ("gelu", "swiglu"):
        model = model_of(activation=activation)
        exact = gradient(model, model(ids, ids)[1])
        with compress_activations(bits=EXACT, recompute=RECOMPUTE) as report:
            loss = model(ids, ids)[1]
        assert report.bytes_after < 0.8 * report.bytes_before
        assert torch.equal(gradient(model, loss), exact)


def test_originals_are_freed_and_codes_go_with_the_graph():
    layer = nn.Linear(128, 128)
    gc.collect()
    earlier = {id(x) for x in gc.get_objects() if type(x).__name__ == "_Kept"}
    with compress_activations() as report:
        x = torch.randn(64, 128, requires_grad=True) * 1
        gone = weakref.ref(x)
        storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
        y = layer(x).sum()
        del x
        assert gone() is None and storage.expired()
    (kept,) = [x for x in gc.get_objects() if type(x).__name__ == "_Kept" and id(x) not in earlier]
    gone = weakref.ref(kept)
    del kept
    y.backward()
    del y
    assert gone() is None and report.bytes_after < report.bytes_before


def test_a_tensor_that_several_operations_save_is_coded_once():
    x = torch.randn(64, 128, requires_grad=True) * 1
    layers = [nn.Linear(128, 128, bias=False) for _ in range(3)]
    with compress_activations(BF16) as report:
        _ = [layer(x) for layer in layers], layers[0](x.view(8, 8, 128))  # a view of the same elements
    assert report.by_kind == {"linear": (64 * 128 * 4, 64 * 64 + 64 * 2)}


def test_what_must_be_exact_is_not_read_from_a_code_made_before():
    x, layer = torch.rand(64, 128).add(0.01).requires_grad_(), nn.Linear(128, 128)
    norm, scale = nn.LayerNorm(128), torch.arange(128.0)

    def loss(h: Tensor) -> Tensor:
        return layer(h).sum() + h.log().sum() + (norm(h) * scale).sum()

    (exact,) = torch.autograd.grad(loss(x * 1), x)
    with compress_activations(BF16, bits={"linear": 2, "norm": None}) as report:
        coded = loss(x * 1)
    assert torch.equal(torch.autograd.grad(coded, x)[0], exact)
    assert report.by_kind["linear"] == (x.nbytes, 64 * 34) and report.by_kind["other"] == (0, x.nbytes)


def test_a_result_computed_again_serves_kinds_that_are_kept_exact():
    x, layers = torch.randn(64, 128, requires_grad=True) * 1, [nn.Linear(128, 128) for _ in range(3)]
    with compress_activations(BF16, bits={**EXACT, "nonlinearity": 4}, recompute=RECOMPUTE) as report:
        y = F.gelu(x)
        _ = [layer(y) for layer in layers], y.log()
    assert report.by_kind["linear"] == (x.nbytes, 0) and report.by_kind["other"] == (0, x.nbytes)


def test_a_changed_tensor_is_no_alias():
    x, layer = torch.randn(64, 128, requires_grad=True) * 1, nn.Linear(128, 128)
    with compress_activations() as report:
        layer(x)
        x.mul_(2)
        layer(x)
    assert report.by_kind["linear"][0] == 2 * x.nbytes


def test_parameters_buffers_and_cast_weights_are_left_alone():
    model = model_of()
    x = torch.randn(2, 64, 128, requires_grad=True) * 1
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), compress_activations(bits=EXACT) as report:
            _ = model.blocks[0].mlp.up(x), model.blocks[0].attention.query(x), x[..., :16] * model.cos[:64]
        assert report.by_kind == {"linear": (x.nbytes, x.nbytes)}  # under autocast two copies of half the size


def test_frozen_weights_are_left_alone():
    layer = nn.Linear(128, 128).requires_grad_(False)
    x = torch.randn(64, 128, requires_grad=True) * 1
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), compress_activations() as report:
            layer(x)
        assert report.by_kind == {}


def test_multi_head_attention_is_coded_inside():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True, activation="gelu")
    x, seen = torch.randn(4, 64, 128, requires_grad=True), []
    for bits in (EXACT, None):
        with compress_activations(bits=bits) as report:
            loss = layer(x * 1).square().sum()
        seen.append((report, gradient(layer, loss)))
    (_, exact), (report, coded) = seen
    assert {"query", "key", "value", "attention"} <= set(report.by_kind)
    assert report.bytes_before > 7 * report.bytes_after
    assert 0 < error(coded, exact) < 0.15


@pytest.mark.parametrize("autocast", [False, True])
def test_parts_of_a_weight_are_weights(autocast: bool):
    x, weight = torch.randn(64, 128, requires_grad=True) * 1, nn.Parameter(torch.randn(256, 128))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), compress_activations(BF16) as report:
        _ = F.linear(x, weight[:64]), F.linear(x, weight.chunk(2)[1])
    assert report.by_kind == {"linear": (x.nbytes // (2 if autocast else 1), 64 * 66)}


# --- values ---------------------------------------------------------------------------------------------------


def test_gradients_of_linear_layers_are_unbiased():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 64))
    x, target = torch.randn(32, 128), torch.randn(32, 64)
    exact = gradient(model, (model(x * 1) * target).sum())
    total, squares, n = torch.zeros_like(exact), torch.zeros_like(exact), 200
    x.requires_grad_()
    for step in range(n):
        with compress_activations(bits=2, step=step):
            loss = (model(x * 1) * target).sum()
        found = gradient(model, loss)
        total, squares = total + found, squares + found**2
    deviation = (squares / n - (total / n) ** 2).clamp(min=0).sqrt()
    noisy = deviation > 1e-6
    z = ((total / n - exact) / (deviation / n**0.5))[noisy]
    assert noisy.float().mean() > 0.9
    assert abs(float(z.mean())) < 0.05 and float(z.square().mean()) == pytest.approx(1, abs=0.1)
    assert float(z.abs().max()) < 6
    assert error(total / n, exact) < 0.05 < error(found, exact)


@pytest.mark.parametrize("activation", ["gelu", "relu2", "swiglu"])
def test_error_falls_with_bits_and_eight_are_close(activation: str, ids: Tensor):
    model = model_of(activation=activation)
    exact = gradient(model, model(ids, ids)[1])
    errors = []
    for bits in (2, 4, 6, 8):
        with compress_activations(bits=bits, recompute=RECOMPUTE):
            loss = model(ids, ids)[1]
        errors.append(error(gradient(model, loss), exact))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.01


def test_one_object_counts_the_forward_passes_that_it_coded(ids: Tensor):
    model, activations, found = model_of(), compress_activations(), []
    for _ in range(2):
        with activations as report:
            loss = model(ids, ids)[1]
        found.append(gradient(model, loss))
        assert report.bytes_after < report.bytes_before
        with activations as report, torch.no_grad():
            model(ids, ids)
        assert report.bytes_before == 0
    assert activations.step == 2
    resumed = compress_activations(step=1)
    with resumed:
        loss = model(ids, ids)[1]
    assert torch.equal(gradient(model, loss), found[1]) and not torch.equal(found[0], found[1])
    activations.step = 0
    with activations:
        loss = model(ids, ids)[1]
    assert torch.equal(gradient(model, loss), found[0])


def test_one_object_serves_one_context_at_a_time(ids: Tensor):
    model, activations = model_of(), compress_activations()
    with activations:
        with pytest.raises(RuntimeError, match="entered already"), activations:
            raise AssertionError
        with compress_activations(bits=2) as inner:
            model(ids, ids)[1].backward()
    assert inner.bytes_after and activations.step == 0
    with pytest.raises(ZeroDivisionError), activations:
        model(ids, ids)[1].backward()
        raise ZeroDivisionError
    assert activations.step == 1
    with activations as report:
        model(ids, ids)
    assert report.bytes_after


def test_the_same_step_repeats_its_bits_and_another_does_not(ids: Tensor):
    model, found = model_of(), []
    for step in (0, 0, 1):
        state = torch.get_rng_state()
        with compress_activations(step=step):
            loss = model(ids, ids)[1]
        found.append(gradient(model, loss))
        assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_bits_by_kind_and_what_must_stay_exact(ids: Tensor):
    with compress_activations(BF16, bits={"query": 2, "key": None}) as report:
        model_of()(ids, ids)
    before, after = report.by_kind["query"]
    assert before / after == pytest.approx(32 / 2.125)
    for kind in ("key", "statistics", "other", "integer"):
        assert report.by_kind[kind][0] == report.by_kind[kind][1] > 0
    assert report.by_kind["other"][0] == ids.numel() * 256 * 4  # the log-probabilities of the loss


def test_relu_and_dropout_keep_one_exact_bit():
    x = torch.randn(64, 100, requires_grad=True)
    for operation in (F.relu, nn.ReLU(), nn.Dropout(0.3)):
        torch.manual_seed(1)
        (exact,) = torch.autograd.grad((operation(x * 1) * 3).sum(), x)
        torch.manual_seed(1)
        with compress_activations() as report:
            y = operation(x * 1)
        assert report.by_kind == {"mask": (x.nbytes, x.numel() // 8)}
        assert torch.equal(torch.autograd.grad((y * 3).sum(), x)[0], exact)


def test_relu_and_the_layer_behind_it_keep_their_own():
    x, layer = torch.randn(64, 128, requires_grad=True), nn.Linear(128, 128)
    with compress_activations(BF16) as report:
        layer(F.relu(x * 1))
    assert report.by_kind == {"mask": (x.nbytes, 64 * 16), "linear": (0, 64 * 66)}  # without codes it is one tensor


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_opens_no_gate(value: float):
    x, scale = torch.randn(64, 128).index_fill(0, torch.tensor([0]), 1.0).requires_grad_(), torch.ones(64, 128)
    scale[0, 0] = value
    (exact,) = torch.autograd.grad(F.relu(x * scale).clamp(max=10).sum(), x)
    with compress_activations():
        y = F.relu(x * scale).clamp(max=10).sum()
    assert torch.equal(torch.autograd.grad(y, x)[0].nan_to_num(), exact.nan_to_num())


@pytest.mark.parametrize(
    "operation",
    [
        lambda h: h.pow(0.5),
        lambda h: h**0.5,
        lambda h: h**-1,
        lambda h: h / (h.flip(0) + 0.1),
        lambda h: torch.div(1, h),
        lambda h: 1 / h,
    ],
)
def test_powers_and_divisions_stay_exact(operation: Callable[[Tensor], Tensor]):
    x = torch.rand(64, 128).add(1e-3).requires_grad_()
    (exact,) = torch.autograd.grad(operation(x * 1).sum(), x)
    with compress_activations() as report:
        y = operation(x * 1).sum()
    assert torch.equal(torch.autograd.grad(y, x)[0], exact)
    assert report.bytes_before == report.bytes_after > 0


def test_a_conjugate_is_no_alias():
    x = torch.randn(64, 64, dtype=torch.complex64, requires_grad=True)
    for operation in (lambda z: z * z.conj(), lambda z: z @ z.mH, lambda z: z.imag * z.conj().imag):
        (exact,) = torch.autograd.grad(operation(x * 1).abs().sum(), x)
        with compress_activations(bits=EXACT):
            y = operation(x * 1).abs().sum()
        assert torch.equal(torch.autograd.grad(y, x)[0], exact)


def test_the_softmax_of_an_attention_without_a_fused_kernel_is_exact():
    x = torch.randn(3, 2, 4, 64, 32, requires_grad=True)
    weights = 2 * 4 * 64 * 64 * 4
    with compress_activations(BF16) as report:
        F.scaled_dot_product_attention(*(x * 1), dropout_p=0.1)  # a dropout has no fused kernel on a CPU
    assert report.by_kind["other"] == (weights, weights)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[1]


def test_a_function_of_the_user_has_its_inputs_coded_and_not_its_results():
    x = torch.randn(64, 128, requires_grad=True)
    exact = x.detach().exp()
    with compress_activations(BF16) as report:
        y = Exponential.apply(x * 1)
        _ = Exponential.apply(y)
    assert report.by_kind["checkpoint"] == (x.nbytes, 64 * 66)  # y was kept exact before
    assert report.by_kind["other"] == (2 * x.nbytes, 2 * x.nbytes)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], exact)


def test_integers_and_booleans_are_exact():
    x = torch.randn(64, 128, requires_grad=True)
    index = torch.randint(0, 64, (64, 128))
    with compress_activations() as report:
        picked = (x * 1).gather(0, index)
        y = torch.where(picked > 0.3, picked, picked.new_zeros(()))
    assert report.by_kind["integer"] == (index.nbytes,) * 2 and report.by_kind["mask"] == (64 * 128, 64 * 16)
    expected = torch.zeros_like(x).scatter_add_(0, index, (picked > 0.3).float())
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_small_float64_and_expanded_tensors_stay_exact():
    with compress_activations() as report:
        nn.Linear(8, 8)(torch.randn(4, 8, requires_grad=True) * 1)
        nn.Linear(64, 64, dtype=torch.float64)(torch.randn(64, 64, dtype=torch.float64, requires_grad=True) * 1)
        row = torch.randn(1, 128, requires_grad=True) * 1
        row.expand(64, 128) * torch.randn(64, 128, requires_grad=True)
    assert report.bytes_before == report.bytes_after > 0


def test_arguments_by_name_and_sparse_ones():
    x = torch.randn(64, 128, requires_grad=True)
    with compress_activations(bits=8, recompute=RECOMPUTE) as report:
        hidden = F.gelu(input=x * 1)
        y = F.linear(input=F.layer_norm(input=hidden, normalized_shape=(128,)), weight=torch.ones(4, 128))
        z = torch.sparse.mm(torch.eye(64).to_sparse(), F.silu(x * 1))
    assert hidden.type() == "torch.FloatTensor" and report.by_kind["nonlinearity"][1] > 0
    wanted = F.linear(F.layer_norm(F.gelu(x), (128,)), torch.ones(4, 128))[:, :2].square().sum() + F.silu(x).sum()
    found = torch.autograd.grad(y[:, :2].square().sum() + z.sum(), x)[0]
    assert error(found, torch.autograd.grad(wanted, x)[0]) < 0.02


def test_strides_are_restored():
    a = (torch.randn(32, 64, requires_grad=True) * 1).T
    b = (torch.randn(32, 128, requires_grad=True) * 1)[:, ::2]
    with compress_activations(bits=8):
        y = a @ b
    left, right = torch.autograd.grad(y.sum(), (a, b))
    assert error(left, b.detach().sum(1).expand(64, 32)) < 0.02
    assert error(right, a.detach().sum(0)[:, None].expand(32, 64)) < 0.02


def test_a_value_that_is_not_finite_reaches_the_gradient():
    layer, x = nn.Linear(128, 128), torch.randn(64, 128, requires_grad=True)
    with compress_activations(Codec(nonfinite="raise")):
        y = layer(x * torch.where(torch.arange(128) == 3, float("inf"), 1.0))
    assert not torch.autograd.grad(y[:, :2].nansum(), layer.weight)[0].isfinite().all()


@pytest.mark.parametrize("bits", [EXACT, None])
def test_a_change_in_place_before_backward_raises_as_in_torch(bits: dict | None):
    layers = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 128))
    step = torch.optim.SGD(layers.parameters(), 0.1).step

    def grow(weight: Tensor) -> Callable[[object], object]:
        return lambda y: weight.detach().mul_(10)

    def exponential(h: Tensor) -> Tensor:
        y = h.exp()
        y.add_(5)
        return y

    cases = (
        (exponential, lambda y: None),
        (layers, grow(layers[0].weight)),
        (layers, grow(layers[1].weight)),
        (layers, lambda y: (y.sum().backward(retain_graph=True), step())),
        (lambda h: h.exp() * layers[0].weight.sum(), grow(layers[0].weight)),
    )
    for i, (forward, change) in enumerate(cases):
        x = torch.randn(64, 128, requires_grad=True)
        for recompute in ((), RECOMPUTE):
            with compress_activations(bits=bits, recompute=recompute):
                y = forward(x * 1)
            change(y)
            if i < 4:
                with pytest.raises(RuntimeError, match="changed in place after it was saved"):
                    y.sum().backward()
            else:
                y.sum().backward()  # a sum keeps nothing


def test_changes_in_place_that_torch_allows():
    x, layer = torch.randn(64, 128, requires_grad=True), nn.Linear(128, 128)
    small = torch.randn(4, 128, requires_grad=True)
    for context in (compress_activations(bits=EXACT), compress_activations()):
        with context:
            y = layer(x * 1).add_(1)
            with torch.autocast("cpu", torch.bfloat16):
                h = small * 1
                z = layer(h)
            h.add_(1)  # the layer has its cast
        layer.bias.detach().mul_(10)
        layer.weight.data.mul_(1)  # torch does not see this one either
        layer.weight.grad = None
        z.float().sum().backward()
        wanted = small.detach().bfloat16().float().sum(0).expand(128, 128)
        assert torch.allclose(layer.weight.grad, wanted, rtol=0.02, atol=0.02)
        y.sum().backward()
    with torch.inference_mode():
        frozen = torch.randn(64, 128)
    with torch.autocast("cpu", torch.bfloat16), compress_activations(bits=EXACT, recompute=RECOMPUTE):
        layer.requires_grad_(False)(F.gelu(frozen) + x).sum().backward()


# --- beside other things --------------------------------------------------------------------------------------


def hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True), torch.overrides._get_current_function_mode()


def test_an_exception_leaves_nothing_behind():
    before = hooks()
    with pytest.raises(RuntimeError, match="planted"), compress_activations():
        raise RuntimeError("planted")
    assert hooks() == before


def test_the_inner_context_counts_alone_and_backward_may_run_inside(ids: Tensor):
    model = model_of()
    with compress_activations(bits=8) as outer:
        with compress_activations(bits=2) as inner:
            model(ids, ids)[1].backward()
        assert outer.bytes_before == 0 < inner.bytes_after
        model(ids, ids)[1].backward()
    assert inner.bytes_before == outer.bytes_before and inner.bytes_after < outer.bytes_after


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("recompute", [(), RECOMPUTE])
def test_checkpoints_keep_their_inputs_coded(inside: bool, recompute: tuple[str, ...], ids: Tensor):
    model = model_of()
    exact = gradient(model.blocks, model(ids, ids)[1])

    def run() -> Tensor:
        x = model.embed(ids)
        for block in model.blocks:
            x = checkpoint(block, x, model.cos[:64], model.sin[:64], use_reentrant=False)
        return F.cross_entropy(model.head(model.final_norm(x)).flatten(0, 1), ids.flatten())

    with compress_activations(bits=8, recompute=recompute) as report:
        loss = run()
        coded = gradient(model.blocks, loss) if inside else None
    coded = gradient(model.blocks, loss) if coded is None else coded
    assert report.by_kind["checkpoint"][0] == 2 * ids.numel() * 128 * 4
    assert report.by_kind["checkpoint"][1] < 0.3 * report.by_kind["checkpoint"][0]
    assert {"query", "nonlinearity"}.isdisjoint(report.by_kind)
    assert 0 < error(coded, exact) < 0.02


@pytest.mark.parametrize("recompute", [(), RECOMPUTE])
def test_autocast(recompute: tuple[str, ...], ids: Tensor):
    model = model_of()
    with torch.autocast("cpu", torch.bfloat16):
        exact = gradient(model, model(ids, ids)[1])
        with compress_activations(bits=8, recompute=recompute) as report:
            loss = model(ids, ids)[1]
    assert {"query", "linear"} <= set(report.by_kind) and report.bytes_after < 0.55 * report.bytes_before
    assert error(gradient(model, loss), exact) < 0.02


@pytest.mark.parametrize("recompute", [(), RECOMPUTE])
def test_a_cast_in_another_order_is_no_cast_of_the_input(recompute: tuple[str, ...]):
    layer, norm = nn.Linear(32, 16), nn.LayerNorm(40)
    x = torch.randn(4, 32, 40, requires_grad=True)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(norm(x * 1).transpose(1, 2)).float().square().sum()

    exact = gradient(layer, loss())
    with compress_activations(bits=8, recompute=recompute):
        coded = loss()
    assert 0 < error(gradient(layer, coded), exact) < 0.02


def test_a_computed_weight_is_no_cast_of_the_input():
    x, weight = (torch.randn(128, 128, requires_grad=True) for _ in range(2))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x * 1, weight * 0.5).float().square().sum() + normed(x * 1).float().square().sum()

    exact = torch.autograd.grad(loss(), (x, weight, *normed.parameters()))
    with compress_activations(bits=8):
        coded = loss()
    for found, wanted in zip(torch.autograd.grad(coded, (x, weight, *normed.parameters())), exact, strict=True):
        assert error(found, wanted) < 0.02


def test_layers_that_autocast_feeds_from_one_tensor_share_its_code():
    norm, layers = nn.LayerNorm(128), [nn.Linear(128, 128) for _ in range(3)]
    x = torch.randn(64, 128, requires_grad=True) * 1
    with torch.autocast("cpu", torch.bfloat16), compress_activations(BF16, recompute=RECOMPUTE) as report:
        y = norm(x)
        total = sum(layer(y).float().sum() for layer in layers)
    assert report.by_kind["linear"] == (64 * 128 * 2, 0)
    total.backward()


@pytest.fixture
def one_worker(tmp_path: Path) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_data_parallel(one_worker: None, ids: Tensor):
    plain, model = model_of(), model_of()
    parallel = nn.parallel.DistributedDataParallel(model)
    for net in (plain, parallel):
        with compress_activations() as report:
            loss = net(ids, ids)[1]
        loss.backward()
        assert report.bytes_after < 0.2 * report.bytes_before
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_compiled_model_runs_uncompiled_in_the_context(ids: Tensor):
    torch._dynamo.reset()
    model = model_of()
    with compress_activations() as plain:
        expected = gradient(model, model(ids, ids)[1])
    compiled = torch.compile(model, backend="aot_eager")
    with compress_activations() as report:
        loss = compiled(ids, ids)[1]
    assert report.by_kind == plain.by_kind
    assert torch.equal(gradient(model, loss), expected)


def test_a_model_compiled_inside_the_context_runs_uncompiled_too():
    script = """
import sys, torch
from tq.train.activations import compress_activations
assert "torch._dynamo" not in sys.modules
model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU())
with compress_activations() as report:
    torch.compile(model, backend="aot_eager")(torch.randn(64, 128, requires_grad=True) * 1)
assert set(report.by_kind) == {"linear", "nonlinearity"}, report.by_kind
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# --- the layer for compiled models ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_keep_codes(backend: str):
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(256, 128)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
    held, sine = [x, *model.parameters()], x.nbytes
    kept, loss = saved_by(lambda: torch.compile(model, backend=backend)(x).sin().sum(), held)
    exact = gradient(model, loss)
    assert kept - sine == 3 * x.nbytes
    assert replace_linears(model, BF16) == ["0", "1", "2", "3"]
    compiled, found = torch.compile(model, backend=backend), []
    for _ in range(2):
        coded, loss = saved_by(lambda: compiled(x).sin().sum(), held)
        found.append(gradient(model, loss))
    assert coded - sine == pytest.approx(4 * 256 * 66, rel=0.001)
    assert all(0 < error(one, exact) < 0.15 for one in found) and not torch.equal(*found)


def test_compiled_projections_of_one_tensor_share_its_code():
    torch._dynamo.reset()

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return sum(layer(x) for layer in self.layers)

    model, x = Three(), torch.randn(256, 128)
    replace_linears(model, BF16)
    coded, _ = saved_by(lambda: torch.compile(model, backend="aot_eager")(x).sum(), [x, *model.parameters()])
    assert coded == pytest.approx(256 * 66, rel=0.01)


def test_the_layer_is_unbiased_and_differentiates_as_its_model():
    layer = nn.Linear(64, 32)
    coded, x = CompressedLinear(layer), torch.randn(8, 4, 64, requires_grad=True)
    assert coded.weight is layer.weight and set(coded.state_dict()) == {"weight", "bias", "_extra_state"}
    assert torch.equal(coded(x), layer(x))
    wanted = torch.autograd.grad(layer(x).sin().sum(), (x, layer.weight, layer.bias))
    runs = [torch.autograd.grad(coded(x).sin().sum(), (x, layer.weight, layer.bias)) for _ in range(100)]
    assert torch.allclose(runs[0][0], wanted[0], atol=1e-6) and torch.allclose(runs[0][2], wanted[2], atol=1e-5)
    mean = torch.stack([run[1] for run in runs]).mean(0)
    assert error(mean, wanted[1]) < 0.2 * error(runs[0][1], wanted[1])


def test_a_run_of_coded_layers_resumes_and_is_evaluated_without_a_trace():
    def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        replace_linears(model)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for i in steps:
            optimizer.zero_grad()
            model(torch.randn(32, 64, generator=torch.Generator().manual_seed(i))).square().mean().backward()
            optimizer.step()

    (whole, a), (first, b), (second, c) = start(0), start(0), start(1)
    train(whole, a, range(6))
    train(first, b, range(3))
    with torch.no_grad():
        first(torch.randn(2, 64))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    train(second, c, range(3, 6))
    for one, other in zip(whole.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert second[0].clock is second[2].clock and int(second[0].clock.step) == 6


def test_a_state_of_plain_layers_loads_and_a_bad_step_is_refused():
    plain, coded = nn.Linear(64, 32), CompressedLinear(nn.Linear(64, 32))
    coded(torch.randn(2, 64))
    coded.load_state_dict(plain.state_dict())
    assert torch.equal(coded.weight, plain.weight) and int(coded.clock.step) == 1
    coded.load_state_dict({**plain.state_dict(), "_extra_state": 7})
    assert int(coded.clock.step) == 7
    with pytest.raises(ValueError, match="extra state must be an integer"):
        coded.set_extra_state(torch.ones(2))
    with pytest.raises(RuntimeError, match="Missing key"):
        coded.load_state_dict({"_extra_state": 7})


@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_second_derivative_is_refused(backend: str | None):
    torch._dynamo.reset()
    layer = CompressedLinear(nn.Linear(64, 32))
    y = (torch.compile(layer, backend=backend) if backend else layer)(torch.randn(8, 64)).square().sum()
    torch.autograd.grad(y, layer.weight, retain_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y, layer.weight, create_graph=True)


def test_operations_keep_the_rules_of_the_dispatcher():
    x, weight, step = torch.randn(16, 64), torch.randn(8, 64), torch.zeros((), dtype=torch.int64)
    codec = CompressedLinear(nn.Linear(64, 8)).codec
    payload, scales = torch.ops.tq.encode(x, codec, step)
    inputs = (x.requires_grad_(), weight.requires_grad_(), None, payload, scales, codec, step)
    torch.library.opcheck(torch.ops.tq.encode, (x.detach(), codec, step), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.tq.linear, inputs, test_utils=("test_schema", "test_faketensor"))


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error_type", "message"),
    [
        ({"codec": 4}, TypeError, "codec must be a tq.Codec or None, got int"),
        ({"bits": 9}, ValueError, "bits must be from 1 to 8"),
        ({"bits": {"softmax": 4}}, ValueError, r"bits must be for kinds among .*got \['softmax'\]"),
        ({"recompute": ("dropout",)}, ValueError, r"recompute must be among norm, nonlinearity, got \['dropout'\]"),
        ({"min_elements": 0}, ValueError, "min_elements must be an int of at least 1, got 0"),
        ({"step": -1}, ValueError, "step must be an int of at least 0, got -1"),
    ],
)
def test_a_bad_argument_is_refused(options: dict, error_type: type[Exception], message: str):
    with pytest.raises(error_type, match=message):
        compress_activations(**options)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="got Sequential without any"):
        replace_linears(nn.Sequential(nn.GELU()))
    with pytest.raises(TypeError, match=r"must be a torch.nn.Linear, got Conv1d"):
        CompressedLinear(nn.Conv1d(1, 1, 1))
    assert set(EXACT) == set(BITS)
