"""The word beside a row of the whitepaper's summary follows the verdicts; the page shows it with them."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")  # of [book]; CI does not allow this skip

from tests.book import helpers as h  # noqa: E402
from tests.book import test_claims as page  # noqa: E402
from tq.book.claims import assessment, ledger  # noqa: E402

F, P, N, X, M, Y = (*ledger.DECIDED, ledger.NOT_CHECKABLE, ledger.NOT_MEASURED, ledger.NOT_YET)


@pytest.mark.parametrize(
    ("verdicts", "wanted"),
    [
        ([F, F], "holds"),
        ([F, M], "holds"),
        ([F, N], "holds in part"),
        ([P], "holds in part"),
        ([P, N, Y], "holds in part"),
        ([P, Y, Y], "open"),
        ([P, X, X], "cannot be checked"),
        ([P, X, Y], "holds in part"),
        ([N, N, X], "does not hold"),
        ([X, X], "cannot be checked"),
        ([X, Y], "open"),
        ([M], "open"),
    ],
)
def test_the_word_follows_the_verdicts(verdicts: list[str], wanted: str) -> None:
    assert assessment.word(verdicts) == wanted


def test_a_row_without_claims_and_an_unknown_table_raise() -> None:
    with pytest.raises(ValueError, match="verdicts is empty"):
        assessment.word([])
    with pytest.raises(ValueError, match="table='risks': accepted are dimensions, effects"):
        assessment.assess("risks", {})


def test_rows_rest_on_claims_of_the_whitepaper_and_count_the_undecided() -> None:
    known = {claim.id for claim in ledger.claims() if claim.seed == "0"}
    for table in assessment.TABLES:
        assert len(assessment.TABLES[table]) == 5
        for row, word, undecided in assessment.assess(table, dict.fromkeys(known, F)):
            assert (word, undecided) == ("holds", 0) and len(set(row.claims)) == len(row.claims)
        assert {w for _, w, _ in assessment.assess(table, dict.fromkeys(known, N))} == {"does not hold"}
        assert all(n == len(row.claims) for row, _, n in assessment.assess(table, dict.fromkeys(known, Y)))


@page.sphinx_build
def test_the_page_shows_the_rows_and_the_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = h.claims_only(tmp_path, monkeypatch)
    sys.path.append(str(page.ROOT / "book" / "_ext"))
    importlib.import_module("tqledger")
    text = "# Conclusion\n\n```{assessment} dimensions\n```\n\nIt is {verdict}`S0-065`.\n"
    pages, warnings = page.build(root, {"index": page.INDEX, "ledger": page.LEDGER, "prose": text})
    assert warnings == ""
    shown = pages["prose"]
    for row in assessment.TABLES["dimensions"]:
        assert row.name in shown and all(f"#claim-{name}" in shown for name in row.claims)
    assert ">not checkable</a>" in shown and "open; 3 of 3 not decided" in shown
    _, warnings = page.build(root, {"prose": "# Conclusion\n\n```{assessment} risks\n```\n"})
    assert "accepted are dimensions, effects" in warnings
