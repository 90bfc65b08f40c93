"""Pictures as SVG text: lines, stacked bars, and branches as nested boxes. Colours are the page's, by class."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape

import attrs

from kvist.iterations.records import BranchRecord

#: In units of the picture, which the page stretches to its column.
WIDTH, HEIGHT = 480, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 12, 12, 42


@attrs.frozen
class Series:
    """One line, or one layer of a stack. values: one for each slice, ``None`` for none. tone: its colour, as the page
    names it."""

    name: str
    values: Sequence[float | None]
    tone: str


@attrs.frozen(kw_only=True)
class Chart:
    """Something over time.

    stacked: layers on each other, or lines. bounds: ends of the slices on the time axis, one more than there are
    values. shown: a value as text. axis: what the values are, with their unit. shares: are they between 0 and 1?
    """

    name: str
    title: str
    stacked: bool
    series: Sequence[Series]
    bounds: Sequence[float]
    time_axis: str
    axis: str
    shown: Callable[[float], str]
    shares: bool = False


def ticks(top: float, most: int = 5) -> list[float]:
    """Round numbers from 0 up to at least ``top``, no more than ``most`` steps."""
    if top <= 0:
        return [0.0, 1.0]
    rough = top / most
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [size * place for place in range(math.ceil(top / size - 1e-9) + 1)]


def short(value: float) -> str:
    """A number for an axis: 1.5k, 20M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def svg(chart: Chart) -> str:
    """The picture. The page's script reads ``data-chart`` to tell the values under the pointer."""
    count = len(chart.bounds) - 1
    sums = [sum(each.values[place] or 0.0 for each in chart.series) for place in range(count)]
    singles = [value for each in chart.series for value in each.values if value is not None]
    marks = ticks(1.0 if chart.shares else max(sums if chart.stacked else singles, default=0.0))
    top = marks[-1]
    end = chart.bounds[-1] or 1.0

    def across(value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * value / end

    def down(value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / top

    parts = [_frame(chart, marks, across, down)]
    floor = [0.0] * count
    for place, series in enumerate(chart.series):
        parts.append(f'<g class="series {series.tone}" data-series="{place}">')
        if chart.stacked:
            parts.append(_layer(series, floor, chart.bounds, across, down))
        else:
            parts += _line(series, chart.bounds, across, down)
        parts.append("</g>")
    told = {
        "left": _LEFT,
        "right": WIDTH - _RIGHT,
        "end": end,
        "bounds": [round(bound, 3) for bound in chart.bounds],
        "axis": chart.time_axis,
        "names": [series.name for series in chart.series],
        "values": [
            ["-" if (value := series.values[at]) is None else chart.shown(value) for series in chart.series]
            for at in range(count)
        ],
    }
    name = escape(chart.name)
    names = ", ".join(series.name for series in chart.series)
    about = f"{chart.axis} over {chart.time_axis}: {names}. The table has the numbers."
    return (
        f'<svg class="plot" id="{name}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0"'
        f' aria-labelledby="{name}-title {name}-about" data-chart="{escape(json.dumps(told))}">'
        f'<title id="{name}-title">{escape(chart.title)}</title><desc id="{name}-about">{escape(about)}</desc>'
        f'{"".join(parts)}<line class="guide" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" visibility="hidden"/></svg>'
    )


def _frame(
    chart: Chart, marks: Sequence[float], across: Callable[[float], float], down: Callable[[float], float]
) -> str:
    parts = []
    for mark in marks:
        at = down(mark)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        text = f"{mark:.0%}" if chart.shares else short(mark)
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    end, low = chart.bounds[-1], HEIGHT - _BOTTOM
    for mark in ticks(end, 4):
        if mark <= end * 1.001:
            place = across(mark)
            anchor = "end" if place > WIDTH - 40 else "middle"
            parts.append(f'<line class="axis" x1="{place:.1f}" x2="{place:.1f}" y1="{low}" y2="{low + 4}"/>')
            parts.append(
                f'<text class="tick" x="{place:.1f}" y="{low + 17}" text-anchor="{anchor}">{short(mark)}</text>'
            )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{low}" y2="{low}"/>')
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.time_axis)}</text>'
    )
    height = (_TOP + low) / 2
    parts.append(
        f'<text class="label" x="16" y="{height}" text-anchor="middle" transform="rotate(-90 16 {height})">'
        f"{escape(chart.axis)}</text>"
    )
    return "".join(parts)


