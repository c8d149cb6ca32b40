"""The coordinator's side of a federated run, without any network: phases, checks, counting, going on after a fault.

A round is atomic: the state is saved when it is complete, and whatever stops the coordinator before that makes the round
start again, on the same numbers, with every site back at the state that was last counted.  `Attendance` asks the sites,
checks what comes back and decides whether enough of them answered.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.engines.stages import REASONS
from fedbilevel.federation.protocol.compiled import Compiled, items_of
from fedbilevel.federation.protocol.payload import Arrays, BadReply, named_arrays, size_of, stacked, to_arrays, to_tree
from fedbilevel.federation.protocol.program import Program, Stage, answer_trees
from fedbilevel.federation.protocol.record import Progress, Record
from fedbilevel.federation.protocol.settings import JobSettings, RunFailed, TooFewSites
from fedbilevel.federation.protocol.vault import NOTES, Label
from fedbilevel.plan import Plan, Repeat, ServerStep


class Reply(NamedTuple):
    content: dict[str, Any]
    seconds: float


def reason(reply: Reply) -> str:
    """Why a site refuses, in our own words: whatever else it may have sent is not passed on."""
    told = reply.content["refused"]
    return REASONS[told] if isinstance(told, str) and told in REASONS else "It refused without a reason we know."


class Channel(Protocol):
    """How requests reach the sites."""

    def sites(self) -> list[str]:
        """The sites that take part in this job."""

    def ask(
        self, task: str, requests: Mapping[str, dict[str, Any]], awaited: set[str], seconds: float
    ) -> dict[str, Reply]:
        """Send every site its request and return the replies that came within ``seconds``.

        It returns early once all ``awaited`` sites have answered, and all others that took their request meanwhile.
        Raises `Stopped` when the run is to stop.
        """


class Attendance:
    """The sites of one job; ``progress.away`` lists those that are absent or have not answered of late."""

    def __init__(self, settings: JobSettings, channel: Channel, record: Record, progress: Progress) -> None:
        self.settings, self.channel, self.record, self.progress = settings, channel, record, progress
        self.refusals: dict[str, str] = {}

    def ask(self, task: str, requests: dict[str, dict[str, Any]], seconds: float) -> dict[str, Reply]:
        """Those who have not answered of late are asked too, and waited for once they come for their request."""
        told = {site: {"digest": self.settings.digest, **request} for site, request in requests.items()}
        awaited = {site for site in told if site not in self.progress.away}
        return self.channel.ask(task, told, awaited or set(told), seconds)

    def ask_all(self, task: str, request: dict[str, Any]) -> dict[str, Reply]:
        """Ask every site of the job the same; the answers that are no refusals, in the order of the sites."""
        there = self.channel.sites()
        here = [site for site in self.settings.sites if site in there]
        replies = self.ask(task, dict.fromkeys(here, request), self.settings.start_timeout)
        answered: dict[str, Reply] = {}
        for site in here:
            reply = replies.get(site)
            if reply is not None and "refused" not in reply.content:
                answered[site] = reply
                self._back(site)
                continue
            missed = self._missed(site)
            if reply is not None:
                self.refuse(site, reason(reply))
            elif missed:
                self.record.say(f"{site} did not answer ({task}) within {self.settings.start_timeout:g} s")
        return answered

    def ask_numbers(self, task: str, request: dict[str, Any], what: str) -> dict[str, dict[str, np.ndarray]]:
        """The same, for the numbers in the answers."""
        numbers = {}
        for site, reply in self.ask_all(task, request).items():
            try:
                numbers[site] = named_arrays(reply.content.get("numbers"), what)
            except BadReply as error:
                self.refuse(site, str(error))
        return numbers

    def accept(self, site: str, reply: Reply | None, like: Tree, accepted: dict[str, Tree]) -> str:
        """Check a reply; what happened, in a word or a sentence."""
        if reply is None:
            if self._missed(site):
                self.record.say(f"{site} did not answer within {self.settings.reply_timeout:g} s; going on without it")
            return "no answer"
        try:
            if "refused" in reply.content:
                raise BadReply(reason(reply))
            accepted[site] = to_tree(reply.content.get("arrays"), like, "its reply")
        except BadReply as error:
            self.refuse(site, str(error))
            return f"refused: {error}"
        if self._back(site):
            self.record.say(f"{site} is back")
        note = reply.content.get("note")
        if isinstance(note, str) and note in NOTES:
            self.record.say(f"{site} {NOTES[note]}")
            return "answered anew"
        return "answered"

    def _missed(self, site: str) -> bool:
        """Whether it is the first time of late."""
        missed = site not in self.progress.away
        if missed:
            self.progress.away.append(site)
        return missed

    def _back(self, site: str) -> bool:
        back = site in self.progress.away
        if back:
            self.progress.away.remove(site)
        return back

    def refuse(self, site: str, why: str) -> None:
        self.refusals[site] = why
        self.record.say(f"the reply of {site} was refused: {why}")

    def enough(self, sites: list[str], what: str) -> None:
        """Go on with ``sites``, or stop: for good where a site's reply was refused, until it is back where it is absent."""
        refusals, self.refusals = self.refusals, {}
        needed = self.settings.needed
        if len(sites) >= needed:
            return
        missing = [site for site in self.settings.sites if site not in sites]
        sentence = f"Only {len(sites)} of the {needed} sites the run needs {what}; missing: {', '.join(missing)}."
        if len(sites) + len(refusals) >= needed:
            raise RunFailed(f"{sentence} " + " ".join(f"{site}: {why}" for site, why in refusals.items()))
        raise TooFewSites(sentence)


