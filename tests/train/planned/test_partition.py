"""Plans of compiled steps: gradients, bytes, what is refused; and the private names of torch that they use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tq.quant.codec import Codec
from tq.train.model import GPT, GPTConfig
from tq.train.planned import _torch_partition
from tq.train.planned.joint import Clock, is_dense
from tq.train.planned.partition import PlannedBackend

SHAPE = GPTConfig(layers=2, hidden=64, heads=2, vocab=64, seq=64)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def backend(budget: int | float, **options: Any) -> PlannedBackend:
    return PlannedBackend(budget, **{"repeats": 1, "progress": False, **options})


def ids(seed: int = 0) -> Tensor:
    return torch.randint(0, SHAPE.vocab, (2, SHAPE.seq), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def of_gpt(model: GPT, chosen: Any = None, **options: Any) -> tuple[list[Tensor], int]:
    """Gradients, and bytes that were saved beside weights and tokens."""
    run = model if chosen is None else torch.compile(model, backend=chosen, **options)
    held = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.dtype != torch.int64 and x.untyped_storage()._cdata not in held:
            found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    x = ids()
    run(x, x)  # compiled
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model.zero_grad()
        loss = run(x, x)[1]
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], sum(found.values())


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def error(a: list[Tensor], b: list[Tensor]) -> float:
    """Relative, of all gradients together."""
    wrong = sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True))
    return (wrong / sum(float(x.square().sum()) for x in a)) ** 0.5


@pytest.fixture(scope="module")
def keeping_all() -> list[Tensor]:
    torch._dynamo.reset()
    return of_gpt(GPT(SHAPE, seed=0), backend(1.0, bits=()))[0]


@pytest.mark.parametrize("share", (1.0, 0.6, 0.4, 0.3, 0.2, 0.15))
def test_without_codes_gradients_are_those_of_keeping_all_bit_for_bit(keeping_all: list[Tensor], share: float) -> None:
    chosen = backend(share, bits=())
    found, saved = of_gpt(GPT(SHAPE, seed=0), chosen)
    (plan,) = chosen.plans
    assert same(keeping_all, found)
    assert saved == plan.bytes_after <= share * plan.bytes_before


def test_keeping_all_is_what_eager_mode_does(keeping_all: list[Tensor]) -> None:
    assert error(of_gpt(GPT(SHAPE, seed=0))[0], keeping_all) < 1e-6


@pytest.mark.parametrize("share", (0.6, 0.45, 0.3))
def test_codes_are_among_what_is_saved(keeping_all: list[Tensor], share: float) -> None:
    chosen = coding(share)
    found, saved = of_gpt(GPT(SHAPE, seed=0), chosen)
    (plan,) = chosen.plans
    assert saved == plan.bytes_after <= share * plan.bytes_before
    assert "4 bits" in plan.bytes_by_way and 0 < error(keeping_all, found) < 0.4


class Dearer(PlannedBackend):
    """Plans as if computing again took a thousand times as long."""

    def _priced(self, read: Any) -> Any:
        trace = read.trace
        operations = tuple(
            o._replace(seconds=None if o.seconds is None else 1.0 + 1e3 * o.seconds) for o in trace.graph.operations
        )
        graph = type(trace.graph)(trace.graph.values, operations, trace.graph.asks)
        return super()._priced(read._replace(trace=type(trace)(**{**trace.__dict__, "graph": graph})))


def coding(budget: float, bits: int = 4, **options: Any) -> PlannedBackend:
    return Dearer(budget, bits=(bits,), min_elements=64, repeats=1, progress=False, **options)


def weighted(run: Callable[[Tensor], Tensor], x: Tensor, target: Tensor) -> Tensor:
    return (run(x) * target).sum()


def two_layers() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False))
    return model, torch.randn(64, 64), torch.randn(64, 8)


def test_codes_are_unbiased_and_no_two_steps_rotate_alike() -> None:
    """Means of 200 steps lie within four standard errors in all but one in a thousand elements."""
    model, x, target = two_layers()
    exact = gradients(model, lambda: (model(x) * target).sum())
    chosen = coding(0.2)
    run = torch.compile(model, backend=chosen)
    samples = [gradients(model, lambda: (run(x) * target).sum())[1] for _ in range(200)]
    assert chosen.plans[0].bytes_by_way == {"4 bits": 64 * 64 * 4}
    taken = torch.stack(samples).double()
    errors = (taken.mean(0) - exact[1].double()).abs() / (taken.std(0) / 200**0.5)
    assert float((errors > 4).double().mean()) < 0.001 and float(taken.std(0).min()) > 0


def test_a_new_backend_takes_the_same_steps() -> None:
    model, x, target = two_layers()
    runs = []
    for _ in range(2):
        torch._dynamo.reset()
        run = torch.compile(model, backend=coding(0.2))
        runs.append([gradients(model, partial(weighted, run, x, target)) for _ in range(3)])
    assert all(same(a, b) for a, b in zip(*runs, strict=True)) and not same(runs[0][0], runs[0][1])


def test_forward_passes_may_come_before_backward_passes() -> None:
    """Each pass decodes with the rotation that it coded with."""
    model, x, target = two_layers()
    run = torch.compile(model, backend=coding(0.5, bits=8))
    exact = gradients(model, lambda: (model(x) * target).sum() + (model(2 * x) * target).sum())
    found = gradients(model, lambda: (run(x) * target).sum() + (run(2 * x) * target).sum())
    assert 0 < error(exact, found) < 0.02


class Turned(nn.Module):
    """Saves a tensor whose memory is in another order than its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.gelu(self.first(x).transpose(0, 1)).transpose(0, 1))


