"""Stacks of the catalog where they are installed, and other programs on what they installed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest

from tq.lab.stacks.catalog import STACKS, Stack


def installed(name: str) -> Stack:
    """A stack of the catalog; skips where it is not installed: tests fetch nothing."""
    stack = STACKS[name]
    if why := stack.obstacle():
        pytest.skip(f"needs a stack: {why}")
    return stack


@dataclass(frozen=True)
class Other(Stack):
    """A stack whose program is another one."""

    program: str = ""

    @property
    def module(self) -> str:
        return self.program


def other(stack: Stack, program: str, **changes: Any) -> Other:
    """``stack`` with another program, and other fields where they are given."""
    of_stack = {each.name: getattr(stack, each.name) for each in fields(Stack)}
    return Other(**{**of_stack, "program": program, **changes})


def digests(told: list[dict[str, Any]]) -> set[str]:
    """Of the weights of all ranks after all runs: one, if they are equal and there was one run."""
    return {run["digest"] for found in told for run in found["runs"]}


def sums(told: list[dict[str, Any]], kind: str = "all_reduce") -> dict[str, float]:
    """{"calls", "coded", "plain", "sent"}: what the backend of rank 0 counted of sums, and how many "times" fewer."""
    found: dict[str, float] = told[0]["counts"][kind]
    return {**found, "times": found["plain"] / found["sent"]}
