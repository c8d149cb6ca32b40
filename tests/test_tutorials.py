"""The commands of the tutorials run as printed, in order, in an empty folder.  Pages of Python alone: test_docs.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quicker import plain

PAGES = Path(__file__).parents[1] / "docs" / "tutorials"
ELSEWHERE = ("pip install", "open ")
"""Lines for a person: the package is here already, and nobody looks at a browser."""


def script(page: Path) -> str:
    """The blocks of a page as one program of the shell."""
    parts = []
    for kind, body in re.findall(r"^```(sh|python)\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M):
        lines = [line for line in body.splitlines() if not line.startswith(ELSEWHERE)]
        parts += ["python - <<'PYTHON'", *lines, "PYTHON"] if kind == "python" else lines
    return "\n".join(["set -euo pipefail", *parts, ""])


def follow(name: str, folder: Path, seconds: int) -> None:
    # What pytest sets for JAX stays out: a reader's shell has none of it.
    environment = plain()
    path = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    done = subprocess.run(
        ["bash", "-c", script(PAGES / name)], cwd=folder, env={**environment, "PATH": path}, capture_output=True, text=True,
        timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_a_fair_classifier_from_three_files(tmp_path):
    follow("fair-classifier.md", tmp_path, 600)
    assert (tmp_path / "runs" / "income" / "page.html").exists()
    assert len((tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines()) == 5001


def test_tune_across_sites(tmp_path):
    follow("tune.md", tmp_path, 600)
    assert (tmp_path / "runs" / "heart" / "page.html").exists()
    assert len((tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines()) == 304


@pytest.mark.federation
def test_four_processes(tmp_path):
    follow("four-processes.md", tmp_path, 1200)
    assert (tmp_path / "runs" / "demo" / "page.html").exists()
    assert (tmp_path / "runs" / "heart" / "page.html").exists()


def test_every_tutorial_with_commands_is_here():
    followed = set(re.findall(r'follow\("(.+?)"', Path(__file__).read_text(encoding="utf-8")))
    assert followed == {
        page.name for page in PAGES.glob("*.md") if re.search("^```sh", page.read_text(encoding="utf-8"), re.M)
    }
