"""Time of an iteration: laws that hold whatever the constants are, exact cases, arrays, speed, refused combinations."""

import dataclasses
import itertools
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.economics.run_cost import SAVING_INPUTS
from tq.systems import Bits, Cluster, Compression, Efficiency, Layout, Prediction, Transformer, predict, tables
from tq.systems.batch_size import gain
from tq.systems.collectives import Link, ring_s
from tq.systems.efficiency import software_facts
from tq.systems.hardware import NVLINK_LATENCY_S
from tq.systems.iteration import (
    PARTS,
    LayerTime,
    Setting,
    context_parallel_s,
    data_parallel_s,
    expert_parallel_s,
    layer_time,
    pipeline_s,
    tensor_parallel_s,
)

GPT = Transformer.preset("megatron-22b")
MOE = Transformer.preset("mixtral-8x7b")
RATES = ("inter_bytes_per_s", "intra_bytes_per_s", "peak_flops", "hbm_bytes_per_s")
IDEAL = Efficiency(gemm=1.0, hbm=1.0, intra=1.0, inter=1.0)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, pp, dp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4, 8, 16], [1, 2, 4, 8], [1, 2, 8, 32]))
    interleave = draw(st.sampled_from([1, 2, 6])) if pp > 1 else 1
    return Layout(
        tp, pp, dp, draw(st.sampled_from([1, 2, 4])), 1024, draw(st.sampled_from(["none", "selective", "full"])),
        draw(st.booleans()), interleave, draw(st.integers(0, 3)), cp=draw(st.sampled_from([1, 2])),
    )  # fmt: skip


software = st.sampled_from(["megatron-2021", "megatron-core", "megascale", "llama3", "deepspeed-zero3-2021", "fsdp"])


def run(layout: Layout, name: str = "megatron-core", compression: Compression | None = None, **rates: float):  # type: ignore[no-untyped-def]
    return predict(GPT, layout, Cluster("a100-80gb", layout.gpus, **rates), name, compression)  # type: ignore[arg-type]


def sane(found: Prediction) -> bool:
    values = [*found.parts.values(), found.iteration_s, found.memory_gib, *found.interval]
    return all(math.isfinite(value) and value >= 0 for value in values)


@given(layouts(), software)
def test_parts_add_up_and_are_finite(layout: Layout, name: str) -> None:
    found = run(layout, name)
    assert sane(found)
    assert sum(found.parts[part] for part in PARTS) == pytest.approx(found.iteration_s, rel=1e-12)
    assert found.interval[0] < found.iteration_s < found.interval[1]
    assert found.model_tflops_per_gpu <= found.hardware_tflops_per_gpu <= 312
    assert found.parts["dp_exposed"] <= found.parts["dp_total"] * 30


@given(layouts(), software, st.sampled_from(RATES), st.floats(1e9, 1e13), st.floats(1, 100))
def test_a_faster_machine_is_never_slower(layout: Layout, name: str, rate: str, value: float, factor: float) -> None:
    slow, fast = run(layout, name, **{rate: value}), run(layout, name, **{rate: value * factor})
    assert fast.iteration_s <= slow.iteration_s * (1 + 1e-9)


@given(layouts(), software, st.integers(1, 8), st.floats(0.01, 10))
def test_compressed_traffic_never_helps_on_an_infinitely_fast_link(
    layout: Layout, name: str, bits: int, speed: float
) -> None:
    links = {"inter_bytes_per_s": math.inf, "intra_bytes_per_s": math.inf}
    for codes in (
        Compression(gradients=Bits(bits), hbm_fraction=speed),
        Compression(gradients=Bits(bits), elements_per_s=speed * 1e12),
    ):
        assert run(layout, name, codes, **links).iteration_s >= run(layout, name, **links).iteration_s


@given(layouts(), software, st.integers(1, 7))
def test_fewer_bits_never_take_longer(layout: Layout, name: str, bits: int) -> None:
    few, more = (run(layout, name, Compression(gradients=Bits(b))) for b in (bits, bits + 1))
    assert few.iteration_s <= more.iteration_s


def test_compression_pays_on_a_slow_link() -> None:
    layout = Layout(8, 1, 16, 1, 64)
    plain, coded = (run(layout, "megatron-2022", c, inter_bytes_per_s=1e8) for c in (None, Compression(Bits(4))))
    assert coded.iteration_s < plain.iteration_s / 3
    assert coded.parts["codec"] > 0 and plain.parts["codec"] == 0


