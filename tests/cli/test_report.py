"""``fedbilevel report`` and ``fedbilevel compare`` as real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.report.folders import METHODS, fit, table1


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "fedbilevel.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "160", **environment},
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("runs")
    few = {name: METHODS[name] for name in ("FedAvg", "FedReg")}
    for name, seeds in (("one", 3), ("two", 2)):
        table1(home / name, seeds=seeds, methods=few, datasets=("credit",), splits=("iid",))
    return home


def test_report_writes_page_table_and_figures(folders, tmp_path):
    done = run("report", folders / "one", "--figures", "--json", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["page"] == str(tmp_path / "out" / "page.html")
    assert (tmp_path / "out" / "page.html").read_text().startswith("<!doctype html>")
    assert r"\toprule" in (tmp_path / "out" / "table.tex").read_text()
    drawn = sorted(path.name for path in (tmp_path / "out" / "figures").iterdir())
    assert sorted(path.rsplit("/", 1)[-1] for path in told["figures"]) == drawn
    assert {"plane.svg", "plane.png", "rates-true-positive-rate.png", "convergence-objective-bytes.svg"} <= set(drawn)
    assert (tmp_path / "out" / "figures" / "plane.png").read_bytes().startswith(b"\x89PNG")
    assert not (folders / "one" / "page.html").exists()


def test_report_into_the_run_folder_without_jax(tmp_path):
    fit(tmp_path / "run")
    done = run("report", tmp_path / "run", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert done.stdout == f"Page: {tmp_path}/run/page.html\nLaTeX table: {tmp_path}/run/table.tex\n"
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not {"jax", "matplotlib", "sklearn"} & imported


def test_report_of_no_run(tmp_path):
    done = run("report", tmp_path)
    assert (done.returncode, done.stderr) == (2, f"fedbilevel: {tmp_path} is not a run folder: it has no run.toml.\n")


def test_compare_on_the_terminal_as_json_and_as_a_page(folders, tmp_path):
    done = run("compare", folders / "one", folders / "two", "--out", tmp_path / "both.html")
    assert done.returncode == 0, done.stderr
    assert "two minus one" in done.stdout
    assert "Options that differ" in done.stdout
    assert "seeds" in done.stdout
    html = (tmp_path / "both.html").read_text()
    assert "Runs side by side" in html
    assert "two minus one" in html
    done = run("compare", folders / "one", folders / "two", "--measure", "test_gap", "--json")
    told = json.loads(done.stdout)
    assert [one["name"] for one in told["runs"]] == ["one", "two"]
    assert len(told["cells"]) == 4
    assert [(one["method"], one["pairing"], one["seeds"]) for one in told["differences"]] == [
        ("FedAvg", "paired", 2),
        ("FedReg", "paired", 2),
    ]


def test_compare_needs_two(folders):
    done = run("compare", folders / "one")
    assert (done.returncode, done.stderr) == (2, "fedbilevel: compare needs two run folders at least.\n")


def test_compare_out_must_be_a_file(folders, tmp_path):
    done = run("compare", folders / "one", folders / "two", "--out", tmp_path)
    assert done.returncode == 2
    assert "is a folder: name a file" in done.stderr
