"""Parts of a split model by themselves: messages, experts in one process, places of the ring, spans of stages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tq import Codec
from tq.train import chunks, wire
from tq.train.experts import Experts
from tq.train.model.gpt import GPT, GPTConfig
from tq.train.pipeline import SCHEDULES, placement
from tq.train.ring import places

CONFIG = GPTConfig(layers=3, hidden=32, heads=2, vocab=64, seq=16, tie_embeddings=False)


@given(st.integers(1, 700), st.sampled_from([4, 8]), st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_a_message_is_decoded_alike_and_another_key_gives_other_errors(numel: int, bits: int, step: int) -> None:
    x, codec = torch.randn(numel, generator=torch.Generator().manual_seed(numel)), Codec(bits=bits)
    message = wire.pack(x, codec, (step, 1))
    assert message.dtype == torch.uint8 and message.numel() == wire.nbytes(codec, numel)
    first, second = torch.empty(numel), torch.empty(numel)
    wire.unpack(message, first, codec, (step, 1))
    wire.unpack(message.clone(), second, codec, (step, 1))
    assert torch.equal(first, second)
    if numel > 100 and bits < 8:
        assert not torch.equal(first, wire.there_and_back(x, codec, (step + 1, 1)))


def test_experts_are_a_weighted_sum_of_the_chosen_ones() -> None:
    layer = Experts(16, 24, 4, 2, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
    rows, wanted = x.reshape(-1, 16), []
    for row in rows:
        scores = torch.softmax(layer.router(row), -1)
        best = scores.topk(2)
        outs = [torch.nn.functional.gelu(row @ layer.up[e], approximate="tanh") @ layer.down[e] for e in best.indices]
        wanted.append(sum(w * o for w, o in zip(best.values / best.values.sum(), outs, strict=True)))
    torch.testing.assert_close(layer(x).reshape(-1, 16), torch.stack(wanted))
    with pytest.raises(ValueError, match="experts=4, of which chosen=5"):
        Experts(16, 24, 4, 5, generator=torch.Generator())


@given(st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_places_cover_the_sequence_once(ranks: int, balanced: bool) -> None:
    found = [places(64, rank, ranks, balanced) for rank in range(ranks)]
    assert sorted(torch.cat(found).tolist()) == list(range(64))
    if balanced:  # pairs of query and key under the causal mask: the same for all
        assert len({int((p + 1).sum()) for p in found}) == 1
    with pytest.raises(ValueError, match="must divide"):
        places(63, 0, 8, balanced)


def test_chunks_in_turn_are_the_model() -> None:
    gpt = GPT(CONFIG)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    wanted = gpt(ids)[0]
    x = ids
    for first, last in chunks.cuts(3, 3):
        x = chunks.Chunk(gpt, first, last)(x)
    assert torch.equal(x, wanted)
    with pytest.raises(ValueError, match="stages must be 1 to layers=3"):
        chunks.cuts(3, 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_has_a_rank(name: str) -> None:
    each = {"line": 1, "loop": 2, "v": 2}[SCHEDULES[name][1]]
    assert sorted(sum(placement(name, 4, each), [])) == list(range(4 * each))
    if SCHEDULES[name][1] != "loop":
        with pytest.raises(ValueError, match="stages per rank"):
            placement(name, 4, 3)