LLAMA = Transformer.preset("llama2-13b")


def sharded(gbit: float, name: str = "fsdp", **changes: object) -> Prediction:
    layout = dataclasses.replace(Layout(dp=64, micro_batch=2, global_batch=256, zero=3), **changes)
    cluster = Cluster("a100-80gb", layout.gpus, inter_bytes_per_s=gbit * 1e9 / 8, latency_s=0.0)
    return predict(LLAMA, layout, cluster, name)


@pytest.mark.parametrize("name", ["fsdp", "megatron-core", "megatron-2023", "fsdp-h100-2023"])
def test_sharded_traffic_is_never_free(name: str) -> None:
    times = [sharded(gbit, name) for gbit in (800, 400, 200, 100, 50, 25)]
    for fast, slow in itertools.pairwise(times):
        assert slow.iteration_s > fast.iteration_s
        if slow.parts["dp_total"] > 0.2 * slow.iteration_s:
            assert slow.iteration_s > 1.01 * fast.iteration_s


def test_of_sharded_traffic_a_layer_is_exposed_and_what_hides_has_its_price() -> None:
    constants = Efficiency(gemm=0.7, communication=0.0)
    layout = Layout(dp=64, micro_batch=2, global_batch=256, zero=3)

    def exposed(gbit: float, communication: float = 0.0) -> tuple[float, float]:
        cluster = Cluster("a100-80gb", 64, inter_bytes_per_s=gbit * 1e9 / 8, latency_s=0.0)
        e = dataclasses.replace(constants, communication=communication)
        parts = predict(LLAMA, layout, cluster, "fsdp", efficiency=e).parts
        return parts["dp_exposed"], parts["dp_total"]

    hidden, total = exposed(400)
    assert 0 < hidden == pytest.approx(0.75 * total / (2 * 40), rel=0.01)  # 4 bytes scattered, twice 2 gathered
    shares = [exposed(400, share)[0] for share in (0.0, 0.5, 1.0, 2.0)]
    assert shares[1] == pytest.approx((shares[0] + shares[2]) / 2) and shares[2] == pytest.approx(total)
    assert shares[3] == pytest.approx(2 * total)  # above 1 collectives are slower, and none of it hides
    open_s, total = exposed(10)
    computing = sum(
        predict(LLAMA, layout, Cluster("a100-80gb", 64), "fsdp", efficiency=constants).parts[part]
        for part in ("gemm", "attention", "elementwise")
    )
    assert open_s > total - computing  # the forward pass cannot hide what the backward pass waits for


def test_sharding_over_one_rank_gathers_nothing() -> None:
    small = Transformer.preset("gpt2-124m")
    times = [predict(small, Layout(global_batch=8, zero=z), Cluster(), "fsdp") for z in range(4)]
    assert len({float(found.iteration_s) for found in times}) == 1
    assert len({found.memory_gib for found in times}) == 1


def test_one_gpu_has_no_communication() -> None:
    small = Transformer.preset("gpt2-124m")
    found = predict(small, Layout(global_batch=8), Cluster(), "megatron-2022", Compression(gradients=Bits()))
    assert all(found.parts[part] == 0 for part in ("tp", "cp", "ep", "pp", "bubble", "dp_exposed", "dp_total", "codec"))
    assert found.tokens_per_s == pytest.approx(8 * 1024 / found.iteration_s)


def test_data_parallel_traffic_over_single_gpu_nodes_is_a_ring() -> None:
    small = Transformer.preset("gpt2-124m")
    cluster = Cluster("a100-80gb", 16, node_gpus=1, latency_s=0.0)
    found = predict(small, Layout(dp=16, global_batch=16), cluster, "megatron-2022", efficiency=IDEAL)
    assert found.parts["dp_total"] == pytest.approx(ring_s(small.parameters, 16, Link(25e9)))


def test_the_bubble_is_that_of_the_schedule() -> None:
    layout = Layout(1, 4, 1, 1, 16)
    plain, chunks = (run(dataclasses.replace(layout, interleave=v)).parts["bubble"] for v in (1, 3))
    assert chunks == pytest.approx(plain / 3, rel=0.02)
    full = run(layout)
    work = sum(full.parts[part] for part in ("gemm", "attention", "elementwise", "recompute", "tp"))
    assert full.parts["bubble"] == pytest.approx(work * 3 / 16, rel=0.1)  # the output layer is on the last stage only


