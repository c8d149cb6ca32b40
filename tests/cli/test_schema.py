"""``fedbilevel schema``: what it shows, writes and refuses."""

from __future__ import annotations

import json

import pytest

from fedbilevel.tables.schema import Schema

ASKED = ["--target", "loan", "--sensitive", "sex"]


@pytest.fixture
def file(table, tmp_path):
    path = tmp_path / "site.csv"
    table().to_csv(path, index=False)
    return path


def test_shows_and_writes(call, file, tmp_path):
    out = tmp_path / "schema.toml"
    said = call("schema", file, *ASKED, "--out", out)
    assert (said.code, said.err) == (0, "")
    for words in ("yes = 1, no = 0", "2 groups: f, m", "an identifier", "1 rare value(s) pooled", "--schema"):
        assert words in said.out
    schema = Schema.read(out)
    assert {one.name: one.kind for one in schema.columns} == {
        "id": "ignore", "age": "number", "score": "number", "job": "category", "sex": "ignore",
    }  # fmt: skip


def test_json_and_quiet(call, file, tmp_path):
    said = call("schema", file, *ASKED, "--json", "--positive", "no")
    assert json.loads(said.out)["positive"] == "no"
    out = tmp_path / "schema.toml"
    assert call("schema", file, *ASKED, "--quiet", "--out", out) == (0, "", "")
    assert out.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--target is missing"),
        (["--target", "loan"], "--sensitive is missing"),
        (["--target", "lone", "--sensitive", "sex"], "no column 'lone'; did you mean 'loan'?"),
        (["--target", "loan", "--sensitive", "score"], "makes more than 50 groups"),
        ([*ASKED, "--delimiter", ";"], "is one column"),
        ([*ASKED, "--out", "/proc/none/schema.toml"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(call, refused, file, options, words):
    refused(call("schema", file, *options), words)