def _line(
    series: Series, bounds: Sequence[float], across: Callable[[float], float], down: Callable[[float], float]
) -> list[str]:
    """Through the middles of the slices, broken where there is no value; a dot where there is only one."""
    runs: list[list[str]] = [[]]
    for at, value in enumerate(series.values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{across((bounds[at] + bounds[at + 1]) / 2):.1f},{down(value):.1f}")
    parts = []
    for points in runs:
        if len(points) > 1:
            parts.append(f'<polyline points="{" ".join(points)}"/>')
        elif points:
            x, y = points[0].split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.5"/>')
    return parts


def _layer(
    series: Series,
    floor: list[float],
    bounds: Sequence[float],
    across: Callable[[float], float],
    down: Callable[[float], float],
) -> str:
    """One shape of a step for each slice, on top of ``floor``, which it raises."""
    above, below = [], []
    for at, value in enumerate(series.values):
        left, right = across(bounds[at]), across(bounds[at + 1])
        low, high = floor[at], floor[at] + (value or 0.0)
        above += [f"{left:.1f},{down(high):.1f}", f"{right:.1f},{down(high):.1f}"]
        below += [f"{left:.1f},{down(low):.1f}", f"{right:.1f},{down(low):.1f}"]
        floor[at] = high
    return f'<polygon points="{" ".join([*above, *reversed(below)])}"/>'


def boxes(name: str, title: str, branches: Sequence[BranchRecord], texts: Sequence[str]) -> str:
    """Branches as boxes as wide as their tokens, children below their parents; the stronger their tone, the more
    requests reused them. texts: what the page tells of each."""
    width, row, levels = 960, 30, [0] * len(branches)
    children: dict[int, list[int]] = {}
    for place, branch in enumerate(branches):
        children.setdefault(branch.parent, []).append(place)
        levels[place] = 0 if branch.parent < 0 else levels[branch.parent] + 1
    whole = sum(branches[place].tokens for place in children.get(-1, ())) or 1
    lefts = [0.0] * len(branches)
    for parent in [-1, *range(len(branches))]:
        left = 0.0 if parent < 0 else lefts[parent]
        for place in children.get(parent, ()):
            lefts[place] = left
            left += branches[place].tokens
    most = max((branch.hits for branch in branches), default=0) or 1
    parts = []
    for place, branch in enumerate(branches):
        x, wide = width * lefts[place] / whole, width * branch.tokens / whole
        level = math.ceil(4 * branch.hits / most)
        parts.append(
            f'<g class="box heat{level}" data-text="{escape(texts[place])}">'
            f'<rect x="{x:.1f}" y="{levels[place] * row}" width="{max(0.5, wide - 1):.1f}" height="{row - 2}"/>'
        )
        label = short(branch.tokens)
        if wide > 12 + 9 * len(label):
            parts.append(f'<text x="{x + 5:.1f}" y="{levels[place] * row + 19}">{label}</text>')
        parts.append("</g>")
    height = row * (max(levels, default=0) + 1)
    return (
        f'<svg class="plot boxes" id="{escape(name)}" viewBox="0 0 {width} {height}" role="img"'
        f' aria-labelledby="{escape(name)}-title {escape(name)}-about"><title id="{escape(name)}-title">{escape(title)}'
        f'</title><desc id="{escape(name)}-about">Boxes as wide as their tokens, children below their parents. '
        f"The table has the numbers.</desc>{''.join(parts)}</svg>"
    )
