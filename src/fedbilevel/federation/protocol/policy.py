"""What a site allows: its own file, ``local/fedbilevel.toml`` in its kit, which no job can change.

docs/reference/site-policy.md shows all of it, but for ``functions = ["mylab.federated:program"]`` in [policy]: the programs
outside fedbilevel that jobs may name.  On the coordinator's own kit only ``functions`` and ``[state] folder`` are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel import storage
from fedbilevel.engines.stages import TELL, Refused
from fedbilevel.federation.protocol.settings import LEAST as FEWEST
from fedbilevel.hints import positive, whole_number

if TYPE_CHECKING:
    import pandas as pd

    from fedbilevel.tables.reading import Table

FILE = "fedbilevel.toml"
SECURE_SUMS = ("from-three", "always", "optional")
TOLD_BY_DEFAULT = ("rows", "seconds", "objective", "smoothness", "statistics")


@dataclass(frozen=True)
class Source:
    """A site's data as programs see it: a table of which only the listed columns can be read, or named arrays.

    ``mapping``: the site's own file that brings its table into the common language, in which the columns are listed; no job
    brings one along.
    """

    table: Path | None = None
    arrays_file: Path | None = None
    columns: tuple[str, ...] = ()
    minimum_cell: int = 1
    mapping: Path | None = None
    number: int = 0

    def frame(self, columns: tuple[str, ...]) -> pd.DataFrame:
        """The table's ``columns``; refused where the site does not list one of them."""
        if self.table is None:
            raise Refused("source", "This site offers no table.")
        barred = [column for column in columns if column not in self.columns]
        if barred:
            raise Refused("columns", f"It is {barred[0]!r}.")
        import pandas as pd  # sites that offer arrays start without it

        return pd.concat(list(self.opened().chunks(columns)))

    def opened(self) -> Table:
        """The table in the common language."""
        assert self.table is not None
        from fedbilevel.tables.mapping import Mapping
        from fedbilevel.tables.reading import open_table

        table = open_table(self.table)
        return table if self.mapping is None else Mapping.read(self.mapping).alone(table)

    def arrays(self) -> dict[str, np.ndarray]:
        if self.arrays_file is None:
            raise Refused("source", "This site offers no arrays.")
        with self.arrays_file.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


@dataclass(frozen=True)
class Privacy:
    """Clipping to norm ``clip`` and Gaussian noise of ``noise`` times ``clip`` on every reply; stop at (epsilon, delta).

    ``shared``: in a secure sum, where nobody sees the reply, its share of that noise: the sum has all of it.
    """

    clip: float
    noise: float = 0.0
    epsilon: float | None = None
    delta: float = 1e-5
    shared: bool = False

    def __post_init__(self) -> None:
        positive("privacy.clip", self.clip)
        if not isinstance(self.shared, bool):
            raise ValueError(f"privacy.shared must be true or false, not {self.shared!r}.")
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
class Approval:
    """What this site takes part in without asking a person (``auto``): runs within all of these bounds, and no others.

    ``schemas``: SHA-256 of the schemas that may be used, or "any".  ``methods``: of a fit, or tune, or audit; none listed: all.
    ``rounds``, ``runs``: how many at most; ``step``: the largest step size.
    """

    auto: bool = False
    schemas: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    rounds: int = 2000
    runs: int = 20
    step: float = 10.0

    def __post_init__(self) -> None:
        if not isinstance(self.auto, bool):
            raise ValueError(f"approve.auto must be true or false, not {self.auto!r}.")
        for name in ("rounds", "runs"):
            whole_number(f"approve.{name}", getattr(self, name))
        positive("approve.step", self.step)


