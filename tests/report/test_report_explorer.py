"""The explorer: what its file holds, and how it behaves in a real browser under a mouse, keys and fingers."""

from __future__ import annotations

import json
import re

import pytest
from browser import BROWSER, NO_BROWSER, chromium

from cdp_repro.config import ConfigError
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import simulate_slots
from cdp_repro.predict.system_specs import CommonSizes
from cdp_repro.report import explorer as module
from cdp_repro.report.explorer import MOST_BYTES, explorer
from cdp_repro.schedule import Action, Program, Schedule

in_browser = pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
ONE_DEVICE = Schedule.build("cdp_v2", 3)


def systems(ranks):
    schedules = [Schedule.build("cdp_v2", ranks), *map(Schedule.from_spec, CommonSizes(ranks, tokens=4).specs())]
    return [(schedule, StageCosts.equal(schedule.stages, 4096, 1024)) for schedule in schedules]


def held(page):
    """What a page knows of each system."""
    text = re.search(r'<script type="application/json" id="systems">(.*?)</script>', page, re.DOTALL)[1]
    return json.loads(text)


# --- the file ------------------------------------------------------------------------------------------------------


def test_it_is_one_small_file_that_asks_nothing_of_a_network():
    page, left_out = explorer("three workers", systems(3))
    assert len(page.encode()) < MOST_BYTES and not left_out
    assert not re.search(r"(src|href)=|@import|fetch\(|url\(", page)
    assert "[[" not in page.split('id="systems"')[0] and "<title>three workers</title>" in page


def test_it_holds_the_program_itself_and_what_the_simulation_says():
    page, _ = explorer("", systems(4))
    for (schedule, costs), found in zip(systems(4), held(page), strict=True):
        slots = [
            [str(Action.parse(line.partition(" ")[2], int(line.partition(" ")[0]))) for line in lines.splitlines()]
            for lines in found["slots"]
        ]
        written = Program(schedule).slots(found_steps(schedule, len(slots)))
        assert slots == [[str(action) for action in slot.actions] for slot in written]
        trace = simulate_slots(schedule, costs, written)
        assert max(map(sum, found["activations"])) == trace.activation_peak_bytes_total
        assert sum(map(sum, found["sent"])) == sum(message.bytes for message in trace.messages)
        begin, end = found["period"]
        assert end - begin == schedule.slots_per_step and found["lanes"] == schedule.sizes.lanes


def found_steps(schedule, slots):
    return next(steps for steps in range(1, 40) if len(Program(schedule).slots(steps)) == slots)


def test_bytes_of_a_single_device_are_those_of_the_paper():
    page, _ = explorer("", [(ONE_DEVICE, StageCosts.equal(3, 100, 10))])
    (found,) = held(page)
    assert max(found["activations"]) == [600]  # (N + 1) / 2 of 3 micro-batches of 3 x 100 bytes
    assert found["parameters"][0] == [30] and max(found["parameters"]) == [50]  # two stages with two versions


@pytest.mark.parametrize("placement", ["zero", "replicated"])
def test_the_menu_tells_collectives_from_messages(placement):
    alike = [Schedule.build("dp", 2, placement=placement, collectives=each) for each in (False, True)]
    page, _ = explorer("", [(schedule, StageCosts.equal(2, 100, 10)) for schedule in alike])
    assert [found["name"] for found in held(page)] == [f"dp, {placement}", f"dp, {placement}, collectives"]


def test_what_would_make_it_too_large_is_left_out_and_named(monkeypatch):
    whole, _ = explorer("", systems(3))
    monkeypatch.setattr(module, "MOST_BYTES", len(whole) - 1)
    page, left_out = explorer("", systems(3))
    assert len(page) < len(whole) and left_out and all("," in name for name in left_out)
    monkeypatch.setattr(module, "MOST_BYTES", 20_000)
    said = r"cdp_v2, single_device with workers=3 makes a page of .* bytes, more than 20,000: use workers=2 or fewer"
    with pytest.raises(ConfigError, match=said):
        explorer("", systems(3))


