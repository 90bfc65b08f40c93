"""The page of `kvist report` in a real browser: no script error, every picture, pointer, keys and filters."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import PROGRAM, Browser

from kvist.iterations.records import read_run
from kvist.views.page import page
from kvist.views.slices import Run

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine: apt-get install chromium")

WIDE, NARROW = (1200, 900), (390, 800)


@pytest.fixture(scope="module")
def file(records, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(Run.of(*read_run(records), 20)))
    return path


@pytest.fixture(scope="module", params=[(*WIDE, False), (*NARROW, True)], ids=["wide and light", "narrow and dark"])
def window(request):
    width, height, dark = request.param
    with Browser(width, height, dark=dark) as found:
        yield found


@pytest.fixture
def browser(window, file):
    window.open(file)
    yield window
    assert window.troubles == []


OVERLAPS = """
[...document.querySelectorAll("svg.plot")].flatMap(plot => {
  const boxes = [...plot.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()])
    .filter(([, box]) => box.width > 0);
  const frame = plot.getBoundingClientRect();
  const wrong = boxes.filter(([, box]) => box.left < frame.left - 1 || box.right > frame.right + 1
                                         || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
    .map(([text]) => `${plot.id}: ${text} is cut`);
  for (let a = 0; a < boxes.length; a++)
    for (let b = 0; b < a; b++) {
      const [one, two] = [boxes[a][1], boxes[b][1]];
      const width = Math.min(one.right, two.right) - Math.max(one.left, two.left);
      const height = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
      if (width > 1 && height > 3) wrong.push(`${plot.id}: ${boxes[a][0]} and ${boxes[b][0]}`);
    }
  return wrong;
})
"""


def test_everything_is_there_and_nothing_overlaps(browser) -> None:
    found = set(browser.run('[...document.querySelectorAll("svg.plot")].map(plot => plot.id)'))
    groups = {f"occupancy-{tier}-{group}" for tier in range(3) for group in range(2)}
    assert found == {"hit-rate", "sources", "misses", "work", "load", "requests", "branches", *groups}
    assert browser.run(OVERLAPS) == []
    for name in found:
        width, height = browser.run(
            f'(b => [b.width, b.height])(document.getElementById("{name}").getBoundingClientRect())'
        )
        assert width > 250 and height > 20
    # Nothing but tables in their own frames is wider than the window.
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    # Every picture has its name for those who do not see it.
    assert all(browser.run('[...document.querySelectorAll("svg.plot")].map(p => p.querySelector("title").textContent)'))
    told = browser.run("getComputedStyle(document.body).backgroundColor")
    assert told == (
        "rgb(20, 23, 27)" if browser.run('matchMedia("(prefers-color-scheme: dark)").matches') else "rgb(255, 255, 255)"
    )


def test_the_pointer_tells_what_the_table_says(browser) -> None:
    assert browser.run("tip.hidden")
    rows = browser.run(
        '[...document.querySelectorAll("#sources-table tr")].map(row => [...row.cells].map(cell => cell.textContent))'
    )
    # The middle of the third slice: the plot begins at 72 of 480 and ends at 468.
    browser.move("#sources", (72 + 396 * 2.5 / 20) / 480)
    when, *values = browser.run("tip.textContent").split("\n")
    assert not browser.run("tip.hidden")
    assert values == [f"{name}: {value}" for name, value in zip(rows[0][1:], rows[3][1:])]
    low, high = (float(part) for part in rows[3][0].split(" to "))
    assert when.endswith(rows[0][0]) and [float(part) for part in when.split()[:3:2]] == pytest.approx(
        [low, high], rel=0.01
    )
    box = browser.run(
        "(b => [b.left, b.top, b.right - innerWidth, b.bottom - innerHeight])(tip.getBoundingClientRect())"
    )
    assert box[0] >= 0 and box[1] >= 0 and box[2] <= 0 and box[3] <= 0
    browser.move("h1")
    assert browser.run("tip.hidden")
    browser.move("#branches g rect")
    assert "hits" in browser.run("tip.textContent") and not browser.run("tip.hidden")


def test_keys_tell_it_too(browser) -> None:
    browser.run('document.getElementById("load").focus()')
    browser.press("ArrowLeft")
    last = browser.run("tip.textContent")
    browser.press("ArrowLeft")
    assert browser.run("tip.textContent") != last
    browser.press("ArrowRight")
    assert browser.run("tip.textContent") == last
    browser.press("Escape")
    assert browser.run("tip.hidden")


def test_series_and_groups_can_be_hidden(browser) -> None:
    button, layer = '.legend button[data-plot="sources"][data-series="1"]', '#sources [data-series="1"]'
    seen = f"getComputedStyle(document.querySelector('{layer}')).display"
    for state, display in (("false", "none"), ("true", "inline")):
        browser.click(button)
        assert browser.run(f"document.querySelector('{button}').ariaPressed") == state
        assert browser.run(seen) == display
    box = 'input[data-section="section-occupancy-1-0"]'
    for hidden in (True, False):
        browser.click(box)
        assert browser.run('document.getElementById("section-occupancy-1-0").hidden') is hidden
