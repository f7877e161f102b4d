"""Training on one card from a drive, by hand and by the model of a stream."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tq.economics import streamed_run
from tq.economics.uncertainty import Uncertain
from tq.systems.tiers import Streamed

GIVEN = dict(
    parameters=100e9, tokens_per_step=65_536.0, flops_per_s=80e12, drive_bytes_per_s=5e9, endurance_bytes=1.2e15,
    amplification=1.0, drive_usd=150.0, kilowatts=0.6, usd_per_kwh=0.15,
)  # fmt: skip


def test_a_step_and_a_drive_by_hand() -> None:
    found = streamed_run.costs(**GIVEN)
    assert found["step_s"] == pytest.approx(655.36) and found["hidden"] == 1  # against 28 bytes of 1e11 at 5e9: 560 s
    assert found["steps_of_a_drive"] == pytest.approx(1000)
    assert found["days_of_a_drive"] == pytest.approx(655.36e3 / 86400)
    wear, energy = 0.15, 655.36 / 3600 * 0.6 * 0.15
    assert found["usd_of_a_token"] == pytest.approx((wear + energy) / 65_536)
    assert found["wear"] == pytest.approx(wear / (wear + energy))
    slow = streamed_run.costs(**GIVEN | {"tokens_per_step": 16_384.0})
    assert slow["step_s"] == pytest.approx(560) and slow["hidden"] == 0


def test_a_run_is_its_steps() -> None:
    found = streamed_run.run(2e12, **GIVEN)
    steps = 2e12 / 65_536
    assert found["drives"] == pytest.approx(steps / 1000)
    assert found["years"] == pytest.approx(steps * 655.36 / 3.156e7)


@pytest.mark.parametrize(("moments", "steps"), [(8.0, 1000), (5.547 - 4, 2163)])
def test_smaller_moments_wear_less(moments: float, steps: float) -> None:
    found = streamed_run.costs(**GIVEN | {"moment_bytes": moments})
    assert found["steps_of_a_drive"] == pytest.approx(steps, rel=1e-3)


@pytest.mark.parametrize("tokens", [4096.0, 262_144.0])
def test_it_agrees_with_the_pipeline_of_layers(tokens: float) -> None:
    """Of many layers, whose first and last hardly count, and a drive whose rate reads and writes share."""
    layers, parameters = 80, 100e9 / 80
    flops = 2 * parameters * tokens / 80e12
    stream = Streamed(
        layers, parameters, forward_s=flops, backward_s=3 * flops, ends_s=0.0, read_bytes_per_s=5e9,
        write_bytes_per_s=5e9, both_bytes_per_s=2.5e9,
    )  # fmt: skip
    wanted = streamed_run.costs(**GIVEN | {"tokens_per_step": tokens})["step_s"]
    assert stream.seconds() == pytest.approx(wanted, rel=0.15)
    assert dataclasses.replace(stream, moment_bytes=1.547).seconds() <= stream.seconds()


def test_intervals_hold_the_middle_and_grow_with_their_inputs() -> None:
    def found(off: float) -> dict[str, tuple[float, float, float]]:
        inputs = {"drive_usd": Uncertain.around(150.0, off), "flops_per_s": Uncertain.around(80e12, off)}
        fixed: dict[str, Any] = {name: value for name, value in GIVEN.items() if name not in inputs}
        all_of = streamed_run.intervals(inputs, 2e12, 2000, **fixed)
        return {name: (each.low, each.mid, each.high) for name, each in all_of.items()}

    narrow, wide = found(0.1), found(0.4)
    assert set(narrow) >= {"step_s", "years", "drives", "usd", "wear"}
    for name in ("step_s", "years", "usd"):
        assert wide[name][0] < narrow[name][0] < narrow[name][2] < wide[name][2]
    assert np.isclose(narrow["drives"][0], narrow["drives"][2])  # hangs on neither
