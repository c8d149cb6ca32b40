"""Commands called in this process, and one small fit that several tests look at."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from typing import NamedTuple
from unittest import mock

import numpy as np
import pandas as pd
import pytest

from fedbilevel import cli


class Said(NamedTuple):
    code: int
    out: str
    err: str


def command(*arguments) -> Said:
    """What ``fedbilevel ARGUMENTS`` answers; JAX stays configured as the tests have it."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["fedbilevel", *map(str, arguments)]),
        mock.patch("fedbilevel.cli.fit.prepare_jax"),
        mock.patch("fedbilevel.cli.tune.prepare_jax"),
        mock.patch("fedbilevel.cli.studies.prepare_jax"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


def people(rows=240, seed=0):
    """A table with a gap between the groups, missing cells, an identifier and a rare job."""
    rng = np.random.default_rng(seed)
    sex = rng.choice(["f", "m"], rows)
    age = rng.integers(20, 70, rows)
    score = rng.normal(size=rows) + 0.8 * (sex == "m")
    frame = pd.DataFrame(
        {
            "id": np.arange(rows),
            "age": age,
            "score": score.round(3),
            "job": rng.choice(["cook", "judge", "nurse"], rows),
            "sex": sex,
            "loan": np.where(score + 0.02 * age + 0.5 * rng.normal(size=rows) > 1.4, "yes", "no"),
        }
    ).astype(object)
    frame.loc[3, "age"] = ""
    frame.loc[4, "job"] = "?"
    frame.loc[5, "job"] = "astronaut"
    frame.loc[6, "loan"] = ""
    frame.loc[7, "sex"] = "NA"
    return frame


QUICK = ["--target", "loan", "--sensitive", "sex", "--steps", "40", "--weight-steps", "20", "--batch-size", "16"]


@pytest.fixture(scope="session")
def fitted(tmp_path_factory):
    """(folder of the run, the two sites' files, what the command said)."""
    home = tmp_path_factory.mktemp("fit")
    files = [home / "north.csv", home / "south.csv"]
    for number, file in enumerate(files):
        people(seed=number).to_csv(file, index=False)
    said = command("fit", *files, *QUICK, "--out", home / "run")
    assert said.code == 0, said.err
    return home / "run", files, said


@pytest.fixture
def call():
    return command


@pytest.fixture(scope="session")
def process():
    """What ``fedbilevel ARGUMENTS`` answers as a process of its own."""

    def run(*arguments, **environment):
        done = subprocess.run(
            [sys.executable, "-m", "fedbilevel.cli", *map(str, arguments)],
            capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "COLUMNS": "100", **environment},
        )  # fmt: skip
        return Said(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def imported(process):
    """(what a process of ``fedbilevel ARGUMENTS`` prints, the modules it imports)."""

    def run(*arguments):
        said = process(*arguments, PYTHONPROFILEIMPORTTIME="1")
        assert said.code == 0
        return said.out, {line.rsplit("|", 1)[-1].strip() for line in said.err.splitlines()}

    return run


@pytest.fixture
def refused():
    """Check that a command ended with exit code 2 and one sentence with these words, and said nothing else."""

    def check(said, words):
        assert (said.code, said.out) == (2, ""), said
        assert said.err.startswith("fedbilevel: ")
        assert words in said.err
        assert said.err.count("\n") == 1, said.err

    return check


@pytest.fixture
def table():
    return people


@pytest.fixture
def quick():
    return list(QUICK)
