"""The page of errata names a test for every entry; the names must exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errata.md"
HOME = "tests/theory/test_printed.py"


def named_tests():
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|") or set(line) <= set("|- "):
            continue
        file = HOME
        for name in re.findall(r"`([^`]+)`", line.rsplit("|", 2)[1]):
            if "::" in name:
                stated, name = name.split("::")
                file = stated or file
                yield file, name
            elif name.startswith("test_"):
                yield HOME, name


@pytest.mark.parametrize(("file", "name"), sorted(set(named_tests())))
def test_named_tests_exist(file, name):
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_every_test_of_a_printed_statement_is_on_the_page():
    tests = set(re.findall(r"^def (test_\w+)", (ROOT / HOME).read_text(encoding="utf-8"), flags=re.M))
    assert tests == {name for file, name in named_tests() if file == HOME}
