"""Writing what a report consists of: the page, the LaTeX table, figures.  Each file appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fedbilevel.report.bench import page as bench_page
from fedbilevel.report.latex import latex_table
from fedbilevel.report.page.figures import figures
from fedbilevel.report.page.html import render
from fedbilevel.report.reading import Study, study
from fedbilevel.runs import Run

FORMATS = ("svg", "png")


def told_by(run: Run) -> tuple[Study, str]:
    """The run as its page reads it, and what the page of its command has beyond every page."""
    if run.command == "bench":
        return study(bench_page.comparable(run)), bench_page.section(run)
    return study(run), ""


def write_report(
    run: Run, out: Path | None = None, *, drawn: bool = False, progress: Callable[[str, int, int], None] | None = None
) -> list[Path]:
    """page.html and table.tex, with ``drawn`` also figures/*.svg and *.png, in ``out`` (default: the run's folder)."""
    folder = run.path if out is None else out
    told, extra = told_by(run)
    charts = figures(told) if told.cases else []
    html, table = render(told, charts, extra), latex_table(told)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [_text(folder / "page.html", html), _text(folder / "table.tex", table)]
        if drawn:
            from fedbilevel.report.draw_matplotlib import picture
            from fedbilevel.report.figures import save_figure

            (folder / "figures").mkdir(exist_ok=True)
            jobs = [(chart, variant) for chart in charts for variant in chart.variants()]
            for number, (chart, variant) in enumerate(jobs):
                shown = picture(chart, variant)
                name = "-".join([chart.key, *filter(None, variant.replace("_", "-").split("/"))])
                files = [folder / "figures" / f"{name}.{kind}" for kind in FORMATS]
                written += [_whole(file, partial(save_figure, shown)) for file in files]
                if progress is not None:
                    progress("figures", number + 1, len(jobs))
    except OSError as error:
        raise ValueError(
            f"Cannot write the report to {folder} ({error.strerror or error}); what was there before is intact."
        ) from error
    return written


def write_page(file: Path, html: str) -> Path:
    """A page under any name."""
    try:
        return _text(file, html)
    except OSError as error:
        raise ValueError(f"Cannot write {file} ({error.strerror or error}).") from error


def _text(target: Path, text: str) -> Path:
    return _whole(target, lambda path: path.write_text(text, encoding="utf-8"))


def _whole(target: Path, save: Callable[[Path], Any]) -> Path:
    draft = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        save(draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return target
