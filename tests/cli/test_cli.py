"""The command line as a user meets it: real processes, their exit codes and what they print."""

from __future__ import annotations

import gc
import json
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import typer.main

from fedbilevel import __version__, cli
from fedbilevel.cli import options
from fedbilevel.fairness.methods import METHODS
from fedbilevel.fairness.metrics import CRITERIA
from tests.report.folders import fit


def test_version(process):
    assert process("--version") == (0, f"fedbilevel {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["rates", "--help"]])
def test_help_does_not_load_jax(imported, arguments):
    said, modules = imported(*arguments)
    assert "Usage" in said
    assert "fedbilevel.cli" in modules or "typer" in modules
    assert not {"jax", "pandas", "sklearn", "matplotlib", "jinja2"} & modules


def test_commands_seldom_look_for_garbage(monkeypatch):
    usual = gc.get_threshold()
    gc.set_threshold(700)
    monkeypatch.setattr(cli, "app", lambda: None)
    try:
        cli.main()
        assert gc.get_threshold()[0] == cli.COLLECT
    finally:
        gc.set_threshold(*usual)


def test_no_command_shows_help(process):
    said = process()
    assert "rates" in said.out + said.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bogus"], "--bogus"),
        (["--seed", "-1"], "--seed"),
        (["--out", "{file}"], "fedbilevel: --out {file} is a file: name a folder.\n"),
        (["--out", "{file}/below"], "cannot be made"),
        (["--quick", "--long"], "fedbilevel: --quick and --long exclude each other; give one of them.\n"),
    ],
)
def test_bad_input_exits_with_2_and_a_sentence(process, tmp_path, options, words):
    file = tmp_path / "file"
    file.write_text("kept")
    said = process("rates", *(option.format(file=file) for option in options))
    assert said.code == 2
    assert words.format(file=file) in said.err
    assert "Traceback" not in said.err
    assert file.read_text() == "kept"


def test_quick_rates_writes_its_folder(process, tmp_path):
    out = tmp_path / "rates"
    said = process("rates", "--quick", "--out", out)
    assert said.code == 0, said.err
    assert "slope" in said.out
    names = {path.name for path in out.iterdir()}
    assert any(name.endswith(".csv") for name in names)
    assert not [name for name in names if name.startswith(".")]


@pytest.mark.parametrize(
    ("words", "shown"), [("", "Stopped."), ("The same command goes on.", "The same command goes on.")]
)
def test_an_interrupt_says_what_to_do_and_exits_with_130(monkeypatch, call, words, shown):
    def stopped(*_, **__):
        raise KeyboardInterrupt(words)

    monkeypatch.setattr(sys.modules["fedbilevel.cli.studies"], "prepare", stopped)
    said = call("rates")
    assert (said.code, said.err) == (130, f"fedbilevel: {shown}\n")


def commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_every_command_speaks_to_machines_can_be_silent_and_shows_an_example():
    known = dict(commands(typer.main.get_command(cli.app)))
    assert len(known) >= 14
    for name, command in known.items():
        options = {option for parameter in command.params for option in parameter.opts}
        options |= {"--json"} if name == ("federate", "stop") else set()
        if name != ("federate", "start"):  # stays until it is stopped and has no result
            assert {"--json", "--quiet", "-q"} <= options, name
        assert f"fedbilevel {' '.join(name)} " in command.epilog


def test_tables_for_machines(monkeypatch, call):
    frame = pd.DataFrame({"slope": [-0.5, float("nan")], "algorithm": ["fedbio", "fedbioacc"]})
    tables = {"slopes": frame, "bounds": frame[:0], **dict.fromkeys(("coverage", "estimator", "checks"), frame)}
    monkeypatch.setattr("fedbilevel.studies.rates.run", lambda *_, **__: SimpleNamespace(tables=tables))
    told = json.loads(call("rates", "--json", "--quiet").out)
    assert told["slopes"] == [{"slope": -0.5, "algorithm": "fedbio"}, {"slope": None, "algorithm": "fedbioacc"}]
    assert (told["bounds"], told["folder"]) == ([], None)


@pytest.mark.parametrize("arguments", [["report", "{run}", "--figures"], ["rates", "--out", "{run}"]])
def test_without_matplotlib_figures_are_refused_before_any_work(call, refused, tmp_path, monkeypatch, arguments):
    fit(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(
        call(*(word.format(run=tmp_path / "run") for word in arguments)), "Figures need matplotlib: install it with"
    )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["fit", "{file}", "--method", "fedb"], ["fedbioacc", "fedbio"]),
        (["fit", "{file}", "--metric", "equali"], ["equalized_odds"]),
        (["fit", "{file}", "--target", "a"], ["age", "alive"]),
        (["fit", "{file}", "--target", "alive", "--sensitive", "s"], ["sex"]),
        (["schema", "{file}", "{file}x", "--site", ""], ["age", "alive", "sex"]),
    ],
)
def test_the_shell_completes_methods_and_columns(call, tmp_path, monkeypatch, words, offered):
    file = tmp_path / "site.csv"
    file.write_text("age;alive;sex\n1;yes;f\n")
    typed = ["fedbilevel", *(word.format(file=file) for word in words)]
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # as the installed command has it
    monkeypatch.setenv("_FEDBILEVEL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(typed))
    monkeypatch.setenv("COMP_CWORD", str(len(typed) - 1))
    assert call().out.split() == offered


def test_completed_names_are_those_there_are():
    assert sorted(options.METHODS) == sorted(METHODS)
    assert sorted(options.METRICS) == sorted(CRITERIA)
