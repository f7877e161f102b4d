"""The race: every arm at its own rate, on seeds that chose none."""

from typing import Any

import pytest

from tq.lab import straggler_study as study

COMMON: dict[str, Any] = {"steps": 10}


def outcome(task: dict[str, Any]) -> dict[str, Any]:
    """Policy 1 likes a high rate, 0 a middle one, 4 a middle one and the highest outer step; policy 3 never arrives."""
    liked = {0: (4e-3, 0.7), 1: (8e-3, 0.7), 3: (1.0, 0.7), 4: (4e-3, 1.0)}[task["policy"]]
    takes = 100.0 if (task["lr"], task.get("outer_lr", 0.7)) == liked else 1000.0
    low = 9.0 if task["policy"] == 3 else 0.0
    return {"losses": [[0.0, 10.0], [takes + task["seed"], low]]}


def run(asked: list[list[dict[str, Any]]], fresh: tuple[int, ...] = (0, 1)) -> dict[study.Arm, dict[str, Any]]:
    def outcomes(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        asked.append(tasks)
        return [outcome(task) for task in tasks]

    return study.race(outcomes, study.arms((0, 1, 3, 4)), COMMON, tuning=(100, 101), fresh=fresh, loss=5.0)


def test_rates_are_the_fastest_of_the_tuning_seeds() -> None:
    asked: list[list[dict[str, Any]]] = []
    found = run(asked)
    assert [found["sudden", p]["lr"] for p in (0, 1, 3, 4)] == [4e-3, 8e-3, 5e-4, 4e-3]
    assert [found["sudden", p]["outer_lr"] for p in (0, 1, 3, 4)] == [None, None, 0.35, 1.0]
    assert found["sudden", 4]["outer_at_an_end"] and not found["sudden", 0]["outer_at_an_end"]
    assert [found["for-good", p]["at_an_end"] for p in (0, 1)] == [False, True]
    assert found["for-good", 0]["seconds"] == [50.0, 50.5] and found["sudden", 3]["seconds"] == [None, None]
    assert {each["seed"] for each in asked[0]} == {100, 101} and {each["seed"] for each in asked[1]} == {0, 1}
    slow = [each for each in asked[1] if each.get("slow_rank") == 3]
    assert len(slow) == len(asked[1]) / 2 and all(each["steps"] == 10 for each in asked[1])


def test_seeds_that_chose_cannot_judge() -> None:
    with pytest.raises(ValueError, match="in common"):
        run([], fresh=(101,))
