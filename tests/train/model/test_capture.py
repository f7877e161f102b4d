"""Laws of the snapshot: it changes nothing, and what it returns is what training really holds."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tq.train.model import capture
from tq.train.model.capture import KINDS, Captured, leading_rows, snapshot
from tq.train.model.corpus import Corpus, load
from tq.train.model.gpt import GPT, GPTConfig
from tq.train.model.loop import TrainConfig, Trainer

MODEL = GPTConfig(layers=2, hidden=32, heads=2, vocab=256, seq=32)
VARIANTS = {
    "gelu": MODEL,
    "relu2": replace(MODEL, activation="relu2", qk_norm=True),
    "swiglu": replace(MODEL, activation="swiglu", kv_heads=1, tie_embeddings=False),
}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load(max_bytes=400_000)


def trainer(corpus: Corpus, model: GPTConfig = MODEL, steps_done: int = 2, autocast: bool = False) -> Trainer:
    config = TrainConfig(steps=10, batch=4, warmup=2, autocast=torch.bfloat16 if autocast else None)
    run = Trainer(GPT(model), corpus, config)
    run.train(steps_done, progress=False)
    return run


def of(records: list[Captured], kind: str, layer: int | None = None) -> dict[str, Tensor]:
    """By role for activations (unique within these models' blocks but for norms), by name for the others."""
    chosen = [r for r in records if r.kind == kind and r.layer == layer]
    return {(r.role if kind == "activation" and "norm" not in r.name else r.name): r.tensor for r in chosen}


@pytest.mark.parametrize("autocast", [False, True])
def test_a_snapshot_changes_nothing(corpus: Corpus, autocast: bool):
    plain, observed = trainer(corpus, autocast=autocast), trainer(corpus, autocast=autocast)
    gradients = [p.grad for p in observed.model.parameters()]
    copies = [g.clone() for g in gradients if g is not None]
    state = torch.get_rng_state()
    first, second = snapshot(observed), snapshot(observed)
    assert torch.equal(state, torch.get_rng_state())
    for a, b in zip(first, second, strict=True):
        assert (a.kind, a.layer, a.name) == (b.kind, b.layer, b.name) and torch.equal(a.tensor, b.tensor)
    for p, gradient, copied in zip(observed.model.parameters(), gradients, copies, strict=True):
        assert p.grad is gradient and torch.equal(gradient, copied)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in observed.model.modules())
    assert observed.train(progress=False) == plain.train(progress=False)
    with torch.no_grad():
        kept = [r.tensor.clone() for r in first]
    observed.model.requires_grad_(False)
    for p in observed.model.parameters():
        p.zero_()
    assert all(torch.equal(r.tensor, copied) for r, copied in zip(first, kept, strict=True))  # copies, not views


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_gradients_and_moments_are_the_real_ones(corpus: Corpus, name: str):
    run = trainer(corpus, VARIANTS[name])
    records = snapshot(run)
    for kind in ("weight", "gradient", "momentum", "second_moment"):
        assert sum(r.tensor.numel() for r in records if r.kind == kind) == run.model.num_parameters
    run.optimizer.zero_grad()
    run.loss(run.steps_done).backward()  # the batch that the next step sees
    for full, p in run.model.named_parameters():
        layer, inside = (int(full.split(".")[1]), full.split(".", 2)[2]) if full.startswith("blocks") else (None, full)
        state = run.optimizer.state[p]
        assert torch.equal(of(records, "weight", layer)[inside], p)
        assert torch.equal(of(records, "gradient", layer)[inside], p.grad)
        assert torch.equal(of(records, "momentum", layer)[inside], state["exp_avg"])
        assert torch.equal(of(records, "second_moment", layer)[inside], state["exp_avg_sq"])
    assert {r.role for r in records if r.kind == "weight"} >= {"embedding", "attention", "mlp", "norm"}


