"""Measures how the book is written: the length of its sentences, and phrases that readers stumbled over.

    python -m tq.book prose [PAGE ...]

Read are the pages of `book/` and the Markdown cells of the chapters, without code, formulas, tables, headings and
captions. A recorded number counts as one word, and so does a formula. An item of a list ends a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tq.book import paths
from tq.book.site.lint import FENCE, PROSE_DIRECTIVES, cells

MEDIAN, NINETY_FIVE = 18, 32  # words in a sentence: at most so many in the median, and in 95 of a hundred

RATED = (
    "tokens|bytes?|seconds|milliseconds|bits?|kB|MB|GB|GiB|Gbit/s|parameters|dollars|hours|watts|W|elements|sequences"
)
PER = (
    "step|second|GPU|node|parameter|number|element|tensor|block|token|worker|replica|kWh|hour|year|day|rank|run|month"
    "|coordinate|value|microbatch|layer|phase"
)
# A phrase -> what to write instead. Patterns see a recorded number as `N`.
BANNED = {
    rf"\b(?:{RATED}) an? (?:{PER})\b": "per: tokens per step, Gbit/s per GPU",
    r"\bN (?:times )?of (?:the|its|their) (?:\w+'s )?(?:plain )?(?:time|step|hours)\b": "62 % longer, 45 % overhead",
    r"\bof those before\b": "rises or falls by so many per cent",
    r"\bof that on\b": "so many per cent longer than on",
    r"\bway back\b|\blegs?\b|\bboth ways\b": "reduce-scatter and all-gather phases, or weight all-gather",
    r"\bwhat comes back\b|\bcome back\b": "the weight all-gather",
    r"(?<!entropy-)\bcoded\b|\buncoded\b|\bcoding\b": "quantized, quantizing",
    r"\b(?:the|an|each|every|one|no|whose) exchanges?\b": "gradient sync, or the collective's name",
    r"\bnothing hid(?:es|den)\b|\bthat compute does not hide\b": "not overlapped with backward",
    r"\bmakes? of (?:it|them|that|each)\b": "say what happens",
    r"\b(?:holds?|excludes?|includes?) zero\b": "equivalent within the margin, or differs by so much",
    r"\bpartly\b": "say what holds and what does not",
    r"\bpeers?\b": "the library's or the format's name",
    r"\bforetold\b|\bforetells?\b": "predicted",
    r"\banswer so far\b|\bthese chapters stand\b|\bnot yet\b": "say what is missing, or leave it out",
    r"\bThe law:": "say the finding",
    r"\bwhoever\b|\bnobody's\b": "name who",
    r"\bdearer\b|\bcheaper by an? \w+th\b": "so many per cent more expensive",
    r"\blet alone\b|\bto wit\b|\bhence\b|\btherein\b|\bthereby\b": "plain words",
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """How one page is written."""

    page: str
    sentences: int
    median: int
    high: int  # 95 of a hundred sentences have at most so many words
    longest: str
    phrases: tuple[str, ...]  # found although banned, each with what to write instead

    @property
    def good(self) -> bool:
        return self.median <= MEDIAN and self.high <= NINETY_FIVE and not self.phrases


def _plain(text: str) -> str:
    """Running text: a recorded number or formula is one word, blocks of code and tables are gone."""
    lines: list[str] = []
    fences: list[tuple[str, bool]] = []
    for line in text.split("\n"):
        fence = FENCE.match(line)
        if fence and fences and fence["mark"].startswith(fences[-1][0]) and not line.strip(" `~:"):
            fences.pop()
            lines.append("")
        elif fence and all(inside for _, inside in fences):
            fences.append((fence["mark"], (fence["name"] or "") in PROSE_DIRECTIVES))
            lines.append("")
        else:
            lines.append(line if all(inside for _, inside in fences) else "")
    text = "\n".join(lines)
    for pattern, put in (
        (r"\A---\n.*?\n---\n", ""),
        (r"<!--.*?-->", ""),
        (r"\$\$.*?\$\$", " . "),
        (r"\\begin\{(\w+\*?)\}.*?\\end\{\1\}", " . "),
        (r"\{cite\w*(?::\w+)?\}`[^`]*`", ""),
        (r"\{(?:claim|verdict)\}`[^`]*`", "N"),
        (r"\{[\w:+-]+\}`[^`]*`", "N"),
        (r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "N"),
        (r"(?<![\\$])\$(?![\s$])(?:\\.|[^$\\])+?(?<!\s)\$(?!\d)", "N"),
        (r"!?\[([^\]]*)\]\([^)]*\)", r"\1"),
        (r"<[a-zA-Z/][^>]*>", ""),
        (r"^\s{0,3}#{1,6}\s.*$", "\n"),
        (r"^\s*\|.*$", "\n"),
        (r"^\s*\(?[\w-]+\)?=\s*$", "\n"),
        (r"^\s*:[\w-]+:.*$", "\n"),
        (r"^\s*(?:[-*+]|\d+[.)])\s+", "\n\n"),
    ):
        text = re.sub(pattern, put, text, flags=re.DOTALL if ".*?" in pattern or ".+?" in pattern else re.MULTILINE)
    return text


def sentences(text: str) -> Iterator[str]:
    """The sentences of a Markdown text; those without two words are none."""
    for paragraph in re.split(r"\n\s*\n", _plain(text)):
        flat = re.sub(r"\s+", " ", paragraph.replace("**", "").replace("*", "")).strip()
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z\d(\"“])", flat):
            if len(re.findall(r"[^\W\d_]{2,}", sentence)) >= 2:
                yield sentence


def measure(page: str, text: str) -> Measured:
    """How a Markdown text is written."""
    found = list(sentences(text))
    lengths = sorted(len(re.findall(r"[\w.,%×−±+-]*\w[\w.,%'’-]*", sentence)) for sentence in found)
    phrases = [
        f"{match[0]!r} in {sentence[:90]!r}: {instead}"
        for sentence in found
        for pattern, instead in BANNED.items()
        for match in re.finditer(pattern, sentence, re.IGNORECASE)
    ]
    return Measured(
        page,
        len(found),
        lengths[len(lengths) // 2] if lengths else 0,
        lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))] if lengths else 0,
        max(found, key=len, default=""),
        tuple(phrases),
    )


def pages(names: Iterable[str] = ()) -> list[tuple[str, str]]:
    """(name, Markdown) of every page, or of those named; a name is that of a file without its ending."""
    root, wanted = paths.root(), set(names)
    found: dict[str, str] = {}
    for path in sorted((root / "book").glob("*.md")):
        found[path.stem] = path.read_text(encoding="utf-8")
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        found[path.stem] = "\n\n".join(source for _, source in cells(paths.read_json(path) or {}))
    if unknown := wanted - set(found):
        raise ValueError(f"pages={sorted(unknown)}: there is no such page; there are {', '.join(found)}")
    return [(name, text) for name, text in found.items() if not wanted or name in wanted]


def report(names: Iterable[str] = ()) -> list[Measured]:
    """How every page is written, or those named."""
    return [measure(name, text) for name, text in pages(names)]
