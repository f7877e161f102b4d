"""Weights in few bits as tasks, so that an edited page measures none of them again.

Names and methods are those of ``tq.lab.weight_study``.
"""

from __future__ import annotations

from typing import Any

from tq.lab import in_the_loop
from tq.lab import weight_study as lab

#: How inputs of linear layers come in 4 bits.
INPUTS = {
    "integers per token": lambda: lab.integers_per_token(4),
    "integers per token, blocks rotated": lambda: lab.turned_integers(4, lab.codec(4)),
    "integers per token, all rotated": lambda: lab.wide_integers(4, lab.codec(4)),
    "integers per token, all rotated, clipped": lambda: lab.wide_integers(4, lab.codec(4), clip=0.9),
    "codes, a scale per 64": lambda: lab.codes(lab.codec(4)),
}


def judge(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``weight_study.outcome``; task: "name", "method", "bits", "draw", "domain", "tokens"."""
    return _plain(lab.outcome(**task))


def peer(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``weight_study.compressed``; task: likewise."""
    return _plain(lab.compressed(**task))


def mixed(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``weight_study.mixed``; task: "name", "method", "bits", "draw"."""
    found = lab.mixed(**task)
    return {"stored": found["stored"], **{domain: _plain(found[domain]) for domain in ("stdlib", "prose")}}


def without(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Ours without some parts; task: "name", "bits", "draw", and "parts" as ``weight_study.variant`` takes them."""
    way = lab.variant(lab.codec(task["bits"]), **task["parts"])
    return lab.told(lab.of(task["name"], task["draw"]).judge(way).found)


def kind(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """One kind of layer by ours, all others exact; task: "name", "kind", "bits"."""
    study = lab.of(task["name"])
    return lab.told(study.judge(lab.ours(lab.codec(task["bits"])), only=study.kinds()[task["kind"]]).found)


def inputs(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Weights of 4 bits by ours, and inputs in each of ``INPUTS``; task: "name"."""
    study, found = lab.of(task["name"]), {}
    model = study.model_of(lab.ours(lab.codec(4)))
    for name, made in INPUTS.items():
        with lab.coded_inputs(model, made()):
            found[name] = lab.told(study.compare(model))
    return found


def loop(task: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``in_the_loop.compare``; task: "bits", "steps", "seed"."""
    return in_the_loop.compare(task["bits"], task["steps"], task["seed"])


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """Without the seconds: tasks run two at a time."""
    del found["seconds"]
    return found
