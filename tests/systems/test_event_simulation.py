"""Three engines, one trace; what a wrong engine does; the ring's 24.6 %."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tq.systems import event_simulation as es
from tq.systems.event_simulation import Phold, conservative, horizon, optimistic, sequential

MODELS = st.builds(
    Phold, objects=st.integers(2, 24), population=st.integers(1, 5), end=st.floats(0.5, 12), seed=st.integers(0, 999),
    lookahead=st.sampled_from([0.01, 0.1, 0.5, 1.0]), remote=st.sampled_from([0.0, 0.3, 1.0]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(MODELS, st.integers(1, 24), st.sampled_from([0.2, 1.0, float("inf")]), st.integers(1, 70))
def test_all_engines_commit_the_same(model: Phold, processors: int, window: float, commit_every: int) -> None:
    processors = min(processors, model.objects)
    expected = sequential(model)
    for found in (conservative(model, processors), optimistic(model, processors, window, commit_every)):
        assert all(np.array_equal(a, b) for a, b in zip(found.committed, expected.committed, strict=True))
        assert found.states == expected.states and found.digest == expected.digest


def test_without_lookahead_time_warp_alone_goes_on() -> None:
    model = Phold(32, 4, 20.0, lookahead=0.0)
    found = optimistic(model, 8)
    assert found.digest == sequential(model).digest and found.rollbacks > 100 and found.anti > 100
    with pytest.raises(ValueError, match="lookahead"):
        conservative(model, 8)


def test_sixty_thousand_events_on_many_processors() -> None:
    model = Phold(128, 8, 60.0, lookahead=0.05, remote=0.9)
    expected = sequential(model)
    assert expected.events == pytest.approx(128 * 8 * 60, rel=0.02)
    assert {optimistic(model, 64).digest, conservative(model, 64).digest} == {expected.digest}


def test_the_trace_depends_on_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that takes events too early is found out: windows twice as long as the look-ahead."""
    model = Phold(32, 8, 10.0, lookahead=0.2)
    expected = sequential(model).digest
    honest = Phold.handle

    def soon(self: Phold, state: int, event: es.Event) -> tuple[int, es.Event | None]:
        return honest(replace(self, lookahead=0.1), state, event)  # events may follow within the window

    monkeypatch.setattr(Phold, "handle", soon)
    assert conservative(model, 8).digest != sequential(model).digest
    monkeypatch.undo()
    assert sequential(model).digest == expected


def test_rollbacks_that_forget_the_state_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Phold(32, 4, 20.0, lookahead=0.0)
    honest = es._TimeWarp.roll_back

    def forgetful(self: es._TimeWarp, event: es.Event, cancels: bool, local: list[tuple[es.Event, bool]]) -> None:
        state = self.states[event[2]]
        honest(self, event, cancels, local)
        self.states[event[2]] = state

    monkeypatch.setattr(es._TimeWarp, "roll_back", forgetful)
    assert optimistic(model, 8).digest != sequential(model).digest


def test_more_lookahead_makes_windows_better_and_processors_make_them_worse() -> None:
    by_lookahead = [conservative(Phold(64, 8, 10.0, lookahead=x), 16).efficiency(1.0) for x in (0.01, 0.1, 0.5)]
    assert by_lookahead == sorted(by_lookahead) and by_lookahead[-1] > 4 * by_lookahead[0]
    by_processors = [conservative(Phold(64, 8, 10.0), n).efficiency(1.0) for n in (1, 8, 64)]
    assert by_processors == sorted(by_processors, reverse=True)


def test_a_window_holds_optimism_back() -> None:
    model = Phold(64, 2, 20.0, lookahead=0.0, remote=1.0)
    free, held = optimistic(model, 32), optimistic(model, 32, window=0.5, commit_every=1)
    assert held.kept > free.kept and held.rounds >= free.events / 32


def test_counts() -> None:
    model = Phold(16, 4, 10.0)
    alone = optimistic(model, 1)
    assert (alone.rollbacks, alone.messages, alone.anti, alone.kept) == (0, 0, 0, 1.0)
    assert alone.handled == alone.events == conservative(model, 1).events
    many = optimistic(model, 16)
    assert many.handled >= many.events and many.efficiency() <= 1 and many.efficiency(5.0) < many.efficiency()


def test_a_ring_keeps_a_quarter_busy() -> None:
    """24.646 %: Toroczkai et al. 2003. Small rings keep a little more."""
    assert horizon(10_000, 400, 400).utilisation == pytest.approx(0.2465, abs=0.002)
    assert horizon(10, 4000, 400, replicas=20).utilisation == pytest.approx(0.2706, abs=0.003)
    assert horizon(3, 4000, 10, replicas=20).utilisation == pytest.approx(1 / 3, abs=1e-9)  # the earliest of three


def test_the_horizon_grows_rough() -> None:
    early, late = (horizon(4000, 10, warm).width for warm in (10, 2000))
    assert late > 3 * early


@pytest.mark.parametrize(
    "settings_",
    [{"objects": 1}, {"objects": 1 << 15}, {"end": 0.0}, {"lookahead": 1.5}, {"remote": -0.1}, {"population": 0}],
)
def test_hostile_models(settings_: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Phold(**settings_)  # type: ignore[arg-type]


def test_hostile_machines() -> None:
    with pytest.raises(ValueError, match="processors"):
        conservative(Phold(4), 5)
    with pytest.raises(ValueError, match="window"):
        optimistic(Phold(4), 2, window=0.0)
    with pytest.raises(ValueError, match="sites"):
        horizon(2, 10)


def test_nothing_to_do() -> None:
    model = Phold(4, 1, end=1e-9)
    assert {sequential(model).events, conservative(model, 2).events, optimistic(model, 2).events} == {0}
