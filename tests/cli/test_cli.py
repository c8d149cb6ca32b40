"""The command line as a user meets it: real processes, their exit codes and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import typer.main

from fedbilevel import __version__, cli


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "fedbilevel.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "100", **environment},
    )


def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"fedbilevel {__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["rates", "--help"]])
def test_help_does_not_load_jax(arguments):
    done = run(*arguments, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert "Usage" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "fedbilevel.cli" in imported or "typer" in imported
    assert not {"jax", "pandas", "sklearn", "matplotlib"} & imported


def test_rates_help_has_an_example():
    assert "fedbilevel rates --out" in run("rates", "--help").stdout


def test_no_command_shows_help():
    done = run()
    assert "rates" in done.stdout + done.stderr


def test_unknown_option_exits_with_2():
    done = run("rates", "--bogus")
    assert done.returncode == 2
    assert "--bogus" in done.stderr


def test_out_must_be_a_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    done = run("rates", "--out", str(file))
    assert done.returncode == 2
    assert done.stderr == f"fedbilevel: --out {file} is a file: name a folder.\n"
    assert file.read_text() == "kept"


def test_out_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("rates", "--out", str(tmp_path / "file" / "below"))
    assert done.returncode == 2
    assert "cannot be made" in done.stderr
    assert "Traceback" not in done.stderr


def test_negative_seed_is_refused():
    done = run("rates", "--seed", "-1")
    assert done.returncode == 2
    assert "--seed" in done.stderr


def test_quick_rates_writes_its_folder(tmp_path):
    out = tmp_path / "rates"
    done = run("rates", "--quick", "--out", str(out), XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "slope" in done.stdout
    names = {path.name for path in out.iterdir()}
    assert any(name.endswith(".csv") for name in names)
    assert not [name for name in names if name.startswith(".")]


@pytest.mark.parametrize(
    ("words", "shown"), [("", "Stopped."), ("The same command goes on.", "The same command goes on.")]
)
def test_an_interrupt_says_what_to_do_and_exits_with_130(monkeypatch, capsys, words, shown):
    def stopped(*_, **__):
        raise KeyboardInterrupt(words)

    monkeypatch.setattr(sys.modules["fedbilevel.cli.rates"], "prepare", stopped)
    monkeypatch.setattr(sys, "argv", ["fedbilevel", "rates"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    assert capsys.readouterr().err == f"fedbilevel: {shown}\n"


def commands(group, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def test_every_command_that_computes_speaks_to_machines_and_can_be_silent():
    found = dict(commands(typer.main.get_command(cli.app)))
    assert len(found) >= 14
    for name, command in found.items():
        options = {option for parameter in command.params for option in parameter.opts}
        if name != ("federate", "start"):  # stays until it is stopped and has no result
            assert {"--json", "--quiet", "-q"} <= options | ({"--json"} if name == ("federate", "stop") else set()), (
                name
            )


def test_tables_for_machines(monkeypatch, capsys):
    frame = pd.DataFrame({"slope": [-0.5, float("nan")], "algorithm": ["fedbio", "fedbioacc"]})
    result = SimpleNamespace(slopes=frame, bounds=frame[:0], estimator=frame, checks=frame)
    monkeypatch.setattr("fedbilevel.studies.rates.design.run", lambda *_, **__: result)
    monkeypatch.setattr(sys, "argv", ["fedbilevel", "rates", "--json", "--quiet"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    told = json.loads(capsys.readouterr().out)
    assert told["slopes"] == [{"slope": -0.5, "algorithm": "fedbio"}, {"slope": None, "algorithm": "fedbioacc"}]
    assert (told["bounds"], told["folder"]) == ([], None)
