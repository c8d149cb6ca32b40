"""Charts as SVG that needs no script: where everything stands on the paper, for `templates/plot.html` to write down.

Beside each picture stand the texts of its values and the ticks of every window that a filter may zoom to; the script has no
scales of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fedbilevel.report.charts import DASHES, Chart, Line, Mark, Panel
from fedbilevel.report.scales import PADDING, Axis, Scale, Span, ladder, shown, tick_count, tick_labels, ticks

WIDTH, HEIGHT = 400, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 388, 30, 250
"""Frame of a plane; labels stand outside of it."""
ROW_LEFT, ROW_LABEL, ROW, ROW_GAP, ROW_FOOT = 14, 17, 12, 7, 52
"""Rows: the group's label on a line of its own, so that long names fit on a phone."""
GLYPHS_PER_LINE = 4
LETTERS = 50
"""So many fit above a row, on a phone too."""
FRAME = {
    "width": WIDTH, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "air": PADDING, "rowLeft": ROW_LEFT,
    "rowLabel": ROW_LABEL, "row": ROW, "rowGap": ROW_GAP, "rowFoot": ROW_FOOT,
}  # fmt: skip
"""What the script has to know of a picture."""


PARTS = ("layer", "y", "bar", "band", "line", "dash", "whisker", "label")
Shape = dict[str, Any]
"""One panel, mark or label as the template reads it."""


def pictures(chart: Chart) -> list[Shape]:
    """The chart's panels as a page holds them: those with the same lines over another x are one that can change its x."""
    folded: dict[tuple[int, str], list[Panel]] = {}
    for number, panel in enumerate(chart.panels):
        folded.setdefault((panel.block, panel.variant.split("/")[0] if panel.lines else f"{number}"), []).append(panel)
    return [_rows(chart, panel) if chart.kind == "rows" else _plane(chart, panel, others)
            for panel, *others in folded.values()]  # fmt: skip


def _plane(chart: Chart, panel: Panel, others: list[Panel]) -> Shape:
    x, y = Scale(*panel.domain("x"), LEFT, RIGHT, panel.x.log), Scale(*panel.domain("y"), BOTTOM, TOP, panel.y.log)
    shapes = [_line(chart, panel, line, x, y) for line in panel.lines]
    shapes += [_point(chart, mark, x, y) for mark in panel.marks]
    data: Shape = {"x": _axis(panel, "x", x), "y": _axis(panel, "y", y), "tips": [mark.tip for mark in panel.marks]}
    if panel.lines and not panel.marks:
        data["lines"] = [_values(chart, panel, line) for line in panel.lines]
        data["at"] = _at_texts(panel)
        data["also"] = {
            other.variant: {"label": other.x.label, "x": _axis(other, "x", scale), "at": _at_texts(other),
                            "xs": [[round(scale.at(value), 2) for value in line.x] for line in other.lines]}
            for other in others for scale in [Scale(*other.domain("x"), LEFT, RIGHT, other.x.log)]
        }  # fmt: skip
    ends = {"left": LEFT, "bottom": BOTTOM, "height": HEIGHT, "y_ticks": _ticks(panel.y, y)}
    return _drawn(chart, panel, x, shapes, data, **ends)


def _drawn(chart: Chart, panel: Panel, x: Scale, shapes: list[Shape], data: Shape, **places: Any) -> Shape:
    baseline = None if panel.baseline is None else x.at(panel.baseline)
    told = {"panel": panel, "plane": chart.kind != "rows", "spoken": spoken(chart, panel), "baseline": baseline}
    drawn = {"shapes": shapes, "data": data, "x_ticks": _ticks(panel.x, x), "y_ticks": [], "groups": []}
    return {**told, **drawn, **places}


def _rows(chart: Chart, panel: Panel) -> Shape:
    x = Scale(*panel.domain("x"), ROW_LEFT, RIGHT, panel.x.log)
    y, groups, shapes, tips = float(TOP), [], [], []
    for number, name in enumerate(panel.groups):
        marks = [mark for mark in panel.marks if int(mark.y) == number]
        value = marks[0].tip.rsplit(": ", 1)[-1] if len(marks) == 1 else ""
        fits = len(name) + len(value) <= LETTERS - 5
        # Long names end in dots; tips and tables have them whole.
        label = name if len(name) <= LETTERS else f"{name[: LETTERS - 1]}…"
        groups.append({"name": label, "value": value if fits else "", "y": y + 12})
        y += ROW_LABEL
        for mark in marks:
            shapes.append(_bar(chart, panel, mark, x, y + ROW / 2))
            tips.append(mark.tip)
            y += ROW
        y += ROW_GAP
    ends = {"left": ROW_LEFT, "bottom": y, "height": y + ROW_FOOT, "groups": groups}
    return _drawn(chart, panel, x, shapes, {"x": _axis(panel, "x", x), "tips": tips}, **ends)


def spoken(chart: Chart, panel: Panel) -> str:
    """What a screen reader says of a panel."""
    axes = panel.x.label if chart.kind == "rows" else f"{panel.y.label} against {panel.x.label}"
    return f"{chart.title}: {panel.title}. {axes}."


def _shape(chart: Chart, series: int, points: Iterable[tuple[float, float]], **parts: Any) -> Shape:
    """One mark or line; parts that it lacks are not drawn."""
    places = [(_at(x), _at(y)) for x, y in points]
    return {**dict.fromkeys(PARTS, ""), "series": series, "style": chart.styles[series], "points": places, **parts}


