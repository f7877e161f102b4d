"""States of ``TurboQuantAdamW``, written and read.

Two forms. The *whole* form is the optimizer's own, bucket by bucket and to the bit, for ``torch.save``; it goes on only
where the settings are the same. The form *by parameter* is AdamW's: ``step``, ``exp_avg`` and ``exp_avg_sq``, of the
parameter's shape, DTensors where the parameter is one, with a note about the optimizer (``NOTE``).
``torch.distributed.checkpoint`` saves and cuts it, so it is read on any number of ranks, and by ``torch.optim.AdamW``.

Moments in few bits are ``CodedTensor`` there. Where ranks, shards and buckets are as they were, they come back to the
bit; where they are cut otherwise their blocks are others, so they are decoded and coded anew: once more the error of
one step's coding (of m's squares, relative to a block: ``unbiased_nmse(bits)``; of v: one level of its scale). fp32 is
exact always.

``tq.train.tqk`` has the files; ``python -m tq.train.checkpoint`` is its command line.

What a scheme keeps of each rank alone is filed under that rank and the number of ranks, and read by no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tq.quant.codec import Codec
from tq.train.shards import shard_of, sharded_like
from tq.train.state import Store

FORMAT = 4  # of the whole form; up to 3 the seeds of coded moments gave other signs; 2 wrote the rank always
NOTE = "turboquant"  # fp64: steps of the optimizer, steps of the bucket, bytes sent, number of tensors of this rank
_MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}
_ADAMW = {"step", *_MOMENTS.values()}  # state of torch.optim.AdamW
_ADAMW_ONLY = {"amsgrad", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}

Buckets = Sequence[tuple[list[Tensor], Store]]


@dataclass(frozen=True)
class Loaded:
    """What was read: a store for each bucket, and the groups with their learning rates."""

    stores: list[Store]
    param_groups: list[dict[str, Any]]
    steps_done: int
    bytes_sent: float


# --- writing --------------------------------------------------------------------------------------------------


def whole(stores: Sequence[Store], settings: dict[str, Any], steps_done: int, bytes_sent: float) -> dict[str, Any]:
    """The whole form: tensors, numbers and texts only."""
    return {
        "format": FORMAT,
        "settings": settings,
        "steps_done": steps_done,
        "bytes_sent": bytes_sent,
        "done": [store.done for store in stores],
        "steps": [list(store.steps) for store in stores],
        "buckets": [dict(store.lend()) for store in stores],
    }


def by_parameter(
    buckets: Iterable[tuple[list[Tensor], Store]], own: str | None, steps_done: int, bytes_sent: float
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """(parameter, its entry) of all that have a state: views. own: key of what is kept of this rank alone, if any."""
    for parameters, store in buckets:
        held = 0 if own is None else len(store.tensors)
        note = torch.tensor([steps_done, store.done, bytes_sent, held], dtype=torch.float64)
        for number, parameter in enumerate(parameters if store.done else ()):
            entry: dict[str, Any] = {"step": torch.tensor(store.steps[number], dtype=torch.float32), NOTE: note}
            if own is None:
                pieces = {key: store.piece(name, number) for name, key in _MOMENTS.items()}
                entry |= {key: sharded_like(parameter, piece) for key, piece in pieces.items()}
            elif number == 0:
                entry[own] = dict(store.lend())
            yield parameter, entry


def codec_fields(codecs: Sequence[Codec]) -> list[dict[str, str]]:
    """Settings of codecs as texts."""
    return [{name: str(value) for name, value in asdict(codec).items()} for codec in codecs]


# --- reading the whole form -----------------------------------------------------------------------------------


def read_whole(state_dict: dict[str, Any], settings: dict[str, Any], buckets: Buckets, device: torch.device) -> Loaded:
    """ValueError for a state that is not whole, or of an optimizer with other settings."""
    ours = state_dict[NOTE]
    if ours.get("format") not in range(2, FORMAT + 1):
        raise ValueError(f"not a state of TurboQuantAdamW of formats 2 to {FORMAT}: format {ours.get('format')!r}")
    missing = {"settings", "steps_done", "bytes_sent", "done", "steps", "buckets"} - set(ours)
    if missing or "param_groups" not in state_dict:
        raise ValueError(f"not a whole state of TurboQuantAdamW: it lacks {sorted(missing) or 'param_groups'}")
    differing = list(_differences(settings, ours["settings"]))
    if differing:
        raise ValueError(f"state of another optimizer ({'; '.join(differing)})")
    if ours["format"] < FORMAT and settings["state"]:
        raise ValueError(f"state of format {ours['format']}, in which the seeds of coded moments gave other signs")
    found = list(zip(ours["done"], ours["steps"], ours["buckets"], strict=False))
    if not len(found) == len(ours["done"]) == len(buckets):
        raise ValueError(f"state of another optimizer ({len(found)} buckets, here {len(buckets)})")
    for (_, store), each in zip(buckets, found, strict=True):
        store.load(*each, device)
    stores = [store for _, store in buckets]
    return Loaded(stores, state_dict["param_groups"], ours["steps_done"], ours["bytes_sent"])


def _differences(here: dict[str, Any], there: dict[str, Any]) -> Iterator[str]:
    for key, value in here.items():
        if key == "codecs":
            yield from _codec_differences(value, there.get(key, ()))
        elif there.get(key) != value:
            yield f"{key}: {there.get(key)!r}, here {value!r}"


def _codec_differences(here: list[dict[str, str]], there: Any) -> Iterator[str]:
    """A field that one of them does not know yet has its default there."""
    saved: list[dict[str, str]] = [each for each in there if isinstance(each, dict)] or [{} for _ in here]
    for text in there:
        if isinstance(text, str):  # format 2: "bits1: 4"
            name, value = text.split(": ", 1)
            saved[int(name[-1]) - 1][name[:-1]] = value
    defaults = {field.name: str(field.default) for field in fields(Codec)}
    for phase, (mine, theirs) in enumerate(zip(here, saved, strict=True)):
        for name in sorted({*mine, *theirs}):
            values = [each.get(name, defaults.get(name)) for each in (theirs, mine)]
            if values[0] != values[1]:
                yield f"codecs[{phase}].{name}: {values[0]}, here {values[1]}"


# --- reading the form by parameter ----------------------------------------------------------------------------


def read_by_parameter(
    state_dict: dict[str, Any], groups: Sequence[int], buckets: Buckets, device: torch.device, own: str | None
) -> Loaded:
    """That of ``by_parameter`` or of ``torch.optim.AdamW``, over the same parameters; anything else: ValueError.

    groups: number of parameters of each.
    """
    saved, found = state_dict.get("param_groups"), state_dict.get("state")
    if not isinstance(saved, list) or not isinstance(found, dict) or not all("betas" in group for group in saved):
        raise ValueError("neither a state of TurboQuantAdamW nor of torch.optim.AdamW")
    ours = any(NOTE in entry for entry in found.values())
    if not ours:
        _check_adamw(saved, found)
    if [len(group["params"]) for group in saved] != list(groups):
        raise ValueError(
            f"state has groups of {[len(group['params']) for group in saved]} parameters, here {list(groups)}"
        )
    names = iter(name for group in saved for name in group["params"])
    notes = [torch.zeros(4)]
    for parameters, store in buckets:
        entries = [found.get(next(names)) for _ in parameters]
        if any(entries):
            notes.append(_read_bucket(parameters, store, entries, device, own if ours else None))
    steps_done, _, bytes_sent, _ = (max(column) for column in zip(*(note.tolist() for note in notes), strict=True))
    slim = [{key: value for key, value in group.items() if key not in _ADAMW_ONLY} for group in saved]
    return Loaded([store for _, store in buckets], slim, int(steps_done), bytes_sent)


def _check_adamw(groups: list[dict[str, Any]], found: dict[Any, Any]) -> None:
    for group in groups:
        if not group.get("decoupled_weight_decay") or group.get("amsgrad"):
            raise ValueError(
                "state of another optimizer than AdamW as it is here: decoupled_weight_decay="
                f"{group.get('decoupled_weight_decay')}, amsgrad={group.get('amsgrad')}"
            )
    if any(set(entry) != _ADAMW for entry in found.values()):
        keys = sorted({key for entry in found.values() for key in entry})
        raise ValueError(f"state of AdamW must hold {sorted(_ADAMW)} for each parameter, got {keys}")


def _read_bucket(
    parameters: list[Tensor], store: Store, entries: list[dict[str, Any] | None], device: torch.device, own: str | None
) -> Tensor:
    """Fills the store; returns the newest note, or one made of the steps."""
    steps = [0 if entry is None else int(entry["step"]) for entry in entries]
    notes = [entry[NOTE] for entry in entries if entry is not None and NOTE in entry]
    note = max(notes, key=lambda x: x[0].item()) if notes else torch.tensor([max(steps), max(steps), 0.0, 0.0])
    done = int(note[1])
    if own is not None:
        tensors = (entries[0] or {}).get(own, {})
        if len(tensors) != int(note[3]) or not tensors:
            raise ValueError(
                f"this scheme keeps {int(note[3])} tensors of each rank: of {own} {len(tensors)} of them are here "
                f"({sorted(entries[0] or {})})"
            )
        store.load(done, steps, tensors, device)
        return note
    pieces: dict[str, list[Tensor]] = {name: [] for name in _MOMENTS}
    for parameter, shape, entry in zip(parameters, store.shapes, entries, strict=True):
        for name, key in _MOMENTS.items():
            if entry is None:
                pieces[name].append(torch.zeros(shape, dtype=torch.float32))
                continue
            if key not in entry or entry[key].shape != parameter.shape:
                has = tuple(entry[key].shape) if key in entry else sorted(entry)
                raise ValueError(f"state for shape {has}, parameter has {tuple(parameter.shape)}")
            pieces[name].append(shard_of(entry[key], parameter))
    store.join(done, steps, pieces, device)
    return note


if __name__ == "__main__":  # files of checkpoints are looked into, checked and converted by this name too
    import runpy

    runpy.run_module("tq.train.tqk", run_name="__main__", alter_sys=True)
