"""The claims ledger without its rules: the rows of `data/claims.csv`, what a verdict is, the snapshot and its changes.

It judges nothing; `tq.book.claims.judge` does. Refused: a verdict outside the words, one without its reason or
without what would change it, one that holds or fails without evidence. The column `first_guess` is not even read.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from tq.book import paths
from tq.book.claims import words
from tq.book.claims.tolerance import NUMBER, hedged, tolerance
from tq.book.claims.words import (
    DECIDED,
    LIMIT,
    NOT_CHECKABLE,
    NOT_MEASURED,
    NOT_REPRODUCED,
    NOT_YET,
    NOTE,
    PARTLY,
    QUANTIFIERS,
    REPRODUCED,
    UNDECIDED,
    VERDICTS,
    Check,
)
from tq.book.record.provenance import commit
from tq.book.record.results import load

__all__ = [
    "DECIDED", "LIMIT", "NOTE", "NOT_CHECKABLE", "NOT_MEASURED", "NOT_REPRODUCED", "NOT_YET", "PARTLY", "REPRODUCED",
    "UNDECIDED", "VERDICTS", "Check", "Claim", "Evidence", "Finding", "NotRecorded", "Results", "Rule", "Verdict",
    "claim", "claims", "counts", "found", "moved", "record", "snapshot", "table", "verdict_for",
]  # fmt: skip

CONFIDENCES = ("high", "medium", "low", "")  # "" where nothing is decided
MEASURED, COMPUTED, PRINTED = "measured here", "computed", "printed"  # what a verdict rests on
BASES = (MEASURED, COMPUTED, PRINTED, "")
# Chapters whose results are runs on this machine; those of the others are computed from models and tables.
MEASURING = (
    "rotation-and-codebook", "distortion", "training-tensors", "kernels", "on-a-gpu", "simulated-gpu",
    "compressed-adamw", "gradient-codes", "published-rule", "gap-trends", "loss-at-scale", "activation-memory",
    "optimizer-state", "compressed-allreduce", "data-parallel-training", "scaling-out", "offload-and-single-gpu",
    "weight-quantization", "kv-cache", "checkpoints-and-failures", "recompute-planner", "parallelism",
    "network-topology", "synchronisation", "memory-hierarchy",
)  # fmt: skip

SEEDS = {
    "0": "Whitepaper",
    "1": "Single-GPU training",
    "2": "Checkpoint compression",
    "3": "Infrastructure economics",
    "4": "Efficient and scaled training",
    "T": "Companion report",
}
# How a claim can be checked -> the words of the column `how_to_check` that say so; a claim may have several.
KINDS = {
    "model": "derive from a model",
    "cpu": "measure on CPU",
    "gpu": "measure on one GPU",
    "source": "compare with cited source",
    "none": "cannot be checked",
}
# Why a claim cannot be checked (column `not_checkable_because`), in words.
REASONS = {
    "forecast": "A forecast: nothing that can be run today decides it.",
    "opinion": "A judgement without a measurable quantity.",
    "plan": "A plan of its authors, not a statement about the world.",
    "limit": "Stands: its authors have published nothing beyond it.",
    "source": "No source is named, and none of the set-up is described.",
    "advice": "Advice that depends on a workload which is not described.",
    "lost": "The figure was lost from the document.",
}
FULL = (("cpu", "full"), ("cuda", "full"))  # what verdicts rest on; the first that was recorded counts


@dataclass(frozen=True)
class Claim:
    """One row of `data/claims.csv`; the hints of a first reading (`first_guess`, `derived_value`) stay behind."""

    id: str
    seed: str
    section: str
    claim: str
    value: str
    unit: str
    garbled_reading: str
    how_to_check: str
    claim_en: str
    chapter: str  # that decides it, or will
    not_checkable_because: str  # a key of REASONS, or ""
    quote: str = ""  # the document's own words
    quote_en: str = ""  # in English, where they are not
    quantifier: str = ""  # one of QUANTIFIERS, by those words
    scope: str = ""  # "theirs": of the authors' own system; "world"
    readings: str = ""  # that the document itself names or leaves open
    same_as: str = ""  # the claim that says the same
    note: str = ""  # why the row is no claim of the document, where it is none
    reason: str = ""  # of a claim without a rule, where its look-ups do not say it shortly
    would_change: str = ""  # the verdict of a claim without a rule

    def __post_init__(self) -> None:
        if self.quantifier not in ("", *QUANTIFIERS):
            accepted = ", ".join(QUANTIFIERS)
            raise ValueError(f"{self.id}: quantifier={self.quantifier!r}; accepted are {accepted}")
        if self.scope not in ("", "theirs", "world"):
            raise ValueError(f"{self.id}: scope={self.scope!r}; accepted are theirs and world")
        if not re.fullmatch(r"[a-z0-9-]+", self.chapter):
            raise ValueError(f"{self.id}: chapter={self.chapter!r}; the name of one is needed, such as lab-e1")
        if self.not_checkable_because not in ("", *REASONS):
            accepted = ", ".join(REASONS)
            raise ValueError(
                f"{self.id}: not_checkable_because={self.not_checkable_because!r}; accepted are {accepted} and nothing"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind, words in KINDS.items() if words in self.how_to_check)

    @property
    def figure(self) -> str:
        """Value and unit as one text ("8×", "$15M", "27-56 %"), "" where the claim has none."""
        if self.value in ("", "-"):
            return ""
        dollars = re.fullmatch(r"\$([MB]?)(/\w+)?", self.unit)
        if dollars:
            return f"${self.value}{dollars[1]}{dollars[2] or ''}"
        if re.match(r"x\b", self.unit):
            return f"{self.value}×{self.unit[1:]}"
        return f"{self.value} {self.unit}".strip()

    def number(self) -> float:
        """The first number of the value: 8 of "8", 200 of "~200"; a value without one raises."""
        found = re.search(r"\d[\d,]*(?:\.\d+)?", self.value)
        if not found:
            raise ValueError(f"{self.id}: the value {self.value!r} holds no number")
        return float(found.group().replace(",", ""))

    def ends(self) -> tuple[float, float]:
        """The range of the value: 50K-500K is (5e4, 5e5), 120M+ (1.2e8, 1.2e8), and of 32 -> 64-96 the last."""
        scale = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}
        found = re.findall(r"(\d[\d,]*(?:\.\d+)?)\s?([KMB]?)", self.value.split(">")[-1])
        if not found:
            raise ValueError(f"{self.id}: the value {self.value!r} holds no number")
        values = [float(number.replace(",", "")) * scale[unit] for number, unit in found[:2]]
        return values[0], values[-1]

    def within(self) -> tuple[float, float]:
        """Share that the low and the high end of the value may be off by (`tq.book.claims.tolerance`)."""
        found = NUMBER.findall(self.value.split(">")[-1])[:2]
        if not found:
            raise ValueError(f"{self.id}: the value {self.value!r} holds no number")
        words = self.quote_en or self.quote
        hedge = "~" if "~" in self.value or hedged(found[0], words) else ""  # that of a range stands before its first
        ends = [tolerance(hedge + number) for number in found]
        return ends[0], ends[-1]

    def bounds(self) -> tuple[float, float]:
        """The ends of the value, each wider by its tolerance; a bound has no other end."""
        (low, high), (below, above) = self.ends(), self.within()
        least = -math.inf if self.quantifier == words.AT_MOST else low * (1 - below)
        most = math.inf if self.quantifier == words.AT_LEAST else high * (1 + above)
        return least, most


@dataclass(frozen=True)
class Evidence:
    """What a verdict rests on: results of a chapter (then with keys and view), or a formula and where it is shown."""

    text: str
    chapter: str = ""
    keys: tuple[str, ...] = ()
    view: str = ""  # "cpu:full"


@dataclass(frozen=True)
class Finding:
    """What a rule returns. `formula` is evidence beside the results that were read; `see`: a chapter that shows it;
    `checks`: the comparisons that its verdict adds up from; `basis`: one of BASES where evidence does not tell."""

    verdict: str
    condition: str
    would_change: str
    confidence: str = ""
    formula: str = ""
    see: str = ""
    checks: tuple[Check, ...] = ()
    basis: str = ""


def found(
    claim: Claim, checks: Sequence[Check], reason: str, would_change: str, confidence: str, formula: str = "",
    *, see: str = "", basis: str = "",
) -> Finding:  # fmt: skip
    """A finding whose verdict is what its comparisons add up to, by the claim's quantifier."""
    verdict = words.vote(claim.quantifier, checks)
    return Finding(verdict, reason, would_change, confidence, formula, see, tuple(checks), basis)


