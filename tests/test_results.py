"""The numbers of the Results pages are those that `python -m docsbuild.results` makes from what runs left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from docsbuild import results

ROOT = Path(__file__).parents[1]
DEFINED = {
    "table1.md": "What the paper leaves open",
    "study-protocol.md": "",
    "results/images.md": "What is run",
    "results/fairness.md": "What was tried for",
}
"""Tables of words, and notes of a search whose runs nobody kept: pages, and the section where they stand."""


def test_pages_are_as_their_runs_say():
    done = subprocess.run(
        [sys.executable, "-m", "docsbuild.results", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_no_table_of_a_results_page_is_typed():
    """Outside of the comments there is no line of a table with a decimal number in it."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    pages = next(part["Results"] for part in nav if "Results" in part)
    names = {page if isinstance(page, str) else next(iter(page.values())) for page in pages}
    assert len(names) >= 14
    for name in sorted(names):
        text = results.MARK.sub("", (ROOT / "docs" / name).read_text(encoding="utf-8"))
        text = text.split(f"## {DEFINED[name]}")[0] if name in DEFINED else text
        typed = [line for line in text.splitlines() if line.startswith("|") and re.search(r"\d\.\d|[^\w]\.\d", line)]
        assert typed == [], name


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [(0.848, ".3f", ".848"), (-0.0123, "+.3f", "−.012"), (12.5, ".1f", "12.5"), (0.2, ".0%", "20%")],
)
def test_numbers_are_printed_as_in_our_tables(value, form, text):
    assert format(results.Number(value), form) == text


def test_a_table_is_made_of_the_rows_that_meet_the_condition(tmp_path, monkeypatch):
    (tmp_path / "runs.csv").write_text("method,gap,low\na,0.5,0.25\nb,0.125,\n", encoding="utf-8")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    page = """before
<!-- made: table runs.csv "gap < 1" "method = {method}" "gap = {gap:.2f}" "k = 2 = from {low:.2f}" -->
stale
<!-- end -->
a gap of <!-- made: table runs.csv "" "x = y" -->old<!-- end -->"""
    made = results.written(page.rsplit("\n", 1)[0])
    assert (
        made
        == """before
<!-- made: table runs.csv "gap < 1" "method = {method}" "gap = {gap:.2f}" "k = 2 = from {low:.2f}" -->
| method | gap | k = 2 |
| --- | ---: | --- |
| a | .50 | from .25 |
| b | .12 |  |
<!-- end -->"""
    )
