"""What a site allows: its own file, ``local/fedbilevel.toml`` in its kit, which no job can change.

    [data]
    table = "patients.csv"              # or arrays = "rows.npz"; relative to this file
    columns = ["age", "sex", "outcome"] # the columns jobs may read

    [policy]
    tell = ["rows", "seconds", "objective"]   # what may leave besides replies and statistics
    functions = ["mylab.federated:program"]   # programs outside fedbilevel that jobs may name
    minimum_rows = 20                   # no training, and no statistics, on fewer rows
    minimum_batch = 1                   # no steps on fewer rows than this

    [privacy]                           # see fedbilevel.federation.protocol.privacy
    clip = 1.0
    noise = 1.0
    epsilon = 8.0
    delta = 1e-5

    [state]
    folder = "/var/lib/fedbilevel"      # what stays here between rounds; default: fedbilevel-state in the kit

On the coordinator's own kit only ``functions`` and ``folder`` are read.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel.federation.protocol.errors import Refused
from fedbilevel.problem import positive, whole_number

if TYPE_CHECKING:
    import pandas as pd

FILE = "fedbilevel.toml"
TELL = ("rows", "groups", "seconds", "objective", "smoothness", "statistics", "report")
"""What a site may tell besides the replies of the plan's phases."""
TOLD_BY_DEFAULT = ("rows", "seconds", "objective", "smoothness", "statistics")


@dataclass(frozen=True)
class Source:
    """A site's data as programs see it: a table of which only the listed columns can be read, or named arrays."""

    table: Path | None = None
    arrays_file: Path | None = None
    columns: tuple[str, ...] = ()

    def frame(self, columns: tuple[str, ...]) -> pd.DataFrame:
        """The table's ``columns``; refused where the site does not list one of them."""
        if self.table is None:
            raise Refused("This site offers arrays, not a table; the job asks for a table.")
        barred = [column for column in columns if column not in self.columns]
        if barred:
            raise Refused(f"The job asks for the column {barred[0]!r}, which this site does not offer.")
        import pandas as pd  # sites that offer arrays start without it

        from fedbilevel.tables.reading import open_table

        return pd.concat(list(open_table(self.table).chunks(columns)))

    def arrays(self) -> dict[str, np.ndarray]:
        if self.arrays_file is None:
            raise Refused("This site offers a table, not arrays; the job asks for arrays.")
        with self.arrays_file.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


@dataclass(frozen=True)
class Privacy:
    """Clipping to norm ``clip`` and Gaussian noise of ``noise`` times ``clip`` on every reply; stop at (epsilon, delta)."""

    clip: float
    noise: float = 0.0
    epsilon: float | None = None
    delta: float = 1e-5

    def __post_init__(self) -> None:
        positive("privacy.clip", self.clip)
        if isinstance(self.noise, bool) or not isinstance(self.noise, int | float) or not 0 <= self.noise < 1e6:
            raise ValueError(f"privacy.noise must be a number of at least 0, not {self.noise!r}.")
        if self.epsilon is not None:
            positive("privacy.epsilon", self.epsilon)
            if self.noise == 0:
                raise ValueError(
                    "privacy.epsilon needs privacy.noise: without noise nothing is spent and all is shown."
                )
        positive("privacy.delta", self.delta)
        if self.delta >= 1:
            raise ValueError(f"privacy.delta must lie between 0 and 1, not {self.delta}.")


@dataclass(frozen=True)
class Policy:
    """The file, checked."""

    source: Source = field(default_factory=Source)
    tell: tuple[str, ...] = TOLD_BY_DEFAULT
    functions: tuple[str, ...] = ()
    minimum_rows: int = 1
    minimum_batch: int = 1
    privacy: Privacy | None = None
    folder: Path | None = None

    def may_tell(self, name: str) -> bool:
        return name in self.tell

    def require(self, name: str, why: str) -> None:
        if not self.may_tell(name):
            raise Refused(f"This site does not tell its {name}, which {why}.")


KNOWN: dict[str, tuple[str, ...]] = {
    "data": ("table", "arrays", "columns"),
    "policy": ("tell", "functions", "minimum_rows", "minimum_batch"),
    "privacy": ("clip", "noise", "epsilon", "delta"),
    "state": ("folder",),
}


def read_policy(folder: Path) -> Policy:
    """The policy in ``folder`` (a kit's ``local``); without a file, nothing is offered and the defaults hold."""
    file = folder / FILE
    if not file.exists():
        return Policy()
    try:
        found = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not readable as TOML: {error}.") from error
    for section, entries in found.items():
        if section not in KNOWN or not isinstance(entries, dict):
            raise ValueError(
                f"{file}: there is no section [{section}]; use {', '.join(f'[{name}]' for name in KNOWN)}."
            )
        for name in entries:
            if name not in KNOWN[section]:
                raise ValueError(f"{file}: [{section}] has no setting {name!r}; use {', '.join(KNOWN[section])}.")
    data, policy, state = (found.get(name, {}) for name in ("data", "policy", "state"))
    if "table" in data and "arrays" in data:
        raise ValueError(f"{file}: [data] names a table and arrays; a site offers one of them.")
    tell = _names(file, "policy.tell", policy.get("tell", list(TOLD_BY_DEFAULT)))
    strange = [name for name in tell if name not in TELL]
    if strange:
        raise ValueError(f"{file}: policy.tell lists {strange[0]!r}; choose from {', '.join(TELL)}.")
    for name in ("minimum_rows", "minimum_batch"):
        whole_number(f"policy.{name}", policy.get(name, 1))
    source = Source(
        _path(folder, data.get("table")),
        _path(folder, data.get("arrays")),
        _names(file, "data.columns", data.get("columns", [])),
    )
    return Policy(
        source,
        tell,
        _names(file, "policy.functions", policy.get("functions", [])),
        policy.get("minimum_rows", 1),
        policy.get("minimum_batch", 1),
        Privacy(**found["privacy"]) if "privacy" in found else None,
        _path(folder, state.get("folder")),
    )


def _names(file: Path, setting: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{file}: {setting} must be a list of names.")
    return tuple(values)


def _path(folder: Path, value: Any) -> Path | None:
    return None if value is None else (folder / str(value)).resolve()
