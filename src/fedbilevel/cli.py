"""The command line: the only place that prints.

Importing this module must stay cheap (``--help`` answers in a fraction of a second), so JAX and everything that imports it
are loaded inside the commands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedbilevel._version import __version__

app = typer.Typer(
    name="fedbilevel",
    help="Federated bilevel optimization, and group-fair federated learning as its first application.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedbilevel {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options that stand before the command."""


@app.command(epilog="Example:  fedbilevel rates --out runs/rates")
def rates(
    out: Annotated[Path | None, typer.Option(help="Folder for tables and figures.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer seeds and shorter runs: a look, not a measurement.")] = False,
    seed: Annotated[int, typer.Option(help="Where all randomness starts.", min=0)] = 0,
) -> None:
    """The two convergence theorems, measured.

    Slopes with confidence intervals, and the bounds beside the measurements.
    """
    check_folder(out)
    prepare_jax()
    from fedbilevel.experiments import rates as experiment

    with progress_lines() as report:
        result = experiment.run(out, quick=quick, seed=seed, progress=report)
    console = Console() if sys.stdout.isatty() else Console(width=110)
    interval = [
        f"[{low:.3f}, {high:.3f}]" for low, high in zip(result.slopes["low"], result.slopes["high"], strict=True)
    ]
    slopes = result.slopes.assign(interval=interval)[["algorithm", "variant", "range", "slope", "interval", "theory"]]
    show(console, "Slope of log mean |grad h|^2 against log T, with 95 % intervals", slopes)
    below = result.bounds.groupby(["algorithm", "variant"], sort=False).agg(
        points=("holds", "size"), below_bound=("holds", "sum"), inside_region=("inside", "sum")
    )
    show(console, "Measurements with the theorems' step sizes, beside the theorems' bounds", below.reset_index())
    show(console, "One hypergradient estimate averaged over clients: variance shrinks, bias stays", result.estimator)
    failing = result.checks[~result.checks["holds"]]
    console.print(f"{len(result.checks) - len(failing)} of {len(result.checks)} step-size conditions hold.")
    if out is not None:
        console.print(f"Tables and figures are in {out}", highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: one clear sentence and exit code 2 on bad input, never a traceback."""
    try:
        app()
    except (ValueError, TypeError, ArithmeticError, OSError, RuntimeError) as error:
        if os.environ.get("FEDBILEVEL_TRACEBACK"):
            raise
        print(f"fedbilevel: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"fedbilevel: {stop or 'Stopped.'}", file=sys.stderr)
        sys.exit(130)


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


class progress_lines:
    """A bar on a terminal, plain lines elsewhere; both on standard error, so that tables can be piped."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self.tasks: dict[str, TaskID] = {}
        self.last: dict[str, int] = {}

    def __enter__(self) -> Callable[[str, int, int], None]:
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
            self.bar = Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True)
            self.bar.start()
        return self.report

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def report(self, what: str, done: int, total: int) -> None:
        if self.bar is not None:
            if what not in self.tasks:
                self.tasks[what] = self.bar.add_task(what, total=total)
            self.bar.update(self.tasks[what], completed=done, total=total)
        elif done == total and self.last.get(what) != done:
            self.console.print(f"{what}: {done}/{total}", highlight=False)
        self.last[what] = done


def show(console: Console, title: str, frame: Any) -> None:
    """A DataFrame as a table on the terminal; long texts wrap rather than being cut."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in frame.columns:
        numeric = frame[name].dtype.kind in "fiu"
        table.add_column(str(name).replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*(_cell(value) for value in row))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.4g}"
    return str(value)


if __name__ == "__main__":
    main()
