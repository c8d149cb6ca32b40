"""What all commands share: folders, progress, tables on the terminal."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from fedbilevel.engines.progress import progress_lines as progress_lines

Shown = Iterable[str | tuple[str, Any] | RenderableType]
"""What a command says to people: sentences, tables with their titles, or anything `rich` can print."""


def prepare_jax() -> None:
    """Keep compiled programs between runs, so that a second start computes within seconds."""
    import jax

    if os.environ.get("JAX_COMPILATION_CACHE_DIR") is None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "fedbilevel" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def check_folder(out: Path | None) -> None:
    """Refuse an unusable folder before computing for it."""
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be made ({error.strerror}): name a folder you can write to.") from error
    if not os.access(out, os.W_OK):
        raise ValueError(f"--out {out} is read-only: name a folder you can write to.")


def console(width: int = 120) -> Console:
    """The terminal, or ``width`` letters where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=width)


def tell(as_json: bool, quiet: bool, told: Mapping[str, Any], shown: Shown, width: int = 120) -> None:
    """``told`` for machines, or for people what is ``shown``."""
    if as_json:
        print(json.dumps(told, ensure_ascii=False, allow_nan=False))
    elif not quiet:
        screen = console(width)
        for piece in shown:
            if isinstance(piece, tuple):
                show(screen, *piece)
            elif isinstance(piece, str):  # however long: a path must stay whole to be copied
                screen.print(piece, highlight=False, soft_wrap=True, markup=False)
            else:
                screen.print(piece)


def typed() -> str:
    """The command as it was typed."""
    return shlex.join(["fedbilevel", *sys.argv[1:]])


def show(console: Console, title: str, frame: Any) -> None:
    """A DataFrame as a table on the terminal; long texts wrap rather than being cut."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in frame.columns:
        numeric = frame[name].dtype.kind in "fiu"
        table.add_column(str(name).replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*(_cell(value) for value in row))
    console.print(table)


def records(frame: Any) -> list[dict[str, Any]]:
    """A DataFrame's rows for ``--json``; what is missing or not finite is null."""
    rows: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return rows


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.4g}"
    return "" if value is None else str(value)
