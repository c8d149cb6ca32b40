"""``fedbilevel report`` and ``fedbilevel compare``, each once as a real process."""

from __future__ import annotations

import json

import pytest

from tests.report.folders import METHODS, fit, table1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("runs")
    few = {name: METHODS[name] for name in ("FedAvg", "FedReg")}
    for name, seeds in (("one", 3), ("two", 2)):
        table1(home / name, seeds=seeds, methods=few, datasets=("credit",), splits=("iid",))
    return home


def test_report_writes_page_table_and_figures(process, folders, tmp_path):
    said = process("report", folders / "one", "--figures", "--json", "--out", tmp_path / "out")
    assert said.code == 0, said.err
    told = json.loads(said.out)
    assert told["page"] == str(tmp_path / "out" / "page.html")
    assert (tmp_path / "out" / "page.html").read_text().startswith("<!doctype html>")
    assert r"\toprule" in (tmp_path / "out" / "table.tex").read_text()
    drawn = sorted(path.name for path in (tmp_path / "out" / "figures").iterdir())
    assert sorted(path.rsplit("/", 1)[-1] for path in told["figures"]) == drawn
    assert {"plane.svg", "plane.png", "rates-true-positive-rate.png", "convergence-objective-bytes.svg"} <= set(drawn)
    assert (tmp_path / "out" / "figures" / "plane.png").read_bytes().startswith(b"\x89PNG")
    assert not (folders / "one" / "page.html").exists()


def test_report_into_the_run_folder_without_jax(imported, tmp_path):
    fit(tmp_path / "run")
    said, modules = imported("report", tmp_path / "run")
    assert said == f"Page: {tmp_path}/run/page.html\nLaTeX table: {tmp_path}/run/table.tex\n"
    assert not {"jax", "matplotlib", "sklearn"} & modules


def test_compare_on_the_terminal_as_json_and_as_a_page(process, call, folders, tmp_path):
    said = process("compare", folders / "one", folders / "two", "--out", tmp_path / "both.html")
    assert said.code == 0, said.err
    assert "two minus one" in said.out
    assert "Options that differ" in said.out
    assert "seeds" in said.out
    html = (tmp_path / "both.html").read_text()
    assert "Runs side by side" in html
    assert "two minus one" in html
    said = call("compare", folders / "one", folders / "two", "--measure", "test_gap", "--json")
    told = json.loads(said.out)
    assert [one["name"] for one in told["runs"]] == ["one", "two"]
    assert len(told["cells"]) == 4
    assert [(one["method"], one["pairing"], one["seeds"]) for one in told["differences"]] == [
        ("FedAvg", "paired", 2),
        ("FedReg", "paired", 2),
    ]


def test_bad_input_exits_with_2_and_a_sentence(call, folders, tmp_path):
    refused = [
        (["report", tmp_path], f"{tmp_path} is not a run folder: it has no run.toml."),
        (["compare", folders / "one"], "compare needs two run folders at least."),
        (["compare", folders / "one", folders / "two", "--out", tmp_path],
         f"--out {tmp_path} is a folder: name a file, such as {tmp_path / 'compare.html'}."),
        (["compare", folders / "one", folders / "two", "--out", tmp_path / "none" / "x.html"],
         f"Cannot write {tmp_path / 'none' / 'x.html'} (No such file or directory)."),
    ]  # fmt: skip
    for arguments, sentence in refused:
        assert call(*arguments) == (2, "", f"fedbilevel: {sentence}\n")