def _point(chart: Chart, mark: Mark, x: Scale, y: Scale) -> Shape:
    across, up, whisker = x.at(mark.x), y.at(mark.y), ""
    if math.isfinite(mark.x_low):
        whisker += f"M{_at(x.at(mark.x_low))} {_at(up)}H{_at(x.at(mark.x_high))}"
    if math.isfinite(mark.y_low):
        whisker += f"M{_at(across)} {_at(y.at(mark.y_low))}V{_at(y.at(mark.y_high))}"
    return _shape(chart, mark.series, [(across, up)], layer=mark.layer, whisker=whisker)


def _bar(chart: Chart, panel: Panel, mark: Mark, x: Scale, y: float) -> Shape:
    """Drawn around y = 0 and moved there, so that a filter only has to move it again."""
    end = _at(x.at(mark.x))
    start = _at(x.at(panel.baseline if panel.baseline is not None else x.low))
    bar = f"M{start} -3.5H{end}V3.5H{start}Z" if panel.bars else ""
    whisker = f"M{_at(x.at(mark.x_low))} 0H{_at(x.at(mark.x_high))}" if math.isfinite(mark.x_low) else ""
    return _shape(chart, mark.series, [(x.at(mark.x), 0)], y=y, bar=bar, whisker=whisker)


def _line(chart: Chart, panel: Panel, line: Line, x: Scale, y: Scale) -> Shape:
    points = [(x.at(across), y.at(up)) for across, up in zip(line.x, line.y, strict=True)]
    band = ""
    if any(map(math.isfinite, line.low)):
        # Where there is no interval the band is as thin as the line.
        ends = [[y.at(end if math.isfinite(end) else up) for end, up in zip(side, line.y, strict=True)]
                for side in (line.high, line.low)]  # fmt: skip
        across = [point[0] for point in points]
        band = _through([*zip(across, ends[0], strict=True), *[*zip(across, ends[1], strict=True)][::-1]]) + "Z"
    # Where marks stand on a line, it needs no markers of its own.
    marked = [] if panel.marks else [points[place] for place in glyph_places(len(points), line.series)]
    dash = DASHES[chart.styles[line.series].dash]
    label = (line.name, _at(points[-1][0]), _at(points[-1][1] - 8)) if line.name else ""
    return _shape(chart, line.series, marked, band=band, line=_through(points), dash=dash, label=label)


def glyph_places(count: int, series: int) -> list[int]:
    """Where a line carries its marker: shifted from series to series, so that markers of lines that coincide do not."""
    if count == 1:
        return [0]
    shift = (series % 8) / 8
    return sorted({math.floor((number + shift) * (count - 1) / GLYPHS_PER_LINE) for number in range(GLYPHS_PER_LINE)})


def _ticks(axis: Axis, scale: Scale) -> list[tuple[float, str]]:
    return _placed(axis, scale, ticks(scale.low, scale.high, tick_count(axis), axis.log))


def _placed(axis: Axis, scale: Scale, values: list[float]) -> list[tuple[float, str]]:
    texts = tick_labels(values, axis.format, axis.log)
    return [(round(scale.at(value), 2), text) for value, text in zip(values, texts, strict=True)]


def _axis(panel: Panel, which: str, scale: Scale) -> dict[str, Any]:
    """How far a filter may zoom, what stays in sight, and the ticks it finds there; nothing where both ends are fixed."""
    axis: Axis = getattr(panel, which)
    if axis.low is not None and axis.high is not None:
        return {}
    spread: dict[tuple[int, str], list[float]] = {}
    for mark in panel.marks:
        values = (mark.x, mark.x_low, mark.x_high) if which == "x" else (mark.y, mark.y_low, mark.y_high)
        spread.setdefault((mark.series, mark.layer), []).extend(values)
    for line in panel.lines:
        spread.setdefault((line.series, ""), []).extend(line.x if which == "x" else (*line.y, *line.low, *line.high))
    usable = [[v for v in all_of if math.isfinite(v) and (v > 0 or not axis.log)] for all_of in spread.values()]
    sets = ladder(axis, [(min(seen), max(seen)) for seen in usable if seen])
    limits = {"keep": axis.include, "floor": axis.floor, "ceiling": axis.ceiling}
    places = {name: round(scale.at(value), 2) for name, value in limits.items() if value is not None}
    return {**places, "most": tick_count(axis) + 2, "ladder": [_placed(axis, scale, rung) for rung in sets]}


def _values(chart: Chart, panel: Panel, line: Line) -> list[Any]:
    """What is said of a line, and of each of its points."""
    ends = zip(line.y, line.low or line.y, line.high or line.y, strict=True)
    texts = [(Span(*end) if line.low else Span(end[0])).text(panel.y.format) for end in ends]
    return [chart.names[line.series] + (f", {line.name}" if line.name else "") + f": {panel.y.label} ", texts]


def _at_texts(panel: Panel) -> list[list[str]]:
    unit = f" {panel.x.label}" if panel.x.format == "count" else ""
    return [[shown(value, panel.x.format) + unit for value in line.x] for line in panel.lines]


def _through(points: Iterable[tuple[float, float]]) -> str:
    """A path in steps, which are shorter to write than places."""
    texts, last = [], (0, 0)
    for across, up in points:
        here = (round(100 * across), round(100 * up))
        texts.append(" ".join(_at((new - old) / 100) for new, old in zip(here, last, strict=True)))
        last = here
    return f"M{texts[0]}l{' '.join(texts[1:])}".removesuffix("l").replace(" -", "-")


def _at(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
