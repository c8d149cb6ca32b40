"""A rehearsal at one site, without any network: the job's whole course with one round a stage, and what would have left.

The coordinator is played here, with this site as the only one.  What a site does in a rehearsal is what it does in a run, by
the same code and under the same policy; its private state goes to a folder that is thrown away.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.federation.protocol.coordinator import Coordinator, Reply
from fedbilevel.federation.protocol.policy import Policy
from fedbilevel.federation.protocol.program import make_program
from fedbilevel.federation.protocol.record import Record
from fedbilevel.federation.protocol.settings import JobSettings, RunFailed, TooFewSites
from fedbilevel.federation.protocol.site import Site


class Left(NamedTuple):
    """Something that left the site: when, what, how large."""

    task: str
    name: str
    shape: str
    bytes: int


def rehearse(name: str, settings: JobSettings, policy: Policy) -> tuple[list[Left], list[str]]:
    """Run ``settings`` at the site ``name`` alone: everything that would have left, in order, and the site's own log.

    ValueError with the site's own reason where it would not take part.
    """
    alone = replace(settings, sites=(name,), min_sites=None, record_every=1, arguments=_short(settings))
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fedbilevel-") as folder:
        site = Site(name, alone, policy, Path(folder) / "site", said.append)
        record = Record(Path(folder) / "run", alone)
        channel = _Alone(name, site)
        try:
            Coordinator(alone, make_program(alone.program, alone.arguments, policy.functions), record, channel).run()
        except (RunFailed, TooFewSites) as error:
            # Here, unlike at the coordinator, the site's own sentence may be read.
            reasons = [line for line in said if line.startswith(("refused", "could not"))]
            raise ValueError(f"{name} would not take part: {reasons[-1] if reasons else error}") from error
        finally:
            record.close()
    return channel.left, said


def _short(settings: JobSettings) -> dict[str, Any]:
    """The fair program with one round a stage; any other as it is."""
    if settings.program != "fair":
        return settings.arguments
    recipe = {**settings.arguments.get("recipe", {}), "steps": 1, "weight_steps": 1}
    return {**settings.arguments, "recipe": recipe}


class _Alone:
    """A channel to the one site that keeps a list of what comes out of it."""

    def __init__(self, name: str, site: Site) -> None:
        self.name, self.site = name, site
        self.left: list[Left] = []

    def sites(self) -> list[str]:
        return [self.name]

    def ask(
        self, task: str, requests: Mapping[str, dict[str, Any]], awaited: set[str], seconds: float
    ) -> dict[str, Reply]:
        told = self.site.answer(task, requests[self.name])
        self.left += [Left(task, name, *described) for name, described in _listed(told)]
        return {self.name: Reply(told, 0.0)}


def _listed(told: dict[str, Any]) -> Iterator[tuple[str, tuple[str, int]]]:
    replies = {f"reply {number + 1}": array for number, array in enumerate(told.get("arrays", ()))}
    for name, array in {**replies, **told.get("numbers", {})}.items():
        yield name, (f"{array.dtype}[{', '.join(map(str, array.shape))}]", array.nbytes)
    for name, value in told.items():
        if name in ("refused", "note"):
            yield name, ("a sentence", len(str(value)))
        elif name not in ("arrays", "numbers"):
            yield name, ("one number", 8)