def test_the_order_of_memory_comes_back() -> None:
    torch.manual_seed(0)
    model, x = Turned(), torch.randn(96, 64)
    chosen = coding(0.6, bits=8)
    run = torch.compile(model, backend=chosen)
    exact, found = (gradients(model, partial(weighted, each, x, torch.ones(16))) for each in (model, run))
    assert [*chosen.plans[0].bytes_by_way] == ["8 bits"] and 0 < error(exact, found) < 0.02


def test_what_is_random_is_not_run_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(128, 64)

    def of(budget: float) -> list[Tensor]:
        torch._dynamo.reset()
        run = torch.compile(model, backend=backend(budget, bits=()))
        torch.manual_seed(1)
        return gradients(model, lambda: run(x).square().sum())

    assert same(of(1.0), of(0.5))


class Masked(nn.Module):
    """A mask, and places of a maximum of noisy numbers, which only backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.native_dropout(self.first(x), 0.5, True)[0]
        x = nn.functional.gelu(self.second(x))
        return (x + torch.randn_like(x)).max(1).values


def test_parts_of_results_that_only_backward_reads_are_stored() -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(128, 64)
    found = []
    for budget in (1.0, 0.7):
        torch._dynamo.reset()
        chosen = backend(budget, bits=())
        run = torch.compile(model, backend=chosen)
        torch.manual_seed(1)
        found.append(gradients(model, lambda run=run: run(x).square().sum()))  # type: ignore[misc]
        graph = chosen.plans[0].trace.graph
        assert all(graph.operations[graph.values[v].operation].seconds is not None or v in chosen.plans[0].choice.stored
                   for v, value in enumerate(graph.values) if value.asked)
    torch.manual_seed(1)
    assert same(*found) and error(gradients(model, lambda: model(x).square().sum()), found[0]) < 1e-6


def test_statistics_are_stored_and_what_is_written_to_is_read_once() -> None:
    """Batch normalization in training: at every budget the buffers move once, and no gradient loses a bit."""
    found = []
    for budget in (None, 1.0, 0.7, 0.5):
        torch.manual_seed(0)
        torch._dynamo.reset()
        norms = nn.BatchNorm2d(16), nn.BatchNorm2d(8)
        model = nn.Sequential(nn.Conv2d(3, 16, 3), norms[0], nn.ReLU(), nn.Conv2d(16, 8, 3), norms[1])
        x = torch.randn(8, 3, 10, 10).to(memory_format=torch.channels_last)
        run = model if budget is None else torch.compile(model, backend=backend(budget, bits=()))
        for _ in range(2):
            grads = gradients(model, partial(weighted, run, x, torch.ones(6)))
        found.append([*grads, *(b.float() for b in model.buffers())])
    assert error(found[0], found[1]) < 1e-6 and same(found[1], found[2]) and same(found[2], found[3])


class Root(nn.Module):
    """The gradient of a square root divides by it: what backward reads is first multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).abs().sqrt())


def test_what_is_divided_by_is_never_coded() -> None:
    torch.manual_seed(0)
    model, x, chosen = Root(), torch.randn(128, 64), coding(1.0)
    torch.compile(model, backend=chosen)(x).sum().backward()
    graph, signatures = chosen.plans[0].trace.graph, chosen.plans[0].trace.signatures
    ways = {signatures[v.operation].name: len(v.ways) for v in graph.values if v.asked}
    assert ways["aten.sqrt.default"] == 1


