"""A site's side of a federated run, without any network: what it is asked, what it does, what it answers.

Requests and answers are dicts of plain values and NumPy arrays.  A site trusts nothing it is sent: what it takes part in is
approved (`approval`), what is said to be agreed on is held against its own share, weights and batches against its own bounds;
and everything that leaves goes through one `Door`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel import storage
from fedbilevel.calculus import Tree
from fedbilevel.engines.fixed import (
    WIDE,
    Fixed,
    OutOfRange,
    Words,
    check_summed,
    exact_words,
    ring_of,
    scale_of,
    to_words,
)
from fedbilevel.engines.stages import Refused
from fedbilevel.federation.protocol import approval
from fedbilevel.federation.protocol.compiled import Compiled, beginnings, local_data, options_of
from fedbilevel.federation.protocol.door import Door, effective_rows
from fedbilevel.federation.protocol.payload import Arrays, named_arrays, to_arrays, to_tree
from fedbilevel.federation.protocol.policy import Policy
from fedbilevel.federation.protocol.program import Numbers, Program, Stage, answer_trees, make_program
from fedbilevel.federation.protocol.secure import Identity
from fedbilevel.federation.protocol.settings import TASKS, JobSettings
from fedbilevel.federation.protocol.sums import Masking, digest_of, in_sums
from fedbilevel.federation.protocol.vault import NOTES, Kept, Label, Vault, read_arrays, write_arrays
from fedbilevel.plan import Phase, length_of, phases_of
from fedbilevel.problem import ClientData

MASKED = TASKS[-4:]
DRAWS, SIGNS = "draws.key", "signs.json"
Say = Callable[[str], None]


class Site:
    """One site in one job.  ``folder`` is where it keeps what must survive a restart; ``identity``: who it is to the others,
    which secure sums need."""

    def __init__(
        self,
        name: str,
        settings: JobSettings,
        policy: Policy,
        folder: Path,
        say: Say,
        identity: Identity | None = None,
    ) -> None:
        self.name, self.settings, self.say = name, settings, say
        if name not in settings.sites:
            raise Refused("run", f"{name} is not one of the sites of the run.")
        self.client = settings.client(name)
        self.policy = replace(policy, source=replace(policy.source, number=self.client))
        self.program: Program = make_program(settings.program, settings.arguments, policy.functions)
        self.by_bounds = approval.settle(settings, self.program, policy, folder)
        self.home, self.folder = folder, folder / settings.run
        self.vault = Vault(self.folder, settings.digest)
        self.door = Door(policy, folder, settings.run, settings.digest, say)
        self.in_sums = settings.secured
        self.masking: Masking | None = None
        if self.in_sums:
            if identity is None:
                raise Refused("site", "Secure sums need the certificate and key of a kit.")
            self.masking = Masking(name, settings, identity, self.folder, policy.privacy)
        self.secret = self._secret() if policy.secret_draws else None
        self.stage: Stage | None = None
        self.number = -1
        self.scale = 0.0

    def answer(self, task: str, request: dict[str, Any]) -> dict[str, Any]:
        """Do ``task`` and return what leaves the site."""

        def work() -> dict[str, Any]:
            if request.get("digest") != self.settings.digest:
                raise Refused("run")
            if task not in TASKS:
                raise Refused("request", f"There is no task {task!r}.")
            if task in MASKED:
                return self._masked(task, request)
            told: dict[str, Any] = getattr(self, f"_{task}")(request)
            return told

        return self.door.answer(task, work)

    def _masked(self, task: str, request: dict[str, Any]) -> dict[str, Any]:
        """This site's part in secure sums."""
        if self.masking is None:
            raise Refused("request", "The run has no secure sums.")
        told: dict[str, Any] = getattr(self.masking, task)(request)
        return told

    def _check_sums(self) -> None:
        """Whether what training tells of this site leaves as the site wants it."""
        needed = self.masking.site.cohort.threshold if self.masking is not None else None
        self.policy.check_sums([site for site in self.settings.sites if site != self.name], needed)

    def _survey(self, request: dict[str, Any]) -> dict[str, Any]:
        self._check_sums()
        agreed, answers = self._common({"answers": (), **request})
        number = int(request["survey"])
        told = self.door.numbers(self.program.survey(number, self.policy.source, agreed, answers))
        if self.masking is None:
            return {"numbers": told}
        hidden, shown = in_sums(self.program, told)
        words = exact_words(np.concatenate([*(np.ravel(each) for each in hidden.values()), np.zeros(0)]))
        return {"numbers": shown, "arrays": self.masking.mask(request, f"survey/{number}", words)}

    def _prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Read and encode the rows of a stage, and compile its work."""
        number = int(request["stage"])
        agreed, answers = self._common(request)
        stage = self.program.stage(number, agreed, answers) if len(answers) == number else None
        if stage is None:
            raise Refused("stage", f"It was stage {number}.")
        self._check_sums()
        if self.masking is not None:
            try:
                check_summed(stage.algorithm, len(self.settings.sites), getattr(self.program, "single", None))
            except ValueError as error:
                raise Refused("single", str(error)) from error
        before = [self.program.stage(k, agreed, answers[:k]) for k in range(number)]
        stages = [stage, *(each for each in before if each is not None)]
        rounds = sum(each.rounds for each in stages)
        if self.by_bounds:
            approval.check_stage(stage, rounds, self.policy.approval)
        train, val = self.program.rows(number, self.policy.source, agreed, answers)
        rows = self._check(number, stage, train, val, agreed, answers)
        self.stage = None  # until everything fits together again
        self.train, self.agreed, self.answers = train, agreed, answers
        self.compiled = Compiled(stage.algorithm, self.settings.seed, stage.example)
        self.data = jax.device_put(local_data(train, val, self.client))
        self.enrolled = self.compiled.enroll()
        self._warm_up()
        self.stage, self.number, self.rows, self.scale = stage, number, rows, 0.0
        self.door.planned = rounds * max(sum(times for _, times in phases_of(each.algorithm.plan)) for each in stages)
        if stage.weights == "samples" or "ticket" in request:
            self.policy.require("rows")
        self.say(f"ready for {stage.name}: {rows} training rows, {stage.rounds} rounds of {stage.algorithm.name}")
        if self.masking is not None:  # the rows of all sites are told in sum
            told = "ticket" in request and self.masking.mask(request, f"rows/{number}", exact_words(rows))
            return {"arrays": told} if told else {}
        return {"rows": rows} if self.policy.may_tell("rows") else {}

    def _work(self, request: dict[str, Any]) -> dict[str, Any]:
        """One phase: the only thing the coordinator learns of the rows is its reply."""
        began = time.perf_counter()
        # A site that was away when the others were prepared comes in with the next round.
        prepared = self._prepare(request["prepare"]) if "prepare" in request else {}
        label = self._label(request)
        since, floor = Label.read(request["since"]), Label.read(request["floor"])
        item = int(request["item"])
        message = to_tree(request["arrays"], self.compiled.message_like(item), "the message")
        kept = self.vault.state(since, self.number, self.enrolled)
        history = self._history(kept, self._goes_on(since, label, item))
        secret, sketch = self.secret, self.compiled.phase(item).sketch
        if sketch:  # other signs each time would soon tell the rows
            self._pin({f"once/{label.stage}/{item}": np.array(label[1:3])}, "often")
            secret = self._signs(label, sketch)
        after = [self._with_parcel(kept.local, request)]

        def compute() -> Arrays:
            self._check_weights(self.number, self.train, message, self.agreed, self.answers)
            at = (label.round, label.ordinal, secret)
            reply, after[0] = self.compiled.work(message, after[0], self.data, *at, item=item)
            return to_arrays(reply)

        like = jax.tree.leaves(self.compiled.reply_like(item))
        exchange = f"work/{label.stage}/{label.round}/{label.ordinal}"
        ring = ring_of(like)
        words = lambda arrays: to_words(arrays, self._share(request), ring)  # noqa: E731
        seal = self._seal(request, exchange, words, ring, history)
        arrays = self.door.reply("work", compute, like, request["arrays"], label, seal, request.get("ticket", ""))
        told: dict[str, Any] = {**prepared, "arrays": arrays}
        asked = "" if self.masking is None else self.masking.question(request, exchange, history).hex()
        self.vault.keep(label, after[0], floor, since, asked)
        if self.policy.may_tell("seconds"):
            told["seconds"] = time.perf_counter() - began
        if kept.note is not None:
            told["note"] = kept.note
            self.say(NOTES[kept.note])
        return told

    def _measure(self, request: dict[str, Any]) -> dict[str, Any]:
        """The objective on this site's rows, where it may be told: with noise a reply like any other."""
        label = self._label(request, measured=True)
        exchange = f"measure/{label.stage}/{label.round}"

        if not self.policy.may_tell("objective"):
            return {}  # zeros would count as one of the sites that a sum needs, and hide nobody
        server = to_tree(request["arrays"], self.compiled.server_like, "the coordinator's state")
        kept = self.vault.state(Label.read(request["since"]), self.number, self.enrolled)
        history = self._history(kept)
        seal = self._seal(request, exchange, lambda arrays: to_words(arrays, self._share(request), WIDE), WIDE, history)
        local = self._with_parcel(kept.local, request)

        def compute() -> Arrays:
            return [np.asarray(self.compiled.measure(server, local, self.data), np.float64)]

        like = [np.zeros((), np.float64)]
        arrays = self.door.reply("measure", compute, like, request["arrays"], label, seal, request.get("ticket", ""))
        return {"objective": float(arrays[0])} if seal is None else {"arrays": arrays}

    def _seal(
        self, request: dict[str, Any], exchange: str, words: Callable[[Arrays], Words], ring: Fixed, history: str
    ) -> Callable[[Arrays], Arrays] | None:
        """What masks a reply, where the run has secure sums."""
        masking, guard = self.masking, self.door.guard
        if masking is None:
            return None
        if guard is not None:
            alike = self.stage is not None and self.stage.weights == "uniform"
            guard.among = masking.site.cohort.threshold if alike and masking.noise_is_shared() else 1

        def seal(arrays: Arrays) -> Arrays:
            try:
                return masking.mask(request, exchange, words(arrays), ring, history=history)
            except OutOfRange as error:  # a refusal would tell something of this site's numbers alone
                self.say(f"{exchange} has no sum, by this site's reply: {error}")
                size = sum(array.size for array in arrays) + 1  # the last word is the share
                return masking.spoil(request, exchange, size, ring, history)

        return seal

    def _goes_on(self, since: Label | None, label: Label, item: int) -> bool:
        """Whether an exchange goes on with what was asked before, in this round or, where its phase recalls it, in the last; or
        begins anew, as for a site that was away."""
        if self.masking is None or (since is not None and since[:2] == label[:2]):
            return True
        if item not in beginnings(self.compiled.algorithm.plan)[0]:
            raise Refused("stage", f"A round does not begin with item {item} of the plan.")
        if since is None or not self.compiled.phase(item).recalls:
            return False
        if since[:2] != (label.stage, label.round - 1):
            raise Refused("lost", "It missed the last round.")
        return True

    def _history(self, kept: Kept, goes_on: bool = False) -> str:
        """What all sites of a sum must have been asked before it, since they remember it: a model, or where it has led.

        Where a sum needs every site, nobody was ever away, and that is all of the stage; else what the exchange ``goes_on``
        with, since some may have missed other rounds."""
        if self.masking is None or not (goes_on or self.masking.site.cohort.complete):
            return ""
        if kept.note is not None:
            raise Refused("lost")
        return kept.history

    def _share(self, request: dict[str, Any]) -> float:
        """The weight of this site's reply, over a power of two that those of all sites together do not exceed."""
        assert self.stage is not None
        if self.stage.weights != "samples":
            return 1.0 / scale_of(len(self.settings.sites))
        scale = request["scale"]
        if not isinstance(scale, float) or not 1 <= scale < 2.0**64 or np.log2(scale) % 1:
            raise Refused("request", f"{scale!r} is no power of two.")
        if scale != self.scale:  # one a stage: what many round to would tell single numbers of rows
            self._pin({f"scale/{self.number}": np.array(scale)})
            self.scale = scale
        if self.rows > scale:
            raise OutOfRange(f"This site has more rows than the {scale:g} that all are said to have at most.")
        return self.rows / scale

    def _finish(self, request: dict[str, Any]) -> dict[str, Any]:
        """Keep the answer here too, and report on it where that may be told."""
        if "report" in getattr(self.program, "summed", ()):
            self._check_sums()
        agreed, answers = self._common(request)
        leaves = {f"stage{k}_{i}": leaf for k, tree in enumerate(answers) for i, leaf in enumerate(to_arrays(tree))}
        write_arrays(self.folder / "answer.npz", leaves)
        self.say("the run is complete; its answer is kept in answer.npz")
        own_files: Callable[..., dict[str, str]] = getattr(self.program, "own_files", lambda *_: {})
        for name, text in own_files(self.policy.source, agreed, answers).items():
            storage.write(self.folder / name, text)
            self.say(f"{name} is for this site alone")
        numbers: Numbers = {}
        try:
            if self.policy.may_tell("report"):
                numbers = self.door.numbers(self.program.report(self.policy.source, agreed, answers), "report")
        except Refused as error:
            self.say(f"nothing is reported: {error}")
        if self.masking is None:
            return {"numbers": numbers}
        told, shown = in_sums(self.program, numbers, "report")
        if "ticket" not in request or not told:  # as of an objective
            return {"numbers": shown}
        words = exact_words(np.concatenate([np.ravel(part) for part in told.values()]))
        return {"numbers": {}, "arrays": self.masking.mask(request, "finish", words)}

    def _common(self, request: dict[str, Any]) -> tuple[Numbers, list[Tree]]:
        """What all sites are said to have agreed on and answered: the same throughout the run, and in keeping with what this
        site knows itself."""
        agreed = named_arrays(request["agreed"], "what was agreed on")
        given = {f"agreed/{name}": array for name, array in agreed.items()}
        for number, arrays in enumerate(request["answers"]):
            given |= {f"answer/{number}/{place}": array for place, array in enumerate(arrays)}
        # Before it is held against the site's own share: one refusal after the other would tell that share, bit by bit.
        said = self._pin(named_arrays(given, "what was answered"))
        doubt = self.program.doubt(self.policy.source, agreed, self.policy.largest_scale)
        if doubt is not None:
            raise Refused("agreed", doubt)
        answers = answer_trees(self.program, agreed, request["answers"])
        if self.masking is not None:
            names = sorted(name for name in said if name.startswith(("agreed/", "answer/")))
            self.masking.common = digest_of(names, [said[name] for name in names])
        return agreed, answers

    def _pin(self, given: Numbers, reason: str = "agreed") -> Numbers:
        """All that was said so far.  What was said once in a run stays as it is, also for another worker of this site."""
        # Two runs of one name, asked in turn, must not make each other's be forgotten.
        file = self.folder / f"common-{self.settings.digest[:32]}.npz"
        with storage.lock(self.folder / ".common.lock", seconds=-1):
            before = read_arrays(file)
            if before is None and file.exists():
                raise Refused("site", f"{file} cannot be read, so nobody knows what was agreed on.")
            pinned = {} if before is None else before[0]
            for name in given.keys() & pinned.keys():
                if not np.array_equal(given[name], pinned[name]):
                    raise Refused(reason, f"{name} is not what it was before in this run.")
            self.door.check_size([*(pinned | given).values()])
            if given.keys() - pinned.keys():
                write_arrays(file, pinned | given)
        return pinned | given

    def _secret(self) -> np.ndarray:
        """By which this site draws, in this run: an exchange that is done again draws the same."""
        file = self.folder / DRAWS
        with storage.lock(self.folder / f".{DRAWS}.lock", seconds=-1):
            if not file.exists():
                storage.write(file, secrets.token_bytes(16), mode=0o600)
            return np.frombuffer(file.read_bytes(), np.uint32)

    def _signs(self, label: Label, sketch: int) -> np.ndarray | None:
        """What the signs of a sketch follow from, besides the seed: nothing as long as all sums with known signs, in whatever
        runs, leave rows open; then the site's secret."""
        if self.secret is None:
            return None
        # The same signs on the same rows tell nothing more, in another run either.
        these = digest_of((self.settings.seed, self.client, *label[1:3]), to_arrays(self.train)).hex()
        # A secure sum is of other sites' rows too, but this site can count on its own alone.
        most = self.rows - (1 if self.in_sums else self.policy.minimum_rows)
        file = self.home / SIGNS
        with storage.lock(self.home / f".{SIGNS}.lock", seconds=-1):
            known: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
            if these in known:
                return None
            if sum(known.values()) + sketch <= most:
                storage.write_json(file, {**known, these: sketch})
                return None
        self.say(f"{sum(known.values())} sums have known signs; the next {sketch} have signs of this site's own")
        return self.secret

    def _warm_up(self) -> None:
        """Compile every phase by running it on zeros, so that no round waits for a compiler."""
        for number, item in enumerate(self.compiled.items):
            if isinstance(item, Phase):
                message = jax.tree.map(
                    lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.compiled.message_like(number)
                )
                secret = None if item.sketch else self.secret
                self.compiled.work(message, self.enrolled, self.data, 0, 0, secret, item=number)

    def _with_parcel(self, local: Tree, request: dict[str, Any]) -> Tree:
        if request.get("parcel") is None:
            return local
        item = int(request["parcel_item"])
        parcel = to_tree(request["parcel"], self.compiled.parcel_like(item), "the parcel")
        return self.compiled.unpack(local, parcel, item=item)

    def _label(self, request: dict[str, Any], measured: bool = False) -> Label:
        """The exchange asked for: of the stage at hand, and one that its rounds have; measures follow a round."""
        label = Label.read(request["label"])
        if self.stage is None or label is None or label.stage != self.number:
            raise Refused("stage")
        if not 0 <= label.round < self.stage.rounds + measured:
            raise Refused("often", f"The stage has {self.stage.rounds} rounds.")
        if not 0 <= label.ordinal < length_of(self.stage.algorithm.plan):
            raise Refused("often", f"A round has no exchange {label.ordinal}.")
        return label

    def _check(
        self, number: int, stage: Stage, train: Tree, val: Tree, agreed: Numbers, answers: Sequence[Tree]
    ) -> int:
        """Enough rows, in all, in every cell, in every batch, and of the kind the program expects; how many there are."""
        rows, *others = (int(np.shape(jax.tree.leaves(part)[0])[0]) for part in (train, val) if part is not None)
        sketch = max((phase.sketch for phase, _ in phases_of(stage.algorithm.plan)), default=0)
        if not self.in_sums and rows < self.policy.minimum_rows + sketch:
            raise Refused(
                "rows", f"{rows}, of which {sketch} sums with known signs leave fewer than minimum_rows open."
            )
        if min(rows, *others, rows) < self.policy.minimum_rows:
            raise Refused("rows", f"{rows} (training) and {others} (validation), below {self.policy.minimum_rows}.")
        self.door.check_counts(self.program.cells(number, train), self.policy.minimum_cell, "cells")
        for part in (train, val):
            if part is not None:
                self._check_weights(number, part, None, agreed, answers)
        for name, batch in options_of(stage.algorithm).items():
            if name.endswith("batch_size") and isinstance(batch, int) and batch < self.policy.minimum_batch:
                raise Refused("batch", f"{name} = {batch} is below minimum_batch = {self.policy.minimum_batch}.")
        for part, rows_here, expected in zip(("training", "validation"), (train, val), stage.example, strict=True):
            if shape_of_rows(rows_here) != shape_of_rows(expected):
                raise Refused("suit", f"The {part} rows are not of the kind the program expects.")
        alone = jax.tree.map(lambda leaf: np.asarray(leaf)[None], (train, val))
        try:
            stage.algorithm.check(ClientData(*alone))
        except (ValueError, TypeError) as error:
            raise Refused("suit", str(error)) from error
        return rows

    def _check_weights(self, number: int, rows: Tree, message: Tree, agreed: Numbers, answers: Sequence[Tree]) -> None:
        """Weights must leave as many rows in play as the site works on at least, and as many as it tells of in every part."""
        weights = self.program.weights_behind(number, rows, message, agreed, answers)
        if weights is None:
            return
        parts = np.atleast_2d(weights)
        least = [(self.policy.minimum_rows, parts.sum(axis=0))]
        if len(parts) > 1:
            least += [(self.policy.minimum_cell, part) for part in parts]
        for bound, each in least:
            if not effective_rows(each) >= bound:
                raise Refused(
                    "weights", f"They are worth {effective_rows(each):.1f} rows of equal weight, below {bound}."
                )


def shape_of_rows(tree: Tree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(tuple(np.shape(leaf)[1:]), np.dtype(leaf.dtype)) for leaf in leaves]
