"""What the commands of ``federate`` share: the extra they need, options, a silent NVFlare, progress by round."""

from __future__ import annotations

import csv
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from fedbilevel.federation.operator.provision import Kits

FOLDER = Path("federation")
KitFolder = Annotated[Path, typer.Argument(metavar="KIT", help="A kit's folder.")]
LINE_SECONDS = 5.0
"""Without a terminal, a line about the rounds this often."""


def need_nvflare() -> None:
    """One sentence where the extra is missing; and NVFlare's own lines are kept off the terminal."""
    if find_spec("nvflare") is None:
        raise ValueError("This command needs NVFlare: pip install 'fedbilevel[federation]'.")
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger().setLevel(logging.CRITICAL)
    logging.disable(logging.ERROR)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does: everything that was started is stopped on the way out."""

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(f"Stopped by {signal.Signals(number).name}.")

    numbers = [signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def hushed(file: Path | None = None) -> Iterator[None]:
    """NVFlare prints where it likes, from threads too: standard output and error of the process go to ``file`` (or nowhere).

    What we print meanwhile goes to `Watch`'s own copy of the terminal.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(os.devnull if file is None else file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    kept = os.dup(1), os.dup(2)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(target)


class Watch:
    """Rounds as they are done, with bytes and time per site: a table on a terminal, plain lines elsewhere.

    `look` is called often and reads what the coordinator has written since.
    """

    def __init__(self, folder: Path, quiet: bool) -> None:
        self.folder, self.quiet = folder, quiet
        self.stream = os.fdopen(os.dup(2), "w", buffering=1)
        self.console = Console(file=self.stream, force_terminal=sys.stderr.isatty(), highlight=False, soft_wrap=True)
        self.live: Live | None = None
        self.place = 0
        self.sites: dict[str, dict[str, Any]] = {}
        self.last_line = 0.0
        self.shown = ""

    def __enter__(self) -> Watch:
        if not self.quiet and self.console.is_terminal:
            self.live = Live(console=self.console, transient=True, auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()
        self.stream.close()

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False)

    def look(self, now: float) -> None:
        from fedbilevel.federation.protocol.record import read_status

        self._read()
        status = read_status(self.folder) or {}
        if self.quiet or not status.get("round") or not self.sites:
            return
        head = f"{status['stage']}: round {status['round']} of {status['rounds']}"
        if status.get("away"):
            head += f"; away: {', '.join(status['away'])}"
        if self.live is not None:
            self.live.update(self._table(head), refresh=True)
        elif head != self.shown and (now - self.last_line > LINE_SECONDS or status["round"] == status["rounds"]):
            self.shown, self.last_line = head, now
            each = "; ".join(
                f"{name} {one['seconds'] or '?'} s, up {size(one['up'])}, down {size(one['down'])}"
                for name, one in self.sites.items()
            )
            self.say(f"{head} ({each})")

    def _read(self) -> None:
        """New whole lines of exchanges.csv."""
        with suppress(OSError), (self.folder / "exchanges.csv").open(newline="") as file:
            head = file.readline()
            if self.place > os.fstat(file.fileno()).st_size:
                self.place, self.sites = 0, {}  # the run went back to its last complete round
            file.seek(max(self.place, len(head)))
            text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self.place = max(self.place, len(head)) + len(whole.encode())
            for row in csv.DictReader([head, *whole.splitlines(keepends=True)]):
                one = self.sites.setdefault(row["site"], {"up": 0, "down": 0, "answered": 0})
                one["up"] += int(row["bytes_up"])
                one["down"] += int(row["bytes_down"])
                one["answered"] += row["outcome"].startswith("answered")
                one["seconds"] = row["seconds"][:5]
                one["outcome"] = row["outcome"]

    def _table(self, head: str) -> Table:
        table = Table(title=head, title_justify="left", header_style="bold")
        for name in ("site", "answered", "last s", "up", "down", "last outcome"):
            table.add_column(name, justify="left" if name in ("site", "last outcome") else "right")
        for name, one in self.sites.items():
            table.add_row(
                name, str(one["answered"]), one["seconds"], size(one["up"]), size(one["down"]), one["outcome"]
            )
        return table


def size(count: int) -> str:
    """Bytes for people."""
    number = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError("unreachable")


def kits_at(folder: Path | None, admin: Path | None, server: Path | None) -> Kits:
    """Kits from the federation's folder, or the two that the coordinator's machine needs."""
    from fedbilevel.federation.operator.kits import open_kit
    from fedbilevel.federation.operator.provision import Kits, read_kits

    if admin is None and server is None:
        return read_kits(folder or FOLDER)
    if admin is None or server is None:
        raise ValueError(
            "--admin and --server belong together: the coordinator's kit and the server's, on its machine."
        )
    person = open_kit(admin, "person")
    return Kits(open_kit(server, "server").folder, person.folder, {}, person.name)