# --- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser, tmp_path):
    """The page of all systems with N = 3, and afterwards the certainty that the console has shown no error."""
    path = tmp_path / "explorer.html"
    path.write_text(explorer("three workers", systems(3))[0])
    browser.errors.clear()
    browser.path = path
    browser.open(path)
    yield browser
    assert browser.errors == []


def details(page):
    return page.ask("document.getElementById('details').innerText")


def slot(page):
    return int(re.match(r"slot (\d+)", page.ask("document.getElementById('totals').textContent"))[1])


def cell(page, label):
    """The selector of the first action whose text begins so."""
    text = f"{label}:"
    number = page.ask(f"state.system.actions.find(action => action.text.startsWith({text!r})).index")
    return f"[data-action='{number}']"


def show(page, name):
    """Choose a system by its name."""
    page.ask(f"choice.selectedIndex = systems.findIndex(system => system.name === {name!r})")
    page.ask("choice.dispatchEvent(new Event('change'))")


@in_browser
def test_hovering_and_clicking_tell_what_an_action_reads_from_whom_at_which_version(page):
    show(page, "cdp_v2, pipeline")
    page.hover(cell(page, "F1.m4@v1"))
    said = details(page)
    assert "forward: F1.m4@v1" in said and "training step 1; parameters at version 1, fresh" in said
    assert "x1.m4: output of stage 0, micro-batch 4, from rank 0: F0.m4@v0 in slot" in said
    assert "p1@v1: parameters of stage 1, version 1, made by U1@v1 in slot" in said
    assert page.ask("document.querySelectorAll('.flow').length") >= 3
    page.click(cell(page, "F0.m4@v0"))
    page.hover("h1")
    assert "parameters at version 0, 1 training step late" in details(page)
    assert page.ask("document.querySelectorAll('.selected').length") == 1
    page.click("#details .link")  # leads to what it reads
    assert "F0.m4@v0" not in details(page).splitlines()[0]
    assert page.ask("document.activeElement.id") == "view", "keys and a screen reader go on in the timeline"


@in_browser
def test_every_read_has_a_source_or_was_there_from_the_start(page):
    missing = """systems.flatMap(system => system.actions.flatMap(action => action.reads
      .filter(value => !writerOf(system, action, value) && !/^[pb]\\d+(@v0|\\.w\\d+)(#.*)?$/.test(value))
      .map(value => `${system.name}: ${action.text}: ${value}`)))"""
    assert page.ask(missing) == []
    unsent = """systems.flatMap(system => system.actions.filter(action => action.op === "R")
      .filter(action => !senderOf(system, action)).map(action => `${system.name}: ${action.text}`))"""
    assert page.ask(unsent) == []
    assert page.ask("systems.every(system => system.actions.every(a => [...a.reads, ...a.writes].every(describe)))")


@in_browser
def test_keys_move_zoom_play_and_change_the_system(page):
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.press(key)
    assert slot(page) == 2
    first = details(page)
    page.press("Enter")
    assert details(page) != first
    page.press("End")
    assert slot(page) == page.ask("state.system.slotCount") - 1
    assert page.ask("scroller.scrollLeft + scroller.clientWidth >= state.slot * state.width")  # in sight
    page.press("Home")
    width = "+document.getElementById('drawing').getAttribute('width')"
    before = page.ask(width)
    page.press("+")
    assert page.ask(width) > before
    page.press("-")
    page.press("-")
    assert page.ask(width) < before
    page.press("]")
    assert page.ask("choice.value") == "dp, replicated"
    page.press("ArrowDown")
    assert "rank 1" in details(page)
    page.press("[")
    assert page.ask("choice.value") == "cdp_v2, single_device"
    page.press(" ")
    assert page.ask("document.getElementById('play').getAttribute('aria-pressed')") == "true"
    page.ask("new Promise(done => setTimeout(done, 2 * TICK + 200))")
    assert slot(page) >= 1
    page.press(" ")
    assert page.ask("document.getElementById('play').textContent") == "play"


