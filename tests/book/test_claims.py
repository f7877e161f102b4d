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
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402
from tq.book import __main__ as cli  # noqa: E402
from tq.book import arithmetic, claims, ledger  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "claims.csv"
HANGUL = re.compile(r"[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]")
RAW = list(csv.DictReader(io.StringIO(DATA.read_text(encoding="utf-8"))))
EVERY = {row["id"]: row for row in RAW}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A book with the claims and without any result."""
    return h.claims_only(tmp_path, monkeypatch)


TENSORS = {
    "nmse/momentum/plain": 0.0092,
    "reduction-against-uniform/per-tensor": 0.92,
    "reduction-against-uniform/per-block": 0.40,
    **{f"shape/{kind}/ks-before": 0.2 for kind in ("gradient", "momentum", "activation")},
    **{f"shape/{kind}/ks-after": 0.02 for kind in ("gradient", "momentum", "activation")},
}
ROTATION = {"ks/spike/1-round": 0.34, "mismatch-penalty": 0.001}
KERNELS = {
    **dict(zip((f"step/report/{size}" for size in ("124m", "355m", "7b", "70b")), (3.5, 5.9, 10.8, 11.3), strict=True)),
    "step/measured-share": 0.006,
    "rate-for-1.2x": 66.0,
    "round-trip": 1.8,
    "parity/decimals": 6.8,
    "parity/bytes-that-differ": 1e-6,
}

ON_GPU = {"over/encode/pytorch-reference": 40.0, "over/decode/pytorch-reference": 20.0, "round-trip": 90.0}


def put(root: Path, chapter: str, values: dict[str, Any], device: str = "cpu", n: int = 30) -> None:
    found = {key: {"value": value, "unit": "1", "spread": "none", "n": n} for key, value in values.items()}
    path = root / "data" / "results" / device / "full" / f"{chapter}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"source_hash": "x", "results": found}))


def both(root: Path, n: int = 30, **changed: float) -> None:
    """Results that all rules can read; `changed` by the key with __ for / and _ for -."""
    by_name = {re.sub("[/.-]", "_", key): key for key in (*TENSORS, *ROTATION, *KERNELS, *ON_GPU)}
    moved = {by_name[name]: value for name, value in changed.items()}
    put(root, claims.TENSORS, {key: moved.get(key, value) for key, value in TENSORS.items()}, n=n)
    put(root, claims.ROTATION, {key: moved.get(key, value) for key, value in ROTATION.items()}, n=n)
    put(root, claims.KERNELS, {key: moved.get(key, value) for key, value in KERNELS.items()}, n=n)
    put(root, claims.KERNELS, {key: moved.get(key, value) for key, value in ON_GPU.items()}, "cuda", n)


def verdict(name: str) -> ledger.Verdict:
    return next(v for v in claims.verdicts() if v.id == name)


# --- the data -------------------------------------------------------------------------------------------------


def test_all_claims_are_there_once() -> None:
    assert len(RAW) == len(EVERY) == 325
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


def test_every_claim_has_a_kind_and_a_chapter() -> None:
    for claim in ledger.claims():
        assert claim.kinds, claim
        assert re.fullmatch(r"[a-z0-9-]+", claims.chapter_of(claim))


def test_tables_name_claims_that_exist_and_none_twice() -> None:
    for table in (claims.ELSEWHERE, claims.NOT_CHECKABLE_BECAUSE):
        named = [name for names in table.values() for name in names.split()]
        assert len(named) == len(set(named)) and set(named) <= set(EVERY)
    assert set(claims.RULES) <= set(EVERY)
    assert not set(claims.RULES) & set(claims._REASON), "a rule decides what the table calls not checkable"
    cannot = {claim.id for claim in ledger.claims() if claim.kinds == ("none",)}
    assert cannot == set(claims._REASON) | (cannot & set(claims.RULES))


# --- rules ----------------------------------------------------------------------------------------------------


def test_without_results_nothing_crashes_and_nothing_is_made_up(root: Path) -> None:
    found = claims.verdicts()
    assert [v.id for v in found] == list(EVERY)
    for v in found:
        assert v.verdict in ledger.VERDICTS and v.condition and v.would_change
        if v.id not in claims.RULES:
            assert v.verdict in (ledger.NOT_YET, ledger.NOT_CHECKABLE), v
    for name in ("S0-012", "T-001", "T-002"):
        assert verdict(name).verdict == ledger.NOT_MEASURED and "training-tensors" in verdict(name).condition


def test_conditions_and_reasons_hold_no_first_guess(root: Path) -> None:
    both(root)
    for v in claims.verdicts():
        guess = EVERY[v.id]["first_guess"]
        assert len(guess) < 12 or guess not in f"{v.condition} {v.would_change} {v.evidence}", v


@pytest.mark.parametrize("name", arithmetic.SUMS)
def test_each_sum_can_be_turned(name: str) -> None:
    rule = arithmetic.SUMS[name]
    (claim,) = [c for c in ledger.claims() if c.id == name]
    found = rule(claim, ledger.Facts())
    assert found.verdict in ledger.DECIDED and found.formula and found.confidence in ("high", "medium")
    values = list(rule.readings().values())
    far: Any = tuple(7e9 for _ in values[0]) if isinstance(values[0], tuple) else 7e9
    assert dataclasses.replace(rule, claimed=far)(claim, ledger.Facts()).verdict == ledger.NOT_REPRODUCED
    near = dataclasses.replace(rule, claimed=values[0], within=1e-9)(claim, ledger.Facts())
    assert near.verdict != ledger.NOT_REPRODUCED
    assert dataclasses.replace(rule, within=1e12)(claim, ledger.Facts()).verdict == ledger.REPRODUCED


def test_sums_read_the_claimed_figure_from_the_data(root: Path) -> None:
    text = (root / "data" / "claims.csv").read_text(encoding="utf-8")
    assert verdict("S4-005").verdict == ledger.REPRODUCED
    (root / "data" / "claims.csv").write_text(text.replace("BF16 weights,810,GB", "BF16 weights,910,GB"))
    assert verdict("S4-005").verdict == ledger.NOT_REPRODUCED


def test_compression_ratios() -> None:
    assert verdict("S0-001").verdict == ledger.PARTLY
    assert verdict("S0-001").line().startswith("S0-001 partly — holds against fp32")
    for ratio in ("7.53", "7.76", "3.76", "3.88"):
        assert ratio in verdict("S0-001").condition
    assert "2 workers (7.53×)" in verdict("T-011").condition and "16 workers (0.941×)" in verdict("T-011").condition


TURNS = [
    ("S0-012", {}, "reproduced"),
    ("S0-012", {"nmse_momentum_plain": 0.015}, "partly"),
    ("S0-012", {"nmse_momentum_plain": 0.05}, "not reproduced"),
    ("T-001", {}, "partly"),
    ("T-001", {"ks_spike_1_round": 0.01, "mismatch_penalty": 0.2}, "reproduced"),
    ("T-001", {"ks_spike_1_round": 0.01}, "partly"),
    ("T-001", {f"shape_{k}_ks_after": 0.1 for k in ("gradient", "momentum", "activation")}, "not reproduced"),
    ("T-001", {f"shape_{k}_ks_before": 0.01 for k in ("gradient", "momentum", "activation")}, "not reproduced"),
    ("T-002", {}, "partly"),
    ("T-002", {"reduction_against_uniform_per_block": 0.8}, "reproduced"),
    ("T-002", {"reduction_against_uniform_per_tensor": 0.5}, "not reproduced"),
    *(
        (name, changed, wanted)
        for name in ("S0-057", "T-018")
        for changed, wanted in (
            ({}, "partly"),
            ({f"step_report_{size}": 3.0 for size in ("124m", "355m", "7b", "70b")}, "reproduced"),
            ({"step_report_124m": 5.0}, "not reproduced"),
        )
    ),
    ("S0-060", {}, "partly"),
    ("S0-060", {"round_trip": 100.0}, "reproduced"),
    ("S0-060", {"step_measured_share": 0.5}, "not reproduced"),
    ("T-015", {}, "partly"),
    ("T-015", {"parity_bytes_that_differ": 0.0}, "reproduced"),
    ("T-015", {"parity_decimals": 4.0}, "not reproduced"),
    ("T-013", {}, "reproduced"),
    ("T-013", {"over_decode_pytorch_reference": 1.9}, "partly"),
    ("T-013", {f"over_{verb}_pytorch_reference": 1.9 for verb in ("encode", "decode")}, "not reproduced"),
]


@pytest.mark.parametrize(("name", "changed", "wanted"), TURNS)
def test_each_rule_follows_the_results(root: Path, name: str, changed: dict[str, float], wanted: str) -> None:
    both(root, **changed)
    found = verdict(name)
    assert found.verdict == wanted, found.condition
    view = "cuda:full" if name == "T-013" else "cpu:full"
    assert found.evidence[0].chapter in (claims.TENSORS, claims.KERNELS) and found.evidence[0].view == view
    assert found.confidence == ("low" if name in ("S0-057", "T-018") else "medium")


def test_every_rule_over_results_is_turned_above() -> None:
    # S1-018 is not checkable and reads no result; rules in modules of their own have tests of their own
    apart = [importlib.import_module(f"tq.book.{path.stem}") for path in (ROOT / "tq" / "book").glob("*_claims.py")]
    elsewhere = {*arithmetic.SUMS, *(name for module in apart for name in module.RULES), "S1-018"}
    over_results = set(claims.RULES) - elsewhere
    assert over_results == {name for name, _, _ in TURNS}
    for name in over_results:
        assert len({wanted for turned, _, wanted in TURNS if turned == name}) >= 3


def test_few_cases_give_little_confidence(root: Path) -> None:
    both(root, n=2)
    assert verdict("T-002").confidence == "low" and "2 heavy-tailed tensors" in verdict("T-002").condition


def test_a_missing_key_and_a_null_are_not_measured(root: Path) -> None:
    both(root)
    put(root, claims.TENSORS, {key: value for key, value in TENSORS.items() if key != "nmse/momentum/plain"})
    assert verdict("S0-012").verdict == ledger.NOT_MEASURED and "nmse/momentum/plain" in verdict("S0-012").condition
    put(root, claims.TENSORS, {**TENSORS, "nmse/momentum/plain": None})
    assert verdict("S0-012").verdict == ledger.NOT_MEASURED


def test_a_full_run_on_a_gpu_counts_where_there_is_none_on_a_cpu(root: Path) -> None:
    put(root, claims.TENSORS, TENSORS, device="cuda")
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
    missing = [v for v in claims.verdicts() if v.verdict == ledger.NOT_MEASURED and "has no result" in v.condition]
    assert missing == [], "a rule reads a key that its chapter does not record"


def test_the_snapshot_is_in_step() -> None:
    recorded = ledger.snapshot()["verdicts"]
    changed = [f"{v.id}: {was or 'new'} -> {v.verdict}" for v, was in ledger.moved(claims.verdicts(), recorded)]
    assert changed == [], "run: python -m tq.book claims --record"


def test_recording_lists_what_changed(root: Path) -> None:
    assert len(ledger.record(claims.verdicts())) == 325 and ledger.snapshot()["changes"] == []
    assert ledger.record(claims.verdicts()) == []
    both(root)
    assert {v.id: was for v, was in ledger.record(claims.verdicts())} == dict.fromkeys(
        ("S0-012", "T-001", "T-002", "S0-057", "T-018", "S0-060", "T-015", "T-013"), ledger.NOT_MEASURED
    )
    first = ledger.snapshot()["changes"][0]
    assert (first["id"], first["from"], first["to"]) == ("S0-012", "not measured", "reproduced")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", first["date"]) and first["why"] and "commit" in first
    both(root, nmse_momentum_plain=0.5)
    ledger.record(claims.verdicts())
    assert [c["to"] for c in ledger.snapshot()["changes"] if c["id"] == "S0-012"] == ["reproduced", "not reproduced"]


# --- the command ----------------------------------------------------------------------------------------------


def test_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["claims"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 326 and lines[0].startswith("S0-001 partly — holds against fp32")
    assert lines[-1].startswith("325 of 325 claims:")
    assert sum(map(int, re.findall(r"(\d+) (?:[a-z])", lines[-1].split(":")[1]))) == 325
    assert cli.main(["claims", "--seed", "T", "--verdict", "partly"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]] == ["T-011", "T-014"]
    assert cli.main(["claims", "--id", "T-014", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["verdict"] == "partly" and row["evidence"] and "first_guess" not in row
    assert cli.main(["claims", "--id", "S9-001"]) == 1
    assert "S9-001" in capsys.readouterr().err
    assert cli.main(["claims", "--record"]) == 0 and (root / "data" / "verdicts.json").is_file()


def test_the_command_knows_the_six_verdicts() -> None:
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
        (source / f"{name}.md").write_text(text)
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
    both(root)
    pages, warnings = build(root, {"index": INDEX, "ledger": LEDGER, "prose": PROSE})
    assert warnings == ""
    page = pages["ledger"]
    assert len(page.encode()) < 1_000_000
    assert [name for name in EVERY if page.count(f'<tr role="row" id="claim-{name}"') != 1] == []
    assert not re.search(r"<(?:tr|td|th|table|tbody)[^>]* hidden", page), "a row that only a script could show"
    assert re.search(r'<form class="tq-filter"[^>]* hidden>', page), "filters that do nothing must not show"
    assert page.count("<label>") == 4 and 'aria-live="polite"' in page
    shown = html.unescape(re.sub("<[^>]+>", " ", page))
    guesses = {row["first_guess"] for row in RAW if len(row["first_guess"]) >= 12}
    assert [guess for guess in guesses if guess in shown] == []
    for v in claims.verdicts():
        assert v.condition in shown
    assert "No verdict has changed" in page


@sphinx_build
def test_long_evidence_is_folded(tqledger: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("tqledger_html"), "SHOWN", 1)
    both(root)
    page = build(root, {"index": LEDGER})[0]["index"]
    rows = dict(re.findall(r'<tr role="row" id="claim-([^"]+)"(.*?)</tr>', page, re.DOTALL))
    several = [(v.id, e) for v in claims.verdicts() for e in v.evidence if len(e.keys) > 1]
    assert several and page.count(" more</summary>") == len(several)
    for name, evidence in several:
        first, rest = evidence.text.split(", ", 1)
        folded = f"<summary>{len(evidence.keys) - 1} more</summary><small>{rest}</small>"
        assert f"{first}</small>" in rows[name] and folded in rows[name]


@sphinx_build
def test_citations_link_both_ways(tqledger: ModuleType, root: Path) -> None:
    both(root)
    pages, warnings = build(root, {"index": INDEX, "ledger": LEDGER, "prose": PROSE})
    assert warnings == ""
    links = dict(re.findall(r'<a class="tq-claim[^"]*" href="([^"]+)" title="([^"]+)"', pages["prose"]))
    assert set(links) == {"ledger.html#claim-S0-012", "ledger.html#claim-T-014"}
    assert links["ledger.html#claim-S0-012"].startswith("reproduced: momenta of a real run")
    assert 'href="#claim-S0-001"' in pages["ledger"]
    rows = dict(re.findall(r'<tr role="row" id="claim-([^"]+)"(.*?)</tr>', pages["ledger"], re.DOTALL))
    citing = {name for name, row in rows.items() if 'Cited in <a href="prose.html">Prose</a>' in row}
    assert citing == {"S0-012", "T-014"}
    assert 'href="ledger.html#verdict-not-yet"' in pages["index"] and 'href="#verdict-not-yet"' in pages["ledger"]
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
    ledger.record(claims.verdicts())
    both(root)
    ledger.record(claims.verdicts())
    (root / "notebooks" / f"{claims.TENSORS}.ipynb").write_text('{"cells": []}')
    pages, _ = build(root, {"index": LEDGER})
    row = re.search(r'<tr role="row" id="claim-S0-012"(.*?)</tr>', pages["index"], re.DOTALL)
    assert row and '<strong class="tq-stale">stale</strong>' in row.group()
    changed = pages["index"][pages["index"].index('class="tq-changes"') :]
    assert changed.index("not measured") < changed.index("reproduced") and '<a href="#claim-S0-012">' in changed
