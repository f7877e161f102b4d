"""What the optimizer's arguments may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tq.quant.dispatch import IMPLS

_Rule = tuple[Callable[[Any], bool], str]  # whether a value is accepted, and which are


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and x >= 1


_RULES: dict[str, _Rule] = {
    "lr": (lambda x: x >= 0 and math.isfinite(x), "a finite number >= 0"),
    "betas": (lambda x: isinstance(x, tuple | list) and len(x) == 2 and all(0 <= b < 1 for b in x),
              "two numbers in [0, 1)"),
    "eps": (lambda x: x >= 0, "a number >= 0"),
    "weight_decay": (lambda x: x >= 0, "a number >= 0"),
    "warmup": (lambda x: x is None or (isinstance(x, int) and x >= 0), "an integer >= 0 or None"),
    "max_norm": (lambda x: x is None or x > 0, "a number > 0 or None"),
    "v_every": (_is_count, "an integer >= 1"),
    "bucket_elements": (_is_count, "an integer >= 1"),
    "nonfinite": (lambda x: x in ("raise", "propagate"), "'raise' or 'propagate'"),
    "impl": (lambda x: x in IMPLS, f"one of {', '.join(map(repr, IMPLS))}"),
    "state": (lambda x: x is None
              or (isinstance(x, tuple) and len(x) == 2 and x[0] in range(2, 9) and x[1] in (2, 4, 8)),
              "None or (bits of m 2-8, bits of v 2, 4 or 8)"),
}  # fmt: skip
_CAPTURABLE: dict[str, _Rule] = {
    "variant": (lambda x: x in ("local", "exact"), "'local' or 'exact'"),
    "nonfinite": (lambda x: x == "propagate", "'propagate'"),
    "warmup": (lambda x: x == 0, "0"),
    "impl": (lambda x: x in ("auto", "triton"), "'auto' or 'triton'"),
}


def check(**given: Any) -> None:
    """ValueError for the first argument that is not accepted."""
    _hold(given, _RULES, "")


def check_capturable(**given: Any) -> None:
    """ValueError for the first argument that capturable=True does not go with."""
    _hold(given, _CAPTURABLE, " with capturable=True")


def check_parameter(parameter: Tensor, device: torch.device | None, exchanging: str | None) -> None:
    """TypeError or ValueError for a tensor that the optimizer does not train.

    device: of all its parameters; exchanging: name of a variant that exchanges something, None where none does.
    """
    if not parameter.is_floating_point():
        raise TypeError(f"params must be floating-point tensors, got {parameter.dtype}")
    if parameter.device != device:
        raise ValueError(f"params must lie on one device, got {device} and {parameter.device}")
    if isinstance(parameter, DTensor) and exchanging is not None:
        raise ValueError(
            "variant must be 'local' with sharded parameters (DTensors), whose gradients are averaged already; "
            f"got {exchanging!r}"
        )


def _hold(given: dict[str, Any], rules: dict[str, _Rule], when: str) -> None:
    for name, value in given.items():
        fits, accepted = rules[name]
        if not fits(value):
            raise ValueError(f"{name} must be {accepted}{when}; got {value!r}")
