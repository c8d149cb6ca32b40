"""Charts as files for papers, through matplotlib (the ``report`` extra): the same panels, colours and markers as the page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from fedbilevel.report.charts import Chart, Mark, Panel, columns_for
from fedbilevel.report.scales import tick_count, tick_labels, ticks
from fedbilevel.report.styles import DASHES, MARKERS, SERIES_LIGHT, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.4, 3.4
ROW_HEIGHT, GROUP_HEIGHT = 0.13, 0.26


def picture(chart: Chart, variant: str | None = None) -> Figure:
    """One variant of a chart as a matplotlib figure with a common legend."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Figures need matplotlib: install it with `pip install "fedbilevel[report]"`.') from error
    wanted = chart.first_variant if variant is None else variant
    panels = [panel for panel in chart.panels if panel.variant == wanted and (panel.marks or panel.lines)]
    columns = min(columns_for(panels), len(panels)) or 1
    rows = math.ceil(len(panels) / columns) or 1
    height = max((_height(panel) for panel in panels), default=HEIGHT) if chart.kind == "rows" else HEIGHT
    figure = Figure(figsize=(WIDTH * columns, height * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for place, panel in zip(axes, panels, strict=False):
        place.set_title(_plain(panel.title), fontsize=11)
        if chart.kind == "rows":
            _rows(place, chart, panel)
        else:
            _plane(place, chart, panel)
    for place in axes[len(panels) :]:
        place.set_visible(False)
    _legend(figure, chart, panels, 4 if columns > 1 else 2)
    # Laid out once: doing it again for every format moves things a little each time, and takes time.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def _legend(figure: Figure, chart: Chart, panels: list[Panel], columns: int) -> None:
    from matplotlib.lines import Line2D

    used = {mark.series for panel in panels for mark in panel.visible()} | {
        line.series for panel in panels for line in panel.lines
    }
    handles = []
    for number in sorted(used):
        style = chart.styles[number]
        colour, label = SERIES_LIGHT[style.slot], _plain(chart.names[number])
        dashed: Any = _dashes(style.dash) if chart.kind == "lines" else "none"
        handles.append(Line2D([], [], color=colour, linestyle=dashed, label=label, **_marker(style, 6)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def _dashes(number: int) -> tuple[float, tuple[float, ...]] | Literal["solid"]:
    return (0.0, tuple(map(float, DASHES[number].split()))) if DASHES[number] else "solid"


def _height(panel: Panel) -> float:
    return 1.1 + GROUP_HEIGHT * len(panel.groups) + ROW_HEIGHT * len(panel.marks)


def _axis(place: Axes, panel: Panel, which: Literal["x", "y"]) -> None:
    axis = panel.x if which == "x" else panel.y
    low, high = panel.x_domain() if which == "x" else panel.y_domain()
    values = ticks(low, high, tick_count(axis), axis.log)
    if which == "x":
        place.set_xscale("log" if axis.log else "linear")
        place.set_xticks(values, tick_labels(values, axis.format, axis.log), fontsize=8)
        place.set_xticks([], minor=True)
        place.set_xlim(low, high)
        place.set_xlabel(_plain(axis.label), fontsize=9)
    else:
        place.set_yscale("log" if axis.log else "linear")
        place.set_yticks(values, tick_labels(values, axis.format, axis.log), fontsize=8)
        place.set_yticks([], minor=True)
        place.set_ylim(low, high)
        place.set_ylabel(_plain(axis.label), fontsize=9)
    place.grid(True, axis=which, color="0.9", linewidth=0.8)
    place.set_axisbelow(True)


def _plane(place: Axes, chart: Chart, panel: Panel) -> None:
    for mark in panel.visible():
        style = chart.styles[mark.series]
        colour = SERIES_LIGHT[style.slot]
        if math.isfinite(mark.x_low):
            place.plot([mark.x_low, mark.x_high], [mark.y, mark.y], color=colour, linewidth=1)
        if math.isfinite(mark.y_low):
            place.plot([mark.x, mark.x], [mark.y_low, mark.y_high], color=colour, linewidth=1)
        place.plot([mark.x], [mark.y], color=colour, **_marker(style, 7))
    for line in panel.lines:
        style = chart.styles[line.series]
        colour = SERIES_LIGHT[style.slot]
        every = (line.series % 4, max(1, len(line.x) // 4))
        dashes = _dashes(style.dash)
        place.plot(line.x, line.y, color=colour, linewidth=1.4, markevery=every, **_marker(style, 6), linestyle=dashes)
        place.fill_between(line.x, line.low, line.high, color=colour, alpha=0.14, linewidth=0)
    _axis(place, panel, "x")
    _axis(place, panel, "y")


def _marker(style: Style, size: float) -> dict[str, Any]:
    name = MARKERS[style.marker]
    return {
        "marker": name,
        "markersize": size * (1.35 if name == "*" else 1),
        "markeredgecolor": "white",
        "markeredgewidth": 0.4,
    }


def _rows(place: Axes, chart: Chart, panel: Panel) -> None:
    heights: dict[int, list[tuple[float, Mark]]] = {}
    y = 0.0
    for number, name in enumerate(panel.groups):
        own = [mark for mark in panel.visible() if int(mark.y) == number]
        if not own:
            continue
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
        across = place.get_yaxis_transform()
        place.text(0.01, y + 0.4 * GROUP_HEIGHT, _plain(name), transform=across, fontsize=8, va="center", bbox=box)
        y += GROUP_HEIGHT
        for mark in own:
            heights.setdefault(mark.series, []).append((y, mark))
            y += ROW_HEIGHT
        y += 0.5 * ROW_HEIGHT
    start = panel.baseline if panel.baseline is not None else 0.0
    for series, marks in heights.items():
        style = chart.styles[series]
        colour = SERIES_LIGHT[style.slot]
        at, values = [height for height, _ in marks], [mark.x for _, mark in marks]
        if panel.bars:
            place.barh(at, [x - start for x in values], left=start, height=0.6 * ROW_HEIGHT, color=colour, alpha=0.35)
        place.hlines(at, [m.x_low for _, m in marks], [m.x_high for _, m in marks], colors=colour, linewidth=1)
        place.plot(values, at, color=colour, linestyle="none", **_marker(style, 5))
    _axis(place, panel, "x")
    if panel.baseline is not None:
        place.axvline(panel.baseline, color="0.4", linewidth=0.8)
    place.set_yticks([])
    place.set_ylim(y, -0.3 * GROUP_HEIGHT)


def _plain(text: str) -> str:
    """A dollar sign from the data starts no formula."""
    return text.replace("$", r"\$")
