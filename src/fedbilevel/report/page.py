"""The report of a run, made from its folder without rerunning anything: one HTML file that needs nothing else, and its main
table in LaTeX.

Every text of the page goes through Jinja2, which escapes it; `templates/page.html` is the page, `templates/parts.html` what it
is made of.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel import storage
from fedbilevel._version import __version__
from fedbilevel.report.brief import TABLES, TERMS, Brief, brief_of
from fedbilevel.report.charts import GLYPHS, Chart, Listing, colours
from fedbilevel.report.figures import figures
from fedbilevel.report.reading import WORDS, Estimate, Estimates, Reading, estimates, reading_of, title_of
from fedbilevel.report.scales import short, shown, shown_spread
from fedbilevel.report.svg import FRAME, pictures
from fedbilevel.runs import Run, read

if TYPE_CHECKING:
    from jinja2 import Environment

TITLES = {
    "table1": "Table 1, measured",
    "fit": "A fair federated fit",
    "federate": "A fair federated fit over sites",
    "tune": "Tuned across sites",
    "audit": "Predictions, audited",
    "bench": "Federated bilevel methods compared",
    "compare": "Runs side by side",
    "rates": "The convergence theorems, measured",
    "fairness": "Fairness over many splits",
    "tables": "Fairness over tables",
}
VERDICTS = {
    "best": ("best", "best, beyond noise"),
    "lead": ("first", "best mean, not beyond noise"),
    "tied": ("≈", "not beyond noise from the best"),
    "untold": ("?", "one run only: nothing can be said about noise"),
}
"""In words: every sign that would do is the marker of some method."""
SECONDARY = ("weights", "convergence", "costs", "tables", "run", "reproduce")
"""Sections that a narrow screen shows folded."""
_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "−": r"$-$",
}  # fmt: skip


@dataclass(frozen=True)
class Page:
    """What a page shows of a run: its results, its figures, its further tables.

    ``template`` says how ``extra``, what only pages of one command have, is shown below the results.
    """

    run: Run
    reading: Reading
    charts: list[Chart]
    tables: Sequence[Listing] = ()
    template: str = ""
    extra: Any = None

    @property
    def heading(self) -> str:
        title = TITLES.get(self.run.command, self.run.command)
        names = dict.fromkeys(block.key[0] for block in self.reading.blocks)
        named = [WORDS.get(name, name) for name in names if name]
        return f"{title}: {', '.join(named)}" if named and len(named) <= 4 else title

    @cached_property
    def brief(self) -> Brief | None:
        return brief_of(self.run)

    @cached_property
    def estimates(self) -> Estimates:
        return estimates(self.reading, self.reading.main)

    @cached_property
    def further(self) -> Estimates:
        return estimates(self.reading, self.reading.shown_at("more"))


def page_of(run: Run) -> Page:
    """What the page of ``run`` shows; a run without results is refused."""
    if not len(run.rows):
        raise ValueError(f"{run.path} holds no results yet: let the run finish at least one part.")
    if run.command == "bench":
        from fedbilevel.report import bench

        told = reading_of(bench.comparable(run))
        return Page(run, told, figures(told), template="bench.html" if len(run.history) else "", extra=bench.extra(run))
    told = reading_of(run)
    tables = [Listing.first(name, table) for name, table in run.others.items()
              if len(table) and name not in TABLES]  # fmt: skip
    drawn = figures
    if run.command == "tune":
        from fedbilevel.report.tuning import charts as drawn
    elif run.command in ("rates", "fairness", "tables") or {"calibration", "frontier"} & set(run.others):
        from fedbilevel.report.studies import charts as drawn
    return Page(run, told, drawn(told), tables)


def page(run: Run) -> str:
    """The whole page of a run as HTML."""
    return render(page_of(run))


def render(page: Page) -> str:
    """A page as HTML."""
    from markupsafe import Markup

    program = _asset("page.js")
    about = {
        "cases": [list(block.key) for block in page.reading.blocks],
        "series": len(page.reading.names),
        "light": colours("light"),
        "frame": FRAME,
    }
    ours = {"plot_css": _asset("plot.css"), "page_css": _asset("page.css"), "program": program}
    return environment().get_template("page.html").render(
        page=page, about=about, frame=FRAME, verdicts=VERDICTS, version=__version__, known=WORDS, glyphs=GLYPHS,
        secondary=SECONDARY, terms=TERMS,
        themes={"light": colours("light"), "dark": colours("dark")},
        digest=base64.b64encode(hashlib.sha256(program.encode()).digest()).decode(),
        **{name: Markup(text) for name, text in ours.items()},
    )  # fmt: skip


@cache
def environment() -> Environment:
    """How templates are read and what they may call; everything they show is escaped."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("fedbilevel.report"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {"shown": shown, "short": short, "spread": shown_spread, "finite": math.isfinite}
    made.filters |= {"words": _words, "pictures": pictures}
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
    return made


