"""What the commands for studies share: a bar with the time left, and a folder that the same command goes on with."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fedbilevel.cli.terminal import check_folder, prepare_jax

if TYPE_CHECKING:
    from fedbilevel.studies.driver import Report, Standing

Result = TypeVar("Result")
EVERY = 5.0
"""Seconds between two lines where there is no terminal to draw a bar on."""


def prepare(out: Path | None) -> None:
    """Refuse an unusable folder before anything slow is loaded."""
    check_folder(out)
    prepare_jax()


def conducted(run: Callable[[Report, str], Result], out: Path | None, quiet: bool) -> Result:
    """What ``run(report, line)`` gives, with progress on standard error; ``line`` is the command as it was typed."""
    with Bar(silent=quiet) as bar:
        try:
            return run(bar.report, shlex.join(["fedbilevel", *sys.argv[1:]]))
        except KeyboardInterrupt:
            if out is None:
                raise
            raise KeyboardInterrupt(f"Stopped; the same command goes on from what is in {out}.") from None


class Bar:
    """A bar on a terminal, a line now and then elsewhere; both on standard error."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.last = time.monotonic()

    def __enter__(self) -> Bar:
        if self.console.is_terminal and not self.silent:
            wide = self.console.width >= 90
            columns = (BarColumn(30 if wide else 12), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=self.console, transient=True)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def report(self, standing: Standing) -> None:
        if self.silent:
            return
        done, total, seconds, what = standing
        left = "done" if done == total else what if seconds is None else f"{_time(seconds)} left: {what}"
        if self.bar is not None:
            if self.task is None:
                self.task = self.bar.add_task("", total=total, left=left)
            self.bar.update(self.task, completed=done, total=total, left=left)
        elif time.monotonic() - self.last >= EVERY or done == total:
            self.last = time.monotonic()
            self.console.print(f"{done}/{total}, {left}", highlight=False, soft_wrap=True)


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
