"""Every page in a real browser, from the disk: light and dark, wide and narrow, with the keyboard, no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.book import site as s
from tests.book.chromium import NARROW, OVERFLOW, WIDE, Visit, needs_browser
from tq.book.claims import ledger

pytestmark = needs_browser

# Of what is to be read: the contrast of its text with the nearest ground that is not transparent.
CONTRAST = """selector => {
  const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = c => {
    const [r, g, b] = c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  let worst = [21, ''];
  for (const e of document.querySelectorAll(selector)) {
    if (!e.getClientRects().length || !e.textContent.trim()) continue;
    let ground = [255, 255, 255];
    for (let up = e; up; up = up.parentElement) {
      const c = rgb(getComputedStyle(up).backgroundColor);
      if (c.length == 3 || c[3] > .5) { ground = c.slice(0, 3); break; }
    }
    const a = light(rgb(getComputedStyle(e).color).slice(0, 3)), b = light(ground);
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < worst[0]) worst = [ratio, e.className + ': ' + e.textContent.trim().slice(0, 60)];
  }
  return worst;
}"""
# Code, tables and formulas of which a part can be neither seen nor scrolled to.
CUT = """() => {
  const style = e => getComputedStyle(e).overflowX, edge = e => e.getBoundingClientRect().right + 1;
  const cut = e => {
    if (e.tagName === 'PRE') return e.scrollWidth > e.clientWidth + 1;
    for (let up = e.parentElement; up && up.tagName !== 'ARTICLE'; up = up.parentElement) {
      if (['auto', 'scroll'].includes(style(up))) return false;
      if (style(up) !== 'visible' && e.getBoundingClientRect().right > edge(up)) return true;
    }
    return e.getBoundingClientRect().right > document.documentElement.clientWidth + 1;
  };
  return [...document.querySelectorAll('article :is(pre, table, div.math, .tq-schematic svg)')]
    .filter(e => e.getClientRects().length && cut(e)).map(e => e.outerHTML.slice(0, 100));
}"""
# Figures whose words are shown below 9 points; those of 960 pixels are drawn with larger type (`figures.SIZES`).
SMALL = """() => [...document.querySelectorAll('figure.tq-figure img[width]')].filter(e => {
    const drawn = +e.getAttribute('width'), points = drawn > 720 ? 12.75 : 9.5;
    return e.getClientRects().length && points * e.getBoundingClientRect().width / drawn < 9;
  }).map(e => e.alt.slice(0, 60))"""
AXE = Path(__file__).parent / "vendor" / "axe.min.js"  # axe-core 4.14.1, MPL-2.0
# Left out: docutils' lists of citations, and the label that myst-nb gives to what folds an output.
SERIOUS = """async () => (await axe.run({include: ['article, main'], exclude: ['.citation-list']}, {
    preload: false, resultTypes: ['violations'], rules: {'label-content-name-mismatch': {enabled: false}} })).violations
  .filter(v => ['serious', 'critical'].includes(v.impact))
  .map(v => `${v.id}: ${v.nodes.slice(0, 3).map(n => n.html.slice(0, 120)).join(' | ')}`)"""
# Formulas on the page, those that are drawn, those that could not be read.
MATH = """() => ['span.math, div.math', '.math > mjx-container', '[data-mml-node=merror]']
  .map(what => document.querySelectorAll(what).length)"""


@pytest.fixture(scope="session")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return s.built(tmp_path_factory)[0]


@pytest.mark.parametrize("name", s.pages())
def test_page(html: Path, visit: Visit, name: str) -> None:
    page = visit.open(html / f"{name}.html")
    if page.locator("span.math, div.math").count():
        page.wait_for_function(f"() => {{ const [a, b] = ({MATH})(); return a == b; }}", timeout=20_000)
        assert page.evaluate(MATH)[2] == 0, "MathJax could not read a formula"
    for size in (WIDE, {"width": 1024, "height": 768}, NARROW):
        page.set_viewport_size(size)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function("scheme => document.documentElement.dataset.theme == scheme", arg=scheme)
            where = f"{name}, {size['width']} pixels, {scheme}"
            assert page.evaluate(OVERFLOW) == [], where
            assert page.evaluate(CUT) == [], where
            assert page.evaluate(SMALL) == [], where
            ratio, what = page.evaluate(CONTRAST, "figcaption, .tq-provenance, .tq-val, .tq-badge, .tq-mark, td, th")
            assert ratio >= 4.5, f"{where}: {what}"
    page.add_script_tag(path=str(AXE))
    assert page.evaluate(SERIOUS) == []
    images = page.eval_on_selector_all("img", "all => all.map(e => [e.src.slice(-60), e.alt.trim(), e.naturalWidth])")
    assert [image for image in images if not image[1] or not image[2]] == []
    assert visit.wrong == []


def test_print_hides_the_navigation_and_opens_the_folded(html: Path, visit: Visit) -> None:
    page = visit.open(html / "book/how-to.html")
    page.emulate_media(media="print")
    assert not page.locator(".bd-sidebar-primary").is_visible()
    assert page.locator("h1:visible", has_text="How to read and re-run").count() == 1


def test_search_finds_a_term_from_the_disk(html: Path, visit: Visit) -> None:
    page = visit.open(html / "search.html", "?q=Lloyd")
    page.wait_for_selector("ul.search li a", timeout=20_000)
    hits = page.eval_on_selector_all("ul.search li a", "all => all.map(a => a.getAttribute('href'))")
    assert any("rotation-and-codebook" in hit for hit in hits), hits
    page.goto((html / "search.html").as_uri() + "?q=xyzzyplugh")
    page.wait_for_selector("text=did not match any documents")
    assert visit.wrong == []


def test_the_keyboard_reaches_where_a_number_comes_from(html: Path, visit: Visit) -> None:
    page = visit.open(html / "notebooks/rotation-and-codebook.html")
    number = page.locator(".tq-val").first
    number.focus()
    shown = number.evaluate("e => getComputedStyle(e, '::after').content")
    assert "device:" in shown and "commit:" in shown
    assert page.evaluate(OVERFLOW) == []


def test_the_ledger_is_filtered_with_the_keyboard(html: Path, visit: Visit) -> None:
    if not (html / "book/claims.html").exists():
        assert "book/claims" not in s.pages()
        return
    page = visit.open(html / "book/claims.html")
    inputs = page.locator("article input:visible, article select:visible")
    assert inputs.count() >= 1
    unnamed = inputs.evaluate_all("all => all.filter(e => !(e.labels?.length || e.ariaLabel)).map(e => e.outerHTML)")
    assert unnamed == []
    rows = "() => [...document.querySelectorAll('.tq-ledger tbody tr')].filter(e => e.getClientRects().length).length"
    before = page.evaluate(rows)
    whitepaper = sum(claim.seed == "0" for claim in ledger.claims())
    assert before == whitepaper, "the ledger opens with the whitepaper's claims"
    assert page.evaluate("document.documentElement.scrollHeight") <= 15_000
    box = page.locator("article input[type=search], article input[type=text]").first
    box.focus()
    page.keyboard.type("T-001")  # of another document than the whitepaper: a search is for all of them
    page.wait_for_function(f"before => {{ const now = ({rows})(); return now >= 1 && now < before; }}", arg=before)
    assert page.locator("article tbody tr:visible", has_text="T-001").count() >= 1
    for _ in "T-001":
        page.keyboard.press("Backspace")
    page.wait_for_function(f"before => ({rows})() == before", arg=before)
    assert visit.wrong == []


def test_a_link_leads_to_a_claim_of_any_document(html: Path, visit: Visit) -> None:
    page = visit.open(html / "book/claims.html", "#claim-T-001")
    row = page.locator("#claim-T-001")
    row.wait_for(state="visible")
    assert page.locator("select[name=seed]").input_value() == "T"
    assert visit.wrong == []


def test_one_switch_shows_the_code_of_a_page(html: Path, visit: Visit) -> None:
    page = visit.open(html / "notebooks/rotation-and-codebook.html")
    folded = page.locator("details.hide.above-input")
    assert folded.count() > 3 and not folded.first.is_visible()
    switch = page.get_by_role("button", name="Show all code")
    switch.focus()
    page.keyboard.press("Enter")
    assert page.locator("details.hide.above-input pre").first.is_visible()
    page.reload()
    assert page.locator("details.hide.above-input pre").first.is_visible()  # remembered
    page.get_by_role("button", name="Hide the code").click()
    assert not folded.first.is_visible()
    assert visit.wrong == []
