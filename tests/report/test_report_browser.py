"""The page in a real browser: no picture is broken, nothing is wider than the window, on a desk and on a phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import BROWSER, NO_BROWSER, chromium

PAGE = Path(__file__).parents[2] / "results" / "report.html"
TOO_WIDE = """(() => {
  const scrolls = element => { for (; element; element = element.parentElement)
    if (getComputedStyle(element).overflowX === "auto") return true; return false; };
  const right = document.documentElement.clientWidth + 1;
  return [...document.body.querySelectorAll("*")]
    .filter(element => element.getBoundingClientRect().right > right && !scrolls(element))
    .map(element => element.outerHTML.slice(0, 80));
})()"""
FRAME = "document.querySelector('iframe').contentDocument"

pytestmark = pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(params=[1280, 390], ids=["desk", "phone"])
def page(request, browser):
    browser.errors.clear()
    browser.open(PAGE, width=request.param)
    browser.width = request.param
    yield browser
    assert browser.errors == []


def test_the_page_is_whole_and_fits(page):
    assert page.ask("document.images.length") >= 6
    assert page.ask("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    page.ask("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert page.ask("document.documentElement.clientWidth") == page.width
    assert page.ask(TOO_WIDE) == [] and page.ask("document.documentElement.scrollWidth") <= page.width


def test_text_has_a_readable_measure_and_numbers_stand_to_the_right(page):
    widest = page.ask("Math.max(...[...document.querySelectorAll('main > p')].map(p => p.clientWidth))")
    letter = page.ask("parseFloat(getComputedStyle(document.body).fontSize)")
    assert widest <= 45 * letter
    sides = page.ask("[...document.querySelectorAll('td.number')].map(cell => getComputedStyle(cell).textAlign)")
    assert len(sides) > 100 and set(sides) == {"right"}


def test_the_evidence_is_folded_until_it_is_asked_for(page):
    shown = "document.querySelector('details.evidence p').checkVisibility({contentVisibilityAuto: true})"
    assert page.ask("document.querySelector('details.evidence').open") is False
    page.click("details.evidence summary")
    assert page.ask("document.querySelector('details.evidence').open") and page.ask(shown)


def test_the_contents_list_follows(page):
    here = "[...document.querySelectorAll('nav a.here')].map(link => link.textContent)"
    page.ask("document.getElementById('memory-section').scrollIntoView()")
    page.ask("new Promise(done => setTimeout(done, 200))")
    assert page.ask(here) == ["Activation memory"]
    assert page.ask("document.querySelector('nav').getBoundingClientRect().top") == 0
    page.ask("document.querySelector('nav a[href=\"#costs-section\"]').click()")
    page.ask("new Promise(done => setTimeout(done, 200))")
    assert page.ask(here) == ["Costs"]


def test_the_explorer_in_it_works(page):
    assert page.ask(f"{FRAME}.getElementById('system').options.length") >= 14
    page.ask(f"{FRAME}.querySelector('.cell.B').dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    assert "backward: B" in page.ask(f"{FRAME}.getElementById('details').innerText")


def test_on_paper_all_is_unfolded_and_what_needs_a_screen_is_gone(page):
    page.ask("dispatchEvent(new Event('beforeprint'))")
    assert page.ask("[...document.querySelectorAll('details')].every(each => each.open)")
    page.print_style()
    assert page.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.ask("getComputedStyle(document.querySelector('iframe')).display") == "none"