def test_before_the_first_step_there_are_no_moments(corpus: Corpus):
    assert {r.kind for r in snapshot(trainer(corpus, steps_done=0))} == {"weight", "gradient", "activation"}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_activation_bytes_are_those_that_autograd_saves(corpus: Corpus, name: str, autocast: bool):
    run = trainer(corpus, VARIANTS[name], autocast=autocast)
    records = [r for r in snapshot(run) if r.kind == "activation"]
    held = {t.untyped_storage().data_ptr() for t in [*run.model.parameters(), *run.model.buffers()]}
    weights = {p.to(torch.bfloat16).sum(dtype=torch.float64).item() for p in run.model.parameters() if p.ndim == 2}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        copied_weight = tensor.dtype == torch.bfloat16 and tensor.sum(dtype=torch.float64).item() in weights
        if tensor.is_floating_point() and tensor.ndim and pointer not in held and not copied_weight:
            saved[pointer] = tensor.detach()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run.loss(run.steps_done)
    assert len(records) == len(saved)
    assert sum(r.nbytes for r in records) == sum(t.untyped_storage().nbytes() for t in saved.values())
    assert all(r.tensor.nbytes == r.nbytes and r.tensor.is_floating_point() for r in records)
    for p in run.model.parameters():  # some activations have the shape of a weight here; none is one, or a copy of one
        assert not [r.name for r in records if r.shape == p.shape and torch.equal(r.tensor, p.to(r.tensor.dtype))]
    keys = [(r.layer, r.name) for r in records]
    assert len(set(keys)) == len(keys)


def test_block_activations_add_up_to_the_formula(corpus: Corpus):
    """Elements saved by one gelu block a token, in units of C, beside the rows of statistics."""
    run = trainer(corpus)
    by_role: dict[str, int] = {}
    for r in snapshot(run, kinds=["activation"], layers=[1]):
        by_role[r.role] = by_role.get(r.role, 0) + r.tensor.numel()
    unit = run.tokens_per_step * MODEL.hidden
    assert by_role.pop("norm.normalized", 2 * unit) == 2 * unit  # the fused kernel of a GPU does not save it
    assert by_role.pop("norm.statistics") == 2 * run.tokens_per_step
    assert by_role.pop("attention.logsumexp") == MODEL.heads * run.tokens_per_step
    one = ["attention.input", "attention.query", "attention.key", "attention.value", "attention.output", "mlp.input"]
    assert by_role == {**dict.fromkeys(one, unit), "norm.input": 2 * unit, "mlp.pre": 4 * unit, "mlp.hidden": 4 * unit}


def test_names_say_what_the_values_are(corpus: Corpus):
    run = trainer(corpus)
    records = snapshot(run)
    block, outside = of(records, "activation", 0), of(records, "activation")
    weight = of(records, "weight", 0)
    close = lambda a, b: torch.testing.assert_close(a.flatten(), b.flatten(), atol=1e-5, rtol=1e-4)  # noqa: E731
    ids, _ = run.corpus.batch(run.steps_done, 4, 32, 0)
    close(block["attention_norm.input"], of(records, "weight")["embed.weight"][ids])
    norm = block["attention_norm.input"] * block["attention_norm.statistics"]
    close(norm * weight["attention_norm.weight"], block["attention.input"])
    value = block["attention.input"] @ weight["attention.value.weight"].T
    close(block["attention.value"].transpose(1, 2), value)
    q, k, v = (block[f"attention.{name}"] for name in ("query", "key", "value"))
    close(F.scaled_dot_product_attention(q, k, v, is_causal=True), block["attention.output"])
    close(block["mlp.input"] @ weight["mlp.up.weight"].T, block["mlp.pre"])
    close(F.gelu(block["mlp.pre"], approximate="tanh"), block["mlp.hidden"])
    logits = outside["head.input"] @ of(records, "weight")["embed.weight"].T
    close(logits.log_softmax(-1), outside["logits.log_softmax"])


