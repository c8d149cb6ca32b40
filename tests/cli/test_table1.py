"""``fedbilevel table1``: what it prints, in narrow terminals too, and how it refuses."""

import json
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedbilevel.cli import app
from fedbilevel.cli.studies import Bar
from fedbilevel.cli.table1 import print_table
from fedbilevel.studies.driver import Standing

QUICK = ["--datasets", "credit", "--distributions", "iid", "--methods", "fedavg,fcfl", "--seeds", "2", "--steps", "10"]


@pytest.fixture(scope="module")
def folder(process, tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "run"
    told = process("table1", *QUICK, "--out", path, COLUMNS="110")
    assert told.code == 0, told.err
    assert "\x1b[" not in told.out + told.err
    for words in ("Credit, I.I.D.", "FedAvg", "FCFL", "Test accuracy", ".6873±.0314", "FCFL draws none"):
        assert words in told.out
    assert "4/4, done" in told.err
    return path


def invoked(*arguments):
    return CliRunner().invoke(app, ["table1", *map(str, arguments)])


def test_the_same_command_shows_a_finished_run_again(folder):
    told = invoked(*QUICK, "--out", folder, "--json")
    assert told.exit_code == 0
    found = json.loads(told.stdout)
    assert found["configuration"]["steps"] == 10
    cell = next(one for one in found["cells"] if (one["method"], one["column"]) == ("FedAvg", "test_accuracy"))
    assert (cell["runs"], cell["paper_mean"], cell["paper_sd"]) == (2, 0.6873, 0.0314)
    assert 0.5 < cell["mean"] < 0.9
    assert invoked(*QUICK, "--out", folder, "--quiet").stdout == ""


@pytest.mark.parametrize(("width", "tables"), [(80, 2), (120, 1)])
def test_the_table_fits_the_terminal(folder, width, tables, capsys):
    from fedbilevel.runs import read

    run = read(folder)
    both = SimpleNamespace(**{**run.__dict__, "rows": run.rows})
    import pandas as pd

    both.rows = pd.concat([run.rows, run.rows.assign(split="noniid")], ignore_index=True)
    console = Console(width=width, no_color=True)
    print_table(console, both)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("Credit, ") for line in lines) == tables
    assert all("…" not in line for line in lines)


def test_one_run_is_computed_again(process, folder):
    told = process("table1", "--verify", folder)
    assert told.code == 0, told.err
    assert "computed again, the same." in told.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--datasets", "compas"], "--datasets compas: unknown; choose from adult, credit."),
        (["--splits", "three"], "--splits three: unknown; choose one, many."),
        (["--verify", "nowhere"], "There is no folder nowhere."),
        (["--out", __file__], "is a file: name a folder."),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence):
    failure = invoked(*arguments).exception
    assert isinstance(failure, ValueError)
    assert sentence in str(failure)


def test_another_configuration_is_refused(call, refused, folder):
    told = call("table1", *QUICK, "--encoding", "paper", "--out", folder)
    refused(told, "was begun with encoding = 'clean', and now encoding is 'paper'")


def test_the_bar_says_nothing_when_silent(capsys):
    with Bar(silent=True) as bar:
        bar.report(Standing(1, 1, None, "x"))
    assert capsys.readouterr() == ("", "")
