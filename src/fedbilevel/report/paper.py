"""Charts as files for papers, through matplotlib (the ``report`` extra): the same panels, colours and markers as the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedbilevel import storage
from fedbilevel.engines.plot import check_matplotlib
from fedbilevel.report.charts import DASHES, MARKERS, SERIES, Chart, Mark, Panel
from fedbilevel.report.scales import tick_count, tick_labels, ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.4, 3.4
ROW_HEIGHT, GROUP_HEIGHT = 0.13, 0.26


def picture(chart: Chart, variant: str | None = None) -> Figure:
    """One variant of a chart as a matplotlib figure with a common legend."""
    check_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    wanted = chart.first_variant if variant is None else variant
    panels = [panel for panel in chart.panels if panel.variant == wanted and panel.used()]
    columns = min(chart.columns, len(panels)) or 1
    rows = math.ceil(len(panels) / columns) or 1
    height = max((_height(panel) for panel in panels), default=HEIGHT) if chart.kind == "rows" else HEIGHT
    figure = Figure(figsize=(WIDTH * columns, height * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for place, panel in zip(axes, panels, strict=False):
        place.set_title(_plain(panel.title), fontsize=11)
        (_rows if chart.kind == "rows" else _plane)(place, chart, panel)
    for place in axes[len(panels) :]:
        place.set_visible(False)
    used = sorted(
        {mark.series for p in panels for mark in p.visible()} | {line.series for p in panels for line in p.lines}
    )
    handles = [
        Line2D([], [], **_look(chart, series, 6), linestyle=_dashes(chart, series) if chart.kind == "lines" else "none",
               label=_plain(chart.names[series]))
        for series in used
    ]  # fmt: skip
    letters = 8 + max((len(chart.names[series]) for series in used), default=0)
    beside = max(1, min(4 if columns > 1 else 2, int(13 * WIDTH * columns / letters)))
    figure.legend(handles=handles, loc="outside lower center", ncols=beside, fontsize=9, frameon=False)
    # Laid out once: doing it again for every format moves things a little each time, and takes time.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def draw(
    charts: Sequence[Chart], folder: Path, prefix: str = "", progress: Callable[[str, int, int], None] | None = None
) -> list[Path]:
    """Every variant of every chart as PREFIX-chart-variant.svg and .png in ``folder``."""
    folder.mkdir(exist_ok=True)
    jobs = [(chart, variant) for chart in charts for variant in chart.variants()]
    written = []
    for number, (chart, variant) in enumerate(jobs):
        drawn = picture(chart, variant)
        name = "-".join(filter(None, [prefix, chart.key, *variant.replace("_", "-").split("/")]))
        written += [save(drawn, folder / f"{name}.{kind}") for kind in ("svg", "png")]
        if progress is not None:
            progress("figures", number + 1, len(jobs))
    return written


def save(figure: Figure, path: Path) -> Path:
    """PNG or SVG by suffix, whole or not at all, without time stamps and random names: equal results give equal files."""
    from matplotlib import rc_context

    kind = path.suffix[1:]
    with rc_context({"svg.hashsalt": "fedbilevel"}), storage.draft(path) as draft:
        figure.savefig(draft, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return path


def _look(chart: Chart, series: int, size: float) -> dict[str, Any]:
    style = chart.styles[series]
    name = MARKERS[style.marker]
    return {
        "color": SERIES["light"][style.slot],
        "marker": name,
        "markersize": size * (1.35 if name == "*" else 1),
        "markeredgecolor": "white",
        "markeredgewidth": 0.4,
    }


def _dashes(chart: Chart, series: int) -> Any:
    dashes = DASHES[chart.styles[series].dash]
    return (0.0, tuple(map(float, dashes.split()))) if dashes else "solid"


def _height(panel: Panel) -> float:
    return 1.1 + GROUP_HEIGHT * len(panel.groups) + ROW_HEIGHT * len(panel.marks)


def _axis(place: Axes, panel: Panel, which: Literal["x", "y"]) -> None:
    axis, (low, high) = panel.x if which == "x" else panel.y, panel.domain(which)
    values = ticks(low, high, tick_count(axis), axis.log)
    drawn = place.xaxis if which == "x" else place.yaxis
    place.set(**{f"{which}scale": "log" if axis.log else "linear", f"{which}lim": (low, high)})
    drawn.set_ticks(values, tick_labels(values, axis.format, axis.log), fontsize=8)
    drawn.set_ticks([], minor=True)
    drawn.set_label_text(_plain(axis.label), fontsize=9)
    place.grid(True, axis=which, color="0.9", linewidth=0.8)
    place.set_axisbelow(True)


def _plane(place: Axes, chart: Chart, panel: Panel) -> None:
    for line in panel.lines:
        look, dashes = _look(chart, line.series, 6), _dashes(chart, line.series)
        every = [] if panel.marks else (line.series % 4, max(1, len(line.x) // 4))
        place.plot(line.x, line.y, **look, linewidth=1.4, markevery=every, linestyle=dashes)
        if line.low:
            place.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.14, linewidth=0)
    for mark in panel.visible():
        look = _look(chart, mark.series, 7)
        if math.isfinite(mark.x_low):
            place.plot([mark.x_low, mark.x_high], [mark.y, mark.y], color=look["color"], linewidth=1)
        if math.isfinite(mark.y_low):
            place.plot([mark.x, mark.x], [mark.y_low, mark.y_high], color=look["color"], linewidth=1)
        place.plot([mark.x], [mark.y], **look)
    if panel.baseline is not None:
        place.axvline(panel.baseline, color="0.4", linewidth=0.9, linestyle=":")
    place.text(0.02, 0.02, _plain(panel.note), transform=place.transAxes, fontsize=7, color="0.3")
    _axis(place, panel, "x")
    _axis(place, panel, "y")


def _rows(place: Axes, chart: Chart, panel: Panel) -> None:
    y, across = 0.0, place.get_yaxis_transform()
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    heights: dict[int, list[tuple[float, Mark]]] = {}
    for number, name in enumerate(panel.groups):
        marks = [mark for mark in panel.visible() if int(mark.y) == number]
        if not marks:
            continue
        place.text(0.01, y + 0.4 * GROUP_HEIGHT, _plain(name), transform=across, fontsize=8, va="center", bbox=box)
        y += GROUP_HEIGHT
        for mark in marks:
            heights.setdefault(mark.series, []).append((y, mark))
            y += ROW_HEIGHT
        y += 0.5 * ROW_HEIGHT
    start = panel.baseline if panel.baseline is not None else 0.0
    for series, placed in heights.items():
        look, at, values = _look(chart, series, 5), [height for height, _ in placed], [mark.x for _, mark in placed]
        if panel.bars:
            widths = [x - start for x in values]
            place.barh(at, widths, left=start, height=0.6 * ROW_HEIGHT, color=look["color"], alpha=0.35)
        place.hlines(at, [m.x_low for _, m in placed], [m.x_high for _, m in placed], colors=look["color"], linewidth=1)
        place.plot(values, at, linestyle="none", **look)
    _axis(place, panel, "x")
    if panel.baseline is not None:
        place.axvline(panel.baseline, color="0.4", linewidth=0.8)
    place.set_yticks([])
    place.set_ylim(y, -0.3 * GROUP_HEIGHT)


def _plain(text: str) -> str:
    """A dollar sign from the data starts no formula."""
    return text.replace("$", r"\$")
