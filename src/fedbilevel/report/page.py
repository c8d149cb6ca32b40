"""The report of a run, made from its folder without rerunning anything: one HTML file that needs nothing else.

Every text goes through Jinja2, which escapes it; `templates/page.html` is the page, `templates/parts.html` what it is made of.
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
from fedbilevel.report import bench, latex, studies
from fedbilevel.report.charts import Chart, Listing
from fedbilevel.report.figures import figures
from fedbilevel.report.reading import WORDS, Reading, reading_of
from fedbilevel.report.scales import short, shown, shown_spread
from fedbilevel.report.styles import GLYPHS, colours
from fedbilevel.report.summary import Estimates, estimates
from fedbilevel.report.svg import FRAME, pictures
from fedbilevel.runs import Run, read

if TYPE_CHECKING:
    from jinja2 import Environment

TITLES = {
    "table1": "Table 1, measured",
    "fit": "A fair federated fit",
    "federate": "A fair federated fit over sites",
    "bench": "Federated bilevel methods compared",
    "compare": "Runs side by side",
    "rates": "The convergence theorems, measured",
    "fairness": "Fairness over many splits",
}
VERDICTS = {
    "best": ("★", "best, beyond noise"),
    "lead": ("☆", "best mean, not beyond noise"),
    "tied": ("≈", "not beyond noise from the best"),
}
FORMATS = ("svg", "png")


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
    def estimates(self) -> Estimates:
        return estimates(self.reading, self.reading.main)

    @cached_property
    def further(self) -> Estimates:
        return estimates(self.reading, self.reading.more)


def page_of(run: Run) -> Page:
    """What the page of ``run`` shows; a run without results is refused."""
    if not len(run.rows):
        raise ValueError(f"{run.path} holds no results yet: let the run finish at least one part.")
    if run.command == "bench":
        told = reading_of(bench.comparable(run))
        return Page(run, told, figures(told), template="bench.html" if len(run.history) else "", extra=bench.extra(run))
    told = reading_of(run)
    tables = [Listing.first(name, table) for name, table in run.others.items() if len(table)]
    return Page(run, told, studies.charts(told) if run.command in ("rates", "fairness") else figures(told), tables)


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
    texts = {"page.html": render(told), "table.tex": latex.table(told.reading, told.estimates)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            storage.write(folder / name, text)
        written = [folder / name for name in texts]
        return [*written, *(_draw(told.charts, folder / "figures", progress) if drawn else ())]
    except OSError as error:
        raise ValueError(
            f"Cannot write the report to {folder} ({error.strerror or error}); what was there before is intact."
        ) from error


def _draw(charts: list[Chart], folder: Path, progress: Callable[[str, int, int], None] | None) -> list[Path]:
    from fedbilevel.report.paper import picture, save

    folder.mkdir(exist_ok=True)
    jobs = [(chart, variant) for chart in charts for variant in chart.variants()]
    written = []
    for number, (chart, variant) in enumerate(jobs):
        drawn = picture(chart, variant)
        name = "-".join([chart.key, *filter(None, variant.replace("_", "-").split("/"))])
        written += [save(drawn, folder / f"{name}.{kind}") for kind in FORMATS]
        if progress is not None:
            progress("figures", number + 1, len(jobs))
    return written


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
