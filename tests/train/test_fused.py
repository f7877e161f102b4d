"""The one-pass AdamW step gives the bits of the unfused one, whatever is asked of it, and says what it leaves out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tq.quant import dispatch
from tq.train.optim import TurboQuantAdamW

SIZES = ((257, 16), (3,), (128,), (), (2047,), (0, 5), (65, 70), (1,), (4000,))  # whole blocks, tails, straddling ones
STATES = (None, (4, 8), (8, 8), (3, 4), (2, 2), (7, 8), (5, 4), (6, 2))


def parameters(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def give(tensors: list[nn.Parameter], step: int, *, scale: float = 1.0, without: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for number, p in enumerate(tensors):
        drawn = torch.randn(p.shape, generator=generator) * 10.0 ** torch.randn(p.shape, generator=generator)
        p.grad = None if number in without else (scale * drawn).to(p.dtype)


def both(dtype: torch.dtype = torch.float32, steps: int = 4, **options: Any) -> tuple[Any, Any]:
    """The optimizers of either way after the same steps."""
    made = []
    for impl in ("reference", "cpu"):
        tensors = parameters(dtype)
        groups = [{"params": tensors[:4]}, {"params": tensors[4:], "lr": 3e-3, "weight_decay": 0.0}]
        optimizer = TurboQuantAdamW(groups, variant=options.get("variant", "local"), impl=impl,
                                    **{k: v for k, v in options.items() if k != "variant"})  # fmt: skip
        for step in range(steps):
            give(tensors, step, without=((1, 6) if step == 2 else (4,) if step < 2 else ()))
            optimizer.step()
        made.append(optimizer)
    return made[0], made[1]


def assert_alike(a: TurboQuantAdamW, b: TurboQuantAdamW) -> None:
    for x, y in zip(weights(a), weights(b), strict=True):
        assert torch.equal(x, y), f"shape {tuple(x.shape)}: {(x != y).sum()} of {x.numel()} differ"
    for (_, _, one), (_, _, other) in zip(a._buckets(), b._buckets(), strict=True):
        assert one.steps == other.steps and one.done == other.done and one.tensors.keys() == other.tensors.keys()
        for name, x in one.tensors.items():
            assert torch.equal(x, other.tensors[name]), name


def weights(optimizer: TurboQuantAdamW) -> list[Tensor]:
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_bits_are_those_of_the_unfused_path(state: tuple[int, int] | None, dtype: torch.dtype) -> None:
    assert_alike(*both(dtype, state=state))


@pytest.mark.parametrize("state", (None, (4, 8)))
@pytest.mark.parametrize(
    "options",
    (
        {"max_norm": 0.5},
        {"maximize": True},
        {"maximize": True, "max_norm": 1e-3, "betas": (0.3, 0.5), "eps": 1e-3},
        {"variant": "gradient"},
        {"variant": "gradient-ef", "max_norm": 1.0},
        {"variant": "exact", "warmup": 1},
        {"variant": "gradient", "maximize": True},
        {"bucket_elements": 1000},
    ),
)
def test_options_change_nothing_of_that(state: tuple[int, int] | None, options: dict[str, Any]) -> None:
    assert_alike(*both(state=state, **options))
    assert_alike(*both(torch.bfloat16, state=state, stochastic_rounding=True, **options))


def test_under_a_gradient_scaler() -> None:
    for dtype, power in itertools.product((torch.float32, torch.float16), (4.0, 3.0)):
        made = []
        for impl in ("reference", "cpu"):
            tensors = parameters(dtype)
            optimizer = TurboQuantAdamW(tensors, variant="local", state=(4, 8), impl=impl, max_norm=10.0)
            optimizer.grad_scale = torch.tensor(power)  # type: ignore[attr-defined]  # as GradScaler sets them
            optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
            for step in range(3):
                give(tensors, step, scale=power)
                optimizer.step()
            made.append(optimizer)
        assert_alike(made[0], made[1])


def test_threads_change_no_bit() -> None:
    """And an odd length, so that the last group is not whole."""
    size, found = 1_000_003, []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            p = nn.Parameter(torch.linspace(-1, 1, size))
            optimizer = TurboQuantAdamW([p], variant="local", state=(4, 8), impl="cpu")
            for step in range(3):
                p.grad = torch.randn(size, generator=torch.Generator().manual_seed(step))
                optimizer.step()
            found.append((p.detach().clone(), *optimizer._stores[0][0][1].tensors.values()))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("maximize", (False, True))
def test_moments_in_fp32_give_pytorchs_weights(maximize: bool) -> None:
    """To the last places: PyTorch's fused kernel rounds the ends of tensors otherwise."""
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    options: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1, maximize=maximize)
    a = TurboQuantAdamW(ours, variant="local", impl="cpu", **options)
    b = torch.optim.AdamW(theirs, fused=True, **options)
    for step in range(20):
        give(ours, step)
        give(theirs, step)
        a.step()
        b.step()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=3e-6, atol=3e-7)
    wholes = [n for n, size in enumerate(SIZES) if torch.Size(size).numel() % 16 == 0]
    assert wholes and all(torch.equal(ours[n], theirs[n]) for n in wholes)


