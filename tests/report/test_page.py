"""The page as a text: its structure, its numbers, and that nothing from the data becomes markup."""

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from fedbilevel.report.comparison import compare
from fedbilevel.report.figures import figures
from fedbilevel.report.page import escaped, latex_table, page, write, write_report
from fedbilevel.report.paper import picture
from fedbilevel.report.reading import estimates, reading_of
from fedbilevel.report.scales import short
from fedbilevel.report.studies import charts as charts_of
from fedbilevel.report.svg import glyph_places
from fedbilevel.runs import RunFolder, read
from tests.report.folders import METHODS, bench, fairness, fit, rates, table1

EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>&\"'"
VOID = {"meta", "link", "input", "br", "img"}


class Tree(HTMLParser):
    """Elements in order, with their texts; unbalanced tags are an error."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag, **wanted):
        return [have for name, have in self.elements if name == tag and wanted.items() <= have.items()]


def sections(html):
    return [have["id"] for have in Tree(html).all("section")]


def panel_of(chart, variant, block=0):
    return next(panel for panel in chart.panels if (panel.variant, panel.block) == (variant, block))


def part_of(frame, **keys):
    """The rows of a table with these values in these columns."""
    return frame[(frame[list(keys)] == pd.Series(keys)).all(axis=1)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return table1(tmp_path_factory.mktemp("runs") / "table1", seeds=3)


@pytest.fixture(scope="module")
def charts(run):
    return {chart.key: chart for chart in figures(reading_of(run))}


@pytest.fixture(scope="module")
def html(run):
    return page(run)


def test_one_file_that_asks_for_nothing(html):
    tree = Tree(html)
    for name, have in tree.elements:
        for attribute in ("src", "href", "srcset", "action", "data"):
            value = have.get(attribute) or "#"
            assert value.startswith("#") or (name, value) == ("link", "data:,"), (name, have)
    assert not re.search(r"@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", html)
    assert len(html.encode()) < 1_000_000


def test_only_our_script_may_run(html):
    policy = next(have["content"] for have in Tree(html).all("meta") if have.get("http-equiv"))
    script = re.search(r"<script>(.*?)</script>", html, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_sections_headings_and_labels(html):
    tree = Tree(html)
    wanted = "brief results plane differences rates weights convergence costs run reproduce"
    assert " ".join(sections(html)) == wanted
    identities = [have["id"] for _, have in tree.elements if "id" in have]
    assert len(identities) == len(set(identities))
    for have in tree.all("a"):
        assert have["href"][1:] in identities
    for have in tree.all("section"):
        assert have["aria-labelledby"] in identities
    for have in tree.all("svg"):
        assert have.get("aria-hidden") == "true" or (have["role"] == "img" and have["aria-label"])
    assert len(tree.all("figure")) == 6
    assert html.count("Data behind this figure") == 6
    assert tree.all("html", lang="en")


def test_numbers_are_those_of_the_rows(html, run):
    table = html[html.index('<table class="results"') : html.index("</table>")]
    for (dataset, split, method), own in run.rows.groupby(["dataset", "split", "method"]):
        for column in ("test_accuracy", "train_gap", "test_gap"):
            mean, sd = short(own[column].mean(), 4), short(own[column].std(ddof=1), 4)
            assert f"<b>{mean}</b> ± {sd}" in table, (dataset, split, method, column)
    assert ".8239 ± .0167" in table  # the paper's
    assert table.count('role="rowheader" scope="row"') == 2 * 2 * len(METHODS)


def test_figures_hold_the_numbers_of_the_tables(run, charts):
    point = charts["plane"].panels[0].marks[0]
    own = part_of(run.rows, dataset="adult", split="iid", method="FedAvg")
    assert (point.x, point.y) == pytest.approx((own["test_gap"].mean(), own["test_accuracy"].mean()))
    assert sum(mark.layer == "seeds" for mark in charts["plane"].panels[0].marks) == 3 * len(METHODS)
    assert sum(mark.layer == "paper" for mark in charts["plane"].panels[0].marks) == 6
    black = part_of(run.groups, part="test", dataset="adult", split="iid", method="FCFL", group="Black")
    panel = panel_of(charts["rates"], "false_positive_rate")
    place = panel.groups.index("Black (900 rows, 180 positive)")
    mark = next(mark for mark in panel.marks if (mark.series, mark.y) == (3, place))
    assert mark.x == pytest.approx(black["false_positive_rate"].mean())
    keys = {"dataset": "credit", "split": "noniid", "method": "FedBiO, cells"}
    learned = part_of(run.weights, **keys, group="A92", label="1")
    panel = panel_of(charts["weights"], "cell", 3)
    mark = next(mark for mark in panel.marks if mark.series == 6 and panel.groups[int(mark.y)] == "A92, label 1")
    assert mark.x == pytest.approx(learned["weight"].mean())


def test_rounds_and_bytes_go_through_all_stages(run, charts):
    chart = charts["convergence"]
    rounds = panel_of(chart, "objective/round")
    first, second = (line for line in rounds.lines if line.series == 4)
    assert (first.name, second.name) == ("weights", "model")
    assert (first.x[-1], second.x[0], second.x[-1]) == (400, 420, 800)
    sent = panel_of(chart, "objective/bytes")
    own = part_of(run.history, method="FedBiO", dataset="adult")
    model = next(line for line in sent.lines if (line.series, line.name) == (4, "model"))
    assert model.x[-1] == 2 * own["bytes_up"].max()
    alone = panel_of(chart, "test_accuracy/round")
    assert {line.name for line in alone.lines} == {""}  # only models have an accuracy


def test_nothing_from_the_data_becomes_markup(tmp_path):
    run = fit(tmp_path / "run", name=EVIL, group_names=(EVIL, "m"), methods=(EVIL, "FedAvg"))
    configuration = {**run.configuration, EVIL: EVIL}
    object.__setattr__(run, "configuration", configuration)
    object.__setattr__(run, "line", EVIL)
    html = page(run)
    tree = Tree(html)
    assert not tree.all("img")
    assert len(re.findall(r"<script>", html)) == 1
    assert "onerror" not in {name for _, have in tree.elements for name in have}
    assert any(EVIL in text for place, text in tree.texts if place in ("td", "th"))
    assert any(EVIL[:30] in text for place, text in tree.texts if place == "text")
    for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html, re.S):
        json.loads(text)
        assert "<" not in text


def test_a_fit_of_one_seed(tmp_path):
    html = page(fit(tmp_path / "run"))
    assert "One seed [95 % interval]" in html
    assert "±" not in html[html.index('<table class="results"') : html.index("</table>")]
    assert 'class="filters"' not in html  # there is nothing to choose between
    assert "paper" not in re.sub(r"<(script|style).*?</\1>", "", html, flags=re.S).lower()


def test_a_fit_with_a_baseline_shows_its_own_differences(tmp_path):
    run = fit(tmp_path / "run", methods=("FedAvg", "FedReg"))
    given = {"gap_difference": -0.02, "gap_difference_low": -0.05, "gap_difference_high": 0.01}
    for column, value in given.items():
        run.rows[column] = [np.nan, value]
    chart = next(chart for chart in figures(reading_of(run)) if chart.key == "differences")
    (mark,) = (mark for panel in chart.panels for mark in panel.marks)
    assert (mark.x, mark.x_low, mark.x_high) == (-0.02, -0.05, 0.01)


def test_a_benchmark(tmp_path):
    html = page(bench(tmp_path / "run"))
    assert sections(html) == ["results", "plane", "differences", "convergence", "costs", "run", "reproduce"]
    assert "Score against bytes" in html


def test_the_theorems(tmp_path):
    run = rates(tmp_path / "run")
    html = page(run)
    assert sections(html) == ["results", "slopes", "bounds", "communication", "clients", "tables", "run", "reproduce"]
    drawn = {path.name for path in write_report(run, drawn=True)}
    assert {"slopes.svg", "bounds.png", "communication.svg", "clients.png"} <= drawn
    both = compare([run, rates(tmp_path / "again")])
    assert set(both.differences["measure"]) == {"mean_square"}
    slopes = {chart.key: chart for chart in charts_of(reading_of(run))}["slopes"]
    assert slopes.free  # no filter of the page hides its lines
    assert 'data-chart="slopes" data-kind="lines" data-free' in html
    assert slopes.names == (
        "η = δ/√T", "slope −1/2", 'tuned constants, previous="local"', "paper constants", "slope −2/3",
    )  # fmt: skip
    line, late = (slopes.panels[number].lines[0] for number in (0, 1))
    assert (line.y, line.low) == (pytest.approx((1.5 / 50**0.5, 1.5 / 500**0.5)), (1 / 50**0.5, 1 / 500**0.5))
    assert late.y == pytest.approx(tuple(value / 2 for value in line.y))


def test_settings_of_methods(tmp_path):
    run = fairness(tmp_path / "run")
    html = page(run)
    assert sections(html)[:4] == ["results", "plane", "front", "differences"]
    (panel,) = next(chart for chart in charts_of(reading_of(run)) if chart.key == "front").panels
    assert (len(panel.marks), len(panel.lines), panel.baseline) == (5, 2, 0.03)
    assert panel.note == "not shown:\nFedReg, s=2: 0.760, gap 0.060"
    assert panel.domain("y")[0] > 0.83
    assert "German Credit" not in html
    assert "Adult by sex, I.I.D." in html


def test_rows_alone_are_enough(tmp_path):
    rows = pd.DataFrame([{"dataset": "d", "split": "", "method": "m", "seed": 0, "test_accuracy": 0.5}])
    with RunFolder.open(tmp_path / "run", command="fit", configuration={}) as folder:
        folder.save("a", rows=rows)
        assert "not finished" in page(read(tmp_path / "run"))
        folder.finish()
    html = page(read(tmp_path / "run"))
    assert sections(html) == ["brief", "results", "run", "reproduce"]
    assert "not finished" not in html


def test_an_empty_run_is_refused(tmp_path):
    with RunFolder.open(tmp_path / "run", command="fit", configuration={}):
        pass
    with pytest.raises(ValueError, match="holds no results yet"):
        write(tmp_path / "run")
    assert not (tmp_path / "run" / "page.html").exists()


def test_equal_runs_give_equal_pages(tmp_path):
    run = fit(tmp_path / "run")
    assert page(read(run.path)) == page(run)


def test_the_table_for_papers(run):
    text = latex_table(read := reading_of(run), estimates(read, read.main))
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count("&") - line.count(r"\&") for line in body[1:]} == {1 + 6}
    own = part_of(run.rows, dataset="credit", method="FCFL", split="noniid")
    mean, sd = short(own["test_gap"].mean(), 4), short(own["test_gap"].std(), 4)
    assert rf"{mean}\,$\pm$\,{sd}" in next(line for line in body[15:] if "FCFL" in line)
    assert text.count("in the paper") == 2 * 6
    assert text.count(r"\textbf{") + text.count(r"\underline{") == 2 * 2 * 3
    assert text.count("{") == text.count("}")
    assert escaped("a_b & 5% {x}") == r"a\_b \& 5\% \{x\}"
    assert escaped("<~\\") == r"\textless{}\textasciitilde{}\textbackslash{}"


def test_figures_for_papers(tmp_path):
    few = {name: METHODS[name] for name in ("FedAvg", "FedBiO, cells")}
    run = table1(
        tmp_path / "run", seeds=2, methods=few, datasets=("credit",), splits=("iid",), groups={"credit": ["$a$", "b"]}
    )
    charts = {chart.key: chart for chart in figures(reading_of(run))}
    for key in ("plane", "rates", "convergence"):
        figure = picture(charts[key])
        assert len([axes for axes in figure.axes if axes.get_visible()]) == 1
        axes = figure.axes[0]
        panel = next(panel for panel in charts[key].panels if panel.variant == charts[key].first_variant)
        assert axes.get_xlabel() == panel.x.label
        assert axes.get_xlim() == pytest.approx(panel.domain("x"))
        assert axes.lines


def test_files_appear_whole_or_not_at_all(tmp_path, monkeypatch):
    run = fit(tmp_path / "run")
    (tmp_path / "run" / "page.html").write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedbilevel.storage.Path.replace", full)
    with pytest.raises(ValueError, match=r"Cannot write the report to .* \(No space left on device\)"):
        write_report(run)
    assert (tmp_path / "run" / "page.html").read_text() == "before"
    assert not list((tmp_path / "run").glob(".page*"))


def test_markers_of_lines_do_not_coincide():
    places = [tuple(glyph_places(24, series)) for series in range(8)]
    assert len(set(places)) == 8
    assert all(0 <= place < 24 for one in places for place in one)
    assert glyph_places(1, 3) == [0]


def test_missing_matplotlib_gets_a_sentence(charts, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "fedbilevel\[report\]"'):
        picture(charts["plane"])
