"""The mean of codes: the same bytes whether or not it is looked at, and the size of a piece that the models take."""

from __future__ import annotations

import pytest
import torch

from tq import Codec
from tq.systems import collectives
from tq.train.comm.pipeline import PIPELINE_ELEMENTS, encode_mean, encode_residual


def test_the_models_count_the_pieces_that_travel() -> None:
    assert collectives.PIPELINE_ELEMENTS == PIPELINE_ELEMENTS


@pytest.mark.parametrize("spoilt", (None, 0, 2))
def test_a_mean_has_the_same_bytes_where_nobody_looks(spoilt: int | None) -> None:
    """On a GPU, where to look is to wait, ranks are marked in any case; that changes finite blocks not at all."""
    codec = Codec(4, nonfinite="propagate")
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    if spoilt is not None:
        parts[spoilt][300] = float("inf")
    codes = [codec.derive(rank).encode(part) for rank, part in enumerate(parts)]
    outs = [codec.empty((1000,), torch.float32) for _ in range(2)]
    for out, look in zip(outs, (True, False), strict=True):
        assert encode_mean(codes, out, look=look) is None
    assert torch.equal(outs[0].payload, outs[1].payload)
    assert torch.equal(outs[0].scales.view(torch.int32), outs[1].scales.view(torch.int32))
    lost = outs[0].scales.isnan()
    assert lost.sum() == (spoilt is not None)
    assert outs[1].payload[lost, 0].tolist() == ([] if spoilt is None else [spoilt + 1])


def test_what_was_encoded_and_the_residual_are_all_there_is() -> None:
    codec, x = Codec(2), torch.randn(999, generator=torch.Generator().manual_seed(0))
    out, before = codec.empty((999,), torch.float32), torch.randn(999, generator=torch.Generator().manual_seed(1))
    left = encode_residual(codec, x, out, before)
    assert left is not None
    torch.testing.assert_close(codec.decode(out) + left, x + before)
    assert encode_residual(codec, x, out, None) is None
