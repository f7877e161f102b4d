"""Keys and values in few bits as tasks, so that an edited page measures none of them again."""

from __future__ import annotations

from typing import Any

from tq.lab import cache_study, needle
from tq.lab.weight_study import language

Way = list[Any] | None  # [method, bits], as JSON gives it


def _pair(way: Way) -> tuple[str, int] | None:
    return (way[0], way[1]) if way else None


def judge(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``cache_study.outcome``; task: "name", "keys" and "values" as [method, bits] or None, "domain"."""
    found = cache_study.outcome(task["name"], _pair(task["keys"]), _pair(task["values"]), task["domain"])
    del found["seconds"]
    return found


def pass_keys(task: dict[str, Any], device: str = "cpu") -> list[tuple[bool, float]]:
    """``needle.found`` of a grid; task: "name", "keys" and "values", "lengths", "depths", "seed"."""
    model = cache_study.coded(task["name"], _pair(task["keys"]), _pair(task["values"]))
    grid = needle.grid(language(task["name"]), task["lengths"], task["depths"], task["seed"])
    return [needle.found(model, one) for one in grid]
