"""Charts as SVG that needs no script: every panel is one picture, with its numbers beside it for `assets/page.js`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from fedbilevel.report.charts import Chart, Line, Mark, Panel
from fedbilevel.report.scales import Axis, Scale, tick_count, tick_labels, ticks
from fedbilevel.report.styles import DASHES, GLYPHS, MARKERS, Style

WIDTH = 400
LEFT, RIGHT, TOP, BOTTOM, HEIGHT = 60, 388, 30, 250, 300
"""Frame of a plane; labels stand outside of it."""
ROW_LEFT, ROW_LABEL, ROW, ROW_GAP, ROW_FOOT = 14, 17, 12, 7, 46
"""Rows: the group's label on a line of its own, so that long names fit on a phone."""
GLYPHS_PER_LINE = 4
LETTERS = 50
"""So many fit above a row, on a phone too."""


def svg(chart: Chart, panel: Panel, identity: str) -> str:
    """One panel as an ``<svg>`` element; ``identity`` makes its inner names unique on the page."""
    body, height = _rows(chart, panel) if chart.kind == "rows" else _plane(chart, panel, identity)
    title = f'<text class="title" x="{WIDTH / 2:g}" y="17" text-anchor="middle">{escape(panel.title)}</text>'
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(spoken(chart, panel))}">'
        f"{title}{body}</svg>"
    )


def spoken(chart: Chart, panel: Panel) -> str:
    """What a screen reader says of a panel."""
    axes = panel.x.label if chart.kind == "rows" else f"{panel.y.label} against {panel.x.label}"
    return f"{chart.title}: {panel.title}. {axes}."


def folded(chart: Chart) -> list[tuple[Panel, list[Panel]]]:
    """Panels as a page holds them: those with the same lines over another x are one picture that can change its x."""
    found: dict[tuple[int, str], tuple[Panel, list[Panel]]] = {}
    for number, panel in enumerate(chart.panels):
        key = (panel.case, panel.variant.split("/")[0] if panel.lines else f"{number}")
        if key in found:
            found[key][1].append(panel)
        else:
            found[key] = (panel, [])
    return list(found.values())


def data(panel: Panel, others: Sequence[Panel] = ()) -> str:
    """The panel's numbers as JSON that is safe inside a ``<script>`` element; ``others``: see `folded`."""
    record: dict[str, Any] = {"x": _axis(panel.x), "y": _axis(panel.y)}
    if panel.lines:
        record["lines"] = [
            [line.series, line.name, *(_numbers(part, 5) for part in (line.x, line.y, line.low, line.high))]
            for line in panel.lines
        ]
    else:
        record["marks"] = [
            [mark.series, *_numbers(mark[1:7]), mark.tip, mark.layer] if mark.layer else
            [mark.series, *_numbers(mark[1:7]), mark.tip]
            for mark in panel.marks
        ]  # fmt: skip
    if panel.baseline is not None:
        record["base"] = panel.baseline
    if others:
        record["also"] = {
            other.variant: {"x": _axis(other.x), "xs": [_numbers(line.x, 5) for line in other.lines]}
            for other in others
        }
    return script_json(record)


def script_json(value: Any) -> str:
    """JSON in which no text can end the element it stands in."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def glyph(style: Style, x: float, y: float, kind: str = "glyph") -> str:
    """A marker; its shape stands once on the page, see `shapes`."""
    return f'<use class="{kind}" href="#m{style.marker}" x="{_at(x)}" y="{_at(y)}"/>'


def shapes() -> str:
    """The markers' shapes, for all pictures of a page."""
    paths = "".join(f'<path id="m{number}" d="{GLYPHS[name]}"/>' for number, name in enumerate(MARKERS))
    return f'<svg class="shapes" width="0" height="0" aria-hidden="true"><defs>{paths}</defs></svg>'


