"""The calculators of the page: the script against the Python model, the forms in a browser, tables without it."""

from __future__ import annotations

import html
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests.book import helpers as h
from tests.book.chromium import NARROW, OVERFLOW, Visit, needs_browser
from tq import Codec
from tq.book.site import calculators
from tq.economics import calculator, savings
from tq.quant.bounds import paper_nmse, unbiased_nmse

STATIC = h.ROOT / "book" / "_static"
NAMES = tuple(calculators.TITLES)
CASES = 500


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three on one page, with nothing of the book around them."""
    path = tmp_path_factory.mktemp("calculators") / "page.html"
    forms = "".join(calculators.html(name) for name in NAMES)
    style = (STATIC / "calculators.css").read_text(encoding="utf-8")
    script = (STATIC / "calculators.js").read_text(encoding="utf-8")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    text = f"<!doctype html><html lang=en>{head}<title>x</title><style>{style}</style><body>{forms}"
    return h.write(path, f"{text}{calculators.script_data()}<script>{script}</script></body></html>")


def drawn(field: calculator.Field, rng: random.Random) -> float:
    """Somewhere in the range, every order of magnitude alike; now and then an end of it."""
    if field.choices:
        return rng.choice(field.choices)[0]
    if rng.random() < 0.05:
        return rng.choice((field.low, field.high))
    low = max(field.low, 1e-3)
    value = min(max(math.exp(rng.uniform(math.log(low), math.log(field.high))), field.low), field.high)
    return float(round(value)) if field.whole else value


def cases(name: str, count: int) -> list[tuple[dict[str, float], calculator.Result]]:
    """Random cases that the Python model accepts, with its answers."""
    rng, found = random.Random(7), []
    while len(found) < count:
        case = {field.name: drawn(field, rng) for field in calculator.FIELDS[name]}
        if name == "memory":  # most random shapes do not divide: build some that do
            case["heads"] = case["tp"] * rng.randint(1, 16)
            case["hidden"] = case["heads"] * rng.choice((16, 64, 128))
        if name == "savings":
            case = savings.widened(case)
        try:
            found.append((case, calculators.run(name, case)))
        except ValueError:
            continue
    return found


@needs_browser
@pytest.mark.parametrize("name", NAMES)
def test_the_script_agrees_with_the_python_model(page_file: Path, visit: Visit, name: str) -> None:
    wanted = cases(name, CASES)
    page = visit.open(page_file)
    code = """([name, cases]) => {
      const data = JSON.parse(document.getElementById('tq-calculators').textContent);
      return cases.map(x => window.TQCalculators.calculate(data, name, x));
    }"""
    answers = page.evaluate(code, [name, [case for case, _ in wanted]])
    assert len(answers) == CASES
    for (case, expected), answer in zip(wanted, answers, strict=True):
        assert set(answer) == set(expected)
        for key, value in expected.items():
            if value is None:
                assert answer[key] is None, (key, case)
            else:
                # 1e-6 of the value; differences of large numbers are as exact as those numbers are
                scale = max(abs(value), 1e-6 * max(abs(v) for v in expected.values() if v is not None))
                assert abs(answer[key] - value) <= 1e-6 * scale, (key, answer[key], value, case)
    assert visit.wrong == []


@needs_browser
@pytest.mark.parametrize("name", NAMES)
def test_the_script_refuses_what_python_refuses(page_file: Path, visit: Visit, name: str) -> None:
    page = visit.open(page_file)
    code = """([name, x]) => {
      const data = JSON.parse(document.getElementById('tq-calculators').textContent);
      try { window.TQCalculators.calculate(data, name, x); return ''; } catch (error) { return error.message; }
    }"""
    for field in calculator.FIELDS[name]:
        for value in (field.low - 1, field.high * 2 + 1, None, *((field.low + 0.5,) if field.whole else ())):
            case: dict[str, Any] = dict(calculator.defaults(name), **{field.name: value})
            with pytest.raises(ValueError):
                calculators.run(name, case)
            assert page.evaluate(code, [name, case]).startswith(field.label)
    odd = {"savings": {"gpus_per_replica": 512}, "memory": {"tp": 7}, "codec": {}}[name]
    assert bool(page.evaluate(code, [name, calculator.defaults(name) | odd])) == bool(odd)


def result(page: Any, name: str, key: str) -> str:
    return page.locator(f'form[data-name="{name}"] output[data-key="{key}"]').inner_text()


@needs_browser
@pytest.mark.parametrize("name", NAMES)
def test_forms_open_with_the_answers_of_python(page_file: Path, visit: Visit, name: str) -> None:
    page = visit.open(page_file)
    expected = calculators.run(name, calculator.defaults(name))
    for each in calculators.RESULTS[name]:
        for key in (each.key, *each.others):
            text = calculators.shown(expected[key], each.form)
            assert result(page, name, key) in (text, text.replace("e-0", "e-").replace("e+0", "e+")), key


@needs_browser
def test_a_case_is_typed_with_the_keyboard_and_shared_by_its_address(page_file: Path, visit: Visit) -> None:
    page = visit.open(page_file)
    field = page.locator('form[data-name="savings"] input[name="link_gbit"]')
    field.focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("25")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.name") == "base_bits"
    page.keyboard.press("ArrowDown")
    case = savings.reference(link_gbit=25.0, base_bits=32.0)
    saving = calculators.shown(calculator.savings(case)["saving"], "percent")
    assert result(page, "savings", "saving") == saving
    assert page.url.endswith("#savings.link_gbit=25&savings.base_bits=32")
    assert page.locator('form[data-name="savings"] input[name="link"]').input_value() == page.url

    other = page.context.new_page()
    other.goto(page.url)
    assert result(other, "savings", "saving") == saving
    assert other.locator('form[data-name="memory"] input[name="tp"]').input_value() == "8"
    other.locator('form[data-name="savings"] button[type=reset]').press("Enter")
    other.wait_for_function("() => !location.hash")
    opening = calculators.shown(calculator.savings(calculator.defaults("savings"))["saving"], "percent")
    assert result(other, "savings", "saving") == opening
    assert visit.wrong == []


@needs_browser
def test_a_wrong_input_is_named_and_empties_the_answer(page_file: Path, visit: Visit) -> None:
    page = visit.open(page_file)
    form = page.locator('form[data-name="memory"]')
    form.locator('input[name="tp"]').fill("7")
    assert "divide the attention heads" in form.locator("[role=alert]").inner_text()
    assert result(page, "memory", "total_gib") == "–"
    form.locator('input[name="tp"]').fill("")
    assert "Tensor-parallel GPUs" in form.locator("[role=alert]").inner_text()
    assert form.locator('input[name="tp"]').get_attribute("aria-invalid") == "true"
    form.locator('input[name="tp"]').fill("4")
    assert form.locator("[role=alert]").inner_text() == "" and result(page, "memory", "total_gib") != "–"
    assert visit.wrong == []


@needs_browser
def test_a_strange_address_opens_the_opening_case(page_file: Path, visit: Visit) -> None:
    page = visit.open(page_file, "#savings.link_gbit=fast&savings.base_bits=7&memory.zero=9&x=1")
    expected = calculators.shown(calculator.savings(calculator.defaults("savings"))["saving"], "percent")
    assert result(page, "savings", "saving") == expected
    assert page.locator('form[data-name="memory"] select[name="zero"]').input_value() == "1"
    assert visit.wrong == []


@needs_browser
def test_a_model_fills_in_its_fields(page_file: Path, visit: Visit) -> None:
    page = visit.open(page_file)
    page.locator('form[data-name="memory"] select[name="preset"]').select_option("gpt3-175b")
    assert page.locator('form[data-name="memory"] input[name="hidden"]').input_value() == "12288"
    assert float(result(page, "memory", "parameters_b")) == pytest.approx(175, rel=0.01)


@needs_browser
@pytest.mark.parametrize("overlap", (0.0, 0.2, 0.5))
@pytest.mark.parametrize("zero", (0.0, 1.0))
def test_the_form_gives_python_s_answer_to_the_cent(page_file: Path, visit: Visit, overlap: float, zero: float) -> None:
    page = visit.open(page_file, f"#savings.overlap={overlap:g}&savings.zero={zero:g}")
    found = calculator.savings(savings.reference(overlap=overlap, zero=zero))
    data = "JSON.parse(document.getElementById('tq-calculators').textContent)"
    code = f"x => window.TQCalculators.calculate({data}, 'savings', x)"
    answer = page.evaluate(code, savings.reference(overlap=overlap, zero=zero))
    for key in ("plain_usd", "coded_usd", "saved_usd", "saved_usd_low", "saved_usd_high"):
        assert round(answer[key], 2) == round(found[key] or 0.0, 2), key
    assert result(page, "savings", "saving") == calculators.shown(found["saving"], "percent")
    assert result(page, "savings", "pays") == calculators.shown(found["pays"], "pays")


@needs_browser
def test_a_job_fills_in_every_field_and_the_plot_marks_it(page_file: Path, visit: Visit) -> None:
    page = visit.open(page_file)
    form = page.locator('form[data-name="savings"]')
    for label, case in calculators.presets()["savings"].items():
        form.locator('select[name="preset"]').select_option(label)
        saving = calculators.shown(calculator.savings(case)["saving"], "percent")
        assert result(page, "savings", "saving") == saving, label
        assert saving in (form.locator("svg text.tq-case").text_content() or "")
        assert saving in (form.locator("svg").get_attribute("aria-label") or "")
    page = visit.open(page_file)
    chosen = page.locator('form[data-name="savings"] select[name="preset"]')
    assert chosen.input_value() == next(iter(calculators.presets()["savings"]))
    page.locator('form[data-name="savings"] input[name="link_gbit"]').fill("60")
    assert chosen.input_value() == ""
    page.locator('form[data-name="savings"] input[name="link_gbit"]').fill("100")
    assert "100 Gbit/s" in chosen.input_value()
    assert visit.wrong == []


@needs_browser
def test_a_value_beyond_its_range_widens_it_and_a_range_without_it_is_named(page_file: Path, visit: Visit) -> None:
    page = visit.open(page_file)
    form = page.locator('form[data-name="savings"]')
    form.locator('input[name="overlap"]').fill("0.9")
    assert form.locator('input[name="overlap_high"]').input_value() == "0.9"
    assert form.locator("[role=alert]").inner_text() == ""
    form.locator("summary").click()
    form.locator('input[name="overlap_high"]').fill("0.5")
    assert "must lie between its low and its high end" in form.locator("[role=alert]").inner_text()
    assert form.locator("svg").count() == 0 and result(page, "savings", "saving") == "–"


@needs_browser
def test_every_input_has_a_name_and_fits_a_phone(page_file: Path, visit: Visit) -> None:
    page = visit.open(page_file)
    unnamed = "all => all.filter(e => !(e.labels?.length || e.ariaLabel) && e.type != 'reset').length"
    assert page.eval_on_selector_all("form input, form select", unnamed) == 0
    page.set_viewport_size(NARROW)
    assert page.evaluate(OVERFLOW) == []
    small = "all => all.filter(e => e.getClientRects().length && e.getBoundingClientRect().height < 24).length"
    assert page.eval_on_selector_all("form input, form select, form button", small) == 0


@needs_browser
def test_without_the_script_the_tables_remain(page_file: Path, browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert page.locator("form:visible").count() == 0
    for caption in ("on other links", "with other settings", "Blocks of 128"):
        assert page.locator("table:visible", has_text=caption).locator("tbody tr").count() >= 6
    page.emulate_media(media="print")
    assert page.locator("table:visible").count() == 3
    context.close()


# --- without a browser ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_codec_calculator_is_the_codec(bits: int) -> None:
    import torch

    elements = 1000
    codec = Codec(bits=bits)
    found = calculators.run("codec", {"bits": bits, "block": 128, "scale_bits": 32, "numbers": elements})
    assert found["bytes"] == codec.encode(torch.ones(elements)).nbytes
    assert found["bits_per_element"] == codec.bits_per_element
    assert found["nmse"] == paper_nmse(bits) and found["nmse_unbiased"] == pytest.approx(unbiased_nmse(bits))


def test_the_data_of_the_page_are_json_without_a_closing_tag() -> None:
    text = calculators.script_data()
    assert text.count("</") == 1 and text.isascii()
    found = json.loads(text[text.index(">") + 1 : text.rindex("<")])
    assert set(found["fields"]) == set(calculator.FIELDS) and len(found["distortion"]) == 8
    for name, models in found["presets"].items():
        known = {field["name"] for field in found["fields"][name]}
        assert all(set(model) <= known for model in models.values())


def test_prices_and_the_reference_job_of_the_page_and_an_unknown_calculator() -> None:
    job = calculators.html("job")
    assert "<form" not in job and all(each.source[:20] in html.unescape(job) for each in savings.job().values())
    assert "h100-80gb" in calculators.html("prices") and "<form" not in calculators.html("prices")
    with pytest.raises(ValueError, match="calculator='tax'"):
        calculators.html("tax")
