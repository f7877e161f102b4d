"""Bytes that a rank sends: what the usual algorithm would, and what was."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Count:
    """Of one kind of collective. Bytes are a rank's, mean over the ranks, headers of the wire aside."""

    calls: int = 0
    coded: int = 0
    plain: float = 0.0
    sent: float = 0.0


@dataclass
class Counts:
    """Of one group, by kind."""

    kinds: dict[str, Count] = field(default_factory=dict)

    def add(self, kind: str, plain: float, sent: float | None = None) -> None:
        """One call. sent: None: it was sent as it is."""
        count = self.kinds.setdefault(kind, Count())
        count.calls += 1
        count.coded += sent is not None
        count.plain += plain
        count.sent += plain if sent is None else sent

    def rows(self, group: str) -> list[tuple[str, ...]]:
        """As a table prints them."""
        return [
            (group, kind, f"{each.calls:,}", f"{each.coded:,}", f"{each.plain:,.0f}", f"{each.sent:,.0f}",
             f"{each.plain / each.sent:.2f}" if each.sent else "-")
            for kind, each in sorted(self.kinds.items())
        ]  # fmt: skip
