"""Chunks cover a tensor once; a message holds its code, and says when its sender could not make it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tq import Codec
from tq.train.comm.layout import (
    chunk_numel,
    chunk_of,
    code_bytes,
    message_bytes,
    new_messages,
    unmade,
    unmake,
    view_code,
)


@given(st.integers(0, 5000), st.sampled_from((1, 64, 128)), st.integers(1, 9))
def test_chunks_cover_a_tensor_once_and_none_is_larger_than_the_first(numel: int, block: int, ranks: int) -> None:
    chunks = [chunk_of(numel, block, rank, ranks) for rank in range(ranks)]
    assert chunks[0][0] == 0 and chunks[-1][1] == -(-numel // block)
    assert all(a[1] == b[0] for a, b in zip(chunks, chunks[1:], strict=False))
    sizes = [chunk_numel(numel, block, rank, ranks) for rank in range(ranks)]
    assert sum(sizes) == numel and max(sizes) == sizes[0]


@pytest.mark.parametrize("bits", (1, 3, 4, 8))
def test_a_message_holds_a_code(bits: int) -> None:
    codec, x = Codec(bits, nonfinite="propagate"), torch.randn(700, generator=torch.Generator().manual_seed(0))
    messages = new_messages(2, message_bytes(codec, 8), torch.device("cpu"))
    code = view_code(codec, messages[1], 8, 700, torch.float32)
    codec.encode(x, code)
    assert torch.equal(codec.decode(code), codec.decode(codec.encode(x)))
    room = 2 * codec.packed_bytes + 2 * 4 + 2 * 16  # of two blocks more, and to 16 bytes twice
    assert code_bytes(codec, 700) == code.nbytes <= messages.shape[1] - 16 < code.nbytes + room
    assert unmade(messages) == []
    unmake(messages[1])
    assert unmade(messages) == [1]
    assert codec.decode(code).isnan().all()