def test_small_updates_survive_rounding_at_random_only() -> None:
    """An update of a tenth of a last place, 400 times: to the nearest it vanishes, at random it adds up."""
    moved = {}
    for at_random in (False, True):
        p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = TurboQuantAdamW([p], lr=2.0**-7 / 10, weight_decay=0.0, variant="local",
                                    stochastic_rounding=at_random)  # fmt: skip
        for _ in range(400):
            p.grad = torch.full_like(p, -1.0)
            optimizer.step()
        moved[at_random] = (p.detach().float() - 1).mean().item()
    assert moved[False] == 0
    assert moved[True] == pytest.approx(400 * 2.0**-7 / 10, rel=0.05)


def test_what_is_held_of_the_state_is_not_written_over() -> None:
    (p,) = [nn.Parameter(torch.ones(1000))]
    optimizer = TurboQuantAdamW([p], variant="local", state=(4, 8), impl="cpu")
    p.grad = torch.randn(1000)
    optimizer.step()
    addresses = [x.data_ptr() for x in optimizer._stores[0][0][1].tensors.values()]
    optimizer.step()
    assert [x.data_ptr() for x in optimizer._stores[0][0][1].tensors.values()] == addresses  # in place
    m, v = (x.clone() for x in optimizer.moments(p))
    for hold in (optimizer.state_dict, lambda: dict(optimizer.state)):
        held = hold()
        optimizer.step()
        optimizer.step()
        entry = held["state"][0] if "state" in held else held[p]
        kept_m, kept_v = (entry[name].decoded() for name in ("exp_avg", "exp_avg_sq"))
        assert torch.equal(kept_m, m) and torch.equal(kept_v, v)
        again = TurboQuantAdamW([p], variant="local", state=(4, 8))
        if "state" in held:
            again.load_state_dict(held)
            assert torch.equal(again.moments(p)[0], m)
        m, v = (x.clone() for x in optimizer.moments(p))


def test_what_it_does_not_cover_is_said_and_goes_the_other_way() -> None:
    wide = nn.Parameter(torch.ones(10, dtype=torch.float64))
    across = nn.Parameter(torch.ones(6, 7).t())
    for p, said in ((wide, "fp32, bf16 and fp16"), (across, "contiguous weights, got strides")):
        for impl in ("auto", "cpu"):
            p.grad = torch.ones_like(p)
            optimizer = TurboQuantAdamW([p], variant="local", impl=impl)
            if impl == "auto":
                optimizer.step()
                continue
            with pytest.raises(RuntimeError, match=f"impl='cpu' cannot run: it covers .*{said}"):
                optimizer.step()
    p = nn.Parameter(torch.ones(10))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="got 'momentum'"):
        TurboQuantAdamW([p], variant="momentum", impl="cpu", warmup=0).step()
    with pytest.raises(ValueError, match="impl must be one of 'auto', 'reference', 'cpu', 'triton'; got 'cuda'"):
        TurboQuantAdamW([p], impl="cuda")


