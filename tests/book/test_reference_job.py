"""One job, one answer: chapters, index, README, calculator and command line say the same of the reference job."""

from __future__ import annotations

import json
import re

import pytest

from tests.book import helpers as h
from tq.book.record.results import load
from tq.book.site import calculators
from tq.economics import calculator
from tq.economics.__main__ import main
from tq.economics.savings import reference, savings, widened

LINKS = (400, 100, 25, 10)
NETWORKS = {"ib-ndr": 400, "eth-100g": 100, "eth-25g": 25, "eth-10g": 10}


@pytest.fixture(scope="module", params=("quick", "full"))
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def recorded(chapter: str, key: str, profile: str) -> float:
    view = load(chapter, "cpu", profile)
    assert view is not None
    return float(view["results"][key]["value"])


def wanted(**change: float) -> dict[str, float]:
    return {key: value for key, value in savings(reference(**change)).items() if value is not None}


@pytest.mark.parametrize("gbit", LINKS)
def test_training_cost_and_industry_to_the_cent(profile: str, gbit: int) -> None:
    job = wanted(link_gbit=gbit)
    for key in ("saved_usd", "plain_usd"):
        assert round(recorded("impact-training-cost", f"job/{gbit}g/{key.replace('_', '-')}", profile), 2) == round(
            job[key], 2
        )
    for end, key in {"": "saving", "/low": "saving_low", "/high": "saving_high"}.items():
        assert recorded("industry-impact", f"startup/saving/{gbit}g{end}", profile) == pytest.approx(job[key], rel=1e-9)
    both = wanted(link_gbit=gbit, zero=0)["saving"]
    assert recorded("industry-impact", f"startup/saving-whole/{gbit}g", profile) == pytest.approx(both, rel=1e-9)
    if gbit == 400:
        assert round(recorded("industry-impact", "startup/usd", profile), 2) == round(job["plain_usd"], 2)
        waterfall = recorded("impact-training-cost", "waterfall/after-8", profile)
        assert waterfall == pytest.approx(job["saving"], rel=1e-9)


@pytest.mark.parametrize("network", NETWORKS)
def test_communication_and_energy(profile: str, network: str) -> None:
    job = wanted(link_gbit=NETWORKS[network])
    assert recorded("energy", f"saves/{network}", profile) == pytest.approx(job["saving"], rel=1e-9)
    if network != "eth-10g":
        for base, bits in {"bf16": 16, "fp32": 32}.items():
            expected = wanted(link_gbit=NETWORKS[network], base_bits=bits)["saving"]
            assert recorded("impact-communication", f"saving/70b/{network}/{base}", profile) == pytest.approx(
                expected, rel=1e-9
            )


@pytest.mark.parametrize("overlap", (0.0, 0.2, 0.5))
@pytest.mark.parametrize("zero", (0.0, 1.0))
def test_command_line_and_calculator(capsys: pytest.CaptureFixture[str], overlap: float, zero: float) -> None:
    assert main(["savings", "--overlap", f"{overlap}", "--zero", f"{zero:g}", "--json"]) == 0
    found, job = json.loads(capsys.readouterr().out), wanted(overlap=overlap, zero=zero)
    case = widened(calculator.defaults("savings") | {"overlap": overlap, "zero": zero})
    page = calculators.run("savings", case)
    for key in ("plain_usd", "coded_usd", "saved_usd", "saved_usd_low", "saved_usd_high"):
        assert round(found[key], 2) == round(job[key], 2) == round(page[key] or 0.0, 2)


def test_readme_index_and_calculator_open_with_it() -> None:
    job = wanted()
    readme, index = ((h.ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "book/index.md"))
    assert f"4-bit gradients save {job['saving']:.1%} of a 70B run on rented H100 with 400 Gbit/s each" in readme
    for key in ("saving", "saving-low", "saving-high"):
        assert f"{{val}}`impact-training-cost/job/400g/{key}@cpu:full" in index
    assert calculator.defaults("savings") == reference()


def test_no_page_cites_another_70b_saving() -> None:
    """What the chapters record of a 70B saving is the reference job's, or says its change in its key."""
    cited = re.compile(r"{val}`((?:impact-training-cost|industry-impact|energy|impact-communication)/[^`@]*sav[^`@]*)@")
    known = ("job/", "saving/predicted/", "saving/its-shares/", "saved/", "startup/saving", "saves", "saving/70b/",
             "provider/saving", "fabric/saved-share", "claimed/saving", "must-save/", "elastic/")  # fmt: skip
    for page in (*h.ROOT.glob("book/*.md"), *h.ROOT.glob("notebooks/*.ipynb")):
        for key in cited.findall(page.read_text(encoding="utf-8")):
            assert key.split("/", 1)[1].startswith(known), (page.name, key)
