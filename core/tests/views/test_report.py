"""The page of `kvist report`: what its tables say is in the records, and nothing is asked for from elsewhere."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise

import pytest
import typer
from typer.testing import CliRunner

from kvist.errors import KvistError
from kvist.iterations.records import Begin, BranchRecord, DeviceGroup, Group, RecordError, StepRecord, Tier
from kvist.views.charts import Chart, Series, boxes, svg, ticks
from kvist.views.report import command
from kvist.views.slices import Run


class Page(HTMLParser):
    """Tables by id, as rows of texts; ids and addresses of everything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self._rows: list[list[str]] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.ids += [named["id"]] if "id" in named else []
        self.addresses += [named[name] for name in ("src", "href", "action") if name in named]
        if tag not in ("meta", "line", "rect", "input", "br", "circle", "polygon", "polyline"):
            self.open.append(tag)
        if tag == "table":
            self._rows = self.tables[named["id"]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")

    def handle_endtag(self, tag):
        if tag in ("line", "rect", "circle", "polygon", "polyline"):
            return
        assert self.open.pop() == tag
        if tag == "table":
            self._rows = None

    def handle_data(self, data):
        if self._rows and self.open[-1] in ("th", "td"):
            self._rows[-1][-1] += data


def report(*arguments: object) -> str:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def lines(records) -> list[dict]:
    """Every record, read by nothing of Kvist's."""
    return [json.loads(line) for line in records.read_text().splitlines()]


@pytest.fixture(scope="module")
def page(records, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert report(records, "-o", path, "--slices", 20) == f"written: {path}\n"
    return path.read_text()


def number(text: str) -> float:
    return 0.0 if text == "-" else float(text.replace(",", "").rstrip("%"))


def column(rows: list[list[str]], name: str) -> list[str]:
    place = rows[0].index(name)
    return [row[place] for row in rows[1:]]


def total(lines, name, kind="step") -> int:
    return sum(line.get(name, 0) for line in lines if line["kind"] == kind)


def test_the_numbers_of_the_tables_are_those_of_the_records(page, lines) -> None:
    tables = Page(page).tables
    sources = tables["sources-table"]
    below = [sum(line["lower"][tier].get("reused_tokens", 0) for line in lines if "lower" in line) for tier in (0, 1)]
    assert below[0] > 0
    assert sum(map(number, column(sources, "reused, host"))) == below[0]
    assert sum(map(number, column(sources, "reused, disk"))) == below[1]
    reused, asked = total(lines, "reused_tokens"), total(lines, "prompt_tokens")
    assert sum(map(number, column(sources, "reused, device"))) == reused - sum(below)
    assert sum(map(number, column(sources, "computed"))) == asked - reused
    assert column(tables["hit-rate-table"], "so far")[-1] == f"{reused / asked:.1%}"
    lost = [sum(line["groups"][group].get("lost_tokens", 0) for line in lines if "groups" in line) for group in (0, 1)]
    names = [group["name"] for group in lines[0]["tiers"][0]["groups"]]
    misses = tables["misses-table"]
    assert lost[1] > 0 == lost[0]
    assert sum(map(number, column(misses, f"known, but {names[1]} had no restore point"))) == lost[1]
    assert sum(map(number, column(misses, "not known: new, or evicted before"))) == asked - reused - lost[1]
    rows = {row[0]: row[1:] for row in tables["pages-table"][1:]}
    for level, tier in enumerate(lines[0]["tiers"]):
        for place, group in enumerate(tier["groups"]):
            sums: Counter = Counter()
            for line in lines:
                if "groups" in line:
                    sums.update(line["groups"][place] if not level else line["lower"][level - 1]["groups"][place])
            names = ("new", "evicted", "moved", "lost_tokens") if not level else ("offloaded", "onboarded", "dropped")
            told = [text for text in rows[f"{tier['name']}, {group['name']}"] if text]
            assert list(map(number, told)) == [sums[name] for name in names]
    counts = dict(tables["sequences-table"][1:])
    assert number(counts["sequences opened"]) == total(lines, "requests") > 20
    assert number(counts["suspended"]) == total(lines, "suspends") > 0


def test_slices_hold_what_happened_in_them(page, lines) -> None:
    tables = Page(page).tables
    end = max(line["time"] for line in lines[1:])
    work = tables["load-table"]
    assert work[0][0] == "hours" or work[0][0] == "minutes"
    seconds = 60 if work[0][0] == "minutes" else 3600
    size = end / 20
    for at, row in enumerate(tables["sources-table"][1:]):
        inside = [line for line in lines if line["kind"] == "step" and at * size < line["time"] <= (at + 1) * size]
        assert sum(map(number, row[1:])) == total(inside, "prompt_tokens")
        first, last = (number(part) for part in row[0].split(" to "))
        assert first == pytest.approx(at * size / seconds, rel=2e-3)
        assert last == pytest.approx((at + 1) * size / seconds, rel=2e-3)
    capacity = lines[0]["tiers"][0]["groups"][0]["capacity"]
    last = None
    for at, text in enumerate(column(tables["occupancy-0-0-table"], "held")):
        inside = [line for line in lines if line["kind"] == "step" and line["time"] <= (at + 1) * size * (1 + 1e-9)]
        last = inside[-1]["groups"][0].get("held", 0)
        assert text == f"{last / capacity:.1%}"


def test_the_times_of_requests(page, lines) -> None:
    requests = [line for line in lines if line["kind"] == "request"]
    rows = {row[0]: [number(text) for text in row[1:]] for row in Page(page).tables["request-times"][1:]}
    for phase in ("queue", "transfer", "prefill", "decode"):
        values = sorted(request.get(phase, 0.0) for request in requests)
        mean, median, high, most = rows[phase]
        assert mean == pytest.approx(sum(values) / len(values), abs=1e-3)
        assert median == pytest.approx((values[11] + values[12]) / 2, abs=1e-3)
        assert values[21] <= high <= most == pytest.approx(values[-1], abs=1e-3)
    assert len(requests) == 24 and f"stop {len(requests)}." in page


def test_every_branch_is_in_the_table_below_its_parent(page, lines) -> None:
    branches = lines[-1]["branches"]
    rows = Page(page).tables["branches-table"]
    assert len(rows) - 1 == len(branches) > 2
    told = Counter((row[0].replace("· ", ""), number(row[4]), number(row[7])) for row in rows[1:])
    assert told == Counter((each["name"], each["tokens"], each.get("hit_tokens", 0)) for each in branches)
    depth = [row[0].count("· ") for row in rows[1:]]
    assert depth[0] == 0 and all(here <= before + 1 for before, here in pairwise(depth))


def test_the_page_is_whole_and_asks_for_nothing(page) -> None:
    parsed = Page(page)
    assert parsed.open == [] and parsed.addresses == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert "default-src 'none'" in page and "@import" not in page and "url(" not in page
    # What the records name is text, not markup.
    assert "<a " not in page and "&lt;a &quot;test&quot;&gt; &amp; more" in page
    for name in re.findall(r'aria-labelledby="([^"]+)"', page):
        assert set(name.split()) <= set(parsed.ids)


def test_a_run_of_nothing(tmp_path) -> None:
    begin = {"kind": "begin", "source": "", "began": 0.0, "time_unit": "steps", "block_tokens": 4}
    tier = {"name": "device", "capacity_bytes": 0, "groups": [{"name": "g", "page_bytes": 1, "capacity": 0}]}
    path = tmp_path / "empty.jsonl"
    path.write_text(json.dumps({**begin, "tiers": [tier]}) + "\n")
    report(path, "-o", tmp_path / "empty.html")
    tables = Page((tmp_path / "empty.html").read_text()).tables
    assert tables["hit-rate-table"][1:] == [["0 to 0", "-", "-"]]


def test_what_cannot_be_read_or_written(records, tmp_path) -> None:
    with pytest.raises(RecordError, match="cannot read records"):
        report(tmp_path / "none.jsonl")
    with pytest.raises(KvistError) as caught:
        report(records, "-o", tmp_path)
    assert str(caught.value) == f"cannot write {tmp_path}: Is a directory"


def run_of(times: list[float], held: list[int]) -> Run:
    """Steps at these times, with so many pages of ten held, cut into five slices."""
    group = Group("g", 1, 10)
    begin = Begin("", 0.0, "s", 4, (Tier("device", 10, (group,)),))
    steps = [
        StepRecord(number, when, (DeviceGroup(held=pages),), computed_tokens=1)
        for number, (when, pages) in enumerate(zip(times, held))
    ]
    return Run.of(begin, steps, 5)


def test_a_moment_between_two_slices_belongs_to_the_earlier_one() -> None:
    run = run_of([float(when) for when in range(1, 11)], [0] * 10)
    assert [each.totals.counts["computed_tokens"] for each in run.slices] == [2, 2, 2, 2, 2]


def test_where_nothing_happens_pages_stay_where_they_are() -> None:
    run = run_of([3.0, 10.0], [4, 7])
    held = [None if each.last is None else each.last.groups[0].held for each in run.slices]
    assert held == [None, 4, 4, 4, 7]


# Pictures.


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (0, [0, 1]),
        (1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (7, [0, 2, 4, 6, 8]),
        (100, [0, 20, 40, 60, 80, 100]),
        (0.03, None),
    ],
)
def test_ticks_are_round_and_reach_the_top(top, expected) -> None:
    found = ticks(top)
    assert found[-1] >= top and len(found) <= 7
    assert expected is None or found == pytest.approx(expected)


def test_layers_of_a_stack_lie_on_each_other() -> None:
    chart = Chart(
        name="c",
        title="t",
        stacked=True,
        series=[Series("low", [1.0, None], "a"), Series("high", [3.0, 2.0], "b")],
        bounds=[0.0, 5.0, 10.0],
        time_axis="s",
        axis="x",
        shown=str,
    )
    low, high = (
        [tuple(map(float, point.split(","))) for point in points.split()]
        for points in re.findall(r'<polygon points="([^"]+)"', svg(chart))
    )
    bottom = max(y for _, y in low)
    unit = bottom - min(y for _, y in low)
    # Each slice of a layer: left and right on top, in order; then its bottom, backwards.
    assert [round((bottom - y) / unit, 2) for _, y in low] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert [round((bottom - y) / unit, 1) for _, y in high] == [4, 4, 2, 2, 0, 0, 1, 1]


def test_boxes_are_as_wide_as_their_tokens() -> None:
    branches = [
        BranchRecord("a", -1, "s", 0, 20, 100, 3, 2, False, 3, 200),
        BranchRecord("b", 0, "s", 20, 60, 60, 1),
        BranchRecord("c", -1, "s", 0, 50, 50, 1),
        BranchRecord("d", 0, "s", 20, 20, 20, 1),
    ]
    text = boxes("tree", "Tree", branches, ["", "", "", ""])
    found = [(float(x), float(y), float(w)) for x, y, w in re.findall(r'<rect x="(.*?)" y="(.*?)" width="(.*?)"', text)]
    assert found == [(0, 0, 639), (0, 30, 383), (640, 0, 319), (384, 30, 127)]
    assert text.count("heat4") == 1 and text.count("heat0") == 3