@pytest.mark.parametrize("impl", ("reference", "cpu"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_what_is_not_finite_is_found_wherever_it_is(impl: str, dtype: torch.dtype) -> None:
    tensors = parameters(dtype)
    optimizer = TurboQuantAdamW(tensors, variant="local", state=(4, 8), impl=impl)
    give(tensors, 0)
    optimizer.step()
    before = [p.detach().clone() for p in tensors]
    for bad, number, at in ((math.nan, 0, 0), (math.inf, 1, 2), (-math.inf, 4, 2046), (math.nan, 8, 3999)):
        give(tensors, 1)
        tensors[number].grad.view(-1)[at] = bad  # type: ignore[union-attr]
        with pytest.raises(FloatingPointError, match="nothing was changed"):
            optimizer.step()
    if dtype != torch.float16:
        give(tensors, 1)
        tensors[2].grad[5] = 1e25  # type: ignore[index]  # finite, but its square is not
        with pytest.raises(FloatingPointError, match="norm, [0-9.]+e.2[45], is beyond fp32"):
            optimizer.step()
    assert all(torch.equal(p, x) for p, x in zip(tensors, before, strict=True))
    give(tensors, 1)
    tensors[2].grad[5] = math.nan  # type: ignore[index]
    optimizer.nonfinite = "propagate"
    optimizer.step()
    assert [bool(p.isnan().any()) for p in tensors] == [number == 2 for number in range(len(tensors))]


def test_the_largest_gradient() -> None:
    from tq.kernels import adamw

    for size in (1, 15, 16, 17, 511, 512, 5000, 300_001):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size))
        for at in (0, size // 2, size - 1):
            x[at] = -50.0 - at % 7
            half = x.clone().bfloat16()
            half[at] = 0.0
            assert adamw.largest([half, x, torch.zeros(3).half()]) == 50.0 + at % 7
            x[at] = 0.0


def test_a_gradient_that_is_read_later_sees_that_weights_changed() -> None:
    p = nn.Parameter(torch.ones(4))
    loss = (p * p).sum()
    p.grad = torch.ones(4)
    TurboQuantAdamW([p], variant="local", impl="cpu").step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_numba_the_unfused_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_kernel", lambda impl: "numba is not installed")
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    TurboQuantAdamW([p], variant="local").step()
    with pytest.raises(RuntimeError, match="numba is not installed"):
        TurboQuantAdamW([p], variant="local", impl="cpu").step()


@pytest.mark.parametrize("variant", ("local", "gradient"))
def test_a_compiled_step_is_one_operation_and_gives_the_same_bits(variant: str) -> None:
    """Without a break of the graph, and without compiling anew for a later step or another learning rate."""
    made = []
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager")
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 8))
        optimizer = TurboQuantAdamW(model.parameters(), lr=1e-2, variant=variant, state=(4, 8), warmup=0)
        step = torch.compile(optimizer.step, fullgraph=True, backend=counted) if compiles else optimizer.step
        for seed in range(8):
            x = torch.randn(16, 40, generator=torch.Generator().manual_seed(seed))
            model.zero_grad()
            model(x).square().mean().backward()
            step()
            optimizer.param_groups[0]["lr"] *= 0.9
        made.append(optimizer)
    assert_alike(*made)
    assert counted.frame_count == 1
    bad = made[1].param_groups[0]["params"][0]
    bad.grad[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="parameter 0 of group 0"):
        step()


@pytest.mark.parametrize(
    ("options", "said"),
    (
        ({"variant": "gradient"}, "variant must be 'local' or 'exact' with capturable=True"),
        ({"nonfinite": "raise"}, "nonfinite must be 'propagate' with capturable=True"),
        ({"warmup": 2}, "warmup must be 0 with capturable=True"),
        ({"impl": "cpu"}, "impl must be 'auto' or 'triton' with capturable=True"),
    ),
)
def test_what_a_graph_cannot_hold_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TurboQuantAdamW(parameters(torch.float32), **{"variant": "local", "nonfinite": "propagate"} | options,
                        capturable=True)  # fmt: skip


def test_a_graph_wants_a_gpu() -> None:
    tensors = parameters(torch.float32)
    optimizer = TurboQuantAdamW(tensors, variant="local", nonfinite="propagate", capturable=True)
    give(tensors, 0)
    before = [p.detach().clone() for p in tensors]
    with pytest.raises(RuntimeError, match="impl='triton' cannot run: it works on CUDA tensors, got one on cpu"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(tensors, before, strict=True))