def _plane(chart: Chart, panel: Panel, identity: str) -> tuple[str, int]:
    x = Scale(*panel.x_domain(), LEFT, RIGHT, panel.x.log)
    y = Scale(*panel.y_domain(), BOTTOM, TOP, panel.y.log)
    across, up = ticks(x.low, x.high, tick_count(panel.x), x.log), ticks(y.low, y.high, tick_count(panel.y), y.log)
    pieces = [_grid(x, across, TOP, BOTTOM), f'<path class="grid y" d="{_level(y, up)}"/>']
    texts = "".join(
        f'<text x="{LEFT - 6}" y="{_at(y.at(value) + 4)}" text-anchor="end">{text}</text>'
        for value, text in zip(up, tick_labels(up, panel.y.format, y.log), strict=True)
    )
    pieces += [_tick_texts(x, across, panel.x, BOTTOM + 15), f'<g class="ticks y">{texts}</g>']
    pieces.append(f'<path class="frame" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>')
    pieces.append(
        f'<clipPath id="{identity}"><path d="M{LEFT - 6} {TOP - 6}H{RIGHT + 6}V{BOTTOM + 6}H{LEFT - 6}Z"/></clipPath>'
    )
    drawn = [_point(chart, mark, x, y) for mark in panel.marks] + [_line(chart, line, x, y) for line in panel.lines]
    pieces.append(f'<g class="marks" clip-path="url(#{identity})">{"".join(drawn)}</g>')
    pieces.append(_label(panel.x.label, (LEFT + RIGHT) / 2, HEIGHT - 12))
    middle = (TOP + BOTTOM) / 2
    turned = f'transform="translate(15 {middle:g}) rotate(-90)" text-anchor="middle"'
    pieces.append(f'<text class="label y" {turned}>{escape(panel.y.label)}</text>')
    return "".join(pieces), HEIGHT


def _point(chart: Chart, mark: Mark, x: Scale, y: Scale) -> str:
    style = chart.styles[mark.series]
    across, up = x.at(mark.x), y.at(mark.y)
    if mark.layer == "seeds":
        shape = f'<circle class="seed" cx="{_at(across)}" cy="{_at(up)}" r="2.2"/>'
    else:
        whisker = ""
        if math.isfinite(mark.x_low):
            whisker += f"M{_at(x.at(mark.x_low))} {_at(up)}H{_at(x.at(mark.x_high))}"
        if math.isfinite(mark.y_low):
            whisker += f"M{_at(across)} {_at(y.at(mark.y_low))}V{_at(y.at(mark.y_high))}"
        shape = f'<path class="whisker" d="{whisker}"/>' if whisker else ""
        shape += glyph(style, across, up, "glyph hollow" if mark.layer == "paper" else "glyph")
    layer = f' data-layer="{mark.layer}"' if mark.layer else ""
    return f'<g class="mark c{style.slot}"{layer}>{shape}</g>'


def _line(chart: Chart, line: Line, x: Scale, y: Scale) -> str:
    style = chart.styles[line.series]
    places = [x.at(value) for value in line.x]
    points = [(place, y.at(value)) for place, value in zip(places, line.y, strict=True)]
    shape = ""
    if any(map(math.isfinite, line.low)):
        edge = [(place, y.at(value)) for place, value in zip(places, line.high, strict=True)]
        edge += [(place, y.at(value)) for place, value in zip(places, line.low, strict=True)][::-1]
        shape += f'<path class="band" d="{_through(edge)}Z"/>'
    dash = f' stroke-dasharray="{DASHES[style.dash]}"' if DASHES[style.dash] else ""
    shape += f'<path class="line" d="{_through(points)}"{dash}/>'
    shape += "".join(glyph(style, *points[place]) for place in glyph_places(len(points), line.series))
    return f'<g class="mark c{style.slot}">{shape}</g>'


def glyph_places(count: int, series: int) -> list[int]:
    """Where a line carries its marker: shifted from series to series, so that markers of lines that coincide do not."""
    if count == 1:
        return [0]
    shift = (series % 8) / 8
    return sorted({math.floor((number + shift) * (count - 1) / GLYPHS_PER_LINE) for number in range(GLYPHS_PER_LINE)})