@dataclass(frozen=True)
class Policy:
    """The file, checked.

    ``minimum_rows``: nothing is told of fewer rows, and nothing computed on fewer, weights taken into account;
    ``minimum_batch``: no step reads fewer; ``minimum_cell``: nothing is told of a group, class or column with fewer.
    ``largest_scale``: how many times larger or smaller than the site's own a common spread may be, and how many of the
    site's own spreads away a common mean.  ``largest_megabytes``: of one message.

    ``secure_sums``: "from-three" takes part in runs of three sites and more only where nothing but sums over sites is seen;
    "always" in no others at all; "optional" leaves that to whoever submits.  ``minimum_sites``: that a sum is of.
    ``partners``: the other sites that it may be of, since whoever makes kits could make up sites; none listed: any.
    ``secret_draws``: which rows a batch holds follows from a secret of the site as well as from the run's seed, and so do the
    signs of a sketch once those that everybody knows would leave too few rows open (`Site._signs`).
    """

    source: Source = field(default_factory=Source)
    tell: tuple[str, ...] = TOLD_BY_DEFAULT
    functions: tuple[str, ...] = ()
    minimum_rows: int = 20
    minimum_batch: int = 16
    minimum_cell: int = 10
    largest_scale: float = 10.0
    largest_megabytes: float = 64.0
    privacy: Privacy | None = None
    folder: Path | None = None
    approval: Approval = field(default_factory=Approval)
    secure_sums: str = "from-three"
    minimum_sites: int = 3
    partners: tuple[str, ...] = ()
    secret_draws: bool = True

    def __post_init__(self) -> None:
        if self.secure_sums not in SECURE_SUMS:
            raise ValueError(f"policy.secure_sums must be {', '.join(SECURE_SUMS)}, not {self.secure_sums!r}.")
        if not isinstance(self.secret_draws, bool):
            raise ValueError(f"policy.secret_draws must be true or false, not {self.secret_draws!r}.")
        for name in LEAST:
            whole_number(f"policy.{name}", getattr(self, name))
        for name in LARGEST:
            positive(f"policy.{name}", getattr(self, name))
        # Programs see the source alone.
        object.__setattr__(self, "source", replace(self.source, minimum_cell=self.minimum_cell))

    def may_tell(self, name: str) -> bool:
        return name in self.tell

    def check_sums(self, others: Sequence[str], needed: int | None) -> None:
        """Refuse a run with ``others`` whose secure sums are of ``needed`` sites at least (None: it has none)."""
        if needed is None and (self.secure_sums == "always" or (self.secure_sums == "from-three" and len(others) >= 2)):
            raise Refused("secure", f"policy.secure_sums = {self.secure_sums!r}, and there are {len(others)} others.")
        if needed is None and self.secure_sums != "optional" and self.minimum_sites > FEWEST:
            raise Refused("cohort", f"There are no sums, and policy.minimum_sites = {self.minimum_sites}.")
        strange = [name for name in others if self.partners and name not in self.partners]
        if needed is not None and strange:
            raise Refused("cohort", f"{strange[0]} is not among policy.partners.")
        if needed is not None and needed < self.minimum_sites:
            raise Refused("cohort", f"{needed} sites are fewer than policy.minimum_sites = {self.minimum_sites}.")

    def require(self, name: str) -> None:
        if not self.may_tell(name):
            raise Refused(f"tell {name}")


LEAST = ("minimum_rows", "minimum_batch", "minimum_cell", "minimum_sites")
LARGEST = ("largest_scale", "largest_megabytes")
KNOWN: dict[str, tuple[str, ...]] = {
    "data": ("table", "arrays", "columns", "mapping"),
    "policy": ("tell", "functions", "secure_sums", "secret_draws", "partners", *LEAST, *LARGEST),
    "approve": tuple(each.name for each in fields(Approval)),
    "privacy": tuple(each.name for each in fields(Privacy)),
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
    bounds = {name: policy[name] for name in ("secure_sums", "secret_draws", *LEAST, *LARGEST) if name in policy}
    lists = {name: names("approve", name) for name in ("schemas", "methods")}
    approval = Approval(**{**sections.get("approve", {}), **lists})
    if "mapping" in data and "table" not in data:
        raise ValueError(f"{file}: [data] names a mapping but no table; a mapping changes the cells of a table.")
    table, arrays, mapping = (path(data.get(name)) for name in ("table", "arrays", "mapping"))
    source = Source(table, arrays, names("data", "columns"), mapping=mapping)
    privacy = Privacy(**sections["privacy"]) if "privacy" in sections else None
    functions, bounds["partners"] = names("policy", "functions"), names("policy", "partners")
    folder_named = path(state.get("folder"))
    return Policy(source, tell, functions, **bounds, privacy=privacy, folder=folder_named, approval=approval)
