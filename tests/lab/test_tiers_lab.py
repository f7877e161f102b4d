"""The instruments of the memory hierarchy: a pool on a real file, lifetimes of a real step, attention in tiles."""

from pathlib import Path

import pytest
import torch

from tq.lab import lifetimes, pool, tiled_attention
from tq.systems import tiers
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
