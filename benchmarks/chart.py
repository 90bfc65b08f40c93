"""Line charts as SVG text; no plotting library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import attrs

#: Points of the drawing area of a panel, and around it.
_WIDTH, _HEIGHT = 380, 290
_LEFT, _TOP, _RIGHT, _BOTTOM = 70, 40, 20, 50
_COLOURS = ("#0b6e4f", "#c1440e", "#5aa9e6", "#8d6a9f", "#444444")
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.title{font-weight:bold;font-size:13px}.grid{stroke:#ddd}"
    ".frame{fill:none;stroke:#888}polyline{fill:none;stroke-width:2}"
)


@attrs.frozen
class Line:
    """One curve. points: positive ``(x, y)``, in order. colour: which of the few there are."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False


@attrs.frozen
class Panel:
    """One chart, both axes logarithmic, or both linear. key_at_bottom: where the lines' names stand."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    linear: bool = False
    key_at_bottom: bool = False


class _Axis:
    """Maps values to points between ``begin`` and ``end``, whole powers of ten at the ends of the values' range."""

    def __init__(self, values: Iterable[float], begin: float, end: float) -> None:
        logs = [math.log10(value) for value in values]
        # Values just past a power of ten, such as 1024, do not open a decade of their own.
        self.low, self.high = math.floor(min(logs) + 0.02), math.ceil(max(logs) - 0.02)
        self.high = max(self.high, self.low + 1)
        self.begin, self.end = begin, end

    def place(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    def ticks(self) -> list[tuple[str, float]]:
        return [(_short(10.0**power), self.place(10.0**power)) for power in range(self.low, self.high + 1)]


class _LinearAxis:
    """The same without logarithms, with about five round values marked, the outer ones at the ends."""

    def __init__(self, values: Iterable[float], begin: float, end: float) -> None:
        low, high = min(found := list(values)), max(found)
        rough = (high - low) / 4 or 1.0
        unit = 10.0 ** math.floor(math.log10(rough))
        self.step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        self.low, self.high = math.floor(low / self.step), math.ceil(high / self.step)
        self.high = max(self.high, self.low + 1)
        self.begin, self.end = begin, end

    def place(self, value: float) -> float:
        share = (value / self.step - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    def ticks(self) -> list[tuple[str, float]]:
        marked = [number * self.step for number in range(self.low, self.high + 1)]
        return [(f"{value:.6g}", self.place(value)) for value in marked]


def _short(value: float) -> str:
    """1000 -> 1k."""
    for unit, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{suffix}"
    return f"{value:g}"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'


def _panel(panel: Panel, left: float) -> list[str]:
    axis = _LinearAxis if panel.linear else _Axis
    x = axis((x for line in panel.lines for x, _ in line.points), left + _LEFT, left + _LEFT + _WIDTH)
    y = axis((y for line in panel.lines for _, y in line.points), _TOP + _HEIGHT, _TOP)
    middle = left + _LEFT + _WIDTH / 2
    upright = f"translate({left + 16},{_TOP + _HEIGHT / 2}) rotate(-90)"
    parts = [
        _text(middle, _TOP - 16, panel.title, 'class="title" text-anchor="middle"'),
        _text(middle, _TOP + _HEIGHT + 40, panel.x_label, 'text-anchor="middle"'),
        _text(0, 0, panel.y_label, f'text-anchor="middle" transform="{upright}"'),
    ]
    for label, at in x.ticks():
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{y.begin}" y2="{y.end}"/>')
        parts.append(_text(at, y.begin + 18, label, 'text-anchor="middle"'))
    for label, at in y.ticks():
        parts.append(f'<line class="grid" x1="{x.begin}" x2="{x.end}" y1="{at}" y2="{at}"/>')
        parts.append(_text(x.begin - 6, at + 4, label, 'text-anchor="end"'))
    parts.append(f'<rect class="frame" x="{x.begin}" y="{y.end}" width="{_WIDTH}" height="{_HEIGHT}"/>')
    for number, line in enumerate(panel.lines):
        stroke = f'stroke="{_COLOURS[line.colour]}"' + (' stroke-dasharray="6 4"' if line.dashed else "")
        places = [(x.place(a), y.place(b)) for a, b in line.points]
        parts.append(f'<polyline {stroke} points="{" ".join(f"{a},{b}" for a, b in places)}"/>')
        parts += [f'<circle cx="{a}" cy="{b}" r="3" fill="{_COLOURS[line.colour]}"/>' for a, b in places]
        key = (y.begin - 10 - 17 * len(panel.lines) if panel.key_at_bottom else y.end) + 18 + 17 * number
        parts.append(f'<polyline {stroke} points="{x.begin + 10},{key - 4} {x.begin + 38},{key - 4}"/>')
        parts.append(_text(x.begin + 44, key, line.name))
    return parts


def write(path: Path, panels: Sequence[Panel]) -> None:
    """Panels side by side in one SVG file."""
    pitch = _LEFT + _WIDTH + _RIGHT
    width, height = pitch * len(panels), _TOP + _HEIGHT + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" fill="white"/>',
        *(part for number, panel in enumerate(panels) for part in _panel(panel, number * pitch)),
        "</svg>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")
