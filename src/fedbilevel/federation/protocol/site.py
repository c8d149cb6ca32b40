"""A site's side of a federated run, without any network: what it is asked, what it does, what it answers.

Requests and answers are dicts of plain values and NumPy arrays.  What can leave a site is written down in one place,
`Site.answer`: the arrays of a phase's reply, and the numbers the site's policy lists.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.engines.stages import Refused
from fedbilevel.federation.protocol.compiled import Compiled, local_data
from fedbilevel.federation.protocol.payload import Arrays, BadReply, named_arrays, size_of, to_arrays, to_tree
from fedbilevel.federation.protocol.policy import Policy
from fedbilevel.federation.protocol.privacy import Guard
from fedbilevel.federation.protocol.program import Numbers, Program, Stage, answer_trees, make_program
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.vault import Label, Vault, write_arrays
from fedbilevel.plan import Phase
from fedbilevel.problem import ClientData

TASKS = ("survey", "prepare", "work", "measure", "finish")
Say = Callable[[str], None]


class Site:
    """One site in one job.  ``folder`` is where it keeps what must survive a restart."""

    def __init__(self, name: str, settings: JobSettings, policy: Policy, folder: Path, say: Say) -> None:
        self.name, self.settings, self.policy, self.say = name, settings, policy, say
        self.client = settings.client(name)
        self.program: Program = make_program(settings.program, settings.arguments, policy.functions)
        self.folder = folder / settings.run
        self.vault = Vault(self.folder, settings.digest)
        self.guard = None if policy.privacy is None else Guard(policy.privacy, folder, settings.run, settings.digest)
        self.stage: Stage | None = None
        self.number = -1

    def answer(self, task: str, request: dict[str, Any]) -> dict[str, Any]:
        """Do ``task`` and return what leaves the site; a refusal leaves as one sentence without data."""
        try:
            if request.get("digest") != self.settings.digest:
                raise Refused("The request belongs to another run than the job this site was given.")
            if task not in TASKS:
                raise Refused(f"There is no task {task!r}.")
            told: dict[str, Any] = getattr(self, f"_{task}")(request)
        except (Refused, BadReply) as error:
            told = {"refused": str(error)}
            self.say(f"refused {task}: {error}")
        except Exception as error:
            # The sentence of any other error may quote a value of the table: it stays in the site's own log.
            told = {"refused": f"{type(error).__name__} at the site; its own log says why."}
            self.say(f"could not do {task}: {type(error).__name__}: {error}")
        self._note(task, told)
        return told

    def _survey(self, request: dict[str, Any]) -> dict[str, Any]:
        agreed = named_arrays(request["agreed"], "what was agreed on")
        told = self.program.survey(int(request["survey"]), self.policy.source, agreed)
        return {"numbers": self._allowed(told)}

    def _prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Read and encode the rows of a stage, and compile its work."""
        number = int(request["stage"])
        agreed = named_arrays(request["agreed"], "what was agreed on")
        self.answers = answer_trees(self.program, agreed, request["answers"])
        stage = self.program.stage(number, agreed, self.answers)
        if stage is None or len(self.answers) != number:
            raise Refused(f"The program has no stage {number}.")
        train, val = self.program.rows(number, self.policy.source, agreed, self.answers)
        rows = self._check(stage, train, val)
        self.compiled = Compiled(stage.algorithm, self.settings.seed, stage.example)
        self.data = jax.device_put(local_data(train, val, self.client))
        self.enrolled = self.compiled.enroll()
        self._warm_up()
        self.stage, self.number = stage, number
        if stage.weights == "samples":
            self.policy.require("rows", "the averages of this run are weighted by")
        self.say(f"ready for {stage.name}: {rows} training rows, {stage.rounds} rounds of {stage.algorithm.name}")
        return {"rows": rows} if self.policy.may_tell("rows") else {}

    def _work(self, request: dict[str, Any]) -> dict[str, Any]:
        """One phase: the only thing the coordinator learns of the rows is its reply."""
        began = time.perf_counter()
        label = self._label(request)
        since, floor = Label.read(request["since"]), Label.read(request["floor"])
        item = int(request["item"])
        message = to_tree(request["arrays"], self.compiled.message_like(item), "the message")
        kept = self.vault.state(since, self.number, self.enrolled)
        local = self._with_parcel(kept.local, request)
        reply, local = self.compiled.work(message, local, self.data, label.round, label.ordinal, item=item)
        arrays = to_arrays(reply)
        if self.guard is not None:
            arrays = self.guard.protect(arrays, request["arrays"], label)
        self.vault.keep(label, local, floor, since)
        told: dict[str, Any] = {"arrays": arrays}
        if self.policy.may_tell("seconds"):
            told["seconds"] = time.perf_counter() - began
        if kept.note is not None:
            told["note"] = kept.note
            self.say(kept.note)
        return told

    def _measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """The objective on this site's rows, where it may be told."""
        self._label(request)
        if not self.policy.may_tell("objective"):
            return {}
        server = to_tree(request["arrays"], self.compiled.server_like, "the coordinator's state")
        kept = self.vault.state(Label.read(request["since"]), self.number, self.enrolled)
        local = self._with_parcel(kept.local, request)
        return {"objective": float(self.compiled.measure(server, local, self.data))}

    def _finish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Keep the answer here too, and report on it where that may be told."""
        agreed = named_arrays(request["agreed"], "what was agreed on")
        answers = answer_trees(self.program, agreed, request["answers"])
        leaves = {f"stage{k}_{i}": leaf for k, tree in enumerate(answers) for i, leaf in enumerate(to_arrays(tree))}
        write_arrays(self.folder / "answer.npz", leaves)
        self.say("the run is complete; its answer is kept in answer.npz")
        if not self.policy.may_tell("report"):
            return {"numbers": {}}
        return {"numbers": named_arrays(self.program.report(self.policy.source, agreed, answers), "the report")}

    def _warm_up(self) -> None:
        """Compile every phase by running it on zeros, so that no round waits for a compiler."""
        for number, item in enumerate(self.compiled.items):
            if isinstance(item, Phase):
                message = jax.tree.map(
                    lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.compiled.message_like(number)
                )
                self.compiled.work(message, self.enrolled, self.data, 0, 0, item=number)

    def _with_parcel(self, local: Tree, request: dict[str, Any]) -> Tree:
        if request.get("parcel") is None:
            return local
        item = int(request["parcel_item"])
        parcel = to_tree(request["parcel"], self.compiled.parcel_like(item), "the parcel")
        return self.compiled.unpack(local, parcel, item=item)

    def _label(self, request: dict[str, Any]) -> Label:
        label = Label.read(request["label"])
        if self.stage is None or label is None or label.stage != self.number:
            raise Refused("The site was not prepared for this stage.")
        return label

    def _check(self, stage: Stage, train: Tree, val: Tree) -> int:
        rows = int(np.shape(jax.tree.leaves(train)[0])[0])
        if rows < self.policy.minimum_rows:
            raise Refused(f"This site has fewer rows than the {self.policy.minimum_rows} it trains on at least.")
        batch = getattr(stage.algorithm.settings, "batch_size", None)
        if batch is not None and batch < self.policy.minimum_batch:
            raise Refused(f"The job's batch_size={batch} is below this site's minimum_batch.")
        for part, rows_here, expected in zip(("training", "validation"), (train, val), stage.example, strict=True):
            if shape_of_rows(rows_here) != shape_of_rows(expected):
                raise Refused(f"The site's {part} rows are not of the kind the program expects.")
        alone = jax.tree.map(lambda leaf: np.asarray(leaf)[None], (train, val))
        try:
            stage.algorithm.check(ClientData(*alone))
        except (ValueError, TypeError) as error:
            self.say(str(error))
            raise Refused("The site's rows do not suit the algorithm; its own log says why.") from error
        return rows

    def _allowed(self, told: Numbers) -> Numbers:
        for name in told:
            self.policy.require(name.split("/")[0], "the job's survey asks for")
        return named_arrays(told, "the survey")

    def _note(self, task: str, told: dict[str, Any]) -> None:
        """A line for everything that leaves: the site's own record."""
        arrays: Arrays = list(told.get("arrays", ())) + list(told.get("numbers", {}).values())
        names = ",".join(sorted(told.get("numbers", {}))) or ",".join(sorted(told))
        with (self.folder / "left.csv").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')};{task};{names};{len(arrays)};{size_of(arrays)}\n")


def shape_of_rows(tree: Tree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(tuple(np.shape(leaf)[1:]), np.dtype(leaf.dtype)) for leaf in leaves]
