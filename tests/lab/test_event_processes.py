"""Two real processes commit what one does."""

import pytest

from tq.lab import event_processes
from tq.systems.event_simulation import Phold, sequential


@pytest.mark.parametrize("objects", (2, 7, 64))
def test_two_processes_commit_what_one_does(objects: int) -> None:
    model = Phold(objects, 4, end=20.0, lookahead=0.2, seed=objects)
    trace, seconds = event_processes.on_two(model)
    plain = sequential(model)
    assert trace.digest == plain.digest and trace.states == plain.states and seconds > 0
    assert sequential(Phold(objects, 4, end=20.0, lookahead=0.2, seed=objects + 1)).digest != plain.digest


def test_without_look_ahead_it_is_refused() -> None:
    with pytest.raises(ValueError, match="lookahead must be positive"):
        event_processes.on_two(Phold(4, 2, lookahead=0.0))


def test_a_check_says_whether_all_agree() -> None:
    found = event_processes.check({"model": {"objects": 16, "population": 4, "end": 5.0}, "repeats": 1})
    assert found["equal"] == 1 and min(found.values()) > 0
    assert found["over"] == pytest.approx(found["two"] / found["foretold"])
