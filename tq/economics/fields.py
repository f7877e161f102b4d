"""One input of a calculator: its label, its default and what it accepts. A case maps the names of all fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Case = Mapping[str, float]
Result = dict[str, float | None]


@dataclass(frozen=True)
class Field:
    """choices: {value: words} where only these are accepted; whole: integers only; group: "" or the part of the form
    that the field is folded into."""

    name: str
    label: str
    default: float
    low: float
    high: float
    unit: str = ""
    whole: bool = False
    choices: tuple[tuple[float, str], ...] = ()
    group: str = ""

    def check(self, value: object) -> float:
        """value as a float; ValueError names the field and what it accepts."""
        choices = ", ".join(f"{each:g}" for each, _ in self.choices)
        accepted = f"one of {choices}" if choices else f"{'an int' if self.whole else 'a number'} "
        accepted += "" if choices else f"from {self.low:g} to {self.high:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.name} must be {accepted}, got {value!r}")
        good = self.low <= value <= self.high and (not self.whole or value == math.floor(value))
        if not good or self.choices and value not in [each for each, _ in self.choices]:
            raise ValueError(f"{self.name} must be {accepted}, got {value:g}")
        return float(value)


BITS = Field("bits", "Bits of the codec", 4, 1, 8, "bits", whole=True)
BLOCK = Field("block", "Numbers per block", 128, 1, 65536, whole=True)
SCALE = Field("scale_bits", "Scale of a block", 32, 16, 32, "bits", choices=((16, "16 bits"), (32, "32 bits")))


def read(calculator: str, fields: Sequence[Field], case: Case) -> dict[str, float]:
    """The case with every field checked; ValueError where one is missing, unknown or out of its range."""
    known = {field.name: field for field in fields}
    unknown, missing = set(case) - set(known), set(known) - set(case)
    if unknown or missing:
        odd = sorted(unknown) or sorted(missing)
        raise ValueError(
            f"{'unknown' if unknown else 'missing'}: {', '.join(odd)}; {calculator} takes {', '.join(known)}"
        )
    return {name: field.check(case[name]) for name, field in known.items()}


def stored_bits(x: Case) -> float:
    """Bits per number with its share of the block's scale."""
    return x["bits"] + x["scale_bits"] / x["block"]
