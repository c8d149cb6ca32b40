"""What a site allows: its own file, ``local/fedbilevel.toml`` in its kit, which no job can change.

docs/federation.md shows all of it, but for ``functions = ["mylab.federated:program"]`` in [policy]: the programs outside
fedbilevel that jobs may name.  On the coordinator's own kit only ``functions`` and ``[state] folder`` are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel import storage
from fedbilevel.engines.stages import Refused
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
        sections = storage.read_toml(file.read_text())
    except (storage.Unreadable, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not readable as TOML: {error}.") from error
    for section, entries in sections.items():
        if section not in KNOWN or not isinstance(entries, dict):
            raise ValueError(
                f"{file}: there is no section [{section}]; use {', '.join(f'[{name}]' for name in KNOWN)}."
            )
        for name in entries:
            if name not in KNOWN[section]:
                raise ValueError(f"{file}: [{section}] has no setting {name!r}; use {', '.join(KNOWN[section])}.")
    data, policy, state = (sections.get(name, {}) for name in ("data", "policy", "state"))
    if "table" in data and "arrays" in data:
        raise ValueError(f"{file}: [data] names a table and arrays; a site offers one of them.")

    def names(section: str, name: str, default: Sequence[str] = ()) -> tuple[str, ...]:
        values = sections.get(section, {}).get(name, list(default))
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{file}: {section}.{name} must be a list of names.")
        return tuple(values)

    def path(value: Any) -> Path | None:
        return None if value is None else (folder / str(value)).resolve()

    tell = names("policy", "tell", TOLD_BY_DEFAULT)
    strange = [name for name in tell if name not in TELL]
    if strange:
        raise ValueError(f"{file}: policy.tell lists {strange[0]!r}; choose from {', '.join(TELL)}.")
    least = {name: policy.get(name, 1) for name in ("minimum_rows", "minimum_batch")}
    for name, value in least.items():
        whole_number(f"policy.{name}", value)
    source = Source(path(data.get("table")), path(data.get("arrays")), names("data", "columns"))
    privacy = Privacy(**sections["privacy"]) if "privacy" in sections else None
    functions = names("policy", "functions")
    return Policy(source, tell, functions, **least, privacy=privacy, folder=path(state.get("folder")))
