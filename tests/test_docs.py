"""Every Python block in the README and the docs runs as printed: in order, each page by itself, JAX as users have it.

Pages of a folder share a process, so that JAX starts only that often.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from docsbuild import commands
from fedbilevel.cli import app
from tests.quicker import plain
from tests.test_architecture import HEIGHT, LAYERS

ROOT = Path(__file__).parents[1]
ALL = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES = [page for page in ALL if "```python" in page.read_text(encoding="utf-8")]
LONG = [ROOT / "docs" / "networks.md"]
"""Pages that compute for longer than they compile: each has a process of its own, whose programs are optimised a little."""
FOLDERS = [
    [page for page in PAGES if page.parent == folder and page not in LONG]
    for folder in sorted({page.parent for page in PAGES})
]
RUNS = [*([page] for page in LONG), *filter(None, FOLDERS)]
MADE = ("gallery/", "commands.md")
"""What the build of the site makes; test_site.py follows these links."""


@pytest.mark.parametrize("pages", RUNS, ids=lambda pages: pages[0].name if len(pages) == 1 else pages[0].parent.name)
def test_code_blocks_run(pages, tmp_path):
    blocks = [re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S) for page in pages]
    program = tmp_path / "pages.py"
    each = [
        f"exec(compile({chr(10).join(found)!r}, {page.name!r}, 'exec'), {{}})"
        for page, found in zip(pages, blocks, strict=True)
    ]
    quicker = f"import runpy; runpy.run_path({str(ROOT / 'tests' / 'quicker.py')!r})"
    program.write_text("\n".join([quicker, *each]), encoding="utf-8")
    environment = plain()
    if pages[0] in LONG and "XLA_FLAGS" in environment:
        environment["XLA_FLAGS"] = environment["XLA_FLAGS"].replace("optimization_level=0", "optimization_level=1")
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_page_with_blocks_is_run_once():
    assert sorted(page for pages in RUNS for page in pages) == sorted(PAGES)


def test_links_point_to_files():
    for page in ALL:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text(encoding="utf-8")):
            made = target.startswith(MADE) or any(f"/{name}" in target for name in MADE)
            assert made or (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_the_glossary_names_modules_that_exist_and_every_word_once():
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| **")]
    assert len(rows) > 50
    words = [word for row in rows for word in re.findall(r"\*\*(.+?)\*\*", row[0])]
    assert len(set(words)) == len(words)
    for row in rows:
        (name,) = re.findall(r"`(.+?)`", row[2])
        module = ROOT.joinpath("src", "fedbilevel", *name.split("."))
        assert module.is_dir() or module.with_suffix(".py").exists(), (
            f"{row[0].strip()} lives in {name}, which is not there"
        )


def test_the_page_of_the_house_lists_the_rooms_in_the_order_of_their_layers():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(.*?)```", page, flags=re.S).group(1)
    listed = [line.split()[0] for line in block.splitlines()]
    assert set(listed) == {room for layer in LAYERS for room in layer}
    heights = [HEIGHT[name] for name in listed]
    assert heights == sorted(heights)
    for name in re.findall(r"`([a-z0-9_/]+\.py)`", page):
        assert (ROOT / "src" / "fedbilevel" / name).exists() or (ROOT / name).exists(), f"{name} is not there"


def every_command(command, path=()):
    """(its words, itself) for every command that does something, from Typer's own description."""
    below = getattr(command, "commands", {})
    if not below:
        yield path, command
    for name, one in below.items():
        yield from every_command(one, (*path, name))


def test_the_reference_has_every_command_and_every_option_with_its_meaning():
    page = commands.page()
    found = list(every_command(typer.main.get_command(app)))
    assert len(found) > 20
    for path, command in found:
        name = " ".join(path)
        assert f"## {name}\n" in page, name
        section = page.split(f"## {name}\n", 1)[1].split("\n## ", 1)[0]
        assert command.help in section, name
        assert not command.get_short_help_str(64).endswith("..."), (
            f"{name} is cut in the list of commands on 80 columns"
        )
        assert f"fedbilevel {path[0]}" in (command.epilog or ""), f"{name} has no example"
        for option in command.params:
            assert option.help, f"{name}: {option.name} is not explained"
            words = [*option.opts, *option.secondary_opts] if option.param_type_name == "option" else []
            for word in words:
                assert word == "--help" or f"`{word}" in section or f", {word}" in section, f"{name} {word}"


def shown_commands(page):
    """Orders of a page, in blocks and in the middle of sentences, as lists of words."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:sh|text|)\n(.*?)^```", text, flags=re.S | re.M)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    for line in [*lines, *inline]:
        line = re.sub(r"^(for .*; do |\$ )", "", line.strip())
        if line.startswith(("fedbilevel ", "python benchmarks/", "python -m ")):
            words = re.split(r" #|  +|;| > |\|", line.replace("...", ""))[0]
            yield shlex.split(words.replace("[", "").replace("]", ""))


@pytest.mark.parametrize("page", [*ALL, ROOT / "SECURITY.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_shows_exist_with_their_options(page):
    """Of a benchmark: the file is there, and names the option."""
    for words in shown_commands(page):
        order = " ".join(words)
        named = [word.split("=")[0] for word in words if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word)]
        if words[0] == "python":
            path = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
            if words[1] == "-m" and not path.startswith(("benchmarks/", "docsbuild/")):
                continue  # not ours
            text = (ROOT / path).read_text(encoding="utf-8")
            for option in named:
                assert f'"{option}"' in text or f'"{option[2:]}"' in text, f"{page.name}: {order}"
            continue
        command, rest = typer.main.get_command(app), words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]
        known = {word for option in command.params for word in (*option.opts, *option.secondary_opts)}
        assert set(named) <= {*known, "--help"}, f"{page.name}: {order}"
        assert not getattr(command, "commands", {}) or not rest or rest[0].startswith("--"), f"{page.name}: {order}"