@dataclass(frozen=True)
class Verdict:
    """A finding about one claim, with its evidence. `chapter`: the one that decides, or will."""

    id: str
    verdict: str
    condition: str
    confidence: str
    evidence: tuple[Evidence, ...]
    would_change: str
    chapter: str = ""
    rule: str = ""  # in words, as it was fixed before
    checks: tuple[Check, ...] = ()
    basis: str = ""
    same_as: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in (*VERDICTS, NOTE):
            raise ValueError(f"{self.id}: verdict={self.verdict!r}; accepted are {', '.join((*VERDICTS, NOTE))}")
        if self.basis not in BASES:
            raise ValueError(f"{self.id}: basis={self.basis!r}; accepted are {', '.join(BASES[:-1])} and nothing")
        decided = self.verdict in DECIDED
        if self.confidence not in CONFIDENCES or (self.confidence != "") < decided:
            raise ValueError(f"{self.id}: confidence={self.confidence!r} does not fit {self.verdict!r}")
        if decided and not self.evidence:
            raise ValueError(f"{self.id}: {self.verdict!r} without evidence")
        if not self.condition or not self.would_change:
            raise ValueError(f"{self.id}: a verdict says under which condition it holds and what would change it")

    def line(self) -> str:
        return f"{self.id} {self.verdict} — {self.condition}"


