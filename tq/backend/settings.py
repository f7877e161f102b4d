"""What the backend codes, and how: an object, and environment variables for code that one cannot change."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tq.quant.codec import Codec
from tq.train.collectives import WARMUP

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
DEFAULT = frozenset({"all_reduce", "reduce_scatter"})


@dataclass(frozen=True)
class Config:
    """Settings of a group, which all its ranks share.

    Args:
        codec: of what is sent; NaN and Inf propagate.
        min_numel: smaller tensors are sent as they are.
        codes: kinds of collectives that are coded, of ``all_reduce``, ``reduce_scatter``, ``all_gather`` and
            ``all_to_all``. Only sums and means of float tensors are; the last two carry weights or activations in most
            engines and are coded only where it is asked for.
        warmup: so many steps of the optimizer have exact sums at first, as with ``HookState``; counted by rank 0 of the
            group. A loop without a ``torch.optim`` optimizer takes none: set it to 0.

    Raises:
        ValueError: for another kind, or a negative number.

    Example:
        >>> from tq import Codec
        >>> from tq.backend import Config
        >>> sorted(Config(Codec(bits=3), min_numel=10_000).codes)
        ['all_reduce', 'reduce_scatter']
    """

    codec: Codec = field(default_factory=lambda: Codec(bits=4))
    min_numel: int = 4096
    codes: frozenset[str] = DEFAULT
    warmup: int = WARMUP

    def __post_init__(self) -> None:
        if unknown := set(self.codes) - set(KINDS):
            raise ValueError(f"codes={', '.join(sorted(unknown))}: accepted are {', '.join(KINDS)}")
        for name in ("min_numel", "warmup"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
        object.__setattr__(self, "codes", frozenset(self.codes))
        object.__setattr__(self, "codec", replace(self.codec, nonfinite="propagate"))

    def said(self) -> str:
        """The same text for the same configuration: what ranks compare."""
        return repr((self.codec, self.min_numel, sorted(self.codes), self.warmup))


def from_environment(given: Mapping[str, str] | None = None) -> Config:
    """``Config`` from TQ_BITS, TQ_BLOCK, TQ_SEED, TQ_SEARCH, TQ_MIN_NUMEL, TQ_WARMUP (integers) and TQ_CODES
    (``all_reduce,reduce_scatter``; empty: nothing).

    Raises:
        ValueError: for a value that is out of range.
    """
    said = os.environ if given is None else given
    numbers: dict[str, int] = {}
    for name in ("bits", "block", "seed", "search", "min_numel", "warmup"):
        text = said.get(key := f"TQ_{name.upper()}")
        if text is not None:
            try:
                numbers[name] = int(text)
            except ValueError:
                raise ValueError(f"{key} must be an integer, got {text!r}") from None
    of_codec = {name: numbers.pop(name) for name in ("bits", "block", "seed", "search") if name in numbers}
    codes = said.get("TQ_CODES")
    chosen = DEFAULT if codes is None else frozenset(kind.strip() for kind in codes.split(",") if kind.strip())
    return Config(replace(Codec(bits=4), **of_codec), codes=chosen, **numbers)  # type: ignore[arg-type]


_chosen: list[Config] = []


def configure(config: Config | None = None, **changes: object) -> Config:
    """Choose the settings of the groups that are made from now on, and return them.

    Args:
        config: None: those of now.
        changes: fields of ``Config`` that are to differ.

    Returns:
        The settings.

    Raises:
        ValueError, TypeError: for a field that ``Config`` does not take.

    Example:
        >>> import tq.backend
        >>> tq.backend.configure(min_numel=10_000).min_numel
        10000
        >>> tq.backend.configure(tq.backend.Config()).codec.bits
        4
    """
    _chosen[:] = [replace(config or configured(), **changes)]  # type: ignore[arg-type]
    return _chosen[0]


def configured() -> Config:
    """The settings of the next group: as chosen, else from the environment."""
    return _chosen[0] if _chosen else from_environment()