class Coordinator:
    """One run.  ``run()`` goes on from wherever the record says it was, to the end."""

    def __init__(self, settings: JobSettings, program: Program, record: Record, channel: Channel) -> None:
        self.settings, self.program, self.record, self.channel = settings, program, record, channel
        self.rows: dict[str, int] = {}

    def run(self) -> list[Tree]:
        """The answers of all stages."""
        self.progress = self.record.resume()
        if self.progress.finished:
            self.record.say("the run was complete already")
            return self._answers()
        self.progress.attempt += 1
        self.record.save(self.progress)
        self.began = time.perf_counter() - self.progress.seconds
        self.attendance = Attendance(self.settings, self.channel, self.record, self.progress)
        here = self.channel.sites()
        absent = [site for site in self.settings.sites if site not in here]
        self.progress.away = list(absent)
        going_on = self.progress.began or self.progress.answers or self.progress.surveys
        self.record.say(
            f"{'going on' if going_on else 'starting'} with {', '.join(here) or 'no site'}"
            + (f"; absent: {', '.join(absent)}" if absent else "")
        )
        self.attendance.enough([site for site in self.settings.sites if site in here], "are in this job")
        self._surveys(self.program.surveys)
        while (stage := self._stage()) is not None:
            self._train(stage)
        self._surveys(self.program.surveys + self.program.closing)
        return self._finish()

    # Before and after training.

    def _surveys(self, upto: int) -> None:
        while self.progress.surveys < upto:
            number = self.progress.surveys
            request = {"survey": number, "agreed": self.progress.agreed, "answers": self.progress.answers}
            told = self.attendance.ask_numbers("survey", request, "the survey")
            self.attendance.enough([*told], f"answered survey {number + 1}")
            self.progress.agreed |= self.program.agree(number, [*told.values()], self.progress.agreed)
            self.progress.surveys += 1
            self.record.save(self.progress)
            self.record.say(f"survey {number + 1} of {upto}: {len(told)} sites agreed")

    def _stage(self) -> Stage | None:
        return self.program.stage(self.progress.stage, self.progress.agreed, self._answers())

    def _answers(self) -> list[Tree]:
        return answer_trees(self.program, self.progress.agreed, self.progress.answers)

    # Training.

    def _train(self, stage: Stage) -> None:
        progress = self.progress
        self.stage = stage
        self.compiled = Compiled(stage.algorithm, self.settings.seed, stage.example)
        self._prepare()
        if progress.began:
            self.server = to_tree(progress.server, self.compiled.server_like, "the saved state")
        else:
            self.server = self.compiled.begin()
            progress.began, progress.since = True, {}
            self._save()
        while progress.round < stage.rounds:
            self._round()
        progress.answers.append(to_arrays(stage.algorithm.outer(self.server)))
        progress.stage, progress.round, progress.began = progress.stage + 1, 0, False
        progress.since, progress.packed, progress.parcels, progress.server = {}, {}, {}, []
        self.record.save(progress)
        self.record.say(f"stage {stage.name} is done: {stage.rounds} rounds")

    def _prepare(self) -> None:
        request = {"stage": self.progress.stage, "agreed": self.progress.agreed, "answers": self.progress.answers}
        self.ready: set[str] = set()
        for site, reply in self.attendance.ask_all("prepare", request).items():
            rows = reply.content.get("rows")
            if isinstance(rows, int) and rows > 0:
                self.rows[site] = rows
            elif self.stage.weights == "samples":
                self.attendance.refuse(site, "did not tell how many rows it has, which the averages are weighted by")
                continue
            self.ready.add(site)
        self.attendance.enough([site for site in self.settings.sites if site in self.ready], "are ready")

    def _round(self) -> None:
        """All phases of one round; the sites that answer the first one are its cohort."""
        progress = self.progress
        self.cohort: set[str] | None = None
        self.floor = dict(progress.since)
        rows: list[dict[str, Any]] = []
        self._run(self.stage.algorithm.plan, 0, 0, rows)
        for site in self.settings.sites:
            if site not in self._cohort():
                # Lost on the way: what it did in this round does not count, and it goes on from where the round began.
                progress.since[site] = self.floor.get(site)
                progress.packed.pop(site, None)
        progress.round += 1
        self.record.note("exchanges", rows)
        if self._recording():
            self._measure()
        self._save()

    def _cohort(self) -> set[str]:
        """Those who have answered every phase of the round so far; before the first one all who are ready."""
        return self.ready if self.cohort is None else self.cohort

    def _run(self, items: Plan, ordinal: int, first: int, rows: list[dict[str, Any]]) -> int:
        """``first``: the number of the first item among all of the plan."""
        for item in items:
            if isinstance(item, Repeat):
                times = item.times if item.turns is None else min(int(item.turns(self.server)), item.times)
                for _ in range(times):
                    ordinal = self._run(item.phases, ordinal, first + 1, rows)
                first += len([*items_of((item,))])
                continue
            if isinstance(item, ServerStep):
                self.server = self.compiled.update(self.server, self.progress.round, ordinal, item=first)
            else:
                self._exchange(first, ordinal, rows)
            ordinal, first = ordinal + 1, first + 1
        return ordinal

    def _exchange(self, item: int, ordinal: int, rows: list[dict[str, Any]]) -> None:
        """One phase: send -> work -> check -> aggregate -> absorb."""
        progress, settings = self.progress, self.settings
        label = Label(progress.stage, progress.round, ordinal, progress.attempt)
        arrays = to_arrays(self.compiled.send(self.server, item=item))
        requests = self._requests(label, item, arrays)
        replies = self.attendance.ask("work", requests, settings.reply_timeout)
        like = self.compiled.reply_like(item)
        answers: dict[str, Tree] = {}
        for site, request in requests.items():
            reply = replies.get(site)
            outcome = self.attendance.accept(site, reply, like, answers)
            down = size_of(arrays) + size_of(request["parcel"] or [])
            up = size_of(to_arrays(answers[site])) if site in answers else 0
            progress.bytes_down, progress.bytes_up = progress.bytes_down + down, progress.bytes_up + up
            rows.append(
                {
                    "stage": label.stage, "round": label.round, "ordinal": ordinal, "phase": self.compiled.phase(item).name,
                    "site": site, "outcome": outcome, "bytes_down": down, "bytes_up": up,
                    "seconds": "" if reply is None else f"{reply.seconds:.6f}",
                    "site_seconds": "" if reply is None else _number(reply.content.get("seconds")),
                    "at": f"{time.perf_counter() - self.began:.6f}",
                }
            )  # fmt: skip
        self.attendance.enough([*answers], f"answered in round {label.round + 1} of {self.stage.name}")
        lost = self._cohort() - answers.keys()
        if self.cohort is not None and lost:
            self.record.say(f"round {label.round + 1} goes on without {', '.join(sorted(lost))}")
        self.cohort = set(answers)
        weights = np.array([self._weight(site) if site in answers else 0.0 for site in settings.sites])
        replied = stacked([answers.get(site) for site in settings.sites], like)
        self.server, parcels, finite = self.compiled.absorb(
            self.server, replied, weights, label.round, ordinal, item=item
        )
        if not finite:
            raise RunFailed(
                f"The run diverged in round {label.round + 1} of {self.stage.name}: the coordinator's update gave a NaN or an "
                f"infinity. Try smaller steps."
            )
        for site in answers:
            progress.since[site] = list(label)
            progress.packed.pop(site, None)
            progress.parcels.pop(site, None)
            if parcels is not None:
                number = settings.client(site)
                progress.packed[site] = [np.asarray(leaf[number]) for leaf in to_arrays(parcels)]
                progress.parcels[site] = item

    def _requests(self, label: Label, item: int, arrays: Arrays) -> dict[str, dict[str, Any]]:
        """For every site of the cohort: from where it goes on, the message, and the parcel that waits for it."""
        progress = self.progress
        return {
            site: {
                "label": list(label),
                "item": item,
                "since": progress.since.get(site),
                "floor": self.floor.get(site),
                "arrays": arrays,
                "parcel": progress.packed.get(site),
                "parcel_item": progress.parcels.get(site),
            }
            for site in self.settings.sites
            if site in self._cohort()
        }

    # Recording.

    def _recording(self) -> bool:
        every, done = self.settings.record_every, self.progress.round
        return every is not None and (done % every == 0 or done == self.stage.rounds)

    def _measure(self) -> None:
        progress = self.progress
        label = Label(progress.stage, progress.round, 0, progress.attempt)
        requests = self._requests(label, 0, to_arrays(self.server))
        values: dict[str, float] = {}
        for site, reply in self.attendance.ask("measure", requests, self.settings.reply_timeout).items():
            value = reply.content.get("objective")
            if isinstance(value, float) and np.isfinite(value):
                values[site] = value
        weights = np.array([self._weight(site) for site in values])
        mean = float(np.average([*values.values()], weights=weights)) if values else float("nan")
        row = {
            "stage": progress.stage, "round": progress.round, "step": progress.round * self.stage.algorithm.local_steps,
            "objective": repr(mean), "sites": len(values), "bytes_down": progress.bytes_down, "bytes_up": progress.bytes_up,
            "seconds": f"{time.perf_counter() - self.began:.3f}",
        }  # fmt: skip
        self.record.note("history", [row])

    def _save(self) -> None:
        progress = self.progress
        progress.server = to_arrays(self.server)
        progress.seconds = time.perf_counter() - self.began
        self.record.save(progress)
        there = [site for site in self.settings.sites if site in self.ready and site not in progress.away]
        self.record.status(
            "running", stage=self.stage.name, round=progress.round, rounds=self.stage.rounds, seconds=progress.seconds,
            bytes_down=progress.bytes_down, bytes_up=progress.bytes_up, sites=there, away=progress.away,
        )  # fmt: skip

    def _finish(self) -> list[Tree]:
        progress = self.progress
        request = {"agreed": progress.agreed, "answers": progress.answers}
        reports = self.attendance.ask_numbers("finish", request, "the report")
        if not progress.answers:  # nothing was trained: the reports are what the run is for
            self.attendance.enough([*reports], "reported")
        self.record.complete(progress.answers, reports)
        progress.finished = True
        progress.seconds = time.perf_counter() - self.began
        self.record.save(progress)
        stayed = f"; without {', '.join(progress.away)} at the end" if progress.away else ""
        sentence = f"complete after {progress.seconds:.1f} s{stayed}"
        self.record.say(sentence)
        self.record.status("complete", sentence, seconds=progress.seconds, away=progress.away)
        return self._answers()

    def _weight(self, site: str) -> float:
        return float(self.rows[site]) if self.stage.weights == "samples" else 1.0


def _number(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else ""
