"""Every command and option of the command line as one page, read from Typer's own description of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from fedbilevel.cli import app

HEAD = """# Commands

Every command answers `--help` with the text below. Commands that compute draw a progress bar on a terminal and print plain
lines elsewhere. Exit codes: 0; 2 for bad input, with one sentence that says what to do; 130 after Ctrl-C. This page is
made from the program itself.

"""


def page() -> str:
    return HEAD + "\n".join(
        part for path, command in walk(typer.main.get_command(app), "") for part in told(path, command)
    )


def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, below in sorted(getattr(command, "commands", {}).items()):
        if getattr(below, "commands", None):
            yield from walk(below, f"{path}{name} ")
        else:
            yield f"{path}{name}", below


def told(path: str, command: Any) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    usage = " ".join(["fedbilevel", path, *map(_place, arguments), "[OPTIONS]"])
    yield f"## {path}\n\n{command.help}\n\n```text\n{usage}\n```\n"
    if command.epilog:
        yield f"```sh\n{command.epilog.removeprefix('Example:').strip()}\n```\n"
    rows = [(_place(one), one) for one in arguments] + [(_spelled(one), one) for one in options]
    if rows:
        yield "| option | default | meaning |\n|---|---|---|"
        yield "\n".join(f"| `{name}` | {_default(one)} | {_cell(one.help or '')} |" for name, one in rows) + "\n"


def _place(argument: Any) -> str:
    name = (argument.metavar or argument.name).upper()
    return name + (" ..." if argument.nargs == -1 and "..." not in name else "")


def _spelled(option: Any) -> str:
    return ", ".join([*option.opts, *option.secondary_opts])


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or value is False or callable(value) or value in ((), [], ""):
        return ""
    return f"`{' '.join(map(str, value)) if isinstance(value, list | tuple) else getattr(value, 'value', value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
