"""What the commands of ``federate`` share: the extra they need, options, a silent NVFlare, tables, progress by round."""

from __future__ import annotations

import csv
import json
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from fedbilevel.cli.terminal import show

if TYPE_CHECKING:
    from fedbilevel.federation.nvflare.sessions import Kits

FOLDER = Path("federation")
KitFolder = Annotated[Path, typer.Argument(metavar="KIT", help="A kit's folder.")]
KitsFolder = Annotated[Path | None, typer.Option("--kits", help="The federation's folder.", metavar="DIR")]
AdminKit = Annotated[Path | None, typer.Option(help="The coordinator's kit, instead of --kits.")]
ServerKit = Annotated[Path | None, typer.Option(help="The server's kit, with --admin.")]
LocalSteps = Annotated[int, typer.Option(help="Steps between two exchanges.", min=1)]
Seed = Annotated[int, typer.Option(help="Where all randomness starts.", min=0)]
Metric = Annotated[str, typer.Option(help="equal_opportunity, equalized_odds or demographic_parity.")]
UP_SECONDS = 60.0
"""How long processes may take to come up before that is said."""
LINE_SECONDS = 5.0
"""Without a terminal, a line about the rounds this often."""


def need_nvflare() -> None:
    """One sentence where the extra is missing; and NVFlare's own lines are kept off the terminal."""
    if find_spec("nvflare") is None:
        raise ValueError("This command needs NVFlare: pip install 'fedbilevel[federation]'.")
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger().setLevel(logging.CRITICAL)
    logging.disable(logging.ERROR)


def kits_at(folder: Path | None, admin: Path | None, server: Path | None) -> Kits:
    """Kits from the federation's folder, or the two that the coordinator's machine needs."""
    from fedbilevel.federation.nvflare.sessions import Kits
    from fedbilevel.federation.operator.kits import open_kit
    from fedbilevel.federation.operator.provision import kits_of
    from fedbilevel.federation.operator.roster import read_roster

    if admin is None and server is None:
        return kits_of(folder or FOLDER, read_roster(folder or FOLDER))
    if admin is None or server is None:
        raise ValueError(
            "--admin and --server belong together: the coordinator's kit and the server's, on its machine."
        )
    person = open_kit(admin, "person")
    return Kits(open_kit(server, "server").folder, person.folder, {}, person.name)


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
def hushed() -> Iterator[None]:
    """NVFlare prints where it likes, from threads too: standard output and error of the process go nowhere.

    What we print meanwhile goes to `Watch`'s own copy of the terminal.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(1), os.dup(2)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


def tell(as_json: bool, quiet: bool, told: Mapping[str, Any], shown: Iterable[str | tuple[str, Any]]) -> None:
    """``told`` for machines, or for people what is ``shown``: tables with their titles, and lines."""
    if as_json:
        print(json.dumps(told, ensure_ascii=False, allow_nan=False))
    elif not quiet:
        console = Console() if sys.stdout.isatty() else Console(width=120)
        for piece in shown:
            if isinstance(piece, str):
                console.print(piece, highlight=False, soft_wrap=True, markup=False)
            else:
                show(console, *piece)


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
                f"{name} {site['seconds'] or '?'} s, up {size(site['up'])}, down {size(site['down'])}"
                for name, site in self.sites.items()
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
                site = self.sites.setdefault(row["site"], {"up": 0, "down": 0, "answered": 0})
                site["up"] += int(row["bytes_up"])
                site["down"] += int(row["bytes_down"])
                site["answered"] += row["outcome"].startswith("answered")
                site["seconds"], site["outcome"] = row["seconds"][:5], row["outcome"]

    def _table(self, head: str) -> Table:
        table = Table(title=head, title_justify="left", header_style="bold")
        for name in ("site", "answered", "last s", "up", "down", "last outcome"):
            table.add_column(name, justify="left" if name in ("site", "last outcome") else "right")
        for name, site in self.sites.items():
            bytes_both = size(site["up"]), size(site["down"])
            table.add_row(name, str(site["answered"]), site["seconds"], *bytes_both, site["outcome"])
        return table


def size(count: int) -> str:
    """Bytes for people."""
    number, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