@in_browser
def test_what_keys_reach_is_in_sight_and_an_idle_cell_is_told(page):
    page.ask("change(systems.findIndex(system => system.name.startsWith('gpipe')))")
    page.ask("document.querySelector('header').style.paddingBottom = '3000px'")
    page.ask("scrollTo(0, 0)")
    page.press("Home")
    page.press("ArrowDown")
    page.press("ArrowDown")
    assert details(page) == "rank 2, slot 0: idle"
    assert page.ask("document.querySelector('#labels .here').textContent") == "rank 2"
    assert page.ask("rowLabel(2).getBoundingClientRect().bottom <= innerHeight")
    page.ask("scrollTo(0, 0)")
    page.press("ArrowRight")
    assert page.ask("scrollY") == 0, "another slot of the same rank leaves the page where it is"


@in_browser
def test_buttons_do_what_keys_do(page):
    page.click("#forward")
    page.click("#forward")
    page.click("#back")
    assert slot(page) == 1
    before = page.ask("state.width")
    page.click("#wider")
    assert page.ask("state.width") > before
    page.click("#narrower")
    assert page.ask("state.width") == pytest.approx(before)
    page.click("#play")
    page.ask("new Promise(done => setTimeout(done, TICK + 200))")
    page.click("#play")
    assert slot(page) >= 2 and page.ask("state.timer") is None


@in_browser
def test_all_systems_are_drawn_with_memory_and_messages_on_one_scale(page):
    for number in range(page.ask("systems.length")):
        page.ask(f"change({number})")
        drawn, known = page.ask("[svg.querySelectorAll('[data-action]').length, state.system.actions.length]")
        assert drawn == known > 0
        assert page.ask("[...svg.querySelectorAll('rect')].every(r => r.getAttribute('height') >= 0)")
        assert page.ask("svg.querySelectorAll('.curve').length") > 0
    assert page.ask("Math.max(...systems.flatMap(s => s.activations.map(sum))) === scales.activations")


@in_browser
def test_charts_tell_their_scale(page):
    told = page.ask("[...document.querySelectorAll('#labels .scale')].map(label => label.textContent)")
    most = [
        page.ask(f"bytesText(Math.max(...systems.flatMap(s => s.{name}.map(sum))))") for name in ("activations", "sent")
    ]
    assert told == [most[0], "0", most[1], "0"]


@in_browser
def test_on_paper_the_whole_timeline_is_there(page):
    page.open(page.path, width=700)
    show(page, "cdp_v2, pipeline")
    right = "document.getElementById('drawing').getBoundingClientRect().right"
    assert page.ask(right) > 700
    heights = page.ask("document.getElementById('drawing').getBoundingClientRect().height")
    rows = "[...svg.querySelectorAll('.cell')].map(e => e.getBoundingClientRect().y - svg.getBoundingClientRect().y)"
    places = page.ask(rows)
    page.print_style()
    assert page.ask(right) <= 700
    assert page.ask("document.getElementById('drawing').getBoundingClientRect().height") == heights, (
        "rows keep their labels"
    )
    assert page.ask(rows) == pytest.approx(places, abs=1)
    assert page.ask("getComputedStyle(document.querySelector('.controls')).display") == "none"


@in_browser
@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone_it_fits_and_a_tap_selects(page, dark):
    page.open(page.path, width=390, height=800, dark=dark)
    assert page.ask("document.documentElement.scrollWidth") == 390
    assert page.ask("document.querySelector('#play').getBoundingClientRect().height") >= 36
    page.tap(cell(page, "F2.m0@v0"))
    assert "forward: F2.m0@v0" in details(page)
    ink, back = page.ask("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, back)]
    assert (light[0] > light[1]) is dark