class Everyday(nn.Module):
    """Constants, losses that take probabilities, tied weights, a result that is saved and given back."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids) * torch.tensor([2.0])
        for block in self.blocks:
            x = x + nn.functional.gelu(block(x))
        x = nn.functional.layer_norm(x, (64,))
        logits = x @ self.table.weight.t()
        return nn.functional.binary_cross_entropy(torch.sigmoid(logits), torch.full_like(logits, 0.3)), x


@pytest.mark.parametrize("frozen", (0, 4))
def test_everyday_models(frozen: int) -> None:
    torch.manual_seed(0)
    model, x = Everyday(), torch.randint(0, 64, (4, 32))
    for block in model.blocks[:frozen]:
        block.requires_grad_(False)
    exact = gradients(model, lambda: model(x)[0] + model(x)[1].square().mean())
    for chosen in (backend(0.4, bits=()), coding(0.4, bits=8)):
        torch._dynamo.reset()
        run = torch.compile(model, backend=chosen)

        def loss(run: Any = run) -> Tensor:
            found: tuple[Tensor, Tensor] = run(x)
            return found[0] + found[1].square().mean()

        assert error(exact, gradients(model, loss)) < (1e-5 if chosen.bits == () else 0.05)
    assert "8 bits" in chosen.plans[0].bytes_by_way


def test_a_graph_that_is_kept_can_be_gone_through_twice() -> None:
    model, x, target = two_layers()
    run = torch.compile(model, backend=coding(0.5, bits=8))
    loss = weighted(run, x, target)
    first = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    assert same(list(first), list(torch.autograd.grad(loss, [*model.parameters()])))


def test_autocast() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(128, 64)
    run = torch.compile(model, backend=coding(0.6, bits=8))
    with torch.autocast("cpu", torch.bfloat16):
        exact, found = (gradients(model, partial(weighted, each, x, torch.ones(64))) for each in (model, run))
    assert 0 < error(exact, found) < 0.05


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).softmax(-1)).sigmoid()


def test_what_backward_must_have_as_it_was_is_never_coded() -> None:
    """Results of tanh, softmax and sigmoid: the softmax feeds a product too, and takes the stricter of the two."""
    model, x = Softmax(), torch.randn(128, 64)
    chosen = coding(1.0)
    torch.compile(model, backend=chosen)(x).sum().backward()
    asked = [v for v in chosen.plans[0].trace.graph.values if v.asked]
    assert len(asked) == 3 and not any(len(v.ways) > 1 for v in asked)


def test_the_least_that_fits_is_said() -> None:
    """A mask of dropout cannot be made again; all else can."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.GELU()), torch.randn(128, 64)
    with pytest.raises(Exception, match=r"the least that this step can keep is [\d,]+"):
        torch.compile(model, backend=backend(10, bits=()))(x).sum().backward()


def test_norms_convolutions_and_half_precision() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.Flatten(),
        nn.LayerNorm(16 * 64), nn.Linear(16 * 64, 8),
    )  # fmt: skip
    x = torch.randn(4, 3, 8, 8)
    for dtype, most in ((torch.float32, 0.02), (torch.bfloat16, 0.05)):
        torch._dynamo.reset()
        cast, data = model.to(dtype), x.to(dtype)
        exact = gradients(cast, lambda: cast(data).float().square().sum())  # noqa: B023
        chosen = coding(0.6, bits=8)
        run = torch.compile(cast, backend=chosen)
        found = gradients(cast, lambda: run(data).float().square().sum())  # noqa: B023
        assert "8 bits" in chosen.plans[0].bytes_by_way
        assert error([g.float() for g in exact], [g.float() for g in found]) < most


def test_noise_limits_what_is_coded() -> None:
    free = coding(0.3)
    of_gpt(GPT(SHAPE, seed=0), free)
    torch._dynamo.reset()
    less = coding(0.3, noise=free.plans[0].choice.noise / 2)
    of_gpt(GPT(SHAPE, seed=0), less)
    assert 0 < less.plans[0].choice.noise <= free.plans[0].choice.noise / 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # looked at by torch where it goes on after the break
def test_each_graph_of_a_model_has_a_plan() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.gelu(self.first(x))
            torch._dynamo.graph_break()
            return nn.functional.gelu(self.second(x)).square()

    model, x = Broken(), torch.randn(128, 64)
    chosen = backend(0.6, bits=())
    exact = gradients(model, lambda: model(x).sum())
    run = torch.compile(model, backend=chosen)
    assert error(exact, gradients(model, lambda: run(x).sum())) < 1e-6 and len(chosen.plans) == 2


def test_without_gradients_there_is_no_plan() -> None:
    model, chosen, x = GPT(SHAPE, seed=0), backend(0.2), ids()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=chosen)(x, x)[1], model(x, x)[1])
    assert chosen.plans == []


