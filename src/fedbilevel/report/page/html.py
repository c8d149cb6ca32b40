"""The page of a run: one HTML file that needs nothing else, made from a run folder without rerunning anything."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from importlib import resources
from string import Template

from fedbilevel._version import __version__
from fedbilevel.report.charts import Chart, Panel, columns_for
from fedbilevel.report.draw import data, folded, script_json, shapes, spoken, svg
from fedbilevel.report.page.figures import figures
from fedbilevel.report.page.parts import how_sure
from fedbilevel.report.page.tables import VERDICTS, glyph_icon, pairs, results_table, table_behind
from fedbilevel.report.reading import WORDS, Study
from fedbilevel.report.styles import LIGHT, SERIES_LIGHT, variables
from fedbilevel.report.summary import cells

TITLES = {
    "table1": "Table 1, measured",
    "fit": "A fair federated fit",
    "federate": "A fair federated fit over sites",
    "bench": "Federated bilevel methods compared",
    "compare": "Runs side by side",
}


def render(read: Study, charts: list[Chart] | None = None, extra: str = "") -> str:
    """A page from a study; ``charts`` replaces its figures, ``extra`` is trusted HTML that follows the main table."""
    if not read.cases:
        raise ValueError(f"{read.run.path} holds no results yet: let the run finish at least one part.")
    charts = figures(read) if charts is None else charts
    sections = [("results", "Results", _results(read) + extra)]
    sections += [(chart.key, chart.title, figure(chart)) for chart in charts]
    sections += [("run", "What was run", _what(read)), ("reproduce", "How to reproduce it", _reproduce(read))]
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(title)}</h2>{html}</section>'
        for key, title, html in sections
    )
    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    about = {
        "series": [
            {"name": name, "slot": style.slot, "marker": style.marker}
            for name, style in zip(read.names, read.styles, strict=True)
        ],
        "cases": [list(case.key) for case in read.cases],
        "light": {**LIGHT, **{f"s{number}": colour for number, colour in enumerate(SERIES_LIGHT)}},
    }
    return Template(_asset("page.html")).substitute(
        title=escape(heading(read)),
        heading=escape(heading(read)),
        lead=escape(_lead(read)),
        notice=_notice(read),
        nav="".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, title, _ in sections),
        filters=_filters(read),
        body=shapes() + body,
        version=escape(__version__),
        light=variables("light"),
        dark=variables("dark"),
        slots="".join(f".c{number}{{color:var(--s{number})}}" for number in range(len(SERIES_LIGHT))),
        plot_css=_asset("plot.css"),
        page_css=_asset("page.css"),
        about=script_json(about),
        script=script,
        digest=digest,
    )


def heading(read: Study) -> str:
    title = TITLES.get(read.run.command, read.run.command)
    datasets = list(dict.fromkeys(case.key[0] for case in read.cases))
    named = [WORDS.get(name, name) for name in datasets if name]
    return f"{title}: {', '.join(named)}" if named and len(named) <= 4 else title


def figure(chart: Chart) -> str:
    """A chart with its controls, panels and the table behind it."""
    panels = "".join(_panel(chart, *panels, number) for number, panels in enumerate(folded(chart)))
    tools = "".join(
        f'<fieldset class="choice"><legend>{escape(choice.label)}</legend>'
        + "".join(
            f'<label><input type="radio" name="{chart.key}-{place}" value="{escape(key)}"{" checked" if not number else ""}>'
            f"<span>{escape(text)}</span></label>"
            for number, (key, text) in enumerate(choice.options)
        )
        + "</fieldset>"
        for place, choice in enumerate(chart.choices)
        if len(choice.options) > 1
    )
    tools += "".join(
        f'<label class="layer"><input type="checkbox" data-layer="{escape(key)}"><span>{escape(text)}</span></label>'
        for key, text in chart.layers
    )
    save = "".join(
        f'<button type="button" class="save" data-save="{kind}" aria-label="Save {escape(chart.title)} as {kind.upper()}">'
        f"{kind.upper()}</button>"
        for kind in ("svg", "png")
    )
    legend = "".join(
        f'<button type="button" aria-pressed="true" data-legend="{number}">{glyph_icon(chart.styles[number])}'
        f"{escape(chart.names[number])}</button>"
        for number in chart.used()
    )
    open_ = " open" if chart.key == "costs" else ""
    return (
        f'<figure class="chart" data-chart="{escape(chart.key)}" data-kind="{chart.kind}">'
        f'<figcaption>{escape(chart.note)}</figcaption><div class="tools">{tools}<span class="saves">Save {save}</span></div>'
        f'<div class="legend" role="group" aria-label="Show or hide in this figure">{legend}</div>'
        f'<div class="panels n{columns_for(chart.panels)}">{panels}</div>'
        f'<p class="empty" hidden>Nothing is left to show: widen the filter.</p>'
        f"<details{open_}><summary>Data behind this figure</summary>{table_behind(chart)}</details></figure>"
    )


def _panel(chart: Chart, panel: Panel, others: list[Panel], number: int) -> str:
    identity = f"{chart.key}-{number}"
    label = escape(f"{spoken(chart, panel)} Arrow keys step through the values.")
    return (
        f'<div class="panel" tabindex="0" role="group" aria-roledescription="figure panel" data-case="{panel.case}" '
        f'data-variant="{escape(panel.variant)}" aria-label="{label}">'
        f'{svg(chart, panel, identity)}<script type="application/json">{data(panel, others)}</script></div>'
    )


def _results(read: Study) -> str:
    found = cells(read, read.main)
    many = any(cell.seeds > 1 for cell in found.values())
    caption = "Mean ± standard deviation over seeds [95 % interval of the mean]" if many else "One seed [95 % interval]"
    html = results_table(read, read.main, found, caption)
    used = {cell.verdict for cell in found.values()}
    signs = " ".join(
        f'<span class="key"><b aria-hidden="true">{sign}</b> {words}</span>'
        for verdict, (sign, words) in VERDICTS.items()
        if verdict in used
    )
    noise = ""
    if used & {"best", "tied"}:
        noise = (
            "Noise is judged on differences seed by seed: the best of a column against each other method, at 95 % for all of "
            "these comparisons together."
        )
    elif "lead" in used:
        noise = "With one seed nothing can be said here about noise."
        if "gap_difference_low" in read.rows.columns:
            noise += " The differences below have intervals of their own."
    html += f'<p class="note">{signs} {escape(noise)} {escape(how_sure(read))}</p>'
    if read.more:
        more = results_table(read, read.more, cells(read, read.more), "Further measures")
        html += f"<details><summary>Further measures</summary>{more}</details>"
    return html


def _lead(read: Study) -> str:
    rows, run = read.rows, read.run
    seeds = int(rows.groupby([*read.facets, read.series])["seed"].nunique().max())
    parts = [
        _counted(len(read.names), read.word(read.series).lower()),
        _counted(len(read.cases), "case"),
        _counted(seeds, "seed"),
        _counted(len(rows), "run"),
    ]
    return f"{', '.join(parts)}. Made by fedbilevel {run.version}, begun {run.created.replace('T', ' ')}."


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _notice(read: Study) -> str:
    if read.run.status == "complete":
        return ""
    return '<p class="notice" role="note">This run is not finished: the page shows the parts that are.</p>'


def _filters(read: Study) -> str:
    fields = []
    for place, facet in enumerate(read.facets):
        values = list(dict.fromkeys(case.key[place] for case in read.cases))
        if len(values) > 1:
            chips = "".join(
                f'<label class="chip"><input type="checkbox" checked data-facet="{place}" value="{escape(value)}">'
                f"<span>{escape(WORDS.get(value, value))}</span></label>"
                for value in values
            )
            fields.append(f"<fieldset><legend>{escape(read.word(facet))}</legend>{chips}</fieldset>")
    if len(read.names) > 1:
        chips = "".join(
            f'<label class="chip"><input type="checkbox" checked data-filter-series="{number}">'
            f"<span>{glyph_icon(read.styles[number])}{escape(name)}</span></label>"
            for number, name in enumerate(read.names)
        )
        fields.append(f"<fieldset><legend>{escape(read.word(read.series))}</legend>{chips}</fieldset>")
    if not fields:
        return ""
    return (
        '<form class="filters" aria-label="Filter of table and figures">'
        f'{"".join(fields)}<button type="reset">Show all</button></form>'
    )


def _what(read: Study) -> str:
    return pairs((name.replace("_", " "), value) for name, value in read.run.configuration.items() if name != "paper")


def _reproduce(read: Study) -> str:
    run = read.run
    line = (
        f'<pre tabindex="0"><code>{escape(run.line)}</code></pre>'
        if run.line
        else "<p>The run does not say its command.</p>"
    )
    same = "<p>The same version on the same kind of processor gives the same numbers. Seeds are part of the options above.</p>"
    return line + same + pairs([("fedbilevel", run.version), ("begun", run.created), *run.environment.items()])


def _asset(name: str) -> str:
    return resources.files("fedbilevel.report").joinpath("assets", name).read_text(encoding="utf-8")