def test_swiglu_and_relu2_are_named_too(corpus: Corpus):
    block = of(snapshot(trainer(corpus, VARIANTS["relu2"]), kinds=["activation"]), "activation", 1)
    assert torch.equal(block["mlp.internal"].square().flatten(), block["mlp.hidden"].flatten())
    records = snapshot(trainer(corpus, VARIANTS["swiglu"]), kinds=["activation"], layers=[1])
    factors = [r.tensor for r in records if r.role == "mlp.factor"]
    block = of(records, "activation", 1)
    torch.testing.assert_close((factors[0] * factors[1]).flatten(), block["mlp.hidden"].flatten())
    assert len(factors) == 2 and any(torch.equal(F.silu(block["mlp.pre"]), factor) for factor in factors)


def test_selection(corpus: Corpus):
    run = trainer(corpus)
    everything = {(r.kind, r.layer, r.name) for r in snapshot(run)}
    for kinds, layers in ((["gradient"], None), (["activation", "weight"], [1]), (KINDS, [None]), (["momentum"], [0])):
        expected = {key for key in everything if key[0] in kinds and (layers is None or key[1] in layers)}
        assert {(r.kind, r.layer, r.name) for r in snapshot(run, kinds=kinds, layers=layers)} == expected != set()


def test_a_cap_takes_leading_whole_rows(corpus: Corpus):
    run = trainer(corpus)
    for whole, part in zip(snapshot(run), snapshot(run, max_elements=100), strict=True):
        assert (whole.name, whole.shape, whole.nbytes) == (part.name, part.shape, part.nbytes)
        last = whole.shape[-1]
        assert part.tensor.numel() <= max(100, last) and (part.tensor.ndim < 2 or part.tensor.shape[-1] == last)
        assert part.tensor.numel() > min(whole.tensor.numel(), 100) - last
        assert torch.equal(part.tensor.flatten(), whole.tensor.flatten()[: part.tensor.numel()])
        assert part.tensor.untyped_storage().nbytes() == part.tensor.nbytes  # nothing else is kept alive
    permuted = torch.arange(120).view(2, 3, 4, 5).transpose(1, 2)
    assert torch.equal(leading_rows(permuted, 33), permuted.reshape(-1, 5)[:6])


def test_nothing_saved_outlives_the_snapshot(corpus: Corpus, monkeypatch: pytest.MonkeyPatch):
    alive: list[weakref.ref[Tensor]] = []
    pack = capture._Recorder._pack

    def watched(self: capture._Recorder, tensor: Tensor) -> Tensor:
        packed = pack(self, tensor)
        alive.append(weakref.ref(packed))
        return packed

    monkeypatch.setattr(capture._Recorder, "_pack", watched)
    run = trainer(corpus)
    gc.collect()
    gc.disable()  # by reference counts alone: no cycle may wait for the collector
    try:
        for kinds in (KINDS, ["activation"]):
            records = snapshot(run, kinds=kinds, max_elements=64)
            tensors = [weakref.ref(r.tensor) for r in records]
            del records
            assert len(alive) > 40 and not any(ref() is not None for ref in [*alive, *tensors])
    finally:
        gc.enable()


def test_an_error_during_forward_leaves_no_hooks(corpus: Corpus, monkeypatch: pytest.MonkeyPatch):
    run = trainer(corpus)
    with monkeypatch.context() as patch:
        patch.setattr(run.model.blocks[1].mlp.nonlinearity, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            snapshot(run)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.model.modules())
    assert run.steps_done == 2 and snapshot(run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": ["gradients"]}, r"kinds must be among .* got \['gradients'\]"),
        ({"layers": [2]}, r"layers must be None or in 0..1, got \['2'\]"),
        ({"max_elements": 0}, "max_elements must be positive or None, got 0"),
    ],
)
def test_bad_arguments_are_refused(corpus: Corpus, arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        snapshot(trainer(corpus), **arguments)