def test_arguments() -> None:
    for bad in (1.5, -1, -0.1):
        with pytest.raises(ValueError, match="budget must be"):
            PlannedBackend(bad)
    for wrong in (True, "half", None):
        with pytest.raises(TypeError, match="budget must be"):
            PlannedBackend(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bits must be"):
        PlannedBackend(0.5, bits=(9,))
    with pytest.raises(TypeError, match="codec must be"):
        PlannedBackend(0.5, codec="4 bits")  # type: ignore[arg-type]


def test_unknown_sizes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    with pytest.raises(Exception, match="pass dynamic=False"):
        torch.compile(model, backend=backend(0.5), dynamic=True)(torch.randn(32, 64)).sum().backward()


# --- what stands below ------------------------------------------------------------------------------------------


def test_dense() -> None:
    x = torch.empty(4, 6, 8)
    assert is_dense(x) and is_dense(x.transpose(0, 2)) and is_dense(torch.empty(1, 8).expand(1, 8))
    assert not is_dense(x[:, ::2]) and not is_dense(torch.empty(1, 8).expand(4, 8)) and not is_dense(x[..., :4])


def test_the_clock_times_each_kind_once_with_inputs_of_its_own() -> None:
    """Also inputs that show an element many times, and indices."""
    calls = []

    def embedding(table: Tensor, places: Tensor, wide: Tensor) -> Tensor:
        calls.append((table.stride(), int(places.max()), wide.stride(), wide.shape))
        return table[places]

    graph = torch.fx.Graph()
    table, places, wide = (graph.placeholder(name) for name in ("table", "places", "wide"))
    table.meta["val"], places.meta["val"] = torch.empty(16, 8).t(), torch.empty(3, dtype=torch.int64)
    wide.meta["val"] = torch.empty(1, 8).expand(5, 8)
    nodes = [graph.call_function(embedding, (table, places, wide)) for _ in range(2)]
    clock = Clock(2, progress=False)
    assert clock(nodes[0]) == clock(nodes[1]) and clock.known
    assert calls == 3 * [((1, 8), 1, (0, 1), (5, 8))]
    table.meta["val"] = torch.empty(1, 8)  # in which one is no place
    assert clock(graph.call_function(embedding, (table, places, wide))) is not None and calls[-1][1] == 0
    wide.meta["val"] = None
    assert clock(graph.call_function(lambda table, _: table.item(), (table, wide))) is None  # not timed: not run again


def test_the_partitioners_of_torch_still_cut_as_they_did() -> None:
    """A joint graph of two operations, cut by hand where it was cut: inputs, what forward needs, what is handed on."""
    seen: dict[str, Any] = {}

    def partition(joint: Any, _: Any, *, num_fwd_outputs: int, static_lifetime_input_indices: Any) -> Any:
        parts = _torch_partition.joint_parts(joint, static_lifetime_input_indices, num_fwd_outputs)
        stored = [node for node in parts.forward if node.name == "sin"]
        made = _torch_partition.cut(joint, [*parts.inputs, *stored], num_fwd_outputs)
        seen.update(inputs=[node.name for node in parts.inputs], saved=[node.name for node in made.saved])
        seen["gradients"] = len(parts.gradients) > 2 and not parts.gradients & parts.forward
        seen["results"] = len(made.forward.graph.find_nodes(op="output")[0].args[0])
        seen["names"] = len(made.forward.graph.find_nodes(op="output")[0].meta["desc"])
        seen["symbolic"] = any(map(_torch_partition.is_symbolic, joint.graph.nodes))
        return _torch_partition.in_order(made.forward, made.backward)

    assert _torch_partition.missing() is None
    x = torch.randn(8, requires_grad=True)
    run = torch.compile(lambda x: x.sin().exp(), backend=_torch_partition.plain_backend(partition))
    run(x).sum().backward()
    assert torch.allclose(x.grad, x.cos() * x.sin().exp())  # type: ignore[arg-type]
    assert seen == {"inputs": ["primals_1"], "saved": ["primals_1", "sin"], "gradients": True, "results": 3, "names": 3,
                    "symbolic": False}
    assert type(_torch_partition.described(0)).__name__ == "SavedForBackwardsAOTOutput"


def test_modes_do_not_reach_inside() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), _torch_partition.without_modes():
        assert float(torch.ones(2).sum()) == 2.0


def test_codecs_are_checked_like_those_of_eager_plans() -> None:
    assert PlannedBackend(0.5).codec == Codec(scale_dtype=torch.bfloat16)
