"""How far something is, for people: a bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from fedbilevel.engines.result import ProgressCallback

WIDTH = 30
"""Letters of a notebook's bar."""


class progress_lines:
    """Hears ``(what, done, total)``; on standard error, so that tables can be piped, and silent if ``quiet``."""

    def __init__(self, quiet: bool = False) -> None:
        from rich.console import Console

        self.quiet = quiet
        self.console = Console(stderr=True)
        self.bar: Bar | None = None
        self.cell: Any = None
        self.tasks: dict[str, TaskID] = {}
        self.last: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Callable[[str, int, int], None]:
        if self.quiet:
            return self.report
        if self.console.is_jupyter:
            from IPython.display import HTML, display

            self.cell = display(HTML(""), display_id=True)
        elif self.console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
            self.bar = Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True)
            self.bar.start()
        return self.report

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def report(self, what: str, done: int, total: int) -> None:
        before, self.last[what] = self.last.get(what), (done, total)
        if self.cell is not None:
            from IPython.display import HTML

            self.cell.update(HTML("".join(_drawn(name, *far) for name, far in self.last.items())))
        elif self.bar is not None:
            if what not in self.tasks:
                self.tasks[what] = self.bar.add_task(what, total=total)
            self.bar.update(self.tasks[what], completed=done, total=total)
        elif done == total and before != (done, total) and not self.quiet:
            self.console.print(f"{what}: {done}/{total}", highlight=False)


def _drawn(what: str, done: int, total: int) -> str:
    bar = f'<progress value="{done}" max="{total}" style="width:{WIDTH}ch"></progress>'
    return f"<div>{html.escape(what)} {bar} {done}/{total}</div>"


@contextmanager
def listener(progress: bool | ProgressCallback | None, what: str) -> Iterator[ProgressCallback | None]:
    """Who hears of progress: the caller's own function, a bar called ``what`` (True), or nobody."""
    if progress is not True:
        if not (progress is None or progress is False or callable(progress)):
            raise TypeError(f"progress must be True or a function, not {progress!r}.")
        yield progress or None
        return
    with progress_lines() as report:
        yield lambda told: report(what, told.done, told.rounds)