def setting(model: Transformer, layout: Layout, **rates: float) -> Setting:
    cluster = Cluster("a100-80gb", layout.gpus, **rates)  # type: ignore[arg-type]
    return Setting(model, layout, cluster, software_facts("megatron-core"), IDEAL)


def test_each_parallelism_takes_what_its_closed_form_says() -> None:
    flat = {"intra_bytes_per_s": 3e11, "inter_bytes_per_s": 25e9, "latency_s": 0.0}
    hidden = 2.0 * 2 * 2048 * 6144  # bytes of two sequences' hidden states
    tp = setting(GPT, Layout(8, micro_batch=2, global_batch=2), **flat)
    ring = 2 * 7 / 8 * hidden / 3e11 + 2 * 3 * NVLINK_LATENCY_S
    assert tensor_parallel_s(tp) == pytest.approx(4 * ring)  # after attention and MLP, forward and backward
    full = setting(GPT, Layout(8, micro_batch=2, global_batch=2, recompute="full"), **flat)
    assert tensor_parallel_s(full) == pytest.approx(6 * ring)
    cp = setting(GPT, Layout(cp=4, micro_batch=2, global_batch=2), **flat)
    assert context_parallel_s(cp) == pytest.approx(3 * 3 * 2 * hidden / 4 / 3e11)  # keys and values to three others
    pp = setting(GPT, Layout(pp=4, tp=8, micro_batch=2, global_batch=16, interleave=2), **flat)
    assert pipeline_s(pp) == pytest.approx(2 * 2 * hidden / 8 / 25e9)
    moe = setting(MOE, Layout(dp=8, ep=8, global_batch=8), **flat)
    sent = 2.0 * 4096 * 4096 * 2  # each token to two experts
    assert expert_parallel_s(moe) == pytest.approx(4 * 7 / 8 * sent / 3e11)


@given(layouts())
def test_the_parts_of_a_step_are_those_of_its_parallelisms(layout: Layout) -> None:
    at = setting(GPT, layout)
    layer, parts = layer_time(at), predict(GPT, layout, at.cluster, efficiency=IDEAL).parts
    count = layout.micro_batches * layout.stage_layers(GPT)
    assert parts["tp"] == count * tensor_parallel_s(at) and parts["cp"] == count * context_parallel_s(at)
    assert parts["pp"] == layout.micro_batches * pipeline_s(at) and parts["ep"] == 0 == expert_parallel_s(at)
    assert parts["recompute"] == count * layer.recompute
    assert parts["dp_total"] == data_parallel_s(at, layer, 0.0).total
    for degree, part in (("tp", "tp"), ("pp", "pp"), ("pp", "bubble"), ("cp", "cp")):
        assert (parts[part] == 0) == (getattr(layout, degree) == 1)


def test_thin_products_reach_less_of_the_peak() -> None:
    def share(tp: int, micro: int) -> float:
        parts = predict(
            GPT, Layout(tp, micro_batch=micro, global_batch=8), Cluster("a100-80gb", tp, node_gpus=64), "megatron-2022",
            efficiency=IDEAL,
        ).parts  # fmt: skip
        return GPT.model_flops(8) / (parts["gemm"] * tp * 312e12)

    assert share(1, 8) >= share(8, 1) > share(64, 1)  # a product 96 wide waits for the memory


def test_experts_on_other_nodes_pay_the_network() -> None:
    near = predict(MOE, Layout(dp=8, global_batch=64, ep=8, zero=1), Cluster("h100-80gb", 8))
    far = predict(MOE, Layout(dp=64, global_batch=512, ep=8, tp=1, zero=1), Cluster("h100-80gb", 64, node_gpus=1))
    assert near.parts["ep"] > 0 and far.parts["ep"] > 5 * near.parts["ep"]
    dense = predict(Transformer.preset("llama2-7b"), Layout(dp=8, global_batch=64), Cluster("h100-80gb", 8))
    assert dense.parts["ep"] == 0


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]), st.sampled_from([8, 16]), st.sampled_from([1, 2, 4, 8]),
       st.integers(0, 3), software)  # fmt: skip
