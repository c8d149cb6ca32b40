"""The report of a run, made from its folder without rerunning anything."""

from __future__ import annotations

from pathlib import Path

from fedbilevel.report.page.files import told_by, write_report
from fedbilevel.report.page.html import render
from fedbilevel.runs import Run, read


def page(run: Run) -> str:
    """The whole page as HTML."""
    told, extra = told_by(run)
    return render(told, extra=extra)


def write(folder: str | Path) -> Path:
    """Write the page and the LaTeX table of the run in ``folder`` beside its tables; returns the page's file."""
    return write_report(read(folder))[0]
