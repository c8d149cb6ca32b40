"""What a site takes part in: runs that a person there has approved, or that lie within bounds the site has set.

A run is known by the digest of its settings: program, schema, method, model, steps, rounds, sites, seed.  In the folder of the
site's states, ``approved.json`` lists the digests, and ``pending/RUN.json`` holds the settings of a run that waits.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from fedbilevel import storage
from fedbilevel.engines.stages import Program, Refused, Stage
from fedbilevel.federation.protocol.compiled import options_of
from fedbilevel.federation.protocol.policy import Approval, Policy
from fedbilevel.federation.protocol.program import BUILT_IN
from fedbilevel.federation.protocol.settings import JobSettings

APPROVED, PENDING = "approved.json", "pending"
ANY, BOUNDS = "any", "bounds"
MOST_PENDING = 100
"""Runs that wait; later ones are refused without being kept."""


def settle(settings: JobSettings, program: Program, policy: Policy, folder: Path) -> bool:
    """Whether the run is approved by the site's bounds (True) or by a person; refused where it is not, and then it waits."""
    with _held(folder):
        known = read_approved(folder)
        if known.get(settings.digest, {}).get("by", BOUNDS) != BOUNDS:
            return False
        others = {digest: entry for digest, entry in known.items() if digest != settings.digest}
        # Bounds are those of today, also for a run that was within them before.
        outside: str | None = "approve.auto is false"
        if policy.approval.auto:
            outside = _outside(settings.program, program, policy.approval, others)
        if outside is None:
            _approve(folder, others, settings, BOUNDS)
            return True
        (folder / PENDING).mkdir(exist_ok=True)
        file = folder / PENDING / f"{settings.run}.json"
        if file.exists() or len(pending(folder)) < MOST_PENDING:
            storage.write(file, settings.to_json())
        raise Refused("approval", f"Not approved by itself: {outside}. Look at it with: federate site approve.")


def approve(settings: JobSettings, folder: Path, by: str) -> None:
    """A person says yes to ``settings``; ValueError where another run of that name waits by now."""
    with _held(folder):
        file = folder / PENDING / f"{settings.run}.json"
        if file.exists():
            check_shown(JobSettings.from_json(file.read_text()), settings.digest)
        _approve(folder, read_approved(folder), settings, by)
        file.unlink(missing_ok=True)


def check_shown(waiting: JobSettings, digest: str) -> None:
    """The name of a run says nothing of what it does: a person has seen the settings with ``digest``, and no others."""
    if waiting.digest != digest:
        raise ValueError(f"The run {waiting.run!r} that waits is not the one that was shown: look at it again.")


def pending(folder: Path) -> dict[str, JobSettings]:
    """The runs that wait, by name."""
    files = sorted((folder / PENDING).glob("*.json"))
    return {file.stem: JobSettings.from_json(file.read_text()) for file in files}


def read_approved(folder: Path) -> dict[str, dict[str, str]]:
    """By digest: the run's name, who approved it, when."""
    file = folder / APPROVED
    try:
        return dict(json.loads(file.read_text())) if file.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise Refused("site", f"{file} cannot be read ({error}).") from error


def check_stage(stage: Stage, rounds: int, approval: Approval) -> None:
    """Bounds that are known only with the stage at hand; ``rounds``: of all stages so far."""
    if rounds > approval.rounds:
        raise Refused("bounds", f"{rounds} rounds are more than approve.rounds = {approval.rounds}.")
    for name, value in options_of(stage.algorithm).items():
        if name.endswith("step") and isinstance(value, int | float) and value > approval.step:
            raise Refused("bounds", f"{name} = {value:g} is more than approve.step = {approval.step:g}.")


def _outside(name: str, program: Any, approval: Approval, others: dict[str, dict[str, str]]) -> str | None:
    """Which bound the run of the program ``name`` is outside of, in words."""
    schema, recipe = getattr(program, "schema", None), getattr(program, "recipe", None)
    method = name if recipe is None else recipe.method
    if schema is not None and ANY not in approval.schemas and schema.digest not in approval.schemas:
        return f"the schema {schema.digest} is not among approve.schemas"
    if name in BUILT_IN and approval.methods and method not in approval.methods:
        return f"the method {method} is not among approve.methods"
    if len([entry for entry in others.values() if entry["by"] == BOUNDS]) >= approval.runs:
        return f"approve.runs = {approval.runs} runs were approved already"
    return None


def _approve(folder: Path, known: dict[str, dict[str, str]], settings: JobSettings, by: str) -> None:
    entry = {"run": settings.run, "by": by, "at": time.strftime("%Y-%m-%dT%H:%M:%S")}
    storage.write_json(folder / APPROVED, {**known, settings.digest: entry})


def _held(folder: Path) -> storage.Lock:
    folder.mkdir(parents=True, exist_ok=True)
    return storage.lock(folder / f".{APPROVED}.lock", seconds=-1)
