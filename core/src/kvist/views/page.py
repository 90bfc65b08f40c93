"""A recorded run as one HTML page that needs nothing else: pictures, the tables with their numbers, a little script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

from kvist.iterations.records import BranchRecord, RequestRecord, Tier
from kvist.replay.report import shown_bytes
from kvist.views.board import Totals, spread
from kvist.views.charts import Chart, Series, boxes, short, svg
from kvist.views.slices import Run

_PHASES = (("queue", "none"), ("transfer", "e"), ("prefill", "b"), ("decode", "a"))
_LOST_TONES = ("d", "b", "e", "f", "c")


def page(run: Run) -> str:
    """The whole page."""
    title = escape(f"Cache report: {run.begin.source or 'a run'}")
    sections = [
        *_reuse(run),
        *_work(run),
        *_requests(run),
        *_occupancy(run),
        _pages(run),
        _branches(run),
    ]
    own = files("kvist.views")
    style, script = (own.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Whatever the records say, the page loads nothing.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<title>{title}</title>\n<style>\n{style}</style></head>\n<body>\n"
        f'<header><h1>{title}</h1><p class="soft">{escape(_when(run))}</p></header>\n'
        f'{_tiles(run)}\n<main class="grid-of-charts">\n{"".join(sections)}</main>\n'
        f'<div id="tip" role="status" hidden></div>\n<script>\n{script}</script>\n</body></html>\n'
    )


def _when(run: Run) -> str:
    size, unit = run.clock
    began = datetime.fromtimestamp(run.begin.began, UTC).strftime("%Y-%m-%d %H:%M UTC")
    text = f"Recorded {began}: {_moment(run.duration / size)} {unit}, {run.record_count:,} records."
    if run.begin.dropped:
        text += f" {run.begin.dropped:,} earlier ones are missing."
    if run.begin.time_unit == "steps":
        text += " No model ran; time is counted in steps of the cache."
    return text


def _tiles(run: Run) -> str:
    counts = run.totals.counts
    peaks = [(max(_held(run, place), default=0.0), group.name) for place, group in enumerate(run.begin.tiers[0].groups)]
    peak, name = max(peaks)
    tiles = [
        (_percent(run.totals.hit_rate), "of prompt tokens reused"),
        (short(counts["prompt_tokens"]), f"prompt tokens of {counts['requests']:,} sequences"),
        (short(counts["computed_tokens"]), f"tokens computed in {counts['steps']:,} steps"),
        (short(sum(group["evicted"] for group in run.totals.groups)), "pages evicted"),
        (_percent(peak), f"of the memory held by {name} at most"),
        (short(sum(request.pauses for request in run.requests)), f"pauses of {len(run.requests):,} requests"),
        (short(counts["recomputed_tokens"]), "tokens recomputed after suspension"),
    ]
    items = "".join(f"<li><b>{escape(value)}</b> <span>{escape(text)}</span></li>" for value, text in tiles)
    return f'<ul class="tiles">{items}</ul>'


def _held(run: Run, place: int) -> list[float]:
    """Share of the device that a group holds, of each slice."""
    capacity = run.begin.tiers[0].groups[place].capacity or 1
    return [each.last.groups[place].held / capacity for each in run.slices if each.last is not None]


def _reuse(run: Run) -> list[str]:
    prompt = reused = 0
    sofar: list[float | None] = []
    for each in run.slices:
        prompt += each.totals.counts["prompt_tokens"]
        reused += each.totals.counts["reused_tokens"]
        sofar.append(reused / prompt if prompt else None)
    rate = _chart(
        run,
        "hit-rate",
        "Hit rate over time",
        "reused share",
        [Series("in this slice", [each.totals.hit_rate for each in run.slices], "b"), Series("so far", sofar, "a")],
        shown=_percent,
        shares=True,
    )
    names = [tier.name for tier in run.begin.tiers]
    layers = []
    for place, (name, tone) in enumerate(zip(names, ("a", "c", "b"))):
        values = [
            float(each.totals.reused_below[place - 1])
            if place
            else float(each.totals.counts["reused_tokens"] - sum(each.totals.reused_below))
            for each in run.slices
        ]
        layers.append(Series(f"reused, {name}", values, tone))
    received = [float(each.totals.counts["received_tokens"]) for each in run.slices]
    if any(received):
        layers.append(Series("from another process", received, "e"))
    layers.append(Series("computed", [float(_missed(each.totals)) for each in run.slices], "none"))
    sources = _chart(run, "sources", "Where prompt tokens came from", "tokens", layers, stacked=True)
    return [
        _section("hit-rate", rate, "Of the tokens of prompts that began, how many were in the cache."),
        _section("sources", sources, "Tokens of prompts that began in each slice of time."),
        _misses(run),
    ]


def _missed(totals: Totals) -> int:
    counts = totals.counts
    return counts["prompt_tokens"] - counts["reused_tokens"] - counts["received_tokens"]


def _misses(run: Run) -> str:
    groups = run.begin.tiers[0].groups
    lost = [
        Series(
            f"known, but {group.name} had no restore point",
            [float(each.totals.groups[place]["lost_tokens"]) for each in run.slices],
            _LOST_TONES[place % len(_LOST_TONES)],
        )
        for place, group in enumerate(groups)
        if run.totals.groups[place]["lost_tokens"]
    ]
    unknown = [
        float(_missed(each.totals) - sum(group["lost_tokens"] for group in each.totals.groups)) for each in run.slices
    ]
    layers = [Series("not known: new, or evicted before", unknown, "none"), *lost]
    chart = _chart(run, "misses", "Where misses came from", "tokens", layers, stacked=True)
    total = _missed(run.totals)
    counts = [sum(value or 0.0 for value in each.values) for each in layers]
    most = max(counts) or 1.0
    rows = "".join(
        f'<li class="{each.tone}"><span>{escape(each.name)}</span>'
        f"<b>{count:,.0f} ({_percent(count / total if total else 0.0)})</b>"
        f'<i style="width: {count / most:.2%}"></i></li>'
        for each, count in zip(layers, counts)
    )
    summary = f'<ul class="bars" id="misses-total">{rows}</ul>'
    return _section("misses", chart, "Prompt tokens that had to be computed, and why; below in all.", summary)


def _work(run: Run) -> list[str]:
    unit = "step" if run.begin.time_unit == "steps" else "s"
    rates = [each.totals.counts["computed_tokens"] / max(each.end - each.start, 1e-9) for each in run.slices]
    work = _chart(
        run,
        "work",
        "Tokens computed",
        f"tokens/{unit}",
        [Series("computed", rates, "a")],
        shown=lambda value: f"{value:,.1f}",
    )
    load = _chart(
        run,
        "load",
        "Requests in the engine",
        "requests",
        [
            Series("running, at most", [float(each.running) for each in run.slices], "a"),
            Series("waiting, at most", [float(each.waiting) for each in run.slices], "d"),
        ],
    )
    return [
        _section("work", work, "Prompts and generated tokens fed back, all requests together."),
        _section("load", load, "The most at a time in each slice."),
    ]


def _occupancy(run: Run) -> list[str]:
    """One picture per tier and group, with boxes to choose among them."""
    found: list[tuple[str, str, str]] = []
    for level, tier in enumerate(run.begin.tiers):
        for place, group in enumerate(tier.groups):
            name = f"occupancy-{level}-{place}"
            what = f"{tier.name}, {group.name}"
            layers = _device_layers(run, place) if not level else _lower_layers(run, level - 1, place, tier)
            chart = _chart(run, name, f"Occupancy: {what}", "share", layers, stacked=True, shown=_percent, shares=True)
            pages = (
                f"{group.capacity:,} pages of" if group.capacity else f"{shown_bytes(tier.capacity_bytes)} in pages of"
            )
            about = f"At the end of each slice; {pages} {shown_bytes(group.page_bytes)}."
            if not level and len(tier.groups) > 1:
                about += " What is missing to 100 % belongs to other groups."
            found.append((name, what, _section(name, chart, about)))
    if len(found) < 2:
        return [section for _, _, section in found]
    choices = "".join(
        f'<label><input type="checkbox" checked data-section="section-{name}"> {escape(what)}</label>'
        for name, what, _ in found
    )
    return [
        f"<fieldset><legend>Occupancy of</legend>{choices}</fieldset>\n",
        *(section for _, _, section in found),
    ]


def _device_layers(run: Run, place: int) -> list[Series]:
    capacity = run.begin.tiers[0].groups[place].capacity or 1
    return [
        Series(
            name,
            [None if each.last is None else getattr(each.last.groups[place], name) / capacity for each in run.slices],
            tone,
        )
        for name, tone in (("held", "a"), ("cached", "f"), ("free", "none"))
    ]


def _lower_layers(run: Run, level: int, place: int, tier: Tier) -> list[Series]:
    group = tier.groups[place]

    def share(pages: int) -> float:
        if group.capacity:
            return pages / group.capacity
        return pages * group.page_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0

    used = [None if each.last is None else share(each.last.lower[level].groups[place].used) for each in run.slices]
    free = [None if value is None else max(0.0, 1.0 - value) for value in used]
    return [Series("used", used, "c"), Series("free or other groups'", free, "none")]


def _pages(run: Run) -> str:
    rows = []
    device, *below = run.begin.tiers
    for group, sums in zip(device.groups, run.totals.groups):
        counts = [sums["new"], sums["evicted"], sums["moved"], sums["lost_tokens"]]
        rows.append([f"{device.name}, {group.name}", *(f"{count:,}" for count in counts), "", "", ""])
    for tier, groups in zip(below, run.totals.lower):
        for group, sums in zip(tier.groups, groups):
            counts = [sums["offloaded"], sums["onboarded"], sums["dropped"]]
            rows.append([f"{tier.name}, {group.name}", "", "", "", "", *(f"{count:,}" for count in counts)])
    heads = ["tier, group", "new", "evicted", "moved", "lost tokens", "came down", "went up", "dropped"]
    sofar = run.totals.counts
    rest = [
        ["sequences opened", f"{sofar['requests']:,}"],
        ["prompt tokens", f"{sofar['prompt_tokens']:,}"],
        ["reused tokens", f"{sofar['reused_tokens']:,}"],
        ["computed tokens", f"{sofar['computed_tokens']:,}"],
        ["reused inside a block, by copy", f"{sofar['partial_reuses']:,}"],
        ["suspended", f"{sofar['suspends']:,}"],
        ["resumed", f"{sofar['resumes']:,}"],
        ["resumed tokens", f"{sofar['resumed_tokens']:,}"],
        ["recomputed tokens", f"{sofar['recomputed_tokens']:,}"],
        ["forks", f"{sofar['forks']:,}"],
        ["tokens from another process", f"{sofar['received_tokens']:,}"],
        ["tokens handed to another process", f"{sofar['handed_tokens']:,}"],
    ]
    return (
        '<section class="wide" id="section-pages"><h2>Pages and sequences in all</h2><div class="side">'
        f"{_table('pages-table', heads, rows)}{_table('sequences-table', ['what', 'count'], rest)}</div></section>\n"
    )


def _requests(run: Run) -> list[str]:
    if not run.requests:
        return []
    unit = "steps" if run.begin.time_unit == "steps" else "s"

    def shown(value: float) -> str:
        return f"{value:,.0f}" if unit == "steps" else f"{value:,.3f}"

    layers = []
    for phase, tone in _PHASES:
        if phase == "transfer" and not any(request.transfer for request in run.requests):
            continue
        means = [
            sum(getattr(request, phase) for request in each.requests) / len(each.requests) if each.requests else None
            for each in run.slices
        ]
        layers.append(Series(phase, means, tone))
    chart = _chart(run, "requests", "Time of requests", f"mean, {unit}", layers, stacked=True, shown=shown)
    rows = []
    for name in [*(phase.name for phase in layers), "all"]:
        values = [_time_in(request, name) for request in run.requests]
        middle = spread(values)
        assert middle is not None
        rows.append([name, *(shown(value) for value in (sum(values) / len(values), *middle, max(values)))])
    table = _table("request-times", [f"time in {unit}", "mean", "median", "95 %", "most"], rows)
    outcomes: dict[str, int] = {}
    for request in run.requests:
        outcomes[request.outcome] = outcomes.get(request.outcome, 0) + 1
    ended = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(outcomes.items()))
    about = f"Mean of the requests that ended in each slice. Why they ended: {ended}."
    return [_section("requests", chart, about, table)]


def _time_in(request: RequestRecord, phase: str) -> float:
    if phase == "all":
        return request.queue + request.transfer + request.prefill + request.decode
    return float(getattr(request, phase))


def _branches(run: Run) -> str:
    if not run.branches:
        return ""
    texts = [_told(branch) for branch in run.branches]
    picture = boxes("branches", "The largest branches of the prefix tree", run.branches, texts)
    levels: list[int] = []
    rows = []
    for branch in run.branches:
        levels.append(0 if branch.parent < 0 else levels[branch.parent] + 1)
    for place in _in_order(run.branches):
        branch = run.branches[place]
        name = f"{'· ' * levels[place]}{branch.name}"
        numbers = (branch.start, branch.own_tokens, branch.tokens, branch.children, branch.hits, branch.hit_tokens)
        rows.append([name, branch.scope, *(f"{number:,}" for number in numbers), "yes" if branch.held else ""])
    heads = ["branch", "scope", "begins at", "own tokens", "tokens", "children", "hits", "tokens reused", "in use"]
    return (
        '<section class="wide" id="section-branches"><h2>The largest branches of the prefix tree</h2>'
        '<p class="soft">Boxes are as wide as their tokens, children below their parents; the stronger their '
        "tone, the more requests reused them.</p>"
        f"{picture}<details open><summary>Numbers</summary>{_table('branches-table', heads, rows)}"
        "</details></section>\n"
    )


def _in_order(branches: Sequence[BranchRecord]) -> list[int]:
    """Parents, each followed by its children, as in a table of contents."""
    children: dict[int, list[int]] = {}
    for place, branch in enumerate(branches):
        children.setdefault(branch.parent, []).append(place)
    order: list[int] = []
    stack = list(reversed(children.get(-1, [])))
    while stack:
        place = stack.pop()
        order.append(place)
        stack += reversed(children.get(place, []))
    return order


def _told(branch: BranchRecord) -> str:
    return (
        f"branch {branch.name}, from token {branch.start:,}\n"
        f"{branch.tokens:,} tokens, {branch.own_tokens:,} of its own\n"
        f"{branch.children:,} children\n{branch.hits:,} hits, {branch.hit_tokens:,} tokens reused"
    )


def _chart(
    run: Run,
    name: str,
    title: str,
    axis: str,
    series: Sequence[Series],
    *,
    stacked: bool = False,
    shown: Callable[[float], str] | None = None,
    shares: bool = False,
) -> Chart:
    size, unit = run.clock
    bounds = [run.slices[0].start / size, *(each.end / size for each in run.slices)]
    return Chart(
        name=name,
        title=title,
        stacked=stacked,
        series=series,
        bounds=bounds,
        time_axis=unit,
        axis=axis,
        shown=shown or (lambda value: f"{value:,.0f}"),
        shares=shares,
    )


def _section(name: str, chart: Chart, about: str, more: str = "") -> str:
    legend = "".join(
        f'<button type="button" class="{each.tone}" aria-pressed="true" data-plot="{name}" data-series="{place}">'
        f"<i></i>{escape(each.name)}</button>"
        for place, each in enumerate(chart.series)
    )
    heads = [chart.time_axis, *(each.name for each in chart.series)]
    rows = []
    for at in range(len(chart.bounds) - 1):
        values = [each.values[at] for each in chart.series]
        told = ["-" if value is None else chart.shown(value) for value in values]
        rows.append([f"{_moment(chart.bounds[at])} to {_moment(chart.bounds[at + 1])}", *told])
    return (
        f'<section id="section-{name}"><h2>{escape(chart.title)}</h2><p class="soft">{escape(about)}</p>'
        f'<div class="legend">{legend}</div>{svg(chart)}{more}'
        f"<details><summary>Table</summary>{_table(f'{name}-table', heads, rows)}</details></section>\n"
    )


def _moment(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _table(name: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(text)}</td>" for text in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table id="{name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
