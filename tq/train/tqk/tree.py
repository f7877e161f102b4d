"""Nested states as JSON and a list of tensors, and back: what a file can hold; nothing in it has to be run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_KINDS = ("tensor", "tuple", "pairs", "float", "dtype")  # of what JSON has no form for: {"kind": ..., "of": ...}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_DEEPEST = 100


def take_apart(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """(what JSON can say of ``state``, its tensors by their paths in it, as in ``optimizer/state/0/exp_avg``).

    Raises:
        TypeError: for anything but tensors, numbers, texts, None, dtypes, and dicts, lists and tuples of them.
    """
    tensors: dict[str, Tensor] = {}
    return _apart(state, "", tensors), tensors


def _apart(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = path or "tensor"
        while name in tensors:  # keys with a slash in them
            name += "'"
        tensors[name] = value
        return {"kind": "tensor", "of": name}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"kind": "float", "of": repr(value)}
    if isinstance(value, torch.dtype):
        return {"kind": "dtype", "of": str(value).removeprefix("torch.")}
    inside = f"{path}/" if path else ""
    if isinstance(value, Mapping):
        pairs = [(key, _apart(each, f"{inside}{key}", tensors)) for key, each in value.items()]
        if all(isinstance(key, str) for key, _ in pairs) and "kind" not in value:
            return dict(pairs)
        return {"kind": "pairs", "of": [[_apart(key, path, tensors), each] for key, each in pairs]}
    if isinstance(value, (list, tuple)):
        each = [_apart(one, f"{inside}{number}", tensors) for number, one in enumerate(value)]
        return each if isinstance(value, list) else {"kind": "tuple", "of": each}
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__} (at {path or 'the top'})")


def put_together(said: Any, tensors: Mapping[str, Any], depth: int = 0) -> Any:
    """The inverse of ``take_apart``. ValueError for what ``take_apart`` never says."""
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    if isinstance(said, list):
        return [put_together(each, tensors, depth + 1) for each in said]
    if not isinstance(said, dict):
        return said
    if "kind" not in said:
        return {key: put_together(each, tensors, depth + 1) for key, each in said.items()}
    kind, of = said["kind"], said.get("of")
    if kind == "tensor" and isinstance(of, str) and of in tensors:
        return tensors[of]
    if kind == "tuple" and isinstance(of, list):
        return tuple(put_together(each, tensors, depth + 1) for each in of)
    if kind == "pairs" and isinstance(of, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in of):
        return {put_together(key, tensors, depth + 1): put_together(each, tensors, depth + 1) for key, each in of}
    if kind == "float" and of in ("nan", "inf", "-inf"):
        return float(of)
    if kind == "dtype" and of in DTYPES:
        return DTYPES[of]
    raise ValueError(f"no such value: {str(said)[:80]}")