def test_mixtures_are_sane_in_every_layout(tp: int, pp: int, dp: int, ep: int, zero: int, name: str) -> None:
    layout = Layout(tp, pp, dp, 1, 64, zero=zero, ep=ep)
    found = predict(MOE, layout, Cluster("h100-80gb", layout.gpus), name, Compression(gradients=Bits()))
    assert sane(found)
    alone = predict(MOE, dataclasses.replace(layout, ep=1), Cluster("h100-80gb", layout.gpus), name)
    assert found.memory.weights <= alone.memory.weights


def test_recomputation_that_stops_early_spares_the_last_product() -> None:
    """torch.utils.checkpoint without reentry, since PyTorch 2.1, and XLA: the MLP's second product is not repeated."""

    def layer(name: str, gated: bool) -> LayerTime:
        shape = dataclasses.replace(LLAMA, gated=gated, ffn=4 * 5120)
        layout = Layout(micro_batch=4, global_batch=4, recompute="full")
        return layer_time(Setting(shape, layout, Cluster("a100-80gb"), software_facts(name), IDEAL))

    for gated, share in ((True, 4 / (4 + 12)), (False, 4 / (4 + 8))):  # of the products: 4 h^2 attention, 4 h^2 each
        stops, runs = layer("fsdp", gated), layer("megatron-core", gated)
        assert runs.recompute == runs.forward
        assert stops.forward - stops.recompute == pytest.approx(share * stops.gemm)


def test_fused_attention_forms_its_scores_again_in_the_backward_pass() -> None:
    for name, ratio in (("megatron-core", 2.5), ("megatron-2022", 2.0)):
        layer = layer_time(Setting(GPT, Layout(), Cluster("a100-80gb"), software_facts(name), IDEAL))
        assert layer.attention_back == pytest.approx(ratio * layer.attention)


def test_a_parallel_block_has_one_normalisation_and_one_all_reduce() -> None:
    """MegaScale (arXiv:2402.15627, section 3.1) and PaLM; what a row of published runs does not show otherwise."""
    both = dataclasses.replace(GPT, parallel_block=True)
    layout = Layout(8, global_batch=8)
    one, two = (predict(shape, layout, Cluster("a100-80gb", 8), "megascale") for shape in (both, GPT))
    assert one.parts["tp"] == pytest.approx(two.parts["tp"] / 2)
    assert one.parts["elementwise"] < two.parts["elementwise"] and one.parts["gemm"] == two.parts["gemm"]
    assert GPT.parameters - both.parameters == GPT.layers * GPT.norm_parameters
    assert one.memory.activations < two.memory.activations


def test_recomputing_is_paid_in_time() -> None:
    times = [run(Layout(8, 1, 1, 4, 4, mode), "megatron-2022").iteration_s for mode in ("none", "selective", "full")]
    assert times[0] < times[1] < times[2]


def test_codes_of_activations_and_states_cost_codec_time_and_save_memory() -> None:
    layout, codes = Layout(8, 1, 1, 4, 4), Compression(activations=Bits(), states=Bits())
    plain, coded = run(layout), run(layout, compression=codes)
    assert coded.parts["codec"] > 0 and coded.memory_gib < plain.memory_gib


def test_the_assumed_speed_of_the_codec_is_one_that_instructions_and_cpu_kernels_allow() -> None:
    recorded = json.loads((tables.folder() / "results/cpu/full/kernels.json").read_text())["results"]
    lanes_per_s, bytes_per_s = 132 * 128 * 1.755e9, 3.35e12  # of an H100 SXM: NVIDIA's data sheet
    for way, (kind, nbytes) in itertools.product(("encode", "decode"), {"float32": 4, "bfloat16": 2}.items()):
        instructions = recorded[f"sm90/instructions/{way}-{kind}-2r-k1"]["value"]
        at_most = lanes_per_s / instructions * (nbytes + Bits(4).bytes_per_element) / bytes_per_s
        assert Compression().hbm_fraction < at_most, (way, kind, at_most)
    assumed, rounds = SAVING_INPUTS["hbm_fraction"], ("one-round", "two-rounds")
    shares = [recorded[f"share/{way}/{count}"]["value"] for way in ("encode", "decode") for count in rounds]
    assert assumed.mid == Compression().hbm_fraction and assumed.low <= min(shares) and max(shares) <= assumed.high


