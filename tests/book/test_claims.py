"""The claims ledger: every claim has a rule, every deciding rule can be turned by other results, the page shows it.

Results are synthetic, in a temporary book; the one test about the committed state says what to run when it fails.
"""

import csv
import dataclasses
import html
import importlib
import io
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402
from tests.book.rules.scaffold import put, verdict  # noqa: E402
from tq.book import __main__ as cli  # noqa: E402
from tq.book.claims import judge, ledger, rules, tolerance  # noqa: E402
from tq.book.claims.formulas import Formula  # noqa: E402
from tq.book.claims.words import Check, vote  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "claims.csv"
HANGUL = re.compile(r"[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]")
RAW = list(csv.DictReader(io.StringIO(DATA.read_text(encoding="utf-8"))))
EVERY = {row["id"]: row for row in RAW}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A book with the claims and without any result."""
    return h.claims_only(tmp_path, monkeypatch)


CHAPTER = "training-tensors"  # and what it records for the three rules that stand in its file
RECORDED = {
    "nmse/momentum/plain": 0.0092,
    "reduction-against-uniform/per-tensor": 0.92,
    "reduction-against-uniform/per-block": 0.40,
    **{f"shape/{kind}/ks-before": 0.2 for kind in ("gradient", "momentum", "activation")},
    **{f"shape/{kind}/ks-after": 0.02 for kind in ("gradient", "momentum", "activation")},
}
ITS_CLAIMS = ("S0-012", "T-001", "T-002")


def recorded(root: Path, device: str = "cpu", **changed: float | None) -> None:
    """Results for the rules of one chapter; `changed`: the loss of a momentum."""
    put(root, CHAPTER, RECORDED | ({"nmse/momentum/plain": changed["momentum"]} if changed else {}), device)
    put(root, "rotation-and-codebook", {"ks/spike/1-round": 0.34, "mismatch-penalty": 0.001}, device)


def edit(root: Path, name: str, **columns: str) -> None:
    """Changes columns of one claim."""
    rows = [row | columns if row["id"] == name else row for row in RAW]
    with open(root / "data" / "claims.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(RAW[0]))
        writer.writeheader()
        writer.writerows(rows)


# --- the data -------------------------------------------------------------------------------------------------


def test_all_claims_are_there_once() -> None:
    assert len(RAW) == len(EVERY) >= 325
    assert [claim.id for claim in ledger.claims()] == [row["id"] for row in RAW]
    assert all(re.fullmatch(r"(S[0-4]|T)-\d{3}", name) for name in EVERY)
    assert {claim.seed for claim in ledger.claims()} == set(ledger.SEEDS)


def test_the_data_is_in_english() -> None:
    assert not HANGUL.search(DATA.read_text(encoding="utf-8"))
    assert {"S0-001", "S0-013", "S1-001"} <= {row["id"] for row in RAW if row["claim_en"]}


def test_the_first_guess_is_in_the_data_and_in_nothing_that_rules_see() -> None:
    assert sum(bool(row["first_guess"]) for row in RAW) > 200
    assert not {"first_guess", "derived_value", "evidence"} & set(ledger.Claim.__dataclass_fields__)


def test_a_repeated_id_raises(root: Path) -> None:
    with open(root / "data" / "claims.csv", "a", encoding="utf-8") as file:
        csv.DictWriter(file, list(RAW[0])).writerow(RAW[7])
    with pytest.raises(ValueError, match="S0-008 more than once"):
        ledger.claims()


def test_one_claim_is_found_by_its_id() -> None:
    assert ledger.claim("S0-004").figure == "$15M"
    with pytest.raises(KeyError, match="'S9-001' is no claim"):
        ledger.claim("S9-001")


def test_figures_read_as_one_writes_them() -> None:
    shown = {claim.id: claim.figure for claim in ledger.claims()}
    assert (shown["S0-001"], shown["S0-004"], shown["S0-007"], shown["T-012"]) == ("8×", "$15M", "27-56 %", "")
    assert shown["S0-020"] == "$6.88-12.29/h" and shown["S1-030"] == "10-20× slower"


def test_a_range_is_read_with_its_scale() -> None:
    def ends(value: str) -> tuple[float, float]:
        return replace(ledger.claims()[0], value=value).ends()

    assert ends("50K-500K") == (5e4, 5e5)
    assert ends("25M-120M+") == (2.5e7, 1.2e8)
    assert ends("<10") == (10, 10)
    assert ends("32 -> 64-96") == (64, 96)
    with pytest.raises(ValueError, match="holds no number"):
        ends("mandatory")


def test_a_figure_is_held_to_what_its_document_writes() -> None:
    def bounds(value: str, quantifier: str = "typical", quote: str = "") -> tuple[float, float]:
        return replace(ledger.claims()[0], value=value, quantifier=quantifier, quote=quote).bounds()

    assert bounds("8") == pytest.approx((7.2, 8.8)) and bounds("27-56") == pytest.approx((25.65, 58.8))
    assert bounds("1,440") == pytest.approx((1425.6, 1454.4)) and bounds("~4") == pytest.approx((3.2, 4.8))
    assert bounds("4", quote="about 4 times") == pytest.approx((3.2, 4.8))
    assert bounds("4", quote="about half of 14 to 4") == pytest.approx((3.6, 4.4)), "a hedge of another number"
    assert bounds("90+", "at least") == (pytest.approx(81), float("inf"))
    assert bounds("<10", "at most") == (-float("inf"), pytest.approx(11))


@pytest.mark.parametrize(
    ("number", "digits"),
    [("800", 1), ("0.003", 1), ("3,200", 2), ("8.0", 2), ("24,576", 5), ("1.13", 3), ("10", 1), ("0.50", 2)],
)
def test_digits_that_count(number: str, digits: int) -> None:
    assert tolerance.significant_digits(number) == digits
    with pytest.raises(ValueError, match="holds no digit"):
        tolerance.significant_digits("many")


@pytest.mark.parametrize(
    ("quantifier", "holds", "wanted"),
    [
        ("typical", (True, True), "reproduced"), ("typical", (True, False), "partly"),
        ("all", (False, False), "not reproduced"), ("exists", (True, False), "reproduced"),
        ("exists", (False, False), "not reproduced"), ("at least", (True, False), "partly"),
    ],
)  # fmt: skip
def test_comparisons_add_up_by_the_quantifier(quantifier: str, holds: tuple[bool, ...], wanted: str) -> None:
    checks = [Check(f"comparison {i}", each) for i, each in enumerate(holds)]
    assert vote(quantifier, checks) == wanted
    less = [Check("a part of it", True, part=True), Check("all of it", False)]
    assert vote(quantifier, less) == "partly"
    with pytest.raises(ValueError, match="stands or falls"):
        vote(quantifier, less[:1])


# --- what a row has to show -----------------------------------------------------------------------------------


def test_every_claim_says_how_it_is_read() -> None:
    for claim in ledger.claims():
        assert claim.quantifier in ledger.QUANTIFIERS and claim.scope in ("theirs", "world"), claim.id
        assert len(claim.quote.split()) <= 25, claim.id
    without = {c.id for c in ledger.claims() if not c.quote}
    assert all(name.startswith("T-") or ledger.claim(name).note for name in without), "a claim without its words"


def test_reasons_are_short_and_say_what_would_change_them() -> None:
    verdicts = [v for v in judge.verdicts() if not v.same_as]
    assert {v.id: len(v.condition.split()) for v in verdicts if len(v.condition.split()) > 40} == {}
    # one full run of a chapter decides all claims that wait for it
    shared = Counter(v.would_change for v in verdicts if v.verdict not in (ledger.NOTE, ledger.NOT_MEASURED))
    assert [text for text, count in shared.items() if count > 1 or not text] == []
    for v in verdicts:
        assert v.condition[0].isupper() or v.condition[0].isdigit() or v.condition[0] in "$−+", v
        assert v.condition.endswith("."), v
        assert not re.search(r"[a-z]+/[a-z0-9-]+/|[a-z]-[a-z]+ \(full\)", v.condition), "an internal key"


def test_every_decided_row_shows_its_rule_and_its_comparisons() -> None:
    for v in judge.verdicts():
        if v.verdict in ledger.DECIDED:
            assert v.rule and v.checks and v.basis and v.confidence, v.id
            if (v.same_as or v.id) in rules.every():
                assert v.verdict == vote(ledger.claim(v.same_as or v.id).quantifier, v.checks), v.id


def test_what_says_the_same_has_one_verdict_and_counts_once() -> None:
    same = {c.id: c.same_as for c in ledger.claims() if c.same_as}
    judged = {v.id: v for v in judge.verdicts()}
    assert same and all(judged[a].verdict == judged[b].verdict for a, b in same.items())
    assert not set(same) & set(rules.every())
    pair = [judged["S0-010"], judged["S0-049"]]
    assert sum(ledger.counts(pair).values()) == 1 and sum(ledger.counts(pair[1:]).values()) == 1


def test_a_note_is_no_claim(root: Path) -> None:
    assert verdict("S4-101").verdict == ledger.NOTE and sum(ledger.counts([verdict("S4-101")]).values()) == 0
    edit(root, "S0-012", note="put in by hand")
    with pytest.raises(ValueError, match="S0-012 has a rule, and is a note"):
        judge.verdicts()


def test_a_condition_never_votes() -> None:
    """No formula changes its word when one of its conditions is dropped: they are not among its comparisons."""
    for name, rule in rules.every().items():
        if isinstance(rule, Formula) and rule.conditions():
            claim = ledger.claim(name)
            bare = dataclasses.replace(rule, conditions=dict, says="")
            assert bare(claim, ledger.Results()).verdict == rule(claim, ledger.Results()).verdict, name


def test_every_claim_has_a_kind_and_a_chapter() -> None:
    for claim in ledger.claims():
        assert claim.kinds, claim
    with pytest.raises(ValueError, match="S0-001: chapter=''"):
        replace(ledger.claims()[0], chapter="")


def test_what_cannot_be_checked_says_why_or_has_a_rule() -> None:
    cannot = {claim.id for claim in ledger.claims() if claim.kinds == ("none",)}
    because = {claim.id for claim in ledger.claims() if claim.not_checkable_because}
    assert because <= cannot and cannot - because == cannot & set(rules.every())
    with pytest.raises(ValueError, match="not_checkable_because='tired'; accepted are forecast"):
        replace(ledger.claims()[0], not_checkable_because="tired")


def test_a_reason_is_needed_and_goes_with_no_rule(root: Path) -> None:
    edit(root, "S1-026", not_checkable_because="")
    with pytest.raises(ValueError, match="S1-026 cannot be checked: its not_checkable_because"):
        judge.verdicts()
    edit(root, "S0-012", not_checkable_because="opinion")
    with pytest.raises(ValueError, match="S0-012 has a rule, and not_checkable_because='opinion'"):
        judge.verdicts()


# --- rules ----------------------------------------------------------------------------------------------------


def test_without_results_nothing_crashes_and_nothing_is_made_up(root: Path) -> None:
    found = judge.verdicts()
    assert [v.id for v in found] == list(EVERY)
    for v in found:
        assert v.verdict in (*ledger.VERDICTS, ledger.NOTE) and v.condition and v.would_change
        if v.id not in rules.every() and not v.same_as:
            assert v.verdict in (ledger.NOT_YET, ledger.NOT_CHECKABLE, ledger.LIMIT, ledger.NOTE), v
    for name in ("S0-012", "T-001", "T-002"):
        assert verdict(name).verdict == ledger.NOT_MEASURED and "training-tensors" in verdict(name).condition


def test_conditions_and_reasons_hold_no_first_guess(root: Path) -> None:
    recorded(root)
    for v in judge.verdicts():
        guess = EVERY[v.id]["first_guess"]
        assert len(guess) < 12 or guess not in f"{v.condition} {v.would_change} {v.evidence}", v


def test_formulas_read_the_claimed_figure_from_the_data(root: Path) -> None:
    text = (root / "data" / "claims.csv").read_text(encoding="utf-8")
    assert verdict("S4-005").verdict == ledger.REPRODUCED
    (root / "data" / "claims.csv").write_text(text.replace("BF16 weights,810,GB", "BF16 weights,910,GB"))
    assert verdict("S4-005").verdict == ledger.NOT_REPRODUCED


def test_a_derivation_is_told_step_by_step() -> None:
    told = judge.why("S0-034")
    parts = ("InfiniBand NDR400 Gbps3,200", "3,200 Gbps, to 5%", "3,103 Gbit/s: holds", "1,506 Gbit/s: does not hold")
    for part in (*parts, "partly"):
        assert part in told
    assert "same as       S0-007" in judge.why("S0-043") and "not in the documents" in judge.why("T-001")
    with pytest.raises(KeyError, match="S9-001"):
        judge.why("S9-001")


def test_a_claim_with_two_rules_raises() -> None:
    rule = rules.every()["S0-002"]
    with pytest.raises(ValueError, match=r"S0-002 has a rule in rules/kernels.py and one in rules/lab_e7.py; keep one"):
        rules.joined({"kernels": {"S0-002": rule}, "lab_e7": {"S0-002": rule}})


def test_a_file_of_rules_is_a_chapter_and_its_claims_are_in_the_table() -> None:
    chapters = {claim.chapter.replace("-", "_") for claim in ledger.claims()}
    assert set(rules.by_chapter()) <= chapters and set(rules.every()) <= set(EVERY)
    here = {path.stem for path in Path(rules.__file__ or "").parent.glob("*.py")} - {"__init__"}
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests/book/rules").glob("test_*.py")}
    assert here == set(rules.by_chapter()) == tests


def test_a_rule_stands_with_its_claim() -> None:
    chapter = {claim.id: claim.chapter.replace("-", "_") for claim in ledger.claims()}
    away = {name: file for file, found in rules.by_chapter().items() for name in found if chapter[name] != file}
    assert away == {}


def test_a_claim_is_judged_by_what_was_read_for_it() -> None:
    results = ledger.Results()
    first, second = (judge.judge(claim, results) for claim in ledger.claims() if claim.id in ("S0-012", "S0-055"))
    assert {e.chapter for e in first.evidence if e.keys} == {CHAPTER}
    assert {e.chapter for e in second.evidence if e.keys} == {"energy"}


def test_what_was_read_in_vain_is_dropped(root: Path) -> None:
    recorded(root)
    results = ledger.Results()
    assert results.if_recorded(CHAPTER, "nmse/momentum/plain", "no such key") is None and results.read == []
    assert results.if_recorded(CHAPTER, "nmse/momentum/plain") == [0.0092] and len(results.read) == 1


def test_a_missing_key_and_a_null_are_not_measured(root: Path) -> None:
    recorded(root)
    put(root, CHAPTER, {key: value for key, value in RECORDED.items() if key != "nmse/momentum/plain"})
    assert verdict("S0-012").verdict == ledger.NOT_MEASURED and "nmse/momentum/plain" in verdict("S0-012").condition
    recorded(root, momentum=None)
    assert verdict("S0-012").verdict == ledger.NOT_MEASURED


def test_a_full_run_on_a_gpu_counts_where_there_is_none_on_a_cpu(root: Path) -> None:
    recorded(root, device="cuda")
    assert verdict("S0-012").evidence[0].view == "cuda:full"


def test_a_chapter_that_exists_waits_for_its_gpu(root: Path) -> None:
    before = verdict("T-009")
    assert before.verdict == ledger.NOT_YET and "compressed-adamw, which is not written yet" in before.condition
    (root / "notebooks" / "compressed-adamw.ipynb").write_text("{}")
    assert verdict("T-009").verdict == ledger.NOT_MEASURED
    assert verdict("S3-065").verdict == ledger.NOT_YET  # a CPU can decide that one; its chapter is not written


@pytest.mark.parametrize("change", [{"verdict": "true"}, {"confidence": ""}, {"evidence": ()}, {"would_change": ""}])
def test_a_verdict_refuses_what_a_reader_could_not_judge(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="S0-001"):
        dataclasses.replace(verdict("S0-001"), **change)


# --- the committed state --------------------------------------------------------------------------------------


def test_rules_find_what_the_committed_results_hold() -> None:
    missing = [v for v in judge.verdicts() if v.verdict == ledger.NOT_MEASURED and "has no result" in v.condition]
    assert missing == [], "a rule reads a key that its chapter does not record"


def test_the_snapshot_is_in_step() -> None:
    recorded = ledger.snapshot()["verdicts"]
    changed = [f"{v.id}: {was or 'new'} -> {v.verdict}" for v, was in ledger.moved(judge.verdicts(), recorded)]
    assert changed == [], "run: python -m tq.book claims --record"


def test_recording_lists_what_changed(root: Path) -> None:
    assert len(ledger.record(judge.verdicts())) == len(EVERY) and ledger.snapshot()["changes"] == []
    assert ledger.record(judge.verdicts()) == []
    recorded(root)
    assert {v.id: was for v, was in ledger.record(judge.verdicts())} == dict.fromkeys(ITS_CLAIMS, ledger.NOT_MEASURED)
    first = ledger.snapshot()["changes"][0]
    assert (first["id"], first["from"], first["to"]) == ("S0-012", "not measured", "reproduced")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", first["date"]) and first["why"] and "commit" in first
    recorded(root, momentum=0.5)
    ledger.record(judge.verdicts())
    assert [c["to"] for c in ledger.snapshot()["changes"] if c["id"] == "S0-012"] == ["reproduced", "not reproduced"]


# --- the command ----------------------------------------------------------------------------------------------


def test_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["claims"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(EVERY) + len(ledger.SEEDS) and lines[0].startswith("S0-001 not measured — ")
    first = lines[len(EVERY)]
    assert first.startswith("Whitepaper, ") and "Companion report, " in lines[-1]
    whole, words = first.removeprefix("Whitepaper, ").split(" claims: ")
    own = [claim for claim in ledger.claims() if claim.seed == "0" and not claim.same_as]
    assert sum(map(int, re.findall(r"(\d+) [a-z]", words))) == int(whole) == len(own)
    assert cli.main(["claims", "--seed", "T", "--verdict", "partly"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]] == ["T-014"]
    assert cli.main(["claims", "--id", "T-014", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["verdict"] == "partly" and row["evidence"] and "first_guess" not in row
    assert cli.main(["claims", "--id", "T-014", "--why"]) == 0
    assert "would change" in capsys.readouterr().out
    assert cli.main(["claims", "--why"]) == 1 and "--id S0-007" in capsys.readouterr().err
    assert cli.main(["claims", "--id", "S9-001"]) == 1
    assert "S9-001" in capsys.readouterr().err
    assert cli.main(["claims", "--record"]) == 0 and (root / "data" / "verdicts.json").is_file()


def test_the_command_knows_the_verdicts() -> None:
    assert cli.VERDICTS == ledger.VERDICTS


# --- the page -------------------------------------------------------------------------------------------------

PLACES = [f"```{{{name}}}\n```\n\n" for name in ("verdict-counts", "ledger", "verdict-changes")]
LEDGER = "# Ledger\n\n" + "".join(PLACES) + "Of S0-001.\n"
PROSE = "# Prose\n\nSee {claim}`S0-012` and, in passing, T-014 (but `T-011` is code).\n\n```\nS0-003\n```\n"
INDEX = "# Book\n\n```{verdict-counts}\n```\n\n```{toctree}\nledger\nprose\n```\n"


@pytest.fixture(scope="module")
def tqledger() -> ModuleType:
    sys.path.append(str(ROOT / "book" / "_ext"))  # as jupyter-book does for local extensions
    return importlib.import_module("tqledger")


def build(root: Path, pages: dict[str, str]) -> tuple[dict[str, str], str]:
    """({page: html}, warnings) of a Sphinx build with the extension; builds on what an earlier call left."""
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace

    source = root / "source"
    source.mkdir(exist_ok=True)
    for name, text in pages.items():
        h.touch(h.write(source / f"{name}.md", text))
    warnings = io.StringIO()
    options: dict[str, Any] = {"extensions": ["myst_parser", "tqledger"], "html_theme": "basic"}
    options["html_static_path"] = [str(ROOT / "book" / "_static")]
    with docutils_namespace():
        app = Sphinx(source, None, root / "out", root / "tree", "html", options, status=None, warning=warnings)
        app.build()
    return {path.stem: path.read_text() for path in (root / "out").glob("*.html")}, warnings.getvalue()


sphinx_build = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


@sphinx_build
def test_the_page_works_without_scripts(tqledger: ModuleType, root: Path) -> None:
    recorded(root)
    pages, warnings = build(root, {"index": INDEX, "ledger": LEDGER, "prose": PROSE})
    assert warnings == ""
    page = pages["ledger"]
    assert len(page.encode()) < 1_000_000
    assert [name for name in EVERY if page.count(f'<tr role="row" id="claim-{name}"') != 1] == []
    assert not re.search(r"<(?:tr|td|th|table|tbody)[^>]* hidden", page), "a row that only a script could show"
    assert re.search(r'<form class="tq-filter"[^>]* hidden>', page), "filters that do nothing must not show"
    assert page.count("<label>") == 4 and 'aria-live="polite"' in page
    own = re.sub(r"<q [^>]*>.*?</q>", "", page)  # without the documents' words, in which one guess stands
    shown = html.unescape(re.sub("<[^>]+>", " ", own))
    guesses = {row["first_guess"] for row in RAW if len(row["first_guess"]) >= 12}
    assert [guess for guess in guesses if guess in shown] == []
    for v in judge.verdicts():
        assert v.condition in shown
    assert "No verdict has changed" in page


@sphinx_build
def test_long_evidence_is_folded(tqledger: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("tqledger_html"), "SHOWN", 1)
    recorded(root)
    page = build(root, {"index": LEDGER})[0]["index"]
    rows = dict(re.findall(r'<tr role="row" id="claim-([^"]+)"(.*?)</tr>', page, re.DOTALL))
    several = [(v.id, e) for v in judge.verdicts() for e in v.evidence if len(e.keys) > 1]
    assert several and page.count(" more</summary>") == len(several)
    for name, evidence in several:
        first, rest = evidence.text.split(", ", 1)
        folded = f"<summary>{len(evidence.keys) - 1} more</summary><small>{rest}</small>"
        assert f"{first}</small>" in rows[name] and folded in rows[name]


@sphinx_build
def test_citations_link_both_ways(tqledger: ModuleType, root: Path) -> None:
    recorded(root)
    pages, warnings = build(root, {"index": INDEX, "ledger": LEDGER, "prose": PROSE})
    assert warnings == ""
    links = dict(re.findall(r'<a class="tq-claim[^"]*" href="([^"]+)" title="([^"]+)"', pages["prose"]))
    assert set(links) == {"ledger.html#claim-S0-012", "ledger.html#claim-T-014"}
    assert links["ledger.html#claim-S0-012"].startswith("reproduced: Momenta of a real run")
    assert 'href="#claim-S0-001"' in pages["ledger"]
    rows = dict(re.findall(r'<tr role="row" id="claim-([^"]+)"(.*?)</tr>', pages["ledger"], re.DOTALL))
    citing = {name for name, row in rows.items() if 'Cited in <a href="prose.html">Prose</a>' in row}
    assert citing == {"S0-012", "T-014"}
    link = "#verdict-0-not-measured"
    assert f'href="ledger.html{link}"' in pages["index"] and f'href="{link}"' in pages["ledger"]
    assert pages["index"].index("Whitepaper: ") < pages["index"].index("The other documents")
    assert "ledger.js" in pages["ledger"] and "ledger.js" not in pages["prose"] + pages["index"]
    assert all("ledger.css" in pages[name] for name in ("index", "ledger", "prose"))
    # Built on: the ledger forgets a page that cites no longer.
    pages, warnings = build(root, {"prose": "# Prose\n\nOnly T-014.\n"})
    rows = dict(re.findall(r'<tr role="row" id="claim-([^"]+)"(.*?)</tr>', pages["ledger"], re.DOTALL))
    assert warnings == "" and {name for name, row in rows.items() if "Cited in" in row} == {"T-014"}


@sphinx_build
def test_an_unknown_claim_is_a_warning(tqledger: ModuleType, root: Path) -> None:
    _, warnings = build(root, {"index": "# Book\n\n{claim}`S0-999` and S0-998.\n"})
    assert "the ledger has no 'S0-999'" in warnings and "S0-998" not in warnings


@sphinx_build
def test_stale_results_and_changed_verdicts_are_marked(tqledger: ModuleType, root: Path) -> None:
    ledger.record(judge.verdicts())
    recorded(root)
    ledger.record(judge.verdicts())
    (root / "notebooks" / f"{CHAPTER}.ipynb").write_text('{"cells": []}')
    pages, _ = build(root, {"index": LEDGER})
    row = re.search(r'<tr role="row" id="claim-S0-012"(.*?)</tr>', pages["index"], re.DOTALL)
    assert row and '<strong class="tq-stale">stale</strong>' in row.group()
    changed = pages["index"][pages["index"].index('class="tq-changes"') :]
    assert changed.index("not measured") < changed.index("reproduced") and '<a href="#claim-S0-012">' in changed
