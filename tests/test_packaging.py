"""The sdist builds, the wheel builds from it, and both install into clean environments and work: `make test-wheels`.

Interpreters: this one, those that FEDBILEVEL_PYTHONS names, python3.11 to python3.14 on the PATH, and those that pyenv or uv
keep elsewhere; where there is none, uv fetches one if it can.  What the package needs is fetched by pip.

The file needs pytest and nothing else, so it also runs where only one Python is: see CONTRIBUTING.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
pytestmark = pytest.mark.packaging


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=1200, **options)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def candidates(version):
    """Where a Python of this version may be: this one, those named, the PATH, what pyenv and uv have installed."""
    yield sys.executable
    yield from filter(None, os.environ.get("FEDBILEVEL_PYTHONS", "").split(os.pathsep))
    name = f"python{version}"
    for folder in os.get_exec_path():
        yield Path(folder) / name
    for manager, below in ((["pyenv", "root"], "versions/*/bin"), (["uv", "python", "dir"], "*/bin")):
        if shutil.which(manager[0]):
            home = subprocess.run(manager, capture_output=True, text=True, timeout=60).stdout.strip()
            yield from sorted(Path(home).glob(f"{below}/{name}")) if home else ()


def starts(python, version):
    """A version manager's shim may stand there for a version that is not installed, or not chosen."""
    question = f"import venv, ssl, sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    return Path(python).exists() and not subprocess.run([python, "-c", question], capture_output=True).returncode


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """An environment with what builds and runs packages."""
    home = tmp_path_factory.mktemp("tools")
    run(sys.executable, "-m", "venv", home)
    run(home / "bin" / "pip", "install", "-q", "build", "pipx", "uv")
    return home / "bin"


@pytest.fixture(scope="module")
def interpreter(tools, tmp_path_factory):
    """(version) -> a Python of it: one of this machine, else one that uv can fetch."""
    home = tmp_path_factory.mktemp("pythons")

    def found(version):
        for python in candidates(version):
            if starts(python, version):
                return python
        order = [tools / "uv", "python", "install", "--no-bin", "--install-dir", home, version]
        fetched = subprocess.run(list(map(str, order)), capture_output=True, text=True, timeout=600)
        if fetched.returncode:
            pytest.skip(f"no Python {version} here, and uv cannot fetch one")
        return next(home.glob(f"*/bin/python{version}"))

    return found


@pytest.fixture(scope="module")
def built(tools, tmp_path_factory):
    """The sdist, and the wheel that was built from it."""
    home = tmp_path_factory.mktemp("dist")
    run(tools / "python", "-m", "build", "--outdir", home, ROOT)
    return {"sdist": next(home.glob("*.tar.gz")), "wheel": next(home.glob("*.whl"))}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("version", VERSIONS)
def test_it_installs_and_works(built, interpreter, version, kind, tmp_path):
    run(interpreter(version), "-m", "venv", tmp_path / "env")
    run(tmp_path / "env" / "bin" / "pip", "install", "-q", built[kind])
    told = run(tmp_path / "env" / "bin" / "fedbilevel", "--version", cwd=tmp_path)
    (wanted,) = re.findall(
        r'__version__ = "(.+)"', (ROOT / "src" / "fedbilevel" / "_version.py").read_text(encoding="utf-8")
    )
    assert wanted in told
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    assert "objective" in run(tmp_path / "env" / "bin" / "python", "-c", lines, cwd=tmp_path)


@pytest.mark.parametrize("command", [("uvx", "--from"), ("pipx", "run", "--spec")], ids=["uvx", "pipx"])
def test_it_runs_without_being_installed(tools, built, command, tmp_path):
    name, *words = command
    python = ["--python", sys.executable]
    order = [tools / name, *python, *words] if name == "uvx" else [tools / name, "run", *python, *words[1:]]
    assert "Usage" in run(*order, built["wheel"], "fedbilevel", "--help", cwd=tmp_path)
