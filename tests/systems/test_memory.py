"""Memory by part: the papers' closed forms, ZeRO, recomputation, compression, and what is refused."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq import Codec
from tq.systems import Bits, Compression, Layout, Transformer, memory
from tq.systems.memory import activation_bytes

GPT = Transformer.preset("megatron-22b")
LLAMA = Transformer.preset("llama2-7b")

layouts = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4]), dp=st.sampled_from([2, 4, 16]),
    micro_batch=st.sampled_from([1, 2, 4]), global_batch=st.just(256),
    recompute=st.sampled_from(["none", "selective", "full"]), sequence_parallel=st.booleans(),
)  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("micro", [1, 4])
def test_activations_are_korthikantis_formulas(tp: int, micro: int) -> None:
    s, h, a = GPT.seq, GPT.hidden, GPT.heads
    sbh = s * micro * h

    def kept(recompute: str, split: bool) -> float:
        layout = Layout(tp, global_batch=micro, micro_batch=micro, recompute=recompute, sequence_parallel=split)
        return activation_bytes(GPT, layout)[0]

    assert kept("none", False) == pytest.approx(sbh * (10 + 24 / tp + 5 * a * s / (h * tp)))
    assert kept("none", True) == pytest.approx(sbh * (34 + 5 * a * s / h) / tp)
    assert kept("selective", True) == pytest.approx(34 * sbh / tp)
    assert kept("full", False) == pytest.approx(2 * sbh)


def test_interleaving_holds_more_micro_batches() -> None:
    plain = memory(GPT, Layout(8, 4, 1, 1, 16), stage="first").activations
    chunks = memory(GPT, Layout(8, 4, 1, 1, 16, interleave=3), stage="first").activations
    assert chunks / plain == pytest.approx(1 + 3 / (4 * 3))


def test_states_follow_the_law_of_zero() -> None:
    n, dp = LLAMA.parameters, 8
    law = {0: 16 * n, 1: 4 * n + 12 * n / dp, 2: 2 * n + 14 * n / dp, 3: 16 * n / dp}
    for zero, expected in law.items():
        held = memory(LLAMA, Layout(dp=dp, global_batch=dp, zero=zero), gradient_bytes=2.0)
        assert held.weights + held.gradients + held.states == pytest.approx(expected, rel=1e-9)


@given(layouts)
def test_memory_falls_with_the_stage_of_zero(layout: Layout) -> None:
    stages = [memory(GPT, dataclasses.replace(layout, zero=zero)) for zero in range(4)]
    kept = [each.weights + each.gradients + each.states for each in stages]
    assert kept == sorted(kept, reverse=True) and kept[0] > kept[3]
    totals = [each.total for each in stages[:3]]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_sharding_over_one_rank_changes_nothing(recompute: str) -> None:
    totals = {memory(LLAMA, Layout(tp=8, recompute=recompute, zero=zero)).total for zero in range(4)}
    assert len(totals) == 1


def test_a_loss_that_is_not_fused_holds_its_logits_several_times() -> None:
    layout = Layout(tp=2, micro_batch=4, global_batch=4)
    fused, plain = (memory(LLAMA, layout, loss_bytes=width) for width in (4.0, 14.0))
    assert plain.working - fused.working == pytest.approx(10 * 4 * LLAMA.seq * LLAMA.vocab / 2)
    assert memory(LLAMA, layout) == fused
    first = memory(LLAMA, Layout(pp=2, global_batch=2), stage="first", loss_bytes=14.0)
    assert first == memory(LLAMA, Layout(pp=2, global_batch=2), stage="first")  # the last stage has the loss


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"gradient_bytes": -4.0}, ValueError, "gradient_bytes must be a finite positive number, got -4.0"),
        ({"gradient_bytes": float("nan")}, ValueError, "gradient_bytes must be a finite positive number, got nan"),
        ({"gradient_bytes": "4"}, TypeError, "gradient_bytes must be a positive number, got '4'"),
        ({"loss_bytes": float("inf")}, ValueError, "loss_bytes must be a finite positive number"),
        ({"flash": "no"}, TypeError, "flash must be True or False, got 'no'"),
        ({"compression": "x"}, TypeError, "compression must be None or Compression(...), got 'x'"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        memory(GPT, Layout(), **arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)


@given(layouts)
def test_recomputing_and_splitting_never_keep_more(layout: Layout) -> None:
    def kept(recompute: str, split: bool) -> float:
        return memory(GPT, dataclasses.replace(layout, recompute=recompute, sequence_parallel=split)).activations

    for split in (False, True):
        assert kept("full", split) <= kept("selective", split) < kept("none", split)
    for recompute in ("none", "selective", "full"):
        assert kept(recompute, True) <= kept(recompute, False)


@given(layouts, st.integers(1, 8), st.sampled_from([64, 128, 1024]))
def test_codes_take_their_share_of_16_bits(layout: Layout, bits: int, block: int) -> None:
    code = Bits(bits, block)
    both = Compression(activations=code, states=code)
    plain, coded = memory(GPT, layout, stage="first"), memory(GPT, layout, stage="first", compression=both)
    assert coded.activations / plain.activations == pytest.approx(code.bits_per_element / 16)
    assert coded.states / plain.states == pytest.approx((4 + 2 * code.bits_per_element / 8) / 12)
    assert coded.weights == plain.weights


@given(st.integers(1, 8), st.sampled_from([64, 128, 256, 512, 1024]))
def test_bits_of_an_element_are_those_of_the_codec(bits: int, block: int) -> None:
    assert Bits(bits, block).bits_per_element == Codec(bits=bits, block=block).bits_per_element


def test_momentum_traffic_keeps_whole_first_moments() -> None:
    code, layout = Bits(), Layout(dp=8, global_batch=8, zero=1)
    plain, sent = memory(LLAMA, layout), memory(LLAMA, layout, compression=Compression(momentum=code, feedback=True))
    assert sent.states - plain.states == pytest.approx(LLAMA.parameters * (4 * 7 / 8 + 4))
    with pytest.raises(ValueError, match="accepted is zero=0 or 1, got 2"):
        memory(LLAMA, dataclasses.replace(layout, zero=2), compression=Compression(momentum=code))


def test_experts_are_split_over_their_ranks() -> None:
    moe = Transformer.preset("mixtral-8x7b")
    whole, split = (memory(moe, Layout(dp=8, global_batch=8, ep=ep)) for ep in (1, 8))
    experts = 32 * 8 * moe.expert_parameters
    assert whole.weights - split.weights == pytest.approx(2 * experts * 7 / 8)


def test_grouped_queries_keep_fewer_keys() -> None:
    full, grouped = LLAMA, Transformer.preset("llama2-7b", kv_heads=8)
    layout = Layout(global_batch=1)
    saved = activation_bytes(full, layout, True)[0] - activation_bytes(grouped, layout, True)[0]
    assert saved == pytest.approx(2 * 2 * LLAMA.seq * (4096 - 1024))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 3}, "tp must divide heads=64, got 3"),
        ({"pp": 64, "global_batch": 64}, "pp * interleave must be at most layers=48, got 64 * 1"),
        ({"cp": 3}, "cp must divide seq=2048, got 3"),
        ({"dp": 2, "global_batch": 2, "ep": 2}, "ep needs a model with experts, got ep=2 for a dense one"),
    ],
)
def test_layouts_that_cannot_hold_the_model(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        memory(GPT, Layout(**arguments))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 0}, "tp must be an int of at least 1, got 0"),
        ({"dp": 3, "global_batch": 8}, "global_batch must be a multiple of dp * micro_batch = 3, got 8"),
        ({"recompute": "some"}, "recompute must be one of none, selective, full; got 'some'"),
        ({"zero": 4}, "zero must be 0, 1, 2 or 3, got 4"),
        ({"interleave": 2}, "interleave=2 needs pp > 1"),
        ({"ep": 2}, "ep must divide dp * cp = 1, got 2"),
    ],
)
def test_layouts_that_contradict_themselves(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Layout(**arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(zero=1.0), "zero must be 0, 1, 2 or 3, got 1.0"),  # type: ignore[arg-type]
        (lambda: Bits(4, 128, 4.0), "scale_bytes must be an int"),  # type: ignore[arg-type]
        (lambda: Compression(feedback="no"), "feedback must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda: Transformer(2, 64, 4, 100, 16, tied="no"), "tied must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda: Transformer(2, 64, 4, 100, 16, gated="yes"), "gated must be True or False, got 'yes'"),  # type: ignore[arg-type]
        (lambda: memory(None, Layout()), "model must be Transformer(...), got None"),  # type: ignore[arg-type]
        (lambda: memory(GPT, None), "layout must be Layout(...), got None"),  # type: ignore[arg-type]
    ],
)
def test_records_of_the_wrong_kind(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert message in str(caught.value)


def test_a_count_beyond_reason() -> None:
    with pytest.raises(ValueError, match="ffn must be at most 1e"):
        Transformer(2, 64, 4, 100, 16, ffn=10**400)


@pytest.mark.parametrize("arguments", [{"bits": 9}, {"bits": 0}, {"block": 0}, {"scale_bytes": 3}])
def test_bits_that_no_codec_has(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Bits(**arguments)


def test_gradients_and_momentum_are_one_traffic() -> None:
    with pytest.raises(ValueError, match="accepted is one of them, got both"):
        Compression(gradients=Bits(), momentum=Bits())
