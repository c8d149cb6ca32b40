"""What a job carries: configuration only, as JSON; and how its run can end early.

Both ends build the same algorithm from the settings with installed code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fedbilevel.hints import whole_number

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
TASKS = ("survey", "prepare", "work", "measure", "finish", "hello", "meet", "repair", "unmask")
"""What a coordinator can ask a site."""
OPERATIONAL = ("min_sites", "reply_timeout", "start_timeout", "record_every")
"""What may differ when a run is submitted again: it decides how to wait, not what is computed."""
LEAST = 3
"""Sites of a secure sum: of two, each would know the other's numbers."""


def quorum(sites: int) -> int:
    """How many of a run's sites a secure sum needs: two thirds, more than half, and three at least."""
    return max(LEAST, -(-2 * sites // 3), sites // 2 + 1)


@dataclass(frozen=True)
class JobSettings:
    """One federated run.

    ``run``: its name, the same whenever it is submitted again.  ``program``: "fair" (the methods of ``fedbilevel.fairness``)
    or "module:function", see `protocol.program`; ``arguments`` are handed to it.  ``sites``: all sites, in
    the order that numbers the clients.  ``double``: compute in float64.  ``min_sites``: how many must answer (None: all).
    ``reply_timeout``: seconds a round waits for a site before it goes on without it; ``start_timeout``: the same while sites
    read their data and compile.  ``record_every``: rounds between two measurements of the objective; None takes none.
    ``secure``: what the sites send is masked, and only sums over `quorum` sites or more are seen; with fewer than three sites
    there is no such sum, and replies are seen one by one.
    """

    run: str
    program: str
    sites: tuple[str, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    double: bool = False
    min_sites: int | None = None
    reply_timeout: float = 300.0
    start_timeout: float = 300.0
    record_every: int | None = None
    secure: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(self.sites))
        if not isinstance(self.run, str) or not NAME.fullmatch(self.run):
            raise ValueError(f"run must be a name of letters, digits, '.', '_' and '-', not {self.run!r}.")
        if not isinstance(self.program, str) or not self.program:
            raise ValueError("program must be 'fair' or 'module:function'.")
        if not self.sites or not all(isinstance(site, str) and NAME.fullmatch(site) for site in self.sites):
            raise ValueError(f"sites must list the names of the sites, not {list(self.sites)!r}.")
        if len(set(self.sites)) != len(self.sites):
            raise ValueError(f"sites names a site twice: {', '.join(self.sites)}.")
        if not isinstance(self.arguments, dict):
            raise TypeError(f"arguments must be a table of settings, not {type(self.arguments).__name__}.")
        whole_number("seed", self.seed, least=0)
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32, not {self.seed}.")
        whole_number("min_sites", self.min_sites, optional=True)
        if self.min_sites is not None and self.min_sites > len(self.sites):
            raise ValueError(f"min_sites={self.min_sites} is more than the {len(self.sites)} sites of the run.")
        whole_number("record_every", self.record_every, optional=True)
        if not isinstance(self.secure, bool):
            raise TypeError(f"secure must be true or false, not {self.secure!r}.")
        for name in ("reply_timeout", "start_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e7:
                raise ValueError(f"{name} must be a positive number of seconds, not {value!r}.")

    @property
    def needed(self) -> int:
        """Sites that must answer for the run to go on."""
        wanted = len(self.sites) if self.min_sites is None else self.min_sites
        return max(wanted, quorum(len(self.sites))) if self.secured else wanted

    @property
    def secured(self) -> bool:
        """Whether replies travel in secure sums."""
        return self.secure and len(self.sites) >= LEAST

    def client(self, site: str) -> int:
        """The number of a site among the clients: part of its random keys."""
        if site not in self.sites:
            raise ValueError(f"{site} is not one of the sites of run {self.run}: {', '.join(self.sites)}.")
        return self.sites.index(site)

    @property
    def digest(self) -> str:
        """What must be equal for two jobs to be the same run."""
        kept = {name: value for name, value in asdict(self).items() if name not in OPERATIONAL}
        if not self.secure:
            del kept["secure"]  # runs that began before there was the setting had none
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        try:
            return json.dumps(asdict(self), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"arguments must hold text, numbers, lists and tables only ({error}).") from error

    @classmethod
    def from_json(cls, text: str) -> JobSettings:
        given = json.loads(text)
        known = {entry.name for entry in fields(cls)}
        strange = set(given) - known if isinstance(given, dict) else {"?"}
        if strange:
            raise ValueError(f"A job has settings this version does not know: {', '.join(sorted(strange))}.")
        return cls(**given)


class TooFewSites(RuntimeError):
    """Fewer sites answered than the run needs: it stands still until those ``missing`` are back, and then goes on."""

    def __init__(self, sentence: str, missing: Sequence[str] = ()) -> None:
        super().__init__(sentence)
        self.missing = list(missing)


class RunFailed(RuntimeError):
    """The run cannot go on, whoever comes back."""


class Stopped(RuntimeError):
    """Somebody asked the run to stop; it can go on from where it was."""
