"""Who takes part in a run: asking the sites, checking what comes back, and deciding whether enough of them answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedbilevel.calculus import Tree
from fedbilevel.federation.protocol.errors import BadReply, RunFailed, TooFewSites
from fedbilevel.federation.protocol.payload import named_arrays, to_tree
from fedbilevel.federation.protocol.record import Progress, Record
from fedbilevel.federation.protocol.settings import JobSettings


class Reply(NamedTuple):
    content: dict[str, Any]
    seconds: float


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
                self.refuse(site, str(reply.content["refused"]))
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
                raise BadReply(str(reply.content["refused"]))
            accepted[site] = to_tree(reply.content.get("arrays"), like, "its reply")
        except BadReply as error:
            self.refuse(site, str(error))
            return f"refused: {error}"
        if self._back(site):
            self.record.say(f"{site} is back")
        if isinstance(reply.content.get("note"), str):
            self.record.say(f"{site} {reply.content['note']}")
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
            raise RunFailed(f"{sentence} " + " ".join(f"{site}: {why}." for site, why in refusals.items()))
        raise TooFewSites(sentence)
