"""The search over layouts: complete on a small case, only what fits, fast enough for 70B on 1,024 GPUs."""

import time

import pytest

from tq.systems import Cluster, Layout, Transformer, best, layouts, memory, predict

SMALL = Transformer.preset("gpt2-355m")


def test_the_best_is_no_slower_than_any_layout() -> None:
    cluster = Cluster("a100-80gb", 8)
    found = list(layouts(SMALL, cluster, 16))
    times = [predict(SMALL, layout, cluster).iteration_s for layout in found]
    chosen, prediction = best(SMALL, cluster, 16)
    assert chosen in found and prediction.iteration_s == min(times)


def test_every_layout_is_valid_and_none_comes_twice() -> None:
    found = list(layouts(SMALL, Cluster("a100-80gb", 8), 16, usable=None))
    assert len(set(found)) == len(found) and all(layout.gpus == 8 for layout in found)
    tried = {(layout.tp, layout.pp, layout.dp) for layout in found}
    # of 8 = tp * pp * dp: heads=16, layers=24 and the batch of 16 divide by all of them
    assert tried == {(t, p, 8 // (t * p)) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if t * p <= 8}


def test_only_layouts_that_fit_are_kept() -> None:
    model, cluster = Transformer.preset("llama2-7b"), Cluster("a100-40gb", 8)
    fitting, every = (set(layouts(model, cluster, 8, usable=share)) for share in (0.9, None))
    limit = 0.9 * cluster.spec.memory_bytes
    assert fitting == {layout for layout in every if memory(model, layout, flash=True).total <= limit}
    assert fitting < every


def test_a_model_that_does_not_fit_raises() -> None:
    with pytest.raises(ValueError, match="no layout of the 405.9B model fits|no layout of the 406B model fits"):
        best(Transformer.preset("llama3-405b"), Cluster("a100-40gb", 8), 8)


def test_experts_are_spread_in_some_layouts() -> None:
    found = layouts(Transformer.preset("mixtral-8x7b"), Cluster("h100-80gb", 16), 16)
    assert {layout.ep for layout in found} >= {2, 4, 8}


def test_the_search_for_70b_on_1024_gpus_takes_less_than_five_seconds() -> None:
    start = time.perf_counter()
    chosen, prediction = best(Transformer.preset("llama2-70b"), Cluster("h100-80gb", 1024), 1024)
    assert time.perf_counter() - start < 5
    assert isinstance(chosen, Layout) and prediction.memory_gib < 80


@pytest.mark.parametrize("arguments", [{"global_batch": 0}, {"global_batch": 8, "usable": 1.5}])
def test_bad_arguments(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="global_batch|usable"):
        list(layouts(SMALL, Cluster("a100-80gb", 8), **arguments))  # type: ignore[arg-type]