def _rows(chart: Chart, panel: Panel) -> tuple[str, float]:
    x = Scale(*panel.x_domain(), ROW_LEFT, RIGHT, panel.x.log)
    by_group: dict[int, list[Mark]] = {}
    for mark in panel.marks:
        by_group.setdefault(int(mark.y), []).append(mark)
    y, drawn = float(TOP), []
    for number, name in enumerate(panel.groups):
        own = by_group.get(number, [])
        value = ""
        if len(own) == 1 and len(name) + len(_value(own[0])) <= LETTERS - 5:
            value = f'<text class="value" x="{RIGHT}" text-anchor="end">{escape(_value(own[0]))}</text>'
        drawn.append(
            f'<g class="group" transform="translate(0 {y + 12:g})"><text x="{ROW_LEFT}">{escape(_cut(name))}</text>{value}</g>'
        )
        y += ROW_LABEL
        for mark in own:
            drawn.append(_bar(chart, panel, mark, x, y + ROW / 2))
            y += ROW
        y += ROW_GAP
    across = ticks(x.low, x.high, tick_count(panel.x), x.log)
    base = "" if panel.baseline is None else f"M{_at(x.at(panel.baseline))} {TOP}V{y:g}"
    pieces = [
        _grid(x, across, TOP, y),
        _tick_texts(x, across, panel.x, y + 15),
        f'<path class="frame" d="M{ROW_LEFT} {y:g}H{RIGHT}{base}"/>',
        f'<g class="marks">{"".join(drawn)}</g>',
        _label(panel.x.label, (ROW_LEFT + RIGHT) / 2, y + ROW_FOOT - 10),
    ]
    return "".join(pieces), y + ROW_FOOT


def _value(mark: Mark) -> str:
    return mark.tip.rsplit(": ", 1)[-1]


def _cut(name: str) -> str:
    """Long names end in dots; tips and tables have them whole."""
    return name if len(name) <= LETTERS else f"{name[: LETTERS - 1]}…"


def _bar(chart: Chart, panel: Panel, mark: Mark, x: Scale, y: float) -> str:
    """Drawn around y = 0 and moved there, so that a filter only has to move it again."""
    style = chart.styles[mark.series]
    end = x.at(mark.x)
    shape = ""
    if panel.bars:
        start = x.at(panel.baseline if panel.baseline is not None else x.low)
        shape += f'<path class="bar" d="M{_at(start)} -3.5H{_at(end)}V3.5H{_at(start)}Z"/>'
    if math.isfinite(mark.x_low):
        low, high = (min(max(x.at(value), ROW_LEFT - 6), RIGHT + 6) for value in (mark.x_low, mark.x_high))
        shape += f'<path class="whisker" d="M{_at(low)} 0H{_at(high)}"/>'
    shape += glyph(style, end, 0)
    return f'<g class="mark c{style.slot}" transform="translate(0 {y:g})">{shape}</g>'


def _grid(x: Scale, values: list[float], top: float, bottom: float) -> str:
    lines = "".join(f"M{_at(x.at(value))} {top:g}V{bottom:g}" for value in values)
    return f'<path class="grid x" d="{lines}"/>'


def _level(y: Scale, values: list[float]) -> str:
    return "".join(f"M{LEFT} {_at(y.at(value))}H{RIGHT}" for value in values)


def _tick_texts(x: Scale, values: list[float], axis: Axis, y: float) -> str:
    texts = "".join(
        f'<text x="{_at(x.at(value))}" y="{y:g}" text-anchor="middle">{text}</text>'
        for value, text in zip(values, tick_labels(values, axis.format, axis.log), strict=True)
    )
    return f'<g class="ticks x">{texts}</g>'


def _label(text: str, x: float, y: float) -> str:
    return f'<text class="label x" x="{x:g}" y="{y:g}" text-anchor="middle">{escape(text)}</text>'


def _through(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_at(x)} {_at(y)}" for x, y in points if math.isfinite(x) and math.isfinite(y))


def _at(value: float) -> str:
    return f"{value:.1f}"


def _axis(axis: Axis) -> dict[str, Any]:
    return {name: value for name, value in axis._asdict().items() if value is not None and value is not False}


def _numbers(values: Any, digits: int = 6) -> list[float | None]:
    """As many digits as a screen can show; what is not finite has no JSON."""
    rounded = [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
    return [int(value) if value is not None and value == int(value) else value for value in rounded]
