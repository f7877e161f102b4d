"""The instruments of the memory hierarchy: a pool on a real file, lifetimes of a real step, attention in tiles."""

from pathlib import Path

import pytest
import torch

from tq.lab import hierarchy, lifetimes, pool, streaming, tiled_attention
from tq.train.model import GPT, GPTConfig


@pytest.mark.parametrize("trace", ["cyclic", "sawtooth"])
@pytest.mark.parametrize("policy", ["lru", "mru", "belady"])
def test_the_pool_holds_what_the_policy_says(trace: str, policy: str, tmp_path: Path) -> None:
    point = pool.cliff(str(tmp_path), 4096, 20, 1.1, trace, policy)
    shares = {("cyclic", "lru"): 1.0, ("sawtooth", "lru"): 2 / 22, ("sawtooth", "belady"): 2 / 22}
    if (trace, policy) in shares:
        assert point["misses"] == pytest.approx(shares[trace, policy], abs=0.01)
    assert point["access_s"] > 0 and pool.slowdown(point) > 0 and pool.modelled(point) > 0
    assert not list(tmp_path.iterdir())


def test_reading_ahead_hides_reads(tmp_path: Path) -> None:
    found = pool.ahead(str(tmp_path), 65536, 8, 1.5, 0.002)
    assert found["in_memory_s"] >= 0.002 and found["ahead_s"] >= 0.002 and found["plain_s"] >= 0.002


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 4, 4), (37, 8, 16), (128, 64, 64), (100, 7, 33)])
def test_tiles_give_the_plain_result(tokens: int, rows: int, columns: int) -> None:
    q, k, v = (3 * torch.randn(tokens, 16, dtype=torch.float64) for _ in range(3))
    one, two = tiled_attention.Traffic(), tiled_attention.Traffic()
    expected = tiled_attention.plain(q, k, v, one)
    found = tiled_attention.tiled(q, k, v, two, rows, columns)
    assert torch.allclose(found, expected, atol=1e-12)
    whole = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    assert torch.allclose(expected, whole, atol=1e-12)


def test_tiles_save_bytes_and_lengthen_contexts() -> None:
    q, k, v = (torch.randn(512, 64) for _ in range(3))
    one, two = tiled_attention.Traffic(), tiled_attention.Traffic()
    tiled_attention.plain(q, k, v, one)
    tiled_attention.tiled(q, k, v, two)
    assert one.peak == 2 * 512 * 512 * 4 and two.peak < one.peak / 20 and two.moved < one.moved
    assert tiled_attention.longest(1 << 26, 64, "tiled") > 8 * tiled_attention.longest(1 << 26, 64, "plain")
    most = tiled_attention.longest(1 << 26, 64, "plain")
    held = [4 * (4 * n * 64 + 2 * n * n) for n in (most, most + 1)]
    assert held[0] <= 1 << 26 < held[1] and tiled_attention.longest(1, 64, "tiled") == 0
    with pytest.raises(ValueError, match="plain or tiled"):
        tiled_attention.longest(1, 1, "flash")


def test_a_recorded_step_goes_forward_back_and_sweeps() -> None:
    model = GPT(GPTConfig(layers=4, hidden=16, heads=2, vocab=256, seq=8))
    recorder = lifetimes.Recorder(model)
    ids = torch.randint(0, 256, (2, 8))
    recorder.step(lambda: model(ids, ids)[1], torch.optim.AdamW(model.parameters()))
    recorder.close()
    assert recorder.layer_trace(("weight",)).tolist() == [0, 1, 2, 3, 2, 1, 0, 1, 2, 3]
    assert recorder.layer_trace(("moments",)).tolist() == [0, 1, 2, 3]
    assert recorder.peak("moments") == max(8 * p.numel() for p in model.parameters())
    kinds = {life.kind for life in recorder.lives.values()}
    assert kinds == {"weight", "gradient", "activation", "moments"}
    lives = [life for life in recorder.lives.values() if life.kind == "activation" and life.layer == 0]
    assert lives and all(life.uses == sorted(life.uses) for life in lives)
    assert recorder.peak("activation") <= sum(x.nbytes for x in recorder.lives.values() if x.kind == "activation")


def test_latency_and_rates_are_of_a_plausible_machine(tmp_path: Path) -> None:
    (near, small), (far, large) = (
        hierarchy.latency_s(size, huge, steps=200_000) for size, huge in ((16 << 10, False), (64 << 20, True))
    )
    assert 1e-10 < near < far < 1e-5
    assert small in (0, None) and (large is None or 0 <= large <= 1)
    assert 1e8 < hierarchy.read_bytes_per_s(1 << 20) < 1e13 and 1e8 < hierarchy.copy_bytes_per_s(1 << 20) < 1e13
    rates = hierarchy.disk_rates(str(tmp_path), 1 << 16, 4, 1 << 20)
    assert rates["read"] > 1e5 and rates["write"] > 1e5


def test_huge_pages_are_those_of_the_mappings_that_hold_an_array() -> None:
    smaps = """7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
AnonHugePages:      2048 kB
7f0000400000-7f0000800000 rw-p 00000000 00:00 0
AnonHugePages:      4096 kB
VmFlags: rd wr mr mw me ac sd
"""
    whole = 4 << 20
    assert hierarchy.huge_bytes(smaps, 0x7F0000000000, whole) == 2 << 20
    assert hierarchy.huge_bytes(smaps, 0x7F0000400000, 1) == 4 << 20
    assert hierarchy.huge_bytes(smaps, 0x7F0000200000, whole) == 6 << 20
    assert hierarchy.huge_bytes(smaps, 0x7F0000800000, whole) == 0


def test_levels_are_found_where_latency_rises() -> None:
    sizes = [1 << k for k in range(12, 24)]
    latencies = [1e-9 if s <= 1 << 15 else 4e-9 if s <= 1 << 20 else 2e-8 for s in sizes]
    assert hierarchy.steps_up(sizes, latencies) == [1 << 15, 1 << 20]


@pytest.mark.parametrize("way", hierarchy.WAYS)
def test_products_are_right(way: str) -> None:
    took, error = hierarchy.product_s(130, way, 48)
    assert took > 0 and error < 1e-4
    with pytest.raises(ValueError, match="way must be"):
        hierarchy.product_s(4, "packed")
    assert hierarchy.bytes_moved(64, 64) == 4 * (2 * 64**2 + 64**2)


def test_one_ceiling_holds_the_streamed_run_and_not_the_other(tmp_path: Path) -> None:
    found = streaming.under_one_ceiling(str(tmp_path), layers=40, hidden=128, seq=32, batch=1, steps=1)
    assert "refused" not in found["streamed"], found["streamed"]
    assert "refused" in found["memory_under_it"] and found["same"]
    moved, counted = found["streamed"]["system"], found["streamed"]["counted"]
    assert moved[0] <= 1.1 * counted[0] and moved[1] <= 1.1 * counted[1]
