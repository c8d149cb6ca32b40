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
from fedbilevel.engines.fixed import check_summed, scale_of
from fedbilevel.engines.stages import REASONS, TOGETHER, Expected
from fedbilevel.federation.protocol.compiled import Compiled, items_of
from fedbilevel.federation.protocol.payload import Arrays, BadReply, share_of, size_of, stacked, to_arrays, to_tree
from fedbilevel.federation.protocol.program import Program, Stage, answer_trees
from fedbilevel.federation.protocol.record import Progress, Record
from fedbilevel.federation.protocol.settings import JobSettings, RunFailed, TooFewSites
from fedbilevel.federation.protocol.sums import Sums
from fedbilevel.federation.protocol.vault import NOTES, Label
from fedbilevel.plan import Plan, Repeat, ServerStep

ROWS = {"rows", "statistics/rows"}
"""What sites call their numbers of rows."""
MOST = 10**12
BEARABLE = 3
"""How many replies of a site may be bad one after the other before it is left out for a while..."""
LONGEST = 64
"""...of so many rounds at most."""


class Reply(NamedTuple):
    """``fault``: what the channel says of a reply that could not be read."""

    content: dict[str, Any]
    seconds: float
    fault: str = ""

    def check(self) -> None:
        """`BadReply`, in our own words, where it could not be read or is a refusal: what a site writes is not passed on."""
        if self.fault:
            raise BadReply(self.fault)
        if "refused" in self.content:
            told = self.content["refused"]
            known = isinstance(told, str) and told in REASONS
            raise BadReply(REASONS[told] if known else "It refused without a reason we know.")


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
        self.faults: dict[str, int] = {}
        """How many replies of a site were bad one after the other..."""
        self.resting: dict[str, int] = {}
        """...and for how many further rounds it is left out."""

    def rested(self) -> set[str]:
        """Those to be left out of a new round."""
        resting, self.resting = {*self.resting}, {site: left - 1 for site, left in self.resting.items() if left > 1}
        return resting

    def ask(self, task: str, requests: dict[str, dict[str, Any]], seconds: float) -> dict[str, Reply]:
        """Those who have not answered of late are asked too, and waited for once they come for their request."""
        told = {site: {"digest": self.settings.digest, **request} for site, request in requests.items()}
        awaited = {site for site in told if site not in self.progress.away}
        return self.channel.ask(task, told, awaited or set(told), seconds)

    def ask_all(self, task: str, request: dict[str, Any]) -> dict[str, Reply]:
        """Ask every site of the job the same; the answers that are no refusals, in the order of the sites."""
        return self.ask_each(task, dict.fromkeys(self.here(), request))

    def here(self) -> list[str]:
        there = self.channel.sites()
        return [site for site in self.settings.sites if site in there]

    def ask_each(
        self, task: str, requests: dict[str, dict[str, Any]], seconds: float | None = None
    ) -> dict[str, Reply]:
        """Ask every site its own; the answers that are no refusals."""
        seconds = self.settings.start_timeout if seconds is None else seconds
        replies = self.ask(task, requests, seconds)
        answered: dict[str, Reply] = {}
        for site in requests:
            reply = replies.get(site)
            if reply is None:
                if self._missed(site):
                    self.record.say(f"{site} did not answer ({task}) within {seconds:g} s")
                continue
            try:
                reply.check()
            except BadReply as error:
                self._missed(site)
                self.refuse(site, str(error))
                continue
            answered[site] = reply
            self._back(site)
        return answered

    def ask_numbers(
        self, task: str, request: dict[str, Any], what: str, expected: dict[str, Expected], least: int
    ) -> dict[str, dict[str, np.ndarray]]:
        """The same, for the ``expected`` numbers in the answers; a site that tells of fewer than ``least`` rows is refused.

        Reports may be empty.
        """
        return self.numbers_in(task, self.ask_all(task, request), what, expected, least)

    def numbers_in(
        self, task: str, replies: Mapping[str, Reply], what: str, expected: dict[str, Expected], least: int
    ) -> dict[str, dict[str, np.ndarray]]:
        numbers = {}
        for site, reply in replies.items():
            told = reply.content.get("numbers")
            try:
                numbers[site] = share_of(told, {} if task == "finish" and told == {} else expected, what)
                for name in ROWS & numbers[site].keys():
                    check_rows(numbers[site][name], least)
            except BadReply as error:
                numbers.pop(site, None)
                self.refuse(site, str(error))
        return numbers

    def accept(self, site: str, reply: Reply | None, like: Tree, accepted: dict[str, Tree]) -> str:
        """Check a reply; what happened, in a word or a sentence."""
        if reply is None:
            if self._missed(site):
                self.record.say(f"{site} did not answer within {self.settings.reply_timeout:g} s; going on without it")
            return "no answer"
        try:
            reply.check()
            accepted[site] = to_tree(reply.content.get("arrays"), like, "its reply")
        except BadReply as error:
            self.refuse(site, str(error))
            bad = self.faults[site] = self.faults.get(site, 0) + 1
            if bad >= BEARABLE and self.settings.needed < len(self.settings.sites):
                rounds = self.resting[site] = min(2 ** (bad - BEARABLE + 1), LONGEST)
                self.record.say(f"{site} is left out of the next {rounds} rounds: {bad} bad replies in a row")
            return f"refused: {error}"
        self.faults.pop(site, None)
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
        raise TooFewSites(sentence, missing)