def verdict_for(whole: bool, part: bool) -> str:
    """Of a claim that holds as a whole, in part, or not."""
    return REPRODUCED if whole else PARTLY if part else NOT_REPRODUCED


class NotRecorded(LookupError):
    """A rule asked for a result of `chapter` that no full run has recorded; device: where it would have to run."""

    def __init__(self, chapter: str, message: str, device: str = "cpu") -> None:
        super().__init__(message)
        self.chapter, self.device = chapter, device


@dataclass
class Results:
    """The recorded full results as rules read them; `read` keeps what was asked for, as evidence."""

    fresh: bool = False  # a fresh full run goes before the committed one
    read: list[tuple[str, str, str, Any]] = field(default_factory=list)
    _files: dict[tuple[str, str, str], dict[str, Any] | None] = field(default_factory=dict)

    def of_a_claim(self) -> Results:
        """The same results, of which nothing has been read yet."""
        return replace(self, read=[])

    def _file(self, chapter: str, device: str, profile: str) -> dict[str, Any] | None:
        view = (chapter, device, profile)
        if view not in self._files:
            fresh = load(*view, fresh=True) if self.fresh else None
            self._files[view] = fresh or load(*view)
        return self._files[view]

    def entry(self, chapter: str, key: str) -> dict[str, Any]:
        """The recorded result with unit, interval and n; raises NotRecorded where there is none."""
        for device, profile in FULL:
            found = self._file(chapter, device, profile)
            if found is None:
                continue
            entry: dict[str, Any] | None = found["results"].get(key)
            if entry is None or entry["value"] is None:
                raise NotRecorded(chapter, f"the full run of {chapter} on {device} has no result {key!r}")
            self.read.append((chapter, key, f"{device}:{profile}", entry["value"]))
            return entry
        raise NotRecorded(chapter, f"no full run of {chapter} is recorded")

    def __call__(self, chapter: str, key: str) -> float:
        return float(self.entry(chapter, key)["value"])

    def if_recorded(self, chapter: str, *keys: str) -> list[float] | None:
        """The values of all keys, or None where one is not recorded: then none of them counts as read."""
        before = len(self.read)
        try:
            return [self(chapter, key) for key in keys]
        except NotRecorded:
            del self.read[before:]
            return None

    def on_gpu(self, chapter: str, key: str) -> float:
        """The result of the full run on a GPU; raises NotRecorded where there is none."""
        found = self._file(chapter, "cuda", "full")
        if found is None or found["results"].get(key, {}).get("value") is None:
            raise NotRecorded(chapter, f"{chapter} has recorded nothing on a GPU that decides it", "cuda")
        value = found["results"][key]["value"]
        self.read.append((chapter, key, "cuda:full", value))
        return float(value)

    def evidence(self) -> tuple[Evidence, ...]:
        """What was read, a chapter an entry."""
        grouped: dict[tuple[str, str], dict[str, Any]] = {}
        for chapter, key, view, value in self.read:
            grouped.setdefault((chapter, view), {})[key] = value

        def shown(value: Any) -> str:
            return f"{value:.4g}" if isinstance(value, float) else str(value)

        return tuple(
            Evidence(", ".join(f"{k} = {shown(v)}" for k, v in found.items()), chapter, tuple(found), view)
            for (chapter, view), found in grouped.items()
        )


