"""Finds measured numbers that somebody typed into the prose instead of taking them from the results.

    python -m tq.book lint

Read are the pages of `book/` and the Markdown cells of the chapters. A number counts when it has a decimal point, a
unit, %, × or "times" and at least two digits that say something. It is a finding when it equals a recorded value,
rounded to the digits that are printed: two digits suffice for results of the page's own chapter and of the chapters
that the page quotes (three for the ends of their intervals), four are needed for all others, where equal digits are
mostly chance.

Left alone: code, math, roles, headings, links, comments, front matter. A number that only looks measured is excused by
a comment with the reason on its line,

    Panter and Dite give a factor 2.72 <!-- not measured: high-rate theory -->

or, where it is a definition that many pages repeat, in `DEFINITIONS` below. A cell that says "Declared before the runs"
holds settings, which were chosen and not measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tq.book import paths

# Printed text -> why it is no measurement. Everything else that collides is excused where it stands.
DEFINITIONS = {
    "95 %": "the level of every interval",
    "4.25 bits": "four bits and an fp32 scale a block of 128, or a bf16 scale a block of 64",
    "4.125 bits": "four bits and a bf16 scale a block of 128",
    ".03": "printed in the paper for three bits; a rounding of the exact value",
    ".009": "printed in the paper for four bits",
    ".047": "printed in the paper for the variance at four bits",
    "4.5 bits": "NF4 as published: four bits and an fp32 scale a block of 64",
}
DECLARED = "Declared before the runs"
OWN_DIGITS, END_DIGITS, OTHER_DIGITS = 2, 3, 4  # own results, ends of their intervals, results of other chapters
UNITS = (
    "%|×|times|ms|s|seconds?|minutes?|hours?|bits?|bytes?|[KMGT]i?B(?:/s)?|[KMG]bit(?:/s)?|GFLOPS|TFLOPS|nats?|bit/byte"
    "|bits per byte|tensors|elements|tokens|steps|parameters|W|kW|kWh|USD|dollars"
)
WORDS = {"thousand": 1e3, "million": 1e6, "billion": 1e9}
NUMBER = re.compile(
    rf"(?<![\w.,/#@^-])[-+\N{{MINUS SIGN}}±≈~<>]?(?P<digits>\d+(?:,\d{{3}})*(?:\.\d+)?|\.\d+)(?![\w/]*\d)(?!\.\d)"
    rf"(?:\s*(?P<word>thousand|million|billion)\b)?(?P<unit>[ \N{{NO-BREAK SPACE}}]?(?:{UNITS})(?![\w/]))?"
)
# a role in a row of a table, with a bare bar in it
SPLIT = re.compile(r"^\s*\|.*\{\w+\}`[^`|]*(?<!\\)\|[^`]*`")
EXCUSE = re.compile(r"<!--\s*not measured\s*:?(?P<why>.*?)-->", re.DOTALL)
ROLE = re.compile(r"\{val\}`(?P<chapter>[^/@|`\s]+)/")
FENCE = re.compile(r"^\s*(?P<mark>`{3,}|~{3,}|:{3,})\s*(?:\{(?P<name>[\w-]+)\})?")
PROSE_DIRECTIVES = {
    "admonition", "attention", "caution", "danger", "dropdown", "epigraph", "error", "exercise", "glossary",
    "grid", "grid-item", "grid-item-card", "hint", "important", "margin", "note", "prf", "seealso", "sidebar",
    "solution", "tab-item", "tab-set", "tip", "topic", "warning", "exercise-start", "solution-start", "list-table",
}  # fmt: skip
# What is no prose, in the order in which it is taken out; each becomes blanks of the same length.
CUTS = (
    re.compile(r"\A---\n.*?\n---\n", re.DOTALL),  # front matter
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"\$\$.*?\$\$", re.DOTALL),
    re.compile(r"\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.DOTALL),
    re.compile(r"\{[\w:+-]+\}(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL),  # roles
    re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL),  # inline code
    re.compile(r"(?<![\\$])\$(?![\s$])(?:\\.|[^$\\])+?(?<!\s)\$(?!\d)", re.DOTALL),
    re.compile(r"\]\([^)\s]*\)"),  # targets of links
    re.compile(r"<[a-zA-Z/][^>]*>"),  # HTML tags
    re.compile(r"(?:https?://|arXiv:)\S+"),
    re.compile(r"^\s{0,3}#{1,6}\s.*$", re.MULTILINE),  # headings
    re.compile(r"^\s*\(?:?[\w-]+\)?=\s*$", re.MULTILINE),  # labels
    re.compile(r"^\s*:[\w-]+:.*$", re.MULTILINE),  # options of directives
    re.compile(r"^\s*\d+[.)]\s", re.MULTILINE),  # numbered lists
)


@dataclass(frozen=True)
class Recorded:
    """One number that code recorded."""

    chapter: str
    view: str  # device:profile
    key: str
    value: float
    end: bool = False  # an end of its interval


@dataclass(frozen=True)
class Finding:
    """A number in the prose that a role should print."""

    where: str
    text: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text!r} {self.message}"


def recorded(base: Path) -> list[Recorded]:
    """Every finite number in `base/results`, and both ends of its interval."""
    found = []
    for path in sorted((base / "results").glob("*/*/*.json")):
        view = f"{path.parts[-3]}:{path.parts[-2]}"
        for key, entry in (paths.read_json(path) or {}).get("results", {}).items():
            for part in ("value", "low", "high"):
                value = entry.get(part)
                if isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0:
                    found.append(Recorded(path.stem, view, key, float(value), part != "value"))
    return found


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def prose(text: str) -> str:
    """The text with everything that is no prose blanked out; lines and columns stay where they are."""
    lines = text.split("\n")
    fences: list[tuple[str, bool]] = []  # (mark, whether what is inside is prose)
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if fence and fences and fence["mark"].startswith(fences[-1][0]) and not line.strip(" `~:"):
            fences.pop()
            lines[number] = " " * len(line)
        elif fence and all(inside for _, inside in fences):
            fences.append((fence["mark"], (fence["name"] or "") in PROSE_DIRECTIVES))
            lines[number] = " " * len(line)
        elif not all(inside for _, inside in fences):
            lines[number] = " " * len(line)
    text = "\n".join(lines)
    for cut in CUTS:
        text = cut.sub(_blank, text)
    return text


def _digits(number: str) -> int:
    """Digits that say something: without leading zeros, and without the trailing ones of a whole number."""
    plain = number.replace(",", "")
    whole = "." not in plain
    plain = plain.replace(".", "").lstrip("0")
    return len(plain.rstrip("0") if whole else plain)


def _readings(match: re.Match[str]) -> Iterator[tuple[float, float, str]]:
    """(value, half a unit of the last printed digit, format) of what the number may stand for."""
    number = match["digits"].replace(",", "")
    decimals = len(number.partition(".")[2])
    scale = WORDS.get(match["word"] or "", 1.0)
    comma = "," if "," in match["digits"] else ""
    half = 0.5 * 10.0**-decimals
    yield float(number) * scale, half * scale, f"{comma}.{decimals}f"
    if (match["unit"] or "").strip() == "%":
        yield float(number) / 100, half / 100, f".{decimals}%"


def _matches(match: re.Match[str], values: Sequence[Recorded], near: set[str]) -> list[tuple[Recorded, str]]:
    digits = _digits(match["digits"])
    found = []
    for value, half, spec in _readings(match):
        for entry in values:
            own = END_DIGITS if entry.end else OWN_DIGITS
            if digits >= (own if entry.chapter in near else OTHER_DIGITS) and abs(abs(entry.value) - value) <= half * (
                1 + 1e-9
            ):
                found.append((abs(abs(entry.value) - value), entry, spec))
    return [(entry, spec) for _, entry, spec in sorted(found, key=lambda item: item[0])]


def findings(text: str, where: str, values: Sequence[Recorded], chapter: str = "", quoted: str = "") -> list[Finding]:
    """Measured numbers in one Markdown text; `quoted` is the whole page, for the chapters that it takes values from."""
    near = {role["chapter"] for role in ROLE.finditer(quoted or text)} | {chapter}
    lines, found = text.split("\n"), []
    excuses = {text.count("\n", 0, e.end()): e["why"].strip() for e in EXCUSE.finditer(text)}
    found += [
        Finding(
            f"{where}, line {line + 1}", "<!-- not measured -->", "gives no reason; write <!-- not measured: why -->"
        )
        for line, why in excuses.items()
        if not why
    ]
    for line, row in enumerate(lines):
        if SPLIT.search(row):
            found.append(
                Finding(f"{where}, line {line + 1}", row.strip()[:60], "splits a role into two cells; write \\| in it")
            )
    plain = prose(text)
    for match in NUMBER.finditer(plain):
        if "." not in match["digits"] and not match["unit"] and not match["word"]:
            continue
        line = plain.count("\n", 0, match.start("digits"))
        shown = re.sub(r"\s+", " ", match[0]).strip()
        if excuses.get(line) or shown.lstrip("-+±≈~<>\N{MINUS SIGN}") in DEFINITIONS:
            continue
        hits = _matches(match, values, near)
        if hits:
            entry, spec = hits[0]
            role = f"{{val}}`{entry.chapter}/{entry.key}@{entry.view}|{spec}{' range' * entry.end}`"
            others = len({(e.chapter, e.key) for e, _ in hits} - {(entry.chapter, entry.key)})
            more = f" ({others} more results read the same)" if others else ""
            message = f"is a recorded result: write {role}{more}, or <!-- not measured: why --> on its line"
            found.append(Finding(f"{where}, line {line + 1} ({lines[line].strip()[:60]}…)", shown, message))
    return found


def cells(notebook: dict[str, Any]) -> Iterator[tuple[int, str]]:
    for number, cell in enumerate(notebook.get("cells", []), 1):
        if cell["cell_type"] == "markdown":
            yield number, cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def lint(values: Sequence[Recorded] | None = None) -> list[Finding]:
    """Every finding in the book; values: what was recorded, by default what is committed."""
    root = paths.root()
    values = recorded(root / "data") if values is None else values
    found = []
    for page in sorted((root / "book").glob("*.md")):
        found += findings(page.read_text(encoding="utf-8"), f"book/{page.name}", values)
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        markdown = list(cells(paths.read_json(path) or {}))
        whole = "\n\n".join(source for _, source in markdown)
        for number, source in markdown:
            if DECLARED not in source:
                found += findings(source, f"notebooks/{path.name}, cell {number}", values, path.stem, whole)
    return found