class Coordinator:
    """One run.  ``run()`` goes on from wherever the record says it was, to the end."""

    def __init__(
        self, settings: JobSettings, program: Program, record: Record, channel: Channel, least: int = 1
    ) -> None:
        """``least``: sites that tell of fewer rows are refused, since steps and batches suit the smallest site."""
        self.settings, self.program, self.record, self.channel = settings, program, record, channel
        self.least = least
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
        self.sums: Sums | None = None
        if self.settings.secured:
            self.record.say(f"secure sums of {self.settings.needed} sites or more: no single reply is seen")
            self.sums = Sums(self.settings, self.attendance, self.progress.attempt)
            self.sums.meet()
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
            if self.sums is None:
                expected = self.program.expected(number)
                told = self.attendance.ask_numbers("survey", request, "the survey", expected, self.least)
            else:
                told = self.sums.survey(request, self.program, self.least)
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
        if self.sums is not None:
            check_summed(stage.algorithm, len(self.settings.sites), getattr(self.program, "single", None))
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
        progress.stage, progress.round, progress.began, progress.total = progress.stage + 1, 0, False, 0.0
        progress.since, progress.packed, progress.parcels, progress.server = {}, {}, {}, []
        self.record.save(progress)
        self.record.say(f"stage {stage.name} is done: {stage.rounds} rounds")

    def _prepare(self) -> None:
        """A site that does not answer in time is prepared with the first request that it takes (`_requests`)."""
        self.preparing = {
            "stage": self.progress.stage, "agreed": self.progress.agreed, "answers": self.progress.answers,
        }  # fmt: skip
        self.ready: set[str] = set()
        requests = dict.fromkeys(self.attendance.here(), self.preparing)
        summed = self.sums is not None and self.stage.weights == "samples" and not self.progress.total
        if self.sums is not None and summed:
            requests = self.sums.enclosed(requests, f"rows/{self.progress.stage}")
        answered = self.attendance.ask_each("prepare", requests)
        self.declined = {*self.attendance.refusals}
        for site, reply in answered.items():
            self._admit(site, reply)
        self.attendance.enough([site for site in self.settings.sites if site in self.ready], "are ready")
        if self.sums is not None and summed:
            self.progress.total = self.sums.rows(answered, self.progress.stage)

    def _admit(self, site: str, reply: Reply) -> bool:
        """Whether a site that has prepared itself may take part in the stage."""
        rows = reply.content.get("rows")
        try:
            if self.sums is not None:
                pass  # only the sum is told
            elif isinstance(rows, int) and 0 < rows < MOST:
                check_rows(np.array(rows), self.least)
                self.rows[site] = rows
            elif self.stage.weights == "samples":
                raise BadReply("did not tell how many rows it has, which the averages are weighted by")
        except BadReply as error:
            self.attendance.refuse(site, str(error))
            self.declined.add(site)
            return False
        self.ready.add(site)
        return True

    def _round(self) -> None:
        """All phases of one round; the sites that answer the first one are its cohort."""
        progress = self.progress
        self.cohort: set[str] | None = None
        there = {*self.channel.sites()} - self.declined
        self.spared = self.attendance.rested() & there if self.sums is None else set()  # a sum is asked for once
        self.asked = there - self.spared
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
        """Those who have answered every phase of the round so far; before the first one all who are asked."""
        return self.asked if self.cohort is None else self.cohort

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
        like = wanted = self.compiled.reply_like(item)
        answers: dict[str, Tree] = {}
        before = len(rows)
        while True:
            requests = self._requests(label, item, arrays)
            if self.sums is not None:
                requests = self.sums.enclosed(requests, f"work/{label.stage}/{label.round}/{label.ordinal}")
                wanted = self.sums.masked_like(like)
            replies = self.attendance.ask("work", requests, settings.reply_timeout)
            for site, request in requests.items():
                reply = replies.get(site)
                outcome = self.attendance.accept(site, reply, wanted, answers)
                if site in answers and site not in self.ready and not self._admit(site, replies[site]):
                    del answers[site]
                    outcome = "refused: its number of rows"
                down = size_of(arrays) + size_of(request["parcel"] or [])
                up = size_of(to_arrays(answers[site])) if site in answers else 0
                rows.append(
                    {
                        "stage": label.stage, "round": label.round, "ordinal": ordinal, "phase": self.compiled.phase(item).name,
                        "site": site, "outcome": outcome, "bytes_down": down, "bytes_up": up,
                        "seconds": "" if reply is None else f"{reply.seconds:.6f}",
                        "site_seconds": "" if reply is None else _number(reply.content.get("seconds")),
                        "at": f"{time.perf_counter() - self.began:.6f}",
                    }
                )  # fmt: skip
            if len(answers) >= settings.needed or self.cohort is not None or not self.spared:
                break
            self.asked, self.spared = self.spared, set()  # without those that were to be left out it is too few
        self.attendance.enough([*answers], f"answered in round {label.round + 1} of {self.stage.name}")
        if self.sums is None:
            weights = np.array([self._weight(site) if site in answers else 0.0 for site in settings.sites])
            replied = stacked([answers.get(site) for site in settings.sites], like)
        else:
            weights = np.ones(1)
            replied = stacked([self.sums.mean(answers, like)], like)
            answers = {site: answers[site] for site in self.sums.counted}
        for row in rows[before:]:
            more = [0, 0] if self.sums is None else self.sums.costs[row["site"]]
            if row["outcome"].startswith("answered") and row["site"] not in answers:
                row["outcome"] = "lost before the sum"
            row["bytes_down"], row["bytes_up"] = row["bytes_down"] + more[0], row["bytes_up"] + more[1]
            progress.bytes_down += row["bytes_down"]
            progress.bytes_up += row["bytes_up"]
        lost = self._cohort() - answers.keys()
        if self.cohort is not None and lost:
            self.record.say(f"round {label.round + 1} goes on without {', '.join(sorted(lost))}")
        self.cohort = set(answers)
        self.server, parcels, finite = self.compiled.absorb(
            self.server, replied, weights, label.round, ordinal, item=item
        )
        if not finite:
            largest = {site: max((float(np.abs(array).max()) for array in to_arrays(tree) if array.size), default=0.0)
                       for site, tree in answers.items()}  # fmt: skip
            most = max(largest, key=lambda site: largest[site])
            whose = f" The largest number came from {most}: {largest[most]:.3g}." if self.sums is None else ""
            raise RunFailed(
                f"The run diverged in round {label.round + 1} of {self.stage.name}: the coordinator's update gave a NaN or an "
                f"infinity. Try smaller steps.{whose}"
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
                "scale": self._scale(),
                "parcel": progress.packed.get(site),
                "parcel_item": progress.parcels.get(site),
                **({} if site in self.ready else {"prepare": self.preparing}),
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
        if self.sums is not None:
            mean, count = self.sums.measure(requests, f"measure/{label.stage}/{label.round}")
        else:
            values: dict[str, float] = {}
            for site, reply in self.attendance.ask("measure", requests, self.settings.reply_timeout).items():
                value = reply.content.get("objective")
                if isinstance(value, float) and np.isfinite(value):
                    values[site] = value
            weights = np.array([self._weight(site) for site in values])
            mean = float(np.average([*values.values()], weights=weights)) if values else float("nan")
            count = len(values)
        row = {
            "stage": progress.stage, "round": progress.round, "step": progress.round * self.stage.algorithm.local_steps,
            "objective": repr(mean), "sites": count, "bytes_down": progress.bytes_down, "bytes_up": progress.bytes_up,
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
        if self.sums is not None and "report" in getattr(self.program, "summed", ()):
            total, count = self.sums.report(request, self.program)
            self.record.say(f"{count} sites tell their report, in sum")
            reports = {TOGETHER: total} if count else {}
            if not count:
                self.attendance.ask_all("finish", request)
        else:
            expected = self.program.expected(None)
            reports = self.attendance.ask_numbers("finish", request, "the report", expected, self.least)
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

    def _scale(self) -> float:
        """Of the shares of a secure sum."""
        return scale_of(self.progress.total or len(self.settings.sites))


def check_rows(told: np.ndarray, least: int) -> None:
    """Numbers of rows must be ``least`` at least; where there need not be any, 0."""
    if not ((told == 0) | ((told >= least) & (told < MOST))).all():
        raise BadReply(f"tells of fewer rows than the {least} that the coordinator works with (its minimum_rows)")


def _number(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) and 0 <= value < 1e7 else ""