def write_report(
    run: Run, out: Path | None = None, *, drawn: bool = False, progress: Callable[[str, int, int], None] | None = None
) -> list[Path]:
    """page.html and table.tex, with ``drawn`` also figures/*.svg and *.png, in ``out`` (default: the run's folder)."""
    folder = run.path if out is None else out
    told = page_of(run)
    texts = {"page.html": render(told), "table.tex": latex_table(told.reading, told.estimates)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            storage.write(folder / name, text)
        written = [folder / name for name in texts]
        if drawn:
            from fedbilevel.report.paper import draw

            written += draw(told.charts, folder / "figures", progress=progress)
        return written
    except OSError as error:
        raise ValueError(
            f"Cannot write the report to {folder} ({error.strerror or error}); what was there before is intact."
        ) from error


def write(folder: str | Path) -> Path:
    """Write the page and the LaTeX table of the run in ``folder`` beside its tables; returns the page's file."""
    return write_report(read(folder))[0]


def _asset(name: str) -> str:
    return resources.files("fedbilevel.report").joinpath("assets", name).read_text(encoding="utf-8")


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_words(entry)}" for name, entry in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def escaped(text: str) -> str:
    r"""Any text as LaTeX shows it.

    >>> escaped("50% of a_b & c")
    '50\\% of a\\_b \\& c'
    """
    return "".join(_SPECIAL.get(letter, letter) for letter in " ".join(text.split()))


def latex_table(reading: Reading, estimates: Estimates) -> str:
    """The main table for a paper: LaTeX with booktabs, in the layout of the paper's Table 1.

    Bodies by the first facet, side by side by the others; the printed figures below ours where there are any.
    """
    metrics, blocks = reading.main, reading.blocks
    sides = list(dict.fromkeys(block.key[1:] for block in blocks))
    lines = [
        "% Needs \\usepackage{booktabs}. Mean and standard deviation over seeds.",
        "% Bold: best, beyond noise (paired by seed, Bonferroni 95 %). Underlined: best mean, not beyond noise.",
        rf"\begin{{tabular}}{{ll{'r' * (len(metrics) * len(sides))}}}",
        r"\toprule",
    ]
    if any(sides):
        titles = [rf"\multicolumn{{{len(metrics)}}}{{c}}{{{escaped(title_of(side))}}}" for side in sides]
        lines.append(f" & & {' & '.join(titles)} " + r"\\")
        ends = [(3 + place * len(metrics), 2 + (place + 1) * len(metrics)) for place in range(len(sides))]
        lines.append(" ".join(rf"\cmidrule(lr){{{first}-{last}}}" for first, last in ends))
    heads = [reading.word(reading.facets[0]), reading.word(reading.series), *(m.short for _ in sides for m in metrics)]
    lines.append(" & ".join(map(escaped, heads)) + r" \\")
    for first in dict.fromkeys(block.key[0] for block in blocks):
        lines.append(r"\midrule")
        beside = {block.key[1:]: block for block in blocks if block.key[0] == first}
        columns = [(beside.get(side), metric) for side in sides for metric in metrics]
        label = escaped(WORDS.get(first, first))
        for number, name in enumerate(reading.names):
            ours = [_number(estimates.at(block, number, metric)) if block else "" for block, metric in columns]
            if any(ours):
                lines.append(" & ".join([label, escaped(name), *ours]) + r" \\")
                label = ""
                figures = [block and reading.published(block, name, metric.column) for block, metric in columns]
                printed = [
                    rf"\textit{{{short(figure[0], 4)}\,$\pm$\,{short(figure[1], 4)}}}" if figure else ""
                    for figure in figures
                ]
                if any(printed):
                    lines.append(" & ".join(["", r"\quad\textit{in the paper}", *printed]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _number(told: Estimate | None) -> str:
    if told is None:
        return ""
    kind = told.metric.format
    text = escaped(shown(told.mean, kind))
    if math.isfinite(told.sd):
        text += rf"\,$\pm$\,{escaped(shown_spread(told.mean, told.sd, kind))}"
    return {"best": rf"\textbf{{{text}}}", "lead": rf"\underline{{{text}}}"}.get(told.verdict, text)
