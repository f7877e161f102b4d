"""How many sequences fit: the affine law against memory itself, the closed forms of gain and share."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq.systems import Bits, Compression, Layout, Transformer, memory
from tq.systems.batch_size import Footprint, footprint, gain, share_for

GIB = 2.0**30
LLAMA = Transformer.preset("llama2-7b")
CODED = Compression(activations=Bits(4))
LAYOUTS = (
    Layout(dp=64, global_batch=64, zero=3),
    Layout(dp=64, global_batch=64, zero=1, recompute="full"),
    Layout(tp=4, pp=4, dp=4, global_batch=32, sequence_parallel=True, zero=1),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compression", [None, CODED])
@pytest.mark.parametrize("flash", [True, False])
def test_the_largest_batch_fits_and_the_next_does_not(
    layout: Layout, compression: Compression | None, flash: bool
) -> None:
    room = 80 * GIB
    batch = footprint(LLAMA, layout, room, compression=compression, flash=flash).largest(room)

    def needs(micro_batch: int) -> float:
        held = replace(layout, micro_batch=micro_batch, global_batch=layout.micro_batches * layout.dp * micro_batch)
        return memory(LLAMA, held, compression=compression, flash=flash).total

    assert batch >= 1 and needs(batch) <= room < needs(batch + 1)


def test_states_that_do_not_fit_leave_no_sequence() -> None:
    found = footprint(Transformer.preset("llama2-70b"), Layout(dp=64, global_batch=64), 80 * GIB)
    assert found.largest(80 * GIB) == 0 and found.fixed_bytes > 80 * GIB


def test_codes_never_hold_fewer_sequences() -> None:
    for layout in LAYOUTS:
        plain, coded = (footprint(LLAMA, layout, 80 * GIB, compression=c) for c in (None, CODED))
        assert coded.sequences(80 * GIB) >= plain.sequences(80 * GIB)


@given(st.floats(0.0, 1.0), st.floats(1.01, 100.0))
def test_share_and_gain_are_inverse(share: float, ratio: float) -> None:
    grown = gain(share, ratio)
    assert 1 <= grown <= ratio * (1 + 1e-12)
    assert share_for(grown, ratio) == pytest.approx(share, abs=1e-9)


def test_twice_the_batch_needs_two_thirds() -> None:
    assert share_for(2, 16 / 4.25) == pytest.approx(0.6809, abs=1e-4)
    assert share_for(4, 16 / 4.25) > 1  # no share is enough


def test_bad_input_names_itself() -> None:
    with pytest.raises(ValueError, match="coded_share"):
        gain(1.2, 4)
    with pytest.raises(ValueError, match="ratio must be above 1, got 1"):
        share_for(2, 1)
    with pytest.raises(ValueError, match="gpu_bytes"):
        Footprint(1.0, 1.0).sequences(-1.0)
