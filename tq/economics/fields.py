"""One input of a calculator: its label, its default and what it accepts. A case maps the names of all fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: The inputs of a calculator: a mapping from the name of every field to its number.
Case = Mapping[str, float]
#: The outputs of a calculator: a mapping from names to numbers, or None where there is no such number.
Result = dict[str, float | None]


@dataclass(frozen=True)
class Field:
    """One input of a calculator, and which numbers it accepts.

    Attributes:
        name: key of the field in a case.
        label: text beside the input on the page.
        default: the number that the calculator opens with.
        low: smallest number accepted.
        high: largest number accepted.
        unit: unit of the number; empty (default) means a count or a ratio.
        whole: whether only integers are accepted; False by default.
        choices: (number, text) pairs if only these numbers are accepted; empty by default.
        group: part of the form that the field is folded into; empty by default.

    Example:
        >>> from tq.economics.calculator import FIELDS
        >>> bits = FIELDS["codec"][0]
        >>> bits.name, bits.low, bits.high, bits.check(4)
        ('bits', 1, 8, 4.0)
    """

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
        """Checks a number for this field.

        Args:
            value: the number.

        Returns:
            The number as a float.

        Raises:
            ValueError: if the field does not accept it.
        """
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
