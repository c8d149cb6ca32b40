"""Tables of a page as HTML: the main one, further measures, what stands behind a figure, plain lists."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import numpy as np

from fedbilevel.report.charts import Chart
from fedbilevel.report.draw import glyph
from fedbilevel.report.reading import Case, Metric, Study
from fedbilevel.report.scales import short, shown, shown_spread
from fedbilevel.report.styles import Style
from fedbilevel.report.summary import Cell

VERDICTS = {
    "best": ("★", "best, beyond noise"),
    "lead": ("☆", "best mean, not beyond noise"),
    "tied": ("≈", "not beyond noise from the best"),
}


def glyph_icon(style: Style) -> str:
    """A series' marker in its colour, as a small picture beside its name."""
    return f'<svg class="icon c{style.slot}" viewBox="-7 -7 14 14" aria-hidden="true">{glyph(style, 0, 0)}</svg>'


def results_table(study: Study, columns: list[Metric], found: dict[tuple[int, int, str], Cell], caption: str) -> str:
    """One body per case, one row per series; the paper's figures beside ours where there are any."""
    beside = {metric.column for metric in columns if _published(study, metric)}
    heads = [f'<th role="columnheader" scope="col">{escape(study.word(study.series))}</th>']
    for metric in columns:
        arrow = "↑" if metric.better == "higher" else "↓"
        said = f'<span aria-hidden="true"> {arrow}</span><span class="hidden"> ({metric.better} is better)</span>'
        heads.append(f'<th role="columnheader" scope="col">{escape(metric.short)}{said}</th>')
        if metric.column in beside:
            heads.append('<th role="columnheader" scope="col" class="paper">in the paper</th>')
    bodies = "".join(_body(study, case, columns, found, beside, len(heads)) for case in study.cases)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="results" role="table">'
        f'<caption>{escape(caption)}</caption><thead role="rowgroup"><tr role="row">{"".join(heads)}</tr></thead>'
        f"{bodies}</table></div>"
    )


def _published(study: Study, metric: Metric) -> bool:
    return any(study.published(case, name, metric.column) for case in study.cases for name in study.names)


def _body(
    study: Study,
    case: Case,
    columns: list[Metric],
    found: dict[tuple[int, int, str], Cell],
    beside: set[str],
    width: int,
) -> str:
    rows = []
    for number, name in enumerate(study.names):
        if not any((case.number, number, metric.column) in found for metric in columns):
            continue
        cells = [f'<th role="rowheader" scope="row">{glyph_icon(study.styles[number])}{escape(name)}</th>']
        for metric in columns:
            cells.append(_cell(found.get((case.number, number, metric.column)), metric))
            if metric.column in beside:
                printed = study.published(case, name, metric.column)
                text = f"{short(printed[0], 4)} ± {short(printed[1], 4)}" if printed else "–"
                cells.append(f'<td role="cell" class="paper" data-label="in the paper">{text}</td>')
        rows.append(f'<tr role="row" data-case="{case.number}" data-series="{number}">{"".join(cells)}</tr>')
    title = f'<th role="rowheader" scope="rowgroup" colspan="{width}">{escape(case.title)}</th>'
    head = f'<tr role="row" class="case" data-case="{case.number}">{title}</tr>'
    return f'<tbody role="rowgroup" data-case="{case.number}">{head}{"".join(rows)}</tbody>'


def _cell(cell: Cell | None, metric: Metric) -> str:
    label = f'data-label="{escape(metric.short)}"'
    if cell is None:
        return f'<td role="cell" {label}>–</td>'
    text = f"<b>{shown(cell.mean, metric.format)}</b>"
    if np.isfinite(cell.sd):
        text += f" ± {shown_spread(cell.mean, cell.sd, metric.format)}"
    if cell.verdict:
        sign, words = VERDICTS[cell.verdict]
        text += (
            f' <span class="sign" title="{words}" aria-hidden="true">{sign}</span><span class="hidden"> {words}</span>'
        )
    if np.isfinite(cell.low):
        text += (
            f' <small class="interval">[{shown(cell.low, metric.format)}, {shown(cell.high, metric.format)}]</small>'
        )
    return f'<td role="cell" class="{cell.verdict or "other"}" {label}><span class="number">{text}</span></td>'


def table_behind(chart: Chart) -> str:
    """The numbers of a figure, for those who read rather than look."""
    columns = [str(column) for column in chart.table.columns]
    head = "".join(f'<th scope="col">{escape(column[:1].upper() + column[1:])}</th>' for column in columns)
    rows = []
    for values, (case, series) in zip(
        chart.table.fillna("").itertuples(index=False), chart.table_rows, strict=True
    ):  # a stage that only some methods have is empty for the others
        cells = "".join(f"<td>{escape(str(value))}</td>" for value in values)
        rows.append(f'<tr data-case="{case}" data-series="{series}">{cells}</tr>')
    label = f"Data behind the figure: {chart.title}"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table class="listing">'
        f'<caption class="hidden">{escape(label)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def pairs(items: Iterable[tuple[str, object]]) -> str:
    """A list of names and values."""
    listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(_text(value))}</dd></div>" for name, value in items)
    return f'<dl class="pairs">{listed}</dl>'


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_text(one) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_text(one)}" for name, one in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
