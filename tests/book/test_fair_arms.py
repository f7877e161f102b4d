"""Every arm of a ranking has the same number of seeds and a learning rate of its own, in what is recorded."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tq.book import paths
from tq.book.record.dependencies import changed

ROOT = Path(__file__).parents[2]
FULL = sorted((ROOT / "data" / "results" / "cpu" / "full").glob("*.json"))
RANKED = {  # what the ranking figures and tables of these chapters show, by the folder of their keys
    "compressed-adamw": ("",),
    "gradient-codes": ("formats",),
    "published-rule": ("after-a-start", "first-step", "two-replicas", "published", "feedback", "million"),
    "optimizer-state": ("loss",),
    "activation-memory": ("loss", "loss-1m"),
    "data-parallel-training": ("loss",),
}
NO_RANKING = {
    "gradient-codes": {"factors-2"},  # half of the settings of the codec taken apart are tuned, as the chapter declares
    "published-rule": {"added", "as-reported"},  # one arm each
    "compressed-adamw": {"million"},  # drop-ins, at the rate of fp32 there
}
LEAST = 8  # seeds
NO_ARM = {"start", "amp", "effect", "effect-2", "effect-4", "corrected-minus-plain"}


def groups(results: dict[str, Any]) -> dict[str, list[str]]:
    """Arms by the folder of their keys."""
    found = defaultdict(list)
    for key in results:
        arm, _, kind = key.rpartition("/")
        if kind == "gap" and arm.rpartition("/")[0] not in NO_ARM and arm not in NO_ARM:
            found[arm.rpartition("/")[0]].append(arm)
    return found


def unfair(results: dict[str, Any], arms: list[str]) -> list[str]:
    """Arms without a tuned rate, and those whose seeds are fewer than the others' or than the least."""
    seeds = {arm: results[f"{arm}/gap"].get("n") or 0 for arm in arms}
    most = max(seeds.values(), default=0)
    return [
        arm for arm in arms
        if seeds[arm] < max(most, LEAST) or not {f"{arm}/lr", f"{arm}/lr-at-an-end", f"{arm}/own-gap"} <= results.keys()
        or results[f"{arm}/own-gap"].get("n") != seeds[arm]
    ]  # fmt: skip


@pytest.mark.parametrize(("chapter", "group"), [(c, g) for c, all_of in RANKED.items() for g in all_of])
def test_arms_of_a_ranking_are_treated_alike(chapter: str, group: str) -> None:
    path = ROOT / "data" / "results" / "cpu" / "full" / f"{chapter}.json"
    results = json.loads(path.read_text())["results"]
    if not any(key.endswith("/own-gap") for key in results):
        stale = changed(json.loads(path.read_text()), paths.notebook(chapter))
        assert stale, "a recording without its declared ranking must be told to be stale"
        return
    arms = groups(results)[group]
    assert len(arms) >= 2 and unfair(results, arms) == []


def test_no_ranking_is_left_out() -> None:
    for path in FULL:
        results = json.loads(path.read_text())["results"]
        tuned = {key.removesuffix("/own-gap").rpartition("/")[0] for key in results if key.endswith("/own-gap")}
        left = tuned - set(RANKED.get(path.stem, ())) - NO_RANKING.get(path.stem, set())
        assert left == set(), f"{path.stem}: {left}"


def test_an_arm_with_fewer_seeds_or_without_a_rate_is_found() -> None:
    good = {"gap": {"n": 8}, "own-gap": {"n": 8}, "lr": {}, "lr-at-an-end": {}}
    results = {f"{arm}/{kind}": value for arm in ("a", "b", "c") for kind, value in good.items()}
    assert unfair(results, ["a", "b", "c"]) == []
    results["b/gap"] = {"n": 3}
    del results["c/lr"]
    assert unfair(results, ["a", "b", "c"]) == ["b", "c"]