def test_arrays_are_the_scalars_side_by_side() -> None:
    gemm, inter, speed = np.array([0.6, 0.7]), np.array([1e9, 1e10]), np.array([0.2, 0.5])
    layout = Layout(8, 2, 4, 1, 64, zero=1)

    def at(i: slice | int) -> Prediction:
        cluster = Cluster("a100-80gb", 64, inter_bytes_per_s=inter[i])
        codes = Compression(gradients=Bits(), hbm_fraction=speed[i])
        return predict(GPT, layout, cluster, compression=codes, efficiency=Efficiency(gemm=gemm[i], communication=0.5))

    both = at(slice(None))
    for i in (0, 1):
        assert both.iteration_s[i] == pytest.approx(at(i).iteration_s)
        assert both.interval[0][i] == pytest.approx(at(i).interval[0])


@settings(deadline=None)
@given(st.integers(0, 2**31))
def test_ten_thousand_samples_take_less_than_two_seconds(seed: int) -> None:
    draw = np.random.default_rng(seed)
    constants = Efficiency(gemm=draw.uniform(0.5, 0.9, 10_000), hbm=draw.uniform(0.5, 0.9, 10_000))
    cluster = Cluster("h100-80gb", 1024, inter_bytes_per_s=draw.uniform(1e9, 1e11, 10_000))
    start = time.perf_counter()
    found = predict(Transformer.preset("llama2-70b"), Layout(8, 4, 32, 1, 1024), cluster, efficiency=constants)
    assert time.perf_counter() - start < 2
    assert found.iteration_s.shape == (10_000,) and np.isfinite(found.iteration_s).all()


def test_one_evaluation_takes_less_than_two_milliseconds() -> None:
    layout, cluster = Layout(8, 4, 32, 1, 1024), Cluster("h100-80gb", 1024)
    model = Transformer.preset("llama2-70b")
    times = []
    for _ in range(20):
        start = time.perf_counter()
        predict(model, layout, cluster)
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run(Layout(tp=3)), "tp must divide heads=64, got 3"),
        (lambda: run(Layout(pp=49)), "pp * interleave must be at most layers=48, got 49 * 1"),
        (
            lambda: predict(GPT, Layout(8), Cluster("a100-80gb", 4)),
            "must be the cluster's gpus=4, got 8 * 1 * 1 * 1 = 8",
        ),
        (lambda: run(Layout(), "megatron"), "software must be one of megatron-2021"),
        (lambda: Efficiency(gemm=1.1), "gemm must be positive and at most 1, got 1.1"),
        (lambda: Compression(hbm_fraction=0.0), "hbm_fraction must be positive, got 0.0"),
        (lambda: run(Layout(dp=2, global_batch=2, zero=3), compression=Compression(momentum=Bits())), "zero=0 or 1"),
    ],
)
def test_bad_input_raises_one_clear_message(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


INF = math.inf


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: predict(None, Layout(), Cluster()), TypeError, "model must be Transformer(...), got None"),
        (lambda: predict(GPT, None, Cluster()), TypeError, "layout must be Layout(...), got None"),
        (lambda: predict(GPT, Layout(), None), TypeError, "cluster must be Cluster(...), got None"),
        (lambda: run(Layout(), compression="x"), TypeError, "compression must be None or Compression(...), got 'x'"),
        (
            lambda: predict(GPT, Layout(), Cluster(), efficiency=0.5), TypeError,
            "efficiency must be None or Efficiency(...), got 0.5",
        ),
        (lambda: Efficiency(low=2, high=0.5), ValueError, "low must be at most high, got low=2 and high=0.5"),
        (lambda: Efficiency(compute=INF), ValueError, "compute must be positive and finite, got inf"),
        (lambda: Efficiency(communication=INF), ValueError, "communication must be 0 or more and finite, got inf"),
        (lambda: Cluster(["a"], 8), ValueError, "gpu must be one of v100-32gb"),
        (lambda: Cluster("a100-80gb", 8, network=["x"]), ValueError, "network must be one of"),
        (lambda: predict(GPT, Layout(), Cluster(), None), ValueError, "software must be one of"),
        (lambda: gain(1, INF), ValueError, "ratio must be positive and finite, got inf"),
    ],
)  # fmt: skip
def test_the_wrong_kind_of_argument_is_named(call, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