# A rule decides one claim from recorded results, from formulas, or from both.
Rule = Callable[[Claim, Results], Finding]


def table(name: str) -> list[dict[str, str]]:
    """Rows of `data/<name>`; none where there is no such file."""
    path = paths.root() / "data" / name
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def claims() -> list[Claim]:
    """Every claim in the order of the file. A repeated id, a missing column or an unknown reason raises."""
    rows = table("claims.csv")
    if not rows:
        raise FileNotFoundError(f"{paths.root() / 'data' / 'claims.csv'}: no claims there")
    every = [Claim(**{name: row[name] for name in Claim.__dataclass_fields__}) for row in rows]
    known = Counter(claim.id for claim in every)
    twice = [name for name, count in known.items() if count > 1]
    if twice:
        raise ValueError(f"claims.csv holds {', '.join(twice)} more than once")
    originals = {each.id for each in every if not each.same_as}
    lost = [each.id for each in every if each.same_as and each.same_as not in originals]
    if lost:
        raise ValueError(f"claims.csv: same_as of {', '.join(lost)} must name a claim that is itself the same as none")
    return every


def claim(name: str) -> Claim:
    """One claim by its id; KeyError where there is none."""
    known = {each.id: each for each in claims()}
    if name not in known:
        raise KeyError(f"{name!r} is no claim of data/claims.csv")
    return known[name]


def counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many of these claims have which verdict, in the order of VERDICTS, none left out.

    A claim that says the same as another of them is not counted again, a note never.
    """
    every = list(verdicts)
    known = {each.id for each in every}
    number = Counter(each.verdict for each in every if each.same_as not in known)
    return {verdict: number[verdict] for verdict in VERDICTS}


# --- the committed snapshot -----------------------------------------------------------------------------------


def snapshot() -> dict[str, Any]:
    """`data/verdicts.json`; empty before the first recording."""
    return paths.read_json(paths.root() / "data" / "verdicts.json") or {"verdicts": {}, "changes": []}


def moved(verdicts: Iterable[Verdict], recorded: Mapping[str, str]) -> list[tuple[Verdict, str]]:
    """(verdict of today, verdict of the snapshot) where the two differ; "" where the snapshot has none."""
    return [(v, recorded.get(v.id, "")) for v in verdicts if recorded.get(v.id, "") != v.verdict]


def record(verdicts: list[Verdict], because: str = "") -> list[tuple[Verdict, str]]:
    """Brings the snapshot in step and appends what changed, with date and commit; returns the changes.

    The first verdict of a claim is no change. Nothing is written where nothing moved. because: why all of them changed,
    such as new rules; without it results did.
    """
    old = snapshot()
    changes = moved(verdicts, old["verdicts"])
    now = {v.id: v.verdict for v in verdicts}
    if now == old["verdicts"]:
        return []
    stamp = {"date": datetime.now(UTC).date().isoformat(), "commit": commit()[0]}
    reason = {"because": because} if because else {}
    entries = [
        {**stamp, **reason, "id": v.id, "from": was, "to": v.verdict, "why": v.condition} for v, was in changes if was
    ]
    new = {"opened": old.get("opened", stamp), "verdicts": now, "changes": [*old["changes"], *entries]}
    paths.write_json(paths.root() / "data" / "verdicts.json", new)
    return changes
