"""A rehearsal at one site, without any network: the job's whole course with one round a stage, and what would have left.

The coordinator is played here, with this site as the only one.  What a site does in a rehearsal is what it does in a run, by
the same code and under the same policy; its private state goes to a folder that is thrown away.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.algorithms import quasi_newton
from fedbilevel.fairness.audit import AuditProgram
from fedbilevel.fairness.program import FairProgram
from fedbilevel.federation.protocol.approval import approve
from fedbilevel.federation.protocol.coordinator import Coordinator, Reply
from fedbilevel.federation.protocol.policy import Policy
from fedbilevel.federation.protocol.privacy import read_account
from fedbilevel.federation.protocol.program import make_program
from fedbilevel.federation.protocol.record import Record
from fedbilevel.federation.protocol.settings import LEAST, JobSettings, RunFailed, TooFewSites
from fedbilevel.federation.protocol.site import Site
from fedbilevel.tables.schema import MISSING, Schema
from fedbilevel.tuning.program import TuneProgram


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
    alone = replace(settings, sites=(name,), min_sites=None, record_every=1, arguments=_short(settings), secure=False)
    policy = replace(policy, secure_sums="optional")  # one site has nobody to be summed with
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fedbilevel-") as folder:
        approve(alone, Path(folder) / "site", "rehearsal")  # whoever rehearses is the person to ask
        site = Site(name, alone, policy, Path(folder) / "site", said.append)
        site.in_sums = settings.secured
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


WHEN = {
    "survey": "Before training, exactly and on no privacy account",
    "prepare": "At the start of a stage, exactly",
    "work": "In every round",
    "measure": "At recorded rounds",
    "closing": "After training, exactly and on no privacy account",
    "finish": "At the end, exactly and on no privacy account",
}


WORDS = {
    "statistics/rows": "how many rows there are",
    "statistics/counts": "how many values every number column has",
    "statistics/sums": "the sum of every number column",
    "statistics/squares": "the sum of its squares",
    "rows": "how many rows are for training and validation",
    "smoothness": "how steep the loss is",
    "groups": "how many rows every group has",
    "labels": "how many rows every class has",
    "objective": "the loss on all rows",
    "seconds": "how long the site computed",
    "decisions": "how many rows of every group and class get which decision",
    "hidden": "which groups are too small to be told",
    "scores/places": "which bins of probability are predicted",
    "scores/counts": "how many rows each of them has",
    "scores/sums": "sums of the predicted probabilities, and of their squared distances to the truth",
    "moments": "sums of the number, the prediction and the error, and of their powers, by group",
    "absent": "how many rows have no prediction",
    "doubtful": "how many rows have labels that are doubtful",
}


def in_words(settings: JobSettings, policy: Policy, folder: Path, left: list[Left], said: list[str]) -> Iterator[str]:
    """What a run would do at a site and take out of it, for the person who approves it.

    ``folder``: of the site's states; ``left`` and ``said`` are what `rehearse` returned.
    """
    program = make_program(settings.program, settings.arguments, policy.functions)
    phases = len([thing for thing in left if (thing.task, thing.name) == ("work", "reply 1")])
    replies, upto = None, ""
    yield f"Run {settings.run}, with {', '.join(settings.sites)}."
    if isinstance(program, FairProgram):
        recipe = program.recipe
        rounds, _ = recipe.total
        # A path is rehearsed as a whole; of other methods each stage has one round.
        replies = phases if program.path else rounds if program.two_stages else rounds * phases
        yield f"It trains a {program.model.kind} model by {recipe.method}, in {rounds} rounds."
    elif isinstance(program, TuneProgram):
        replies, upto = quasi_newton.most_replies(program.rounds), "Up to "
        yield f"It tunes {', '.join(program.what)} of a {program.model.kind} model, in {program.rounds} rounds, and fits it."
    elif isinstance(program, AuditProgram):
        yield "It trains nothing: it counts what predictions that are there already say."
    else:
        yield f"It runs the program {settings.program} with {json.dumps(settings.arguments)[:500]}."
    schema: Schema | None = getattr(program, "schema", None)
    if schema is not None:
        yield f"It reads {', '.join(column.name for column in schema.features)}."
        yield f"It predicts {schema.target} ({schema.told_apart}) and compares {', '.join(schema.groups)}."
        unusual = {"any column": sorted(set(schema.missing) - set(MISSING))}
        unusual |= {column.name: list(column.also_missing) for column in schema.features}
        yield from (
            f"In {name}, these count as missing: {', '.join(map(repr, values))[:500]}."
            for name, values in unusual.items()
            if values
        )
        yield f"SHA-256 of its schema: {schema.digest}"
    yield from (f"This site would be {line.split(', ')[0]}." for line in said if line.startswith("ready for"))
    for task, when in WHEN.items():
        things = dict.fromkeys(_in_words(thing) for thing in left if thing.task == task)
        if things:
            yield f"{when}: {'; '.join(things)}."
    privacy = policy.privacy
    if not phases:
        yield "Nothing else leaves."
        return
    if settings.secured:
        yield (
            f"Replies of training, statistics and measures leave masked: the coordinator sees sums over {settings.needed} "
            "sites or more, and no single reply."
        )
    else:
        why = "fewer than three sites have no secure sums" if len(settings.sites) < LEAST else "it has no secure sums"
        yield f"The coordinator sees every reply of this site: {why}."
    if privacy is None or privacy.noise == 0:
        whom = "sums" if settings.secured else "replies"
        yield f"There is no noise: whoever sees the {whom} may be able to conclude something about single rows."
    elif replies is not None:
        measured = policy.may_tell("objective") and settings.record_every is not None
        replies += -(-replies // settings.record_every) if measured and settings.record_every else 0
        spent = read_account(folder)
        after = spent._replace(inverse_squares=spent.inverse_squares + replies * privacy.noise**-2)
        allowed = "no limit" if privacy.epsilon is None else f"{privacy.epsilon:g} allowed"
        yield (
            f"{upto}{replies} replies with noise: epsilon {spent.epsilon(privacy.delta):.3g} spent so far, "
            f"{after.epsilon(privacy.delta):.3g} after the run ({allowed}, at delta {privacy.delta:g})."
        )


def _in_words(thing: Left) -> str:
    numbers = (
        math.prod(int(size) for size in re.findall(r"\d+", thing.shape.partition("[")[2])) if "[" in thing.shape else 1
    )
    called = WORDS.get(thing.name, thing.name.replace("reply", "what training replies, part"))
    return f"{called} ({numbers} number{'s' if numbers != 1 else ''})"


def _short(settings: JobSettings) -> dict[str, Any]:
    """The fair program with one round a stage, and the tune program with one to tune; any other as it is."""
    if settings.program == "tune":
        return {**settings.arguments, "rounds": 1}
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
        when = "closing" if task == "survey" and requests[self.name]["answers"] else task
        self.left += [Left(when, name, *described) for name, described in _listed(told)]
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
